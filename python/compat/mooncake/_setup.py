"""What ``setup`` is told, and the connection that comes of it."""

import ipaddress
import logging
import os
import socket
import time
from typing import NamedTuple, Optional, Tuple, Union

import tidepool
from tidepool._arguments import connection as arguments
from tidepool._native import Connection

from . import _codes

log = logging.getLogger("mooncake.store")

DEFAULT_MASTER = "127.0.0.1:50051"
DEFAULT_SEGMENT_BYTES = 16 << 20
# Transports that every machine has, and how a client of the catalog alone calls itself.
_PLAIN = ("", "tcp", "rpc_only", "local", "p2p")
_ONE_ATTEMPT_SECONDS = 1.0
# What a node that answers slowly is given, at least. Other attempts may be left out for it.
_PATIENCE_SECONDS = 5.0


class Settings(NamedTuple):
    """Of a store, in the order of ``setup``'s arguments."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    rdma_devices: str
    master_server_addr: str
    engine: Optional[object] = None
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300


def of_dict(config: dict) -> Settings:
    """Settings of a dictionary, whose values may all be texts. Raises ValueError if one is missing or can't be meant."""

    def text(*names: str, default: Optional[str] = None) -> str:
        for name in names:
            if config.get(name) not in (None, ""):
                return str(config[name])
        if default is None:
            raise ValueError(f"{names[0]} is missing")
        return default

    return Settings(
        text("local_hostname"),
        text("metadata_server"),
        _codes.size(config.get("global_segment_size"), DEFAULT_SEGMENT_BYTES),
        _codes.size(config.get("local_buffer_size"), DEFAULT_SEGMENT_BYTES),
        text("protocol", default="tcp"),
        # Integrations use the second name of each; taken for the first, it decides which server is reached.
        text("rdma_devices", "device_name", default=""),
        text("master_server_addr", "master_server_address", default=DEFAULT_MASTER),
        None,
        is_true(str(config.get("enable_ssd_offload", ""))),
        text("ssd_offload_path", default=""),
        text("tenant_id", default="default"),
        is_true(str(config.get("enable_client_http_server", ""))),
        int(config.get("client_http_port", 9300)),
    )


def check_protocol(protocol: str) -> int:
    """0 if bytes can go that way here."""
    name = protocol.strip().lower()
    if name in _PLAIN:
        return _codes.OK
    if name == "rdma":
        if may_fall_back():
            log.warning("protocol rdma is not available: tcp and shared memory are used, as MC_FORCE_TCP allows")
            return _codes.OK
        log.error("protocol rdma is not available; set MC_FORCE_TCP=1 to allow tcp and shared memory, or ask for tcp")
        return _codes.INVALID_PARAMS
    log.error("protocol %r is not known; give tcp or rdma", protocol)
    return _codes.INVALID_PARAMS


def may_fall_back() -> bool:
    """Whether the caller allows TCP where RDMA was asked for."""
    return is_true(os.environ.get("MC_FORCE_TCP", ""))


def is_true(text: str) -> bool:
    """What flags and variables mean."""
    return text.strip().lower() in ("1", "true", "yes", "on")


def lends_segment(settings: Settings) -> bool:
    """Whether this process lends the segment: nodes do, unless the environment says otherwise."""
    return settings.global_segment_size > 0 and is_true(os.environ.get("TIDEPOOL_LEND_SEGMENT", ""))


def connect(settings: Settings, lends: bool) -> Tuple[int, Optional[tidepool.Store]]:
    """A store of the node that is named as master; asks again while nothing answers there.

    If it ``lends``, it is an embedded one that lends the segment of the settings to that node's cluster.
    """
    wrong = check_protocol(settings.protocol)
    if wrong:
        return wrong, None
    if settings.global_segment_size < 0 or settings.local_buffer_size < 0:
        return _codes.INVALID_PARAMS, None
    endpoint = (settings.master_server_addr or DEFAULT_MASTER).strip()
    scheme, separator, _ = endpoint.partition("://")
    if separator and scheme not in ("http", "unix"):
        log.error("master %r: name the address of a node, %s is not used here", endpoint, scheme)
        return _codes.NOT_SUPPORTED, None
    if lends and endpoint.startswith("unix:"):
        log.error("master %r: to lend a segment, name the node by host:port", endpoint)
        return _codes.INVALID_PARAMS, None
    if settings.enable_ssd_offload and not lends:
        log.info("SSD offload is a setting of the node; it is not changed by this client")
    return _reach(endpoint, settings, lends)


def _reach(endpoint: str, settings: Settings, lends: bool) -> Tuple[int, Optional[tidepool.Store]]:
    attempts = max(1, int(os.environ.get("MC_STORE_CLIENT_SETUP_RETRIES", "20")))
    tenant = "" if settings.tenant_id in ("", "default") else settings.tenant_id
    stay = {
        "tenant": tenant,
        "deadline": max(0.001, int(os.environ.get("MC_RPC_TIMEOUT_MS", "30000")) / 1000),
        "same_host": os.environ.get("TIDEPOOL_SAME_HOST", "1").strip() != "0",
        "local_reads": os.environ.get("TIDEPOOL_LOCAL_READS", "1").strip() != "0",
    }
    until = time.monotonic() + max(attempts * _ONE_ATTEMPT_SECONDS, _PATIENCE_SECONDS)
    began = float("-inf")
    for attempt in range(attempts):
        time.sleep(max(0.0, min(began + _ONE_ATTEMPT_SECONDS, until) - time.monotonic()))
        began = time.monotonic()
        if began >= until:
            break
        try:
            # One quick look of two calls first, then the connection that stays, whose calls have the whole deadline.
            patience = min(_PATIENCE_SECONDS, until - began) / 2
            look = {"deadline": patience, "connections": 1, "retries": 0, "local_reads": False, "same_host": False}
            probe = Connection.connect(False, *arguments(endpoint, tenant=tenant, **look))
            probe.exists(False, ["tidepool/setup"], None, False)
            probe.close()
            if lends:
                return _codes.OK, tidepool.Store.embedded(**_instance(endpoint, settings), **stay)
            return _codes.OK, tidepool.Store.connect(endpoint, **stay)
        except (tidepool.UnavailableError, tidepool.DeadlineError) as error:
            log.warning("master %s, attempt %d of %d: %s", endpoint, attempt + 1, attempts, error)
        except (tidepool.TidepoolError, OSError, ValueError) as error:
            log.error("master %s: %s", endpoint, error)
            return _codes.code(error), None
    return _codes.INTERNAL_ERROR, None


def _instance(endpoint: str, settings: Settings) -> dict:
    """What an instance is started with that lends the segment, and a part of a disk if SSD offload is asked for."""
    master = endpoint.partition("://")[2] or endpoint
    listen = _address(master.rpartition(":")[0])
    if not listen.is_loopback:
        # Where all are on one host nobody else needs to reach it.
        host, separator, port = settings.local_hostname.rpartition(":")
        listen = _address(host if separator and port.isdigit() else settings.local_hostname)
    disk = {}
    if settings.enable_ssd_offload:
        disk["nvme.enabled"] = True
        disk["nvme.path"] = settings.ssd_offload_path or os.environ.get("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH")
        limit = os.environ.get("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES")
        disk["nvme.capacity"] = int(limit) if limit else None
    return {
        "join": master,
        "dram": settings.global_segment_size,
        "listen": f"[{listen}]:0" if listen.version == 6 else f"{listen}:0",
        "settings": disk,
    }


def _address(host: str) -> Union[ipaddress.IPv4Address, ipaddress.IPv6Address]:
    found = socket.getaddrinfo(host.strip("[]") or "localhost", None, type=socket.SOCK_STREAM)
    return ipaddress.ip_address(found[0][4][0])
