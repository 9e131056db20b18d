"""``TransferEngine``: bytes from the registered memory of one process to that of another, without a store."""

from typing import Any, List, Optional, Sequence, Tuple, Union

from . import _native
from ._native import Transfer

Memory = Union[int, Any]
"""An address, or an object with a buffer, which stands for the address of its first byte."""

__all__ = ["Transfer", "TransferEngine"]


class TransferEngine:
    """Moves bytes between registered memory; see the book's page on the engine.

    It listens at ``listen`` (``host:port``; port 0 picks one). Peers that reach it may read and write what is registered:
    with ``secret`` only those that have the same one. Peers on one host are reached by shared memory and unix sockets
    without being told. Threads may share it; as a context manager it closes itself.
    """

    def __init__(self, listen: str = "127.0.0.1:0", *, secret: Optional[str] = None, same_host: bool = True) -> None:
        key = None
        if secret is not None:
            import hashlib

            key = hashlib.sha256(secret.encode()).digest()
        self._native = _native.Engine([listen], key, same_host)

    @property
    def session(self) -> str:
        """``host:port``, by which peers reach it."""
        host, port = self._native.addresses[0]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def register(self, buffer: Any) -> Tuple[int, int]:
        """Registers a writable, contiguous buffer, and keeps it until it is unregistered; its address and length."""
        return self._native.register(0, 0, buffer)

    def register_memory(self, address: int, length: int) -> None:
        """Registers memory by its address. It must stay until it is unregistered."""
        self._native.register(address, length)

    def unregister(self, memory: Memory) -> None:
        """Withdraws memory: transfers of it are waited for, and ended after five seconds."""
        self._native.unregister(_address(memory))

    def read(self, session: str, local: Memory, remote: int, length: int, *, timeout: float = 30.0) -> None:
        """Reads ``length`` bytes at the peer's address ``remote`` to ``local``."""
        self._native.transfer(session, [_address(local)], [remote], [length], False, timeout)

    def write(self, session: str, local: Memory, remote: int, length: int, *, timeout: float = 30.0) -> None:
        """Writes ``length`` bytes at ``local`` to the peer's address ``remote``."""
        self._native.transfer(session, [_address(local)], [remote], [length], True, timeout)

    def read_batch(
        self, session: str, local: Sequence[Memory], remote: Sequence[int], lengths: Sequence[int], *, timeout: float = 30.0
    ) -> None:
        """Reads many ranges; all are there when this returns."""
        self._native.transfer(session, _addresses(local), list(remote), list(lengths), False, timeout)

    def write_batch(
        self, session: str, local: Sequence[Memory], remote: Sequence[int], lengths: Sequence[int], *, timeout: float = 30.0
    ) -> None:
        """Writes many ranges; all are there when this returns."""
        self._native.transfer(session, _addresses(local), list(remote), list(lengths), True, timeout)

    def start(
        self,
        session: str,
        local: Sequence[Memory],
        remote: Sequence[int],
        lengths: Sequence[int],
        *,
        write: bool,
        timeout: float = 30.0,
    ) -> Transfer:
        """Starts a transfer: ``poll()`` says whether it has ended, ``wait()`` waits, ``cancel()`` asks for its end."""
        return self._native.start(session, _addresses(local), list(remote), list(lengths), write, timeout)

    def notify(self, session: str, notification: bytes, *, timeout: float = 30.0) -> None:
        """Tells a peer something; it has it when this returns."""
        self._native.notify(session, notification, timeout)

    def notifications(self) -> List[bytes]:
        """What peers told since the last call."""
        return self._native.notifications()

    def probe(self, session: str, *, timeout: float = 5.0) -> None:
        """Asks a peer whether it is there; raises if it is not."""
        self._native.probe(session, timeout)

    def regions_of(self, session: str, *, timeout: float = 5.0) -> List[Tuple[int, int]]:
        """What a peer has registered: addresses and lengths, by address."""
        return self._native.regions_of(session, timeout)

    def close(self) -> None:
        """Ends it: transfers under way fail."""
        self._native.close()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _address(memory: Memory) -> int:
    if isinstance(memory, int):
        return memory
    if hasattr(memory, "data_ptr"):
        return memory.data_ptr()
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _addresses(memory: Sequence[Memory]) -> List[int]:
    return [_address(each) for each in memory]
