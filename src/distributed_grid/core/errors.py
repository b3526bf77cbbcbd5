"""The one tree of errors: each has a stable code, an exit code, and says what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """What the command line returns; documented in docs/scripting.md."""

    OK = 0
    FAILED = 1  # the thing asked for was tried and failed
    USAGE = 2  # the command line or the configuration is wrong; nothing was done
    NOT_FOUND = 3  # a node, process, task, lease or block of that name is not there
    REFUSED = 4  # it is there, but a rule forbids it; nothing was changed
    UNAVAILABLE = 5  # the daemon, the cluster or a node does not answer
    NO_RESOURCES = 6  # nothing free that fits
    TIMEOUT = 7
    INTERNAL = 70  # a fault of ours
    INTERRUPTED = 130


class GridError(Exception):
    """Base of all errors a user can see: `error: MESSAGE`, `cause: CAUSE`, `try: HINT`."""

    code = "failed"
    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, cause: str = "", hint: str = "", code: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        self.hint = hint
        if code:
            self.code = code
        self.details = details

    def to_wire(self) -> dict[str, Any]:
        """As plain data, for the socket and for `--format json`."""
        known = next(kind.__name__ for kind in type(self).__mro__ if kind.__name__ in _KINDS)
        return {
            "kind": known,  # of a kind that stays on this side, the nearest one above: it keeps its exit code
            "code": self.code,
            "message": self.message,
            "cause": self.cause,
            "hint": self.hint,
            "details": self.details,
        }

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> GridError:
        """The same error on the other side of a socket; an unknown kind becomes a plain GridError."""
        kind = _KINDS.get(str(data.get("kind", "")), GridError)
        details = data.get("details") or {}
        return kind(
            str(data.get("message", "")),
            cause=str(data.get("cause", "")),
            hint=str(data.get("hint", "")),
            code=str(data.get("code", "")),
            **{str(key): value for key, value in dict(details).items()},
        )


class UsageError(GridError):
    code = "usage"
    exit_code = ExitCode.USAGE


class ConfigError(GridError):
    code = "config"
    exit_code = ExitCode.USAGE


class NotFound(GridError):
    code = "not-found"
    exit_code = ExitCode.NOT_FOUND


class Refused(GridError):
    code = "refused"
    exit_code = ExitCode.REFUSED


class Unavailable(GridError):
    code = "unavailable"
    exit_code = ExitCode.UNAVAILABLE


class NoResources(GridError):
    code = "no-resources"
    exit_code = ExitCode.NO_RESOURCES


class TimedOut(GridError):
    code = "timeout"
    exit_code = ExitCode.TIMEOUT


class InternalError(GridError):
    """A broken invariant: always a fault of ours, never of the user."""

    code = "internal"
    exit_code = ExitCode.INTERNAL


_KINDS: dict[str, type[GridError]] = {
    kind.__name__: kind
    for kind in (
        GridError, UsageError, ConfigError, NotFound, Refused, Unavailable, NoResources, TimedOut, InternalError,
    )
}  # fmt: skip


def register_error(kind: type[GridError]) -> type[GridError]:
    """Make a room's own error survive the trip over a socket (class decorator)."""
    _KINDS[kind.__name__] = kind
    return kind
