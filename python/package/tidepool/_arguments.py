"""Arguments as the native part takes them; shared by the waiting and the awaited store."""

import os
from typing import List, Optional, Tuple, Union

from .errors import InvalidError

Endpoints = Union[str, List[str]]


def connection(
    endpoint: Optional[Endpoints],
    token: Optional[str],
    token_file: Optional[Union[str, "os.PathLike[str]"]],
    tenant: str,
    deadline: float,
    connect_timeout: float,
    connections: int,
    retries: int,
    local_reads: bool,
    same_host: bool,
) -> tuple:
    """The arguments of ``Connection.connect``."""
    if endpoint is None:
        endpoint = os.environ.get("TIDEPOOL_ENDPOINT", "127.0.0.1:7420")
    endpoints = [endpoint] if isinstance(endpoint, str) else list(endpoint)
    if token is None:
        token_file = token_file or os.environ.get("TIDEPOOL_TOKEN_FILE")
        if token_file:
            with open(token_file, encoding="ascii") as file:
                token = file.read()
    elif token_file:
        raise InvalidError("give a token or a token file, not both", "BAD_ARGUMENT", field="token_file")
    return endpoints, token, tenant, deadline, connect_timeout, connections, retries, local_reads, same_host


Options = Tuple[bool, int, str, bool, bool, int, int]


def put_options(
    durability: str, data_type: int, group: str, upsert: bool, pin: bool, replicas: int, min_replicas: int
) -> Options:
    """The native options of a put."""
    if durability not in ("memory", "nvme"):
        raise InvalidError(f"durability is {durability!r}: give memory or nvme", "BAD_ARGUMENT", field="durability")
    for name, number in (("replicas", replicas), ("min_replicas", min_replicas)):
        if not 0 <= number <= 15:
            raise InvalidError(f"{name} is {number}: give 0 to 15", "BAD_ARGUMENT", field=name)
    return durability == "nvme", int(data_type), group, upsert, pin, replicas, min_replicas


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
