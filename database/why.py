"""Why a piece of work is not done yet, in words that a person understands."""

from __future__ import annotations

import datetime as dt


def why(
    *,
    state: str,
    reason: str | None,
    not_before: dt.datetime | None,
    now: dt.datetime,
    leader_alive: bool,
    held: bool = False,
    waiting_for: str | None = None,
    progress: str | None = None,
) -> str | None:
    """What a segment or an evaluation waits for, or why it ended; None when it SUCCEEDED without a remark.

    Args:
        state: the row's.
        reason: the row's: how it failed, or what the back-off follows.
        not_before: no attempt before this time.
        now: the database's clock.
        leader_alive: whether a scheduler is at work.
        held: all grids that ask for it are paused.
        waiting_for: the missing checkpoint, e.g. "short_trunk of d64 at step 512", for PENDING work.
        progress: of the running attempt, e.g. "step 120 of 512".
    """
    if state in ("SUCCEEDED", "FAILED", "CANCELLED"):
        return reason
    if held and state != "RUNNING":
        return "paused: `longlaw grid resume` lets it go on"
    if not leader_alive:
        return "no scheduler is running: start one (`longlaw up`, or `python -m orchestrator.scheduler`)"
    if state == "RUNNING":
        return f"running, {progress}" if progress else "running"
    if state == "PENDING":
        return f"waiting on the checkpoint of {waiting_for}" if waiting_for else "about to be scheduled"
    if not_before is not None and not_before > now:
        return f"backing off until {not_before:%H:%M:%S} UTC after: {reason}"
    return "no free worker"
