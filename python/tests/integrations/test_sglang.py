"""SGLang's own `MooncakeStore` (HiCache): set-up, warm-up, pages out and in."""

import pytest

PAGE = 16 * 1024


class HostPool:
    """In the place of SGLang's host pool: pages of keys and values, one after the other."""

    page_size = 1
    layout = "page_first"

    def __init__(self, tensor, parts):
        self.kv_buffer = tensor
        self.parts = parts

    def get_ksize_per_token(self):
        return PAGE

    def get_page_buffer_meta(self, indices):
        base = self.kv_buffer.data_ptr()
        pointers = [base + (index * self.parts + part) * PAGE for index in indices for part in range(self.parts)]
        return pointers, [PAGE] * len(pointers)


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("with_groups", [False, True])
def test_pages_go_out_and_come_back(node, key, tensor, monkeypatch, is_mla, with_groups):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store

    monkeypatch.setattr(mooncake_store.MooncakeStore, "_iter_host_pool_buffers", staticmethod(lambda pool: [pool.kv_buffer]))
    extra = {
        "local_hostname": "127.0.0.1",
        "metadata_server": "P2PHANDSHAKE",
        "global_segment_size": "1gb",
        "protocol": "tcp",
        "device_name": "",
        "master_server_address": node.grpc,
        "enable_group_semantics": with_groups,
        "enable_ssd_offload": True,
        "ssd_offload_path": "/tmp",
    }
    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/model",
        extra_config=extra,
    )
    parts = 1 if is_mla else 2
    pool = HostPool(tensor(32 * parts * PAGE), parts)
    filled = bytes(place * 7 % 256 for place in range(8 * parts * PAGE))
    pool.kv_buffer.bytes[: len(filled)] = filled
    store = mooncake_store.MooncakeStore(config, pool)
    store.register_mem_pool_host(pool)
    pages = [f"{place:064x}{key}" for place in range(8)]
    assert store.batch_exists(pages) == 0
    assert store.batch_set_v1(pages, range(8)) == [True] * 8
    assert store.batch_set_v1(pages, range(8)) == [True] * 8, "there already"
    assert store.batch_exists([*pages, "none"]) == 8
    assert store.exists(pages[0]) is not None
    assert store.batch_get_v1(pages, range(16, 24)) == [True] * 8
    start = 16 * parts * PAGE
    assert pool.kv_buffer.bytes[start : start + len(filled)] == filled
    assert store.batch_get_v1([*pages[:1], "none"], [24, 25]) == [True, False]
    store.clear()
    assert store.batch_exists(pages) == 0


def test_a_wrong_master_is_an_error(tensor, monkeypatch):
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.mooncake_store import mooncake_store

    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    extra = {"master_server_address": "127.0.0.1:1", "protocol": "tcp", "global_segment_size": "1gb", "device_name": ""}
    config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "m", extra_config=extra)
    with pytest.raises(RuntimeError):
        mooncake_store.MooncakeStore(config, HostPool(tensor(PAGE), 2))
