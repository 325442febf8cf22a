"""Which checkpoints nothing needs any more, and which no row names.

Kept for ever: the newest of each segment (it can be extended from there), those that a segment branches from, those
that an evaluation reads which has not succeeded, and where a run has just begun. What goes can come back: a grid that
asks for it trains it again, from the nearest checkpoint before it, to the same last bit.
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import and_, delete, exists, select, tuple_
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
