"""Tensors: one object each, with a header of 256 bytes before the elements; shards of tensor parallelism under
``KEY_tp_RANK``.

With torch, tensors are torch's; without it, numpy's. Results over a caller's memory share it.
"""

import ctypes
import importlib.util
from typing import Any, List, Optional, Sequence, Tuple

import tidepool
from tidepool import tensors
from tidepool._native import read_memory

from . import _codes
from ._codes import INVALID_PARAMS, OK
from ._parallelism import FAILURES, WRONG_TENSOR, ParallelCalls, Wrong, shard_rows, tp_layout
from ._types import ReplicateConfig

Config = Optional[ReplicateConfig]


def _framework() -> str:
    return "torch" if importlib.util.find_spec("torch") else "numpy"


def _tensor_metadata_size() -> int:
    """Bytes before the elements."""
    return tensors.HEADER_BYTES


def _serialize_tensor(tensor: Any) -> Tuple[bytes, int, int, Any]:
    """Header, address and bytes of the elements, and what owns them."""
    header, data = tensors.encode(tensor)
    address = data.ctypes.data if hasattr(data, "ctypes") else 0
    return header, address, memoryview(data).nbytes, data


def _deserialize_tensor(value: bytes) -> Any:
    """The tensor of a header and elements."""
    return tensors.decode(bytearray(value), _framework())


class TensorCalls(ParallelCalls):
    """The part of the store that is about tensors."""

    _connection: Any
    _framework = staticmethod(_framework)

    # One tensor.

    def put_tensor(self, key: str, tensor: Any) -> int:
        """Stores a tensor."""
        return self._put_tensor(key, tensor, None, upsert=False)

    def pub_tensor(self, key: str, tensor: Any, config: Config = None) -> int:
        """Stores a tensor."""
        return self._put_tensor(key, tensor, config, upsert=False)

    def upsert_tensor(self, key: str, tensor: Any) -> int:
        """Stores a tensor whether the key has a value or not."""
        return self._put_tensor(key, tensor, None, upsert=True)

    def upsert_pub_tensor(self, key: str, tensor: Any, config: Config = None) -> int:
        """Stores a tensor whether the key has a value or not."""
        return self._put_tensor(key, tensor, config, upsert=True)

    def get_tensor(self, key: str) -> Any:
        """The tensor; None if there is none."""
        return self._decode(self.get_buffer(key))

    def batch_put_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> List[int]:
        """Stores tensors; one code a key."""
        return self._put_tensors(keys, tensors_list, None, upsert=False)

    def batch_pub_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any], config: Config = None) -> List[int]:
        """Stores tensors; one code a key."""
        return self._put_tensors(keys, tensors_list, config, upsert=False)

    def batch_upsert_tensor(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> List[int]:
        """Stores tensors whether keys have values or not."""
        return self._put_tensors(keys, tensors_list, None, upsert=True)

    def batch_upsert_pub_tensor(
        self, keys: Sequence[str], tensors_list: Sequence[Any], config: Config = None
    ) -> List[int]:
        """Stores tensors whether keys have values or not."""
        return self._put_tensors(keys, tensors_list, config, upsert=True)

    def batch_get_tensor(self, keys: Sequence[str]) -> List[Any]:
        """The tensors; None where there is none."""
        return list(map(self._decode, self.batch_get_buffer(keys)))

    # At addresses: header, then elements.

    def put_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """Stores the header and elements at an address."""
        return self._put_from(key, buffer_ptr, size, None, upsert=False)

    def upsert_tensor_from(self, key: str, buffer_ptr: int, size: int) -> int:
        """The same, whether the key has a value or not."""
        return self._put_from(key, buffer_ptr, size, None, upsert=True)

    def batch_put_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> List[int]:
        """As ``put_tensor_from``, for many."""
        return self._many(self.put_tensor_from, keys, buffer_ptrs, sizes)

    def batch_upsert_tensor_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> List[int]:
        """As ``upsert_tensor_from``, for many."""
        return self._many(self.upsert_tensor_from, keys, buffer_ptrs, sizes)

    def get_tensor_into(self, key: str, buffer_ptr: int, size: int) -> Any:
        """Reads header and elements to an address; a tensor over that memory, or None."""
        length = self.get_into(key, buffer_ptr, size)
        return self._over_memory(buffer_ptr, length)

    def batch_get_tensor_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> List[Any]:
        """As ``get_tensor_into``, for many."""
        keys = list(keys)
        if not len(keys) == len(buffer_ptrs) == len(sizes):
            return [None] * len(keys)
        lengths = self.batch_get_into(keys, buffer_ptrs, sizes)
        return [self._over_memory(pointer, length) for pointer, length in zip(buffer_ptrs, lengths)]

    def get_tensor_into_cuda(self, key: str, tensor: Any) -> int:
        """Reads the elements into a tensor of the same type and length: the bytes read, or a code."""
        found = self.get_tensor(key)
        if found is None:
            return _codes.OBJECT_NOT_FOUND
        try:
            if found.numel() != tensor.numel() or found.dtype != tensor.dtype:
                return INVALID_PARAMS
            tensor.copy_(found.reshape(tensor.shape))
        except (AttributeError, RuntimeError):
            return INVALID_PARAMS
        return found.numel() * found.element_size()

    def batch_get_tensor_into_cuda(self, keys: Sequence[str], tensors_list: Sequence[Any]) -> List[int]:
        """As ``get_tensor_into_cuda``, for many."""
        return self._many(self.get_tensor_into_cuda, keys, tensors_list)

    # Tensor parallelism: all shards are stored by one call.

    def put_tensor_with_tp(
        self, key: str, tensor: Any, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Splits a tensor and stores all shards; with a size of 1, the tensor itself."""
        return self._put_split(key, tensor, None, tp_size, split_dim)

    def pub_tensor_with_tp(
        self, key: str, tensor: Any, config: Config = None, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """As ``put_tensor_with_tp``."""
        return self._put_split(key, tensor, config, tp_size, split_dim)

    def batch_put_tensor_with_tp(
        self, base_keys: Sequence[str], tensors_list: Sequence[Any], tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> List[int]:
        """As ``put_tensor_with_tp``, for many."""
        return self._many(lambda key, tensor: self._put_split(key, tensor, None, tp_size, split_dim), base_keys, tensors_list)

    def batch_pub_tensor_with_tp(
        self,
        base_keys: Sequence[str],
        tensors_list: Sequence[Any],
        config: Config = None,
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> List[int]:
        """As ``put_tensor_with_tp``, for many."""
        config = ReplicateConfig() if config is None else config
        if config.check(len(base_keys)) != OK:
            return [INVALID_PARAMS] * max(1, len(base_keys))
        configs = [config.of_key(place) for place in range(len(base_keys))]
        put = lambda key, tensor, config: self._put_split(key, tensor, config, tp_size, split_dim)  # noqa: E731
        return self._many(put, base_keys, tensors_list, configs)

    def get_tensor_with_tp(self, key: str, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0) -> Any:
        """The shard of a rank; with a size of 1, the tensor itself."""
        return self.get_tensor(self._key_of(key, tp_rank, tp_size))

    def batch_get_tensor_with_tp(self, base_keys: Sequence[str], tp_rank: int = 0, tp_size: int = 1) -> List[Any]:
        """As ``get_tensor_with_tp``, for many."""
        return self.batch_get_tensor([self._key_of(key, tp_rank, tp_size) for key in base_keys])

    def get_tensor_with_tp_into(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> Any:
        """As ``get_tensor_into``, of a shard."""
        return self.get_tensor_into(self._key_of(key, tp_rank, tp_size), buffer_ptr, size)

    def batch_get_tensor_with_tp_into(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> List[Any]:
        """As ``batch_get_tensor_into``, of shards."""
        keys = [self._key_of(key, tp_rank, tp_size) for key in base_keys]
        return self.batch_get_tensor_into(keys, buffer_ptrs, sizes)

    def put_tensor_with_tp_from(
        self, key: str, buffer_ptr: int, size: int, tp_rank: int = 0, tp_size: int = 1, split_dim: int = 0
    ) -> int:
        """Splits the tensor at an address and stores all shards."""
        try:
            tensor = self._tensor_at(buffer_ptr, size)
        except (Wrong, *FAILURES):
            return INVALID_PARAMS
        return self._put_split(key, tensor, None, tp_size, split_dim)

    def batch_put_tensor_with_tp_from(
        self,
        base_keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        tp_rank: int = 0,
        tp_size: int = 1,
        split_dim: int = 0,
    ) -> List[int]:
        """As ``put_tensor_with_tp_from``, for many."""
        put = lambda key, pointer, size: self.put_tensor_with_tp_from(key, pointer, size, tp_rank, tp_size, split_dim)  # noqa: E731
        return self._many(put, base_keys, buffer_ptrs, sizes)

    # Files.

    def save_tensor_to_safetensor(self, key: str, file_name: Optional[str] = None) -> int:
        """Writes a tensor to a safetensors file. Needs the package safetensors."""
        found = self.get_tensor(key)
        if found is None:
            return _codes.OBJECT_NOT_FOUND
        try:
            if _framework() == "torch":
                from safetensors.torch import save_file
            else:
                from safetensors.numpy import save_file
            save_file({key: found}, file_name or key)
        except (OSError, ValueError):
            return INVALID_PARAMS
        return OK

    def load_tensor_from_safetensor(self, key: Optional[str] = None, file_name: Optional[str] = None) -> Any:
        """Reads a tensor from a safetensors file and stores it under ``key``, or the file's name; None if there is none."""
        if file_name is None:
            raise TypeError("file_name is missing")
        try:
            if _framework() == "torch":
                from safetensors.torch import load_file
            else:
                from safetensors.numpy import load_file
            loaded = load_file(file_name)
        except (OSError, ValueError):
            return None
        if not loaded:
            return None
        tensor = loaded.get(key) if key in loaded else next(iter(loaded.values()))
        return tensor if self.put_tensor(key or file_name, tensor) == OK else None

    # How it is done.

    def _put_tensor(self, key: str, tensor: Any, config: Config, upsert: bool) -> int:
        return self._put_tensors([key], [tensor], config, upsert)[0]

    def _put_tensors(self, keys: Sequence[str], tensors_list: Sequence[Any], config: Config, upsert: bool) -> List[int]:
        keys, tensors_list = list(keys), list(tensors_list)
        config = ReplicateConfig() if config is None else config
        if self._connection is None or len(keys) != len(tensors_list) or config.check(len(keys)) != OK:
            return [INVALID_PARAMS] * max(1, len(keys))
        groups = config.groups(len(keys)) or [None] * len(keys)
        data_type = config.data_type.value or int(tidepool.DataType.TENSOR)
        codes = []
        for key, tensor, group in zip(keys, tensors_list, groups):
            try:
                parts = list(tensors.encode(tensor))
                self._connection.put(False, key, parts, config.options(upsert, group, data_type))
                codes.append(OK)
            except FAILURES as error:
                codes.append(_codes.code(error))
        return codes

    def _put_split(self, key: str, tensor: Any, config: Config, size: int, dimension: int) -> int:
        if size < 1:
            return INVALID_PARAMS
        if size == 1:
            return self._put_tensor(key, tensor, config, upsert=False)
        try:
            rows = list(shard_rows(tp_layout(key, 0, size, dimension), tensor, range(size), uniform=False))
        except (Wrong, *WRONG_TENSOR):
            return INVALID_PARAMS
        return self._put_rows(rows, config, upsert=False)

    def _put_from(self, key: str, pointer: int, size: int, config: Config, upsert: bool) -> int:
        try:
            header = tensors.unpack(read_memory(pointer, min(size, tensors.HEADER_BYTES)))
        except FAILURES:
            return INVALID_PARAMS
        length = tensors.HEADER_BYTES + header.data_bytes
        if length > size:
            return INVALID_PARAMS
        return self._write([key], [[pointer]], [[length]], config, upsert)[0]

    def _decode(self, view: Any) -> Any:
        if view is None:
            return None
        try:
            return tensors.decode(view, _framework())
        except FAILURES:
            return None

    def _over_memory(self, pointer: int, length: int) -> Any:
        if length < tensors.HEADER_BYTES:
            return None
        return self._decode((ctypes.c_ubyte * length).from_address(pointer))

    @staticmethod
    def _key_of(key: str, rank: int, size: int) -> str:
        return tp_layout(key, rank, size, 0).key(rank) if size > 1 else key

    @staticmethod
    def _many(call: Any, keys: Sequence[str], *lists: Sequence[Any]) -> List[int]:
        if any(len(each) != len(keys) for each in lists):
            return [INVALID_PARAMS] * max(1, len(keys))
        return [call(*row) for row in zip(keys, *lists)]

