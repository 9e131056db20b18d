"""Objects of several named buffers and tensors, stored together and read as a whole, by member, or by rows of a member.

Each is a bundle: its buffers in chunks, then a manifest, under ``PREFIX/PARTITION/ID/``. The manifest is put last, so that a
bundle that can be seen is whole; a put that fails removes what it has put. Numbers of types and shapes are in the bundle's
metadata, in JSON, and nothing in it is ever executed. Batches of ``DataProto`` are not supported.
"""

import copy
import ctypes
import json
import math
import uuid
from dataclasses import dataclass
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import numpy

from tidepool import tensors
from tidepool._native import read_memory, write_memory

from ._codes import OBJECT_NOT_FOUND, OK
from ._tensors import _framework
from ._types import ReplicateConfig

DEFAULT_BUNDLE_CHUNK_BYTES = 64 << 20
MISSING_OBJECT_ERROR = OBJECT_NOT_FOUND
# Names in metadata that are not the caller's.
STRUCTURED_FIELD_SPECS_KEY = "__mooncake_structured_fields__"
_WRAPPED = "__mooncake_wrapped_object__"


@dataclass(frozen=True)
class BundleTransferPolicy:
    """Checked, and nothing else: the chunks of a bundle are always put by one call, from where they lie."""

    max_inflight_put: int = 1
    put_mode: str = "auto"
    copy_mode: str = "auto"


@dataclass
class RemoteBundleRef:
    """A bundle that is stored. ``{"manifest_key": ..}`` stands for one too, in another process."""

    manifest_key: str
    manifest: Dict[str, Any]


@dataclass(frozen=True)
class StructuredObjectPayload:
    """Metadata, of what JSON has, and named members: tensors, arrays, bytes."""

    metadata: Optional[Mapping[str, Any]] = None
    buffers: Optional[Mapping[str, Any]] = None

    def __post_init__(self) -> None:
        if self.buffers is None:
            raise TypeError("StructuredObjectPayload requires buffers")
        if self.metadata is None:
            object.__setattr__(self, "metadata", {})


@dataclass
class StructuredObjectResult:
    """What was read."""

    metadata: Dict[str, Any]
    objects: Dict[str, Any]


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows of a member, as of ``range(start, end, step)``; the axis is 0."""

    axis: int
    start: int
    end: int
    step: int = 1


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What is to be read of a bundle."""

    ref: Union[RemoteBundleRef, Mapping[str, Any]]
    member_names: Optional[Tuple[str, ...]] = None
    member_slices: Tuple[Tuple[str, StructuredMemberSlice], ...] = ()

    def select_members(self, names: Optional[Sequence[str]]) -> "StructuredObjectReadSpec":
        """The same of these members only; of all, for None."""
        chosen = None if names is None else tuple(names)
        return StructuredObjectReadSpec(self.ref, chosen, self.member_slices)

    def slice_member(self, name: str, axis: int, start: int, end: int, step: int = 1) -> "StructuredObjectReadSpec":
        """The same with only these rows of a member."""
        slices = {**dict(self.member_slices), name: StructuredMemberSlice(axis, start, end, step)}
        return StructuredObjectReadSpec(self.ref, self.member_names, tuple(slices.items()))

    def member_slice(self, name: str) -> Optional[StructuredMemberSlice]:
        """The rows that are asked for of a member."""
        return dict(self.member_slices).get(name)


class TensorObjectBuffer(NamedTuple):
    """Memory with a tensor's header and elements, or room for them."""

    ptr: int
    size: int
    owner: Any = None


def tensor_object_buffer(
    ptr: int, size: int, owner: Any = None, batch_size: Optional[int] = None
) -> TensorObjectBuffer:
    """A tensor at an address, header and elements, to be stored; or room for one that is read."""
    return TensorObjectBuffer(int(ptr), int(size), owner)


def raw_destination(ptr: int, size: int, owner: Any = None, *, pre_registered: bool = False) -> TensorObjectBuffer:
    """Room for a tensor that is read, header and elements."""
    return TensorObjectBuffer(int(ptr), int(size), owner)


class _Payload(NamedTuple):
    """Bytes to store, where they lie, and what keeps them there."""

    address: int
    length: int
    owner: Any


class _Rows(NamedTuple):
    """Which rows of an array are meant: ``count`` of them, from ``first`` on, ``step`` apart; and which bytes have them all."""

    first: int
    count: int
    step: int
    row_bytes: int

    @property
    def cover(self) -> int:
        return (self.count - 1) * self.step + 1 if self.count else 0


class MooncakeBundleTransfer:
    """Stores and reads bundles by a ``MooncakeDistributedStore``. May be used by several threads."""

    def __init__(
        self,
        store: Any,
        key_prefix: str = "bundle",
        default_chunk_bytes: int = DEFAULT_BUNDLE_CHUNK_BYTES,
        buffer_pool: Any = None,
    ) -> None:
        """``buffer_pool`` is not used: memory needs no registration."""
        self.store = store
        self.key_prefix = _segments(key_prefix, "key_prefix")
        self.default_chunk_bytes = _chunk_bytes(default_chunk_bytes)

    # Bundles of bytes.

    def put_bundle(
        self,
        meta: Any,
        buffers: Mapping[str, Any],
        partition: str = "default",
        chunk_bytes: Optional[int] = None,
        policy: Optional[BundleTransferPolicy] = None,
        max_inflight_put: Optional[int] = None,
        config: Optional[ReplicateConfig] = None,
    ) -> RemoteBundleRef:
        """Stores buffers and bytes that say what they are. RuntimeError names the key and code of what failed."""
        payloads = {name: _payload(value) for name, value in buffers.items()}
        return self._put(_payload(meta), payloads, partition, chunk_bytes, policy, max_inflight_put, config)

    def remove_bundle(self, ref: Union[RemoteBundleRef, Mapping[str, Any]]) -> None:
        """Removes a bundle; what of it is gone already is no error."""
        try:
            manifest = self._manifest(ref)
        except KeyError:
            return
        keys = [key for spec in (manifest["meta"], *manifest["buffers"].values()) for key in _keys_of(spec)]
        # The manifest first: what can be seen is whole.
        self._remove([_key_of(ref, manifest), *keys], strict=True)

    # Structured objects.

    def put_structured_object(
        self,
        payload: StructuredObjectPayload,
        partition: str = "default",
        chunk_bytes: Optional[int] = None,
        policy: Optional[BundleTransferPolicy] = None,
        max_inflight_put: Optional[int] = None,
        config: Optional[ReplicateConfig] = None,
    ) -> RemoteBundleRef:
        """Stores metadata and members: tensors and arrays with type and shape, anything else with a buffer as bytes."""
        encoded = {name: _encode(value) for name, value in payload.buffers.items()}
        fields = {name: spec for name, (spec, _) in encoded.items()}
        metadata = {**payload.metadata, STRUCTURED_FIELD_SPECS_KEY: fields}
        meta = _payload(json.dumps(metadata, allow_nan=False).encode())
        payloads = {name: data for name, (_, data) in encoded.items()}
        return self._put(meta, payloads, partition, chunk_bytes, policy, max_inflight_put, config)

    def put_object(
        self,
        obj: Any,
        partition: str = "default",
        chunk_bytes: Optional[int] = None,
        policy: Optional[BundleTransferPolicy] = None,
        max_inflight_put: Optional[int] = None,
        config: Optional[ReplicateConfig] = None,
    ) -> RemoteBundleRef:
        """Stores a mapping of members, or a single tensor, array or buffer."""
        is_mapping = isinstance(obj, Mapping)
        payload = StructuredObjectPayload({} if is_mapping else {_WRAPPED: True}, obj if is_mapping else {"value": obj})
        return self.put_structured_object(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def get_object(self, ref: Union[RemoteBundleRef, Mapping[str, Any]]) -> Any:
        """What ``put_object`` stored."""
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(_WRAPPED) else result.objects

    def read_spec(self, ref: Union[RemoteBundleRef, Mapping[str, Any]]) -> StructuredObjectReadSpec:
        """A read of all of an object, to be narrowed."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec: StructuredObjectReadSpec) -> StructuredObjectResult:
        """Reads what a spec says. KeyError: no such bundle or member; ValueError: no such rows; RuntimeError: a chunk can't
        be read."""
        return self.materialize_into(spec, None)

    def materialize_into(
        self, spec: StructuredObjectReadSpec, destinations: Optional[Mapping[str, Any]]
    ) -> StructuredObjectResult:
        """The same into memory that is there: for an array one of the same type and shape, contiguous and writable; for a
        tensor a ``tensor_object_buffer`` or ``raw_destination``, which stands for it in the result then."""
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("the spec selects no members")
        manifest = self._manifest(spec.ref)
        metadata = json.loads(bytes(self._read(manifest["meta"], 0, manifest["meta"]["bytes"])))
        fields, buffers = metadata.get(STRUCTURED_FIELD_SPECS_KEY, {}), manifest["buffers"]
        names = list(buffers) if spec.member_names is None else list(spec.member_names)
        missing = [name for name in names if name not in buffers]
        if missing:
            raise KeyError(f"unknown bundle buffers: {missing}")
        destinations = destinations or {}
        objects = {}
        for name in names:
            field = fields.get(name, {"encoding": "bytes"})
            objects[name] = self._member(name, buffers[name], field, spec.member_slice(name), destinations.get(name))
        return StructuredObjectResult(metadata, objects)

    @staticmethod
    def release_result(result: Any) -> None:
        """Nothing to do: results own their memory."""

    # How it is written.

    def _put(
        self,
        meta: _Payload,
        payloads: Mapping[str, _Payload],
        partition: str,
        chunk_bytes: Optional[int],
        policy: Optional[BundleTransferPolicy],
        max_inflight: Optional[int],
        config: Optional[ReplicateConfig],
    ) -> RemoteBundleRef:
        _check_policy(policy, max_inflight)
        chunk = _chunk_bytes(self.default_chunk_bytes if chunk_bytes is None else chunk_bytes)
        identity = f"{_segments(partition, 'partition')}/{uuid.uuid4().hex}"
        base = f"{self.key_prefix}/{identity}"
        named = {"meta": meta, **{f"buffer/{_segments(name, 'buffer name')}": data for name, data in payloads.items()}}
        specs = {name: _spec(f"{base}/{name}", data.length, chunk) for name, data in named.items()}
        manifest = {
            "version": 1,
            "layout": "bundle",
            "object_id": identity,
            "meta": specs["meta"],
            "buffers": {name: specs[f"buffer/{name}"] for name in payloads},
        }
        rows = [
            (key, named[name].address + start, length)
            for name, spec in specs.items()
            for key, start, length in _chunks(spec)
        ]
        text = _payload(json.dumps(manifest).encode())
        manifest_key = f"{base}/manifest"
        config, group = _grouped(config)
        try:
            self._put_rows(rows, config, group)
            self._put_rows([(manifest_key, text.address, text.length)], config, group)
        except BaseException:
            self._remove([manifest_key, *(key for key, _, _ in rows)], strict=False)
            raise
        return RemoteBundleRef(manifest_key, manifest)

    def _put_rows(self, rows: Sequence[Tuple[str, int, int]], config: ReplicateConfig, group: str) -> None:
        if not rows:
            return
        keys, addresses, lengths = map(list, zip(*rows))
        config.group_ids = [group] * len(keys)
        codes = self.store.batch_put_from(keys, addresses, lengths, config)
        for key, code in zip(keys, codes):
            if code != OK:
                raise RuntimeError(f"put failed for {key}: {code}")

    def _remove(self, keys: Sequence[str], strict: bool) -> None:
        for key, code in zip(keys, self.store.batch_remove(list(keys), True)):
            if strict and code not in (OK, OBJECT_NOT_FOUND):
                raise RuntimeError(f"remove failed for {key}: {code}")

    # How it is read.

    def _manifest(self, ref: Union[RemoteBundleRef, Mapping[str, Any]]) -> Dict[str, Any]:
        given = ref.manifest if isinstance(ref, RemoteBundleRef) else ref.get("manifest")
        if not given:
            key = _key_of(ref, None)
            text = self.store.get(key)
            if not text:
                raise KeyError(f"there is no bundle {key}")
            try:
                given = json.loads(text)
            except ValueError:
                raise ValueError(f"{key} is no bundle") from None
        if not _is_manifest(given):
            raise ValueError("the manifest is none of a bundle")
        return given

    def _read(self, spec: Mapping[str, Any], start: int, length: int) -> bytearray:
        target = bytearray(length)
        if length:
            owner = (ctypes.c_ubyte * length).from_buffer(target)
            self._read_to(ctypes.addressof(owner), spec, start, length)
            del owner
        return target

    def _read_to(self, address: int, spec: Mapping[str, Any], start: int, length: int) -> None:
        """Reads a range of a buffer to an address: whole chunks straight, parts of others by range."""
        end = start + length
        whole, parts = [], []
        for key, first, size in _chunks(spec):
            low, high = max(first, start), min(first + size, end)
            if low < high:
                row = key, address + low - start, low - first, high - low
                (whole if high - low == size else parts).append(row)
        keys = [key for key, *_ in whole]
        lengths = self.store.batch_get_into(keys, [row[1] for row in whole], [row[3] for row in whole]) if whole else []
        for key, place, offset, size in parts:
            lengths += self.store.get_into_ranges([place], [[key]], [[[0]]], [[[offset]]], [[[size]]])[0][0]
        for (key, *_, size), found in zip([*whole, *parts], lengths):
            if found != size:
                raise RuntimeError(f"get failed for {key}: {found}")

    def _member(
        self,
        name: str,
        spec: Mapping[str, Any],
        field: Mapping[str, Any],
        chosen: Optional[StructuredMemberSlice],
        destination: Any,
    ) -> Any:
        if field.get("encoding") == "bytes":
            if chosen is not None or destination is not None:
                raise ValueError(f"{name} is bytes, which are read as a whole, to memory of their own")
            return bytes(self._read(spec, 0, spec["bytes"]))
        header = _header(name, spec, field)
        rows = _rows(name, header, chosen)
        wanted = header._replace(
            shape=(rows.count, *header.shape[1:]) if header.shape else (), data_bytes=rows.count * rows.row_bytes
        )
        wanted = wanted._replace(whole_shape=wanted.shape)
        if field["encoding"] == "ndarray":
            return self._array(name, spec, wanted, rows, destination)
        if destination is None:
            return tensors.build(wanted, self._elements(spec, wanted, rows), 0, _framework())
        if not isinstance(destination, TensorObjectBuffer):
            raise ValueError(f"{name} is a tensor: give a tensor_object_buffer or raw_destination")
        if destination.size < tensors.HEADER_BYTES + wanted.data_bytes:
            needed = tensors.HEADER_BYTES + wanted.data_bytes
            raise ValueError(f"{name}: tensor destination has {destination.size} bytes, expected at least {needed}")
        write_memory(destination.ptr, tensors.pack(wanted))
        if rows.step == 1 and wanted.data_bytes:
            first = rows.first * rows.row_bytes
            self._read_to(destination.ptr + tensors.HEADER_BYTES, spec, first, wanted.data_bytes)
        elif wanted.data_bytes:
            write_memory(destination.ptr + tensors.HEADER_BYTES, self._elements(spec, wanted, rows))
        return destination

    def _elements(self, spec: Mapping[str, Any], wanted: tensors.Header, rows: _Rows) -> bytearray:
        covering = self._read(spec, rows.first * rows.row_bytes, rows.cover * rows.row_bytes)
        if rows.step == 1 or not covering:
            return covering
        cells = numpy.frombuffer(covering, numpy.uint8).reshape(rows.cover, rows.row_bytes)
        return bytearray(cells[:: rows.step].tobytes())

    def _array(
        self, name: str, spec: Mapping[str, Any], wanted: tensors.Header, rows: _Rows, destination: Any
    ) -> Any:
        if destination is None:
            return tensors.build(wanted, self._elements(spec, wanted, rows), 0, "numpy")
        like = tensors.build(wanted._replace(shape=(0,), data_bytes=0), b"", 0, "numpy")
        if not isinstance(destination, numpy.ndarray):
            raise ValueError(f"{name} is an array: give an array")
        if destination.dtype != like.dtype or destination.shape != wanted.shape:
            have = f"{destination.dtype} {destination.shape}"
            raise ValueError(f"{name}: destination is {have}, expected {like.dtype} {wanted.shape}")
        if not destination.flags.c_contiguous or not destination.flags.writeable:
            raise ValueError(f"{name}: destination is not contiguous and writable")
        if rows.step == 1 and wanted.data_bytes:
            self._read_to(destination.ctypes.data, spec, rows.first * rows.row_bytes, wanted.data_bytes)
        elif wanted.data_bytes:
            destination[...] = tensors.build(wanted, self._elements(spec, wanted, rows), 0, "numpy")
        return destination


def _encode(value: Any) -> Tuple[Dict[str, Any], _Payload]:
    """What a member is, and its bytes."""
    if isinstance(value, TensorObjectBuffer):
        header = tensors.unpack(read_memory(value.ptr, min(value.size, tensors.HEADER_BYTES)))
        if tensors.HEADER_BYTES + header.data_bytes > value.size:
            raise ValueError("the tensor at that address is longer than its memory")
        field = {"encoding": "torch_tensor", "dtype": header.type_name, "shape": list(header.shape)}
        return field, _Payload(value.ptr + tensors.HEADER_BYTES, header.data_bytes, value.owner)
    value = numpy.asarray(value) if isinstance(value, numpy.generic) else value
    is_array = isinstance(value, numpy.ndarray)
    if not is_array and not hasattr(value, "data_ptr"):
        return {"encoding": "bytes"}, _payload(value)
    number, shape, data = tensors.elements(value)
    header = tensors.Header(number, shape, 0, shape)
    encoding = "ndarray" if is_array else "torch_tensor"
    return {"encoding": encoding, "dtype": header.type_name, "shape": list(shape)}, _payload(data)


def _payload(value: Any) -> _Payload:
    """Bytes of anything with a contiguous buffer. TypeError, BufferError."""
    view = memoryview(value).cast("B")
    if not view.nbytes:
        return _Payload(0, 0, None)
    array = numpy.frombuffer(view, numpy.uint8)
    return _Payload(array.ctypes.data, view.nbytes, array)


def _header(name: str, spec: Mapping[str, Any], field: Mapping[str, Any]) -> tensors.Header:
    """The header of a stored tensor or array. ValueError if its parts don't fit each other."""
    number, shape = tensors.number_of(str(field.get("dtype"))), field.get("shape")
    is_shape = isinstance(shape, list) and all(type(extent) is int and extent >= 0 for extent in shape)
    if field.get("encoding") not in ("ndarray", "torch_tensor") or number is None or not is_shape:
        raise ValueError(f"{name}: its type or shape is unknown")
    header = tensors.Header(number, tuple(shape), spec["bytes"], tuple(shape))
    if math.prod(shape) * header.element_bytes != spec["bytes"]:
        raise ValueError(f"{name}: its shape does not fit its length")
    return header


def _rows(name: str, header: tensors.Header, chosen: Optional[StructuredMemberSlice]) -> _Rows:
    if not header.shape:
        if chosen is not None:
            raise ValueError(f"{name} has no rows")
        return _Rows(0, 1, 1, header.data_bytes)
    row_bytes = math.prod(header.shape[1:]) * header.element_bytes
    if chosen is None:
        return _Rows(0, header.shape[0], 1, row_bytes)
    if chosen.axis != 0:
        raise ValueError(f"{name}: slices are along axis 0")
    if chosen.step < 1 or not 0 <= chosen.start <= chosen.end <= header.shape[0]:
        raise ValueError(f"{name}: there are no rows {chosen.start}:{chosen.end}:{chosen.step} of {header.shape[0]}")
    return _Rows(chosen.start, len(range(chosen.start, chosen.end, chosen.step)), chosen.step, row_bytes)


def _spec(key: str, length: int, chunk: int) -> Dict[str, Any]:
    return {"key": key, "bytes": length, "chunk_bytes": chunk}


def _chunks(spec: Mapping[str, Any]) -> Iterator[Tuple[str, int, int]]:
    """Key, first byte and length of each chunk; none of a buffer without bytes."""
    length, chunk = spec["bytes"], spec["chunk_bytes"]
    for place, start in enumerate(range(0, length, chunk)):
        yield f"{spec['key']}/{place}", start, min(chunk, length - start)


def _keys_of(spec: Mapping[str, Any]) -> List[str]:
    return [key for key, _, _ in _chunks(spec)]


def _is_manifest(manifest: Any) -> bool:
    def is_spec(spec: Any) -> bool:
        numbers = isinstance(spec, Mapping) and (spec.get("bytes"), spec.get("chunk_bytes"))
        return bool(numbers) and all(type(n) is int for n in numbers) and numbers[0] >= 0 < numbers[1] and isinstance(spec.get("key"), str)

    if not isinstance(manifest, Mapping) or manifest.get("version") != 1 or manifest.get("layout") != "bundle":
        return False
    buffers = manifest.get("buffers")
    return isinstance(buffers, Mapping) and all(map(is_spec, (manifest.get("meta"), *buffers.values())))


def _key_of(ref: Union[RemoteBundleRef, Mapping[str, Any]], manifest: Optional[Mapping[str, Any]]) -> str:
    key = ref.manifest_key if isinstance(ref, RemoteBundleRef) else ref.get("manifest_key")
    if key is None and manifest is not None:
        key = manifest["meta"]["key"][: -len("meta")] + "manifest"
    if not isinstance(key, str) or not key:
        raise ValueError("bundle ref must include manifest_key")
    return key


def _grouped(config: Optional[ReplicateConfig]) -> Tuple[ReplicateConfig, str]:
    """A config to put chunks with, and the group of them all: the one that is given, else one of the bundle's own."""
    config = ReplicateConfig() if config is None else copy.copy(config)
    given = [config.group_ids] if isinstance(config.group_ids, str) else list(config.group_ids or [])
    if len(given) > 1 or not all(isinstance(group, str) for group in given):
        raise ValueError("config.group_ids has one group at most, which is that of the whole bundle")
    return config, given[0] if given else f"structured-{uuid.uuid4().hex}"


def _segments(name: str, what: str) -> str:
    """A part of a key, without slashes at its ends."""
    cleaned = name.strip("/") if isinstance(name, str) else ""
    if not cleaned:
        raise ValueError(f"{what} is a text that is not empty")
    return cleaned


def _chunk_bytes(given: int) -> int:
    if not isinstance(given, int) or given <= 0:
        raise ValueError(f"chunk_bytes is {given}: give a positive number")
    return given


def _check_policy(policy: Optional[BundleTransferPolicy], max_inflight: Optional[int]) -> None:
    policy = BundleTransferPolicy() if policy is None else policy
    inflight = policy.max_inflight_put if max_inflight is None else max_inflight
    if inflight < 1 or policy.put_mode not in ("auto", "batch", "parallel") or policy.copy_mode not in ("auto", "zero_copy", "copy"):
        raise ValueError("the transfer policy has a mode that is unknown, or no put at a time")
