"""``AsyncStore``: the same calls, awaited."""

import os
from typing import TYPE_CHECKING, Any, AsyncIterator, Awaitable, List, Optional, Sequence, Union

from . import _arguments, trees, types
from ._connected import Connected
from ._native import Connection, View
from .errors import InvalidError, TidepoolError
from .store import _options, removed
from .tensors import Tensor, decode, encode
from .types import DataType, Key, Listed, ObjectStat, RemoveProgress, ServerInfo, Task
from .views import Views, single

if TYPE_CHECKING:
    from .embedded import AsyncEmbeddedStore


class AsyncStore(Connected):
    """As :class:`tidepool.Store`, for asyncio: no call blocks the loop, and a cancelled one is not gone on with.

    At most 4096 calls are under way at a time in a process; more raise ``OVERLOADED``. Buffers given to a call belong to
    it until it ends. What arguments mean is said at :class:`tidepool.Store`.
    """

    def __init__(self, connection: Connection) -> None:
        """Wraps a native connection; use :meth:`connect`."""
        self._native = connection

    @classmethod
    async def connect(
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
    ) -> "AsyncStore":
        """Connects to a node, and has reached it when this returns."""
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
        return cls(await Connection.connect(True, *arguments))

    @classmethod
    async def embedded(cls, join: _arguments.Endpoints, **options: Any) -> "AsyncEmbeddedStore":
        """Lends memory of this process to a cluster, and connects to it: see :class:`tidepool.EmbeddedStore`."""
        from .embedded import AsyncEmbeddedStore

        return await AsyncEmbeddedStore.start(join, **options)

    def close(self) -> None:
        """Lets go of the connection."""
        self._native.close()

    async def __aenter__(self) -> "AsyncStore":
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()

    def put(self, key: Key, value: Any, **options: Any) -> Awaitable[bool]:
        """Stores bytes; False if the key has an object already."""
        return self._native.put(True, key, [value], _options(options))

    def put_parts(self, key: Key, parts: Sequence[Any], **options: Any) -> Awaitable[bool]:
        """Stores several buffers as one object."""
        return self._native.put(True, key, list(parts), _options(options))

    async def upsert(self, key: Key, value: Any, **options: Any) -> None:
        """Stores bytes whether the key has an object or not."""
        await self._native.put(True, key, [value], _options({**options, "upsert": True}))

    def put_striped(
        self, key: Key, value: Any, *, nodes: int = 0, part_bytes: int = _arguments.PART_BYTES, **options: Any
    ) -> Awaitable[bool]:
        """Stores a value in parts over nodes."""
        return self._native.put_striped(True, key, value, _options(options), nodes, part_bytes)

    def get_striped(
        self, key: Key, *, offset: int = 0, length: Optional[int] = None
    ) -> Awaitable[Optional[bytes]]:
        """The bytes of a striped object, or None."""
        return self._native.get_striped(True, key, offset, length)

    async def remove_striped(self, key: Key, *, force: bool = False) -> bool:
        """Removes a striped object with its parts."""
        return removed(key, await self._native.remove_striped(True, key, force))

    def put_batch(
        self, keys: Sequence[Key], values: Sequence[Any], **options: Any
    ) -> Awaitable[List[Union[bool, TidepoolError]]]:
        """Stores many."""
        return self._native.put_batch(True, _arguments.one(keys), list(values), _options(options))

    def get(
        self, key: Key, *, offset: int = 0, length: Optional[int] = None, fresh: bool = False
    ) -> Awaitable[Optional[bytes]]:
        """The object's bytes, or None."""
        return self._native.get(True, key, offset, length, fresh, False)

    def get_view(
        self, key: Key, *, offset: int = 0, length: Optional[int] = None, fresh: bool = False
    ) -> Awaitable[Optional[View]]:
        """As :meth:`get`, without the last copy."""
        return self._native.get(True, key, offset, length, fresh, True)

    async def view(self, key: Key) -> Optional[View]:
        """The object where it lies, without a copy, if it lies in memory on this host."""
        return single(Views(await self._native.views(True, [key])))

    async def views(self, keys: Sequence[Key]) -> Views:
        """As :meth:`view` for many: a view, None or an error a key."""
        return Views(await self._native.views(True, _arguments.one(keys)))

    def get_into(
        self, key: Key, buffer: Any, *, offset: Optional[int] = None, fresh: bool = False
    ) -> Awaitable[Optional[int]]:
        """Reads the object into the start of a writable buffer."""
        return self._native.get_into(True, key, buffer, offset, fresh)

    def put_from(self, key: Key, buffer: Any, **options: Any) -> Awaitable[bool]:
        """As :meth:`put`."""
        return self._native.put(True, key, [buffer], _options(options))

    def get_batch(self, keys: Sequence[Key]) -> Awaitable[List[Union[bytes, None, TidepoolError]]]:
        """Reads many."""
        return self._native.get_batch(True, _arguments.one(keys), False)

    def get_batch_views(self, keys: Sequence[Key]) -> Awaitable[List[Union[View, None, TidepoolError]]]:
        """As :meth:`get_batch`, but views."""
        return self._native.get_batch(True, _arguments.one(keys), True)

    def get_batch_into(
        self, keys: Sequence[Key], buffers: Sequence[Any], *, fresh: bool = False
    ) -> Awaitable[List[Union[int, None, TidepoolError]]]:
        """Reads each object into its buffer."""
        return self._native.get_batch_into(True, _arguments.one(keys), list(buffers), fresh)

    async def exists(self, key: Key, *, lease: Optional[float] = None, fresh: bool = False) -> Optional[bool]:
        """Whether there is such an object."""
        return (await self._native.exists(True, [key], lease, fresh))[0]

    def exists_batch(
        self, keys: Sequence[Key], *, lease: Optional[float] = None, fresh: bool = False
    ) -> Awaitable[List[Optional[bool]]]:
        """Which of them there are."""
        return self._native.exists(True, _arguments.one(keys), lease, fresh)

    async def remove(self, key: Key, *, force: bool = False) -> bool:
        """Removes the object."""
        return removed(key, (await self._native.remove(True, [key], force))[0])

    def remove_batch(self, keys: Sequence[Key], *, force: bool = False) -> Awaitable[List[str]]:
        """Removes many."""
        return self._native.remove(True, _arguments.one(keys), force)

    async def remove_matching(
        self, *, prefix: Optional[Key] = None, pattern: Optional[str] = None, force: bool = False
    ) -> RemoveProgress:
        """Removes objects by prefix or pattern."""
        if prefix is None and pattern is None:
            raise InvalidError("give a prefix or a pattern, or call remove_all", "BAD_ARGUMENT", field="prefix")
        return RemoveProgress(
            *await self._native.remove_matching(True, *_arguments.matching(prefix, pattern), force)
        )

    async def remove_all(self, *, force: bool = False) -> RemoveProgress:
        """Removes all objects of the tenant."""
        return RemoveProgress(*await self._native.remove_matching(True, None, None, force))

    async def list(
        self, prefix: Key = b"", *, data_type: Optional[int] = None, page_size: int = 1000
    ) -> AsyncIterator[Listed]:
        """The objects whose keys start with ``prefix``, in key order."""
        token = ""
        while True:
            rows, token = await self._native.list(True, _arguments.key_bytes(prefix), page_size, token, data_type)
            for row in rows:
                yield types.listed(row)
            if not token:
                return

    async def stat(self, key: Key) -> Optional[ObjectStat]:
        """What the catalog knows of the object."""
        row = await self._native.stat(True, key)
        return None if row is None else types.stat(row)

    async def begin_copy(self, key: Key, targets: Sequence[str]) -> Task:
        """Has copies of the object made on further nodes."""
        return types.task(await self._native.begin_copy(True, key, _arguments.one(targets)))

    async def begin_move(self, key: Key, source: str, target: str) -> Task:
        """Has the copy of the object on one node moved to another one."""
        return types.task(await self._native.begin_move(True, key, source, target))

    async def task(self, task: int) -> Optional[Task]:
        """How a task stands."""
        row = await self._native.task(True, task, False)
        return None if row is None else types.task(row)

    async def cancel_task(self, task: int) -> Optional[Task]:
        """Ends a task, unless it has ended; how it stands then."""
        row = await self._native.task(True, task, True)
        return None if row is None else types.task(row)

    async def tasks(self) -> AsyncIterator[Task]:
        """The tenant's tasks, by id."""
        after = None
        while True:
            rows, after = await self._native.tasks(True, after)
            for row in rows:
                yield types.task(row)
            if after is None:
                return

    def pin(self, keys: Sequence[Key]) -> Awaitable[List[bool]]:
        """Keeps objects from eviction."""
        return self._native.pin(True, _arguments.one(keys), False)

    def unpin(self, keys: Sequence[Key]) -> Awaitable[List[bool]]:
        """Takes one pin off each."""
        return self._native.pin(True, _arguments.one(keys), True)

    def lease(self, keys: Sequence[Key], duration: Optional[float] = None) -> Awaitable[List[float]]:
        """Keeps objects from eviction for a while."""
        return self._native.lease(True, _arguments.one(keys), duration)

    def release(self, keys: Sequence[Key]) -> Awaitable[None]:
        """Ends leases."""
        return self._native.release(True, _arguments.one(keys))

    async def server_info(self) -> ServerInfo:
        """What the server says of itself."""
        return ServerInfo(*await self._native.server_info(True))

    async def put_tensor(self, key: Key, tensor: Tensor, **options: Any) -> bool:
        """Stores a tensor with its shape and type."""
        header, data = encode(tensor)
        options.setdefault("data_type", DataType.TENSOR)
        return await self._native.put(True, key, [header, data], _options(options))

    async def get_tensor(self, key: Key, *, framework: Optional[str] = None) -> Optional[Tensor]:
        """The tensor, or None."""
        view = await self._native.get(True, key, 0, None, False, True)
        return None if view is None else decode(view, framework)

    async def put_tree(self, key: Key, tree: Any, **options: Any) -> bool:
        """Stores a tree of tensors."""
        manifest, leaves = trees.flatten(key, tree)
        for leaf, tensor in leaves:
            await self.put_tensor(leaf, tensor, **{**options, "upsert": True})
        return await self.put(key, manifest, **{**options, "data_type": DataType.METADATA})

    async def get_tree(self, key: Key, *, framework: Optional[str] = None) -> Any:
        """The tree, or None."""
        manifest = await self.get(key)
        if manifest is None:
            return None
        names = trees.leaves(manifest)
        views = await self._native.get_batch(True, names, True) if names else []
        for view in views:
            if isinstance(view, TidepoolError):
                raise view
        if any(view is None for view in views):
            return None
        return trees.build(manifest, [decode(view, framework) for view in views])
