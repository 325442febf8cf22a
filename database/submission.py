"""Storing a planned grid: its claims, and the work that nobody has opened yet. One transaction, all or nothing."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Text, any_, func, literal, select, update
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import InstrumentedAttribute, Session

from database.claims import drop_unread_saves
from database.events import record_event
from database.models import (
    OPEN_STATES,
    Base,
    Cell,
    CellEvaluation,
    Checkpoint,
    Evaluation,
    EvaluationSource,
    Evaluator,
    Grid,
    GridEvaluation,
    GridSegment,
    Segment,
    SegmentSave,
    SegmentSource,
    Series,
)
from database.observations import record_observations
from database.specs import to_json
from workers import spec
from workers.probe_spec import ProbeSet
from workers.spec import Execution

#: The number of the advisory lock that lets one submission in at a time: the letters "submit" as an integer.
_LOCK = int.from_bytes(b"submit", "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownSteps:
    """Checkpoints of a segment: those that exist, and those that open work will bring."""

    segment_key: str
    saved: frozenset[int]
    scheduled: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownWork:
    """What exists or is on its way; evaluations by their keys."""

    segments: tuple[KnownSteps, ...]
    evaluated: frozenset[str]
    in_flight: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewGrid:
    name: str
    protocol: str
    document: Any
    tokens_train: int
    tokens_independent: int
    flops: float
    gpu_hours: float
    holdout: str | None
    bootstrap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSeries:
    id: str
    family: str
    protocol: str
    rule: str
    evaluator_id: str
    metric: str
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOnSegment:
    """`save_steps`: checkpoints the grid reads; `missing_steps`: those that must be trained for it."""

    key: str
    scale: str
    spec: spec.Segment
    save_steps: tuple[int, ...]
    missing_steps: tuple[int, ...]
    priority: float
    execution: Execution


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOnEvaluation:
    """`new`: nothing measured and nothing under way, so that a generation must be opened."""

    key: str
    snapshot: spec.Snapshot
    sources: tuple[spec.CheckpointRef, ...]
    evaluator_id: str
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    cluster: str
    follow_up: str | None
    new: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NewCell:
    """`measured_by` pairs each evaluation's key with the series it belongs to."""

    key: str
    scale: str
    n_params: int
    short_tokens: int | None
    long_tokens: int
    short_seed: int
    long_seed: int
    plan_status: str
    measured_by: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Everything that a grid brings into the database."""

    grid: NewGrid
    evaluators: tuple[spec.Evaluator | ProbeSet, ...]
    series: tuple[NewSeries, ...]
    segments: tuple[ClaimOnSegment, ...]
    evaluations: tuple[ClaimOnEvaluation, ...]
    cells: tuple[NewCell, ...]


def known_work(
    session: Session, *, segment_keys: Sequence[str], evaluation_keys: Sequence[str], hold: bool = False
) -> KnownWork:
    """What the database knows of these segments and evaluations.

    Args:
        hold: keep it true until the transaction ends: other submissions wait, and open work can neither end nor be
            claimed. `store` needs this.
    """
    if hold:
        hold_submissions(session)
        for table, keys in ((Segment, segment_keys), (Evaluation, evaluation_keys)):
            rows = select(table.id).where(_among(table.key, keys), table.state.in_(OPEN_STATES))
            session.execute(rows.order_by(table.id).with_for_update())
    saved = defaultdict(set)
    for key, step in session.execute(
        select(Checkpoint.segment_key, Checkpoint.step).where(_among(Checkpoint.segment_key, segment_keys))
    ):
        saved[key].add(step)
    scheduled = defaultdict(set)
    for key, step in session.execute(
        select(SegmentSave.segment_key, SegmentSave.step)
        .join(Segment, Segment.key == SegmentSave.segment_key)
        .where(_among(SegmentSave.segment_key, segment_keys), Segment.state.in_(OPEN_STATES))
    ):
        scheduled[key].add(step)
    states = session.execute(
        select(Evaluation.key, Evaluation.state).where(
            _among(Evaluation.key, evaluation_keys), Evaluation.state.in_((*OPEN_STATES, "SUCCEEDED"))
        )
    ).all()
    return KnownWork(
        segments=tuple(
            KnownSteps(segment_key=key, saved=frozenset(saved[key]), scheduled=frozenset(scheduled[key]))
            for key in dict.fromkeys((*saved, *scheduled))
        ),
        evaluated=frozenset(key for key, state in states if state == "SUCCEEDED"),
        in_flight=frozenset(key for key, state in states if state != "SUCCEEDED"),
    )


def hold_submissions(session: Session) -> None:
    """Other submissions wait until this transaction ends: what they find to exist must still be there when they end."""
    session.execute(select(func.pg_advisory_xact_lock(_LOCK)))


def store(session: Session, submission: Submission) -> uuid.UUID:
    """Stores the grid, its claims, and PENDING generations of what is new; returns the grid's id.

    Observations that measured evaluations make in the grid's series are recorded too. Call it in the transaction that
    read `known_work(..., hold=True)`.
    """
    grid = submission.grid
    row = Grid(
        name=grid.name,
        protocol=grid.protocol,
        document=grid.document,
        document_hash=spec.content_hash(grid.document),
        tokens_train=grid.tokens_train,
        tokens_independent=grid.tokens_independent,
        flops=grid.flops,
        gpu_hours=grid.gpu_hours,
        holdout=grid.holdout,
        bootstrap=grid.bootstrap,
    )
    session.add(row)
    session.flush()
    _upsert(session, Evaluator, ({"id": value.id, "spec": to_json(value)} for value in submission.evaluators))
    _upsert(session, Series, (_columns(value) for value in submission.series))
    _claim_segments(session, row.id, submission.segments)
    _claim_evaluations(session, row.id, submission.evaluations)
    _store_cells(session, row.id, submission.cells)
    record_event(session, "grid_submitted", str(row.id), grid_id=row.id, name=grid.name, cells=len(submission.cells))
    session.flush()
    record_observations(session, grid_id=row.id)
    return row.id


def _claim_segments(session: Session, grid_id: uuid.UUID, claims: Sequence[ClaimOnSegment]) -> None:
    _upsert(
        session,
        GridSegment,
        (
            {"grid_id": grid_id, "segment_key": claim.key, "target_step": max(claim.save_steps)}
            for claim in claims
            if claim.save_steps
        ),
    )
    generations = _generations(session, Segment, [claim.key for claim in claims])
    closed = [claim.key for claim in claims if claim.missing_steps and not generations.get(claim.key, (0, False))[1]]
    drop_unread_saves(session, _among(SegmentSave.segment_key, closed))  # those of generations that were given up
    _upsert(session, SegmentSave, ({"segment_key": c.key, "step": step} for c in claims for step in c.missing_steps))
    _upsert(
        session,
        SegmentSource,
        (
            {"segment_key": claim.key, "source_key": source.segment, "step": source.step}
            for claim in claims
            for source in claim.spec.start_sources
        ),
    )
    # A recovery checkpoint that a grid reads is no longer one that may be pruned.
    for claim in claims:
        if claim.save_steps:
            session.execute(
                update(Checkpoint)
                .where(
                    Checkpoint.segment_key == claim.key, ~Checkpoint.scheduled, Checkpoint.step.in_(claim.save_steps)
                )
                .values(scheduled=True)
            )
    new_rows = []
    for claim in claims:
        if not claim.missing_steps:
            continue
        generation, is_open = generations.get(claim.key, (0, False))
        target_step = max(claim.missing_steps)
        if is_open:
            session.execute(
                update(Segment)
                .where(Segment.key == claim.key, Segment.state.in_(OPEN_STATES))
                .values(
                    target_step=func.greatest(Segment.target_step, target_step),
                    priority=func.greatest(Segment.priority, claim.priority),
                )
            )
            continue
        parent = claim.spec.parent
        new_rows.append(
            {
                "key": claim.key,
                "generation": generation + 1,
                "kind": claim.spec.kind,
                "scale": claim.scale,
                "parent_key": None if parent is None else parent.segment,
                "parent_step": None if parent is None else parent.step,
                "spec": to_json(claim.spec),
                "execution": to_json(claim.execution),
                "tokens_per_step": claim.spec.stage.tokens_per_step,
                "target_step": target_step,
                "priority": claim.priority,
            }
        )
    if new_rows:
        session.execute(insert(Segment), new_rows)


def _claim_evaluations(session: Session, grid_id: uuid.UUID, claims: Sequence[ClaimOnEvaluation]) -> None:
    _upsert(session, GridEvaluation, ({"grid_id": grid_id, "evaluation_key": claim.key} for claim in claims))
    new = [claim for claim in claims if claim.new]
    _upsert(
        session,
        EvaluationSource,
        (
            {"evaluation_key": claim.key, "segment_key": source.segment, "step": source.step}
            for claim in new
            for source in claim.sources
        ),
    )
    generations = _generations(session, Evaluation, [claim.key for claim in new])
    rows = [
        {
            "key": claim.key,
            "generation": generations.get(claim.key, (0, False))[0] + 1,
            "snapshot_id": claim.snapshot.id,
            "segment_key": claim.snapshot.segment,
            "step": claim.snapshot.step,
            "rule": to_json(claim.snapshot.rule),
            "evaluator_id": claim.evaluator_id,
            "scale": claim.scale,
            "n_params": claim.n_params,
            "short_tokens": claim.short_tokens,
            "long_tokens": claim.long_tokens,
            "short_seed": claim.short_seed,
            "long_seed": claim.long_seed,
            "cluster": claim.cluster,
            "follow_up": claim.follow_up,
        }
        for claim in new
    ]
    if rows:
        session.execute(insert(Evaluation), rows)


def _store_cells(session: Session, grid_id: uuid.UUID, cells: Sequence[NewCell]) -> None:
    rows = [
        {
            "grid_id": grid_id,
            "key": cell.key,
            "scale": cell.scale,
            "n_params": cell.n_params,
            "short_tokens": cell.short_tokens,
            "long_tokens": cell.long_tokens,
            "short_seed": cell.short_seed,
            "long_seed": cell.long_seed,
            "plan_status": cell.plan_status,
        }
        for cell in cells
    ]
    ids = {key: id for id, key in session.execute(insert(Cell).returning(Cell.id, Cell.key), rows)}
    _upsert(
        session,
        CellEvaluation,
        (
            {"cell_id": ids[cell.key], "evaluation_key": evaluation_key, "series_id": series_id}
            for cell in cells
            for evaluation_key, series_id in cell.measured_by
        ),
    )


def _generations(
    session: Session, table: type[Segment] | type[Evaluation], keys: Sequence[str]
) -> dict[str, tuple[int, bool]]:
    """The newest generation of each key, and whether it is open."""
    rows = session.execute(
        select(table.key, func.max(table.generation), func.bool_or(table.state.in_(OPEN_STATES)))
        .where(_among(table.key, keys))
        .group_by(table.key)
    )
    return {key: (generation, is_open) for key, generation, is_open in rows}


def _upsert(session: Session, table: type[Base], rows: Iterable[dict[str, Any]]) -> None:
    if values := list(rows):
        session.execute(insert(table).on_conflict_do_nothing(), values)


def _among(column: InstrumentedAttribute[str], keys: Sequence[str]) -> ColumnElement[bool]:
    """column = ANY(keys): one parameter, however many keys."""
    among: ColumnElement[bool] = column == any_(literal(list(keys), ARRAY(Text())))
    return among


def _columns(value: NewSeries) -> dict[str, Any]:
    return {name: getattr(value, name) for name in NewSeries.__slots__}
