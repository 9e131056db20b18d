"""``Store``: the calls that wait."""

import os
from typing import TYPE_CHECKING, Any, Iterator, List, Optional, Sequence, Union

from . import _arguments, trees, types
from ._connected import Connected
from ._native import Connection, View
from .errors import InvalidError, TidepoolError
from .tensors import Tensor, decode, encode
from .types import DataType, Key, Listed, ObjectStat, RemoveProgress, ServerInfo, Task
from .views import Views, single

if TYPE_CHECKING:
    from .embedded import EmbeddedStore


class Store(Connected):
    """A connection to a store; made by :meth:`connect`.

    It may be used by many threads at once: every call lets go of the interpreter's lock while it waits. Every call ends by
    the ``deadline`` given to ``connect``. After a fork the child connects anew; calls on its parent's store raise
    ``FORKED``. As a context manager it closes itself.
    """

    def __init__(self, connection: Connection) -> None:
        """Wraps a native connection; use :meth:`connect`."""
        self._native = connection

    @classmethod
    def connect(
        cls,
        endpoint: Optional[_arguments.Endpoints] = None,
        *,
        token: Optional[str] = None,
        token_file: Optional[_arguments.Path] = None,
        tenant: str = "",
        deadline: float = _arguments.DEADLINE,
        connect_timeout: float = _arguments.CONNECT_TIMEOUT,
        connections: int = _arguments.CONNECTIONS,
        retries: int = _arguments.RETRIES,
        local_reads: bool = True,
        same_host: bool = True,
        hedged_reads: bool = True,
        one_sided_reads: str = "rdma",
        one_sided_puts: bool = True,
        tls_certificate: Optional[_arguments.Path] = None,
        tls_key: Optional[_arguments.Path] = None,
        tls_authorities: Optional[_arguments.Path] = None,
        tls_name: Optional[str] = None,
    ) -> "Store":
        """Connects to a node, and has reached it when this returns.

        Args:
            endpoint: ``host:port``, or ``unix:/path/tidepool.sock`` of a node on this host, or a list of them. Default:
                ``$TIDEPOOL_ENDPOINT``, else 127.0.0.1:7420.
            token: the cluster's secret; or in ``token_file`` (default ``$TIDEPOOL_TOKEN_FILE``).
            tenant: whose objects are meant.
            deadline: seconds that a call may take, repetitions included.
            connect_timeout: seconds that one attempt to connect may take.
            connections: how many are kept to the server.
            retries: how often a call is repeated where that can help.
            local_reads: read objects in the DRAM of a node on this host without a call. They may be up to 5 s behind
                removals by others; ``fresh=True`` avoids that.
            same_host: use shared memory and unix sockets with a node on this host; else TCP, as with any other.
            hedged_reads: ask a second node, too, for an object that several other nodes hold, when the first one is slow to
                begin its answer: at most every twentieth read.
            one_sided_reads: whose memory this client reads itself, of objects from 64 KiB in DRAM: ``rdma``: that of nodes on
                other hosts, where an RDMA device can; ``never``; ``always``: by whatever there is, which is slower than
                asking without a device, and is for tests.
            one_sided_puts: let nodes on other hosts read values of puts from this program's memory, where an RDMA device
                can. Not where ``one_sided_reads`` is ``never``.
            tls_certificate: PEM file with this program's certificate, for nodes with ``engine.tls_certificate``: what goes by
                their engines is encrypted then. gRPC is not: it carries what the engines don't, and everything while a node's
                engine can't be reached or has no certificate that fits. Default: ``$TIDEPOOL_TLS_CERTIFICATE``.
            tls_key: PEM file with its key, of mode 0600 (``$TIDEPOOL_TLS_KEY``).
            tls_authorities: PEM file with the authorities of nodes' certificates (``$TIDEPOOL_TLS_AUTHORITIES``).
            tls_name: name that nodes' certificates bear (``$TIDEPOOL_TLS_NAME``; default: the host that is connected to).

        Raises:
            UnavailableError: nothing answers there. InvalidError: a setting is out of bounds, or a certificate can't be used.
            DeniedError: wrong token.
        """
        arguments = _arguments.connection(
            endpoint,
            token,
            token_file,
            tenant,
            deadline,
            connect_timeout,
            connections,
            retries,
            local_reads,
            same_host,
            hedged_reads,
            one_sided_reads,
            one_sided_puts,
            tls_certificate,
            tls_key,
            tls_authorities,
            tls_name,
        )
        return cls(Connection.connect(False, *arguments))

    @classmethod
    def embedded(cls, join: _arguments.Endpoints, **options: Any) -> "EmbeddedStore":
        """Lends memory of this process to a cluster, and connects to it: see :class:`tidepool.EmbeddedStore`."""
        from .embedded import EmbeddedStore

        return EmbeddedStore.start(join, **options)

    def close(self) -> None:
        """Lets go of the connection. Calls under way end as they would have; later ones raise ``CLOSED``."""
        self._native.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def put(
        self,
        key: Key,
        value: Any,
        *,
        durability: str = "memory",
        data_type: int = DataType.UNKNOWN,
        group: str = "",
        upsert: bool = False,
        pin: bool = False,
        replicas: int = 0,
        min_replicas: int = 0,
        prefer: Sequence[str] = (),
        soft_pin: Optional[float] = None,
    ) -> bool:
        """Stores the bytes of ``value``: ``bytes``, ``bytearray``, ``memoryview``, a contiguous array.

        Returns True if it was stored, and False if the key has an object already: then nothing was written, unless
        ``upsert`` asks for a new version.

        Args:
            durability: ``memory``, or ``nvme``: acknowledged when a copy on disk is durable.
            data_type: what it holds.
            group: objects of one group belong together.
            upsert: replace an object that is there.
            pin: keep it from eviction until it is unpinned.
            replicas: how many copies, on as many nodes; 0: as the node's setting says.
            min_replicas: with how many the put is acknowledged; 0: one. The rest is made later.
            prefer: nodes that are to have the further copies before others: each by its number, the address of its gRPC, that
                without its port, or the label of its host. Other names name none.
            soft_pin: seconds, at most 86,400, for which nodes evict it after others, and before pinned ones: a hint, which is
                not kept over a restart of a node. 0: not. None: as long as what an upsert replaces.
        """
        put_options = _arguments.put_options
        options = put_options(durability, data_type, group, upsert, pin, replicas, min_replicas, prefer, soft_pin)
        return self._native.put(False, key, [value], options)

    def put_parts(self, key: Key, parts: Sequence[Any], **options: Any) -> bool:
        """Stores several buffers as one object, one after the other. Options as of :meth:`put`."""
        return self._native.put(False, key, list(parts), _options(options))

    def upsert(self, key: Key, value: Any, **options: Any) -> None:
        """Stores ``value`` whether the key has an object or not. Options as of :meth:`put`."""
        self._native.put(False, key, [value], _options({**options, "upsert": True}))

    def put_striped(
        self, key: Key, value: Any, *, nodes: int = 0, part_bytes: int = _arguments.PART_BYTES, **options: Any
    ) -> bool:
        """Stores ``value`` in parts of ``part_bytes`` over so many ``nodes`` (0: all that take objects).

        Options as of :meth:`put`, without ``group``; they hold for each part. Read it with :meth:`get_striped`: for all other
        calls the key has a list of parts.
        """
        return self._native.put_striped(False, key, value, _options(options), nodes, part_bytes)

    def get_striped(self, key: Key, *, offset: int = 0, length: Optional[int] = None) -> Optional[bytes]:
        """The bytes of a striped object, read from its nodes side by side; None if it, or a part of it, is not there.

        Raises ``NOT_STRIPED`` if it was not put by :meth:`put_striped`.
        """
        return self._native.get_striped(False, key, offset, length)

    def remove_striped(self, key: Key, *, force: bool = False) -> bool:
        """Removes a striped object with its parts. As :meth:`remove`."""
        return removed(key, self._native.remove_striped(False, key, force))

    def put_batch(self, keys: Sequence[Key], values: Sequence[Any], **options: Any) -> List[Union[bool, TidepoolError]]:
        """Stores many; for each key True, False (there already), or the error that it failed with."""
        return self._native.put_batch(False, _arguments.one(keys), list(values), _options(options))

    def get(
        self, key: Key, *, offset: int = 0, length: Optional[int] = None, fresh: bool = False
    ) -> Optional[bytes]:
        """The object's bytes, or ``length`` of them from ``offset`` on; None if there is no such object.

        ``fresh`` asks the leader: the answer has everything that was acknowledged before the call.
        """
        return self._native.get(False, key, offset, length, fresh, False)

    def get_view(
        self, key: Key, *, offset: int = 0, length: Optional[int] = None, fresh: bool = False
    ) -> Optional[View]:
        """As :meth:`get`, but without the last copy: ``memoryview(view)``, ``numpy.frombuffer(view)``. Writable."""
        return self._native.get(False, key, offset, length, fresh, True)

    def view(self, key: Key) -> Optional[View]:
        """The object where it lies in the memory of the node on this host, read-only and without a copy, or a copy of it if it is not there
        (``view.copied``); None if there is no such object. Verified once, now.

        ``with view:`` or ``view.release()`` lets go of it; arrays and memoryviews over it keep it until they are gone. Meanwhile its bytes
        stay what they are, whatever becomes of the object and of the node. Raises ``TOO_MANY_VIEWS`` when this store has 256 open, or would
        keep more than an eighth of the node's DRAM.
        """
        return single(Views(self._native.views(False, [key])))

    def views(self, keys: Sequence[Key]) -> Views:
        """As :meth:`view` for many: a list that is a context manager, of a view, None or an error a key."""
        return Views(self._native.views(False, _arguments.one(keys)))

    def get_into(
        self, key: Key, buffer: Any, *, offset: Optional[int] = None, fresh: bool = False
    ) -> Optional[int]:
        """Reads the object into the start of a writable, contiguous ``buffer``; its length, or None if there is none.

        With an ``offset``, reads as many bytes from there as the buffer has. After an error the buffer's content means
        nothing. Raises ``BAD_RANGE`` if the object does not fit.
        """
        return self._native.get_into(False, key, buffer, offset, fresh)

    def put_from(self, key: Key, buffer: Any, **options: Any) -> bool:
        """As :meth:`put`; the counterpart of :meth:`get_into`."""
        return self._native.put(False, key, [buffer], _options(options))

    def get_batch(self, keys: Sequence[Key]) -> List[Union[bytes, None, TidepoolError]]:
        """Reads many; for each key its bytes, None, or the error that it failed with."""
        return self._native.get_batch(False, _arguments.one(keys), False)

    def get_batch_views(self, keys: Sequence[Key]) -> List[Union[View, None, TidepoolError]]:
        """As :meth:`get_batch`, but views."""
        return self._native.get_batch(False, _arguments.one(keys), True)

    def get_batch_into(
        self, keys: Sequence[Key], buffers: Sequence[Any], *, fresh: bool = False
    ) -> List[Union[int, None, TidepoolError]]:
        """Reads each object into the start of its buffer; for each key its length, None, or an error."""
        return self._native.get_batch_into(False, _arguments.one(keys), list(buffers), fresh)

    def exists(self, key: Key, *, lease: Optional[float] = None, fresh: bool = False) -> Optional[bool]:
        """Whether there is such an object; None: the node is recovering and does not know yet.

        With a ``lease`` (seconds, at most 60) an object that exists is not evicted for so long.
        """
        return self._native.exists(False, [key], lease, fresh)[0]

    def exists_batch(
        self, keys: Sequence[Key], *, lease: Optional[float] = None, fresh: bool = False
    ) -> List[Optional[bool]]:
        """As :meth:`exists`, for many."""
        return self._native.exists(False, _arguments.one(keys), lease, fresh)

    def remove(self, key: Key, *, force: bool = False) -> bool:
        """Removes the object; False if there is none. Raises ``PINNED`` if it is pinned, unless ``force``."""
        return removed(key, self._native.remove(False, [key], force)[0])

    def remove_batch(self, keys: Sequence[Key], *, force: bool = False) -> List[str]:
        """Removes many; for each key ``removed``, ``missing``, ``pinned`` or ``failed``."""
        return self._native.remove(False, _arguments.one(keys), force)

    def remove_matching(
        self, *, prefix: Optional[Key] = None, pattern: Optional[str] = None, force: bool = False
    ) -> RemoveProgress:
        """Removes the objects whose keys start with ``prefix``, or in which the regular expression matches."""
        if prefix is None and pattern is None:
            raise InvalidError("give a prefix or a pattern, or call remove_all", "BAD_ARGUMENT", field="prefix")
        return RemoveProgress(
            *self._native.remove_matching(False, *_arguments.matching(prefix, pattern), force)
        )

    def remove_all(self, *, force: bool = False) -> RemoveProgress:
        """Removes all objects of the tenant."""
        return RemoveProgress(*self._native.remove_matching(False, None, None, force))

    def list(
        self, prefix: Key = b"", *, data_type: Optional[int] = None, page_size: int = 1000
    ) -> Iterator[Listed]:
        """The objects whose keys start with ``prefix``, in key order; asks for a page at a time."""
        token = ""
        while True:
            rows, token = self._native.list(False, _arguments.key_bytes(prefix), page_size, token, data_type)
            yield from map(types.listed, rows)
            if not token:
                return

    def stat(self, key: Key) -> Optional[ObjectStat]:
        """What the catalog knows of the object; None if there is none."""
        row = self._native.stat(False, key)
        return None if row is None else types.stat(row)

    def begin_copy(self, key: Key, targets: Sequence[str]) -> Task:
        """Has copies of the object made on further nodes, which it keeps; goes on without the caller: :meth:`task` tells how it stands.

        A node is named by its number (:meth:`stat`), the address of its gRPC, or, if only one has it, by that without its port or by the
        label of its host. Raises what is refused before anything is begun: ``NOT_FOUND``, ``NO_SUCH_NODE``, ``AMBIGUOUS_NODE``, ``NODE_NOT_UP``,
        ``TOO_MANY_COPIES``, ``BAD_TASK``, ``TOO_MANY_TASKS``.
        """
        return types.task(self._native.begin_copy(False, key, _arguments.one(targets)))

    def begin_move(self, key: Key, source: str, target: str) -> Task:
        """Has the copy of the object on one node moved to another one. As :meth:`begin_copy`; ``NOT_ON_SOURCE``, ``TARGET_HAS_COPY``."""
        return types.task(self._native.begin_move(False, key, source, target))

    def task(self, task: int) -> Optional[Task]:
        """How a task stands; None if there is none of that id, or it ended more than an hour ago."""
        row = self._native.task(False, task, False)
        return None if row is None else types.task(row)

    def cancel_task(self, task: int) -> Optional[Task]:
        """Ends a task, unless it has ended; how it stands then. What it has made goes again."""
        row = self._native.task(False, task, True)
        return None if row is None else types.task(row)

    def tasks(self) -> Iterator[Task]:
        """The tenant's tasks that are not finished or ended in the last hour, by id; asks for a page at a time."""
        after = None
        while True:
            rows, after = self._native.tasks(False, after)
            yield from map(types.task, rows)
            if after is None:
                return

    def pin(self, keys: Sequence[Key]) -> List[bool]:
        """Keeps objects from eviction until they are unpinned as often; which exist."""
        return self._native.pin(False, _arguments.one(keys), False)

    def unpin(self, keys: Sequence[Key]) -> List[bool]:
        """Takes one pin off each; which exist."""
        return self._native.pin(False, _arguments.one(keys), True)

    def lease(self, keys: Sequence[Key], duration: Optional[float] = None) -> List[float]:
        """Keeps objects from eviction for ``duration`` seconds (default 5, at most 60); how long each lease lasts."""
        return self._native.lease(False, _arguments.one(keys), duration)

    def release(self, keys: Sequence[Key]) -> None:
        """Ends leases."""
        self._native.release(False, _arguments.one(keys))

    def server_info(self) -> ServerInfo:
        """What the server says of itself."""
        return ServerInfo(*self._native.server_info(False))

    def put_tensor(self, key: Key, tensor: Tensor, **options: Any) -> bool:
        """Stores a tensor with its shape and type: of torch, of numpy, or anything with ``__dlpack__`` in host memory.

        One that is not contiguous, or lies on a device, is copied first.
        """
        header, data = encode(tensor)
        options.setdefault("data_type", DataType.TENSOR)
        return self._native.put(False, key, [header, data], _options(options))

    def get_tensor(self, key: Key, *, framework: Optional[str] = None) -> Optional[Tensor]:
        """The tensor, as an array of ``framework``: ``numpy`` or ``torch``; None if there is none.

        Default: torch where the program has imported it, else numpy. Raises ``NOT_A_TENSOR`` for another object.
        """
        view = self._native.get(False, key, 0, None, False, True)
        return None if view is None else decode(view, framework)

    def put_tree(self, key: Key, tree: Any, **options: Any) -> bool:
        """Stores dicts, lists and tuples of tensors, numbers, strings, bytes and None. Leaves first, so that a tree that can
        be seen is whole. False if there is one already."""
        manifest, leaves = trees.flatten(key, tree)
        for leaf, tensor in leaves:
            self.put_tensor(leaf, tensor, **{**options, "upsert": True})
        return self.put(key, manifest, **{**options, "data_type": DataType.METADATA})

    def get_tree(self, key: Key, *, framework: Optional[str] = None) -> Any:
        """The tree; None if there is none, or part of it was evicted."""
        manifest = self.get(key)
        if manifest is None:
            return None
        names = trees.leaves(manifest)
        views = self._native.get_batch(False, names, True) if names else []
        for view in views:
            if isinstance(view, TidepoolError):
                raise view
        if any(view is None for view in views):
            return None
        return trees.build(manifest, [decode(view, framework) for view in views])


def removed(key: Key, outcome: str) -> bool:
    """The outcome of a removal as the caller of one has it."""
    if outcome == "pinned":
        from .errors import ConflictError

        raise ConflictError(f"object {key!r} is pinned", "PINNED")
    if outcome == "failed":
        from .errors import InternalError

        raise InternalError(f"object {key!r} could not be removed", "INTERNAL")
    return outcome == "removed"


def _options(options: dict) -> tuple:
    known = {
        "durability": "memory",
        "data_type": 0,
        "group": "",
        "upsert": False,
        "pin": False,
        "replicas": 0,
        "min_replicas": 0,
        "prefer": (),
        "soft_pin": None,
    }
    unknown = options.keys() - known.keys()
    if unknown:
        raise TypeError(f"put has no option {sorted(unknown)[0]!r}")
    return _arguments.put_options(**{**known, **options})
