"""Which checkpoints nothing needs any more.

Kept for ever: the newest of each segment (it can be extended from there), those that a segment branches from, those
that an evaluation reads which has not succeeded, and where a run has just begun. What goes can come back: a grid that
asks for it trains it again, from the nearest checkpoint before it, to the same last bit.
"""

from __future__ import annotations

from sqlalchemy import and_, delete, exists, select, tuple_
from sqlalchemy.orm import Session, aliased

from database.events import record_event
from database.models import Attempt, Checkpoint, Evaluation, EvaluationSource, Segment, SegmentSave, SegmentSource
from database.submission import hold_submissions

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
