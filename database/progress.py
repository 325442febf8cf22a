"""How far grids are, and why what does not run does not: states derived from the work that a grid claims.

An identity's state is that of its newest generation; for a grid that was cancelled it is what its claim was closed as.
A grid is done with a segment when no checkpoint up to its own target is missing, whatever other grids still want of it.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import ColumnElement, Select, Subquery, and_, case, exists, func, literal, or_, select
from sqlalchemy.orm import Session, aliased

from database.claims import evaluation_held, missing_save, segment_held
from database.leading import leader_alive
from database.models import (
    OPEN_STATES,
    WORK_STATES,
    Attempt,
    Cell,
    CellEvaluation,
    Checkpoint,
    Evaluation,
    Grid,
    GridEvaluation,
    GridSegment,
    Segment,
    SegmentSave,
)
from database.why import why

CELL_STATES = ("PENDING", "RUNNING", "MEASURED", "FAILED", "CANCELLED")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleProgress:
    """Work of one scale. `tokens_done` counts durable tokens and those of running attempts, never above the total."""

    scale: str
    tokens_done: int
    tokens_total: int
    tokens_per_s: float
    segments: dict[str, int]
    evaluations: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningAttempt:
    """An attempt that runs now; `what` is the segment's kind, or the rule's name with that of a follow-up stage."""

    kind: str
    what: str
    scale: str
    number: int
    worker: str
    started_at: dt.datetime
    step: int | None
    target_step: int | None
    loss: float | None
    tokens_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """`count` pieces of work of one scale that wait for the same thing."""

    scale: str
    kind: str
    why: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """`count` pieces of work of one scale that failed for the same reason."""

    scale: str
    kind: str
    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GridProgress:
    """Where a grid stands."""

    cells: dict[str, int]
    scales: tuple[ScaleProgress, ...]
    attempts: tuple[RunningAttempt, ...]
    waiting: tuple[Waiting, ...]
    failures: tuple[Failure, ...]

    @property
    def tokens_done(self) -> int:
        return sum(scale.tokens_done for scale in self.scales)

    @property
    def tokens_total(self) -> int:
        return sum(scale.tokens_total for scale in self.scales)

    @property
    def tokens_per_s(self) -> float:
        return sum(scale.tokens_per_s for scale in self.scales)

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last token at the present rates; None where a scale with work left has no rate."""
        left = [(scale.tokens_total - scale.tokens_done, scale.tokens_per_s) for scale in self.scales]
        left = [(tokens, rate) for tokens, rate in left if tokens > 0]
        if not left or any(rate <= 0 for _, rate in left):
            return None
        return max(tokens / rate for tokens, rate in left)


def grid_states(session: Session, grid_ids: Collection[uuid.UUID]) -> dict[uuid.UUID, str]:
    """The state of each grid: open while anything it claims is open, then what its cells came to, unless cancelled.

    Found by way of the few evaluations that are open or were given up, so that finished grids cost nothing.
    """
    cancelled = session.scalars(select(Grid.id).where(Grid.id.in_(grid_ids), Grid.cancelled_at.is_not(None))).all()
    going_on = set(grid_ids) - set(cancelled)  # no claim of theirs is closed
    claims = select(GridEvaluation.grid_id).join(Evaluation, Evaluation.key == GridEvaluation.evaluation_key)
    is_open = session.scalars(
        claims.where(GridEvaluation.grid_id.in_(going_on), Evaluation.state.in_(OPEN_STATES)).distinct()
    ).all()
    begun = claims.where(GridEvaluation.grid_id == Grid.id, Evaluation.state.not_in(("PENDING", "READY")))
    training = (
        select(GridSegment.grid_id)
        .join(Segment, Segment.key == GridSegment.segment_key)
        .where(GridSegment.grid_id == Grid.id, Segment.state == "RUNNING")
    )
    running = select(Grid.id).where(Grid.id.in_(is_open), or_(training.exists(), begun.exists()))
    given_up = (
        select(Cell.grid_id, func.bool_or(Evaluation.state == "FAILED"))
        .join(CellEvaluation, CellEvaluation.cell_id == Cell.id)
        .join(Evaluation, Evaluation.key == CellEvaluation.evaluation_key)
        .where(Cell.grid_id.in_(going_on), Evaluation.state.in_(("FAILED", "CANCELLED")), newest(Evaluation))
        .group_by(Cell.grid_id)
    )
    states = dict.fromkeys(grid_ids, "SUCCEEDED")
    states |= {grid_id: "FAILED" if failed else "CANCELLED" for grid_id, failed in session.execute(given_up)}
    states |= dict.fromkeys(is_open, "PENDING")
    states |= dict.fromkeys(session.scalars(running) if is_open else (), "RUNNING")
    return states | dict.fromkeys(cancelled, "CANCELLED")


def grid_progress(
    session: Session, grid_id: uuid.UUID, *, paused: bool = False, cancelled: bool = False
) -> GridProgress:
    """Cells, tokens, running attempts, what waits and what failed, of one grid.

    Args:
        paused: the grid is: what waits may do so for that reason.
        cancelled: the grid is: claims of it may be closed.
    """
    segments = _segments_of(grid_id, paused=paused)
    evaluations = _evaluations_of(grid_id, paused=paused, cancelled=cancelled)
    waiting, failures = _not_running(session, segments, evaluations)
    return GridProgress(
        cells=cell_counts(session, grid_id),
        scales=_scales(session, segments, evaluations),
        attempts=_attempts(session, segments, evaluations),
        waiting=waiting,
        failures=failures,
    )


def newest(work: type[Segment] | type[Evaluation]) -> ColumnElement[bool]:
    """The row is the newest generation of its key.

    Few keys have more than one: looking for a later one among those alone costs nothing, by an index of their own.
    """
    later = aliased(work)
    return ~exists().where(later.key == work.key, later.generation > work.generation, later.generation > 1)


def database_now(session: Session) -> dt.datetime:
    """The database's clock."""
    return session.scalars(select(func.now())).one()


def done_step() -> Any:
    """The last checkpoint of a segment; for use in statements over `Segment`."""
    return (
        select(func.max(Checkpoint.step)).where(Checkpoint.segment_key == Segment.key).correlate(Segment)
    ).scalar_subquery()


def _segments_of(grid_id: uuid.UUID, *, paused: bool) -> Subquery:
    lacking = exists().where(
        SegmentSave.segment_key == Segment.key, SegmentSave.step <= GridSegment.target_step, missing_save()
    )
    state = case((lacking, Segment.state), else_="SUCCEEDED")
    live = and_(Attempt.segment_id == Segment.id, Attempt.state == "RUNNING", GridSegment.closed_as.is_(None))
    durable = done_step()
    step = func.least(func.greatest(durable, Attempt.progress_step, 0), GridSegment.target_step)
    return (
        select(
            Segment.id,
            Segment.kind,
            Segment.scale,
            Segment.parent_key.label("awaits"),
            Segment.reason,
            Segment.not_before,
            Segment.tokens_per_step,
            GridSegment.target_step,
            func.coalesce(GridSegment.closed_as, state).label("state"),
            (segment_held() if paused else literal(False)).label("held"),
            step.label("step"),
            Attempt.id.label("attempt_id"),
            Attempt.tokens_per_s,
        )
        .join(GridSegment, GridSegment.segment_key == Segment.key)
        .outerjoin(Attempt, live)
        .where(GridSegment.grid_id == grid_id, newest(Segment))
        .subquery("work")
    )


def _evaluations_of(grid_id: uuid.UUID, *, paused: bool, cancelled: bool) -> Subquery:
    rule = Evaluation.rule["name"].astext
    after = rule + ", after " + Evaluation.follow_up  # NULL without a follow-up
    live = and_(Attempt.evaluation_id == Evaluation.id, Attempt.state == "RUNNING", GridEvaluation.closed_as.is_(None))
    return (
        select(
            Evaluation.id,
            Evaluation.scale,
            func.coalesce(after, rule).label("kind"),
            # Without a claim that is closed it is the column itself, which indexes know.
            (claim_state() if cancelled else Evaluation.state).label("state"),
            (evaluation_held() if paused else literal(False)).label("held"),
            Evaluation.reason,
            Evaluation.not_before,
            Evaluation.segment_key.label("awaits"),
            Attempt.id.label("attempt_id"),
        )
        .join(GridEvaluation, GridEvaluation.evaluation_key == Evaluation.key)
        .outerjoin(Attempt, live)
        .where(GridEvaluation.grid_id == grid_id, newest(Evaluation))
        .subquery("work")
    )


@dataclass(slots=True, kw_only=True)
class _Scale:
    tokens_done: int = 0
    tokens_total: int = 0
    tokens_per_s: float = 0.0
    segments: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK_STATES, 0))
    evaluations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(WORK_STATES, 0))


def _scales(session: Session, segments: Subquery, evaluations: Subquery) -> tuple[ScaleProgress, ...]:
    scales: dict[str, _Scale] = {}
    tokens = (
        select(
            segments.c.scale,
            segments.c.state,
            func.count(),
            func.sum(segments.c.step * segments.c.tokens_per_step),
            func.sum(segments.c.target_step * segments.c.tokens_per_step),
            func.coalesce(func.sum(segments.c.tokens_per_s), 0.0),
        )
        .group_by(segments.c.scale, segments.c.state)
        .order_by(func.min(segments.c.id))
    )
    for name, state, count, done, total, rate in session.execute(tokens):
        scale = scales.setdefault(name, _Scale())
        scale.segments[state] += count
        scale.tokens_done += int(done)
        scale.tokens_total += int(total)
        scale.tokens_per_s += rate
    counts = select(evaluations.c.scale, evaluations.c.state, func.count())
    for name, state, count in session.execute(counts.group_by(evaluations.c.scale, evaluations.c.state)):
        scales.setdefault(name, _Scale()).evaluations[state] += count
    return tuple(
        ScaleProgress(
            scale=name,
            tokens_done=scale.tokens_done,
            tokens_total=scale.tokens_total,
            tokens_per_s=scale.tokens_per_s,
            segments=scale.segments,
            evaluations=scale.evaluations,
        )
        for name, scale in scales.items()
    )


def _attempts(session: Session, segments: Subquery, evaluations: Subquery) -> tuple[RunningAttempt, ...]:
    found: list[RunningAttempt] = []
    for kind, work in (("SEGMENT", segments), ("EVALUATION", evaluations)):
        statement = (
            select(Attempt, work.c.kind, work.c.scale).join(work, work.c.attempt_id == Attempt.id).order_by(Attempt.id)
        )
        found += [
            RunningAttempt(
                kind=kind,
                what=what,
                scale=scale,
                number=attempt.number,
                worker=attempt.worker,
                started_at=attempt.started_at,
                step=attempt.progress_step if attempt.progress_step is not None else attempt.start_step,
                target_step=attempt.target_step,
                loss=attempt.loss,
                tokens_per_s=attempt.tokens_per_s,
            )
            for attempt, what, scale in session.execute(statement)
        ]
    return tuple(found)


def _not_running(
    session: Session, segments: Subquery, evaluations: Subquery
) -> tuple[tuple[Waiting, ...], tuple[Failure, ...]]:
    waiting: Counter[tuple[str, str, str]] = Counter()
    failures: Counter[tuple[str, str, str]] = Counter()
    now, alive = database_now(session), leader_alive(session)
    for kind, statement in (("SEGMENT", _stuck(segments)), ("EVALUATION", _stuck(evaluations))):
        for scale, state, reason, not_before, held, awaited, count in session.execute(statement):
            said = why(
                state=state,
                reason=reason,
                not_before=not_before,
                now=now,
                leader_alive=alive,
                held=held,
                waiting_for=awaited,
            )
            kept = failures if state == "FAILED" else waiting
            kept[scale, kind, said or state.lower()] += count
    return (
        tuple(Waiting(scale=s, kind=k, why=said, count=count) for (s, k, said), count in waiting.items()),
        tuple(Failure(scale=s, kind=k, reason=said, count=count) for (s, k, said), count in failures.items()),
    )


def _stuck(work: Subquery) -> Select[Any]:
    """Work that waits, grouped by what for, and work that failed, grouped by why."""
    columns = (work.c.scale, work.c.state, work.c.reason, work.c.not_before, work.c.held, work.c.awaits)
    stuck = select(*columns, func.count().label("count")).where(work.c.state.in_(("PENDING", "READY", "FAILED")))
    grouped = stuck.group_by(*columns).subquery()  # only then is looked up what each group waits for
    awaited = select(func.concat(func.min(Segment.kind), " of ", func.min(Segment.scale)))
    awaited_text = case(
        (grouped.c.awaits.is_not(None), awaited.where(Segment.key == grouped.c.awaits).scalar_subquery())
    )
    said = (grouped.c.scale, grouped.c.state, grouped.c.reason, grouped.c.not_before, grouped.c.held)
    return select(*said, awaited_text, grouped.c.count).order_by(grouped.c.scale, grouped.c.state, awaited_text)


def claim_state() -> ColumnElement[str]:
    """What an evaluation is for a grid; for statements over `Evaluation` and `GridEvaluation`."""
    return func.coalesce(GridEvaluation.closed_as, Evaluation.state)


def cell_state() -> Any:
    """The state of a cell from its evaluations; for statements that group `claim_state` by cell."""
    state = claim_state()
    trains = exists().where(Segment.key == Evaluation.segment_key, Segment.state == "RUNNING")
    return case(
        (func.bool_and(state == "SUCCEEDED"), "MEASURED"),
        (func.bool_or(or_(state == "RUNNING", and_(state.in_(("PENDING", "READY")), trains))), "RUNNING"),
        (func.bool_or(state.in_(OPEN_STATES)), "PENDING"),
        (func.bool_or(state == "FAILED"), "FAILED"),
        else_="CANCELLED",
    )


def claim_of_cell() -> ColumnElement[bool]:
    """The claim by which a cell's evaluation is asked for; for statements over `Cell` and `CellEvaluation`."""
    return and_(GridEvaluation.grid_id == Cell.grid_id, GridEvaluation.evaluation_key == CellEvaluation.evaluation_key)


def cell_states(grid_id: uuid.UUID, cell_ids: Sequence[int] | None = None) -> Select[int, str]:
    """A statement for the state of each cell of a grid."""
    statement = (
        select(Cell.id, cell_state().label("state"))
        .join(CellEvaluation, CellEvaluation.cell_id == Cell.id)
        .join(Evaluation, Evaluation.key == CellEvaluation.evaluation_key)
        .join(GridEvaluation, claim_of_cell())
        .where(Cell.grid_id == grid_id, newest(Evaluation))
        .group_by(Cell.id)
    )
    return statement if cell_ids is None else statement.where(Cell.id.in_(cell_ids))


def cell_counts(session: Session, grid_id: uuid.UUID) -> dict[str, int]:
    """How many cells of a grid are in which state."""
    states = cell_states(grid_id)
    is_cancelled = session.scalar(select(Grid.cancelled_at.is_not(None)).where(Grid.id == grid_id))
    if not is_cancelled:  # no claim is closed, so a cell without an unmeasured evaluation is measured
        states = states.where(Evaluation.state != "SUCCEEDED")
    found = states.subquery()
    counts = dict.fromkeys(CELL_STATES, 0)
    for state, count in session.execute(select(found.c.state, func.count()).group_by(found.c.state)):
        counts[state] = count
    if not is_cancelled:
        cells = session.scalars(select(func.count()).where(Cell.grid_id == grid_id)).one()
        counts["MEASURED"] = cells - sum(counts.values())
    return counts
