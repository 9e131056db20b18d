"""Embedding tables over a store."""

import random

import pytest

numpy = pytest.importorskip("numpy")

from mooncake.store import EngramStore, EngramStoreConfig, MooncakeDistributedStore  # noqa: E402


def made(store, sizes=(50, 7, 1), width=4):
    config = EngramStoreConfig()
    config.table_vocab_sizes, config.embedding_dim = list(sizes), width
    return EngramStore(random.randrange(1 << 40), config, store)


def tables(sizes=(50, 7, 1), width=4):
    return [numpy.random.default_rng(seed).random((size, width), "float32") for seed, size in enumerate(sizes)]


def test_rows_of_tables_are_looked_up(store):
    engram, filled = made(store), tables()
    assert (engram.get_embedding_dim(), engram.get_num_heads(), engram.get_table_vocab_sizes()) == (4, 3, [50, 7, 1])
    with pytest.raises(RuntimeError, match="-704"):
        engram.lookup(numpy.zeros((1, 1, 3), int))
    engram.populate(filled)
    assert store.batch_is_exist(engram.get_store_keys()) == [1, 1, 1]
    ids = numpy.random.default_rng(9).integers(0, [50, 7, 1], (2, 20, 3))
    found = engram.lookup(ids)
    assert found.shape == (2, 20, 3, 4) and found.dtype == numpy.float32
    expected = numpy.stack([filled[head][ids[:, :, head]] for head in range(3)], axis=2)
    assert numpy.array_equal(found, expected)
    every = numpy.stack([numpy.arange(50), numpy.arange(50) % 7, numpy.zeros(50, int)], axis=1)[None]
    assert numpy.array_equal(engram.lookup(every.tolist())[0, :, 0], filled[0])
    assert engram.lookup(numpy.zeros((0, 5, 3), int)).shape == (0, 5, 3, 4)
    with pytest.raises(RuntimeError, match="without values"):
        engram.populate(filled)
    assert engram.remove_from_store(True) == 3 and engram.remove_from_store() == 0


def test_what_makes_no_sense_is_refused(store):
    for sizes, width in (((), 4), ((0,), 4), ((3, -1), 4), ((3,), 0)):
        with pytest.raises(ValueError):
            made(store, sizes, width)
    engram, filled = made(store), tables()
    for wrong in (filled[:2], filled[::-1], [table.astype("float64") for table in filled], tables(width=5)):
        with pytest.raises(ValueError):
            engram.populate(wrong)
    assert store.batch_is_exist(engram.get_store_keys()) == [0, 0, 0]
    for wrong in ([[0, 0, 0]], [[[0, 0]]], [[[0.5, 0, 0]]], [[[50, 0, 0]]], [[[-1, 0, 0]]]):
        with pytest.raises(ValueError):
            engram.lookup(wrong)
    for nothing in (None, MooncakeDistributedStore()):
        with pytest.raises(RuntimeError):
            made(nothing).populate(filled)


def test_a_table_that_is_not_stored_takes_the_others_with_it(store, monkeypatch):
    engram, put = made(store), store.batch_put_from

    def all_but_one(keys, pointers, sizes):
        return [*put(keys[:2], pointers[:2], sizes[:2]), -200]

    monkeypatch.setattr(store, "batch_put_from", all_but_one)
    with pytest.raises(RuntimeError, match="-200"):
        engram.populate(tables())
    assert store.batch_is_exist(engram.get_store_keys()) == [0, 0, 0]
