"""Modules in the place of those that an integration imports and a test of its storage calls has no use for.

The files under test are the real ones, unchanged, from their own wheels. What they import besides (device code, models, the
rest of their engines) would be several gigabytes. A module that is named here is made on the spot, and has every name.
"""

import abc
import importlib.abc
import importlib.machinery
import os
import sys
import types

NAMES = (
    "sglang.srt.mem_cache.hybrid_cache",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.observability",
    "lmcache.lmcache_native",
    "lmcache.observability",
    "lmcache.v1.config",
    "lmcache.v1.gpu_connector",
    "lmcache.v1.memory_management",
    "lmcache.v1.metadata",
    "lmcache.v1.storage_backend.local_cpu_backend",
    "lmcache.v1.system_detection",
    "nvtx",
    "huggingface_hub",
    "vllm.config",
    "vllm.distributed.kv_events",
    "vllm.distributed.kv_transfer.kv_connector.utils",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils",
    "vllm.distributed.parallel_state",
    "vllm.envs",
    "vllm.forward_context",
    "vllm.logger",
    "vllm.model_executor",
    "vllm.platforms",
    "vllm.utils.network_utils",
    "vllm.utils.torch_utils",
    "vllm.v1",
)
# Packages whose own `__init__` is not run, because it imports all the rest.
PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage.mooncake_store",
    "lmcache",
    "lmcache.v1",
    "lmcache.v1.storage_backend",
    "lmcache.v1.storage_backend.connector",
    "vllm",
    "vllm.distributed",
    "vllm.distributed.ec_transfer",
    "vllm.distributed.ec_transfer.ec_connector",
    "vllm.distributed.ec_transfer.ec_connector.mooncake",
    "vllm.distributed.ec_transfer.ec_connector.mooncake_store_embedding",
    "vllm.distributed.kv_transfer",
    "vllm.distributed.kv_transfer.kv_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake",
    "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store",
    "vllm.utils",
)


class _AnyName(abc.ABCMeta):
    """A class that has every attribute, each another such class."""

    def __getattr__(cls, name):
        if name.startswith(("__", "_abc")):
            raise AttributeError(name)
        made = _AnyName(name, (StandIn,), {})
        setattr(cls, name, made)
        return made

    def __getitem__(cls, _item):
        return cls

    def __or__(cls, _other):
        return cls

    __ror__ = __or__

    def __iter__(cls):
        return iter(())


class StandIn(metaclass=_AnyName):
    """Can be called, subclassed, used as a decorator; is false."""

    def __init__(self, *_arguments, **_named):
        pass

    def __call__(self, *arguments, **named):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) and not named else StandIn()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn()

    def __bool__(self):
        return False


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path, target=None):
        if any(name == stands or name.startswith(f"{stands}.") for stands in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__path__ = []

        def any_name(name):
            if name.startswith("__"):
                raise AttributeError(name)
            made = _AnyName(name, (StandIn,), {})
            setattr(module, name, made)
            return made

        module.__getattr__ = any_name
        return module

    def exec_module(self, module):
        pass


def install(folder: str) -> None:
    """Makes the integrations in `folder` importable."""
    sys.path.insert(0, folder)
    names = list(NAMES)
    try:
        import torch  # noqa: F401
    except ImportError:
        names.append("torch")
    sys.meta_path.insert(0, _Finder(names))
    for name in PACKAGES:
        module = types.ModuleType(name)
        module.__path__ = [os.path.join(folder, *name.split("."))]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    for name in ("torch_dev", "device_ops", "c_ops"):
        setattr(sys.modules["lmcache"], name, StandIn())
    sys.modules["lmcache"].torch_device_type = "cpu"
    for name in ("get_dcp_group", "get_pcp_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size"):
        setattr(sys.modules["vllm.distributed"], name, StandIn())
