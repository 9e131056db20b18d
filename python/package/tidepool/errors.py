"""What calls raise. The class says what to do next, ``reason`` what happened."""

from typing import Optional


class TidepoolError(Exception):
    """A call failed.

    Attributes:
        reason: what happened, for programs: stable, upper case, such as ``NO_SPACE``, ``UNREACHABLE``, ``BAD_RANGE``.
        kind: what to do next, as the class says it too: ``invalid``, ``conflict``, ``exhausted``, ..
        retry_after: after how many seconds a repetition makes sense, if the server said so.
        field: the argument or setting that is to blame, or empty.
    """

    kind = "internal"

    def __init__(self, message: str, reason: str = "", retry_after: Optional[float] = None, field: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after = retry_after
        self.field = field

    def __reduce__(self):
        return type(self), (str(self), self.reason, self.retry_after, self.field)


class InvalidError(TidepoolError, ValueError):
    """Fix the call: an argument can't be meant."""

    kind = "invalid"


class ConflictError(TidepoolError):
    """The state of something forbids it: a closed store, a forked process, memory in use."""

    kind = "conflict"


class ExhaustedError(TidepoolError):
    """No room now: come again after ``retry_after``."""

    kind = "exhausted"


class UnavailableError(TidepoolError, ConnectionError):
    """The server can't be reached, or can't answer yet."""

    kind = "unavailable"


class DeadlineError(TidepoolError, TimeoutError):
    """The deadline passed; whether the call was done is unknown."""

    kind = "deadline"


class DeniedError(TidepoolError, PermissionError):
    """The token is missing or wrong."""

    kind = "denied"


class CorruptError(TidepoolError):
    """The bytes that came are not those that were stored."""

    kind = "corrupt"


class UnimplementedError(TidepoolError, NotImplementedError):
    """Not built yet: see the roadmap."""

    kind = "unimplemented"


class InternalError(TidepoolError):
    """A bug here or in the server."""

    kind = "internal"


_CLASSES = {
    error.kind: error
    for error in (
        InvalidError,
        ConflictError,
        ExhaustedError,
        UnavailableError,
        DeadlineError,
        DeniedError,
        CorruptError,
        UnimplementedError,
        InternalError,
    )
}
_CLASSES["not_found"] = InvalidError


def make(kind: str, reason: str, message: str, retry_after: Optional[float], field: str) -> TidepoolError:
    """The exception of that kind. Called by the native part."""
    error = _CLASSES.get(kind, InternalError)(message, reason, retry_after, field)
    error.kind = kind
    return error
