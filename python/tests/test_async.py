"""The awaited calls: the loop goes on, cancelled calls end, results are those of the waiting ones."""

import asyncio
import time

import pytest

import tidepool


def run(node, work, **settings):
    async def main():
        async with await tidepool.AsyncStore.connect(node.grpc, **settings) as store:
            return await work(store)

    return asyncio.run(main())


def test_every_call_can_be_awaited(node, key):
    async def work(store):
        assert await store.put(key, b"value") is True
        assert await store.put(key, b"other") is False
        assert await store.get(key) == b"value"
        assert bytes(await store.get_view(key)) == b"value"
        buffer = bytearray(8)
        assert await store.get_into(key, buffer) == 5 and buffer[:5] == b"value"
        await store.upsert(key, b"new")
        assert await store.get(key, fresh=True) == b"new"
        assert await store.put_batch([f"{key}/1", f"{key}/2"], [b"1", b"2"]) == [True, True]
        assert await store.get_batch([f"{key}/1", "missing"]) == [b"1", None]
        view, none = await store.get_batch_views([f"{key}/2", "missing"])
        assert bytes(view) == b"2" and none is None
        assert await store.put_from(f"{key}/1", buffer) is False
        assert await store.remove_batch(["missing"]) == ["missing"]
        assert await store.put_striped(f"{key}/s", b"striped", part_bytes=3) is True
        assert await store.get_striped(f"{key}/s", offset=2) == b"riped"
        assert await store.remove_striped(f"{key}/s") is True
        assert await store.task(1) is None and await store.cancel_task(1) is None
        assert [task async for task in store.tasks() if task.key == key.encode()] == []
        here = (await store.server_info()).node
        for begin in (lambda: store.begin_move(key, here, here), lambda: store.begin_copy(f"{key}/none", [here])):
            with pytest.raises(tidepool.TidepoolError):
                await begin()
        numbers = (store.native_calls, store.local_hits, store.lent_puts, store.one_sided_reads, store.one_sided_puts)
        assert all(number >= 0 for number in numbers) and not store.closed
        assert await store.get_batch_into([f"{key}/2"], [buffer]) == [1]
        assert await store.put_parts(f"{key}/3", [b"a", b"b"]) is True
        assert await store.exists(key) is True
        assert await store.exists_batch([key, "missing"]) == [True, False]
        assert [found.length async for found in store.list(key, page_size=2)] == [3, 1, 1, 2]
        assert (await store.stat(key)).length == 3
        assert await store.pin([key]) == [True] and await store.unpin([key]) == [True]
        assert (await store.lease([key], 5))[0] > 4
        await store.release([key])
        assert await store.put_tree(f"{key}/tree", {"a": [1, 2.5]}) is True
        assert await store.get_tree(f"{key}/tree") == {"a": [1, 2.5]}
        assert await store.remove(key) is True
        assert (await store.remove_matching(prefix=key)).removed == 4
        assert (await store.server_info()).phase == "serving"
        with pytest.raises(tidepool.InvalidError):
            await store.get("")

    run(node, work)


def test_nothing_of_the_waiting_store_is_missing():
    public = [name for name in vars(tidepool.Store) if not name.startswith("_")]
    assert [name for name in public if not hasattr(tidepool.AsyncStore, name)] == []


def test_a_hundred_gets_overlap_and_the_loop_goes_on(own_node):
    async def work(store):
        await asyncio.gather(*(store.put(f"k/{place}", bytes([place]) * 200_000) for place in range(100)))
        own_node.pause()
        gets = [asyncio.ensure_future(store.get(f"k/{place}", fresh=True)) for place in range(100)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert not any(get.done() for get in gets)
        own_node.resume()
        assert await asyncio.gather(*gets) == [bytes([place]) * 200_000 for place in range(100)]

    run(own_node, work)


def test_a_cancelled_call_lets_go_of_its_buffer(own_node):
    async def work(store):
        own_node.pause()
        buffer = bytearray(100)
        call = store.get_into("k", buffer)
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        own_node.resume()
        until = time.monotonic() + 20
        while True:
            await store.exists("k")
            try:
                buffer.clear()
                return
            except BufferError:
                assert time.monotonic() < until

    run(own_node, work, deadline=30.0)


def test_without_a_loop_there_is_an_exception(node):
    store = asyncio.run(tidepool.AsyncStore.connect(node.grpc))
    with pytest.raises(RuntimeError):
        store.get("k")


def test_too_many_calls_at_once_are_refused(own_node):
    async def work(store):
        own_node.pause()
        waiting = []
        with pytest.raises(tidepool.ExhaustedError) as error:
            for _ in range(5000):
                waiting.append(store.get("k"))
        assert error.value.reason == "OVERLOADED"
        assert len(waiting) == 4096
        for call in waiting:
            call.cancel()
        own_node.resume()

    run(own_node, work)
