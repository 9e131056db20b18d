"""Tensors by parallelism: which shard a writer stores, and which part of the whole a reader wants.

A shard is an object of its own whose header says what it is a shard of, so that a reader finds out by the first one how the
rest lies and can ask for another cut than was stored:

    KEY_tp_RANK                           one axis of tensor parallelism, as ``put_tensor_with_tp`` stores it
    KEY_dp_0_of_2_pp_1_of_4_stage_7_tp_RANK   further axes before it, in this order whatever order they are given in
    KEY_part_RANK                         a writer's partition
    KEY                                   the whole
"""

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import tidepool
from tidepool import tensors
from tidepool._native import read_memory, write_memory

from . import _codes
from ._codes import INVALID_PARAMS, OK
from ._types import ParallelAxis, ReadTarget, ReplicateConfig, TensorParallelism

Config = Optional[ReplicateConfig]
FAILURES = (tidepool.TidepoolError, BufferError, OverflowError, TypeError)
WRONG_TENSOR = (*FAILURES, AttributeError, IndexError, ValueError, RuntimeError)

# In the order in which they stand in keys.
_KINDS = ("dp", "pp", "ep", "tp")


class Cut(NamedTuple):
    """How a tensor is cut along one dimension, and one of the parts."""

    rank: int
    size: int
    dimension: int

    def within(self, length: int, whole: bool = False) -> Tuple[int, int]:
        """First and end of the part, or of everything, along a dimension of ``length``. Parts may differ by one."""
        if whole:
            return 0, length
        each, longer = divmod(length, self.size)
        first = self.rank * each + min(self.rank, longer)
        return first, first + each + (self.rank < longer)


class Layout(NamedTuple):
    """Where shards lie: their keys begin with ``prefix`` and end with their rank."""

    prefix: str
    cut: Optional[Cut]
    scoped: bool = False

    def key(self, rank: int) -> str:
        """Of the shard of a rank."""
        return self.prefix if self.cut is None else f"{self.prefix}_{rank}"


class Wrong(Exception):
    """What was asked for makes no sense."""


def tp_layout(key: str, rank: int, size: int, dimension: int) -> Layout:
    """Of shards by tensor parallelism alone."""
    return Layout(f"{key}_tp", Cut(rank, size, dimension))


def layout_of(key: str, parallelism: Any) -> Layout:
    """Of what a parallelism stands for. Raises ``Wrong``."""
    axes = list(getattr(parallelism, "axes", ()))
    if not 1 <= len(axes) <= len(_KINDS):
        raise Wrong
    words, cut, kinds = key, None, [axis.kind for axis in axes]
    for axis in sorted(axes, key=lambda axis: _KINDS.index(axis.kind) if axis.kind in _KINDS else -1):
        _check(axis, kinds)
        if axis.kind == "tp":
            words, cut = f"{words}_tp", Cut(axis.rank, axis.size, axis.split_dim)
            continue
        words = f"{words}_{axis.kind}_{axis.rank}_of_{axis.size}"
        for name, number in (("stage", axis.stage_id), ("expert", axis.expert_id)):
            if number is not None:
                words = f"{words}_{name}_{int(number)}"
    return Layout(words, cut, scoped=len(axes) > 1)


def _check(axis: ParallelAxis, kinds: List[str]) -> None:
    splits = axis.split_dim is not None
    if (
        axis.kind not in _KINDS
        or kinds.count(axis.kind) != 1
        or not 0 <= axis.rank < axis.size
        or splits != (axis.kind == "tp")
        or (axis.kind == "ep" and axis.expert_id is None)
    ):
        raise Wrong


def partition_layout(key: str, partition: Any) -> Layout:
    """Of a writer's partition: (rank, size, split_dim), or an object with these. Raises ``Wrong``."""
    try:
        rank, size, dimension = partition
    except TypeError:
        rank, size, dimension = (getattr(partition, name, None) for name in ("rank", "size", "split_dim"))
    except ValueError:
        raise Wrong from None
    if not all(type(number) is int for number in (rank, size, dimension)) or not 0 <= rank < size:
        raise Wrong
    return Layout(f"{key}_part", Cut(rank, size, dimension))


def narrow(tensor: Any, dimension: int, first: int, end: int) -> Any:
    """A view of part of a tensor."""
    return tensor[(slice(None),) * dimension + (slice(first, end),)]


def shard_rows(layout: Layout, tensor: Any, ranks: Sequence[int], uniform: bool) -> Iterator[Tuple[str, bytes, Any]]:
    """Key, header and elements of shards of a whole tensor. Raises ``Wrong`` for what can't be split so."""
    cut, shape = layout.cut, tuple(tensor.shape)
    if not 0 <= cut.dimension < len(shape) or (uniform and shape[cut.dimension] % cut.size):
        raise Wrong
    for rank in ranks:
        part = narrow(tensor, cut.dimension, *cut._replace(rank=rank).within(shape[cut.dimension]))
        yield _row(layout, rank, part, shape)


def shard_row(layout: Layout, shard: Any) -> Tuple[str, bytes, Any]:
    """The same of a shard that is one already: the others are as long."""
    cut, shape = layout.cut, list(shard.shape)
    if not 0 <= cut.dimension < len(shape):
        raise Wrong
    shape[cut.dimension] *= cut.size
    return _row(layout, cut.rank, shard, tuple(shape))


def _row(layout: Layout, rank: int, part: Any, whole: Tuple[int, ...]) -> Tuple[str, bytes, Any]:
    number, shape, data = tensors.elements(part)
    cut = layout.cut
    header = tensors.Header(number, shape, memoryview(data).nbytes, whole, cut.dimension, rank, cut.size)
    return layout.key(rank), tensors.pack(header), data


class ParallelCalls:
    """The part of the store that is about parallelism."""

    _connection: Any

    def put_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Optional[TensorParallelism] = None,
        config: Config = None,
        writer_partition: Any = None,
    ) -> int:
        """Stores a tensor, or one shard of it.

        With a TP axis alone, ``tensor`` is the shard of that rank. With further axes it is the whole, and the rank's shard is
        stored; without a TP axis it is stored as it is. A ``writer_partition`` of (rank, size, split_dim) takes that part
        of the whole. Parts are of one length: -600 otherwise, and for axes that make no sense.
        """
        return self._put_parallel(key, tensor, parallelism, config, writer_partition, upsert=False)

    def upsert_tensor_with_parallelism(
        self,
        key: str,
        tensor: Any,
        parallelism: Optional[TensorParallelism] = None,
        config: Config = None,
        writer_partition: Any = None,
    ) -> int:
        """As ``put_tensor_with_parallelism``, whether the key has a value or not."""
        return self._put_parallel(key, tensor, parallelism, config, writer_partition, upsert=True)

    def put_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Optional[TensorParallelism] = None,
        config: Config = None,
        writer_partition: Any = None,
    ) -> int:
        """As ``put_tensor_with_parallelism``, of the whole tensor at an address; with a TP axis all ranks' shards are stored."""
        return self._put_parallel_from(key, buffer_ptr, size, parallelism, config, writer_partition, upsert=False)

    def upsert_tensor_with_parallelism_from(
        self,
        key: str,
        buffer_ptr: int,
        size: int,
        parallelism: Optional[TensorParallelism] = None,
        config: Config = None,
        writer_partition: Any = None,
    ) -> int:
        """As ``put_tensor_with_parallelism_from``, whether the key has a value or not."""
        return self._put_parallel_from(key, buffer_ptr, size, parallelism, config, writer_partition, upsert=True)

    def batch_put_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Any = None,
        config: Config = None,
        writer_partitions: Any = None,
    ) -> List[int]:
        """As ``put_tensor_with_parallelism``, for many."""
        return self._put_all_parallel(keys, [tensors_list], parallelisms, config, writer_partitions, upsert=False)

    def batch_upsert_tensor_with_parallelism(
        self,
        keys: Sequence[str],
        tensors_list: Sequence[Any],
        parallelisms: Any = None,
        config: Config = None,
        writer_partitions: Any = None,
    ) -> List[int]:
        """As ``upsert_tensor_with_parallelism``, for many."""
        return self._put_all_parallel(keys, [tensors_list], parallelisms, config, writer_partitions, upsert=True)

    def batch_put_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Config = None,
        writer_partitions: Any = None,
    ) -> List[int]:
        """As ``put_tensor_with_parallelism_from``, for many."""
        return self._put_all_parallel(keys, [buffer_ptrs, sizes], parallelisms, config, writer_partitions, upsert=False)

    def batch_upsert_tensor_with_parallelism_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        parallelisms: Any = None,
        config: Config = None,
        writer_partitions: Any = None,
    ) -> List[int]:
        """As ``upsert_tensor_with_parallelism_from``, for many."""
        return self._put_all_parallel(keys, [buffer_ptrs, sizes], parallelisms, config, writer_partitions, upsert=True)

    def get_tensor_with_parallelism(self, key: str, target: Optional[ReadTarget] = None) -> Any:
        """What a target asks for: the tensor or shard as it was stored, a shard of this cut or another one, or the whole.

        None if there is none, if shards that are needed are missing or don't fit, and for a target that makes no sense.
        """
        found = self._find(key, target)
        return self.get_tensor(found) if isinstance(found, str) else found

    def batch_get_tensor_with_parallelism(self, keys: Sequence[str], targets: Any = None) -> List[Any]:
        """As ``get_tensor_with_parallelism``, for many."""
        targets = _one_each(targets, len(keys))
        if targets is None:
            return [None] * len(keys)
        return [self.get_tensor_with_parallelism(*row) for row in zip(keys, targets)]

    def get_tensor_with_parallelism_into(
        self, key: str, buffer_ptr: int, size: int, target: Optional[ReadTarget] = None
    ) -> Any:
        """As ``get_tensor_with_parallelism``, header and elements at an address; a tensor over that memory."""
        found = self._find(key, target)
        if found is None or isinstance(found, str):
            return None if found is None else self.get_tensor_into(found, buffer_ptr, size)
        header, data = tensors.encode(found)
        length = len(header) + memoryview(data).nbytes
        if length > size:
            return None
        try:
            write_memory(buffer_ptr, header)
            if length > len(header):
                write_memory(buffer_ptr + len(header), data)
        except FAILURES:
            return None
        return self._over_memory(buffer_ptr, length)

    def batch_get_tensor_with_parallelism_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], targets: Any = None
    ) -> List[Any]:
        """As ``get_tensor_with_parallelism_into``, for many."""
        targets = _one_each(targets, len(keys))
        if targets is None or not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        return [self.get_tensor_with_parallelism_into(*row) for row in zip(keys, buffer_ptrs, sizes, targets)]

    # How it is written.

    def _put_parallel(
        self, key: str, tensor: Any, parallelism: Any, config: Config, partition: Any, upsert: bool
    ) -> int:
        if parallelism is None and partition is None:
            return self._put_tensor(key, tensor, config, upsert)
        try:
            layout = _asked(key, parallelism, partition)
            if layout.cut is None:
                return self._put_tensor(layout.prefix, tensor, config, upsert)
            if parallelism is not None and not layout.scoped:
                rows = [shard_row(layout, tensor)]
            else:
                rows = list(shard_rows(layout, tensor, [layout.cut.rank], uniform=True))
        except (Wrong, *WRONG_TENSOR):
            return INVALID_PARAMS
        return self._put_rows(rows, config, upsert)

    def _put_parallel_from(
        self, key: str, pointer: int, size: int, parallelism: Any, config: Config, partition: Any, upsert: bool
    ) -> int:
        if parallelism is None and partition is None:
            return self._put_from(key, pointer, size, config, upsert)
        try:
            layout = _asked(key, parallelism, partition)
            if layout.cut is None:
                return self._put_from(layout.prefix, pointer, size, config, upsert)
            ranks = range(layout.cut.size) if partition is None else [layout.cut.rank]
            rows = list(shard_rows(layout, self._tensor_at(pointer, size), ranks, uniform=True))
        except (Wrong, *WRONG_TENSOR):
            return INVALID_PARAMS
        return self._put_rows(rows, config, upsert)

    def _put_all_parallel(
        self, keys: Sequence[str], what: List[Sequence[Any]], parallelisms: Any, config: Config, partitions: Any, upsert: bool
    ) -> List[int]:
        keys = list(keys)
        config = ReplicateConfig() if config is None else config
        each, parts = _one_each(parallelisms, len(keys)), _one_each(partitions, len(keys))
        both = parallelisms is not None and partitions is not None
        wrong = any(len(column) != len(keys) for column in what) or config.check(len(keys)) != OK
        if both or wrong or each is None or parts is None:
            return [INVALID_PARAMS] * max(1, len(keys))
        put = self._put_parallel if len(what) == 1 else self._put_parallel_from
        configs = map(config.of_key, range(len(keys)))
        return [put(*row, upsert) for row in zip(keys, *what, each, configs, parts)]

    def _put_rows(self, rows: Sequence[Tuple[str, bytes, Any]], config: Config, upsert: bool) -> int:
        config = ReplicateConfig() if config is None else config
        if self._connection is None or config.check(1) != OK:
            return INVALID_PARAMS
        options = config.options(upsert, data_type=config.data_type.value or int(tidepool.DataType.TENSOR))
        try:
            for key, header, data in rows:
                self._connection.put(False, key, [header, data], options)
        except FAILURES as error:
            return _codes.code(error)
        return OK

    def _tensor_at(self, pointer: int, size: int) -> Any:
        header = tensors.unpack(read_memory(pointer, min(size, tensors.HEADER_BYTES)))
        length = tensors.HEADER_BYTES + header.data_bytes
        if length > size:
            raise Wrong
        return tensors.decode(bytearray(read_memory(pointer, length)), self._framework())

    # How it is read.

    def _find(self, key: str, target: Optional[ReadTarget]) -> Union[str, Any, None]:
        """The key of what is asked for, or the tensor itself where it had to be put together."""
        if target is None:
            return key
        try:
            if target.parallelism is None:
                if target.mode == "as_stored":
                    return key
                layout = Layout(f"{key}_part", Cut(0, 1, 0)) if target.mode == "full" else None
            else:
                layout = layout_of(key, target.parallelism)
        except (Wrong, AttributeError, TypeError):
            return None
        if layout is None or target.mode not in ("as_stored", "shard", "full"):
            return None
        if layout.cut is None or target.mode == "as_stored":
            return layout.key(0 if layout.cut is None else layout.cut.rank)
        return self._part(key, layout, target.mode == "full")

    def _part(self, key: str, layout: Layout, whole: bool) -> Union[str, Any, None]:
        wanted = layout.cut
        stored = self._header(layout.key(0))
        if stored is None and not whole:
            # The first shard may be missing where the one that is wanted is there.
            stored = self._header(layout.key(wanted.rank))
        if stored is None:
            return self._part_of_whole(key, layout, whole)
        shape, dimension = stored.whole_shape, stored.split_dimension
        if not 0 <= dimension < len(shape) or (not whole and dimension != wanted.dimension):
            return None
        if not whole and stored.size == wanted.size:
            return layout.key(wanted.rank)
        if not whole and shape[dimension] % wanted.size:
            return None
        first, end = wanted.within(shape[dimension], whole)
        return self._assemble(layout, stored, first, end)

    def _part_of_whole(self, key: str, layout: Layout, whole: bool) -> Union[str, Any, None]:
        if whole:
            return key
        tensor, cut = self.get_tensor(key), layout.cut
        if tensor is None or not 0 <= cut.dimension < len(tensor.shape) or tensor.shape[cut.dimension] % cut.size:
            return None
        return narrow(tensor, cut.dimension, *cut.within(tensor.shape[cut.dimension]))

    def _assemble(self, layout: Layout, stored: tensors.Header, first: int, end: int) -> Any:
        """From shards that hold ``first`` to ``end`` along the dimension that was split."""
        dimension = stored.split_dimension
        length = stored.whole_shape[dimension]
        ranges = [Cut(rank, stored.size, dimension).within(length) for rank in range(stored.size)]
        ranks = [rank for rank, (start, stop) in enumerate(ranges) if start < end and stop > first] or [0]
        parts = []
        for rank, view in zip(ranks, self.batch_get_buffer([layout.key(rank) for rank in ranks])):
            start, stop = ranges[rank]
            shape = (*stored.whole_shape[:dimension], stop - start, *stored.whole_shape[dimension + 1 :])
            expected = stored._replace(shape=shape, rank=rank)
            try:
                found = None if view is None else tensors.unpack(view)
            except FAILURES:
                return None
            if found is None or found._replace(data_bytes=0) != expected._replace(data_bytes=0):
                return None
            tensor = tensors.decode(view, self._framework())
            parts.append(narrow(tensor, dimension, max(first - start, 0), min(end, stop) - start))
        return _joined(parts, dimension)

    def _header(self, key: str) -> Optional[tensors.Header]:
        try:
            value = self._connection.get(False, key, 0, tensors.HEADER_BYTES, False, False) if self._connection else None
            # Its elements are not here: only that they are as many as it says is known.
            return None if value is None else tensors.unpack(value)
        except FAILURES:
            return None


def _asked(key: str, parallelism: Any, partition: Any) -> Layout:
    if parallelism is not None and partition is not None:
        raise Wrong
    return layout_of(key, parallelism) if partition is None else partition_layout(key, partition)


def _one_each(values: Any, count: int) -> Optional[List[Any]]:
    """As a list of that length, of nothing if there are none; None if there are more or fewer."""
    values = [None] * count if values is None else list(values)
    return values if len(values) == count else None


def _joined(parts: List[Any], dimension: int) -> Any:
    if hasattr(parts[0], "data_ptr"):
        import torch

        return torch.cat(parts, dimension)
    import numpy

    return numpy.concatenate(parts, dimension)
