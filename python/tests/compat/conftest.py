"""Stores of the compatible module on the tests' node."""

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
pytest.importorskip("mooncake.store")

from mooncake.store import MooncakeDistributedStore  # noqa: E402


class Memory:
    """Bytes with an address, as an engine's pool has them."""

    def __init__(self, length, fill=b""):
        self.bytes = mmap.mmap(-1, max(length, 1))
        self.length = length
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.bytes[: len(fill)] = fill

    def __getitem__(self, place):
        return self.bytes[place]

    def __setitem__(self, place, value):
        self.bytes[place] = value


@pytest.fixture
def memory():
    return Memory


@pytest.fixture
def store(node):
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", node.grpc) == 0
    yield store
    assert store.close() == 0
