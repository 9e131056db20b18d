"""A pool of registered buffers, in classes of doubling size."""

import threading
import time
from typing import Any, Dict, List, Optional

from ._memory import Memory

_FOREVER = 10.0 * 365 * 86_400


class BufferLeaseView:
    """A writable look into a lease's memory."""

    def __init__(self, buffer: memoryview) -> None:
        self.buffer = buffer


class BufferLease:
    """Memory of a pool, until it is released; as a context manager it releases itself."""

    def __init__(self, pool: "BufferPool", ptr: int, size: int, capacity: int) -> None:
        self._pool, self._ptr, self._size, self._capacity = pool, ptr, size, capacity

    def _held(self) -> None:
        if self._ptr == 0:
            raise RuntimeError("the lease was released")

    @property
    def ptr(self) -> int:
        """Address of the first byte."""
        self._held()
        return self._ptr

    @property
    def size(self) -> int:
        """Bytes that were asked for."""
        return self._size

    @property
    def buffer(self) -> memoryview:
        """The memory, writable."""
        self._held()
        return memoryview(self._pool._memory.owner(self._ptr))[: self._size]

    def release(self) -> None:
        """Gives the memory back, once."""
        ptr, self._ptr = self._ptr, 0
        if ptr:
            self._pool._give_back(ptr, self._capacity)

    def __enter__(self) -> "BufferLease":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


class BufferPool:
    """Buffers that are registered with a store once and used again and again.

    Sizes are rounded up to a power of two from ``min_size_class`` on. At ``max_bytes`` (0: no bound) a caller waits, or gets
    RuntimeError.
    """

    def __init__(
        self,
        store: Any,
        max_bytes: int = 0,
        min_size_class: int = 65536,
        max_size_class: Optional[int] = None,
        alignment: int = 8388608,
        block_on_exhaustion: bool = True,
        default_timeout: Optional[float] = None,
        max_regions: Optional[int] = None,
        prewarm_size: Optional[int] = None,
        prewarm_count: int = 0,
    ) -> None:
        if min_size_class <= 0 or max_bytes < 0 or (max_size_class is not None and max_size_class < min_size_class):
            raise ValueError("sizes are positive, and the largest class is not below the smallest")
        self._store, self._memory = store, Memory()
        self._most, self._smallest, self._largest = max_bytes, min_size_class, max_size_class
        self._blocks, self._timeout, self._regions = block_on_exhaustion, default_timeout, max_regions
        self._free: Dict[int, List[int]] = {}
        self._bytes = self._count = 0
        self._closed = False
        self._changed = threading.Condition()
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(self, size: int, block: Optional[bool] = None, timeout: Optional[float] = None) -> BufferLease:
        """Memory of at least ``size`` bytes. Raises RuntimeError or TimeoutError if there is none."""
        capacity = self._class_of(size)
        blocks = self._blocks if block is None else block
        patience = timeout if timeout is not None else self._timeout
        until = time.monotonic() + (_FOREVER if patience is None else patience)
        with self._changed:
            while True:
                if self._closed:
                    raise RuntimeError("the pool is closed")
                ptr = self._take(capacity)
                if ptr:
                    return BufferLease(self, ptr, size, capacity)
                if not blocks:
                    raise RuntimeError(f"the pool has no {capacity} bytes left")
                if not self._changed.wait(max(0.0, min(until - time.monotonic(), threading.TIMEOUT_MAX))):
                    raise TimeoutError(f"the pool had no {capacity} bytes in time")

    def buffer(self, size: int, block: Optional[bool] = None, timeout: Optional[float] = None) -> BufferLease:
        """As ``acquire``."""
        return self.acquire(size, block, timeout)

    def prewarm(self, size: int, count: int) -> None:
        """Makes ``count`` buffers of a size ahead."""
        leases = [self.acquire(size, block=False) for _ in range(count)]
        for lease in leases:
            lease.release()

    def close(self) -> None:
        """Unregisters and frees what is not leased; the rest when it is released."""
        with self._changed:
            self._closed = True
            for capacity, pointers in self._free.items():
                for ptr in pointers:
                    self._drop(ptr, capacity)
            self._free.clear()
            self._changed.notify_all()

    def _class_of(self, size: int) -> int:
        if size <= 0:
            raise ValueError("a buffer has at least one byte")
        capacity = self._smallest
        while capacity < size:
            capacity *= 2
        if self._largest is not None and capacity > self._largest:
            if size > self._largest:
                raise ValueError(f"{size} bytes are more than the largest class of {self._largest}")
            capacity = self._largest
        if self._most and capacity > self._most:
            raise ValueError(f"{capacity} bytes are more than the pool's {self._most}")
        return capacity

    def _take(self, capacity: int) -> int:
        pointers = self._free.get(capacity)
        if pointers:
            return pointers.pop()
        if self._is_full(capacity):
            # Buffers of other classes make room.
            for other, others in self._free.items():
                while others and self._is_full(capacity):
                    self._drop(others.pop(), other)
        if self._is_full(capacity):
            return 0
        ptr = self._memory.allocate(capacity)
        if not ptr:
            return 0
        if self._store.register_buffer(ptr, capacity) != 0:
            self._memory.free(ptr)
            raise RuntimeError("the store refused to register a buffer")
        self._bytes += capacity
        self._count += 1
        return ptr

    def _is_full(self, capacity: int) -> bool:
        too_many = self._regions is not None and self._count >= self._regions
        return too_many or bool(self._most) and self._bytes + capacity > self._most

    def _give_back(self, ptr: int, capacity: int) -> None:
        with self._changed:
            if self._closed:
                self._drop(ptr, capacity)
            else:
                self._free.setdefault(capacity, []).append(ptr)
            self._changed.notify_all()

    def _drop(self, ptr: int, capacity: int) -> None:
        self._store.unregister_buffer(ptr)
        self._memory.free(ptr)
        self._bytes -= capacity
        self._count -= 1
