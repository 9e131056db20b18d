"""Tensors by parallelism: what writers store as shards comes back in any cut."""

import pytest

numpy = pytest.importorskip("numpy")

from mooncake.store import (  # noqa: E402
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    _tensor_metadata_size,
)

try:
    import torch
except ImportError:
    torch = None

INVALID = -600


def made(shape, kind="float32"):
    array = numpy.arange(int(numpy.prod(shape))).astype(kind).reshape(shape)
    return array if torch is None else torch.from_numpy(array)


def part(tensor, rank, size, dimension):
    return numpy.split(numpy.asarray(tensor), size, dimension)[rank]


def same(one, other):
    return one is not None and one.shape == other.shape and bool((numpy.asarray(one) == numpy.asarray(other)).all())


def axis(kind, rank, size, **fields):
    made = ParallelAxis()
    made.kind, made.rank, made.size = kind, rank, size
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def axes(*rows):
    parallelism = TensorParallelism()
    parallelism.axes = list(rows)
    return parallelism


def tp(rank, size, dimension, *others):
    return axes(*others, axis("tp", rank, size, split_dim=dimension))


def target(mode, parallelism=None):
    wanted = ReadTarget()
    wanted.mode, wanted.parallelism = mode, parallelism
    return wanted


SCOPES = {
    "tp": (),
    "dp_tp": (axis("dp", 1, 2),),
    "pp_tp": (axis("pp", 0, 2, stage_id=7),),
    "ep_tp": (axis("ep", 0, 2, expert_id=11),),
    "dp_pp_ep_tp": (axis("dp", 1, 2), axis("pp", 0, 2, stage_id=7), axis("ep", 0, 2, expert_id=11)),
}


def put_all(store, key, tensor, size, dimension, scope):
    for rank in range(size):
        # With other axes beside it, each rank gives the whole; alone, its shard.
        given = tensor if SCOPES[scope] else part(tensor, rank, size, dimension)
        assert store.put_tensor_with_parallelism(key, given, tp(rank, size, dimension, *SCOPES[scope])) == 0


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("dimension, stored, read", [(0, 4, 2), (1, 2, 4), (2, 3, 2), (1, 4, 4), (0, 1, 8), (1, 3, 4)])
def test_shards_come_back_in_any_cut(store, key, memory, scope, dimension, stored, read):
    tensor = made((8, 12, 6))
    put_all(store, key, tensor, stored, dimension, scope)
    room = _tensor_metadata_size() + 8 * 12 * 6 * 4
    memory = memory(room)
    for rank in range(read):
        wanted = target("shard", tp(rank, read, dimension, *SCOPES[scope]))
        assert same(store.get_tensor_with_parallelism(key, wanted), part(tensor, rank, read, dimension))
        into = store.get_tensor_with_parallelism_into(key, memory.address, room, wanted)
        assert same(into, part(tensor, rank, read, dimension))
    # The order of axes and the rank that asks make no difference to the whole.
    whole = target("full", axes(axis("tp", stored - 1, stored, split_dim=dimension), *reversed(SCOPES[scope])))
    assert same(store.get_tensor_with_parallelism(key, whole), tensor)
    assert same(store.get_tensor_with_parallelism_into(key, memory.address, room, whole), tensor)
    assert store.get_tensor_with_parallelism_into(key, memory.address, room - 1, whole) is None
    as_stored = target("as_stored", tp(stored - 1, stored, dimension, *SCOPES[scope]))
    assert same(store.get_tensor_with_parallelism(key, as_stored), part(tensor, stored - 1, stored, dimension))


def test_shards_by_rank_alone_are_those_of_tensor_parallelism(store, key):
    tensor = made((4, 6))
    assert store.put_tensor_with_parallelism(key, part(tensor, 2, 3, 1), tp(2, 3, 1)) == 0
    assert same(store.get_tensor_with_tp(key, 2, 3, 1), part(tensor, 2, 3, 1))
    assert same(store.get_tensor_with_parallelism(key, target("shard", tp(2, 3, 1))), part(tensor, 2, 3, 1))
    # The others are missing: neither they nor the whole can be had.
    for missing in (target("shard", tp(0, 3, 1)), target("full", tp(0, 3, 1)), target("shard", tp(0, 2, 1))):
        assert store.get_tensor_with_parallelism(key, missing) is None
    assert store.put_tensor_with_tp(f"{key}/split", tensor, 0, 4, 1) == 0
    whole = target("full", tp(0, 4, 1))
    assert same(store.get_tensor_with_parallelism(f"{key}/split", whole), tensor), "parts of two lengths fit together too"


def test_a_whole_tensor_is_cut_where_no_shards_lie(store, key):
    tensor = made((4, 6))
    assert store.put_tensor_with_parallelism(key, tensor) == 0
    for wanted in (None, ReadTarget(), target("full"), target("full", tp(0, 2, 1))):
        assert same(store.get_tensor_with_parallelism(key, wanted), tensor)
    assert same(store.get_tensor_with_parallelism(key, target("shard", tp(1, 2, 1))), part(tensor, 1, 2, 1))
    assert store.get_tensor_with_parallelism(key, target("shard", tp(1, 4, 1))) is None, "6 columns are not 4 parts"


def test_axes_without_a_split_name_tensors_of_their_own(store, key):
    first, second = made((4,)), made((5,))
    expert = lambda number: axes(axis("ep", 0, 2, expert_id=number))  # noqa: E731
    assert store.batch_put_tensor_with_parallelism([key] * 2, [first, second], [expert(1), expert(2)]) == [0, 0]
    wanted = [target(mode, expert(number)) for number in (1, 2) for mode in ("as_stored", "shard", "full")]
    got = store.batch_get_tensor_with_parallelism([key] * 6, wanted)
    assert all(same(each, first) for each in got[:3]) and all(same(each, second) for each in got[3:])
    assert store.get_tensor(key) is None


class Partition:
    def __init__(self, rank, size, split_dim):
        self.rank, self.size, self.split_dim = rank, size, split_dim


@pytest.mark.parametrize("partition", [Partition, lambda *three: three])
def test_writers_store_their_partitions_of_the_whole(store, key, memory, partition):
    tensors = [made((6, 8)), made((4, 9, 3))]
    keys = [f"{key}/{place}" for place in range(2)]
    for rank in range(4):
        partitions = [partition(rank, 4, 1), partition(min(rank, 2), 3, 1)]
        codes = store.batch_put_tensor_with_parallelism(keys, tensors, writer_partitions=partitions)
        assert codes == [0, 0]
    got = store.batch_get_tensor_with_parallelism(keys, [target("full")] * 2)
    assert all(same(one, other) for one, other in zip(got, tensors))
    room = _tensor_metadata_size() + 1024
    memories = [memory(room), memory(room)]
    addresses = [each.address for each in memories]
    got = store.batch_get_tensor_with_parallelism_into(keys, addresses, [room] * 2, [target("full")] * 2)
    assert all(same(one, other) for one, other in zip(got, tensors))
    assert store.get_tensor_with_parallelism(f"{key}/none", target("full")) is None


def test_wholes_at_addresses_are_split_for_all_ranks(store, key, memory):
    tensor = made((4, 6))
    room = _tensor_metadata_size() + 96 + 64
    memory = memory(room)
    assert store.put_tensor(f"{key}/seed", tensor) == 0
    store.get_tensor_into(f"{key}/seed", memory.address, room)
    scoped = tp(0, 2, 1, axis("dp", 1, 2))
    names, rows = [f"{key}/tp", f"{key}/dp"], [tp(0, 2, 1), scoped]
    put = [names, [memory.address] * 2, [room] * 2]
    assert store.batch_put_tensor_with_parallelism_from(*put, rows) == [0, 0]
    assert store.batch_upsert_tensor_with_parallelism_from(*put, rows) == [0, 0]
    for name, row in zip(names, rows):
        assert same(store.get_tensor_with_parallelism(name, target("full", row)), tensor)
    for rank in range(2):
        assert store.put_tensor_with_parallelism_from(key, memory.address, room, writer_partition=(rank, 2, 0)) == 0
    assert same(store.get_tensor_with_parallelism(key, target("full")), tensor)
    assert store.put_tensor_with_parallelism_from(f"{key}/whole", memory.address, room) == 0
    assert same(store.get_tensor(f"{key}/whole"), tensor)
    assert store.put_tensor_with_parallelism_from(key, 4096, room, tp(0, 2, 1)) == INVALID
    assert store.put_tensor_with_parallelism_from(key, memory.address, 300, tp(0, 2, 1)) == INVALID


def test_upserts_replace_shards_and_puts_do_not(store, key):
    first, second = made((4, 6)), made((4, 6)) + 100
    for rank in range(2):
        row = tp(rank, 2, 1, axis("dp", 0, 2))
        assert store.put_tensor_with_parallelism(key, first, row) == 0
        assert store.put_tensor_with_parallelism(key, second, row) == 0
    whole = target("full", tp(0, 2, 1, axis("dp", 0, 2)))
    assert same(store.get_tensor_with_parallelism(key, whole), first)
    for rank in range(2):
        assert store.upsert_tensor_with_parallelism(key, second, tp(rank, 2, 1, axis("dp", 0, 2))) == 0
    assert same(store.get_tensor_with_parallelism(key, whole), second)
    # A shard of another cut of that name belongs to no whole.
    assert store.upsert_tensor_with_parallelism(key, made((6, 6)), tp(1, 2, 1, axis("dp", 0, 2))) == 0
    assert store.get_tensor_with_parallelism(key, whole) is None


def test_tensors_without_elements_are_split_and_joined(store, key):
    tensor = made((4, 0))
    put_all(store, key, tensor, 2, 0, "dp_tp")
    assert same(store.get_tensor_with_parallelism(key, target("full", tp(0, 2, 0, *SCOPES["dp_tp"]))), tensor)
    put_all(store, f"{key}/none", tensor, 2, 1, "dp_tp")
    assert same(store.get_tensor_with_parallelism(f"{key}/none", target("full", tp(0, 2, 1, *SCOPES["dp_tp"]))), tensor)


@pytest.mark.parametrize(
    "wrong",
    [
        axes(),
        axes(axis("tp", 0, 2)),
        tp(0, 2, 2),
        tp(0, 2, -1),
        tp(2, 2, 0),
        tp(-1, 2, 0),
        tp(0, 0, 0),
        tp(0, 2, 0, axis("dp", 0, 2, split_dim=0)),
        axes(axis("dp", 0, 2, split_dim=0)),
        axes(axis("pp", 0, 2, split_dim=0)),
        axes(axis("ep", 0, 2)),
        axes(axis("xp", 0, 2)),
        axes(axis("dp", 0, 2), axis("dp", 1, 2)),
        axes(*[axis("dp", 0, 2)] * 5),
        "text",
        17,
    ],
)
def test_axes_that_make_no_sense_are_refused(store, key, memory, wrong):
    tensor, memory = made((8, 8)), memory(1024)
    assert store.put_tensor_with_parallelism(key, tensor, wrong) == INVALID
    assert store.upsert_tensor_with_parallelism(key, tensor, wrong) == INVALID
    assert store.put_tensor_with_parallelism_from(key, memory.address, 1024, wrong) == INVALID
    for mode in ("as_stored", "shard", "full"):
        got = store.get_tensor_with_parallelism(key, target(mode, wrong))
        assert got is None
        assert store.get_tensor_with_parallelism_into(key, memory.address, 1024, target(mode, wrong)) is None


def test_requests_that_make_no_sense_are_refused(store, key):
    tensor = made((8, 6))
    assert store.put_tensor_with_parallelism(key, tensor, tp(0, 2, 1), None, (0, 2, 1)) == INVALID
    for wrong in ((0, 4, 1), (2, 2, 1), (0, 2), (0, 2, 5), (0, 2, "1"), 3):
        assert store.put_tensor_with_parallelism(key, tensor, writer_partition=wrong) == INVALID
    assert store.put_tensor_with_parallelism(key, tensor, tp(0, 4, 1, axis("dp", 0, 2))) == INVALID
    assert store.put_tensor_with_parallelism(key, "no tensor", tp(0, 2, 1)) == INVALID
    both = {"parallelisms": [tp(0, 2, 1)], "writer_partitions": [(0, 2, 1)]}
    assert store.batch_put_tensor_with_parallelism([key], [tensor], **both) == [INVALID]
    assert store.batch_put_tensor_with_parallelism([key], [tensor], [tp(0, 2, 1)] * 2) == [INVALID]
    assert store.batch_put_tensor_with_parallelism([key, key], [tensor], [tp(0, 2, 1)] * 2) == [INVALID] * 2
    assert store.batch_get_tensor_with_parallelism([key], [None] * 2) == [None]
    assert store.get_tensor_with_parallelism(key, target("other")) is None
    assert store.get_tensor_with_parallelism(key, target("shard")) is None
    store.put(f"{key}_tp_0", b"no tensor")
    assert store.get_tensor_with_parallelism(key, target("shard", tp(0, 2, 1))) is None


def test_groups_of_a_batch_are_of_its_keys(store, key):
    config = ReplicateConfig()
    config.group_ids = ["one", "two"]
    tensors, keys = [made((4, 6))] * 2, [f"{key}/0", f"{key}/1"]
    assert store.batch_pub_tensor_with_tp(keys, tensors, config, 0, 2, 1) == [0, 0]
    rows = [tp(0, 2, 1, axis("dp", 0, 2))] * 2
    assert store.batch_put_tensor_with_parallelism(keys, tensors, rows, config) == [0, 0]
    config.group_ids = ["one"]
    assert store.batch_put_tensor_with_parallelism(keys, tensors, rows, config) == [INVALID] * 2
