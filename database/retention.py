"""Which checkpoints nothing needs any more, which are lost, and which no row names.

Kept for ever: the newest of each segment (it can be extended from there), those that a segment branches from, those
that an evaluation reads which has not succeeded, and where a run has just begun. What goes can come back: a grid that
asks for it trains it again, from the nearest checkpoint before it, to the same last bit.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection

from sqlalchemy import and_, delete, exists, or_, select, tuple_, update
from sqlalchemy.orm import Session, aliased

from database.events import record_event
from database.models import (
    OPEN_STATES,
    Attempt,
    Checkpoint,
    Evaluation,
    EvaluationSource,
    Segment,
    SegmentSave,
    SegmentSource,
)
from database.submission import hold_submissions
from database.work import fail_orphans
from workers.spec import CheckpointRef

#: Checkpoints given up in one transaction: submissions wait for it.
_AT_ONCE = 200


def give_up_unneeded(session: Session) -> tuple[str, ...]:
    """Forgets scheduled checkpoints whose measurements are done; returns their paths, to delete once committed."""
    hold_submissions(session)
    later = aliased(Checkpoint)
    measured = exists().where(Evaluation.key == EvaluationSource.evaluation_key, Evaluation.state == "SUCCEEDED")
    reads = and_(EvaluationSource.segment_key == Checkpoint.segment_key, EvaluationSource.step == Checkpoint.step)
    branches = and_(Segment.parent_key == Checkpoint.segment_key, Segment.parent_step == Checkpoint.step)
    begins = and_(SegmentSource.source_key == Checkpoint.segment_key, SegmentSource.step == Checkpoint.step)
    starts_there = and_(
        Attempt.state == "RUNNING",
        Attempt.start_step == Checkpoint.step,
        Attempt.segment_id == Segment.id,
        Segment.key == Checkpoint.segment_key,
    )
    unneeded = (
        select(Checkpoint.id)
        .where(
            Checkpoint.scheduled,
            exists().where(later.segment_key == Checkpoint.segment_key, later.step > Checkpoint.step),
            exists().where(reads),
            ~exists().where(reads, ~measured),
            ~exists().where(branches),
            ~exists().where(begins),
            ~exists().where(starts_there),
        )
        .order_by(Checkpoint.id)
        .limit(_AT_ONCE)
    )
    gone = session.execute(
        delete(Checkpoint)
        .where(Checkpoint.id.in_(unneeded))
        .returning(Checkpoint.segment_key, Checkpoint.step, Checkpoint.path, Checkpoint.digest)
    ).all()
    if gone:
        places = [(key, step) for key, step, _, _ in gone]
        session.execute(delete(SegmentSave).where(tuple_(SegmentSave.segment_key, SegmentSave.step).in_(places)))
    for key, step, _, digest in gone:
        record_event(session, "checkpoint_given_up", key, step=step, digest=digest)
    return tuple(path for _, _, path, _ in gone)


def forget_unreadable(session: Session, ref: CheckpointRef, *, token: uuid.UUID) -> bool:
    """Forgets a checkpoint that is gone or damaged, once work that needs it has FAILED for want of it; else nothing.

    What else waits to read it, or to begin there, fails with it. Asked for again (`verbs.obey`, a new grid), it is
    trained again from the nearest checkpoint before it, to the same last bit.

    Args:
        token: the attempt that could not read it.
    """
    hold_submissions(session)
    evaluation_failed = exists().where(Evaluation.id == Attempt.evaluation_id, Evaluation.state == "FAILED")
    segment_failed = exists().where(Segment.id == Attempt.segment_id, Segment.state == "FAILED")
    if session.scalar(select(Attempt.id).where(Attempt.token == token, or_(evaluation_failed, segment_failed))) is None:
        return False
    gone = delete(Checkpoint).where(Checkpoint.segment_key == ref.segment, Checkpoint.step == ref.step)
    digest = session.scalar(gone.returning(Checkpoint.digest))
    if digest is None:
        return False
    record_event(session, "checkpoint_lost", ref.segment, step=ref.step, digest=digest)
    reads = exists().where(
        EvaluationSource.evaluation_key == Evaluation.key,
        EvaluationSource.segment_key == ref.segment,
        EvaluationSource.step == ref.step,
    )
    branches = and_(Segment.parent_key == ref.segment, Segment.parent_step == ref.step)
    begins = exists().where(
        SegmentSource.segment_key == Segment.key,
        SegmentSource.source_key == ref.segment,
        SegmentSource.step == ref.step,
    )
    has_begun = exists().where(Checkpoint.segment_key == Segment.key)
    for table, condition in ((Evaluation, reads), (Segment, and_(or_(branches, begins), ~has_begun))):
        waits = update(table).where(table.state == "READY", condition).values(state="PENDING", not_before=None)
        session.execute(waits.execution_options(synchronize_session=False))
    fail_orphans(session)
    return True


def unrecorded(session: Session, segment_key: str, steps: Collection[int]) -> tuple[int, ...]:
    """Those of `steps`, of checkpoints that lie in the store, that no row names and that may be removed until the
    transaction ends. An attempt that was killed before they were recorded left them.

    None at all if an attempt is at the segment: the next thing it does may be to record one of them. The segment stays
    locked, so that none begins.
    """
    is_open = select(Segment.id).where(Segment.key == segment_key, Segment.state.in_(OPEN_STATES)).with_for_update()
    at_work = exists().where(Attempt.state == "RUNNING", Attempt.segment_id == Segment.id, Segment.key == segment_key)
    if session.scalar(is_open) is None or session.scalar(select(at_work)):
        return ()
    named = set(session.scalars(select(Checkpoint.step).where(Checkpoint.segment_key == segment_key)))
    left = tuple(sorted(set(steps) - named))
    for step in left:
        record_event(session, "unrecorded_checkpoint_removed", segment_key, step=step)
    return left
