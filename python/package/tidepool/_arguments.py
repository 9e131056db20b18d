"""Arguments as the native part takes them; shared by the waiting and the awaited store."""

import json
import math
import os
from typing import List, Mapping, Optional, Sequence, Tuple, Union

from .errors import InvalidError

Endpoints = Union[str, List[str]]
Size = Union[int, str]
Path = Union[str, "os.PathLike[str]"]


ONE_SIDED_READS = ("never", "rdma", "always")
# Of a connection, if nothing else is said.
DEADLINE = 30.0
CONNECT_TIMEOUT = 2.0
CONNECTIONS = 4
RETRIES = 5
# Bytes of a part of a striped object.
PART_BYTES = 4 << 20


def connection(
    endpoint: Optional[Endpoints],
    token: Optional[str] = None,
    token_file: Optional[Path] = None,
    tenant: str = "",
    deadline: float = DEADLINE,
    connect_timeout: float = CONNECT_TIMEOUT,
    connections: int = CONNECTIONS,
    retries: int = RETRIES,
    local_reads: bool = True,
    same_host: bool = True,
    hedged_reads: bool = True,
    one_sided_reads: str = "rdma",
    one_sided_puts: bool = True,
    tls_certificate: Optional[Path] = None,
    tls_key: Optional[Path] = None,
    tls_authorities: Optional[Path] = None,
    tls_name: Optional[str] = None,
) -> tuple:
    """The arguments of ``Connection.connect``."""
    if endpoint is None:
        endpoint = os.environ.get("TIDEPOOL_ENDPOINT", "127.0.0.1:7420")
    endpoints = [endpoint] if isinstance(endpoint, str) else list(endpoint)
    if token is None:
        token_file = _secret_file(token_file)
        if token_file:
            with open(token_file, encoding="ascii") as file:
                token = file.read()
    elif token_file:
        raise InvalidError("give a token or a token file, not both", "BAD_ARGUMENT", field="token_file")
    tls = _tls(tls_certificate, tls_key, tls_authorities, tls_name)
    if one_sided_reads not in ONE_SIDED_READS:
        words = f"one_sided_reads is {one_sided_reads!r}: give one of {', '.join(ONE_SIDED_READS)}"
        raise InvalidError(words, "BAD_ARGUMENT", field="one_sided_reads")
    reads = (local_reads, hedged_reads, ONE_SIDED_READS.index(one_sided_reads), one_sided_puts)
    return endpoints, token, tenant, deadline, connect_timeout, connections, retries, reads, same_host, tls


def _tls(
    certificate: Optional[Path], key: Optional[Path], authorities: Optional[Path], name: Optional[str]
) -> Optional[Tuple[str, str, str, Optional[str]]]:
    """The files that are given, or named by the environment; all of them, or none."""
    variables = {"certificate": certificate, "key": key, "authorities": authorities}
    files = {what: given or os.environ.get(f"TIDEPOOL_TLS_{what.upper()}") for what, given in variables.items()}
    if not any(files.values()):
        return None
    for what, file in files.items():
        if not file:
            words = "tls_certificate, tls_key and tls_authorities belong together"
            raise InvalidError(words, "BAD_ARGUMENT", field=f"tls_{what}")
    certificate, key, authorities = map(os.fspath, files.values())
    return certificate, key, authorities, name or os.environ.get("TIDEPOOL_TLS_NAME")


def _secret_file(given: Optional[Path]) -> Optional[Path]:
    return given or os.environ.get("TIDEPOOL_TOKEN_FILE")


def embedded(
    join: Endpoints,
    dram: Size,
    nvme: Optional[Size],
    nvme_path: Optional[Path],
    nvme_write_policy: str,
    data: Optional[Path],
    listen: str,
    advertise: Optional[str],
    token_file: Optional[Path],
    tls: Optional[Tuple[str, str, str, Optional[str]]],
    settings: Optional[Mapping[str, object]],
) -> List[str]:
    """The settings of an instance, as ``tidepool serve --set`` takes them."""
    named = {
        "cluster.join": [join] if isinstance(join, str) else list(join),
        "dram.capacity": dram,
        "grpc.listen": listen,
        "cluster.advertise": advertise,
        "cluster.secret_file": _secret_file(token_file),
        "data": data,
    }
    if tls is not None:
        names = ("engine.tls_certificate", "engine.tls_key", "engine.tls_authorities", "engine.tls_name")
        named.update(zip(names, tls))
    if nvme is not None:
        named["nvme.enabled"] = True
        named["nvme.capacity"] = nvme
        named["nvme.path"] = nvme_path
        named["nvme.write_policy"] = nvme_write_policy
    elif nvme_path is not None:
        raise InvalidError("give nvme, the bytes of disk to lend, beside nvme_path", "BAD_ARGUMENT", field="nvme")
    named.update(settings or {})
    return [f"{field}={_toml(value)}" for field, value in named.items() if value is not None]


def size(name: str, value: Size) -> int:
    """Bytes, from a number or from text such as ``10GiB``."""
    if isinstance(value, int):
        return value
    for power, unit in enumerate(("KiB", "MiB", "GiB", "TiB"), start=1):
        if value.endswith(unit) and value[: -len(unit)].strip().isdigit():
            return int(value[: -len(unit)]) << (10 * power)
    raise InvalidError(f"{name} is {value!r}: give bytes, or such as 10GiB", "BAD_ARGUMENT", field=name)


def _toml(value: object) -> str:
    if isinstance(value, (str, os.PathLike)):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    raise TypeError(f"a setting is text, a number, a bool or a list of them, not {type(value).__name__}")


Options = Tuple[bool, int, str, bool, bool, int, int, List[str], Optional[int]]

SOFT_PIN_MOST = 86_400.0


def put_options(
    durability: str,
    data_type: int,
    group: str,
    upsert: bool,
    pin: bool,
    replicas: int,
    min_replicas: int,
    prefer: Sequence[str],
    soft_pin: Optional[float],
) -> Options:
    """The native options of a put."""
    if durability not in ("memory", "nvme"):
        raise InvalidError(f"durability is {durability!r}: give memory or nvme", "BAD_ARGUMENT", field="durability")
    for name, number in (("replicas", replicas), ("min_replicas", min_replicas)):
        if not 0 <= number <= 15:
            raise InvalidError(f"{name} is {number}: give 0 to 15", "BAD_ARGUMENT", field=name)
    if isinstance(prefer, str):
        raise InvalidError(f"prefer is {prefer!r}: give a list of names", "BAD_ARGUMENT", field="prefer")
    if soft_pin is not None and not 0 <= soft_pin <= SOFT_PIN_MOST:
        words = f"soft_pin is {soft_pin}: give seconds from 0 to {SOFT_PIN_MOST:.0f}"
        raise InvalidError(words, "BAD_ARGUMENT", field="soft_pin")
    milliseconds = None if soft_pin is None else math.ceil(soft_pin * 1000)
    return durability == "nvme", int(data_type), group, upsert, pin, replicas, min_replicas, list(prefer), milliseconds


def one(keys) -> list:
    """A list of keys; one key is a frequent slip, and would be taken for a list of letters."""
    if isinstance(keys, (str, bytes)):
        raise TypeError("give a list of keys, not one key")
    return list(keys)


def matching(prefix, pattern: Optional[str]) -> Tuple[Optional[bytes], Optional[str]]:
    """What a removal means; all, if neither is given."""
    if prefix is not None and pattern is not None:
        raise InvalidError("give a prefix or a pattern, not both", "BAD_ARGUMENT", field="pattern")
    return key_bytes(prefix) if prefix is not None else None, pattern


def key_bytes(key) -> bytes:
    """A key's bytes."""
    return key.encode() if isinstance(key, str) else bytes(key)
