"""The native part. Programs use the package's own classes."""

from typing import Any, List, Optional, Sequence, Tuple

__version__: str

# Durability NVMe, number of the data type, group, upsert, pin, replicas, min_replicas, prefer, milliseconds of soft pin.
_Options = Tuple[bool, int, str, bool, bool, int, int, List[str], Optional[int]]

class View:
    """A value as it came, an object where it lies, or memory of :func:`allocate`: has a buffer, and keeps its memory.

    The buffer of :meth:`tidepool.Store.view` is read-only, others are writable.
    """

    def __len__(self) -> int: ...
    def size(self) -> int:
        """Length in bytes."""
    def ptr(self) -> int:
        """Address of the first byte; good while this object lives and is not released."""
    @property
    def copied(self) -> bool:
        """Whether the bytes are this process's own, rather than those in a node's memory."""
    def release(self) -> None:
        """Lets go of the bytes: now, or when the last array or memoryview over them is gone. Other uses raise ``CLOSED`` then."""
    def __enter__(self) -> "View": ...
    def __exit__(self, *exception: object) -> None:
        """As :meth:`release`."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

def allocate(length: int, /) -> View:
    """``length`` zeroed bytes to put values from: a node on this host copies them from there to where they stay.

    Put ``memoryview(memory)[a:b]`` or an array over it (``numpy.frombuffer(memory, ..)``), as a whole value. The memory is
    lent to the node with the first put from it, which may read all of it from then on; it never writes there. It goes
    back to the system when nothing refers to it any more, and no call of a store is under way with it. All of it is
    backed from the start. A forked child shares it.

    Raises ``MemoryError`` if the machine has not as many bytes available, ``InvalidError`` for none, ``OSError``.
    """

class Connection:
    """The client's calls. Those whose first argument is true give an awaitable instead."""

    @staticmethod
    def connect(
        awaits: bool,
        endpoints: List[str],
        token: Optional[str],
        tenant: str,
        deadline: float,
        connect_timeout: float,
        connections: int,
        retries: int,
        reads: Tuple[bool, bool, int, bool],
        same_host: bool,
        tls: Optional[Tuple[str, str, str, Optional[str]]],
    ) -> Any: ...
    def close(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    @property
    def local_hits(self) -> int: ...
    @property
    def native_calls(self) -> int: ...
    @property
    def lent_puts(self) -> int: ...
    @property
    def one_sided_reads(self) -> int: ...
    @property
    def one_sided_puts(self) -> int: ...
    def get(
        self, awaits: bool, key: Any, offset: int, length: Optional[int], fresh: bool, as_view: bool
    ) -> Any: ...
    def views(self, awaits: bool, keys: Sequence[Any]) -> Any: ...
    def get_into(self, awaits: bool, key: Any, buffer: Any, offset: Optional[int], fresh: bool) -> Any: ...
    def get_batch(self, awaits: bool, keys: Sequence[Any], as_view: bool) -> Any: ...
    def get_batch_into(self, awaits: bool, keys: Sequence[Any], buffers: Sequence[Any], fresh: bool) -> Any: ...
    def put(self, awaits: bool, key: Any, parts: Sequence[Any], options: _Options) -> Any: ...
    def put_striped(
        self, awaits: bool, key: Any, value: Any, options: _Options, nodes: int, part_bytes: int
    ) -> Any: ...
    def get_striped(self, awaits: bool, key: Any, offset: int, length: Optional[int]) -> Any: ...
    def remove_striped(self, awaits: bool, key: Any, force: bool) -> Any: ...
    def put_batch(self, awaits: bool, keys: Sequence[Any], values: Sequence[Any], options: _Options) -> Any: ...
    def exists(self, awaits: bool, keys: Sequence[Any], lease: Optional[float], fresh: bool) -> Any: ...
    def remove(self, awaits: bool, keys: Sequence[Any], force: bool) -> Any: ...
    def remove_matching(
        self, awaits: bool, prefix: Optional[bytes], pattern: Optional[str], force: bool
    ) -> Any: ...
    def list(self, awaits: bool, prefix: bytes, page_size: int, page_token: str, only: Optional[int]) -> Any: ...
    def stat(self, awaits: bool, key: Any) -> Any: ...
    def begin_copy(self, awaits: bool, key: Any, targets: List[str]) -> Any: ...
    def begin_move(self, awaits: bool, key: Any, source: str, target: str) -> Any: ...
    def task(self, awaits: bool, task: int, is_to_end: bool) -> Any: ...
    def tasks(self, awaits: bool, after: Optional[int]) -> Any: ...
    def tier(self, awaits: bool, key: Any) -> Any: ...
    def pin(self, awaits: bool, keys: Sequence[Any], unpin: bool) -> Any: ...
    def lease(self, awaits: bool, keys: Sequence[Any], duration: Optional[float]) -> Any: ...
    def release(self, awaits: bool, keys: Sequence[Any]) -> Any: ...
    def server_info(self, awaits: bool) -> Any: ...
    def register(self, address: int, length: int) -> None: ...
    def unregister(self, address: int, patience: float) -> None: ...
    def read_to(
        self, keys: Sequence[Any], addresses: List[List[int]], lengths: List[List[int]]
    ) -> List[Any]: ...
    def write_from(
        self,
        keys: Sequence[Any],
        addresses: List[List[int]],
        lengths: List[List[int]],
        options: _Options,
        groups: List[str],
    ) -> List[Any]: ...

class Instance:
    """A node in this process. Not there in a module that was built without the feature ``embedded``."""

    @staticmethod
    def start(awaits: bool, settings: List[str]) -> Any: ...
    @property
    def endpoint(self) -> str:
        """Where its own process reaches it."""
    @property
    def address(self) -> str:
        """Where other nodes reach it."""
    @property
    def node(self) -> str:
        """Its number in the cluster."""
    @property
    def temporary(self) -> bool:
        """Whether its folders go with it."""
    def leave(self, awaits: bool, hand_over: float, connection: Optional[Connection]) -> Any:
        """Closes the connection once it is sure that the instance ends."""
    def stop(self, awaits: bool, connection: Optional[Connection]) -> Any:
        """Closes the connection once it is sure that the instance ends."""
    def attach_nvme(self, awaits: bool, path: Optional[str], capacity: Optional[int]) -> Any: ...
    def detach_nvme(self, awaits: bool) -> Any: ...

class Transfer:
    """A transfer on its way. It goes on if this is dropped."""

    def poll(self) -> bool:
        """Whether it has ended; raises what it failed with."""
    def wait(self) -> None:
        """Waits for its end; raises what it failed with."""
    def cancel(self) -> None:
        """Asks for its end."""
    @property
    def failure(self) -> Optional[str]:
        """Why it failed, for programs; None if it did not, or has not ended."""

class Engine:
    """The transfer engine, with memory named by its address on both sides."""

    def __init__(self, listen: List[str], secret: Optional[bytes], same_host: bool) -> None: ...
    @property
    def addresses(self) -> List[Tuple[str, int]]: ...
    def register(self, address: int, length: int, buffer: Any = None) -> Tuple[int, int]: ...
    def unregister(self, address: int) -> None: ...
    def transfer(
        self,
        session: str,
        local: List[int],
        remote: List[int],
        lengths: List[int],
        write: bool,
        timeout: float,
    ) -> None: ...
    def start(
        self,
        session: str,
        local: List[int],
        remote: List[int],
        lengths: List[int],
        write: bool,
        timeout: float,
    ) -> Transfer: ...
    def notify(self, session: str, notification: bytes, timeout: float) -> None: ...
    def notifications(self) -> List[bytes]: ...
    def probe(self, session: str, timeout: float) -> None: ...
    def regions_of(self, session: str, timeout: float) -> List[Tuple[int, int]]: ...
    def close(self) -> None: ...

def shut_down() -> None: ...
def read_memory(address: int, length: int) -> bytes: ...
def write_memory(address: int, value: Any) -> None: ...
