"""What an attempt brings back. Its token fences every write: once superseded or over, it changes nothing.

Rows are locked in one order, attempts by their ids and before their work, and each function is one short transaction of
its caller.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import and_, delete, exists, func, literal, or_, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from database.claims import segment_held
from database.events import record_event
from database.measures import record_metrics, record_points
from database.models import Attempt, Checkpoint, Evaluation, Segment, SegmentSave
from database.observations import record_observations
from database.work import close_segment, fail_orphans, missing_saves, promote
from workers import results

FailureKind = Literal["user", "infrastructure"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Budgets of one piece of work. The back-off doubles with each failure of its kind, from `backoff_s` up.

    Infrastructure failures count in a row: a new checkpoint sets them back to none.
    """

    user_retries: int = 1
    infrastructure_retries: int = 5
    backoff_s: float = 1.0
    max_backoff_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended badly.

    Attributes:
        kind: whose budget it consumes.
        reason: for people, with the fix where there is one.
        hopeless: another try would fail in the same way, so none is made.
        lost: the process vanished, rather than saying what went wrong.
        min_backoff_s: wait at least this long before the next try.
    """

    kind: FailureKind
    reason: str
    hopeless: bool = False
    lost: bool = False
    min_backoff_s: float = 0.0


def renew(session: Session, token: uuid.UUID, *, lease_s: float, progress: results.TrainProgress | None = None) -> bool:
    """Extends the lease and notes how far the attempt is; False if it was superseded or its work was withdrawn."""
    statement = update(Attempt).where(Attempt.token == token, Attempt.state == "RUNNING")
    statement = statement.values(lease_expires_at=func.now() + func.make_interval(0, 0, 0, 0, 0, 0, lease_s))
    if progress is not None:
        statement = statement.values(
            progress_step=progress.step, loss=progress.loss, tokens_per_s=progress.tokens_per_s
        )
    return session.scalar(statement.returning(Attempt.id)) is not None


def hold_attempts(session: Session, tokens: Collection[uuid.UUID]) -> None:
    """Locks attempts in the order in which everybody does; for whoever changes several in one transaction."""
    session.execute(select(Attempt.id).where(Attempt.token.in_(tokens)).order_by(Attempt.id).with_for_update())


def record_checkpoint(session: Session, token: uuid.UUID, checkpoint: results.Checkpoint) -> bool:
    """Records a checkpoint that lies in the store and makes READY what waited for it; False if superseded.

    The same checkpoint twice is one row. Another digest for it is kept as an event and changes nothing. One that the
    attempt made for recovery is a scheduled one if a grid has asked for its step since the attempt began.
    """
    attempt = _live(session, token)
    if attempt is None:
        return False
    row = session.get_one(Segment, attempt.segment_id, with_for_update=True)
    if checkpoint.ref.segment != row.key:
        raise ValueError(f"attempt {token} trains segment {row.key}, not {checkpoint.ref.segment}")
    asked_for = exists().where(SegmentSave.segment_key == row.key, SegmentSave.step == checkpoint.ref.step)
    inserted = session.scalar(
        insert(Checkpoint)
        .values(
            segment_key=row.key,
            step=checkpoint.ref.step,
            stage_tokens=checkpoint.stage_tokens,
            path=checkpoint.path,
            digest=checkpoint.digest,
            size_bytes=checkpoint.size_bytes,
            scheduled=or_(literal(checkpoint.scheduled), asked_for),
            mean_loss=checkpoint.mean_loss,
            attempt_id=attempt.id,
        )
        .on_conflict_do_nothing(index_elements=["segment_key", "step"])
        .returning(Checkpoint.id)
    )
    if inserted is None:
        _note_conflicting_checkpoint(session, checkpoint)
        return True
    record_points(session, row.key, checkpoint.health)
    attempt.progress_step = checkpoint.ref.step
    if row.state == "RUNNING":
        row.infrastructure_failures = 0
    record_event(session, "checkpoint_recorded", row.key, scale=row.scale, step=checkpoint.ref.step)
    session.flush()
    promote(session, segment_key=row.key)
    return True


def prune_recovery(session: Session, segment_key: str, *, before_step: int) -> tuple[str, ...]:
    """Forgets recovery checkpoints that a later one has replaced; returns their paths, to delete once committed."""
    statement = delete(Checkpoint).where(
        Checkpoint.segment_key == segment_key, Checkpoint.step < before_step, ~Checkpoint.scheduled
    )
    return tuple(session.scalars(statement.returning(Checkpoint.path)))


def finish_segment(session: Session, token: uuid.UUID) -> bool:
    """Ends an attempt that trained its whole stretch; False if superseded.

    The segment has SUCCEEDED when no save is missing, else its next stretch is READY.
    """
    attempt = _live(session, token)
    if attempt is None:
        return False
    attempt.state, attempt.ended_at = "SUCCEEDED", func.now()
    row = session.get_one(Segment, attempt.segment_id, with_for_update=True)
    if row.state == "RUNNING":
        _reopen_segment(session, row)
    return True


def record_evaluation(session: Session, token: uuid.UUID, evaluation: results.Evaluation) -> bool:
    """Records a measurement and the observations that it makes; False if superseded.

    A superseded attempt that measured something else than what is recorded leaves an event and changes nothing.
    """
    attempt = _live(session, token)
    if attempt is None:
        _note_conflicting_evaluation(session, token, evaluation)
        return False
    attempt.state, attempt.ended_at = "SUCCEEDED", func.now()
    row = session.get_one(Evaluation, attempt.evaluation_id, with_for_update=True)
    if row.state != "RUNNING":
        return False
    row.state, row.reason, row.ended_at = "SUCCEEDED", evaluation.reason, func.now()
    row.log_longppl, row.log_longppl_se = evaluation.log_longppl, evaluation.log_longppl_se
    row.log_shortppl, row.log_shortppl_se = evaluation.log_shortppl, evaluation.log_shortppl_se
    row.log_ppl, row.log_ppl_se = evaluation.log_ppl, evaluation.log_ppl_se
    row.key_gap = evaluation.key_gap
    row.key_count, row.short_count, row.all_count = evaluation.key_count, evaluation.short_count, evaluation.all_count
    row.documents = [asdict(document) for document in evaluation.documents]
    record_metrics(session, row.id, evaluation.metrics)
    record_event(session, "evaluation_succeeded", row.key, scale=row.scale, log_longppl=evaluation.log_longppl)
    session.flush()
    record_observations(session, evaluation_key=row.key)
    return True


def fail_attempt(session: Session, token: uuid.UUID, failure: Failure, *, policy: RetryPolicy) -> bool:
    """Ends an attempt that failed; False if superseded.

    Its work backs off and is tried again, or FAILED for good, with all that waits for it, when the budget of this kind
    of failure is used up. The other kind's budget is not touched.
    """
    attempt = _live(session, token)
    if attempt is None:
        return False
    attempt.state, attempt.ended_at = "LOST" if failure.lost else "FAILED", func.now()
    attempt.failure_kind, attempt.reason = failure.kind, failure.reason
    row = _work(session, attempt)
    record_event(session, "attempt_failed", row.key, number=attempt.number, kind=failure.kind, reason=failure.reason)
    if row.state != "RUNNING":
        return True
    if failure.kind == "user":
        row.user_failures += 1
        count, retries = row.user_failures, policy.user_retries
    else:
        row.infrastructure_failures += 1
        count, retries = row.infrastructure_failures, policy.infrastructure_retries
    if failure.hopeless or count > retries:
        tries = "" if failure.hopeless else f" ({count} tries)"
        row.state, row.reason, row.ended_at = "FAILED", f"{failure.reason}{tries}", func.now()
        kind = "segment_failed" if isinstance(row, Segment) else "evaluation_failed"
        record_event(session, kind, row.key, scale=row.scale, reason=row.reason)
        session.flush()
        fail_orphans(session)
    else:
        wait_s = max(failure.min_backoff_s, min(policy.max_backoff_s, policy.backoff_s * 2.0 ** (count - 1)))
        _reopen(session, row)
        if row.state == "READY":
            row.reason = failure.reason
            row.not_before = func.now() + func.make_interval(0, 0, 0, 0, 0, 0, wait_s)
    return True


def to_stop(session: Session, *, scheduler_id: uuid.UUID) -> tuple[uuid.UUID, ...]:
    """Tokens of a scheduler's attempts that are to end at their next checkpoint.

    Those are attempts at segments that only paused grids ask for now, and those on their way to a checkpoint that was
    asked for when they began and is not any more.
    """
    last = exists().where(SegmentSave.segment_key == Segment.key, SegmentSave.step == Attempt.target_step)
    statement = (
        select(Attempt.token)
        .join(Segment, Segment.id == Attempt.segment_id)
        .where(Attempt.scheduler_id == scheduler_id, Attempt.state == "RUNNING", or_(~last, segment_held()))
    )
    return tuple(session.scalars(statement))


def stop_attempt(session: Session, token: uuid.UUID, *, reason: str = "the scheduler stopped") -> bool:
    """Ends an attempt that was asked to stop. Its work is READY again and no retry is consumed; False if superseded."""
    attempt = _live(session, token)
    if attempt is None:
        return False
    attempt.state, attempt.reason, attempt.ended_at = "STOPPED", reason, func.now()
    row = _work(session, attempt)
    if row.state == "RUNNING":
        _reopen(session, row)
    return True


def lose_attempts(
    session: Session, *, scheduler_id: uuid.UUID, held: tuple[uuid.UUID, ...], dead: tuple[uuid.UUID, ...] = ()
) -> int:
    """Ends attempts that nobody works on and makes their work READY again at once; returns how many.

    Those are the attempts of `dead` schedulers, attempts of another scheduler whose lease ran out, and our own that we
    do not hold (the claim was committed, the answer got lost). No budget is consumed: nothing was
    learned about the work.
    """
    mine = Attempt.scheduler_id == scheduler_id
    statement = (
        select(Attempt)
        .where(
            Attempt.state == "RUNNING",
            or_(
                and_(mine, Attempt.token.not_in(held)),
                and_(~mine, Attempt.scheduler_id.in_(dead)),
                and_(~mine, Attempt.lease_expires_at < func.now()),
            ),
        )
        .order_by(Attempt.id)
        .with_for_update()
    )
    attempts = session.scalars(statement).all()
    for attempt in attempts:
        attempt.state, attempt.failure_kind, attempt.ended_at = "LOST", "infrastructure", func.now()
        attempt.reason = "its scheduler is gone"
        row = _work(session, attempt)
        if row.state == "RUNNING":
            _reopen(session, row)
        record_event(session, "attempt_lost", row.key, number=attempt.number, reason=attempt.reason)
    session.flush()
    return len(attempts)


def _live(session: Session, token: uuid.UUID) -> Attempt | None:
    statement = select(Attempt).where(Attempt.token == token, Attempt.state == "RUNNING").with_for_update()
    return session.scalar(statement)


def _work(session: Session, attempt: Attempt) -> Segment | Evaluation:
    if attempt.segment_id is not None:
        return session.get_one(Segment, attempt.segment_id, with_for_update=True)
    return session.get_one(Evaluation, attempt.evaluation_id, with_for_update=True)


def _reopen(session: Session, row: Segment | Evaluation) -> None:
    if isinstance(row, Segment):
        _reopen_segment(session, row)
    else:
        row.state, row.reason = "READY", None


def _reopen_segment(session: Session, row: Segment) -> None:
    if missing_saves(session, row.key):
        row.state, row.reason = "READY", None
    else:
        close_segment(session, row)


def _note_conflicting_checkpoint(session: Session, checkpoint: results.Checkpoint) -> None:
    key = checkpoint.ref.segment
    recorded = session.scalar(
        select(Checkpoint.digest).where(Checkpoint.segment_key == key, Checkpoint.step == checkpoint.ref.step)
    )
    if recorded != checkpoint.digest:
        record_event(
            session,
            "checkpoint_conflict",
            key,
            step=checkpoint.ref.step,
            recorded=recorded,
            repeated=checkpoint.digest,
        )


def _note_conflicting_evaluation(session: Session, token: uuid.UUID, evaluation: results.Evaluation) -> None:
    key = session.scalar(
        select(Evaluation.key).join(Attempt, Attempt.evaluation_id == Evaluation.id).where(Attempt.token == token)
    )
    recorded = session.scalar(select(Evaluation).where(Evaluation.key == key, Evaluation.state == "SUCCEEDED"))
    if recorded is not None and recorded.log_longppl != evaluation.log_longppl:
        record_event(
            session,
            "evaluation_conflict",
            recorded.key,
            recorded=recorded.log_longppl,
            repeated=evaluation.log_longppl,
        )
