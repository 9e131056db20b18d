"""Client of Tidepool, a layered object store for the KV cache of LLM inference.

>>> import tidepool
>>> with tidepool.Store.connect("127.0.0.1:7420") as store:      # doctest: +SKIP
...     store.put("block/17", b"bytes")
...     store.get("block/17")
True
b'bytes'

``Store`` waits in each call, ``AsyncStore`` is for asyncio, ``TransferEngine`` moves bytes between the registered
memory of two processes without a store, ``Store.embedded`` lends memory of this process to a cluster. A missing object is
``None``, never an exception; what fails raises a ``TidepoolError``, whose ``reason`` is for programs.
"""

import atexit as _atexit

from . import _native
from ._native import View, __version__, allocate
from .aio import AsyncStore
from .embedded import AsyncEmbeddedStore, EmbeddedStore
from .engine import TransferEngine, Transfer
from .errors import (
    ConflictError,
    CorruptError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InternalError,
    InvalidError,
    TidepoolError,
    UnavailableError,
    UnimplementedError,
)
from .store import Store
from .types import DataType, Listed, ObjectStat, RemoveProgress, Replica, ServerInfo, Task
from .views import Views

# Before the interpreter goes: a thread of ours must not ask for its lock later.
_atexit.register(_native.shut_down)

__all__ = [
    "AsyncEmbeddedStore",
    "AsyncStore",
    "ConflictError",
    "CorruptError",
    "DataType",
    "DeadlineError",
    "DeniedError",
    "EmbeddedStore",
    "ExhaustedError",
    "InternalError",
    "InvalidError",
    "Listed",
    "ObjectStat",
    "RemoveProgress",
    "Replica",
    "ServerInfo",
    "Store",
    "Task",
    "TidepoolError",
    "Transfer",
    "TransferEngine",
    "UnavailableError",
    "UnimplementedError",
    "View",
    "Views",
    "__version__",
    "allocate",
]
