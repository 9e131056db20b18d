"""Enumerations and plain classes of ``mooncake.store``."""

import copy
from enum import Enum
from typing import List, Optional, Tuple

from . import _codes

SOFT_PIN_TTL_MS = 1_800_000
SOFT_PIN_TTL_MOST_MS = 86_400_000


class ObjectDataType(Enum):
    """What an object holds."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class SoftPinAction(Enum):
    """What a put does about a soft pin, by which a value is evicted after others."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ReplicaStatus(Enum):
    """State of a copy. Only complete ones are ever seen."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(Enum):
    """State of a task."""

    PENDING = 0
    PROCESSING = 1
    SUCCESS = 2
    FAILED = 3


class TaskType(Enum):
    """What a task does."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class ReplicateConfig:
    """What a put asks for besides its bytes."""

    # Of the class, too: integrations look there for what a version has.
    group_ids: Optional[List[str]] = None
    data_type = ObjectDataType.UNKNOWN

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: Optional[int] = None
        self.with_hard_pin = False
        self.preferred_segments: List[str] = []
        self.preferred_segment = ""
        self.preferred_nof_segments: List[str] = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.group_ids: Optional[List[str]] = None

    def __repr__(self) -> str:
        return f"<ReplicateConfig {vars(self)}>"

    def check(self, keys: int) -> int:
        """0, or the code of what is wrong with it for a put of so many keys."""
        wrong = (
            min(self.replica_num, self.nof_replica_num, self.dfs_replica_num) < 0
            or self.replica_num + self.nof_replica_num + self.dfs_replica_num == 0
            or self.dfs_replica_num > 1
            or self.nof_replica_num > 0
            or (self.dfs_replica_num > 0 and self.replica_num == 0)
            or (self.group_ids is not None and len(self.group_ids) != keys)
            or (self.soft_pin_ttl_ms is not None and not self._may_have_ttl())
        )
        return _codes.INVALID_PARAMS if wrong else _codes.OK

    def _may_have_ttl(self) -> bool:
        return self.soft_pin_action is SoftPinAction.ENABLE and 0 <= self.soft_pin_ttl_ms <= SOFT_PIN_TTL_MOST_MS

    def options(
        self, upsert: bool, group: Optional[str] = None, data_type: Optional[int] = None
    ) -> Tuple[bool, int, str, bool, bool, int, int, List[str], Optional[int]]:
        """As the native put takes them. Without `group`: the only one that there is, if there is one."""
        if group is None:
            group = self.group_ids[0] if self.group_ids and len(self.group_ids) == 1 else ""
        if data_type is None:
            data_type = ObjectDataType(self.data_type).value
        # 1 is what nobody asked for: the node's setting stands then. As many copies as can be had are made.
        replicas = 0 if self.replica_num <= 1 else min(self.replica_num, 15)
        # The deprecated one wins, as there.
        prefer = [self.preferred_segment] if self.preferred_segment else list(self.preferred_segments)
        return False, data_type, group, upsert, bool(self.with_hard_pin), replicas, 0, prefer[:16], self._soft_pin()

    def _soft_pin(self) -> Optional[int]:
        if self.soft_pin_action is SoftPinAction.ENABLE:
            return SOFT_PIN_TTL_MS if self.soft_pin_ttl_ms is None else self.soft_pin_ttl_ms
        return 0 if self.soft_pin_action is SoftPinAction.DISABLE else None

    def of_key(self, place: int) -> "ReplicateConfig":
        """The same for one key of several."""
        single = copy.copy(self)
        single.group_ids = None if self.group_ids is None else [self.group_ids[place]]
        return single

    def groups(self, keys: int) -> List[str]:
        """One a key, or none."""
        return list(self.group_ids) if self.group_ids and keys > 1 else []


class Descriptor:
    """Where a copy in memory lies. Addresses are the node's own business: 0."""

    def __init__(self) -> None:
        self.size = 0
        self.buffer_address = 0
        self.transport_endpoint = ""


class MemoryDescriptor:
    """A copy in memory."""

    def __init__(self, buffer_descriptor: Descriptor) -> None:
        self.buffer_descriptor = buffer_descriptor


class DiskDescriptor:
    """A copy on disk."""

    def __init__(self, file_path: str, object_size: int) -> None:
        self.file_path = file_path
        self.object_size = object_size


class ReplicaDescriptor:
    """A copy of an object."""

    def __init__(self, node: str, size: int, tier: str) -> None:
        self.status = ReplicaStatus.COMPLETE
        self._node, self._size, self._tier = node, size, tier

    def is_memory_replica(self) -> bool:
        """Whether it is in memory."""
        return self._tier == "dram"

    def is_disk_replica(self) -> bool:
        """Whether it is in a shared file system: never."""
        return False

    def is_local_disk_replica(self) -> bool:
        """Whether it is on a node's disk."""
        return self._tier == "nvme"

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Where it lies in memory. Raises RuntimeError if it does not."""
        if not self.is_memory_replica():
            raise RuntimeError("the replica is not in memory")
        descriptor = Descriptor()
        descriptor.size, descriptor.transport_endpoint = self._size, self._node
        return MemoryDescriptor(descriptor)

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Where it lies in a file. Raises RuntimeError: a copy on a node's disk has no file of its own."""
        raise RuntimeError("the replica is not a file")


_STATUS = {"waiting": TaskStatus.PENDING, "running": TaskStatus.PROCESSING, "done": TaskStatus.SUCCESS}


class QueryTaskResponse:
    """State of a task. No client is assigned to one: ``assigned_client`` is always (0, 0)."""

    def __init__(self, row: Optional[tuple] = None) -> None:
        self.id = (0, 0)
        self.type = TaskType.REPLICA_COPY
        self.status = TaskStatus.PENDING
        self.created_at_ms_epoch = 0
        self.last_updated_at_ms_epoch = 0
        self.assigned_client = (0, 0)
        self.message = ""
        if row is not None:
            task, kind, _, _, _, state, reason, _, _, begun, changed = row
            self.id = (0, task)
            self.type = TaskType.REPLICA_COPY if kind == "copy" else TaskType.REPLICA_MOVE
            self.status = _STATUS.get(state, TaskStatus.FAILED)
            self.created_at_ms_epoch, self.last_updated_at_ms_epoch = begun, changed
            self.message = reason or ("CANCELLED" if state == "cancelled" else "")


class ParallelAxis:
    """How a tensor is spread along one axis."""

    def __init__(self) -> None:
        self.kind = "tp"
        self.rank = 0
        self.size = 1
        self.split_dim: Optional[int] = None
        self.expert_id: Optional[int] = None
        self.stage_id: Optional[int] = None


class TensorParallelism:
    """How a tensor is spread."""

    def __init__(self) -> None:
        self.axes: List[ParallelAxis] = []


class ReadTarget:
    """Which part of a spread tensor a reader wants."""

    def __init__(self) -> None:
        self.mode = "as_stored"
        self.parallelism: Optional[TensorParallelism] = None


class EngramStoreConfig:
    """Settings of an ``EngramStore``."""

    def __init__(self) -> None:
        self.table_vocab_sizes: List[int] = []
        self.embedding_dim = 0
