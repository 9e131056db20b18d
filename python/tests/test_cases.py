"""Faults that users of other stores reported, as small scenarios, through Python: sizes, and the client itself.

Elsewhere: B006, segments larger than a device can register, in `transfer/`; B003, lengths beyond 32 bits, in `large/`, which `LARGE=1
make test-python` adds; of B136 the calls that wait, in `test_faults.py`, and those of a loop, in `test_async.py`.
"""

import contextlib
import pickle
import socket
import sys
import threading
import time

import pytest
from node import Node

import tidepool
from test_embedded import guests, until

KIB, MIB = 1 << 10, 1 << 20
# What is on disk only is read from there after a restart.
FORGETFUL = ["dram.survive_restart=false"]


@pytest.fixture
def forgetful_node(tmp_path):
    node = Node(tmp_path / "data", more=FORGETFUL).start()
    yield node
    node.stop()


def value(length, seed=1):
    pattern = bytes(place * seed % 251 for place in range(251))
    return (pattern * (length // 251 + 1))[:length]


def in_memory_then_on_disk(node, check):
    """Runs the check, and runs it again when nothing is in memory any more."""
    for _ in range(2):
        with tidepool.Store.connect(node.grpc) as store:
            until(lambda: store.server_info().phase == "serving")
            check(store)
        node.stop()
        node.start()


def test_b001_tensors_and_values_without_elements(forgetful_node):
    numpy = pytest.importorskip("numpy")
    shapes, types = [(0,), (0, 128), (4, 0, 8)], ["float32", "float16", "int64"]
    made = {f"{name}/{shape}": numpy.zeros(shape, name) for name in types for shape in shapes}
    try:
        import torch
    except ImportError:
        pass
    else:
        made.update({f"bfloat16/{shape}": torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes})
    with tidepool.Store.connect(forgetful_node.grpc) as store:
        assert store.put("nothing", b"", durability="nvme")
        for key, tensor in made.items():
            assert store.put_tensor(key, tensor, durability="nvme")

    def check(store):
        assert store.exists("nothing") and store.get("nothing") == b"" and store.stat("nothing").length == 0
        assert store.get_into("nothing", bytearray()) == 0
        for key, tensor in made.items():
            framework = "torch" if key.startswith("bfloat16") else "numpy"
            got = store.get_tensor(key, framework=framework)
            assert store.exists(key) and (got.shape, got.dtype) == (tensor.shape, tensor.dtype)

    in_memory_then_on_disk(forgetful_node, check)


def test_b005_values_around_every_limit(tmp_path):
    slice_bytes = MIB
    limits = [64 * KIB, 256 * KIB, slice_bytes, 3 * MIB, 4 * MIB, 15 * MIB]
    lengths = sorted({more + factor * limit for limit in limits for factor, more in ((1, -1), (1, 0), (1, 1), (3, 1))})
    settings = [*FORGETFUL, f"store.slice_bytes={slice_bytes}", "nvme.region_bytes=64MiB"]
    node = Node(tmp_path / "data", dram="256MiB", nvme="640MiB", more=settings).start()
    keys = [f"k{length}" for length in lengths]
    try:
        with tidepool.Store.connect(node.grpc) as store:
            for key, length in zip(keys, lengths):
                assert store.put(key, value(length), durability="nvme")

        def check(store):
            for got, length in zip(store.get_batch(keys), lengths):
                assert got == value(length), length
            rooms = [bytearray(length) for length in lengths]
            assert store.get_batch_into(keys, rooms) == lengths
            assert all(room == value(length) for room, length in zip(rooms, lengths))

        in_memory_then_on_disk(node, check)
    finally:
        node.stop()


def test_b009_reads_to_unaligned_places_touch_nothing_else(forgetful_node):
    lengths = [1, 511, 512, 513, 4095, 4096, 4097, MIB + 1]
    middle = len(lengths) // 2
    with tidepool.Store.connect(forgetful_node.grpc) as store:
        for length in lengths:
            assert store.put(f"k{length}", value(length), durability="nvme")
        store.upsert(f"k{lengths[middle]}", value(lengths[middle], seed=3), durability="nvme")

    def check(store):
        for place, length in enumerate(lengths):
            room = bytearray(b"\xaa" * (length + 14))
            assert store.get_into(f"k{length}", memoryview(room)[7 : 7 + length]) == length
            assert room[:7] == room[-7:] == b"\xaa" * 7
            assert room[7:-7] == value(length, seed=3 if place == middle else 1)

    in_memory_then_on_disk(forgetful_node, check)


def test_b010_a_value_that_never_fits_costs_no_other(tmp_path):
    node = Node(tmp_path / "data", dram="32MiB", more=["store.slice_bytes=256KiB", "nvme.enabled=false"]).start()
    try:
        with tidepool.Store.connect(node.grpc) as store:
            keys = [f"k{number}" for number in range(16)]
            assert store.put_batch(keys, [value(MIB)] * 16) == [True] * 16
            for length in (32 * MIB, 32 * MIB + 1, 64 * MIB, 256 * MIB):
                with pytest.raises(tidepool.TidepoolError) as error:
                    store.put("large", bytes(length))
                assert error.value.reason == "VALUE_TOO_LARGE" and error.value.retry_after is None
                assert store.exists_batch(keys) == [True] * 16
            assert not store.exists("large")
            # One that fits makes room for itself.
            assert store.put("large", value(24 * MIB)) and store.get("large") == value(24 * MIB)
    finally:
        node.stop()


def test_b136_other_threads_run_while_bytes_are_copied(node, key):
    """Nobody is made to give the lock up for a minute: another thread runs only where a call lets go of it."""
    turns, ended = [0], threading.Event()

    def turn():
        while not ended.is_set():
            turns[0] += 1
            time.sleep(0)

    def shared(call):
        before = turns[0]
        call()
        return turns[0] > before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    thread = threading.Thread(target=turn)
    thread.start()
    large, room = value(24 * MIB), bytearray(24 * MIB)
    try:
        for endpoint in (node.grpc, node.socket):
            with tidepool.Store.connect(endpoint) as store:
                calls = {
                    "upsert": lambda store=store: store.upsert(key, large),
                    "get": lambda store=store: store.get(key),
                    "get_into": lambda store=store: store.get_into(key, room),
                    "get_batch": lambda store=store: store.get_batch([key]),
                }
                for name, call in calls.items():
                    assert sum(shared(call) for _ in range(8)) >= 4, (endpoint, name)
        assert not shared(lambda: bytes(room)), "that holds the lock"
        assert shared(lambda: tidepool.Store.embedded(node.grpc, dram="64MiB").leave(hand_over=0))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
    with tidepool.Store.connect(node.grpc) as store:
        store.remove(key)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"dram": "8TiB"}, "dram.capacity"),
        ({"nvme": "1GiB", "nvme_path": "/dev/null/none"}, "nvme.path"),
        ({"nvme": "1MiB"}, "nvme.capacity"),
        ({"data": "/dev/null/none"}, "/dev/null/none"),
        ({"listen": "192.0.2.1:0"}, "grpc.listen"),
        ({"settings": {"engine.tls_certificate": "/dev/null/none"}}, "engine.tls_certificate"),
    ],
)
def test_b138_a_setup_that_fails_says_why_and_leaves_nothing(node, key, wrong, named):
    with pytest.raises(tidepool.TidepoolError) as error:
        tidepool.Store.embedded(node.grpc, **{"dram": "32MiB", **wrong})
    assert named in str(error.value)
    assert guests(node) == []
    with tidepool.Store.embedded(node.grpc, dram="32MiB") as store:
        assert store.put(key, b"v")


def test_b139_a_port_takes_nothing_that_it_does_not_know(node, store, key):
    code = pickle.dumps(print)
    frames = [code, b"\xdd\xff\xff\xff\xff" + b"\x91" * 1000, b"\xff\xff\xff\xff" + code, (1 << 32).to_bytes(8, "little") + code]
    with tidepool.Store.embedded(node.grpc, dram="32MiB") as lender, tidepool.TransferEngine() as engine:
        for address in (node.grpc, lender.address, engine.session):
            host, port = address.rsplit(":", 1)
            assert host == "127.0.0.1", "nobody said otherwise"
            for frame in frames:
                # It is closed, whether that was waited for or not.
                with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), 30) as connection:
                    connection.sendall(frame)
                    while connection.recv(4096):
                        pass
        assert lender.put(key, b"v") and store.get(key) == b"v"


def test_b141_tenants_share_nothing(own_node):
    own_node.make_tenant("x", bytes="8MiB")
    own_node.make_tenant("y")
    connect = tidepool.Store.connect
    with connect(own_node.grpc, tenant="x") as x, connect(own_node.grpc, tenant="y") as y, connect(own_node.grpc) as nobody:
        for store, stored in ((x, b"x"), (y, b"y"), (nobody, b"")):
            assert store.put("k", stored) and store.get("k") == stored
        with pytest.raises(tidepool.ExhaustedError) as error:
            x.put("too large", bytes(8 * MIB + 1))
        assert error.value.reason == "QUOTA_EXCEEDED"
        # What may go makes room, of its own; what is pinned does not.
        assert x.put_batch([f"k{number}" for number in range(16)], [bytes(MIB)] * 16) == [True] * 16
        assert x.remove_all().removed > 0
        assert all(x.put(f"pinned{number}", bytes(MIB), pin=True) for number in range(8))
        with pytest.raises(tidepool.ExhaustedError) as error:
            x.put("one more", b"v")
        assert error.value.reason == "QUOTA_EXCEEDED"
        several = x.put_batch(["one more", "and another"], [b"v", b"v"])
        assert all(isinstance(each, tidepool.ExhaustedError) and each.reason == "QUOTA_EXCEEDED" for each in several)
        assert y.get("k") == b"y" and nobody.get("k") == b"" and x.get("k") is None
        assert x.remove_all(force=True).removed == 8 and x.put("one more", b"v")
        assert (y.get("k"), nobody.get("k")) == (b"y", b"")
    with pytest.raises(tidepool.TidepoolError) as error:
        with connect(own_node.grpc, tenant="z") as other:
            other.put("k", b"v")
    assert error.value.reason == "UNKNOWN_TENANT"
