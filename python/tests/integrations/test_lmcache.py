"""LMCache's own Mooncake connector: set-up by a dictionary of texts, chunks out and in."""

import asyncio
import types

import pytest

CHUNK = 64 * 1024


class Chunk:
    """In the place of LMCache's memory objects."""

    def __init__(self, tensor):
        self.raw_tensor = tensor
        self.data_ptr = tensor.data_ptr()
        self.references = 1

    def get_size(self):
        return len(self.raw_tensor.bytes)

    def get_physical_size(self):
        return self.get_size()

    def ref_count_down(self):
        self.references -= 1


class Key:
    def __init__(self, text):
        self.text = text

    def to_string(self):
        return self.text


@pytest.fixture
def connector(node, tensor, monkeypatch):
    from lmcache.v1.storage_backend.connector import base_connector, mooncakestore_connector

    def begin(self, config, metadata):
        self.save_chunk_meta = False
        self.meta_shapes, self.meta_dtypes, self.meta_fmt = ["shape"], ["type"], "format"

    monkeypatch.setattr(base_connector.RemoteConnector, "__init__", begin)
    monkeypatch.setattr(base_connector.RemoteConnector, "reshape_partial_chunk", lambda self, chunk, length: (chunk, length))
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH", raising=False)
    pool = tensor(16 * CHUNK)
    allocator = types.SimpleNamespace(pin_allocator=types.SimpleNamespace(buffer=pool), numa_mapping=None)
    backend = types.SimpleNamespace(
        config=None,
        metadata=None,
        memory_allocator=allocator,
        allocate=lambda *_: Chunk(tensor(CHUNK)),
    )
    extra = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "mooncake_master_server_address": node.grpc,
        "protocol": "tcp",
        "global_segment_size": 16 << 20,
        "transfer_timeout": 20,
        "mooncake_prefer_local_alloc": True,
    }
    config = types.SimpleNamespace(extra_config=extra)
    loop = asyncio.new_event_loop()
    connector = mooncakestore_connector.MooncakestoreConnector(loop, backend, config)
    assert connector.registered_buffer_ptr == pool.data_ptr()
    yield connector
    loop.run_until_complete(connector.close())
    loop.close()


def test_chunks_go_out_and_come_back(connector, key, tensor):
    keys = [Key(f"{key}@{place}") for place in range(4)]
    chunks = [Chunk(tensor(CHUNK, bytes([65 + place]) * CHUNK)) for place in range(4)]

    async def main():
        assert not await connector.exists(keys[0])
        await connector.put(keys[0], chunks[0])
        await connector.batched_put(keys[1:], chunks[1:])
        assert await connector.exists(keys[0]) and connector.exists_sync(keys[3])
        assert await connector.batched_async_contains("lookup", [*keys, Key("none")]) == 4
        *got, none = await connector.batched_get([*keys, Key(f"{key}none")])
        assert none is None
        for (chunk, length), before in zip(got, chunks):
            assert length == CHUNK and chunk.raw_tensor.bytes[:] == before.raw_tensor.bytes[:]

    connector.loop.run_until_complete(main())


def test_the_store_is_the_one_that_was_named(connector, node, key):
    """LMCache names the master by a key that the reference reads over, and then reaches another server."""
    import tidepool

    connector.store.put(key, b"v")
    with tidepool.Store.connect(node.grpc) as store:
        assert store.get(key) == b"v"
