"""What may run next: PENDING work becomes READY (or fails with its parent), READY work is claimed with a fencing token.

A claim takes a row that no other scheduler holds (`FOR UPDATE SKIP LOCKED`), opens an attempt and is committed by the
caller before any work starts. What the attempt brings back is recorded by `database.attempts`.
"""

from __future__ import annotations

import datetime as dt
import functools
import uuid
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, and_, exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from database.claims import evaluation_held, may_begin, missing_save, save_held, segment_held
from database.events import record_event
from database.models import (
    OPEN_STATES,
    Attempt,
    Checkpoint,
    Evaluation,
    EvaluationSource,
    Evaluator,
    Segment,
    SegmentSave,
    SegmentSource,
)
from database.specs import evaluator_from_json, execution_from_json, rule_from_json, segment_from_json
from workers.probe_spec import ProbeRun, ProbeSet
from workers.spec import CheckpointRef, EvaluationRun, LongStage, SegmentRun, Snapshot, StoredCheckpoint

_TOO_FEW_WORKERS_WAIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedSegment:
    """A stretch of a segment to train; every write about it must carry `token`."""

    token: uuid.UUID
    key: str
    scale: str
    run: SegmentRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """The next segment needs so many workers, and fewer are free."""

    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedEvaluation:
    """A snapshot to measure; every write about it must carry `token`."""

    token: uuid.UUID
    key: str
    scale: str
    run: EvaluationRun | ProbeRun


def promote(session: Session, *, segment_key: str | None = None) -> int:
    """Makes PENDING work READY whose checkpoints are all there; returns how many rows.

    Args:
        segment_key: look only at what waits for checkpoints of this segment.
    """
    segments = select(Segment.id).where(Segment.state == "PENDING", or_(Segment.parent_key.is_(None), _start_there()))
    evaluations = select(Evaluation.id).where(Evaluation.state == "PENDING", ~_missing_source())
    if segment_key is not None:
        segments = segments.where(Segment.parent_key == segment_key)
        reads = exists().where(
            EvaluationSource.evaluation_key == Evaluation.key, EvaluationSource.segment_key == segment_key
        )
        evaluations = evaluations.where(reads)
    # A row that a submission holds is left for the next call: waiting for several rows at once invites a deadlock.
    ready = session.scalars(
        update(Segment)
        .where(Segment.id.in_(segments.with_for_update(skip_locked=True, of=Segment)))
        .values(state="READY")
        .returning(Segment.id)
    ).all()
    measurable = session.scalars(
        update(Evaluation)
        .where(Evaluation.id.in_(evaluations.with_for_update(skip_locked=True, of=Evaluation)))
        .values(state="READY")
        .returning(Evaluation.id)
    ).all()
    return len(ready) + len(measurable)


def fail_orphans(session: Session) -> int:
    """Fails PENDING work that nothing open will ever unblock, with the reason of what failed before it.

    Returns how many rows; a chain of segments fails link by link within this one call.
    """
    failed = 0
    while count := _fail_orphaned_segments(session):
        failed += count
    return failed + _fail_orphaned_evaluations(session)


def claim_segment(
    session: Session,
    *,
    scheduler_id: uuid.UUID,
    worker: str,
    lease_s: float,
    free_workers: int = 1,
    alive_workers: int = 1,
) -> ClaimedSegment | Gathering | None:
    """Claims the READY segment that the longest chain of training hangs on, or None if none is ready and wanted.

    The run is the next contiguous stretch: from the nearest checkpoint before the first missing save, through the
    missing saves, up to the next checkpoint that exists already, and no further than grids ask that are not paused. A
    segment that lacks nothing is closed in passing.
    One that asks for more processes than workers are alive waits, with the reason, and is looked at again; one that
    asks for more than are free now is worth waiting for: nothing shorter may take its workers, or it would never run.
    While a grid is being told something nothing is claimed.
    """
    if not may_begin(session):
        return None
    while (row := session.scalar(_next_segment())) is not None:
        run = _segment_run(session, row)
        if run is None:
            close_segment(session, row)
            continue
        processes = run.execution.processes
        if processes > alive_workers:
            row.reason = (
                f"it asks for {processes} processes and the scheduler has {alive_workers} live workers: raise"
                " LONGLAW_WORKERS, see in its log why workers die, or lower execution.processes"
            )
            row.not_before = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, _TOO_FEW_WORKERS_WAIT_S)
            session.flush()
            continue
        if processes > free_workers:
            return Gathering(processes=processes)
        row.state, row.reason, row.not_before = "RUNNING", None, None
        start_step = run.start.ref.step if run.start is not None and run.start.ref.segment == row.key else 0
        token = _open_attempt(
            session,
            segment_id=row.id,
            scheduler_id=scheduler_id,
            worker=worker,
            lease_s=lease_s,
            start_step=start_step,
            target_step=run.save_steps[-1],
        )
        return ClaimedSegment(token=token, key=row.key, scale=row.scale, run=run)
    return None


def claim_evaluation(
    session: Session, *, scheduler_id: uuid.UUID, worker: str, lease_s: float
) -> ClaimedEvaluation | None:
    """Claims the oldest READY evaluation that a grid asks for which is not paused, or None if there is none.

    The first evaluation of an evaluator computes its key tokens for all others: until one has succeeded, one runs at a
    time.
    """
    row = session.scalar(_next_evaluation()) if may_begin(session) else None
    if row is None:
        return None
    segment = session.scalars(
        select(Segment).where(Segment.key == row.segment_key).order_by(Segment.generation.desc()).limit(1)
    ).one()
    spec = segment_from_json(segment.spec)
    snapshot = Snapshot(segment=row.segment_key, step=row.step, rule=rule_from_json(row.rule))
    sources = _sources(session, row.key)
    evaluator = evaluator_from_json(session.get_one(Evaluator, row.evaluator_id).spec)
    stage = spec.stage
    yarn = stage.yarn if isinstance(stage, LongStage) else None
    run: EvaluationRun | ProbeRun
    if isinstance(evaluator, ProbeSet):
        run = ProbeRun(
            snapshot=snapshot,
            sources=sources,
            probe_set=evaluator,
            shape=spec.shape,
            rope_base=stage.rope_base,
            yarn=yarn,
        )
    else:
        run = EvaluationRun(
            snapshot=snapshot,
            sources=sources,
            evaluator=evaluator,
            shape=spec.shape,
            rope_base=stage.rope_base,
            yarn=yarn,
        )
    row.state, row.reason, row.not_before = "RUNNING", None, None
    token = _open_attempt(session, evaluation_id=row.id, scheduler_id=scheduler_id, worker=worker, lease_s=lease_s)
    return ClaimedEvaluation(token=token, key=row.key, scale=row.scale, run=run)


def missing_saves(session: Session, segment_key: str) -> tuple[int, ...]:
    """Scheduled checkpoints of the segment that nobody has trained yet, ascending."""
    statement = select(SegmentSave.step).where(SegmentSave.segment_key == segment_key, missing_save())
    return tuple(session.scalars(statement.order_by(SegmentSave.step)))


def close_segment(session: Session, row: Segment) -> None:
    """Marks a segment that lacks no save SUCCEEDED."""
    row.state, row.reason, row.not_before, row.ended_at = "SUCCEEDED", None, None, func.now()
    record_event(session, "segment_succeeded", row.key, scale=row.scale, generation=row.generation)


def _due(not_before: ColumnElement[dt.datetime | None]) -> ColumnElement[bool]:
    return or_(not_before.is_(None), not_before <= func.now())


@functools.cache  # it always reads the same, and a scheduler asks several times a second
def _next_segment() -> Select[Segment]:
    return (
        select(Segment)
        .where(Segment.state == "READY", _due(Segment.not_before.expression), ~segment_held())
        .order_by(Segment.priority.desc(), Segment.id)
        .limit(1)
        .with_for_update(skip_locked=True)
    )


@functools.cache
def _next_evaluation() -> Select[Evaluation]:
    other = aliased(Evaluation)
    same_evaluator = other.evaluator_id == Evaluation.evaluator_id
    keys_known = exists().where(same_evaluator, other.state == "SUCCEEDED")
    keys_under_way = exists().where(same_evaluator, other.state == "RUNNING")
    return (
        select(Evaluation)
        .where(Evaluation.state == "READY", _due(Evaluation.not_before.expression), ~evaluation_held())
        .where(or_(keys_known, ~keys_under_way))
        .order_by(Evaluation.id)
        .limit(1)
        .with_for_update(skip_locked=True, of=Evaluation)
    )


def _segment_run(session: Session, row: Segment) -> SegmentRun | None:
    missing = missing_saves(session, row.key)
    if not missing:
        return None
    mine = Checkpoint.segment_key == row.key
    before = session.scalar(select(func.max(Checkpoint.step)).where(mine, Checkpoint.step < missing[0]))
    after = session.scalar(select(func.min(Checkpoint.step)).where(mine, Checkpoint.step > missing[0]))
    wanted = select(func.max(SegmentSave.step)).where(SegmentSave.segment_key == row.key, missing_save(), ~save_held())
    last = session.scalar(wanted)
    assert last is not None  # else the segment is held
    segment = segment_from_json(row.spec)
    start: StoredCheckpoint | None = None
    start_sources: tuple[StoredCheckpoint, ...] = ()
    if before is not None:
        start = _stored(session, CheckpointRef(segment=row.key, step=before))
    elif segment.start_sources:
        start_sources = tuple(_stored(session, source) for source in segment.start_sources)
    elif segment.parent is not None:
        start = _stored(session, segment.parent)
    return SegmentRun(
        segment=segment,
        start=start,
        save_steps=tuple(step for step in missing if step <= last and (after is None or step < after)),
        start_sources=start_sources,
        execution=execution_from_json(row.execution),
    )


def _stored(session: Session, ref: CheckpointRef) -> StoredCheckpoint:
    row = session.scalars(
        select(Checkpoint).where(Checkpoint.segment_key == ref.segment, Checkpoint.step == ref.step)
    ).one()
    return StoredCheckpoint(ref=ref, path=row.path, digest=row.digest)


def _sources(session: Session, evaluation_key: str) -> tuple[StoredCheckpoint, ...]:
    statement = (
        select(EvaluationSource)
        .where(EvaluationSource.evaluation_key == evaluation_key)
        .order_by(EvaluationSource.segment_key, EvaluationSource.step)
    )
    return tuple(
        _stored(session, CheckpointRef(segment=source.segment_key, step=source.step))
        for source in session.scalars(statement)
    )


def _open_attempt(
    session: Session,
    *,
    scheduler_id: uuid.UUID,
    worker: str,
    lease_s: float,
    segment_id: int | None = None,
    evaluation_id: int | None = None,
    start_step: int | None = None,
    target_step: int | None = None,
) -> uuid.UUID:
    subject = Attempt.segment_id == segment_id if segment_id is not None else Attempt.evaluation_id == evaluation_id
    number = session.scalar(select(func.coalesce(func.max(Attempt.number), 0) + 1).where(subject))
    token = uuid.uuid4()
    session.add(
        Attempt(
            segment_id=segment_id,
            evaluation_id=evaluation_id,
            number=number,
            token=token,
            scheduler_id=scheduler_id,
            worker=worker,
            start_step=start_step,
            target_step=target_step,
            lease_expires_at=func.now() + func.make_interval(0, 0, 0, 0, 0, 0, lease_s),
        )
    )
    session.flush()
    return token


def _start_there() -> ColumnElement[bool]:
    """Whether the checkpoint that a segment begins with exists, and all others of the rule where it begins with one."""
    parent = exists().where(Checkpoint.segment_key == Segment.parent_key, Checkpoint.step == Segment.parent_step)
    there = exists().where(Checkpoint.segment_key == SegmentSource.source_key, Checkpoint.step == SegmentSource.step)
    return and_(parent, ~exists().where(SegmentSource.segment_key == Segment.key, ~there))


def _missing_source(*, abandoned: bool = False) -> ColumnElement[bool]:
    """Whether an evaluation lacks a checkpoint; `abandoned`: one that no open segment will bring."""
    there = exists().where(
        Checkpoint.segment_key == EvaluationSource.segment_key, Checkpoint.step == EvaluationSource.step
    )
    missing = exists().where(EvaluationSource.evaluation_key == Evaluation.key, ~there)
    coming = exists().where(Segment.key == EvaluationSource.segment_key, Segment.state.in_(OPEN_STATES))
    return missing.where(~coming) if abandoned else missing


def _fail_orphaned_segments(session: Session) -> int:
    parent = aliased(Segment)
    parent_open = exists().where(parent.key == Segment.parent_key, parent.state.in_(OPEN_STATES))
    orphans = session.scalars(
        select(Segment)
        .where(Segment.state == "PENDING", Segment.parent_key.is_not(None), ~_start_there(), ~parent_open)
        .with_for_update(of=Segment, skip_locked=True)
    ).all()
    for row in orphans:
        assert row.parent_key is not None
        reason = _parent_failed(session, row.parent_key)  # before the row is touched: a query would flush half of it
        row.state, row.reason, row.ended_at = "FAILED", reason, func.now()
        record_event(session, "segment_failed", row.key, scale=row.scale, reason=reason)
    session.flush()
    return len(orphans)


def _fail_orphaned_evaluations(session: Session) -> int:
    orphans = session.scalars(
        select(Evaluation)
        .where(Evaluation.state == "PENDING", _missing_source(abandoned=True))
        .with_for_update(of=Evaluation, skip_locked=True)
    ).all()
    for row in orphans:
        reason = _parent_failed(session, row.segment_key)
        row.state, row.reason, row.ended_at = "FAILED", reason, func.now()
        record_event(session, "evaluation_failed", row.key, scale=row.scale, reason=reason)
    session.flush()
    return len(orphans)


def _parent_failed(session: Session, key: str) -> str:
    parent = session.scalar(select(Segment).where(Segment.key == key).order_by(Segment.generation.desc()).limit(1))
    if parent is None:
        return "parent failed: it was never planned"
    reason = parent.reason or f"it ended {parent.state} without the checkpoint"
    return reason if reason.startswith("parent failed: ") else f"parent failed: {reason}"
