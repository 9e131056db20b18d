"""``EmbeddedStore`` and its awaited form: stores whose memory is, in part, this process's own."""

import atexit
import math
import os
from typing import Any, Mapping, Optional, Set, Union

from . import _arguments, _native
from ._native import Connection
from .aio import AsyncStore
from .errors import ConflictError, InvalidError, TidepoolError, UnimplementedError
from .store import Store

# An instance ends when it is told to, or with the program, and not when a variable goes: others use what it holds.
_OPEN: "Set[Union[EmbeddedStore, AsyncEmbeddedStore]]" = set()
_HAND_OVER = 20.0


class _Lender:
    """What both forms know of the instance in this process."""

    _native: Connection

    def _lend(self, instance: "_native.Instance", hand_over: float) -> None:
        self._instance = instance
        self._hand_over = hand_over
        self._process = os.getpid()

    def _end(self, awaits: bool, leaves: bool, hand_over: Optional[float] = None) -> Any:
        """Ends the instance. From when that is sure the store is closed, whatever comes of it."""
        hand_over = self._hand_over if hand_over is None else hand_over
        _check_hand_over(hand_over)
        try:
            if leaves:
                return self._instance.leave(awaits, hand_over, self._native)
            return self._instance.stop(awaits, self._native)
        finally:
            if self._native.closed:
                _OPEN.discard(self)

    def _close(self, awaits: bool) -> Any:
        """Ends the instance; None if it has ended, or another thread is at it."""
        try:
            return None if self._native.closed else self._end(awaits, self.temporary)
        except ConflictError as error:
            if error.reason != "CLOSED":
                raise
            return None

    @property
    def node(self) -> str:
        """The instance's number, as ``tidepool admin nodes`` shows it."""
        return self._instance.node

    @property
    def address(self) -> str:
        """Where other nodes reach it."""
        return self._instance.address

    @property
    def endpoint(self) -> str:
        """Where other programs on this host reach it best."""
        return self._instance.endpoint

    @property
    def temporary(self) -> bool:
        """Whether it goes for good with this process."""
        return self._instance.temporary


class EmbeddedStore(_Lender, Store):
    """A store of which this process lends a part: made by :meth:`Store.embedded`.

    An instance of the store runs in this process, and lends DRAM, and NVMe if asked to, to the cluster that it joins. It is
    a store like any other: what it puts lies in its own memory, where it reads it without a call; all other clients of the
    cluster find it too. It never votes, and holds a copy of the catalog, about 250 bytes an object.

    :meth:`close` ends it; so does the end of the program, and nothing else: it stays when no variable names it any more. A
    temporary instance (without ``data``) hands over what it holds before it goes. What of it had no other copy, and was not
    handed over in time, is gone.
    """

    def __init__(self, connection: Connection, instance: "_native.Instance", hand_over: float) -> None:
        """Wraps native objects; use :meth:`Store.embedded`."""
        super().__init__(connection)
        self._lend(instance, hand_over)

    @classmethod
    def start(
        cls,
        join: _arguments.Endpoints,
        *,
        dram: _arguments.Size = "256MiB",
        nvme: Optional[_arguments.Size] = None,
        nvme_path: Optional[_arguments.Path] = None,
        nvme_write_policy: str = "on_evict",
        data: Optional[_arguments.Path] = None,
        listen: str = "127.0.0.1:0",
        advertise: Optional[str] = None,
        token_file: Optional[_arguments.Path] = None,
        settings: Optional[Mapping[str, Any]] = None,
        hand_over: float = _HAND_OVER,
        **connection: Any,
    ) -> "EmbeddedStore":
        """Joins a cluster, and has its catalog when this returns.

        Args:
            join: ``host:port`` of a node of the cluster, or a list of them.
            dram: bytes to lend, or text such as ``"4GiB"``; 16 MiB and more.
            nvme: bytes of disk to lend; None: no disk.
            nvme_path: where on a disk. A temporary instance makes a folder of its own there, and removes it. Default: in
                ``data``, or the system's temporary directory.
            nvme_write_policy: ``on_evict``, ``write_through`` or ``never``.
            data: a folder to come back to: an instance that was stopped, and starts again over it in time, has what it
                had. Default: none; the instance is a temporary one.
            listen: where other nodes reach it. With nodes on other machines: an address of this one, and a secret.
            advertise: ``host:port`` that others are told, if that is another one.
            token_file: the cluster's secret (default ``$TIDEPOOL_TOKEN_FILE``).
            settings: further settings of a node, such as ``{"nvme.queue_depth": 64, "labels.rack": "r7"}``.
            hand_over: seconds that others have to take over what a temporary instance holds, when it ends.
            connection: as of :meth:`Store.connect`: tenant, deadline, connect_timeout, connections, retries, local_reads,
                same_host, hedged_reads, one_sided_reads, one_sided_puts, and certificates, which are the instance's too.

        Raises:
            InvalidError: a setting is out of bounds (``BAD_CONFIG``). UnavailableError: no node let it in within a minute.
            UnimplementedError: the module was built without this.
        """
        options = _Options(
            join, dram, nvme, nvme_path, nvme_write_policy, data, listen, advertise, token_file, settings, connection
        )
        _check_hand_over(hand_over)
        instance = _native.Instance.start(False, options.settings)
        try:
            native = Connection.connect(False, *options.connection(instance))
        except BaseException:
            instance.leave(False, 0.0, None)
            raise
        store = cls(native, instance, hand_over)
        _opened(store)
        return store

    def attach_nvme(
        self, path: Optional[_arguments.Path] = None, capacity: Optional[_arguments.Size] = None
    ) -> int:
        """Puts a disk into service that was detached: in ``path`` with ``capacity``, each as at the start if not given.

        Returns how many records were found there and taken over. The instance must have been started with ``nvme``.
        """
        size = None if capacity is None else _arguments.size("capacity", capacity)
        return self._instance.attach_nvme(False, None if path is None else os.fspath(path), size)

    def detach_nvme(self) -> None:
        """Takes the disk out of service: objects that are only there can't be read until it is attached again."""
        self._instance.detach_nvme(False)

    def leave(self, hand_over: Optional[float] = None) -> int:
        """Ends the instance for good, with a data folder too, after others had ``hand_over`` seconds to take over.

        Returns how many copies were given up. Raises what keeps the cluster from being told: it counts as a node that is
        away then.
        """
        return self._end(False, True, hand_over)

    def close(self) -> None:
        """Ends the instance. A temporary one hands over and leaves; one with a data folder may come back.

        May be called twice, and by several threads: one ends it, the others don't wait for that. Its objects that nobody
        else has can't be read meanwhile.
        """
        self._close(False)


class AsyncEmbeddedStore(_Lender, AsyncStore):
    """As :class:`EmbeddedStore`, for asyncio; made by :meth:`AsyncStore.embedded`.

    ``async with`` ends it, or :meth:`aclose`; :meth:`close` does too, and blocks while it hands over.
    """

    def __init__(self, connection: Connection, instance: "_native.Instance", hand_over: float) -> None:
        """Wraps native objects; use :meth:`AsyncStore.embedded`."""
        super().__init__(connection)
        self._lend(instance, hand_over)

    @classmethod
    async def start(
        cls,
        join: _arguments.Endpoints,
        *,
        dram: _arguments.Size = "256MiB",
        nvme: Optional[_arguments.Size] = None,
        nvme_path: Optional[_arguments.Path] = None,
        nvme_write_policy: str = "on_evict",
        data: Optional[_arguments.Path] = None,
        listen: str = "127.0.0.1:0",
        advertise: Optional[str] = None,
        token_file: Optional[_arguments.Path] = None,
        settings: Optional[Mapping[str, Any]] = None,
        hand_over: float = _HAND_OVER,
        **connection: Any,
    ) -> "AsyncEmbeddedStore":
        """Joins a cluster. What arguments mean is said at :meth:`EmbeddedStore.start`."""
        options = _Options(
            join, dram, nvme, nvme_path, nvme_write_policy, data, listen, advertise, token_file, settings, connection
        )
        _check_hand_over(hand_over)
        instance = await _native.Instance.start(True, options.settings)
        try:
            native = await Connection.connect(True, *options.connection(instance))
        except BaseException:
            await instance.leave(True, 0.0, None)
            raise
        store = cls(native, instance, hand_over)
        _opened(store)
        return store

    async def attach_nvme(
        self, path: Optional[_arguments.Path] = None, capacity: Optional[_arguments.Size] = None
    ) -> int:
        """Puts a disk into service that was detached: see :meth:`EmbeddedStore.attach_nvme`."""
        size = None if capacity is None else _arguments.size("capacity", capacity)
        return await self._instance.attach_nvme(True, None if path is None else os.fspath(path), size)

    async def detach_nvme(self) -> None:
        """Takes the disk out of service."""
        await self._instance.detach_nvme(True)

    async def leave(self, hand_over: Optional[float] = None) -> int:
        """Ends the instance for good: see :meth:`EmbeddedStore.leave`. Cancelled, it ends as if it had been killed."""
        return await self._end(True, True, hand_over)

    async def aclose(self) -> None:
        """Ends the instance: see :meth:`EmbeddedStore.close`."""
        ending = self._close(True)
        if ending is not None:
            await ending

    def close(self) -> None:
        """As :meth:`aclose`, and blocks until it is done."""
        self._close(False)

    async def __aexit__(self, *_exception: object) -> None:
        await self.aclose()


class _Options:
    """What an instance and the connection to it are started with."""

    def __init__(
        self,
        join: _arguments.Endpoints,
        dram: _arguments.Size,
        nvme: Optional[_arguments.Size],
        nvme_path: Optional[_arguments.Path],
        nvme_write_policy: str,
        data: Optional[_arguments.Path],
        listen: str,
        advertise: Optional[str],
        token_file: Optional[_arguments.Path],
        settings: Optional[Mapping[str, Any]],
        connection: Mapping[str, Any],
    ) -> None:
        if not hasattr(_native, "Instance"):
            raise UnimplementedError("this module was built without the feature `embedded`", "UNIMPLEMENTED", None, "")
        # What can't be meant is refused before anything is started.
        _, *self._connection = _arguments.connection("", token_file=token_file, **connection)
        tls = self._connection[-1]
        self.settings = _arguments.embedded(
            join, dram, nvme, nvme_path, nvme_write_policy, data, listen, advertise, token_file, tls, settings
        )

    def connection(self, instance: "_native.Instance") -> tuple:
        """The arguments of ``Connection.connect``."""
        return [instance.endpoint], *self._connection


def _check_hand_over(hand_over: float) -> None:
    if not (math.isfinite(hand_over) and hand_over >= 0):
        raise InvalidError(f"hand_over is {hand_over!r}: give seconds", "BAD_ARGUMENT", field="hand_over")


def _opened(store: Union[EmbeddedStore, AsyncEmbeddedStore]) -> None:
    if not _OPEN:
        # Last in, first out: before the native part is told that the interpreter goes.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
    _OPEN.add(store)


def _close_all() -> None:
    """At the program's end. What can't be told to the cluster then, it finds out."""
    for store in list(_OPEN):
        if store._process == os.getpid():
            try:
                store.close()
            except TidepoolError:
                pass
