"""What the store promises, call by call."""

import threading

import pytest
from node import Node

import tidepool
from tidepool import DataType

KIB = 1024
MIB = 1024 * KIB


def pattern(length, seed=0):
    return bytes((seed + place * 7 + place // 251) % 256 for place in range(min(length, 65_521))) * (length // 65_521 + 1)


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 4097, 256 * KIB, MIB, MIB + 1, 4 * MIB, 4 * MIB + 1, 13 * MIB + 1])
def test_a_value_comes_back_as_it_was(store, key, length):
    value = pattern(length)[:length]
    assert store.put(key, value) is True
    assert store.get(key) == value
    assert store.stat(key).length == length
    view = store.get_view(key)
    assert (len(view), bytes(view)) == (length, value)
    buffer = bytearray(length + 1)
    assert store.get_into(key, buffer) == length
    assert buffer == value + b"\0"
    store.remove(key)


def test_a_missing_object_is_none(store, key):
    assert store.get(key) is None
    assert store.get_view(key) is None
    assert store.get_into(key, bytearray(1)) is None
    assert store.stat(key) is None
    assert store.exists(key) is False
    assert store.remove(key) is False
    assert store.get_tensor(key) is None
    assert store.get_tree(key) is None
    assert store.get_batch([key, key]) == [None, None]
    assert store.get_batch_into([key], [bytearray(1)]) == [None]


def test_the_first_value_stays_unless_it_is_upserted(store, key):
    assert store.put(key, b"one") is True
    assert store.put(key, b"other, longer") is False
    assert store.get(key, fresh=True) == b"one"
    store.upsert(key, b"two")
    assert store.get(key, fresh=True) == b"two"


def test_a_striped_value_comes_back_and_leaves_nothing(store, key):
    value = pattern(1_000_000)[:1_000_000]
    before = len(list(store.list("stripes/")))
    assert store.get_striped(key) is None
    assert store.put_striped(key, value, part_bytes=300_000) is True
    assert store.put_striped(key, b"other") is False
    assert store.get_striped(key) == value
    assert store.get_striped(key, offset=299_999, length=2) == value[299_999:300_001]
    assert store.get_striped(key, offset=999_000) == value[999_000:]
    with pytest.raises(tidepool.InvalidError, match="BAD_RANGE|bytes"):
        store.get_striped(key, offset=1, length=1_000_000)
    assert len(list(store.list("stripes/"))) == before + 4
    assert store.put_striped(key, b"new", upsert=True) is True
    assert store.get_striped(key) == b"new"
    assert store.remove_striped(key) is True and store.remove_striped(key) is False
    assert len(list(store.list("stripes/"))) == before
    store.put(key, b"plain")
    with pytest.raises(tidepool.InvalidError) as refused:
        store.get_striped(key)
    assert refused.value.reason == "NOT_STRIPED"


def test_keys_are_bytes_and_text_is_its_utf8(store, key):
    text = f"{key}/schlüssel"
    store.put(text, b"x")
    assert store.exists(text.encode())
    odd = key.encode() + bytes(range(256))
    store.put(odd, b"y")
    assert store.get(odd) == b"y"
    assert [found.key for found in store.list(key)] == sorted([text.encode(), odd])


@pytest.mark.parametrize("bad, reason", [("", "KEY_EMPTY"), ("k" * 1025, "KEY_TOO_LONG")])
def test_what_is_no_key_is_refused(store, bad, reason):
    for call in (store.get, store.exists, store.remove, store.stat, lambda key: store.put(key, b"x")):
        with pytest.raises(tidepool.InvalidError) as error:
            call(bad)
        assert error.value.reason == reason
        assert isinstance(error.value, ValueError)
    store.put("k" * 1024, b"x")
    store.remove("k" * 1024)


def test_everything_with_a_buffer_is_a_value(store, key):
    import array

    values = [b"bytes", bytearray(b"array"), memoryview(b"view"), array.array("i", range(3000))]
    for place, value in enumerate(values):
        store.put(f"{key}/{place}", value)
        assert store.get(f"{key}/{place}") == bytes(value)


def test_wrong_types_are_refused(store, key):
    for value in ("text", 17, None, object(), ["list"]):
        with pytest.raises(TypeError):
            store.put(key, value)
    for wrong in (17, None, bytearray(b"k"), object()):
        with pytest.raises(TypeError):
            store.get(wrong)
    with pytest.raises(TypeError):
        store.get_batch(key)
    with pytest.raises(TypeError, match="colour"):
        store.put_from(key, b"x", colour="red")
    with pytest.raises(tidepool.InvalidError, match="durability"):
        store.put(key, b"x", durability="eternal")
    with pytest.raises(tidepool.InvalidError):
        store.put(key, b"x", data_type=99)
    assert store.exists(key) is False


def test_buffers_that_can_not_take_the_object_are_refused(store, key):
    store.put(key, pattern(10_000)[:10_000])
    with pytest.raises(BufferError):
        store.get_into(key, bytes(10_000))
    with pytest.raises(BufferError):
        store.get_into(key, memoryview(bytearray(20_000))[::2])
    with pytest.raises(TypeError):
        store.get_into(key, "text")
    with pytest.raises(tidepool.InvalidError) as error:
        store.get_into(key, bytearray(9_999))
    assert error.value.reason == "BAD_RANGE"
    with pytest.raises(BufferError):
        store.put(f"{key}/2", memoryview(bytearray(20_000))[::2])


def test_a_buffer_is_free_again_after_its_call(store, key):
    buffer = bytearray(MIB)
    store.put(key, buffer)
    buffer.extend(b"more")
    buffer = bytearray(MIB)
    store.get_into(key, buffer)
    buffer.clear()


def test_ranges_are_read(store, key):
    value = pattern(3 * MIB)[: 3 * MIB]
    store.put(key, value)
    assert store.get(key, offset=5, length=7) == value[5:12]
    assert store.get(key, offset=2 * MIB) == value[2 * MIB :]
    assert store.get(key, offset=3 * MIB) == b""
    buffer = bytearray(1000)
    assert store.get_into(key, buffer, offset=MIB - 500) == 3 * MIB
    assert buffer == value[MIB - 500 : MIB + 500]
    with pytest.raises(tidepool.InvalidError) as error:
        store.get(key, offset=3 * MIB, length=1)
    assert error.value.reason == "BAD_RANGE"


def test_a_view_outlives_its_store_and_can_be_written(node, key):
    with tidepool.Store.connect(node.grpc) as store:
        store.put(key, b"0123456789" * 1000)
        view = store.get_view(key)
    memory = memoryview(view)
    assert not memory.readonly
    memory[:3] = b"abc"
    assert bytes(memory[:5]) == b"abc34"
    assert view.ptr() != 0
    with pytest.raises(TypeError):
        tidepool.View(None)


def test_batches_give_one_answer_a_key(store, key):
    keys = [f"{key}/{place}" for place in range(300)]
    values = [pattern(place * 97, place)[: place * 97] for place in range(300)]
    values[7] = pattern(5 * MIB)[: 5 * MIB]
    assert store.put_batch(keys, values) == [True] * 300
    assert store.put_batch(keys[:2], [b"", b""]) == [False, False]
    assert store.get_batch([*keys, "missing"]) == [*values, None]
    assert [bytes(view) for view in store.get_batch_views(keys[:3])] == values[:3]
    assert store.exists_batch(["missing", *keys]) == [False, *[True] * 300]
    buffers = [bytearray(len(value)) for value in values]
    assert store.get_batch_into(keys, buffers) == list(map(len, values))
    assert list(map(bytes, buffers)) == values
    assert store.remove_batch([*keys, "missing"]) == ["removed"] * 300 + ["missing"]


def test_one_bad_item_does_not_spoil_a_batch_of_reads(store, key):
    store.put_batch([f"{key}/a", f"{key}/b"], [b"a" * 100, b"b" * 100])
    got = store.get_batch_into([f"{key}/a", f"{key}/b"], [bytearray(99), bytearray(100)])
    assert isinstance(got[0], tidepool.InvalidError) and got[0].reason == "BAD_RANGE"
    assert got[1] == 100


def test_the_same_key_twice_in_a_batch(store, key):
    assert store.put_batch([key, key], [b"one", b"two"]) in ([True, False], [False, True])
    assert store.get_batch([key, key])[0] == store.get_batch([key, key])[1]


def test_lists_of_different_length_are_refused(store, key):
    for call in (
        lambda: store.put_batch([key], []),
        lambda: store.get_batch_into([key], []),
        lambda: store.get_batch_into([], [bytearray(1)]),
    ):
        with pytest.raises(tidepool.InvalidError) as error:
            call()
        assert error.value.reason == "LENGTH_MISMATCH"
    assert store.put_batch([], []) == []
    assert store.get_batch([]) == []


def test_parts_are_one_object(store, key):
    store.put_parts(key, [b"head", bytearray(b"-"), memoryview(b"tail")])
    assert store.get(key) == b"head-tail"
    store.put_parts(f"{key}/none", [])
    assert store.get(f"{key}/none") == b""


def test_objects_are_listed_with_what_was_said_of_them(store, key):
    store.put(f"{key}/1", b"abc", data_type=DataType.KV_CACHE, group="g", pin=True)
    store.put(f"{key}/2", b"defg", durability="nvme")
    first, second = store.list(key, page_size=1)
    assert first == (f"{key}/1".encode(), 3, DataType.KV_CACHE, "g", 1, 1)
    assert (second.length, second.pins) == (4, 0)
    stat = store.stat(f"{key}/1")
    assert (stat.length, stat.data_type, stat.group, stat.pins, len(stat.replicas)) == (3, DataType.KV_CACHE, "g", 1, 1)
    assert [found.key for found in store.list(key, data_type=DataType.KV_CACHE)] == [f"{key}/1".encode()]


def test_pinned_objects_are_removed_by_force_only(store, key):
    store.put(key, b"x")
    assert store.pin([key, "missing"]) == [True, False]
    with pytest.raises(tidepool.ConflictError) as error:
        store.remove(key)
    assert error.value.reason == "PINNED"
    assert store.unpin([key]) == [True]
    store.pin([key])
    assert store.remove(key, force=True) is True


def test_objects_are_removed_by_prefix_and_pattern(store, key):
    for place in range(10):
        store.put(f"{key}/{place}", b"x")
    assert store.remove_matching(pattern=f"{key}/[0-3]$").removed == 4
    assert store.remove_matching(prefix=f"{key}/").removed == 6
    with pytest.raises(tidepool.InvalidError):
        store.remove_matching()
    with pytest.raises(tidepool.InvalidError) as error:
        store.remove_matching(pattern="(")
    assert error.value.reason == "BAD_PATTERN"


def test_leases_are_given_and_ended(store, key):
    store.put(key, b"x")
    granted, none = store.lease([key, "missing"], 10)
    assert 9 < granted <= 10 and none == 0
    assert store.stat(key).lease > 8
    store.release([key])
    assert store.exists(key, lease=5) is True
    with pytest.raises(tidepool.InvalidError):
        store.lease([key], -1)


def test_the_server_says_what_it_is(store):
    info = store.server_info()
    assert info.version == tidepool.__version__
    assert info.phase == "serving"


def test_reads_on_the_same_host_take_no_call(node, key):
    with tidepool.Store.connect(node.socket) as writer, tidepool.Store.connect(node.socket) as reader:
        value = pattern(3 * MIB)[: 3 * MIB]
        writer.put(key, value)
        buffer = bytearray(3 * MIB)
        assert reader.get_into(key, buffer) == 3 * MIB
        assert buffer == value and reader.get(key) == value
        assert reader.local_hits == 2
        assert reader.get_into(key, buffer, fresh=True) == 3 * MIB
        assert reader.local_hits == 2


def test_objects_are_read_where_they_lie_if_that_is_asked_for(node, key):
    value = pattern(MIB)[:MIB]
    away = {"same_host": False, "local_reads": False}
    with tidepool.Store.connect(node.grpc, one_sided_reads="always", **away) as one_sided:
        one_sided.put(key, value)
        buffer = bytearray(MIB)
        assert one_sided.get(key) == value and one_sided.get_into(key, buffer) == MIB and buffer == value
        assert one_sided.one_sided_reads == 2
        one_sided.put(f"{key}/small", b"v")
        assert one_sided.get(f"{key}/small") == b"v" and one_sided.one_sided_reads == 2
        assert one_sided.one_sided_puts == 1
    with tidepool.Store.connect(node.grpc, one_sided_reads="always", one_sided_puts=False, **away) as reads_alone:
        assert reads_alone.put(f"{key}/2", value) and reads_alone.get(f"{key}/2") == value
        assert (reads_alone.one_sided_reads, reads_alone.one_sided_puts) == (1, 0)
    with tidepool.Store.connect(node.grpc, one_sided_reads="never", **away) as never:
        assert never.get(key) == value and never.put(f"{key}/3", value)
        assert (never.one_sided_reads, never.one_sided_puts) == (0, 0)
    with pytest.raises(tidepool.InvalidError, match="one_sided_reads") as error:
        tidepool.Store.connect(node.grpc, one_sided_reads="sometimes")
    assert error.value.field == "one_sided_reads"


def test_what_has_a_soft_pin_leaves_last(tmp_path):
    node = Node(tmp_path / "data", dram="32MiB", more=["nvme.enabled=false"]).start()
    try:
        with tidepool.Store.connect(node.grpc) as store:
            assert store.put("pinned", bytes(MIB), soft_pin=3600)
            assert store.put("plain", bytes(MIB))
            assert store.put("let go", bytes(MIB), soft_pin=3600.5)
            store.upsert("let go", bytes(MIB), soft_pin=0)
            for number in range(100):
                assert store.put(f"k/{number}", bytes(MIB))
            assert store.exists_batch(["pinned", "plain", "let go"]) == [True, False, False]
            for wrong in (-1, 86_401, float("nan"), float("inf")):
                with pytest.raises(tidepool.InvalidError, match="soft_pin"):
                    store.put("k", b"v", soft_pin=wrong)
    finally:
        node.stop()


def test_threads_share_a_store(store, key):
    failures = []

    def work(number):
        try:
            for turn in range(20):
                name, value = f"{key}/{number}/{turn}", pattern(50_000, number)[: 50_000 + turn]
                assert store.put(name, value)
                assert store.get(name) == value
                assert store.exists(name)
        except BaseException as error:  # noqa: BLE001 - given to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_values_in_allocated_memory_are_copied_by_the_node_alone(store, key):
    memory = tidepool.allocate(4 * MIB)
    assert len(memory) == 4 * MIB and bytes(memory) == bytes(4 * MIB)
    view = memoryview(memory)
    view[:] = pattern(4 * MIB)[: 4 * MIB]
    before = store.lent_puts
    assert store.put(key, view[77 : MIB + 77]) is True
    assert store.put_batch([f"{key}/{part}" for part in range(4)], [view[part * MIB :][:MIB] for part in range(4)])
    assert store.lent_puts > before + 1
    assert store.get(key) == view[77 : MIB + 77]
    assert all(store.get(f"{key}/{part}") == view[part * MIB :][:MIB] for part in range(4))
    # What is in the store does not change with the memory.
    view[:] = bytes(4 * MIB)
    assert store.get(f"{key}/1") == pattern(4 * MIB)[MIB : 2 * MIB]


def test_values_of_several_parts_are_gathered_where_the_node_copies_them(store, key):
    before = store.lent_puts
    assert store.put_parts(f"{key}/alone", [bytes(50_000), bytes(50_000)])
    assert store.lent_puts == before + 1
    # More at once than memories are kept for that, and one that is too large for them: those go another way.
    parts = [[pattern(length, seed)[:length] for seed in range(3)] for length in [*range(20_000, 60_000, 2_000), 2 * MIB]]
    failed = []

    def put(number):
        if not store.put_parts(f"{key}/{number}", parts[number]):
            failed.append(number)

    threads = [threading.Thread(target=put, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    for number, values in enumerate(parts):
        assert store.get(f"{key}/{number}") == b"".join(values), number


def test_memory_that_can_not_be_is_not_allocated():
    for length, error in ((0, tidepool.InvalidError), (1 << 50, MemoryError), (-1, OverflowError), (1 << 70, OverflowError)):
        with pytest.raises(error):
            tidepool.allocate(length)
