"""What each integration does with the modules, call by call, as its own code does it.

The real ones are driven by `make test-integrations`; these need nothing but the modules.
"""

import asyncio
import json
import threading
import time

import pytest
from mooncake.async_store import MooncakeDistributedStoreAsync
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import (
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicateConfig,
)

PAGE = 64 * 1024
# What a worker of vLLM's embedding store accepts; any other code ends it.
KNOWN_READ_CODES = {-200, -600, -702, -703, -704, -705, -707, -900, -901}
KNOWN_WRITE_CODES = {-200, -703, -704, -705, -900, -901, -1700}


def opened(node, *more, **named):
    store = MooncakeDistributedStore()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", node.grpc)
    assert store.setup(*arguments, *more, **named) == 0
    return store


def test_vllm_shared_pool(node, key, memory):
    store = opened(node)
    cache = memory(64 * PAGE, bytes(place % 256 for place in range(64 * PAGE)))
    assert store.register_buffer(cache.address, 64 * PAGE) == 0
    block = [f"MODEL@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{key}{place:064x}" for place in range(8)]
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()

    def send(keys, first):
        config.group_ids = [f"vllm-mooncake-store:MODEL@{name[-64:]}" for name in keys]
        pointers = [[cache.address + (first + 3 * at + layer) * PAGE for layer in range(3)] for at in range(len(keys))]
        return store.batch_put_from_multi_buffers(keys, pointers, [[PAGE] * 3] * len(keys), config)

    assert store.batch_is_exist(block) == [0] * 8
    assert send(block[:4], 0) == [0] * 4
    assert send(block[4:], 12) == [0] * 4
    assert store.batch_is_exist(block) == [1] * 8
    target = memory(3 * PAGE)
    assert store.register_buffer(target.address, 3 * PAGE) == 0
    ranges = [[target.address, target.address + 2 * PAGE]]
    assert store.batch_get_into_multi_buffers(block[1:2], ranges, [[2 * PAGE, PAGE]]) == [3 * PAGE]
    assert target[:] == cache[3 * PAGE : 6 * PAGE]
    assert store.batch_get_into_multi_buffers(["none"], ranges, [[2 * PAGE, PAGE]])[0] < 0
    assert store.batch_get_replica_desc(block).get(block[0])[0].is_memory_replica()
    assert store.remove_all(force=True) >= 8
    assert store.batch_is_exist(block) == [0] * 8
    assert store.close() == 0


def test_vllm_embeddings(node, key, memory):
    store = opened(node)
    config = ReplicateConfig()
    config.data_type = ObjectDataType.TENSOR
    header, data = memory(24, b"h" * 24), memory(PAGE, b"d" * PAGE)
    for buffer in (header, data):
        assert store.register_buffer(buffer.address, buffer.length) == 0
    assert store.batch_is_exist([key]) == [0]
    put = store.batch_put_from_multi_buffers([key], [[header.address, data.address]], [[24, PAGE]], config)
    assert all(code >= 0 or code in KNOWN_WRITE_CODES for code in put) and put == [0]
    target = memory(24 + PAGE)
    assert store.register_buffer(target.address, 24 + PAGE) == 0
    got = store.batch_get_into([key], [target.address], [24 + PAGE])
    assert type(got) is list and type(got[0]) is int and got == [24 + PAGE]
    assert target[:] == b"h" * 24 + b"d" * PAGE
    missing = store.batch_get_into(["none"], [target.address], [24 + PAGE])
    assert missing[0] in KNOWN_READ_CODES
    for buffer in (header, data, target):
        assert store.unregister_buffer(buffer.address) == 0
    assert store.close() == 0


def test_sglang_hicache(node, key):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    store = MooncakeDistributedStore()
    arguments = (f"127.0.0.1:{engine.get_rpc_port()}", "P2PHANDSHAKE", 1 << 30, 16 << 20, "tcp", "", node.grpc, engine.get_engine())
    assert not store.setup(*arguments, enable_ssd_offload=True, ssd_offload_path="/tmp")
    warm = f"sglang_warmup_{key}"
    assert store.put(warm, bytes(4096)) == 0
    assert store.is_exist(warm) == 1
    assert store.get(warm) == bytes(4096)
    allocator = MooncakeHostMemAllocator()
    pool = allocator.alloc(32 * PAGE)
    assert store.register_buffer(pool, 32 * PAGE) == 0
    names = [f"MODEL_{key}{place:064x}_0_{part}" for place in range(8) for part in "kv"]
    pointers = [pool + place * PAGE for place in range(16)]
    config = ReplicateConfig()
    config.group_ids = [f"sglang-hicache:{name}" for name in names]
    assert not hasattr(config, "session_ids")
    assert store.batch_is_exist(names) == [0] * 16
    assert all(code == 0 for code in store.batch_put_from(names, pointers, [PAGE] * 16, config))
    assert all(code == 0 for code in store.batch_put_from(names, pointers, [PAGE] * 16)), "there already"
    assert store.batch_is_exist(names) == [1] * 16
    assert all(length > 0 for length in store.batch_get_into(names, pointers, [PAGE] * 16))
    assert store.batch_get_session_start(names) == [0] * 16
    layers = [[pool + 16 * PAGE + place * 2048, pool + 20 * PAGE + place * 2048] for place in range(16)]
    read = store.batch_get_into_multi_buffer_ranges(names, layers, [[1024, 1024]] * 16, [[0, 4096]] * 16)
    assert read == [2048] * 16
    store.batch_get_session_end(names)
    assert store.remove_all() >= 17
    # No close: SGLang never calls it.
    del store


def test_sglang_drops_a_keyword_that_the_error_names(node):
    for keyword in ("session_id", "some_new_option"):
        with pytest.raises(TypeError, match=keyword):
            opened(node, **{keyword: "x"})


def test_lmcache(node, key, memory):
    settings = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "http://127.0.0.1:8080/metadata",
        "global_segment_size": "3355443200",
        "local_buffer_size": "1073741824",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": node.grpc,
        "storage_root_dir": "",
    }
    store = MooncakeDistributedStore()
    assert store.setup(settings) == 0
    config = ReplicateConfig()
    config.preferred_segment = store.get_hostname()
    config.replica_num = 1
    chunk = f"MODEL@1@0@{key}@bfloat16"
    assert not store.is_exist(chunk), "taken for a truth value"
    metadata, kv = b"m" * 28, memoryview(bytearray(b"k" * PAGE))
    assert store.put_parts(chunk, metadata, kv) == 0
    assert store.is_exist(chunk)
    handle, none = store.batch_get_buffer([chunk, "none"])
    assert none is None
    view = memoryview(handle)
    assert not view.readonly and bytes(view[:28]) == metadata and bytes(view[28:]) == bytes(kv)
    pool = memory(4 * PAGE, b"p" * 4 * PAGE)
    assert store.register_buffer(pool.address, 4 * PAGE) == 0
    assert store.put_from(f"{chunk}1", pool.address, 1000, config) == 0
    assert store.batch_put_from([f"{chunk}2"], [pool.address], [PAGE], config) == [0]
    got = store.batch_get_into([f"{chunk}1", "none"], [pool.address + PAGE, pool.address], [PAGE, PAGE])
    assert got[0] == 1000 and got[1] <= 0

    async def with_a_deadline():
        return await asyncio.wait_for(asyncio.to_thread(store.get, chunk), timeout=10)

    if hasattr(asyncio, "to_thread"):
        assert asyncio.run(with_a_deadline()) == metadata + bytes(kv)
    assert store.unregister_buffer(pool.address) == 0
    store.close()


def test_flexkv(node, key, memory):
    store = opened(node)
    asker = MooncakeDistributedStore()
    assert asker.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "rpc_only", "", node.grpc) == 0
    pool = memory(4 * PAGE, b"f" * 4 * PAGE)
    assert store.register_buffer(pool.address, 4 * PAGE) == 0
    names = [f"{key}{place}_FlexKV" for place in range(4)]
    pointers = [pool.address + place * PAGE for place in range(4)]
    assert store.batch_put_from(names, pointers, [PAGE] * 4) == [0] * 4
    assert asker.batch_is_exist([*names, "none"]) == [1, 1, 1, 1, 0]
    assert store.batch_get_into(names, pointers, [PAGE] * 4) == [PAGE] * 4
    assert store.unregister_buffer(pool.address) == 0


def test_pd_disaggregation_of_vllm_and_sglang(memory):
    """Ten sender threads on one engine, a few thousand descriptors a call, sessions as `host:port`."""
    prefill, decode = TransferEngine(), TransferEngine()
    for engine in (prefill, decode):
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    session = f"127.0.0.1:{decode.get_rpc_port()}"
    source, target = memory(8 << 20, bytes(place % 253 for place in range(8 << 20))), memory(8 << 20)
    assert prefill.batch_register_memory([source.address], [8 << 20]) == 0
    assert decode.batch_register_memory([target.address], [8 << 20]) == 0
    codes = []

    def send(worker):
        places = range(worker, 2000, 10)
        sources = [source.address + place * 4096 for place in places]
        targets = [target.address + place * 4096 for place in places]
        codes.append(prefill.batch_transfer_sync_write(session, sources, targets, [4096] * len(places)))

    workers = [threading.Thread(target=send, args=(worker,)) for worker in range(10)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert codes == [0] * 10
    assert target[: 2000 * 4096] == source[: 2000 * 4096]
    assert prefill.send_probe(session) == 0
    assert prefill.transfer_sync_write(session, source.address, target.address, 100) == 0
    notify = TransferNotify("request", "done")
    assert prefill.transfer_sync(session, source.address, target.address, 0, TransferOpcode.Write, notify) == 0
    assert [(told.name, told.msg) for told in decode.get_notifies()] == [("request", "done")]
    assert prefill.batch_unregister_memory([source.address]) == 0
    assert decode.batch_unregister_memory([target.address]) == 0


def test_lmcache_transfer_channel(memory):
    one, other = TransferEngine(), TransferEngine()
    for engine in (one, other):
        assert engine.initialize("localhost", "P2PHANDSHAKE", "tcp", "") == 0
    here, there = memory(PAGE), memory(PAGE, b"t" * PAGE)
    assert one.register_memory(here.address, PAGE) == 0 and other.register_memory(there.address, PAGE) == 0
    session = f"localhost:{other.get_rpc_port()}"
    number = one.batch_transfer_async_read(session, [here.address], [there.address], [PAGE])
    assert number not in (0, 2**64 - 1) and number < 2**63
    until = time.monotonic() + 20
    while (status := one.transfer_check_status(number)) == 0:
        assert time.monotonic() < until
    assert status == 1 and here[:] == b"t" * PAGE


def test_the_awaited_store(node, key):
    async def main():
        store = MooncakeDistributedStoreAsync()
        settings = ("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", node.grpc)
        assert await store.async_setup(*settings) == 0
        puts = [store.async_put(f"{key}{place}", b"v%d" % place) for place in range(20)]
        assert await asyncio.gather(*puts) == [0] * 20
        assert await store.async_get(f"{key}7") == b"v7"
        assert await store.async_batch_is_exist([f"{key}1", "none"]) == [1, 0]
        with pytest.raises(AttributeError):
            store.other
        assert await store.async_close() == 0

    asyncio.run(main())


def test_settings_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "mooncake.json"
    settings = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1", "global_segment_size": "4gb"}
    path.write_text(json.dumps(settings))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    config = MooncakeConfig.load_from_env()
    assert (config.global_segment_size, config.local_buffer_size, config.protocol) == (4 << 30, 1 << 30, "tcp")
    del settings["metadata_server"]
    path.write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="metadata_server"):
        MooncakeConfig.load_from_env()
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")
    with pytest.raises(ValueError):
        MooncakeConfig.load_from_env()
    monkeypatch.setenv("MOONCAKE_MASTER", "m:2")
    config = MooncakeConfig.load_from_env()
    assert (config.master_server_address, config.global_segment_size) == ("m:2", 3_355_443_200)
    assert (config.local_hostname, config.metadata_server, config.tenant_id) == ("localhost", "P2PHANDSHAKE", "default")
    for name, text in {"OFFLOAD_ENABLED": "On", "TENANT_ID": "t", "PROTOCOL": " RDMA", "CLIENT_HTTP_PORT": "9301"}.items():
        monkeypatch.setenv(f"MOONCAKE_{name}", text)
    config = MooncakeConfig.load_from_env()
    assert (config.enable_ssd_offload, config.enable_client_http_server) == (True, False)
    assert (config.tenant_id, config.protocol, config.client_http_port) == ("t", "rdma", 9301)


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("local_hostname", ""),
        ("metadata_server", 7),
        ("master_server_address", " "),
        ("protocol", ""),
        ("global_segment_size", -1),
        ("global_segment_size", "GB"),
        ("local_buffer_size", "much"),
        ("enable_ssd_offload", "perhaps"),
    ],
)
def test_settings_that_can_not_be_meant_are_refused(tmp_path, name, wrong):
    path = tmp_path / "mooncake.json"
    settings = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "master_server_address": "m:1"}
    path.write_text(json.dumps({**settings, name: wrong}))
    with pytest.raises(ValueError):
        MooncakeConfig.from_file(str(path))
