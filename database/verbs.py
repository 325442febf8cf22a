"""What may be asked of a grid beyond looking at it: cancel, pause, resume, retry what failed.

Each is one short transaction, and harmless when repeated: what a grid has obeyed already is told again as it was. A
verb changes the database alone; the scheduler acts upon what it finds there, however often it or the API is killed.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from database.cancelling import hold_work, withdraw_claims
from database.claims import evaluation_held, hold_claims, lacks_a_save, open_evaluations, open_segments, segment_held
from database.errors import VerbNotAllowedError
from database.events import record_event
from database.models import Attempt, Event, Grid
from database.progress import cell_counts, database_now, grid_states
from database.retrying import has_failed, reopen_failed
from database.submission import hold_submissions

Verb = Literal["cancel", "pause", "resume", "retry-failed"]
OPEN_GRID_STATES = ("PENDING", "RUNNING")
_EVENTS: dict[Verb, str] = {
    "cancel": "grid_cancelled",
    "pause": "grid_paused",
    "resume": "grid_resumed",
    "retry-failed": "grid_retried",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a verb did.

    Attributes:
        segments: how many stopped (cancel), wait (pause), go on (resume) or were opened again (retry-failed).
        segments_kept: how many go on because other grids ask for them too.
        evaluations: like `segments`.
        evaluations_kept: like `segments_kept`.
        attempts: how many ran, and were superseded (cancel) or end at their next checkpoint (pause).
        cells_measured: cells of the grid that have all their measurements; they stay.
        tokens_saved: tokens that will not be trained (cancel).
    """

    segments: int = 0
    segments_kept: int = 0
    evaluations: int = 0
    evaluations_kept: int = 0
    attempts: int = 0
    cells_measured: int = 0
    tokens_saved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Obeyed:
    """That a grid did what was asked, and when by the database's clock; `repeated`: it had done so before, as told."""

    verb: Verb
    at: dt.datetime
    repeated: bool
    counts: Counts


def legal_verbs(state: str, *, paused: bool, failed: bool) -> tuple[Verb, ...]:
    """What would change a grid.

    Args:
        state: the grid's.
        paused: whether it is.
        failed: whether an evaluation that it asks for has failed.
    """
    if state == "CANCELLED":
        return ()
    verbs: tuple[Verb, ...] = ()
    if state in OPEN_GRID_STATES:
        verbs = ("cancel", "resume" if paused else "pause")
    return (*verbs, "retry-failed") if failed else verbs


def obey(session: Session, grid_id: uuid.UUID, verb: Verb) -> Obeyed | None:
    """Does to a grid what is asked, or tells what was done where nothing is left to do; None without such a grid.

    Submissions and other verbs wait for the transaction to end, and nothing begins meanwhile.

    Raises:
        VerbNotAllowedError: the grid's state does not allow it; nothing has changed.
    """
    hold_submissions(session)
    grid = session.get(Grid, grid_id)
    if grid is None:
        return None
    hold_claims(session)
    if verb in ("cancel", "retry-failed"):
        hold_work(session, grid_id)
    state = grid_states(session, [grid_id])[grid_id]
    is_open = state in OPEN_GRID_STATES
    paused = is_open and grid.paused_at is not None
    failed = has_failed(session, grid_id)
    legal = legal_verbs(state, paused=paused, failed=failed)
    if verb in legal:
        counts = _change(session, grid, verb, is_open=is_open)
        record_event(session, _EVENTS[verb], str(grid_id), grid_id=grid_id, **dataclasses.asdict(counts))
        session.flush()
        return Obeyed(verb=verb, at=database_now(session), repeated=False, counts=counts)
    in_force = {
        "cancel": state == "CANCELLED",
        "pause": paused,
        "resume": is_open and not paused,
        "retry-failed": is_open and not failed,
    }
    before = _obeyed_before(session, grid_id, verb) if in_force[verb] else None
    if before is not None:
        return before
    if verb == "resume" and in_force[verb]:  # never paused
        return Obeyed(verb=verb, at=database_now(session), repeated=True, counts=Counts())
    raise _not_allowed(verb, state, legal)


def _change(session: Session, grid: Grid, verb: Verb, *, is_open: bool) -> Counts:
    measured = cell_counts(session, grid.id)["MEASURED"]
    if verb == "cancel":
        withdrawn = withdraw_claims(session, grid.id)
        grid.paused_at, grid.cancelled_at = None, func.now()
        return Counts(cells_measured=measured, **dataclasses.asdict(withdrawn))
    if verb == "retry-failed":
        reopened = reopen_failed(session, grid.id)
        if not is_open:
            grid.paused_at = None  # left over from before it ended
        return Counts(cells_measured=measured, segments=reopened.segments, evaluations=reopened.evaluations)
    if verb == "pause":
        grid.paused_at = func.now()
        session.flush()
    counts = _held(session, grid.id, cells_measured=measured)
    if verb == "resume":
        grid.paused_at = None
        return dataclasses.replace(counts, attempts=0)
    return counts


def _held(session: Session, grid_id: uuid.UUID, *, cells_measured: int) -> Counts:
    """What of a paused grid's work waits with it, and what goes on for others."""
    segments, evaluations = open_segments(grid_id).where(lacks_a_save()), open_evaluations(grid_id)
    held = segments.where(segment_held())
    attempts = select(Attempt.id).where(Attempt.state == "RUNNING", Attempt.segment_id.in_(held))
    return Counts(
        segments=_count(session, held),
        segments_kept=_count(session, segments.where(~segment_held())),
        evaluations=_count(session, evaluations.where(evaluation_held())),
        evaluations_kept=_count(session, evaluations.where(~evaluation_held())),
        attempts=_count(session, attempts),
        cells_measured=cells_measured,
    )


def _count(session: Session, rows: Select[int]) -> int:
    return session.scalar(select(func.count()).select_from(rows.subquery())) or 0


def _obeyed_before(session: Session, grid_id: uuid.UUID, verb: Verb) -> Obeyed | None:
    event = session.scalar(
        select(Event).where(Event.grid_id == grid_id, Event.kind == _EVENTS[verb]).order_by(Event.id.desc()).limit(1)
    )
    return None if event is None else Obeyed(verb=verb, at=event.at, repeated=True, counts=Counts(**event.payload))


def _not_allowed(verb: Verb, state: str, legal: tuple[Verb, ...]) -> VerbNotAllowedError:
    if verb == "retry-failed" and state != "CANCELLED":
        why = f"The grid is {state} and nothing of it has failed"
    else:
        why = f"The grid is {state}: {verb} changes nothing"
    ways = f"what its state allows: {', '.join(legal)}" if legal else "it can be submitted again, and finds what exists"
    return VerbNotAllowedError(f"{why}; {ways}.", state=state, verbs=legal)
