"""Whose failure it is: the user's (a recipe that diverges, an exception) or the infrastructure's (a lost process)."""

from __future__ import annotations

from database.attempts import Failure
from orchestrator.reports import Failed, Lost

#: The same specification fails in the same way, to the last bit: no retry can help.
_HOPELESS = frozenset(
    {"DivergedError", "ModelMismatchError", "SegmentRunError", "CheckpointConflictError", "MergeError"}
)
_INFRASTRUCTURE = frozenset({"CheckpointMissingError", "CheckpointCorruptError", "MemoryError", "ConnectionError"})
#: Space comes back when someone makes some, not within seconds.
_STORE_FULL_BACKOFF_S = 60.0


def failure_of(report: Failed | Lost) -> Failure:
    """The failure that a report tells of, with a reason for people."""
    if isinstance(report, Lost):
        return Failure(kind="infrastructure", reason=report.reason, lost=True)
    if report.error == "StoreFullError":
        return Failure(
            kind="infrastructure",
            reason=f"no space left in the store: free some ({report.message})",
            min_backoff_s=_STORE_FULL_BACKOFF_S,
        )
    reason = f"{report.error}: {report.message}" if report.message else report.error
    if report.error in _INFRASTRUCTURE:
        return Failure(kind="infrastructure", reason=reason)
    return Failure(kind="user", reason=reason, hopeless=report.error in _HOPELESS)
