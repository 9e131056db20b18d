"""Embedding tables over a store: not built."""


class EngramStore:
    """Not supported."""

    def __init__(self, layer_id: int, config: object, store: object = None) -> None:
        raise NotImplementedError("EngramStore is not supported: see docs/src/compatibility.md")

    def get_embedding_dim(self) -> int:
        """Not supported."""
        raise NotImplementedError

    get_num_heads = get_store_keys = get_table_vocab_sizes = lookup = populate = remove_from_store = get_embedding_dim
