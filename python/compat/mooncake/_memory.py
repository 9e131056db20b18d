"""Memory that this module allocates itself, by its address."""

import ctypes
import mmap
import os
import threading
from typing import Dict, Tuple

import tidepool


class Memory:
    """Anonymous mappings, shared with forked children; found again by their address."""

    def __init__(self) -> None:
        self._mappings: Dict[int, Tuple[mmap.mmap, int]] = {}
        self._lock = threading.Lock()

    def allocate(self, length: int) -> int:
        """Address of `length` zeroed bytes; 0 if there are none."""
        if length <= 0:
            return 0
        try:
            mapping = mmap.mmap(-1, length)
        except (OSError, ValueError, OverflowError):
            return 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        with self._lock:
            self._mappings[address] = mapping, length
        return address

    def free(self, address: int) -> bool:
        """Gives memory back; False if there is none at that address."""
        with self._lock:
            mapping, _ = self._mappings.pop(address, (None, 0))
        if mapping is None:
            return False
        try:
            mapping.close()
        except BufferError:
            # Somebody looks into it still: it goes with the last of them.
            pass
        return True

    def owner(self, address: int) -> mmap.mmap:
        """The mapping at an address."""
        return self._mappings[address][0]

    def clear(self) -> None:
        """Gives everything back."""
        for address in list(self._mappings):
            self.free(address)


class MooncakeHostMemAllocator:
    """Host memory by its address. Values that are put from it are copied once, by the node on this host."""

    _views: Dict[int, tidepool.View] = {}

    def alloc(self, size: int) -> int:
        """Address of ``size`` zeroed bytes; 0 if there are none."""
        try:
            view = tidepool.allocate(size)
        except (tidepool.InvalidError, MemoryError, OSError, OverflowError):
            return 0
        self._views[view.ptr()] = view
        return view.ptr()

    def free(self, ptr: int) -> int:
        """0, or -1 if nothing was allocated there."""
        return -1 if self._views.pop(ptr, None) is None else 0


_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_MPOL_PREFERRED = 1


def bind_to_numa_node(node: int) -> None:
    """Binds the calling thread to the processors of a NUMA node, and prefers its memory. Without such a node: nothing."""
    try:
        with open(f"/sys/devices/system/node/node{int(node)}/cpulist", encoding="ascii") as file:
            words = file.read().strip()
    except OSError:
        return
    processors = set()
    for part in filter(None, words.split(",")):
        first, _, last = part.partition("-")
        processors.update(range(int(first), int(last or first) + 1))
    if processors:
        os.sched_setaffinity(0, processors)
    number = _SET_MEMPOLICY.get(os.uname().machine)
    if number is not None:
        mask = (ctypes.c_ulong * 16)()
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        mask[node // bits] |= 1 << (node % bits)
        ctypes.CDLL(None, use_errno=True).syscall(number, _MPOL_PREFERRED, mask, ctypes.c_ulong(16 * bits))
