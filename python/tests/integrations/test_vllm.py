"""vLLM's own connectors: the shared pool's sending and receiving threads, embeddings, and the engine of P/D disaggregation."""

import json
import threading
import types

import pytest

CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.mooncake"
BLOCK, LENGTH = 16, 12 * 1024


@pytest.fixture
def opened(node, tmp_path, monkeypatch):
    """A store as vLLM opens it: of a file that the environment names."""
    from mooncake.store import MooncakeDistributedStore
    from vllm.distributed.mooncake_store import MooncakeStoreConfig, setup_mooncake_store

    file = tmp_path / "mooncake.json"
    settings = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": node.grpc,
        "protocol": "tcp",
        "global_segment_size": "1GB",
        "local_buffer_size": "1GB",
    }
    file.write_text(json.dumps(settings))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    store = MooncakeDistributedStore()
    setup_mooncake_store(store, MooncakeStoreConfig.load_from_config(), "127.0.0.1")
    yield store
    store.close()


def threads_of(store, pool, layers, key, hashes, grouped):
    """vLLM's sender and receiver over one pool of blocks, each layer's one after the other."""
    from mooncake.store import ReplicateConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker

    metadata = data.KeyMetadata(key.replace("/", "-"), 0, 0, 0, 0, cache_prefix="pool")
    database = data.ChunkedTokenDatabase(metadata, BLOCK)
    base, blocks = pool.data_ptr(), len(pool.bytes) // LENGTH // layers
    assert store.register_buffer(base, len(pool.bytes)) == 0
    database.set_kv_caches_base_addr([base + layer * blocks * LENGTH for layer in range(layers)])
    database.set_block_len([LENGTH])
    every = [[True] * len(hashes)]
    coordinator = types.SimpleNamespace(
        lcm_block_size=BLOCK, hash_block_size=BLOCK, store_mask=lambda *_, **__: every, load_mask=lambda *_: every
    )
    calls = []
    record = lambda **call: calls.append((call["operation"], call["status"]))  # noqa: E731
    common = (store, coordinator, [database], BLOCK, 0)
    supports = worker._replicate_config_supports_group_ids(ReplicateConfig, ReplicateConfig())
    assert supports
    sender = worker.KVCacheStoreSendingThread(
        *common,
        [1],
        "kv_both",
        threading.Event(),
        replicate_config=ReplicateConfig(),
        enable_group_semantics=grouped,
        supports_group_ids=supports,
        record_operation=record,
    )
    receiver = worker.KVCacheStoreRecvingThread(*common, threading.Event(), record_operation=record)
    for thread in (sender, receiver):
        thread.start()
    return sender, receiver, database, calls


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("layers", [1, 3])
def test_blocks_go_out_and_come_back(opened, key, tensor, grouped, layers):
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data, worker

    blocks, count = 32, 8
    filled = bytes(place * 7 % 251 for place in range(LENGTH * 97))
    pool = tensor(layers * blocks * LENGTH, (filled * 3)[: layers * blocks * LENGTH])
    hashes = [bytes([place]) * 32 for place in range(count)]
    sender, receiver, database, calls = threads_of(opened, pool, layers, key, hashes, grouped)

    def save(name, job):
        request = data.ReqMeta(name, count * BLOCK, (list(range(1, count + 1)),), hashes, store_job_id=job)
        sender.add_request(request)
        sender.request_queue.join()

    def load(name, into, wanted):
        spec = data.LoadSpec(0, len(wanted) * BLOCK, True, len(wanted) * BLOCK)
        receiver.add_request(data.ReqMeta(name, 0, (into,), wanted, load_spec=spec))
        receiver.request_queue.join()
        return receiver.get_and_clear_finished_requests()

    save("first", 1)
    assert calls == [("save_exists", "ok"), ("save_put", "ok")] and sender.take_completed_saves() == {1: 1}
    # What is there is not put again.
    save("second", 2)
    assert calls[2:] == [("save_exists", "ok")]
    keys = [database.key_for(each) for each in hashes]
    assert opened.batch_is_exist(keys) == [1] * count
    assert worker._get_replica_tiers_by_key(opened, keys) == dict.fromkeys(keys, "memory")

    assert load("first", list(range(20, 20 + count)), hashes) == {"first"}
    assert receiver.get_and_clear_block_ids_with_load_errors() == set()
    for layer in range(layers):
        layer = pool.bytes[layer * blocks * LENGTH : (layer + 1) * blocks * LENGTH]
        assert layer[20 * LENGTH : 28 * LENGTH] == layer[LENGTH : 9 * LENGTH]
    # A block that is gone is told, and no other.
    assert opened.remove(keys[3], True) == 0
    load("second", list(range(20, 20 + count)), hashes)
    assert receiver.get_and_clear_block_ids_with_load_errors() == {23}
    assert opened.remove_all(force=True) >= count - 1
    assert opened.unregister_buffer(pool.data_ptr()) == 0


def test_a_full_store_makes_a_sender_pause(tmp_path, key, tensor):
    from mooncake.store import MooncakeDistributedStore
    from node import Node
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import data

    node = Node(tmp_path / "data", dram="32MiB", more=["nvme.enabled=false"]).start()
    store = MooncakeDistributedStore()
    try:
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1, "tcp", "", node.grpc) == 0
        import tidepool

        with tidepool.Store.connect(node.grpc) as other:
            number = 0
            while not isinstance(other.put_batch([f"pinned{number}"], [bytes(1 << 20)], pin=True)[0], tidepool.ExhaustedError):
                number += 1
            number = 0
            while not isinstance(other.put_batch([f"small{number}"], [bytes(LENGTH)], pin=True)[0], tidepool.ExhaustedError):
                number += 1
        pool, hashes = tensor(4 * LENGTH), [b"h" * 32]
        sender, *_ = threads_of(store, pool, 1, key, hashes, False)
        sender.add_request(data.ReqMeta("r", BLOCK, ([1],), hashes, store_job_id=1))
        sender.request_queue.join()
        assert sender._should_skip_request("r")
        with tidepool.Store.connect(node.grpc) as other:
            other.remove_all(force=True)
        sender.add_request(data.ReqMeta("other", BLOCK, ([1],), hashes, store_job_id=2))
        sender.request_queue.join()
        assert not sender._should_skip_request("r")
    finally:
        store.close()
        node.stop()


class Embedding:
    """In the place of a tensor of [tokens, hidden]."""

    dtype, ndim, shape = "torch.float16", 2, (3, 8)

    def __init__(self, tensor):
        self.tensor = tensor

    def is_contiguous(self):
        return True

    def data_ptr(self):
        return self.tensor.data_ptr()

    def numel(self):
        return 24

    def element_size(self):
        return 2


def test_embeddings_are_published_and_found(opened, key, tensor):
    from mooncake.store import ObjectDataType, ReplicateConfig
    from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding import store_client

    config = ReplicateConfig()
    config.data_type = ObjectDataType.TENSOR
    client = store_client.MooncakeEmbeddingStoreClient(opened, replicate_config=config)
    assert client.batch_exists([key, "none"]) == [False, False]
    client.put_tensor(key, Embedding(tensor(48, b"e" * 48)))
    client.put_tensor(key, Embedding(tensor(48, b"x" * 48)))
    assert client.batch_exists([key, "none"]) == [True, False]
    room = tensor(4096)
    addresses = [room.data_ptr(), room.data_ptr() + 1024, room.data_ptr() + 2048]
    results = opened.batch_get_into([key, "none", key], addresses, [72, 1024, 71])
    # Codes that it does not know would end vLLM's worker.
    assert results == [72, -704, -600] and store_client._batch_get_completed_safely(results, [72, 1024, 71])
    header = store_client._encode_mooncake_tensor_metadata(Embedding(room))
    assert room.bytes[:72] == header + b"e" * 48
    client.close()


def test_embeddings_are_loaded_as_tensors(opened, key):
    torch = pytest.importorskip("torch")
    from mooncake.store import ObjectDataType, ReplicateConfig
    from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding import store_client
    from vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding.data import TensorSpec

    config = ReplicateConfig()
    config.data_type = ObjectDataType.TENSOR
    client = store_client.MooncakeEmbeddingStoreClient(opened, replicate_config=config, read_buffer_bytes=1 << 16)
    embeddings = {f"{key}/{place}": torch.full((40, 64), place, dtype=torch.bfloat16) for place in range(40)}
    for name, embedding in embeddings.items():
        client.put_tensor(name, embedding)
    spec = TensorSpec((40, 64), "torch.bfloat16", 40 * 64 * 2)
    loaded = client.load_tensors({f"{key}/none": spec, **dict.fromkeys(embeddings, spec)}, "cpu")
    assert loaded.keys() == embeddings.keys()
    assert all(torch.equal(loaded[name], embeddings[name]) for name in embeddings)
    client.close()


class Region:
    def __init__(self, tensor):
        self.tensor, self.nbytes = tensor, len(tensor.bytes)

    def data_ptr(self):
        return self.tensor.data_ptr()


def test_encoders_write_to_their_consumers(tensor):
    from vllm.distributed.ec_transfer.ec_connector.mooncake.transfer import MooncakeTransfer

    producer, consumer = MooncakeTransfer("127.0.0.1", "tcp"), MooncakeTransfer("127.0.0.1", "tcp")
    source, target = Region(tensor(8192, b"s" * 8192)), Region(tensor(8192))
    assert consumer.register_memory(target) == 0
    acquired = producer.acquire_sources([source, source])
    assert producer.acquire_sources([source]) == acquired
    halves = [source.data_ptr(), source.data_ptr() + 4096], [target.data_ptr() + 4096, target.data_ptr()]
    producer.write(consumer.local_session(), *halves, [4096, 4096])
    assert target.tensor.bytes[:] == b"s" * 8192
    with pytest.raises(RuntimeError):
        producer.write(consumer.local_session(), [source.data_ptr()], [target.data_ptr() + 4097], [4096])
    assert producer.release_sources(acquired) and producer.release_sources(acquired)
    assert consumer.unregister_memory(target) and not consumer.unregister_memory(target)
    producer.close()
    consumer.close()


def test_prefill_sends_blocks_to_decode(tensor):
    from mooncake.engine import TransferEngine
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector

    worker_class = mooncake_connector.MooncakeConnectorWorker
    counted = []
    stats = types.SimpleNamespace(
        record_transfer=lambda **transfer: counted.append(transfer["num_descs"]),
        record_failed_transfer=lambda: counted.append("failed"),
    )
    ends = []
    for fill in (b"p", b"d"):
        engine, pool = TransferEngine(), tensor(64 * 4096, fill * 64 * 4096)
        assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        worker = types.SimpleNamespace(engine=engine, xfer_stats=stats, _kv_unregistered=False)
        worker.seen_base_addresses, worker._kv_data_lens = [pool.data_ptr()], [len(pool.bytes)]
        assert engine.batch_register_memory(worker.seen_base_addresses, worker._kv_data_lens) == 0
        ends.append((worker, pool))
    (prefill, source), (decode, target) = ends
    session = f"127.0.0.1:{decode.engine.get_rpc_port()}"
    blocks = list(range(0, 64, 2))
    pointers = [[pool.data_ptr() + block * 4096 for block in blocks] for pool in (source, target)]
    send = lambda: worker_class._send_blocks(prefill, session, *pointers, [4096] * len(blocks))  # noqa: E731
    assert send() == 0
    for block in range(64):
        expected = b"p" if block % 2 == 0 else b"d"
        assert target.bytes[block * 4096 : (block + 1) * 4096] == expected * 4096
    # Asleep, its memory is not registered; awake, it is again.
    worker_class.unregister_kv_caches(decode)
    assert send() != 0
    worker_class.restore_kv_caches(decode)
    assert send() == 0 and counted == [len(blocks), "failed", len(blocks)]
