"""Sessions: values that are read or written range by range, layer after layer."""

import threading
from typing import Any, Dict, List, Sequence

import tidepool
from tidepool._native import read_memory

from . import _codes
from ._codes import INVALID_PARAMS, OBJECT_NOT_FOUND, OK
from ._types import ReplicateConfig

# Of all values that are being written range by range.
STAGED_BYTES = 4 << 30

_FAILURES = (tidepool.TidepoolError, BufferError, OverflowError)


class _Staged:
    """A value that is being written."""

    def __init__(self, length: int, config: ReplicateConfig, group: str) -> None:
        self.value = bytearray(length)
        self.options = config.options(False, group)


class Sessions:
    """The part of the store that is about sessions. A value that is written so lies in this process until its end."""

    _connection: Any
    _lease: float

    def __init__(self) -> None:
        self._readable: Dict[str, int] = {}
        self._staged: Dict[str, _Staged] = {}
        self._sessions = threading.Lock()

    def _forget_sessions(self) -> None:
        with self._sessions:
            self._readable.clear()
            self._staged.clear()

    def batch_get_session_start(self, keys: Sequence[str]) -> List[int]:
        """Begins reading values by ranges: 0, or -704 where there is none. Their lease is renewed."""
        keys = list(keys)
        if self._connection is None:
            return [INVALID_PARAMS] * len(keys)
        try:
            leases = self._connection.lease(False, keys, self._lease)
            codes = []
            for key, lease in zip(keys, leases):
                row = self._connection.stat(False, key) if lease > 0 else None
                if row is None:
                    codes.append(OBJECT_NOT_FOUND)
                    continue
                with self._sessions:
                    self._readable[key] = row[0]
                codes.append(OK)
            return codes
        except _FAILURES as error:
            return [_codes.code(error)] * len(keys)

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> List[int]:
        """Reads ranges of values to addresses: the sum of each value's sizes, or a code."""
        keys = list(keys)
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_src_offsets):
            return [INVALID_PARAMS] * max(1, len(keys))
        rows = zip(keys, all_buffer_ptrs, all_sizes, all_src_offsets)
        return [self._read_session(*row) for row in rows]

    def _read_session(
        self, key: str, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        with self._sessions:
            length = self._readable.get(key)
        if self._connection is None or length is None or not len(pointers) == len(sizes) == len(offsets):
            return INVALID_PARAMS
        if any(offset < 0 or size < 0 or offset + size > length for offset, size in zip(offsets, sizes)):
            return INVALID_PARAMS
        for pointer, size, offset in zip(pointers, sizes, offsets):
            code = self._read_range(key, pointer, offset, size)
            if code < 0:
                return code
        return sum(sizes)

    def _read_range(self, key: str, address: int, offset: int, length: int) -> int:
        raise NotImplementedError

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """Ends reading."""
        if self._connection is None:
            return INVALID_PARAMS
        with self._sessions:
            for key in keys:
                self._readable.pop(key, None)
        return OK

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig = None
    ) -> List[int]:
        """Begins writing values of these lengths by ranges."""
        keys, sizes = list(keys), list(sizes)
        config = ReplicateConfig() if config is None else config
        if self._connection is None or len(keys) != len(sizes) or config.check(len(keys)) != OK:
            return [INVALID_PARAMS] * max(1, len(keys))
        groups = config.group_ids or [""] * len(keys)
        return [self._stage(*row, config) for row in zip(keys, sizes, groups)]

    def _stage(self, key: str, size: int, group: str, config: ReplicateConfig) -> int:
        if size <= 0:
            return INVALID_PARAMS
        try:
            if self._connection.exists(False, [key], None, False)[0]:
                return _codes.OBJECT_ALREADY_EXISTS
        except _FAILURES as error:
            return _codes.code(error)
        with self._sessions:
            if key in self._staged:
                return _codes.OBJECT_ALREADY_EXISTS
            if sum(len(staged.value) for staged in self._staged.values()) + size > STAGED_BYTES:
                return _codes.NO_AVAILABLE_HANDLE
            self._staged[key] = _Staged(size, config, group)
        return OK

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> List[int]:
        """Writes ranges of values from addresses: the sum of each value's sizes, or a code."""
        keys = list(keys)
        if not len(keys) == len(all_buffer_ptrs) == len(all_sizes) == len(all_dst_offsets):
            return [INVALID_PARAMS] * max(1, len(keys))
        rows = zip(keys, all_buffer_ptrs, all_sizes, all_dst_offsets)
        return [self._write_session(*row) for row in rows]

    def _write_session(
        self, key: str, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        with self._sessions:
            staged = self._staged.get(key)
        if self._connection is None or staged is None or not len(pointers) == len(sizes) == len(offsets):
            return INVALID_PARAMS
        length = len(staged.value)
        if any(offset < 0 or size < 0 or offset + size > length for offset, size in zip(offsets, sizes)):
            return INVALID_PARAMS
        try:
            for pointer, size, offset in zip(pointers, sizes, offsets):
                staged.value[offset : offset + size] = read_memory(pointer, size)
        except _FAILURES as error:
            return _codes.code(error)
        return sum(sizes)

    def batch_put_session_end(self, keys: Sequence[str]) -> List[int]:
        """Stores the values; they can be read from here on."""
        return [self._store_staged(key) for key in list(keys)]

    def _store_staged(self, key: str) -> int:
        with self._sessions:
            staged = self._staged.pop(key, None)
        if self._connection is None or staged is None:
            return INVALID_PARAMS
        try:
            self._connection.put(False, key, [staged.value], staged.options)
        except _FAILURES as error:
            return _codes.code(error)
        return OK

    def batch_put_session_revoke(self, keys: Sequence[str]) -> List[int]:
        """Gives values up that are being written."""
        with self._sessions:
            return [INVALID_PARAMS if self._staged.pop(key, None) is None else OK for key in list(keys)]
