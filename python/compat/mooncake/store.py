"""``mooncake.store``: the store's client, over Tidepool."""

import os
import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

import tidepool
from tidepool._native import View as BufferHandle

from . import _codes, _setup
from ._codes import INVALID_PARAMS, NOT_SUPPORTED, OBJECT_HAS_LEASE, OBJECT_NOT_FOUND, OK
from ._engram import EngramStore
from ._memory import Memory, MooncakeHostMemAllocator, bind_to_numa_node
from ._nof import MooncakeDistributedNoFRegister
from ._pool import BufferLease, BufferLeaseView, BufferPool
from ._sessions import Sessions
from ._tensors import TensorCalls, _deserialize_tensor, _serialize_tensor, _tensor_metadata_size
from ._types import (
    Descriptor,
    DiskDescriptor,
    EngramStoreConfig,
    MemoryDescriptor,
    ObjectDataType,
    ParallelAxis,
    QueryTaskResponse,
    ReadTarget,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
    TensorParallelism,
)

RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
RegisteredBufferPool = BufferPool

ACTIVATION = ObjectDataType.ACTIVATION
GENERAL = ObjectDataType.GENERAL
GRADIENT = ObjectDataType.GRADIENT
KVCACHE = ObjectDataType.KVCACHE
METADATA = ObjectDataType.METADATA
OPTIMIZER_STATE = ObjectDataType.OPTIMIZER_STATE
SAMPLE = ObjectDataType.SAMPLE
TENSOR = ObjectDataType.TENSOR
UNKNOWN = ObjectDataType.UNKNOWN
WEIGHT = ObjectDataType.WEIGHT
COMPLETE = ReplicaStatus.COMPLETE
INITIALIZED = ReplicaStatus.INITIALIZED
REMOVED = ReplicaStatus.REMOVED
UNDEFINED = ReplicaStatus.UNDEFINED
FAILED = TaskStatus.FAILED
PENDING = TaskStatus.PENDING
PROCESSING = TaskStatus.PROCESSING
SUCCESS = TaskStatus.SUCCESS
REPLICA_COPY = TaskType.REPLICA_COPY
REPLICA_MOVE = TaskType.REPLICA_MOVE

Config = Optional[ReplicateConfig]
# What a call can raise for its arguments' sake, besides TypeError.
_FAILURES = (tidepool.TidepoolError, BufferError, OverflowError)
_UNREGISTER_PATIENCE = 5.0
_LEASE_MOST_SECONDS = 60.0


def _lease_seconds() -> float:
    milliseconds = os.environ.get("DEFAULT_KV_LEASE_TTL", "10000")
    return min(_LEASE_MOST_SECONDS, max(0.001, int(milliseconds) / 1000))


def get_alloc_func_addr() -> int:
    """Address of a function for device allocators: there is none."""
    return 0


def get_free_func_addr() -> int:
    """Address of a function for device allocators: there is none."""
    return 0


class MooncakeDistributedStore(Sessions, TensorCalls):
    """A client of a Tidepool node. Codes are 0 or positive for success, negative for failures.

    Calls before ``setup`` and after ``close`` answer -600 (or nothing, where the answer is data). Wrong types raise TypeError.
    """

    def __init__(self) -> None:
        self._settings: Optional[_setup.Settings] = None
        self._opened: Optional[tidepool.Store] = None
        self._connection = None
        self._segments: Dict[str, tidepool.EmbeddedStore] = {}
        self._finalizers: Dict[str, weakref.finalize] = {}
        self._lease = _lease_seconds()
        self._pool = Memory()
        Sessions.__init__(self)

    # Setting up.

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """``setup(local_hostname, metadata_server, global_segment_size, local_buffer_size, protocol, rdma_devices,
        master_server_addr, engine=None, enable_ssd_offload=False, ssd_offload_path="", tenant_id="default",
        enable_client_http_server=False, client_http_port=9300)``, or ``setup(config)`` with a dict.

        Connects to the Tidepool node at ``master_server_addr``; with ``TIDEPOOL_LEND_SEGMENT=1``, lends its cluster
        ``global_segment_size`` bytes of this process. 0, or the code of what is wrong; -1 if nothing answers.
        """
        if not args and set(kwargs) == {"config"}:
            args, kwargs = (kwargs["config"],), {}
        if len(args) == 1 and not kwargs:
            if not isinstance(args[0], dict):
                raise TypeError("setup takes a dict, or at least seven arguments")
            try:
                settings = _setup.of_dict(args[0])
            except ValueError as error:
                _setup.log.error("setup: %s", error)
                return INVALID_PARAMS
        else:
            settings = _of_arguments(*args, **kwargs)
        return self._set_up(settings)

    def _set_up(self, settings: _setup.Settings) -> int:
        if self._connection is not None:
            return OK
        code, opened = _setup.connect(settings, _setup.lends_segment(settings))
        if opened is not None:
            self._settings, self._opened, self._connection = settings, opened, opened._native
            self._end_with_this(opened)
        return code

    def _end_with_this(self, opened: tidepool.Store) -> None:
        # Engines that never close their store only let go of it: what it lends goes with it.
        if isinstance(opened, tidepool.EmbeddedStore):
            self._finalizers[opened.node] = finalizer = weakref.finalize(self, _end, opened)
            finalizer.atexit = False

    def _has_ended(self, opened: tidepool.Store) -> None:
        # Its finalizer would keep it for as long as this lives.
        if isinstance(opened, tidepool.EmbeddedStore) and opened.closed:
            finalizer = self._finalizers.pop(opened.node, None)
            if finalizer is not None:
                finalizer.detach()

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Connects to the node that ``mooncake_client`` at ``server_address`` stands for, or to a node there."""
        from .cli_client import master_of

        if int(mem_pool_size) < 0 or int(local_buffer_size) < 0:
            return INVALID_PARAMS
        master = master_of(server_address) or server_address
        return self._set_up(_setup.Settings("localhost", "P2PHANDSHAKE", 0, local_buffer_size, "tcp", "", master))

    def init_all(self, protocol: str, device_name: str, mount_segment_size: int = 16 << 20) -> int:
        """As ``setup`` with the node at 127.0.0.1:50051."""
        settings = _setup.Settings(
            "localhost", "P2PHANDSHAKE", mount_segment_size, 16 << 20, protocol, device_name, _setup.DEFAULT_MASTER
        )
        return self._set_up(settings)

    def close(self) -> int:
        """Lets go of the connection, and ends what it lends; 0, however often."""
        opened, self._opened, self._connection = self._opened, None, None
        self._forget_sessions()
        ended = [self._unmount(segment, None) for segment in list(self._segments)]
        code = OK
        if opened is not None:
            code = _end(opened)
            self._has_ended(opened)
        self._pool.clear()
        return _codes.first_failure_of([code, *ended])

    def health_check(self) -> int:
        """0: healthy. 1: not set up, or closed. 2: the node can't be reached."""
        if self._connection is None:
            return 1
        try:
            self._connection.server_info(False)
        except tidepool.TidepoolError:
            return 2
        return 0

    def get_hostname(self) -> str:
        """As it was given to ``setup``."""
        return self._settings.local_hostname if self._settings is not None else ""

    def _get_pyclient_capsule(self) -> object:
        return self._connection

    # Memory.

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Registers memory, which must stay until it is unregistered. -600 if it overlaps registered memory."""
        return self._status(lambda native: native.register(buffer_ptr, size))

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Unregisters memory; waits up to 5 s for calls that use it."""
        return self._status(lambda native: native.unregister(buffer_ptr, _UNREGISTER_PATIENCE))

    def alloc_from_mem_pool(self, size: int) -> int:
        """Address of ``size`` bytes that go with the store; 0 if there are none."""
        return self._pool.allocate(size) if self._connection is not None else 0

    # Whole values.

    def put(self, key: str, value: Any, config: Config = None) -> int:
        """Stores a value; a key that has one keeps it, and the answer is 0."""
        return self._put_parts(key, (value,), config, upsert=False)

    def put_parts(self, key: str, *parts: Any, config: Config = None) -> int:
        """Stores several one-dimensional byte buffers as one value."""
        _check_parts(parts)
        return self._put_parts(key, parts, config, upsert=False)

    def put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Config = None) -> int:
        """Stores many; the code of the first that failed."""
        return self._put_batch(keys, values, config, upsert=False)

    def upsert(self, key: str, value: Any, config: Config = None) -> int:
        """Stores a value whether the key has one or not."""
        return self._put_parts(key, (value,), config, upsert=True)

    def upsert_parts(self, key: str, *parts: Any, config: Config = None) -> int:
        """As ``put_parts``, whether the key has a value or not."""
        _check_parts(parts)
        return self._put_parts(key, parts, config, upsert=True)

    def upsert_batch(self, keys: Sequence[str], values: Sequence[Any], config: Config = None) -> int:
        """As ``put_batch``, whether keys have values or not."""
        return self._put_batch(keys, values, config, upsert=True)

    def _put_parts(self, key: str, parts: Sequence[Any], config: Config, upsert: bool) -> int:
        config = _config(config)
        parts = list(parts)
        for part in parts:
            if isinstance(part, str):
                raise TypeError("a value is bytes-like, not str")
        if self._connection is None or config.check(1) != OK or sum(memoryview(part).nbytes for part in parts) == 0:
            return INVALID_PARAMS
        return self._status(lambda native: native.put(False, key, parts, config.options(upsert)))

    def _put_batch(self, keys: Sequence[str], values: Sequence[Any], config: Config, upsert: bool) -> int:
        config, keys, values = _config(config), list(keys), list(values)
        wrong = len(keys) != len(values) or config.check(len(keys)) != OK
        if self._connection is None or wrong or any(memoryview(value).nbytes == 0 for value in values):
            return INVALID_PARAMS
        groups = config.groups(len(keys))
        if groups:
            codes = [self._put_grouped(key, [value], config, group, upsert) for key, value, group in zip(keys, values, groups)]
            return next((code for code in codes if code != OK), OK)
        try:
            return _codes.first_failure(self._connection.put_batch(False, keys, values, config.options(upsert)))
        except _FAILURES as error:
            return _codes.code(error)

    def _put_grouped(self, key: str, parts: List[Any], config: ReplicateConfig, group: str, upsert: bool) -> int:
        return self._status(lambda native: native.put(False, key, parts, config.options(upsert, group)))

    def get(self, key: str) -> bytes:
        """The value; ``b""`` if there is none."""
        return self._answer(lambda native: native.get(False, key, 0, None, False, False)) or b""

    def get_batch(self, keys: Sequence[str]) -> List[bytes]:
        """The values; ``b""`` where there is none."""
        keys = _keys(keys)
        got = self._answer(lambda native: native.get_batch(False, keys, False))
        return [value if isinstance(value, bytes) else b"" for value in got or [b""] * len(keys)]

    def get_buffer(self, key: str) -> Optional[BufferHandle]:
        """The value without a copy; None if there is none."""
        return self._answer(lambda native: native.get(False, key, 0, None, False, True))

    def batch_get_buffer(self, keys: Sequence[str]) -> List[Optional[BufferHandle]]:
        """The values without a copy; None where there is none."""
        keys = _keys(keys)
        got = self._answer(lambda native: native.get_batch(False, keys, True))
        return [view if isinstance(view, BufferHandle) else None for view in got or [None] * len(keys)]

    def get_size(self, key: str) -> int:
        """Length in bytes; -704 if there is none."""
        try:
            if self._connection is None:
                return INVALID_PARAMS
            row = self._connection.stat(False, key)
        except _FAILURES as error:
            return _codes.code(error)
        return OBJECT_NOT_FOUND if row is None else row[0]

    # Values at addresses.

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Reads a value to an address: its length, -704 if there is none, -600 if it does not fit."""
        return self._read([key], [[buffer_ptr]], [[size]])[0]

    def batch_get_into(self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]) -> List[int]:
        """As ``get_into``, for many."""
        return self._read(_keys(keys), [[pointer] for pointer in buffer_ptrs], [[size] for size in sizes])

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> List[int]:
        """Reads each value to several ranges, one after the other."""
        return self._read(_keys(keys), list(all_buffer_ptrs), list(all_sizes))

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> List[List[List[int]]]:
        """Reads ranges of values: for each buffer and key as many as there are offsets; the length of each, or a code."""
        lists = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        if any(len(each) != len(buffer_ptrs) for each in lists):
            return [[[INVALID_PARAMS]]]
        results = []
        for pointer, keys, targets, sources, sizes in zip(buffer_ptrs, *lists):
            if not len(keys) == len(targets) == len(sources) == len(sizes):
                results.append([[INVALID_PARAMS]])
                continue
            rows = zip(_keys(keys), targets, sources, sizes)
            results.append([self._read_ranges(key, pointer, *row) for key, *row in rows])
        return results

    def _read_ranges(
        self, key: str, pointer: int, targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]
    ) -> List[int]:
        if self._connection is None or not len(targets) == len(sources) == len(sizes):
            return [INVALID_PARAMS] * max(1, len(sizes))
        return [self._read_range(key, pointer + target, source, size) for target, source, size in zip(targets, sources, sizes)]

    def _read_range(self, key: str, address: int, offset: int, length: int) -> int:
        try:
            part = self._connection.get(False, key, offset, length, False, True)
            if part is None:
                return OBJECT_NOT_FOUND
            tidepool._native.write_memory(address, part)
        except _FAILURES as error:
            return _codes.code(error)
        return length

    def put_from(self, key: str, buffer_ptr: int, size: int, config: Config = None) -> int:
        """Stores the bytes at an address."""
        return self._write([key], [[buffer_ptr]], [[size]], config, upsert=False)[0]

    def put_from_with_metadata(
        self, key: str, buffer_ptr: int, metadata_buffer_ptr: int, size: int, metadata_size: int, config: Config = None
    ) -> int:
        """Stores the metadata, then the bytes, as one value."""
        pointers, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self._write([key], [pointers], [sizes], config, upsert=False)[0]

    def batch_put_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Config = None
    ) -> List[int]:
        """As ``put_from``, for many; one code a key."""
        pointers, sizes = [[pointer] for pointer in buffer_ptrs], [[size] for size in sizes]
        return self._write(_keys(keys), pointers, sizes, config, upsert=False)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: Config = None,
    ) -> List[int]:
        """Stores values that lie in several ranges each."""
        return self._write(_keys(keys), list(all_buffer_ptrs), list(all_sizes), config, upsert=False)

    def upsert_from(self, key: str, buffer_ptr: int, size: int, config: Config = None) -> int:
        """As ``put_from``, whether the key has a value or not."""
        return self._write([key], [[buffer_ptr]], [[size]], config, upsert=True)[0]

    def batch_upsert_from(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int], config: Config = None
    ) -> List[int]:
        """As ``batch_put_from``, whether keys have values or not."""
        pointers, sizes = [[pointer] for pointer in buffer_ptrs], [[size] for size in sizes]
        return self._write(_keys(keys), pointers, sizes, config, upsert=True)

    def _read(self, keys: List[str], pointers: List[Sequence[int]], sizes: List[Sequence[int]]) -> List[int]:
        if self._connection is None:
            return [INVALID_PARAMS] * len(keys)
        try:
            return list(map(_codes.length, self._connection.read_to(keys, pointers, sizes)))
        except _FAILURES as error:
            return [_codes.code(error)] * max(1, len(keys))

    def _write(
        self, keys: List[str], pointers: List[Sequence[int]], sizes: List[Sequence[int]], config: Config, upsert: bool
    ) -> List[int]:
        config = _config(config)
        if self._connection is None or config.check(len(keys)) != OK or any(sum(each) == 0 for each in sizes):
            return [INVALID_PARAMS] * max(1, len(keys))
        options, groups = config.options(upsert), config.groups(len(keys))
        try:
            return list(map(_codes.stored, self._connection.write_from(keys, pointers, sizes, options, groups)))
        except _FAILURES as error:
            return [_codes.code(error)] * max(1, len(keys))

    # Keys.

    def is_exist(self, key: str) -> int:
        """1, 0, or a negative code. One that exists is not evicted for the lease time."""
        return self._exists([key])[0]

    def batch_is_exist(self, keys: Sequence[str]) -> List[int]:
        """As ``is_exist``, for many."""
        return self._exists(_keys(keys))

    def _exists(self, keys: List[str]) -> List[int]:
        if self._connection is None:
            return [INVALID_PARAMS] * len(keys)
        try:
            answers = self._connection.exists(False, keys, self._lease, False)
        except _FAILURES as error:
            return [_codes.code(error)] * len(keys)
        return [_codes.REPLICA_IS_NOT_READY if answer is None else int(answer) for answer in answers]

    def remove(self, key: str, force: bool = False) -> int:
        """Removes a value: 0, -704 if there is none, -706 if it has a lease and ``force`` is not given."""
        if self._connection is None:
            return INVALID_PARAMS
        try:
            if not force:
                row = self._connection.stat(False, key)
                if row is None:
                    return OBJECT_NOT_FOUND
                if row[-1] > 0:
                    return OBJECT_HAS_LEASE
            # A pin keeps from eviction only, here.
            return _REMOVED[self._connection.remove(False, [key], True)[0]]
        except _FAILURES as error:
            return _codes.code(error)

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> List[int]:
        """As ``remove``, for many."""
        keys = _keys(keys)
        if not force or self._connection is None:
            return [self.remove(key, force) for key in keys]
        try:
            return [_REMOVED[outcome] for outcome in self._connection.remove(False, keys, True)]
        except _FAILURES as error:
            return [_codes.code(error)] * len(keys)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Removes values in whose keys the expression matches; how many."""
        return self._remove_matching(regex_pattern)

    def remove_all(self, force: bool = False) -> int:
        """Removes all values of the tenant; how many."""
        return self._remove_matching(None)

    def _remove_matching(self, pattern: Optional[str]) -> int:
        if self._connection is None:
            return INVALID_PARAMS
        try:
            return self._connection.remove_matching(False, None, pattern, True)[1]
        except _FAILURES as error:
            return _codes.code(error)

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> List[str]:
        """Removes values that have no lease; which were removed. With a segment's name: none, for there is no such thing."""
        if segment_name:
            return []
        return [key for key in _keys(keys) if self.remove(key) == OK]

    def get_replica_desc(self, key: str) -> List[ReplicaDescriptor]:
        """The copies of a value."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> Dict[str, List[ReplicaDescriptor]]:
        """The copies of values; keys without a value are left out."""
        found = {}
        for key in _keys(keys):
            row = self._answer(lambda native, key=key: native.stat(False, key))
            where = self._answer(lambda native, key=key: native.tier(False, key)) if row else None
            if row and where:
                found[key] = [ReplicaDescriptor(node, row[0], where[1]) for node, _, _ in row[5]]
        return found

    # Copies and moves between nodes.

    def create_copy_task(self, key: str, targets: Sequence[str]) -> Tuple[Tuple[int, int], int]:
        """Has copies of a value made on further nodes: the task's id, and 0 or what is against it.

        -101: no such node; -704: no such value; -1010: a node is not up; -1401: too many tasks.
        """
        targets = _keys(targets)
        return self._begin(lambda native: native.begin_copy(False, key, targets))

    def create_move_task(self, key: str, source: str, target: str) -> Tuple[Tuple[int, int], int]:
        """Has the copy of a value on one node moved to another one. As ``create_copy_task``; -710: the source has no copy;
        -711: the target has one."""
        return self._begin(lambda native: native.begin_move(False, key, source, target))

    def _begin(self, begin: Any) -> Tuple[Tuple[int, int], int]:
        if self._connection is None:
            return (0, 0), INVALID_PARAMS
        try:
            return (0, begin(self._connection)[0]), OK
        except _FAILURES as error:
            return (0, 0), _codes.code(error)

    def query_task(self, task_id: Tuple[int, int]) -> Tuple[Optional[QueryTaskResponse], int]:
        """How a task stands, and 0; (None, -1400) if there is none of that id, or it ended more than an hour ago."""
        high, low = task_id
        if self._connection is None:
            return None, INVALID_PARAMS
        try:
            row = self._connection.task(False, low, False) if high == 0 else None
        except _FAILURES as error:
            return None, _codes.code(error)
        return (None, _codes.TASK_NOT_FOUND) if row is None else (QueryTaskResponse(row), OK)

    # What the node does by itself, or can't do yet.

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> Dict[str, Any]:
        """Not supported: nodes lend memory, clients don't."""
        return {"ret": NOT_SUPPORTED, "segment_ids": []}

    def allocate_and_mount_segment(self, size: int, protocol: str = "tcp", location: str = "") -> Dict[str, Any]:
        """Lends ``size`` bytes of this process to the cluster, 16 MiB and more: ``ret``, ``segment_ids``, ``allocated_size``."""
        code, lent = INVALID_PARAMS, None
        if self._connection is not None and self._settings is not None and size > 0:
            settings = self._settings._replace(global_segment_size=size, protocol=protocol, enable_ssd_offload=False)
            code, lent = _setup.connect(settings, lends=True)
        if not isinstance(lent, tidepool.EmbeddedStore):
            return {"ret": code, "segment_ids": [], "allocated_size": 0}
        self._segments[lent.node] = lent
        self._end_with_this(lent)
        return {"ret": OK, "segment_ids": [lent.node], "allocated_size": size}

    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Takes back what was lent, after others had that time to take over what lies there. -101 for no such segment."""
        return _codes.first_failure_of([self._unmount(segment, grace_period_seconds) for segment in segment_ids])

    def unmount_and_free_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """The same: what is taken back is freed."""
        return self.unmount_segment(segment_ids, grace_period_seconds)

    def _unmount(self, segment: str, hand_over: Optional[float]) -> int:
        lent = self._segments.get(segment)
        if lent is None:
            return _codes.SEGMENT_NOT_FOUND
        try:
            lent.leave(hand_over)
        except _FAILURES as error:
            if not lent.closed:
                return _codes.code(error)
            _setup.log.warning("segment %s: %s", segment, error)
        self._segments.pop(segment, None)
        self._has_ended(lent)
        return OK

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Not supported: nodes lend disks, clients don't."""
        return NOT_SUPPORTED

    def get_offload_rpc_read_count(self) -> int:
        """Reads from disk by way of another client: none, the node reads its disk itself."""
        return 0

    # How calls end.

    def _status(self, call: Any) -> int:
        if self._connection is None:
            return INVALID_PARAMS
        try:
            call(self._connection)
        except _FAILURES as error:
            return _codes.code(error)
        return OK

    def _answer(self, call: Any) -> Any:
        if self._connection is None:
            return None
        try:
            return call(self._connection)
        except _FAILURES as error:
            _setup.log.warning("%s", error)
            return None


def _end(opened: tidepool.Store) -> int:
    try:
        opened.close()
    except tidepool.TidepoolError as error:
        return _codes.code(error)
    return OK


_REMOVED = {
    "removed": OK,
    "missing": OBJECT_NOT_FOUND,
    "pinned": OBJECT_HAS_LEASE,
    "failed": _codes.INTERNAL_ERROR,
}


def _of_arguments(
    local_hostname: str,
    metadata_server: str,
    global_segment_size: int,
    local_buffer_size: int,
    protocol: str,
    rdma_devices: str,
    master_server_addr: str,
    engine: Optional[object] = None,
    enable_ssd_offload: bool = False,
    ssd_offload_path: str = "",
    tenant_id: str = "default",
    enable_client_http_server: bool = False,
    client_http_port: int = 9300,
) -> _setup.Settings:
    for name, value in (
        ("local_hostname", local_hostname),
        ("metadata_server", metadata_server),
        ("protocol", protocol),
        ("rdma_devices", rdma_devices),
        ("master_server_addr", master_server_addr),
    ):
        if not isinstance(value, str):
            raise TypeError(f"{name} is str, not {type(value).__name__}")
    return _setup.Settings(
        local_hostname,
        metadata_server,
        int(global_segment_size),
        int(local_buffer_size),
        protocol,
        rdma_devices,
        master_server_addr,
        engine,
        enable_ssd_offload,
        ssd_offload_path,
        tenant_id,
        enable_client_http_server,
        client_http_port,
    )


def _config(config: Config) -> ReplicateConfig:
    if config is None:
        return ReplicateConfig()
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config is ReplicateConfig, not {type(config).__name__}")
    return config


def _keys(keys: Sequence[str]) -> List[str]:
    if isinstance(keys, (str, bytes)):
        raise TypeError("keys are a list of str")
    return list(keys)


def _check_parts(parts: Sequence[Any]) -> None:
    for part in parts:
        view = memoryview(part)
        if view.ndim != 1 or view.itemsize != 1:
            raise RuntimeError("parts are one-dimensional buffers of bytes")


def _get_pyclient_from_wrapper(wrapper: MooncakeDistributedStore) -> object:
    return wrapper._get_pyclient_capsule()


__all__ = [name for name in globals() if not name.startswith("_") and name[0].isupper()] + [
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
]
