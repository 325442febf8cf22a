"""The cells of a grid, page by page: their state, their values, and what those wait for that have none."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session, defer

from database.claims import evaluation_held
from database.leading import leader_alive
from database.models import (
    OPEN_STATES,
    Attempt,
    Cell,
    CellEvaluation,
    Checkpoint,
    Evaluation,
    GridEvaluation,
    Segment,
    Series,
)
from database.progress import cell_states, claim_of_cell, database_now, newest
from database.why import why


@dataclass(frozen=True, slots=True, kw_only=True)
class CellEvaluationRecord:
    """A cell's measurement by one rule; values are nats, None with a reason where no token qualified."""

    id: str
    series_id: str
    rule: str
    state: str
    log_longppl: float | None
    log_longppl_se: float | None
    log_shortppl: float | None
    log_shortppl_se: float | None
    log_ppl: float | None
    log_ppl_se: float | None
    key_gap: float | None
    key_count: int | None
    reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CellRecord:
    """A cell with its derived state; `why` says what it waits for, or why it failed."""

    id: int
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    plan_status: str
    state: str
    why: str | None
    evaluations: tuple[CellEvaluationRecord, ...]


_METRICS = (
    *("log_longppl", "log_longppl_se", "log_shortppl", "log_shortppl_se", "log_ppl", "log_ppl_se"),
    *("key_gap", "key_count"),
)


def list_cells(session: Session, grid_id: uuid.UUID, *, after: int | None, limit: int) -> list[CellRecord]:
    """Cells of a grid in the order of its plan. Sort key: `id`."""
    statement = select(Cell).where(Cell.grid_id == grid_id).order_by(Cell.id).limit(limit)
    if after is not None:
        statement = statement.where(Cell.id > after)
    cells = session.scalars(statement).all()
    ids = [cell.id for cell in cells]
    states: dict[int, str] = dict(session.execute(cell_states(grid_id, ids)).all())
    evaluations: dict[int, list[_Asked]] = {cell_id: [] for cell_id in ids}
    measurements = (
        select(
            CellEvaluation.cell_id,
            CellEvaluation.series_id,
            Series.rule,
            Evaluation,
            GridEvaluation.closed_as,
            evaluation_held(),
        )
        .join(Cell, Cell.id == CellEvaluation.cell_id)
        .join(GridEvaluation, claim_of_cell())
        .join(Evaluation, Evaluation.key == CellEvaluation.evaluation_key)
        .join(Series, Series.id == CellEvaluation.series_id)
        .where(CellEvaluation.cell_id.in_(ids), newest(Evaluation))
        .order_by(Evaluation.id)
        .options(defer(Evaluation.documents))
    )
    for cell_id, series_id, rule, row, closed_as, held in session.execute(measurements):
        evaluations[cell_id].append(_Asked(series_id=series_id, rule=rule, row=row, closed_as=closed_as, held=held))
    told = _whys(session, [asked for rows in evaluations.values() for asked in rows])
    return [_cell(cell, states[cell.id], evaluations[cell.id], told) for cell in cells]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The newest generation of an evaluation, and what it is for the grid whose cell asks for it."""

    series_id: str
    rule: str
    row: Evaluation
    closed_as: str | None
    held: bool

    @property
    def state(self) -> str:
        return self.closed_as or self.row.state

    @property
    def reason(self) -> str | None:
        if self.closed_as == "CANCELLED":
            return "the grid was cancelled"
        return self.row.reason if self.state == self.row.state else None

    def value(self, name: str) -> Any:
        """A metric; None where the grid had withdrawn its claim before it was measured."""
        return None if self.closed_as else getattr(self.row, name)


def _cell(cell: Cell, state: str, rows: Sequence[_Asked], told: dict[str, str | None]) -> CellRecord:
    decisive = [asked for asked in rows if asked.state in OPEN_STATES] or [
        asked for asked in rows if asked.state != "SUCCEEDED"
    ]
    return CellRecord(
        id=cell.id,
        scale=cell.scale,
        n_params=cell.n_params,
        short_tokens=cell.short_tokens,
        long_tokens=cell.long_tokens,
        short_seed=cell.short_seed,
        long_seed=cell.long_seed,
        plan_status=cell.plan_status,
        state=state,
        why=told[decisive[0].row.key] if decisive else None,
        evaluations=tuple(
            CellEvaluationRecord(
                id=asked.row.key,
                series_id=asked.series_id,
                rule=asked.rule,
                state=asked.state,
                reason=asked.reason,
                **{name: asked.value(name) for name in _METRICS},
            )
            for asked in rows
        ),
    )


def _whys(session: Session, evaluations: Sequence[_Asked]) -> dict[str, str | None]:
    """What each evaluation waits for, by key: itself, the segment it reads, or what that segment descends from."""
    segments = _with_ancestors(session, {asked.row.segment_key for asked in evaluations if asked.state == "PENDING"})
    steps = _steps(session, segments)
    now, alive = database_now(session), leader_alive(session)
    told: dict[str, str | None] = {}
    for asked in evaluations:
        row, waiting_for = asked.row, None
        if asked.state == "PENDING" and row.segment_key in segments:
            waiting_for = _blocker(segments[row.segment_key], row.step, segments, steps)
        told[row.key] = why(
            state=asked.state,
            reason=asked.reason,
            not_before=row.not_before,
            now=now,
            leader_alive=alive,
            held=asked.held,
            waiting_for=waiting_for,
        )
    return told


def _with_ancestors(session: Session, keys: Iterable[str]) -> dict[str, Segment]:
    found: dict[str, Segment] = {}
    wanted = set(keys)
    while wanted:
        statement = select(Segment).where(Segment.key.in_(wanted), newest(Segment))
        rows = session.scalars(statement.options(defer(Segment.spec), defer(Segment.execution))).all()
        found |= {row.key: row for row in rows}
        wanted = {row.parent_key for row in rows if row.parent_key is not None} - found.keys()
    return found


def _steps(session: Session, segments: dict[str, Segment]) -> dict[str, int]:
    """How far each segment is: its last checkpoint, or the live attempt if that is further."""
    durable = (
        select(Checkpoint.segment_key, func.max(Checkpoint.step))
        .where(Checkpoint.segment_key.in_(segments))
        .group_by(Checkpoint.segment_key)
    )
    live = (
        select(Segment.key, func.coalesce(Attempt.progress_step, Attempt.start_step, 0))
        .join(Attempt, Attempt.segment_id == Segment.id)
        .where(Segment.key.in_(segments), Attempt.state == "RUNNING")
    )
    steps: dict[str, int] = {}
    for key, step in [*session.execute(durable), *session.execute(live)]:
        steps[key] = max(step, steps.get(key, 0))
    return steps


def _blocker(segment: Segment, step: int, segments: dict[str, Segment], steps: dict[str, int]) -> str:
    """The segment that holds everything up, the checkpoint due, and what it does just now."""
    done = steps.get(segment.key, 0)
    parent = segments.get(segment.parent_key or "")
    if segment.state == "PENDING" and parent is not None and segment.parent_step is not None and not done:
        return _blocker(parent, segment.parent_step, segments, steps)
    doing = {"RUNNING": f"training, step {done}", "READY": "in line for a worker"}.get(segment.state)
    return f"{segment.kind} of {segment.scale} at step {step}" + (f" ({doing})" if doing else "")
