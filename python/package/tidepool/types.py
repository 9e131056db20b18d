"""What calls give and take besides bytes."""

from enum import IntEnum
from typing import List, NamedTuple, Optional, Union

Key = Union[str, bytes]
"""A key: bytes, 1 to 1024 of them, or a ``str``, which means its UTF-8."""


class DataType(IntEnum):
    """What an object holds. Kept with it and given back; nothing in the store depends on it."""

    UNKNOWN = 0
    KV_CACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class Listed(NamedTuple):
    """One object of a listing."""

    key: bytes
    length: int
    data_type: DataType
    group: str
    pins: int
    replicas: int


class Replica(NamedTuple):
    """One copy of an object."""

    node: str
    replica: str
    node_state: str


class ObjectStat(NamedTuple):
    """What the catalog knows of an object. ``lease``: seconds from now."""

    length: int
    data_type: DataType
    group: str
    pins: int
    version: str
    replicas: List[Replica]
    lease: float


class Task(NamedTuple):
    """A copy or a move of an object between nodes.

    ``kind``: copy or move; ``source``, ``targets``: numbers of nodes; ``state``: waiting, running, done, failed or cancelled;
    ``reason``: why it failed, such as ``OBJECT_GONE``; ``copied``: targets whose copies count; ``length``: bytes of the object;
    ``begun``, ``changed``: seconds since the Unix epoch, by the cluster's clock.
    """

    id: int
    kind: str
    key: bytes
    source: Optional[str]
    targets: List[str]
    state: str
    reason: str
    copied: int
    length: int
    begun: float
    changed: float

    @property
    def is_open(self) -> bool:
        """Whether something is still to come."""
        return self.state in ("waiting", "running")


class RemoveProgress(NamedTuple):
    """What a removal by prefix or pattern did: objects looked at, removed, and left because they are pinned."""

    examined: int
    removed: int
    pinned: int


class ServerInfo(NamedTuple):
    """What a server says of itself."""

    version: str
    node: str
    cluster: str
    incarnation: int
    role: str
    applied_index: int
    max_object_bytes: int
    max_unary_bytes: int
    phase: str
    objects: int


def listed(row: tuple) -> Listed:
    """A native row."""
    key, length, data_type, group, pins, replicas = row
    return Listed(key, length, DataType(data_type), group, pins, replicas)


def stat(row: tuple) -> ObjectStat:
    """A native row."""
    length, data_type, group, pins, version, replicas, lease = row
    return ObjectStat(length, DataType(data_type), group, pins, version, [Replica(*copy) for copy in replicas], lease)


def task(row: tuple) -> Task:
    """A native row."""
    *rest, begun, changed = row
    return Task(*rest, begun / 1000, changed / 1000)
