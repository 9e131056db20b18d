"""The real integrations, from the folder that `make test-integrations` unpacks their wheels to."""

import ctypes
import mmap
import os

import pytest

FOLDER = os.environ.get("INTEGRATIONS")
collect_ignore_glob = [] if FOLDER else ["test_*.py"]

if FOLDER:
    import standins

    standins.install(FOLDER)


class Tensor:
    """Host memory, as far as storage code looks at a tensor."""

    def __init__(self, length, fill=b""):
        self.bytes = mmap.mmap(-1, length)
        self.bytes[: len(fill)] = fill

    def data_ptr(self):
        return ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    def numel(self):
        return len(self.bytes)

    def element_size(self):
        return 1


@pytest.fixture
def tensor():
    return Tensor
