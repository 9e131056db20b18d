"""Views of objects where they lie, in the memory of the node on this host."""

import asyncio
import os
import signal
import subprocess
import sys
import time
import urllib.request

import numpy
import pytest

import tidepool


def eventually(happened, within=30.0):
    until = time.monotonic() + within
    while not happened():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.01)


def kept_bytes(node):
    with urllib.request.urlopen(f"http://{node.addresses['admin']}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("tidepool_kept_bytes "))


def until_local(store, key):
    """Until the node lets readers of this host in."""
    before = store.local_hits
    eventually(lambda: store.get(key) is not None and store.local_hits > before)


@pytest.fixture
def here(node):
    """A store on the node's host that did not write what it reads."""
    with tidepool.Store.connect(node.socket) as store:
        yield store


def test_a_view_is_a_read_only_buffer(store, here, key):
    value = os.urandom(300_000)
    store.put(key, value)
    until_local(here, key)
    view = here.view(key)
    assert not view.copied and len(view) == view.size() == len(value) and view.ptr() > 0
    with memoryview(view) as looked_at:
        assert looked_at.readonly and looked_at == value
    array = numpy.frombuffer(view, "uint8")
    assert array.tobytes() == value and not array.flags.writeable
    with pytest.raises(BufferError):
        here.get_into(key, view)
    with view as same:
        assert same is view
    # Released, and yet the array's bytes stay until it goes.
    for use in (len, bytes, memoryview, numpy.frombuffer, lambda view: view.copied, lambda view: view.ptr(), view.__class__.__enter__):
        with pytest.raises((tidepool.ConflictError, ValueError)):
            use(view)
    assert "released" in repr(view)
    view.release()
    store.remove(key)
    for _ in range(20):
        store.upsert(key, os.urandom(5_000_000))
    assert array.tobytes() == value
    assert here.view("no such object") is None


def test_views_go_back_when_nobody_looks(own_node):
    with tidepool.Store.connect(own_node.socket) as writer, tidepool.Store.connect(own_node.socket) as reader:
        writer.put("k", bytes(400_000))
        until_local(reader, "k")
        with reader.views(["k", "none", "k"]) as (view, none, _other):
            assert none is None and not view.copied
            writer.remove("k")
            eventually(lambda: kept_bytes(own_node) >= 400_000)
            array = numpy.frombuffer(view, "uint8")
        assert kept_bytes(own_node) >= 400_000 and not array.any()
        del array
        eventually(lambda: kept_bytes(own_node) == 0)


HOLDS = """
import sys, tidepool
store = tidepool.Store.connect(sys.argv[1])
view = store.view("k")
assert not view.copied
print("viewed", flush=True)
sys.stdin.read()
"""


def test_a_killed_program_keeps_nothing(own_node):
    with tidepool.Store.connect(own_node.socket) as writer, tidepool.Store.connect(own_node.socket) as reader:
        writer.put("k", os.urandom(400_000))
        until_local(reader, "k")
        command = [sys.executable, "-c", HOLDS, own_node.socket]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            assert program.stdout.readline() == b"viewed\n"
            writer.remove("k")
            eventually(lambda: kept_bytes(own_node) >= 400_000)
            program.kill()
        eventually(lambda: kept_bytes(own_node) == 0)


def test_a_frozen_program_finds_its_view_as_it_was(own_node):
    check = HOLDS.replace("sys.stdin.read()", "import os; before = bytes(view); sys.stdin.read(); assert bytes(view) == before")
    with tidepool.Store.connect(own_node.socket) as writer, tidepool.Store.connect(own_node.socket) as reader:
        writer.put("k", os.urandom(400_000))
        until_local(reader, "k")
        command = [sys.executable, "-c", check.replace('"viewed"', '"viewed"'), own_node.socket]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
            assert program.stdout.readline() == b"viewed\n"
            program.send_signal(signal.SIGSTOP)
            writer.remove("k")
            own_node.kill()
            own_node.start()
            for _ in range(30):
                writer.upsert("k", os.urandom(8 << 20))
            program.send_signal(signal.SIGCONT)
            program.stdin.close()
            assert program.wait(30) == 0


def test_a_forked_child_keeps_its_view(own_node):
    with tidepool.Store.connect(own_node.socket) as writer, tidepool.Store.connect(own_node.socket) as reader:
        value = os.urandom(400_000)
        writer.put("k", value)
        until_local(reader, "k")
        view = reader.view("k")
        gate, opened = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(opened)
            os.read(gate, 1)
            os._exit(0 if bytes(view) == value else 1)
        view.release()
        writer.remove("k")
        for _ in range(30):
            writer.upsert("k", os.urandom(8 << 20))
        os.close(opened)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.close(gate)
        writer.remove("k")
        eventually(lambda: kept_bytes(own_node) == 0)


def test_too_many_views_are_refused(store, here, key):
    store.put(key, b"small")
    store.put(key + "/large", bytes(13 << 20))
    until_local(here, key)
    with pytest.raises(tidepool.ExhaustedError) as refused:
        here.view(key + "/large")
    assert refused.value.reason == "TOO_MANY_VIEWS" and "eighth" in str(refused.value)
    with here.views([key] * 257) as views:
        assert not any(view.copied for view in views[:256])
        assert views[256].reason == "TOO_MANY_VIEWS"
    assert here.view(key) is not None


def test_what_does_not_lie_here_is_copied(node, store, key):
    store.put(key, b"value")
    with tidepool.Store.connect(node.grpc, local_reads=False) as elsewhere:
        view = elsewhere.view(key)
        assert view.copied and bytes(view) == b"value" and memoryview(view).readonly
        assert elsewhere.view(key + "/none") is None
        found, none = elsewhere.views([key, key + "/none"])
        assert found.copied and bytes(found) == b"value" and none is None
    for wrong in (None, 5, ""):
        with pytest.raises((TypeError, tidepool.InvalidError)):
            store.view(wrong)


def test_views_are_awaited(node, store, here, key):
    store.put(key, b"value")
    until_local(here, key)

    async def look():
        async with await tidepool.AsyncStore.connect(node.socket) as awaited:
            view = await awaited.view(key)
            with view, await awaited.views([key, "none"]) as (other, none):
                return bytes(view), bytes(other), none

    assert asyncio.run(look()) == (b"value", b"value", None)
