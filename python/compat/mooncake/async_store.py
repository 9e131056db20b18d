"""The store for asyncio: ``async_METHOD`` runs a method in a thread of a pool, which lets go of the interpreter's lock."""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional

from .store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """Every method of the store also as ``async_METHOD``, to be awaited."""

    def __init__(self, max_workers: Optional[int] = None) -> None:
        super().__init__()
        self._executor = ThreadPoolExecutor(max_workers, thread_name_prefix="mooncake-store")

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("async_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        method = getattr(self, name[len("async_") :])

        async def call(*args: Any, **kwargs: Any) -> Any:
            call_it = functools.partial(method, *args, **kwargs)
            return await asyncio.get_running_loop().run_in_executor(self._executor, call_it)

        return call

    async def async_close(self) -> int:
        """Closes the store and ends the threads."""
        code = await asyncio.get_running_loop().run_in_executor(self._executor, self.close)
        self._executor.shutdown(wait=False)
        return code
