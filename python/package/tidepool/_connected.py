"""What both kinds of store tell of their connection."""

from ._native import Connection


class Connected:
    """A store's connection: whether it is open, and by which ways its calls went."""

    _native: Connection

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._native.closed

    @property
    def native_calls(self) -> int:
        """How many calls went by the node's transfer engine, rather than by gRPC."""
        return self._native.native_calls

    @property
    def local_hits(self) -> int:
        """How many objects were read from the memory of the node on this host, without a call."""
        return self._native.local_hits

    @property
    def lent_puts(self) -> int:
        """How many puts, or messages of a batch put, the node on this host copied from memory of :func:`tidepool.allocate`."""
        return self._native.lent_puts

    @property
    def one_sided_reads(self) -> int:
        """How many objects this client read from nodes' memory itself."""
        return self._native.one_sided_reads

    @property
    def one_sided_puts(self) -> int:
        """How many puts' values nodes read from this program's memory."""
        return self._native.one_sided_puts
