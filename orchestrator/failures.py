"""Whose failure it is: the user's (a recipe that diverges, an exception) or the infrastructure's (a lost process)."""

from __future__ import annotations

import builtins

from database.attempts import Failure
from orchestrator.reports import Failed, Lost

#: The same specification fails in the same way, to the last bit: no retry can help.
_HOPELESS = frozenset(
    {
        "DivergedError",
        "ModelMismatchError",
        "SegmentRunError",
        "MergeError",
        "MeasurementError",
        "ProbeError",
    }
)
#: A checkpoint is gone from the store, or damaged there.
UNREADABLE = frozenset({"CheckpointMissingError", "CheckpointCorruptError"})
_INFRASTRUCTURE = frozenset(
    {
        *UNREADABLE,
        "CheckpointConflictError",  # the scheduler removes what is in the way, so that the next try gets on
        "ProcessLostError",
        "StoreError",
        "MemoryError",
    }
)
#: Space comes back when someone makes some, and a store at a URL when its service does: not within seconds.
_STORE_BACKOFF_S = 60.0


def failure_of(report: Failed | Lost) -> Failure:
    """The failure that a report tells of, with a reason for people."""
    if isinstance(report, Lost):
        return Failure(kind="infrastructure", reason=report.reason, lost=True)
    if report.error == "StoreFullError":
        return Failure(
            kind="infrastructure",
            reason=f"no space left in the store: free some ({report.message})",
            min_backoff_s=_STORE_BACKOFF_S,
        )
    reason = f"{report.error}: {report.message}" if report.message else report.error
    if report.error in UNREADABLE:
        reason += "; where it stays so, `longlaw grid retry` trains it again"
    if report.error in _INFRASTRUCTURE or _is_os_error(report.error):
        wait_s = _STORE_BACKOFF_S if report.error == "StoreError" else 0.0
        return Failure(kind="infrastructure", reason=reason, min_backoff_s=wait_s)
    return Failure(kind="user", reason=reason, hopeless=report.error in _HOPELESS)


def _is_os_error(name: str) -> bool:
    """Whether Python's own error of that name is about files or connections: a time-out, a missing file, a reset."""
    known = getattr(builtins, name, None)
    return isinstance(known, type) and issubclass(known, OSError)
