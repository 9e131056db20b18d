"""Each method's codes, as those who call it know them."""

import inspect
import subprocess
import sys
import threading

import pytest
from mooncake import _setup
from mooncake.store import (
    BufferHandle,
    BufferPool,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicateConfig,
    SoftPinAction,
    bind_to_numa_node,
)
from node import Node

import tidepool

MIB = 1 << 20
MISSING, INVALID, LEASED, UNSUPPORTED = -704, -600, -706, -1012


def setup_of(node, **changes):
    settings = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": 1 << 20,
        "local_buffer_size": 1 << 20,
        "protocol": "tcp",
        "rdma_devices": "",
        "master_server_addr": node.grpc,
    }
    return {**settings, **changes}


def test_setup_takes_arguments_by_place_name_and_dict(node):
    for arguments, named in (
        (setup_of(node).values(), {}),
        ([*setup_of(node).values(), None], {"enable_ssd_offload": True, "ssd_offload_path": "/x", "tenant_id": "default"}),
        ([], setup_of(node)),
        ([setup_of(node)], {}),
        ([], {"config": setup_of(node)}),
    ):
        store = MooncakeDistributedStore()
        assert store.setup(*arguments, **named) == 0
        assert store.setup(*setup_of(node).values()) == 0
        assert store.health_check() == 0
        assert store.get_hostname() == "localhost"
        assert store.close() == 0


def test_a_dict_may_have_texts_and_the_names_that_integrations_use(node):
    settings = {
        "local_hostname": "here",
        "metadata_server": "http://127.0.0.1:8080/metadata",
        "global_segment_size": "16MB",
        "local_buffer_size": "1073741824",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": node.grpc,
        "transfer_timeout": "1",
    }
    store = MooncakeDistributedStore()
    assert store.setup(settings) == 0
    assert store.is_exist("no such key") == 0
    store.close()


@pytest.mark.parametrize(("switch", "hits"), [("1", 1), ("0", 0)])
def test_gets_without_a_call_can_be_switched_off(node, monkeypatch, switch, hits):
    monkeypatch.setenv("TIDEPOOL_LOCAL_READS", switch)
    store = MooncakeDistributedStore()
    assert store.setup(setup_of(node)) == 0 and store.put(f"local/{switch}", b"v" * 4096) == 0
    assert store.get(f"local/{switch}") == b"v" * 4096 and store._opened.local_hits == hits
    store.close()


def test_an_unknown_keyword_is_named(node):
    with pytest.raises(TypeError, match="colour"):
        MooncakeDistributedStore().setup(*setup_of(node).values(), colour="red")
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup("localhost", "P2PHANDSHAKE")
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup(17)
    with pytest.raises(TypeError):
        MooncakeDistributedStore().setup(*setup_of(node, protocol=3).values())


def test_what_setup_can_not_mean_is_a_code(node, monkeypatch):
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    new = MooncakeDistributedStore
    assert new().setup({"metadata_server": "x"}) == INVALID
    assert new().setup(setup_of(node, global_segment_size="many")) == INVALID
    assert new().setup(setup_of(node, protocol="pigeon")) == INVALID
    assert new().setup(setup_of(node, master_server_addr="etcd://127.0.0.1:2379")) == UNSUPPORTED
    assert new().setup(setup_of(node, master_server_addr="127.0.0.1:1")) == -1
    store = new()
    assert store.setup(setup_of(node, protocol="rdma")) == INVALID
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    assert store.setup(setup_of(node, protocol="rdma")) == 0
    store.close()


def test_tenants_have_codes_of_their_own(own_node):
    own_node.make_tenant("x", bytes="1MiB")
    store = MooncakeDistributedStore()
    assert store.setup(*setup_of(own_node).values(), tenant_id="y") == -1701
    assert store.setup(*setup_of(own_node).values(), tenant_id="x") == 0
    assert store.put("k", bytes(1 << 20)) == 0 and store.put("k2", bytes((1 << 20) + 1)) == -1700
    assert store.close() == 0


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


# An attempt has half of what is left, 2.5 s at most, and begins a second after the one before at the earliest.
@pytest.mark.parametrize("attempts, most, made", [("20", 20.0, 10), ("3", 5.0, 3), ("1", 5.0, 1)])
def test_setup_gives_a_silent_node_up_in_time(monkeypatch, attempts, most, made):
    clock, asked = Clock(), []

    class Silent:
        @staticmethod
        def connect(*arguments):
            asked.append(arguments[0])
            clock.sleep(arguments[4])
            raise tidepool.DeadlineError("no answer", "DEADLINE")

    monkeypatch.setattr(_setup, "time", clock)
    monkeypatch.setattr(_setup, "Connection", Silent)
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", attempts)
    settings = _setup.Settings("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", "127.0.0.1:1")
    assert _setup.connect(settings, lends=False) == (-1, None)
    assert clock.now - 1000.0 <= most and len(asked) == made


def calls(store, memory):
    """Every method with arguments that fit, and what it answers without a connection."""
    pointer = memory.address
    config = ReplicateConfig()
    return [
        (store.put, ("k", b"v"), INVALID),
        (store.put_parts, ("k", b"v", b"w"), INVALID),
        (store.put_batch, (["k"], [b"v"]), INVALID),
        (store.upsert, ("k", b"v", config), INVALID),
        (store.upsert_parts, ("k", b"v"), INVALID),
        (store.upsert_batch, (["k"], [b"v"]), INVALID),
        (store.get, ("k",), b""),
        (store.get_batch, (["k", "l"],), [b"", b""]),
        (store.get_buffer, ("k",), None),
        (store.batch_get_buffer, (["k"],), [None]),
        (store.get_size, ("k",), INVALID),
        (store.get_into, ("k", pointer, 8), INVALID),
        (store.batch_get_into, (["k"], [pointer], [8]), [INVALID]),
        (store.batch_get_into_multi_buffers, (["k"], [[pointer]], [[8]]), [INVALID]),
        (store.get_into_ranges, ([pointer], [["k"]], [[[0]]], [[[0]]], [[[1]]]), [[[INVALID]]]),
        (store.put_from, ("k", pointer, 8), INVALID),
        (store.put_from_with_metadata, ("k", pointer, pointer, 4, 4), INVALID),
        (store.batch_put_from, (["k"], [pointer], [8]), [INVALID]),
        (store.batch_put_from_multi_buffers, (["k"], [[pointer]], [[8]], config), [INVALID]),
        (store.upsert_from, ("k", pointer, 8), INVALID),
        (store.batch_upsert_from, (["k"], [pointer], [8]), [INVALID]),
        (store.is_exist, ("k",), INVALID),
        (store.batch_is_exist, (["k", "l"],), [INVALID, INVALID]),
        (store.remove, ("k",), INVALID),
        (store.remove_all, (), INVALID),
        (store.remove_by_regex, ("k",), INVALID),
        (store.batch_remove, (["k"], True), [INVALID]),
        (store.batch_replica_clear, (["k"],), []),
        (store.get_replica_desc, ("k",), []),
        (store.batch_get_replica_desc, (["k"],), {}),
        (store.register_buffer, (pointer, 8), INVALID),
        (store.unregister_buffer, (pointer,), INVALID),
        (store.alloc_from_mem_pool, (8,), 0),
        (store.batch_get_session_start, (["k"],), [INVALID]),
        (store.batch_get_into_multi_buffer_ranges, (["k"], [[pointer]], [[8]], [[0]]), [INVALID]),
        (store.batch_get_session_end, (["k"],), INVALID),
        (store.batch_put_session_start, (["k"], [8]), [INVALID]),
        (store.batch_put_from_multi_buffer_ranges, (["k"], [[pointer]], [[8]], [[0]]), [INVALID]),
        (store.batch_put_session_end, (["k"],), [INVALID]),
        (store.batch_put_session_revoke, (["k"],), [INVALID]),
        (store.create_copy_task, ("k", ["s"]), ((0, 0), INVALID)),
        (store.create_move_task, ("k", "s", "t"), ((0, 0), INVALID)),
        (store.query_task, ((1, 2),), (None, INVALID)),
        (store.put_tensor, ("k", None), INVALID),
        (store.get_tensor, ("k",), None),
        (store.batch_get_tensor, (["k"],), [None]),
        (store.get_tensor_into, ("k", pointer, 8), None),
        (store.health_check, (), 1),
        (store.close, (), 0),
    ]


def test_calls_before_setup_and_after_close_are_codes(node, memory):
    memory = memory(64)
    store = MooncakeDistributedStore()
    for _ in range(2):
        for method, arguments, answer in calls(store, memory):
            assert method(*arguments) == answer, method.__name__
        assert store.setup(*setup_of(node).values()) == 0
        assert store.close() == 0


def test_put_keeps_the_first_value_and_says_so(store, key):
    assert store.put(key, b"first") == 0
    assert store.put(key, b"second, longer") == 0
    assert store.get(key) == b"first"
    assert store.get_size(key) == 5
    assert store.upsert(key, b"third") == 0
    assert store.get(key) == b"third"


def test_nothing_is_no_value_and_no_key(store, key):
    assert store.put(key, b"") == INVALID
    assert store.put("", b"v") == INVALID
    assert store.put_batch([key], [b""]) == INVALID
    assert store.put_from(key, 1, 0) == INVALID
    assert store.is_exist("") == INVALID
    assert store.get("") == b""


def test_values_have_buffers_and_keys_are_text(store, key):
    import array

    for place, value in enumerate([b"v", bytearray(b"v"), memoryview(b"v"), array.array("b", [118])]):
        assert store.put(f"{key}{place}", value) == 0
        assert store.get(f"{key}{place}") == b"v"
    for wrong in ("text", 17, None):
        with pytest.raises(TypeError):
            store.put(key, wrong)
    with pytest.raises(TypeError):
        store.put(17, b"v")
    with pytest.raises(TypeError):
        store.batch_is_exist(key)
    with pytest.raises(TypeError):
        store.put(key, b"v", {"replica_num": 1})
    assert store.put(key, memoryview(bytearray(100))[::2]) == INVALID


def test_a_missing_value_has_its_code_in_each_call(store, key, memory):
    memory = memory(64)
    assert store.get(key) == b""
    assert store.get_batch([key, key]) == [b"", b""]
    assert store.get_buffer(key) is None
    assert store.batch_get_buffer([key]) == [None]
    assert store.get_size(key) == MISSING
    assert store.get_into(key, memory.address, 64) == MISSING
    assert store.batch_get_into([key], [memory.address], [64]) == [MISSING]
    assert store.remove(key) == MISSING
    assert store.remove(key, True) == MISSING
    assert store.batch_remove([key], True) == [MISSING]
    assert store.is_exist(key) == 0
    assert store.get_replica_desc(key) == []


def test_results_are_plain_lists_of_int(store, key, memory):
    memory = memory(64, b"x" * 64)
    results = store.batch_put_from([key], [memory.address], [64])
    assert type(results) is list and [type(item) for item in results] == [int] and results == [0]
    results = store.batch_get_into([key, "none"], [memory.address] * 2, [64] * 2)
    assert type(results) is list and [type(item) for item in results] == [int, int] and results == [64, MISSING]
    results = store.batch_is_exist([key, "none"])
    assert type(results) is list and [type(item) for item in results] == [int, int] and results == [1, 0]


@pytest.mark.parametrize("length", [1, 4096, 300_000, 1 << 20, (1 << 20) + 1, 5_000_001])
@pytest.mark.parametrize("is_registered", [True, False])
def test_values_go_from_and_to_addresses(store, key, memory, length, is_registered):
    value = bytes(place * 31 % 251 for place in range(length))
    source, target = memory(length, value), memory(length + 1)
    if is_registered:
        for buffer in (source, target):
            assert store.register_buffer(buffer.address, buffer.length) == 0
    assert store.put_from(key, source.address, length) == 0
    assert store.get_into(key, target.address, length + 1) == length
    assert target[:] == value + b"\0"
    assert store.get_into(key, target.address, length - 1) in (INVALID,)
    assert store.remove(key, True) == 0
    if is_registered:
        for buffer in (source, target):
            assert store.unregister_buffer(buffer.address) == 0


def test_values_are_gathered_and_scattered(store, key, memory):
    source, target = memory(100, bytes(range(100))), memory(100)
    pieces = [source.address + 50, source.address, source.address + 90]
    assert store.batch_put_from_multi_buffers([key], [pieces], [[10, 20, 10]], ReplicateConfig()) == [0]
    whole = bytes([*range(50, 60), *range(20), *range(90, 100)])
    assert store.get(key) == whole
    ranges = [[target.address + 60, target.address]]
    assert store.batch_get_into_multi_buffers([key], ranges, [[25, 15]]) == [40]
    assert target[60:85] == whole[:25] and target[:15] == whole[25:]
    assert store.put_from_with_metadata(f"{key}m", source.address + 10, source.address, 5, 2) == 0
    assert store.get(f"{key}m") == bytes([0, 1, 10, 11, 12, 13, 14])


def test_lengths_that_can_not_be_meant_are_refused(store, key):
    lots = 2**63 - 10
    pointers, sizes = [[1, 1], [1]], [[lots, lots], [100]]
    assert store.batch_put_from_multi_buffers([key, f"{key}/2"], pointers, sizes) == [INVALID] * 2
    assert store.batch_get_into_multi_buffers([key], [[1, 1, 1]], [[lots] * 3]) == [INVALID]


def test_lists_of_different_length_are_refused(store, key, memory):
    memory = memory(8)
    assert store.batch_get_into([key], [], []) == [INVALID]
    assert store.batch_put_from([key], [memory.address], [8, 8]) == [INVALID]
    assert store.batch_put_from_multi_buffers([key], [[memory.address]], [[4, 4]]) == [INVALID]
    assert store.put_batch([key], []) == INVALID
    assert store.get_into_ranges([memory.address], [], [], [], []) == [[[INVALID]]]
    assert store.batch_put_session_start([key], []) == [INVALID]
    assert store.batch_is_exist([]) == []


def test_addresses_that_are_none_are_codes_not_crashes(store, key, memory):
    assert store.put(key, b"x" * 8192) == 0
    freed = memory(1 << 20)
    address = freed.address
    freed.bytes = None  # unmapped with the last view of it
    for bad in (0, 1, 4096, (1 << 47) - 4096, 1 << 63, (1 << 64) - 1, -1, address):
        assert store.get_into(key, bad, 8192) == INVALID, hex(bad)
        assert store.put_from(f"{key}other", bad, 8192) == INVALID, hex(bad)
        assert store.register_buffer(bad, 8192) == INVALID, hex(bad)
    assert store.put_from(f"{key}other", address, 1 << 62) == INVALID
    assert store.is_exist(f"{key}other") == 0


def test_registered_memory_that_was_freed_is_a_code(store, key, memory):
    assert store.put(key, b"x" * 8192) == 0
    freed = memory(1 << 20)
    address = freed.address
    assert store.register_buffer(address, 1 << 20) == 0
    freed.bytes = None
    assert store.get_into(key, address, 1 << 20) == INVALID
    assert store.put_from(f"{key}other", address, 8192) == INVALID
    assert store.unregister_buffer(address) == 0


def test_read_only_memory_is_read_and_not_written(store, key):
    import ctypes
    import mmap
    import tempfile

    with tempfile.TemporaryFile() as file:
        file.write(b"y" * 8192)
        file.flush()
        mapped = mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        address = libc.mmap(None, ctypes.c_size_t(8192), 1, 2, file.fileno(), ctypes.c_long(0))
        mapped.close()
        for register in (False, True):
            if register:
                assert store.register_buffer(address, 8192) == 0
            assert store.put_from(f"{key}{register}", address, 8192) == 0
            assert store.get_into(f"{key}{register}", address, 8192) == INVALID
        assert store.unregister_buffer(address) == 0


def test_registrations_do_not_overlap(store, memory):
    memory = memory(1 << 16)
    assert store.register_buffer(memory.address, 1 << 16) == 0
    for address, length in ((0, 1 << 16), (0, 8), (4096, 8), (-4096, 8192)):
        assert store.register_buffer(memory.address + address, length) == INVALID
    assert store.register_buffer(memory.address, 0) == INVALID
    assert store.unregister_buffer(memory.address + 8) == INVALID
    assert store.unregister_buffer(memory.address) == 0
    assert store.unregister_buffer(memory.address) == INVALID
    assert store.register_buffer(memory.address, 1 << 16) == 0


def test_one_bad_item_does_not_spoil_the_others(store, key, memory):
    memory = memory(100, b"z" * 100)
    keys = [f"{key}{place}" for place in range(4)]
    pointers = [memory.address, 4096, memory.address, memory.address]
    assert store.batch_put_from(keys, pointers, [10, 10, 10, 10]) == [0, INVALID, 0, 0]
    assert store.batch_put_from([keys[0], "", keys[1]], [memory.address] * 3, [10] * 3) == [0, INVALID, 0]
    got = store.batch_get_into([*keys, "none"], [memory.address] * 4 + [4096], [10, 10, 9, 10, 10])
    assert got == [10, 10, INVALID, 10, MISSING]


def test_parts_are_bytes(store, key):
    import array

    assert store.put_parts(key, b"a", bytearray(b"bc"), memoryview(b"def")) == 0
    assert store.get(key) == b"abcdef"
    with pytest.raises(RuntimeError):
        store.put_parts(f"{key}2", array.array("i", [1, 2]))
    with pytest.raises(RuntimeError):
        store.put_parts(f"{key}2", memoryview(bytes(6)).cast("B", (2, 3)))
    assert store.upsert_parts(key, b"new", b"er") == 0
    assert store.get(key) == b"newer"


def test_a_buffer_handle_is_writable_memory(store, key):
    store.put(key, b"0123456789")
    handle = store.get_buffer(key)
    assert isinstance(handle, BufferHandle)
    assert (len(handle), handle.size()) == (10, 10) and handle.ptr() > 0
    view = memoryview(handle)
    view[0] = 120
    assert bytes(view[:3]) == b"x12"
    assert store.get(key) == b"0123456789"
    first, none = store.batch_get_buffer([key, "none"])
    assert none is None and bytes(first) == b"0123456789"


def test_what_was_asked_about_has_a_lease(store, key):
    store.put(key, b"v")
    assert store.remove(key) == 0
    store.put(key, b"v")
    assert store.is_exist(key) == 1
    assert store.remove(key) == LEASED
    assert store.batch_remove([key, "none"]) == [LEASED, MISSING]
    assert store.batch_replica_clear([key]) == []
    assert store.remove(key, force=True) == 0
    store.put(key, b"v")
    assert store.batch_replica_clear([key, "none"]) == [key]


def test_values_are_removed_by_pattern_and_all(store, key):
    for place in range(5):
        store.put(f"{key}/{place}", b"v")
    assert store.remove_by_regex(f"{key}/[01]$") == 2
    assert store.remove_by_regex("(") == INVALID
    assert store.batch_is_exist([f"{key}/{place}" for place in range(5)]) == [0, 0, 1, 1, 1]
    assert store.remove_all(force=True) >= 3
    assert store.remove_all() == 0


def test_configs_are_checked(store, key, memory):
    memory = memory(8, b"12345678")
    config = ReplicateConfig()
    assert (config.replica_num, config.with_hard_pin, config.data_type) == (1, False, ObjectDataType.UNKNOWN)
    assert hasattr(ReplicateConfig, "group_ids") or hasattr(config, "group_ids")
    config.group_ids = ["a", "b"]
    assert store.batch_put_from([key], [memory.address], [8], config) == [INVALID]
    config.group_ids = ["a"]
    config.replica_num = 0
    assert store.put(key, b"v", config) == INVALID
    config.replica_num = 3
    config.preferred_segment = "no such segment"
    config.data_type = ObjectDataType.TENSOR
    assert store.put(key, b"v", config) == 0
    config = ReplicateConfig()
    config.soft_pin_ttl_ms = 5
    assert store.put(f"{key}2", b"v", config) == INVALID
    config.soft_pin_action = SoftPinAction.ENABLE
    assert store.put(f"{key}2", b"v", config) == 0


def test_soft_pins_are_kept(tmp_path):
    node = Node(tmp_path / "data", dram="32MiB", more=["nvme.enabled=false"]).start()
    store = MooncakeDistributedStore()
    try:
        assert store.setup(**setup_of(node)) == 0
        soft, off, kept = ReplicateConfig(), ReplicateConfig(), ReplicateConfig()
        soft.soft_pin_action, off.soft_pin_action = SoftPinAction.ENABLE, SoftPinAction.DISABLE
        brief = ReplicateConfig()
        brief.soft_pin_action, brief.soft_pin_ttl_ms = SoftPinAction.ENABLE, 0
        value = bytes(MIB)
        for name, configs in {"soft": [soft], "kept": [soft, kept], "off": [soft, off], "0": [brief], "none": [kept]}.items():
            for config in configs:
                assert store.upsert(name, value, config) == 0
        assert store.put_batch([f"k/{place}" for place in range(10)], [value] * 10) == 0
        for place in range(100):
            assert store.put(f"k/{place}", value) == 0
        assert store.batch_is_exist(["soft", "kept", "off", "0", "none"]) == [1, 1, 0, 0, 0]
        for wrong in (-1, 86_400_001):
            soft.soft_pin_ttl_ms = wrong
            assert store.put("x", b"v", soft) == INVALID
    finally:
        store.close()
        node.stop()


def test_groups_are_kept(node, store, key, memory):
    import tidepool

    memory = memory(8, b"12345678")
    config = ReplicateConfig()
    config.group_ids = [f"g{place % 2}" for place in range(20)]
    config.with_hard_pin = True
    keys = [f"{key}/{place:02}" for place in range(20)]
    assert store.batch_put_from(keys, [memory.address] * 20, [8] * 20, config) == [0] * 20
    with tidepool.Store.connect(node.grpc) as own:
        listed = list(own.list(key))
    assert [found.group for found in listed] == config.group_ids
    assert {found.pins for found in listed} == {1}
    assert store.batch_remove(keys, True) == [0] * 20


def test_ranges_are_read(store, key, memory):
    target = memory(100)
    store.put(key, bytes(range(200)))
    got = store.get_into_ranges(
        [target.address], [[key, "none"]], [[[0, 50], [90]]], [[[10, 100], [0]]], [[[20, 30], [5]]]
    )
    assert got == [[[20, 30], [MISSING]]]
    assert target[:20] == bytes(range(10, 30)) and target[50:80] == bytes(range(100, 130))
    assert store.get_into_ranges([target.address], [[key]], [[[0]]], [[[190]]], [[[20]]]) == [[[INVALID]]]


def test_sessions_read_and_write_by_ranges(store, key, memory):
    memory = memory(64, bytes(range(64)))
    other = f"{key}/other"
    assert store.batch_put_session_start([key, other], [40, 8]) == [0, 0]
    assert store.batch_put_session_start([key], [40]) == [-705]
    written = store.batch_put_from_multi_buffer_ranges(
        [key, other], [[memory.address, memory.address + 32], [4096]], [[20, 20], [8]], [[20, 0], [0]]
    )
    assert written == [40, INVALID]
    assert store.is_exist(key) == 0
    assert store.batch_put_session_end([key]) == [0]
    assert store.batch_put_session_revoke([other, other]) == [0, INVALID]
    assert store.get(key) == bytes([*range(32, 52), *range(20)])
    assert store.batch_get_session_start([key, other]) == [0, MISSING]
    assert store.batch_get_into_multi_buffer_ranges([key], [[memory.address] * 2], [[4, 4]], [[0, 20]]) == [8]
    assert memory[:4] == bytes(range(4))
    for ranges in ([[41]], [[-1]]):
        assert store.batch_get_into_multi_buffer_ranges([key], [[memory.address]], [[1]], ranges) == [INVALID]
    assert store.batch_get_session_end([key]) == 0
    assert store.batch_get_into_multi_buffer_ranges([key], [[memory.address]], [[1]], [[0]]) == [INVALID]


def test_replicas_are_described(store, key):
    store.put(key, b"v" * 100)
    descriptors = store.batch_get_replica_desc([key, "none"])
    assert list(descriptors) == [key]
    replica = descriptors.get(key)[0]
    assert replica.is_memory_replica() and not replica.is_disk_replica() and not replica.is_local_disk_replica()
    assert replica.get_memory_descriptor().buffer_descriptor.size == 100
    with pytest.raises(RuntimeError):
        replica.get_disk_descriptor()


def test_what_is_not_there_says_so(store, key):
    assert store.create_copy_task(key, ["s"]) == ((0, 0), -101)
    assert store.create_move_task(key, "s", "t") == ((0, 0), -101)
    assert store.query_task((1, 2)) == (None, -1400)
    assert store.mount_segment("/dev/shm/x", 1 << 20) == {"ret": UNSUPPORTED, "segment_ids": []}


def test_allocated_memory_is_used_and_freed(store, key):
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(1 << 20)
    assert address > 0 and allocator.alloc(0) == 0
    assert store.register_buffer(address, 1 << 20) == 0
    assert store.put_from(key, address, 100) == 0
    before = store._connection.lent_puts
    assert store.put_from(f"{key}/large", address, 1 << 20) == 0
    assert store._connection.lent_puts == before + 1
    assert store.unregister_buffer(address) == 0
    assert (allocator.free(address), allocator.free(address)) == (0, -1)
    pointer = store.alloc_from_mem_pool(4096)
    assert store.get_into(key, pointer, 4096) == 100


def test_a_pool_lends_registered_buffers(store, key):
    with pytest.raises(ValueError):
        BufferPool(store, min_size_class=0)
    pool = BufferPool(store, max_bytes=1 << 20, min_size_class=1 << 16, default_timeout=0.05)
    with pool.acquire(100_000) as lease:
        lease.buffer[:5] = b"hello"
        assert lease.size == 100_000
        assert store.put_from(key, lease.ptr, 5) == 0
        first = lease.ptr
    with pytest.raises(RuntimeError):
        lease.buffer
    again = pool.buffer(70_000)
    assert again.ptr == first, "the same class is used again"
    big = pool.acquire(800_000, block=False) if False else None
    assert big is None
    with pytest.raises(RuntimeError):
        pool.acquire(1 << 20, block=False)
    with pytest.raises(TimeoutError):
        pool.acquire(1 << 20)
    with pytest.raises(ValueError):
        pool.acquire(2 << 20)
    again.release()
    again.release()
    whole = pool.acquire(1 << 20)
    taken = []
    waiter = threading.Thread(target=lambda: taken.append(pool.acquire(1 << 20, timeout=30)))
    waiter.start()
    whole.release()
    waiter.join()
    assert len(taken) == 1
    pool.close()
    taken.pop().release()
    with pytest.raises(RuntimeError):
        pool.acquire(1)
    assert store.get(key) == b"hello"


def test_a_thread_is_bound_or_not_and_nothing_breaks():
    code = "from mooncake.store import bind_to_numa_node; bind_to_numa_node(0); bind_to_numa_node(999)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert inspect.signature(bind_to_numa_node).parameters.keys() == {"node"}


def test_a_store_is_shared_by_threads(store, key, memory):
    failures = []

    def work(number):
        try:
            memory_ = memory(1 << 16, bytes([number]) * (1 << 16))
            assert store.register_buffer(memory_.address, 1 << 16) == 0
            for turn in range(20):
                names = [f"{key}/{number}/{turn}/{place}" for place in range(4)]
                assert store.batch_put_from(names, [memory_.address] * 4, [1 << 16] * 4) == [0] * 4
                assert store.batch_is_exist(names) == [1] * 4
                assert store.batch_get_into(names, [memory_.address] * 4, [1 << 16] * 4) == [1 << 16] * 4
                assert memory_[:] == bytes([number]) * (1 << 16)
                assert store.batch_remove(names, True) == [0] * 4
            assert store.unregister_buffer(memory_.address) == 0
        except BaseException as error:  # noqa: BLE001 - given to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_server_that_is_gone_is_a_code_and_back_again(own_node, memory):
    memory = memory(1 << 20)
    store = MooncakeDistributedStore()
    assert store.setup(setup_of(own_node)) == 0
    assert store.put("k", b"v") == 0
    own_node.kill()
    assert store.put("l", b"v") in (-900, -901)
    assert store.get("k") == b""
    assert store.is_exist("k") < 0
    assert store.batch_is_exist(["k"])[0] < 0
    assert store.batch_get_into(["k"], [memory.address], [10])[0] in (-900, -901)
    assert store.batch_put_from(["l"], [memory.address], [10])[0] in (-900, -901)
    assert store.remove_all() in (-900, -901)
    assert store.health_check() == 2
    own_node.start()
    assert store.health_check() == 0
    assert store.put("m", b"v") == 0
    assert store.get("m") == b"v"
    store.close()
