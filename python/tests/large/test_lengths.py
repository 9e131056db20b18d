"""B003: lengths around 2 and 4 GiB, where those of 32 bits end."""

import mmap

import pytest
from node import Node

import tidepool

GIB, MIB = 1 << 30, 1 << 20
LENGTHS = [2 * GIB - 1, 2 * GIB, 4 * GIB - 1, 4 * GIB, 4 * GIB + 1, 5 * GIB + 7]


@pytest.fixture(scope="module")
def large_store(tmp_path_factory):
    settings = ["nvme.enabled=false", "store.scrub_bytes_per_second=0"]
    node = Node(tmp_path_factory.mktemp("node") / "data", dram="6500MiB", more=settings).start()
    with tidepool.Store.connect(node.socket, deadline=120.0) as store:
        yield store
    node.stop()


def mark(memory, length):
    """Writes each MiB's number at its start, and a byte at the end."""
    for place in range(0, length - 8, MIB):
        memory[place : place + 8] = (place // MIB + 1).to_bytes(8, "little")
    memory[length - 1 : length] = b"\x77"


def is_marked(memory, length):
    numbers = all(memory[place : place + 8] == (place // MIB + 1).to_bytes(8, "little") for place in range(0, length - 8, MIB))
    return numbers and memory[length - 1 : length] == b"\x77"


@pytest.mark.parametrize("length", LENGTHS)
def test_lengths_beyond_32_bits_are_exact(large_store, length):
    key = f"large/{length}"
    with mmap.mmap(-1, length) as source:
        mark(source, length)
        assert large_store.put(key, source)
    assert large_store.stat(key).length == length
    with mmap.mmap(-1, length) as target:
        assert large_store.get_into(key, target) == length and is_marked(target, length)
    with mmap.mmap(-1, length) as target:
        assert large_store.get_batch_into([key], [target]) == [length] and is_marked(target, length)
    view = large_store.get_view(key)
    assert len(view) == length
    with memoryview(view) as memory:
        assert is_marked(memory, length)
    del view
    assert large_store.remove(key)
