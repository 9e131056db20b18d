"""Return codes, and which one an error has."""

from typing import Iterable, Optional, Union

from tidepool import TidepoolError

OK = 0
INTERNAL_ERROR = -1
SEGMENT_NOT_FOUND = -101
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
REPLICA_IS_NOT_READY = -703
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
OBJECT_HAS_LEASE = -706
REPLICA_NOT_FOUND = -710
REPLICA_ALREADY_EXISTS = -711
TRANSFER_FAIL = -800
CHECKSUM_MISMATCH = -801
RPC_FAIL = -900
RPC_TIMEOUT = -901
UNAVAILABLE_IN_CURRENT_STATUS = -1010
NOT_SUPPORTED = -1012
TASK_NOT_FOUND = -1400
TASK_PENDING_LIMIT_EXCEEDED = -1401
TENANT_QUOTA_EXCEEDED = -1700
TENANT_NOT_REGISTERED = -1701

_BY_REASON = {
    "NO_SPACE": NO_AVAILABLE_HANDLE,
    "OVERLOADED": NO_AVAILABLE_HANDLE,
    "QUOTA_EXCEEDED": TENANT_QUOTA_EXCEEDED,
    "UNKNOWN_TENANT": TENANT_NOT_REGISTERED,
    "NO_SUCH_NODE": SEGMENT_NOT_FOUND,
    "NODE_NOT_UP": UNAVAILABLE_IN_CURRENT_STATUS,
    "NOT_ON_SOURCE": REPLICA_NOT_FOUND,
    "TARGET_HAS_COPY": REPLICA_ALREADY_EXISTS,
    "TOO_MANY_TASKS": TASK_PENDING_LIMIT_EXCEEDED,
    "RECOVERING": REPLICA_IS_NOT_READY,
    "PINNED": OBJECT_HAS_LEASE,
    "CHECKSUM_MISMATCH": CHECKSUM_MISMATCH,
    "CORRUPT": CHECKSUM_MISMATCH,
    "LENGTH_MISMATCH": INVALID_PARAMS,
    "CLOSED": INVALID_PARAMS,
    "FORKED": INVALID_PARAMS,
}
_BY_KIND = {
    "invalid": INVALID_PARAMS,
    "not_found": OBJECT_NOT_FOUND,
    "conflict": INVALID_PARAMS,
    "exhausted": NO_AVAILABLE_HANDLE,
    "unavailable": RPC_FAIL,
    "deadline": RPC_TIMEOUT,
    "denied": RPC_FAIL,
    "corrupt": CHECKSUM_MISMATCH,
    "unimplemented": NOT_SUPPORTED,
    "internal": INTERNAL_ERROR,
}


def code(error: BaseException) -> int:
    """The code for an exception."""
    if isinstance(error, TidepoolError):
        found = _BY_REASON.get(error.reason)
        return _BY_KIND.get(error.kind, INTERNAL_ERROR) if found is None else found
    # A number that is no address or length, and memory that is read-only or not contiguous.
    return INVALID_PARAMS


def length(item: Union[int, None, TidepoolError]) -> int:
    """A length, or the code of what came instead."""
    if type(item) is int:
        return item
    return OBJECT_NOT_FOUND if item is None else code(item)


def stored(item: Union[int, bool, TidepoolError, None]) -> int:
    """The outcome of a put: a key that has an object is no failure."""
    return code(item) if isinstance(item, TidepoolError) else OK


def first_failure(items: list) -> int:
    """Of a batch that gives one code: that of the first item which failed."""
    return first_failure_of(map(stored, items))


def first_failure_of(codes: Iterable[int]) -> int:
    """The first code that is none of success."""
    return next((code for code in codes if code != OK), OK)


def size(text: Union[str, int, None], default: Optional[int] = None) -> int:
    """Bytes, of a number or a text such as ``16MB`` (powers of 1024).

    Raises ValueError for what is neither.
    """
    if text is None or text == "":
        if default is None:
            raise ValueError("no size")
        return default
    if isinstance(text, int):
        return text
    cleaned = str(text).strip().lower()
    for suffix, shift in (("tb", 40), ("gb", 30), ("mb", 20), ("kb", 10), ("t", 40), ("g", 30), ("m", 20), ("k", 10), ("b", 0)):
        if cleaned.endswith(suffix):
            return int(float(cleaned[: -len(suffix)].strip()) * (1 << shift))
    return int(cleaned)
