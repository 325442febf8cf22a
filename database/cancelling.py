"""Withdrawing a grid's claims: what nobody asks for any more stops, the rest goes on, checkpoints stay.

Rows are locked in the order of `database.attempts`, attempt before work, so that a report that comes in meanwhile is
either recorded before the claims are withdrawn, or changes nothing.
"""

from __future__ import annotations

import uuid
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, case, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from database.claims import drop_unread_saves, lacks_a_save, missing_save, open_evaluations, open_segments
from database.models import (
    OPEN_STATES,
    Attempt,
    Checkpoint,
    Evaluation,
    GridEvaluation,
    GridSegment,
    Segment,
    SegmentSave,
)
from database.progress import newest

_REASON = "cancelled: no grid asks for it any more"


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """What stopped with a grid's claims, and what of it goes on because other grids ask for it too.

    `attempts` were running; they are superseded. `tokens_saved` will not be trained.
    """

    segments: int
    segments_kept: int
    evaluations: int
    evaluations_kept: int
    attempts: int
    tokens_saved: int


def hold_work(session: Session, grid_id: uuid.UUID) -> None:
    """Keeps all open work that a grid claims, and its attempts, as they are until the transaction ends.

    Call it while claims are held: an attempt that ends while we wait for it cannot be followed by another.
    """
    segments, evaluations = open_segments(grid_id), open_evaluations(grid_id)
    session.execute(
        select(Attempt.id)
        .where(
            Attempt.state == "RUNNING", or_(Attempt.segment_id.in_(segments), Attempt.evaluation_id.in_(evaluations))
        )
        .order_by(Attempt.id)
        .with_for_update()
    )
    session.execute(segments.order_by(Segment.id).with_for_update(of=Segment))
    session.execute(evaluations.order_by(Evaluation.id).with_for_update(of=Evaluation))


def withdraw_claims(session: Session, grid_id: uuid.UUID) -> Withdrawn:
    """Closes a grid's claims on all that is not done, and stops what nobody else asks for.

    Checkpoints that only this grid asked for are no longer scheduled, and the targets of segments that go on shrink to
    what is left; an attempt on its way beyond that ends at its next checkpoint (`attempts.to_stop`). Call it in the
    transaction of `hold_work`.
    """
    reached = _reached_steps(session, grid_id)
    tokens_before = _tokens_left(session, grid_id, reached)
    _close_claims(session, grid_id)
    evaluations = _stop_evaluations(session, grid_id)
    segments = _stop_segments(session, grid_id)
    attempts = _supersede_attempts(session, grid_id)
    _shrink_targets(session, grid_id)
    return Withdrawn(
        segments=segments,
        segments_kept=_count(session, open_segments(grid_id, closed_as="CANCELLED")),
        evaluations=evaluations,
        evaluations_kept=_count(session, open_evaluations(grid_id, closed_as="CANCELLED")),
        attempts=attempts,
        tokens_saved=tokens_before - _tokens_left(session, grid_id, reached),
    )


def _count(session: Session, rows: Select[int]) -> int:
    return session.scalar(select(func.count()).select_from(rows.subquery())) or 0


def _among_its_segments(grid_id: uuid.UUID) -> ColumnElement[bool]:
    return Segment.key.in_(select(GridSegment.segment_key).where(GridSegment.grid_id == grid_id))


def _close_claims(session: Session, grid_id: uuid.UUID) -> None:
    """What is measured, or trained as far as the grid asked, stays so; the rest is what it is now, for this grid."""
    session.execute(
        update(GridEvaluation)
        .where(
            GridEvaluation.grid_id == grid_id,
            Evaluation.key == GridEvaluation.evaluation_key,
            newest(Evaluation),
            Evaluation.state != "SUCCEEDED",
        )
        .values(closed_as=case((Evaluation.state == "FAILED", "FAILED"), else_="CANCELLED"))
        .execution_options(synchronize_session=False)
    )
    lacking = exists().where(
        SegmentSave.segment_key == GridSegment.segment_key, SegmentSave.step <= GridSegment.target_step, missing_save()
    )
    session.execute(
        update(GridSegment)
        .where(GridSegment.grid_id == grid_id, Segment.key == GridSegment.segment_key, newest(Segment), lacking)
        .values(closed_as=case((Segment.state == "FAILED", "FAILED"), else_="CANCELLED"))
        .execution_options(synchronize_session=False)
    )


def _stop_evaluations(session: Session, grid_id: uuid.UUID) -> int:
    other = aliased(GridEvaluation)
    claimed = exists().where(other.evaluation_key == Evaluation.key, other.closed_as.is_(None))
    stopped = session.scalars(
        update(Evaluation)
        .where(Evaluation.id.in_(open_evaluations(grid_id, closed_as="CANCELLED")), ~claimed)
        .values(state="CANCELLED", reason=_REASON, not_before=None, ended_at=func.now())
        .returning(Evaluation.id)
        .execution_options(synchronize_session=False)
    )
    return len(stopped.all())


def _stop_segments(session: Session, grid_id: uuid.UUID) -> int:
    """Children before their parents: with each segment that stops, the checkpoint that it begins with may be unread.

    One that lacked nothing before is about to end by itself.
    """
    mine = _among_its_segments(grid_id)
    ending = session.scalars(select(Segment.id).where(mine, Segment.state.in_(OPEN_STATES), ~lacks_a_save())).all()
    claims = select(GridSegment.segment_key).where(GridSegment.grid_id == grid_id)
    stopped = 0
    while True:
        drop_unread_saves(session, SegmentSave.segment_key.in_(claims))
        found = session.scalars(
            update(Segment)
            .where(mine, Segment.state.in_(OPEN_STATES), Segment.id.not_in(ending), ~lacks_a_save())
            .values(state="CANCELLED", reason=_REASON, not_before=None, ended_at=func.now())
            .returning(Segment.id)
            .execution_options(synchronize_session=False)
        ).all()
        if not found:
            return stopped
        stopped += len(found)


def _supersede_attempts(session: Session, grid_id: uuid.UUID) -> int:
    """Ends attempts at what was stopped, and those whose whole stretch nobody asks for: their segments wait again."""
    ended = {"state": "STOPPED", "reason": _REASON, "ended_at": func.now()}
    claims = select(GridEvaluation.evaluation_key).where(GridEvaluation.grid_id == grid_id)
    of_stopped = or_(
        Attempt.segment_id.in_(select(Segment.id).where(_among_its_segments(grid_id), Segment.state == "CANCELLED")),
        Attempt.evaluation_id.in_(
            select(Evaluation.id).where(Evaluation.key.in_(claims), Evaluation.state == "CANCELLED")
        ),
    )
    stopped = session.scalars(
        update(Attempt)
        .where(Attempt.state == "RUNNING", of_stopped)
        .values(ended)
        .returning(Attempt.id)
        .execution_options(synchronize_session=False)
    ).all()
    in_its_stretch = exists().where(
        SegmentSave.segment_key == Segment.key,
        SegmentSave.step > Attempt.start_step,
        SegmentSave.step <= Attempt.target_step,
        missing_save(),
    )
    idle = session.scalars(
        update(Attempt)
        .where(
            Attempt.state == "RUNNING",
            Segment.id == Attempt.segment_id,
            _among_its_segments(grid_id),
            lacks_a_save(),
            ~in_its_stretch,
        )
        .values(ended)
        .returning(Attempt.segment_id)
        .execution_options(synchronize_session=False)
    ).all()
    session.execute(
        update(Segment)
        .where(Segment.id.in_(idle), Segment.state == "RUNNING")
        .values(state="READY", reason=None)
        .execution_options(synchronize_session=False)
    )
    return len(stopped) + len(idle)


def _shrink_targets(session: Session, grid_id: uuid.UUID) -> None:
    last = select(func.max(SegmentSave.step)).where(SegmentSave.segment_key == Segment.key)
    last_step = last.correlate(Segment).scalar_subquery()
    session.execute(
        update(Segment)
        .where(_among_its_segments(grid_id), Segment.state.in_(OPEN_STATES), Segment.target_step > last_step)
        .values(target_step=last_step)
        .execution_options(synchronize_session=False)
    )


def _reached_steps(session: Session, grid_id: uuid.UUID) -> dict[str, list[int]]:
    """By segment: steps that training can go on from, those of live attempts included; ascending."""
    mine = _among_its_segments(grid_id)
    durable = (
        select(Checkpoint.segment_key, Checkpoint.step)
        .join(Segment, Segment.key == Checkpoint.segment_key)
        .where(mine, Segment.state.in_(OPEN_STATES))
    )
    live = (
        select(Segment.key, Attempt.progress_step)
        .join(Attempt, Attempt.segment_id == Segment.id)
        .where(mine, Attempt.state == "RUNNING", Attempt.progress_step.is_not(None))
    )
    steps: dict[str, list[int]] = defaultdict(list)
    for key, step in [*session.execute(durable), *session.execute(live)]:
        insort(steps[key], step)
    return steps


def _tokens_left(session: Session, grid_id: uuid.UUID, reached: dict[str, list[int]]) -> int:
    """Tokens to train until no open segment of the grid lacks a scheduled checkpoint, whoever asks for it."""
    missing = (
        select(Segment.key, Segment.tokens_per_step, SegmentSave.step)
        .join(SegmentSave, SegmentSave.segment_key == Segment.key)
        .where(_among_its_segments(grid_id), Segment.state.in_(OPEN_STATES), missing_save())
        .order_by(Segment.key, SegmentSave.step)
    )
    tokens = 0
    trained: dict[str, int] = {}
    for key, tokens_per_step, step in session.execute(missing):
        there = reached.get(key, [])
        before = bisect_left(there, step)
        start = max(there[before - 1] if before else 0, trained.get(key, 0))
        tokens += (step - start) * tokens_per_step
        trained[key] = step
    return tokens
