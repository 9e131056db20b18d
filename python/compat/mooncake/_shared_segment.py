"""``SharedSegment``: memory that processes of one host share."""

import ctypes
import hashlib
import mmap
import os
import struct
from typing import List, Optional, Tuple

_MAGIC = b"TPSS"
# magic, rank, size, what all ranks must agree on, and where the owner has it: its process and its descriptor, else 0
_BLOB = struct.Struct("<4sIQ16sIi")
_ALIGNMENT = 2 << 20
_MOST_BYTES = 1 << 46


class SharedSegment:
    """Memory of one rank, mapped by all. Made in two steps: each rank makes its part and gives its blob to all others, then completes it
    with the blobs of all. A process that is forked has it, too. What fails raises RuntimeError.
    """

    def __init__(self, memory: Optional[mmap.mmap], file: int, told: Tuple[int, int, bytes, int, int]) -> None:
        self._memory, self._file = memory, file
        self._rank, self._size, self._agreed, self._world_size, self._owner = told
        self._ready = False

    @staticmethod
    def supported(mmap: bool = True, host_register: bool = False) -> bool:
        """Memory of the host is; memory of devices, and registering it with one, is not."""
        return mmap and not host_register

    @staticmethod
    def create(
        name: str,
        size: int,
        world_size: int,
        rank_id: int,
        owner_rank: int = 0,
        device_id: int = 0,
        mmap: bool = True,
        host_register: bool = False,
    ) -> "Tuple[SharedSegment, bytes]":
        """This rank's part, and its blob. The owner's memory is zeroed, and backed from now on; ``size`` is rounded up to 2 MiB."""
        if not SharedSegment.supported(mmap, host_register):
            raise RuntimeError("memory of devices is not shared")
        if not 0 < size <= _MOST_BYTES:
            raise RuntimeError(f"a shared segment has 1 to {_MOST_BYTES} bytes, not {size}")
        if not (0 <= rank_id < world_size and 0 <= owner_rank < world_size):
            raise RuntimeError(f"ranks {rank_id} and {owner_rank} are not below {world_size}")
        agreed = hashlib.sha256(repr((name, size, world_size, owner_rank)).encode()).digest()[:16]
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        memory, file, process = None, -1, 0
        if rank_id == owner_rank:
            if size > _available():
                raise RuntimeError(f"there is no memory for {size} bytes: {_available()} are available")
            file = os.memfd_create("tidepool-shared-segment")
            try:
                # Else the first touch of a page that there is no memory for would end the process.
                os.posix_fallocate(file, 0, size)
                memory, process = _mapped(file, size), os.getpid()
            except OSError as error:
                os.close(file)
                raise RuntimeError(f"there is no memory for {size} bytes: {error}") from error
        blob = _BLOB.pack(_MAGIC, rank_id, size, agreed, process, file)
        return SharedSegment(memory, file, (rank_id, size, agreed, world_size, owner_rank)), blob

    def complete(self, blobs: List[bytes]) -> None:
        """Maps the owner's memory; ``blobs`` are those of all ranks, by rank. The owner must not have ended."""
        if self._ready:
            raise RuntimeError("it is complete already")
        if len(blobs) != self._world_size:
            raise RuntimeError(f"there are {self._world_size} ranks, and {len(blobs)} blobs")
        process = file = 0
        for rank, blob in enumerate(blobs):
            blob = blob.encode("latin-1") if isinstance(blob, str) else bytes(blob)
            if len(blob) != _BLOB.size or not blob.startswith(_MAGIC):
                raise RuntimeError(f"the blob of rank {rank} is none")
            _, of_rank, size, agreed, of_process, of_file = _BLOB.unpack(blob)
            if (of_rank, size, agreed) != (rank, self._size, self._agreed):
                raise RuntimeError(f"rank {rank} has made another segment")
            if rank == self._owner:
                process, file = of_process, of_file
        if self._memory is None:
            try:
                opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise RuntimeError(f"the owner's memory can't be opened: {error}") from error
            try:
                if os.fstat(opened).st_size != self._size:
                    raise RuntimeError("the owner has other memory there")
                self._memory = _mapped(opened, self._size)
            except OSError as error:
                raise RuntimeError(f"the owner's memory can't be mapped: {error}") from error
            finally:
                os.close(opened)
        self._ready = True

    def ready(self) -> bool:
        """Whether it is complete."""
        return self._ready

    def base_addr(self) -> int:
        """Where it is mapped in this process; 0 before it is."""
        return 0 if self._memory is None else ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def device_addr(self) -> int:
        """0: no device has it."""
        return 0

    def size(self) -> int:
        """Bytes."""
        return self._size

    def __del__(self) -> None:
        # The memory goes with the last who refers to it.
        if self._file >= 0:
            os.close(self._file)


def _available() -> int:
    """Bytes that the machine can give without anyone being killed for it: the system itself gives more."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), _MOST_BYTES)


def _mapped(file: int, size: int) -> mmap.mmap:
    return mmap.mmap(file, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
