"""Segments that a client lends, as the environment says."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, TaskStatus, TaskType
from test_embedded import guests

import tidepool

MIB = 1 << 20


def settings(node, **changes):
    named = {
        "local_hostname": "localhost",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "32MB",
        "protocol": "tcp",
        "master_server_addr": node.grpc,
    }
    return {**named, **changes}


@pytest.fixture
def lending(monkeypatch):
    monkeypatch.setenv("TIDEPOOL_LEND_SEGMENT", "1")


@pytest.fixture
def other(node):
    with tidepool.Store.connect(node.grpc) as other:
        yield other


def holders(other, key):
    return [replica.node for replica in other.stat(key).replicas]


def test_nobody_lends_who_was_not_told_to(node):
    store = MooncakeDistributedStore()
    assert store.setup(settings(node)) == 0 and guests(node) == []
    assert store.close() == 0


def test_a_segment_is_lent_until_the_store_is_closed(node, other, key, lending):
    lender = MooncakeDistributedStore()
    assert lender.setup(settings(node)) == 0
    (guest,) = guests(node)
    assert (guest["dram"], guest["nvme"]) == (32 * MIB, 0) and guest["grpc"].startswith("127.0.0.1:")
    assert lender.put(key, b"v" * MIB) == 0 and lender.get(key) == b"v" * MIB
    assert holders(other, key) == [guest["node"]]
    assert lender.close() == 0 and guests(node) == [] and lender.close() == 0
    assert other.get(key) == b"v" * MIB and holders(other, key) != [guest["node"]]
    # One without a segment lends nothing.
    assert lender.setup(settings(node, global_segment_size=0)) == 0 and guests(node) == []
    assert lender.close() == 0


def test_a_segment_goes_with_a_store_that_is_not_closed(node, lending):
    lender = MooncakeDistributedStore()
    assert lender.setup("127.0.0.1:17812", "P2PHANDSHAKE", 32 * MIB, 0, "tcp", "", f"http://{node.grpc}") == 0
    assert len(guests(node)) == 1
    del lender
    gc.collect()
    assert guests(node) == []


def test_nothing_keeps_what_was_lent(node, lending):
    lender = MooncakeDistributedStore()
    assert lender.setup(settings(node)) == 0
    (segment,) = lender.allocate_and_mount_segment(32 * MIB)["segment_ids"]
    lent = [weakref.ref(lender._opened), weakref.ref(lender._segments[segment])]
    assert lender.unmount_segment([segment]) == 0 and lender.close() == 0
    gc.collect()
    assert [each() for each in lent] == [None, None]


def test_offload_lends_a_part_of_the_disk(node, lending, tmp_path, monkeypatch):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(256 * MIB))
    lender = MooncakeDistributedStore()
    offload = {"enable_ssd_offload": "true", "ssd_offload_path": str(tmp_path)}
    assert lender.setup(settings(node, **offload)) == 0
    (guest,) = guests(node)
    assert guest["nvme"] == 256 * MIB and len(list(tmp_path.iterdir())) == 1
    assert lender.close() == 0 and list(tmp_path.iterdir()) == []


def test_segments_are_lent_and_taken_back_while_the_store_is_open(node, other, key):
    lender = MooncakeDistributedStore()
    nothing = {"ret": -600, "segment_ids": [], "allocated_size": 0}
    assert lender.allocate_and_mount_segment(32 * MIB) == nothing
    assert lender.setup(settings(node)) == 0 and guests(node) == []
    assert lender.allocate_and_mount_segment(MIB) == nothing and lender.allocate_and_mount_segment(0) == nothing
    mounted = lender.allocate_and_mount_segment(32 * MIB)
    assert (mounted["ret"], mounted["allocated_size"]) == (0, 32 * MIB)
    (segment,) = mounted["segment_ids"]
    assert [guest["node"] for guest in guests(node)] == [segment]
    assert lender.unmount_and_free_segment(["none"]) == -101 and lender.unmount_segment([segment], -1) == -600
    with tidepool.Store.connect(next(guest["grpc"] for guest in guests(node))) as there:
        assert there.put(key, b"v") and holders(other, key) == [segment]
    assert lender.unmount_and_free_segment([segment], 20) == 0 and guests(node) == []
    assert other.get(key) == b"v" and lender.unmount_segment([segment]) == -101
    assert lender.allocate_and_mount_segment(32 * MIB)["ret"] == 0
    assert lender.close() == 0 and guests(node) == []


def test_what_can_not_be_lent_is_a_code(node, lending, monkeypatch):
    new = MooncakeDistributedStore
    assert new().setup(settings(node, global_segment_size=1 * MIB)) == -600
    assert new().setup(settings(node, master_server_addr=node.socket)) == -600
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", "a lot")
    assert new().setup(settings(node, enable_ssd_offload="1")) == -600
    assert guests(node) == []


def test_a_client_service_lends_for_its_clients(node, other, key, lending, tmp_path):
    flags = ["--port=0", f"--master_server_address={node.grpc}", "--global_segment_size=32 MB", "--threads=1"]
    command = [sys.executable, "-m", "mooncake.cli_client", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=dict(os.environ), text=True) as service:
        killer = threading.Timer(60, service.kill)
        killer.start()
        try:
            address = service.stdout.readline().split()[2]
            (guest,) = guests(node)
            client = MooncakeDistributedStore()
            assert client.setup_dummy(MIB, MIB, address) == 0
            assert client.put(key, b"v") == 0 and holders(other, key) == [guest["node"]]
            assert client.close() == 0
        finally:
            service.terminate()
            code = service.wait()
            killer.cancel()
    assert code == 0 and guests(node) == []
    assert other.get(key) == b"v"


@pytest.mark.parametrize("single", [True, False])
def test_copies_go_to_segments_that_are_preferred(node, other, key, single):
    lender, config = MooncakeDistributedStore(), ReplicateConfig()
    assert lender.setup(settings(node)) == 0
    try:
        segments = [lender.allocate_and_mount_segment(32 * MIB)["segment_ids"][0] for _ in range(2)]
        here = other.server_info().node
        config.replica_num = 2
        for turn, segment in enumerate(segments * 2):
            if single:
                # The older name of the two, which wins.
                config.preferred_segment, config.preferred_segments = segment, ["nobody"]
            else:
                config.preferred_segments = ["nobody", segment]
            assert lender.put(f"{key}/{turn}", b"v" * MIB, config) == 0
            assert sorted(holders(other, f"{key}/{turn}")) == sorted([here, segment])
    finally:
        assert lender.close() == 0


def ended(store, task, within=30.0):
    until = time.monotonic() + within
    while True:
        answer, code = store.query_task(task)
        assert code == 0 and time.monotonic() < until
        if answer.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
            return answer
        time.sleep(0.02)


def test_values_are_copied_and_moved_between_segments(node, other, key, lending):
    before = time.time() * 1000 - 60_000
    lender = MooncakeDistributedStore()
    assert lender.setup(settings(node)) == 0
    (guest,) = guests(node)
    here = other.server_info().node
    assert other.put(key, b"v" * MIB)

    moved, code = lender.create_move_task(key, here, guest["node"])
    answer = ended(lender, moved)
    assert code == 0 and (answer.id, answer.type, answer.message) == (moved, TaskType.REPLICA_MOVE, "")
    assert answer.status == TaskStatus.SUCCESS and before < answer.created_at_ms_epoch <= answer.last_updated_at_ms_epoch
    assert holders(other, key) == [guest["node"]] and lender.get(key) == b"v" * MIB
    copied, code = lender.create_copy_task(key, [node.grpc])
    assert code == 0 and ended(lender, copied).type == TaskType.REPLICA_COPY
    assert sorted(holders(other, key)) == sorted([here, guest["node"]])

    assert lender.create_copy_task(key, ["nobody:1"]) == ((0, 0), -101)
    assert lender.create_copy_task(key + "/none", [here]) == ((0, 0), -704)
    assert lender.create_move_task(key, here, guest["node"]) == ((0, 0), -711)
    assert lender.create_copy_task(key, []) == ((0, 0), -600)
    assert lender.query_task((0, 1)) == (None, -1400) and lender.query_task((1, moved[1])) == (None, -1400)
    with pytest.raises(TypeError):
        lender.create_copy_task(key, here)
    assert lender.close() == 0


def test_the_packages_own_names_for_tasks(node, other, key, lending):
    lender = MooncakeDistributedStore()
    assert lender.setup(settings(node)) == 0
    (guest,) = guests(node)
    assert other.put(key, b"v" * MIB)
    task = other.begin_copy(key, [guest["node"]])
    assert (task.kind, task.key, task.source, task.targets) == ("copy", key.encode(), None, [guest["node"]])
    while task.is_open:
        task = other.task(task.id)
    assert (task.state, task.reason, task.copied, task.length) == ("done", "", 1, MIB)
    assert task.id in {listed.id for listed in other.tasks()}
    assert other.cancel_task(task.id).state == "done"
    assert other.task(1) is None and other.cancel_task(1) is None
    with pytest.raises(tidepool.TidepoolError) as refused:
        other.begin_move(key, guest["node"], "nobody")
    assert refused.value.reason == "NO_SUCH_NODE"
    with pytest.raises(TypeError):
        other.begin_copy(key, guest["node"])

    async def awaited():
        async with await tidepool.AsyncStore.connect(node.grpc) as store:
            begun = await store.begin_copy(key, [guest["node"]])
            await store.begin_copy(key, [guest["node"]])
            listed = [listed.id async for listed in store.tasks()]
            return begun, await store.cancel_task(begun.id), await store.task(begun.id), listed

    begun, cancelled, found, listed = asyncio.run(awaited())
    assert begun.id in listed and cancelled.state in ("cancelled", "done") and found.state == cancelled.state
    assert lender.close() == 0
