"""The tensor family, with whatever there is of numpy and torch."""

import pytest

numpy = pytest.importorskip("numpy")

from mooncake.store import ReplicateConfig, _tensor_metadata_size  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

INVALID, MISSING = -600, -704


def made(array):
    return array if torch is None else torch.from_numpy(array)


def same(one, other):
    return one.shape == other.shape and one.dtype == other.dtype and bool((one == other).all())


@pytest.mark.parametrize("shape", [(3, 4), (5,), (0,), (0, 4096), (2, 0, 3), (1, 0)])
@pytest.mark.parametrize("name", ["float32", "float16", "int64"])
def test_tensors_come_back(store, key, shape, name):
    tensor = made(numpy.arange(int(numpy.prod(shape))).astype(name).reshape(shape))
    for place, put in enumerate((store.put_tensor, store.pub_tensor, store.upsert_tensor, store.upsert_pub_tensor)):
        assert put(f"{key}{place}", tensor) == 0
        assert same(store.get_tensor(f"{key}{place}"), tensor)
    keys = [f"{key}/b{place}" for place in range(3)]
    assert store.batch_put_tensor(keys, [tensor] * 3) == [0] * 3
    got = store.batch_get_tensor([*keys, "none"])
    assert got[3] is None and all(same(each, tensor) for each in got[:3])


def test_elements_go_to_a_tensor_that_is_there(store, key):
    pytest.importorskip("torch")
    tensor, target = made(numpy.arange(12.0).reshape(3, 4)), torch.zeros(4, 3, dtype=torch.float64)
    assert store.put_tensor(key, tensor) == 0
    assert store.get_tensor_into_cuda(key, target) == 96 and same(target.reshape(3, 4), tensor)
    few, other = torch.zeros(2, dtype=torch.float64), torch.zeros(12)
    assert store.batch_get_tensor_into_cuda([key, key, "none"], [few, other, few]) == [INVALID, INVALID, MISSING]


def test_tensors_go_to_files_and_back(store, key, tmp_path):
    pytest.importorskip("safetensors")
    tensor, file = made(numpy.arange(12.0).reshape(3, 4)), str(tmp_path / "file")
    assert store.put_tensor(key, tensor) == 0
    assert store.save_tensor_to_safetensor(key, file) == 0
    assert store.save_tensor_to_safetensor("none", file) == MISSING
    assert same(store.load_tensor_from_safetensor(f"{key}/2", file), tensor)
    assert same(store.get_tensor(f"{key}/2"), tensor)
    assert same(store.load_tensor_from_safetensor(file_name=file), tensor) and same(store.get_tensor(file), tensor)
    assert store.load_tensor_from_safetensor(key, str(tmp_path / "none")) is None
    with pytest.raises(TypeError):
        store.load_tensor_from_safetensor(file)


def test_tensors_lie_at_addresses(store, key, memory):
    tensor = made(numpy.arange(12.0).reshape(3, 4))
    room = _tensor_metadata_size() + 96
    memory = memory(room)
    assert store.put_tensor(key, tensor) == 0
    got = store.get_tensor_into(key, memory.address, room)
    assert same(got, tensor)
    got[0][0] = 77.0
    assert store.put_tensor_from(f"{key}2", memory.address, room) == 0
    assert store.get_tensor(f"{key}2")[0][0] == 77.0
    assert store.batch_put_tensor_from([f"{key}3"], [memory.address], [room]) == [0]
    first, none = store.batch_get_tensor_into([f"{key}3", "none"], [memory.address] * 2, [room] * 2)
    assert same(first, store.get_tensor(f"{key}2")) and none is None
    assert store.get_tensor_into(key, memory.address, room - 1) is None
    assert store.put_tensor_from(f"{key}4", memory.address, room - 1) == INVALID
    assert store.put_tensor_from(f"{key}4", 4096, room) == INVALID
    memory[:4] = b"oops"
    assert store.put_tensor_from(f"{key}4", memory.address, room) == INVALID


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dimension", [0, 1])
def test_tensors_are_split_for_parallel_ranks(store, key, memory, size, dimension):
    array = numpy.arange(30.0).reshape(6, 5)
    tensor = made(array)
    assert store.put_tensor_with_tp(key, tensor, 0, size, dimension) == 0
    shards = [store.get_tensor_with_tp(key, rank, size, dimension) for rank in range(size)]
    assert numpy.array_equal(numpy.concatenate([numpy.asarray(shard) for shard in shards], dimension), array)
    names = [f"{key}/{place}" for place in range(2)]
    assert store.batch_pub_tensor_with_tp(names, [tensor] * 2, ReplicateConfig(), 0, size, dimension) == [0, 0]
    assert same(store.batch_get_tensor_with_tp(names, size - 1, size)[1], shards[-1])
    room = _tensor_metadata_size() + 240
    memory = memory(room)
    assert same(store.get_tensor_with_tp_into(key, memory.address, room, size - 1, size), shards[-1])
    whole = f"{key}/whole"
    assert store.put_tensor(whole, tensor) == 0
    store.get_tensor_into(whole, memory.address, room)
    assert store.put_tensor_with_tp_from(f"{key}/from", memory.address, room, 0, size, dimension) == 0
    assert same(store.get_tensor_with_tp(f"{key}/from", 0, size), shards[0])


def test_what_can_not_be_split_or_is_no_tensor_is_a_code(store, key):
    tensor = made(numpy.zeros((4, 4)))
    assert store.put_tensor_with_tp(key, tensor, 0, 2, 7) == INVALID
    assert store.put_tensor_with_tp(key, tensor, 0, 0) == INVALID
    for wrong in (None, "text", 17, [1, 2]):
        assert store.put_tensor(key, wrong) == INVALID
    assert store.batch_put_tensor([key], []) == [INVALID]
    store.put(key, b"no tensor")
    assert store.get_tensor(key) is None
    assert store.get_tensor("none") is None
