"""What failed is opened again: new generations, with retry budgets of their own, of all that a grid still needs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, Subquery, exists, func, select, union, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, aliased

from database.claims import drop_unread_saves, missing_save
from database.models import (
    OPEN_STATES,
    Checkpoint,
    Evaluation,
    EvaluationSource,
    GridEvaluation,
    GridSegment,
    Segment,
    SegmentSave,
    SegmentSource,
)
from database.progress import newest

#: What the next generation has in common with the one before.
_OF_A_SEGMENT = (
    *("key", "kind", "scale", "parent_key", "parent_step", "spec", "execution", "tokens_per_step", "priority"),
)
_OF_AN_EVALUATION = (
    *("key", "snapshot_id", "segment_key", "step", "rule", "evaluator_id", "scale", "n_params", "short_tokens"),
    *("long_tokens", "short_seed", "long_seed", "cluster", "follow_up"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reopened:
    """How many new generations there are."""

    segments: int
    evaluations: int


def has_failed(session: Session, grid_id: uuid.UUID) -> bool:
    """Whether an evaluation that the grid asks for has failed; one that waits for a failed segment has failed too."""
    return bool(session.scalar(select(_failed(grid_id).exists())))


def reopen_failed(session: Session, grid_id: uuid.UUID) -> Reopened:
    """Opens the next generation of the grid's failed evaluations, and of each segment they need that nobody trains.

    Training goes on from the nearest checkpoint. Call it in the transaction of `cancelling.hold_work`.
    """
    failed = _failed(grid_id)
    columns = [getattr(Evaluation, name) for name in _OF_AN_EVALUATION]
    evaluations = session.scalars(
        insert(Evaluation)
        .from_select(
            ["generation", *_OF_AN_EVALUATION],
            failed.with_only_columns(Evaluation.generation + 1, *columns).order_by(Evaluation.id),
        )
        .returning(Evaluation.id)
    ).all()
    segments = 0
    while opened := _open_needed(session, grid_id):
        segments += opened
    return Reopened(segments=segments, evaluations=len(evaluations))


def _failed(grid_id: uuid.UUID) -> Select[int]:
    claim = aliased(GridEvaluation)
    return (
        select(Evaluation.id)
        .join(claim, claim.evaluation_key == Evaluation.key)
        .where(claim.grid_id == grid_id, claim.closed_as.is_(None), Evaluation.state == "FAILED", newest(Evaluation))
    )


def _open_needed(session: Session, grid_id: uuid.UUID) -> int:
    """Opens segments whose checkpoints the grid's open work reads and nobody trains, and schedules what it reads of
    them; returns how many. What they begin with in their turn is found by the next call."""
    needed = _needed(grid_id)
    session.execute(
        insert(SegmentSave)
        .from_select(["segment_key", "step"], select(needed.c.segment_key, needed.c.step))
        .on_conflict_do_nothing()
    )
    asked = Segment.key.in_(select(needed.c.segment_key))
    keys = session.scalars(select(Segment.key).where(asked, newest(Segment), Segment.state.not_in(OPEN_STATES))).all()
    drop_unread_saves(session, SegmentSave.segment_key.in_(keys))
    last = select(func.max(SegmentSave.step)).where(SegmentSave.segment_key == Segment.key, missing_save())
    last_step = last.correlate(Segment).scalar_subquery()
    session.execute(
        update(Segment)
        .where(asked, Segment.state.in_(OPEN_STATES), Segment.target_step < last_step)
        .values(target_step=last_step)
        .execution_options(synchronize_session=False)
    )
    columns = [getattr(Segment, name) for name in _OF_A_SEGMENT]
    rows = select(Segment.generation + 1, last_step, *columns).where(Segment.key.in_(keys), newest(Segment))
    session.execute(
        insert(Segment).from_select(["generation", "target_step", *_OF_A_SEGMENT], rows.order_by(Segment.id))
    )
    return len(keys)


def _needed(grid_id: uuid.UUID) -> Subquery:
    """Checkpoints that do not exist and that the grid's open evaluations read, or its open segments begin with."""
    evaluation_claim, segment_claim = aliased(GridEvaluation), aliased(GridSegment)
    read = (
        select(EvaluationSource.segment_key, EvaluationSource.step)
        .join(Evaluation, Evaluation.key == EvaluationSource.evaluation_key)
        .join(evaluation_claim, evaluation_claim.evaluation_key == Evaluation.key)
        .where(evaluation_claim.grid_id == grid_id, Evaluation.state.in_(OPEN_STATES))
    )
    begins = (segment_claim.grid_id == grid_id, Segment.state.in_(OPEN_STATES), Segment.parent_key.is_not(None))
    begun = (
        select(Segment.parent_key, Segment.parent_step)
        .join(segment_claim, segment_claim.segment_key == Segment.key)
        .where(*begins)
    )
    merged = (
        select(SegmentSource.source_key, SegmentSource.step)
        .join(Segment, Segment.key == SegmentSource.segment_key)
        .join(segment_claim, segment_claim.segment_key == Segment.key)
        .where(*begins)
    )
    wanted = union(read, begun, merged).subquery()
    there: ColumnElement[bool] = exists().where(
        Checkpoint.segment_key == wanted.c.segment_key, Checkpoint.step == wanted.c.step
    )
    return select(wanted.c.segment_key, wanted.c.step).where(~there).subquery()
