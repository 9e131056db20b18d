"""Embedding tables over a store: a layer's heads have a table each, one value of float32 under ``engram:lLAYER:hHEAD``."""

from typing import Any, List

from ._codes import OBJECT_NOT_FOUND, OK
from ._types import EngramStoreConfig


class EngramStore:
    """The tables of a layer. Needs numpy."""

    def __init__(self, layer_id: int, config: EngramStoreConfig, store: Any = None) -> None:
        """ValueError for a config without tables, or without rows or columns."""
        sizes = [int(size) for size in config.table_vocab_sizes]
        if not sizes or min(sizes) <= 0:
            raise ValueError("table_vocab_sizes has a positive number for each head")
        if config.embedding_dim <= 0:
            raise ValueError("embedding_dim is positive")
        self._layer, self._sizes, self._width, self._store = int(layer_id), sizes, int(config.embedding_dim), store

    def get_embedding_dim(self) -> int:
        """Columns of each table."""
        return self._width

    def get_num_heads(self) -> int:
        """How many tables there are."""
        return len(self._sizes)

    def get_table_vocab_sizes(self) -> List[int]:
        """Rows of each table."""
        return list(self._sizes)

    def get_store_keys(self) -> List[str]:
        """Under which each table lies."""
        return [f"engram:l{self._layer}:h{head}" for head in range(len(self._sizes))]

    def populate(self, embedding_buffers: List[Any]) -> None:
        """Stores the tables, arrays of float32 of [rows, columns]: all, or none.

        ValueError for others; RuntimeError if there is one of them already, or one can't be stored.
        """
        import numpy

        tables = [numpy.ascontiguousarray(table) for table in embedding_buffers]
        shapes = [(rows, self._width) for rows in self._sizes]
        if [table.shape for table in tables] != shapes or any(table.dtype != numpy.float32 for table in tables):
            raise ValueError(f"the tables are float32 of {shapes}")
        store, keys = self._opened(), self.get_store_keys()
        there = store.batch_is_exist(keys)
        if any(there):
            raise RuntimeError(f"populate needs keys without values, and there are codes {there}")
        codes = store.batch_put_from(keys, [table.ctypes.data for table in tables], [table.nbytes for table in tables])
        if any(code != OK for code in codes):
            store.batch_remove([key for key, code in zip(keys, codes) if code == OK], True)
            raise RuntimeError(f"populate failed: {codes}")

    def lookup(self, row_ids: Any) -> Any:
        """Rows [batch, length, heads] of the tables, as float32 of [batch, length, heads, columns].

        ValueError for ids of another shape or beyond a table; RuntimeError if a table can't be read.
        """
        import numpy

        ids = numpy.asarray(row_ids)
        heads = len(self._sizes)
        if ids.ndim != 3 or ids.shape[2] != heads or ids.dtype.kind not in "iu":
            raise ValueError(f"row_ids are whole numbers of [batch, length, {heads}]")
        if ids.size and ((ids < 0) | (ids >= numpy.array(self._sizes))).any():
            raise ValueError("a row id is beyond its table")
        found = numpy.empty((*ids.shape, self._width), numpy.float32)
        for head, key in enumerate(self.get_store_keys()):
            rows, places = numpy.unique(ids[:, :, head], return_inverse=True)
            found[:, :, head] = self._rows(key, rows)[places.reshape(ids.shape[:2])]
        return found

    def remove_from_store(self, force: bool = False) -> int:
        """Removes the tables; how many there were. RuntimeError if one can't be removed."""
        codes = self._opened().batch_remove(self.get_store_keys(), force)
        if any(code not in (OK, OBJECT_NOT_FOUND) for code in codes):
            raise RuntimeError(f"remove_from_store failed: {codes}")
        return codes.count(OK)

    def _rows(self, key: str, rows: Any) -> Any:
        """Ascending rows of a table, neighbours by one read."""
        import numpy

        found = numpy.empty((len(rows), self._width), numpy.float32)
        if not len(rows):
            return found
        width = found.strides[0]
        begins = numpy.flatnonzero(numpy.diff(rows, prepend=rows[0] - 2) != 1)
        counts = numpy.diff(begins, append=len(rows))
        sizes = [int(count) * width for count in counts]
        targets, sources = [int(begin) * width for begin in begins], [int(rows[begin]) * width for begin in begins]
        lengths = self._opened().get_into_ranges([found.ctypes.data], [[key]], [[targets]], [[sources]], [[sizes]])[0][0]
        if lengths != sizes:
            raise RuntimeError(f"lookup failed for {key}: {min(lengths)}")
        return found

    def _opened(self) -> Any:
        if self._store is None:
            raise RuntimeError("the tables have no store")
        return self._store
