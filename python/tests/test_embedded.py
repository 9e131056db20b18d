"""Instances in a program's process: they lend memory, others find what they hold, and they come and go."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from node import Node

import tidepool
from test_faults import in_process

MIB = 1024 * 1024
SMALL = {"dram": "32MiB", "settings": {"store.slice_bytes": "256KiB", "nvme.region_bytes": "1MiB"}}


def guests(node):
    with urllib.request.urlopen(f"http://{node.addresses['admin']}/v1/nodes", timeout=10) as answer:
        return [row for row in json.load(answer)["nodes"] if row["vote"] == "guest"]


def until(holds, within=60.0):
    end = time.monotonic() + within
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.fixture
def embedded(node):
    with tidepool.Store.embedded(node.grpc, **SMALL) as store:
        yield store


def test_others_find_what_it_holds_and_it_finds_what_they_hold(node, store, embedded, key):
    value = os.urandom(MIB + 3)
    assert embedded.put(key, value)
    assert embedded.get(key) == value and embedded.local_hits > 0
    assert store.get(key) == value
    assert [replica.node for replica in store.stat(key).replicas] == [embedded.node]
    assert store.put(key + "/2", b"there")
    assert embedded.get(key + "/2") == b"there"
    (row,) = [row for row in guests(node) if row["node"] == embedded.node]
    assert (row["dram"], row["nvme"], row["admin"], row["grpc"]) == (32 * MIB, 0, "", embedded.address)


def test_what_it_holds_stays_in_the_store_when_it_is_closed(node, store, key):
    with tidepool.Store.embedded([node.grpc], **SMALL) as embedded:
        for number in range(20):
            assert embedded.put(f"{key}/{number}", b"%d" % number * 1000)
    assert embedded.closed
    embedded.close()
    with pytest.raises(tidepool.ConflictError) as error:
        embedded.get(key)
    assert error.value.reason == "CLOSED"
    for number in range(20):
        assert store.get(f"{key}/{number}") == b"%d" % number * 1000
    assert not [row for row in guests(node) if row["node"] == embedded.node]


def test_one_is_awaited(node, store, key):
    async def use():
        async with await tidepool.AsyncStore.embedded(node.grpc, **SMALL) as embedded:
            values = [os.urandom(100_000) for _ in range(8)]
            stored = await asyncio.gather(*(embedded.put(f"{key}/{at}", value) for at, value in enumerate(values)))
            assert stored == [True] * 8
            assert await asyncio.gather(*(embedded.get(f"{key}/{at}") for at in range(8))) == values
            assert embedded.node in [row["node"] for row in guests(node)]
        assert embedded.closed and embedded.node not in [row["node"] for row in guests(node)]
        other = await tidepool.AsyncStore.embedded(node.grpc, **SMALL)
        await other.put(f"{key}/lost", b"v")
        assert await other.leave(hand_over=0) == 1
        with pytest.raises(tidepool.InvalidError):
            await tidepool.AsyncStore.embedded(node.grpc, hand_over=-1)
        return values

    values = asyncio.run(use())
    assert [store.get(f"{key}/{at}") for at in range(8)] == values
    assert store.get(f"{key}/lost") is None


def test_copies_go_to_nodes_that_are_preferred_and_are_read_there(node, store, key):
    lenders = [tidepool.Store.embedded(node.grpc, **SMALL) for _ in range(3)]
    try:
        here, *others = lenders
        for turn, other in enumerate(others * 2):
            # By its number, and by its address.
            name = other.node if turn < 2 else other.address
            value = os.urandom(MIB)
            assert here.put(f"{key}/{turn}", value, replicas=2, min_replicas=2, prefer=["nobody", name])
            holders = [replica.node for replica in store.stat(f"{key}/{turn}").replicas]
            assert sorted(holders) == sorted([here.node, other.node])
            # The node that is asked holds none: it names those that do, of which one or two are asked.
            for hedged in (True, False):
                with tidepool.Store.connect(node.grpc, hedged_reads=hedged) as reader:
                    assert all(reader.get(f"{key}/{turn}") == value for _ in range(30))
        with pytest.raises(tidepool.InvalidError) as error:
            here.put(key, b"v", prefer=["n"] * 17)
        assert error.value.reason == "BAD_PREFERENCE"
        with pytest.raises(tidepool.InvalidError):
            here.put(key, b"v", prefer="nobody")
    finally:
        for lender in lenders:
            lender.leave(hand_over=0)


def test_copies_have_the_soft_pin_of_their_put(node, store, key):
    here, there = (tidepool.Store.embedded(node.grpc, **SMALL) for _ in range(2))
    try:
        put = {"replicas": 2, "min_replicas": 2, "prefer": [there.node]}
        assert here.put(f"{key}/soft", bytes(MIB), soft_pin=3600, **put)
        for number in range(100):
            assert there.put(f"{key}/{number}", bytes(MIB))
        holders = [replica.node for replica in store.stat(f"{key}/soft").replicas]
        assert sorted(holders) == sorted([here.node, there.node])
    finally:
        here.leave(hand_over=0)
        there.leave(hand_over=0)


def test_what_it_does_not_hand_over_is_missing(node, store, key):
    embedded = tidepool.Store.embedded(node.grpc, **SMALL)
    embedded.put(key, b"v")
    assert embedded.leave(hand_over=0) == 1
    assert store.get(key) is None
    assert store.put(key, b"anew")


@pytest.mark.parametrize("never", [-1.0, float("nan"), float("inf"), 1e300])
def test_a_time_that_can_not_be_meant_ends_nothing(embedded, key, never):
    with pytest.raises(tidepool.InvalidError) as error:
        embedded.leave(hand_over=never)
    assert error.value.reason == "BAD_ARGUMENT"
    assert not embedded.closed and embedded.put(key, b"v")


def test_who_comes_second_to_close_it_is_not_told_of_an_error(node):
    embedded = tidepool.Store.embedded(node.grpc, **SMALL)
    # As another thread does that has not come to close the connection yet.
    embedded._instance.leave(False, 0.0, None)
    assert not embedded.closed
    embedded.close()

    async def use():
        embedded = await tidepool.AsyncStore.embedded(node.grpc, **SMALL)
        await embedded._instance.leave(True, 0.0, None)
        await embedded.aclose()
        embedded.close()

    asyncio.run(use())


def test_its_end_waits_for_calls_that_are_under_way(node, tmp_path):
    async def use():
        store = await tidepool.AsyncStore.embedded(node.grpc, nvme="64MiB", nvme_path=tmp_path, **SMALL)
        await store.detach_nvme()
        attached, left = await asyncio.gather(store.attach_nvme(), store.leave(hand_over=0), return_exceptions=True)
        # Which of the two comes first is not said; the second is told if the first was the end.
        assert attached == 0 or attached.reason == "CLOSED"
        assert left == 0 and store.closed

    asyncio.run(use())


def test_one_that_nobody_names_stays_until_the_program_ends(node, store, key):
    code = """
import gc, sys, tidepool
node = tidepool.Store.embedded(sys.argv[1], dram="32MiB")
node.put(sys.argv[2], b"v")
del node
gc.collect()
with tidepool.Store.connect(sys.argv[1]) as store:
    assert store.get(sys.argv[2]) == b"v"
"""
    returned, output = in_process(code, node.grpc, key)
    assert returned == 0, output
    assert store.get(key) == b"v"


def test_the_end_of_the_program_closes_it(node, store, key):
    code = """
import sys, tidepool
store = tidepool.Store.embedded(sys.argv[1], dram="32MiB")
store.put(sys.argv[2], b"v")
print(store.node)
"""
    returned, output = in_process(code, node.grpc, key)
    assert returned == 0, output
    assert store.get(key) == b"v"
    assert output.strip() not in [row["node"] for row in guests(node)]


def test_a_killed_program_is_given_up(tmp_path, key):
    node = Node(tmp_path / "data", more=["replicas.repair_grace=0s"]).start()
    code = """
import sys, tidepool
store = tidepool.Store.embedded(sys.argv[1], dram="32MiB")
store.put(sys.argv[2], b"v")
print("there", flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, node.grpc, key]
    program = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout.readline() == "there\n"
        with tidepool.Store.connect(node.grpc, deadline=5.0) as store:
            assert store.get(key) == b"v"
            program.send_signal(signal.SIGKILL)
            program.wait()
            with pytest.raises(tidepool.UnavailableError):
                store.get(key)
            until(lambda: not guests(node))
            assert store.get(key) is None
    finally:
        program.kill()
        program.wait()
        program.stdin.close()
        program.stdout.close()
        node.stop()


def test_one_with_a_folder_comes_back(node, store, key, tmp_path):
    # The segment outlives it, as it should: this goes with the node of the tests.
    settings = {**SMALL["settings"], "dram.folder": node.segments.name}
    lent = {"data": tmp_path / "data", "nvme": "64MiB", "nvme_path": tmp_path / "disk", "dram": "32MiB", "settings": settings}
    with tidepool.Store.embedded(node.grpc, **lent) as embedded:
        assert not embedded.temporary
        embedded.put(key, b"v", durability="nvme")
        number = embedded.node
    assert (tmp_path / "disk" / "regions.dat").exists()
    with tidepool.Store.embedded(node.grpc, **lent) as embedded:
        assert embedded.node == number
        until(lambda: embedded.exists(key) is True)
        assert store.get(key) == b"v"
        embedded.leave()


def test_its_disk_is_exchanged_while_it_serves(node, key, tmp_path):
    with tidepool.Store.embedded(node.grpc, nvme="64MiB", nvme_path=tmp_path, **SMALL) as embedded:
        embedded.put(key, b"v", durability="nvme")
        embedded.detach_nvme()
        with pytest.raises(tidepool.TidepoolError):
            embedded.put(key + "/2", b"v", durability="nvme")
        assert embedded.attach_nvme(capacity="128MiB") == 1
        assert embedded.put(key + "/2", b"v", durability="nvme")
        with pytest.raises(tidepool.InvalidError):
            embedded.attach_nvme(capacity="a lot")
    assert list(tmp_path.iterdir()) == []


def test_a_child_of_the_process_does_not_touch_it(node, embedded, key):
    embedded.put(key, b"v")
    child = os.fork()
    if child == 0:
        reasons = []
        for call in (lambda: embedded.get(key), embedded.detach_nvme, embedded.leave):
            try:
                call()
            except tidepool.ConflictError as error:
                reasons.append(error.reason)
        os._exit(0 if reasons == ["FORKED"] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert embedded.get(key) == b"v"


@pytest.mark.parametrize(
    "wrong, reason",
    [
        ({"dram": "1MiB"}, "BAD_CONFIG"),
        ({"dram": "much"}, "BAD_CONFIG"),
        ({"nvme_path": "/tmp"}, "BAD_ARGUMENT"),
        ({"nvme": "64MiB", "nvme_write_policy": "sometimes"}, "BAD_CONFIG"),
        ({"settings": {"no.such": 1}}, "BAD_CONFIG"),
        ({"listen": "0.0.0.0:0"}, "BAD_CONFIG"),
        ({"join": []}, "BAD_CONFIG"),
        ({"hand_over": -1.0}, "BAD_ARGUMENT"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(node, wrong, reason):
    with pytest.raises(tidepool.InvalidError) as error:
        tidepool.Store.embedded(**{"join": node.grpc, **wrong})
    assert error.value.reason == reason
    with pytest.raises(TypeError):
        tidepool.Store.embedded(node.grpc, unknown=1)


def test_a_secret_is_asked_for(guarded_node, secret):
    with tidepool.Store.embedded(guarded_node.grpc, token_file=secret, **SMALL) as store:
        assert store.put("k", b"v") and store.get("k") == b"v"
    with pytest.raises(tidepool.TidepoolError) as error:
        tidepool.Store.embedded(guarded_node.grpc, **SMALL)
    assert error.value.reason == "FOREIGN_SECRET"
    assert secret.exists()
