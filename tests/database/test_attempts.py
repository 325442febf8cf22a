"""What attempts bring back: recorded once, fenced by tokens, each failure at the right expense."""

from __future__ import annotations

import datetime as dt
import uuid

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from database.attempts import (
    Failure,
    RetryPolicy,
    fail_attempt,
    finish_segment,
    lose_attempts,
    prune_recovery,
    record_checkpoint,
    record_evaluation,
    renew,
    stop_attempt,
)
from database.models import Attempt, Checkpoint, Evaluation, Event, Observation, Segment
from database.work import ClaimedEvaluation, ClaimedSegment
from tests.database.work_rows import (
    checkpoint_of,
    evaluation_result,
    next_evaluation,
    next_segment,
    run_all,
    scheduler_row,
    segment_row,
    submitted,
    train,
)
from workers.results import TrainProgress

KILLED = Failure(kind="infrastructure", reason="worker-1 died", lost=True)
RAISED = Failure(kind="user", reason="KeyError: 'x'")
AT_ONCE = RetryPolicy(user_retries=1, infrastructure_retries=3, backoff_s=0.0)


def _trunk(engine: Engine, scheduler_id: uuid.UUID | None = None, *, lease_s: float = 60.0) -> ClaimedSegment:
    claim = next_segment(engine, scheduler_id or scheduler_row(engine), lease_s=lease_s)
    assert claim is not None
    return claim


def _evaluation(engine: Engine, scheduler_id: uuid.UUID) -> ClaimedEvaluation:
    """The first claimable evaluation, all segments trained."""
    while (segment := next_segment(engine, scheduler_id)) is not None:
        train(engine, segment)
    claim = next_evaluation(engine, scheduler_id)
    assert claim is not None
    return claim


def _fail(engine: Engine, token: uuid.UUID, failure: Failure, policy: RetryPolicy = AT_ONCE) -> bool:
    with Session(engine) as session, session.begin():
        return fail_attempt(session, token, failure, policy=policy)


def _lose(engine: Engine, scheduler_id: uuid.UUID, *held: uuid.UUID, dead: tuple[uuid.UUID, ...] = ()) -> int:
    with Session(engine) as session, session.begin():
        return lose_attempts(session, scheduler_id=scheduler_id, held=held, dead=dead)


def _events(engine: Engine, kind: str) -> list[Event]:
    with Session(engine) as session:
        return list(session.scalars(select(Event).where(Event.kind == kind).order_by(Event.id)))


def test_same_checkpoint_twice_is_one_row(engine: Engine) -> None:
    submitted(engine)
    trunk = _trunk(engine)
    for _ in range(2):
        with Session(engine) as session, session.begin():
            assert record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24))
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Checkpoint)) == 1
    assert _events(engine, "checkpoint_conflict") == []


def test_another_digest_for_a_checkpoint_is_an_event_and_changes_nothing(engine: Engine) -> None:
    submitted(engine)
    trunk = _trunk(engine)
    with Session(engine) as session, session.begin():
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24, digest="a"))
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24, digest="b"))
    with Session(engine) as session:
        assert session.scalars(select(Checkpoint.digest)).one() == "a"
    (event,) = _events(engine, "checkpoint_conflict")
    assert event.payload == {"step": 24, "recorded": "a", "repeated": "b"}


def test_checkpoint_of_another_segment_is_refused(engine: Engine) -> None:
    submitted(engine, widths=(16, 32))
    scheduler = scheduler_row(engine)
    first, second = _trunk(engine, scheduler), _trunk(engine, scheduler)
    with Session(engine) as session, pytest.raises(ValueError, match=second.key):
        record_checkpoint(session, first.token, checkpoint_of(second, 24))


def test_late_writes_of_a_superseded_attempt_touch_nothing(engine: Engine) -> None:
    """A partitioned worker comes back after its work was given to another one."""
    submitted(engine)
    scheduler = scheduler_row(engine)
    old = _trunk(engine, scheduler)
    assert _lose(engine, scheduler) == 1
    new = _trunk(engine, scheduler)
    assert new.key == old.key
    with Session(engine) as session, session.begin():
        assert not record_checkpoint(session, old.token, checkpoint_of(old, 24))
        assert not finish_segment(session, old.token)
        assert not fail_attempt(session, old.token, RAISED, policy=AT_ONCE)
        assert not stop_attempt(session, old.token)
        assert not renew(session, old.token, lease_s=60.0)
        assert session.scalar(select(func.count()).select_from(Checkpoint)) == 0
    row = segment_row(engine, old.key)
    assert (row.state, row.user_failures, row.infrastructure_failures) == ("RUNNING", 0, 0)
    with Session(engine) as session:
        states = session.execute(select(Attempt.number, Attempt.state).order_by(Attempt.number)).all()
    assert [tuple(state) for state in states] == [(1, "LOST"), (2, "RUNNING")]


def test_late_measurement_with_another_value_is_a_recorded_conflict(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    old = _evaluation(engine, scheduler)
    assert _lose(engine, scheduler) == 1
    new = _evaluation(engine, scheduler)
    assert new.key == old.key
    with Session(engine) as session, session.begin():
        assert record_evaluation(session, new.token, evaluation_result(2.0))
        assert not record_evaluation(session, old.token, evaluation_result(2.0))
        assert not record_evaluation(session, old.token, evaluation_result(3.0))
    with Session(engine) as session:
        assert session.scalars(select(Evaluation.log_longppl).where(Evaluation.state == "SUCCEEDED")).one() == 2.0
    (event,) = _events(engine, "evaluation_conflict")
    assert (event.subject, event.payload) == (new.key, {"recorded": 2.0, "repeated": 3.0})


def test_measurement_makes_one_observation_with_its_documents(engine: Engine) -> None:
    submitted(engine, long_steps=(8,))
    claim = _evaluation(engine, scheduler_row(engine))
    with Session(engine) as session, session.begin():
        assert record_evaluation(session, claim.token, evaluation_result(2.0))
    with Session(engine) as session:
        row = session.scalars(select(Evaluation)).one()
        observation = session.scalars(select(Observation)).one()
    assert row.documents is not None
    assert row.documents[0]["key_sum"] == 2.0
    assert (observation.y, observation.source) == (2.0, "run")
    assert observation.evaluation_key == claim.key
    assert (observation.short_tokens, observation.long_tokens) == (27 * 64, 8 * 64)


def test_measurement_without_key_tokens_is_no_observation(engine: Engine) -> None:
    submitted(engine, long_steps=(8,))
    claim = _evaluation(engine, scheduler_row(engine))
    with Session(engine) as session, session.begin():
        assert record_evaluation(session, claim.token, evaluation_result(None))
    with Session(engine) as session:
        row = session.scalars(select(Evaluation)).one()
        assert session.scalar(select(func.count()).select_from(Observation)) == 0
    assert (row.state, row.log_longppl, row.reason) == ("SUCCEEDED", None, "no key token")


def test_worker_killed_each_time_ends_after_its_budget(engine: Engine) -> None:
    """B78: three retries are four attempts, then FAILED with the reason; the user's budget is untouched."""
    submitted(engine)
    scheduler = scheduler_row(engine)
    for number in range(1, 5):
        trunk = _trunk(engine, scheduler)
        if number == 1:
            with Session(engine) as session, session.begin():
                record_checkpoint(session, trunk.token, checkpoint_of(trunk, 20, scheduled=False))
        else:
            assert trunk.run.start is not None
            assert trunk.run.start.ref.step == 20
        assert _fail(engine, trunk.token, KILLED)
    row = segment_row(engine, trunk.key)
    assert (row.state, row.reason) == ("FAILED", "worker-1 died (4 tries)")
    assert (row.user_failures, row.infrastructure_failures) == (0, 4)
    with Session(engine) as session:
        assert session.scalar(select(func.count()).where(Attempt.state == "LOST")) == 4


def test_new_checkpoint_sets_infrastructure_failures_back(engine: Engine) -> None:
    """A long segment outlives any number of lost machines, as long as each attempt gets further."""
    submitted(engine)
    scheduler = scheduler_row(engine)
    for step in range(1, 9):
        trunk = _trunk(engine, scheduler)
        with Session(engine) as session, session.begin():
            record_checkpoint(session, trunk.token, checkpoint_of(trunk, step, scheduled=False))
        assert _fail(engine, trunk.token, KILLED)
    row = segment_row(engine, trunk.key)
    assert (row.state, row.infrastructure_failures) == ("READY", 1)


def test_budgets_are_separate(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    for failure in (KILLED, KILLED, RAISED, KILLED):
        trunk = _trunk(engine, scheduler)
        assert _fail(engine, trunk.token, failure)
    row = segment_row(engine, trunk.key)
    assert (row.state, row.user_failures, row.infrastructure_failures) == ("READY", 1, 3)
    trunk = _trunk(engine, scheduler)
    assert _fail(engine, trunk.token, RAISED)
    row = segment_row(engine, trunk.key)
    assert (row.state, row.reason) == ("FAILED", "KeyError: 'x' (2 tries)")


def test_failed_work_backs_off_with_a_reason(engine: Engine) -> None:
    """B29: a full disk waits for at least a minute and says why."""
    submitted(engine)
    scheduler = scheduler_row(engine)
    trunk = _trunk(engine, scheduler)
    full = Failure(kind="infrastructure", reason="no space left in the store", min_backoff_s=60.0)
    assert _fail(engine, trunk.token, full, RetryPolicy(backoff_s=1.0))
    row = segment_row(engine, trunk.key)
    with Session(engine) as session:
        now = session.scalar(select(func.now()))
    assert now is not None
    assert row.not_before is not None
    assert (row.state, row.reason) == ("READY", "no space left in the store")
    assert dt.timedelta(seconds=30) < row.not_before - now <= dt.timedelta(seconds=60)
    assert next_segment(engine, scheduler) is None


def test_stopped_attempt_consumes_no_retry(engine: Engine) -> None:
    submitted(engine)
    trunk = _trunk(engine)
    with Session(engine) as session, session.begin():
        assert stop_attempt(session, trunk.token)
    row = segment_row(engine, trunk.key)
    assert (row.state, row.user_failures, row.infrastructure_failures, row.not_before) == ("READY", 0, 0, None)


def test_attempt_that_fails_after_its_last_checkpoint_has_done_its_work(engine: Engine) -> None:
    submitted(engine)
    trunk = _trunk(engine)
    with Session(engine) as session, session.begin():
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24))
    assert _fail(engine, trunk.token, KILLED)
    row = segment_row(engine, trunk.key)
    assert (row.state, row.reason) == ("SUCCEEDED", None)


def test_attempts_of_dead_schedulers_are_lost_at_once_and_at_no_expense(engine: Engine) -> None:
    submitted(engine)
    old, new = scheduler_row(engine), scheduler_row(engine)
    trunk = _trunk(engine, old)
    assert _lose(engine, new) == 0  # its lease runs: it may be alive
    assert _lose(engine, new, dead=(old,)) == 1
    row = segment_row(engine, trunk.key)
    assert (row.state, row.user_failures, row.infrastructure_failures) == ("READY", 0, 0)


def test_expired_lease_of_another_scheduler_is_lost(engine: Engine) -> None:
    submitted(engine)
    _trunk(engine, scheduler_row(engine), lease_s=0.0)
    assert _lose(engine, scheduler_row(engine)) == 1


def test_renewed_lease_is_kept_with_its_progress(engine: Engine) -> None:
    submitted(engine)
    trunk = _trunk(engine, scheduler_row(engine), lease_s=0.0)
    progress = TrainProgress(step=7, stage_tokens=448, loss=3.5, learning_rate=0.01, tokens_per_s=100.0)
    with Session(engine) as session, session.begin():
        assert renew(session, trunk.token, lease_s=60.0, progress=progress)
    assert _lose(engine, scheduler_row(engine)) == 0
    with Session(engine) as session:
        row = session.scalars(select(Attempt)).one()
    assert (row.progress_step, row.loss, row.tokens_per_s) == (7, 3.5, 100.0)


def test_own_attempt_that_is_not_held_is_lost(engine: Engine) -> None:
    """The claim was committed, its answer got lost: nobody works on it."""
    submitted(engine, widths=(16, 32))
    scheduler = scheduler_row(engine)
    held, forgotten = _trunk(engine, scheduler), _trunk(engine, scheduler)
    assert _lose(engine, scheduler, held.token) == 1
    assert segment_row(engine, held.key).state == "RUNNING"
    assert segment_row(engine, forgotten.key).state == "READY"


def test_recovery_checkpoints_are_forgotten_once_replaced(engine: Engine) -> None:
    submitted(engine, short_steps=(27, 180))
    trunk = _trunk(engine)
    with Session(engine) as session, session.begin():
        for step, scheduled in ((20, False), (24, True), (40, False), (60, False)):
            record_checkpoint(session, trunk.token, checkpoint_of(trunk, step, scheduled=scheduled))
        pruned = prune_recovery(session, trunk.key, before_step=60)
        assert sorted(pruned) == sorted(checkpoint_of(trunk, step).path for step in (20, 40))
        steps = session.scalars(select(Checkpoint.step).order_by(Checkpoint.step)).all()
    assert steps == [24, 60]


def test_recovery_checkpoint_that_a_grid_asked_for_meanwhile_stays(engine: Engine) -> None:
    submitted(engine, long_steps=(16,))
    scheduler = scheduler_row(engine)
    for _ in range(2):
        before = next_segment(engine, scheduler)
        assert before is not None
        train(engine, before)
    claim = next_segment(engine, scheduler)
    assert claim is not None
    submitted(engine, name="more", long_steps=(8, 16))
    with Session(engine) as session, session.begin():
        record_checkpoint(session, claim.token, checkpoint_of(claim, 8, scheduled=False))
        record_checkpoint(session, claim.token, checkpoint_of(claim, 16))
        assert prune_recovery(session, claim.key, before_step=16) == ()


def test_withdrawn_work_is_left_alone_by_its_attempt(engine: Engine) -> None:
    """CANCELLED is final: neither a checkpoint, nor a failure, nor the end of the attempt opens it again."""
    submitted(engine)
    trunk = _trunk(engine)
    with Session(engine) as session, session.begin():
        row = session.scalars(select(Segment).where(Segment.key == trunk.key)).one()
        row.state, row.ended_at = "CANCELLED", func.now()
    with Session(engine) as session, session.begin():
        assert record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24))
        assert stop_attempt(session, trunk.token)
    assert segment_row(engine, trunk.key).state == "CANCELLED"


def test_every_change_leaves_an_event(engine: Engine) -> None:
    submitted(engine, long_steps=(8,))
    run_all(engine, scheduler_row(engine))
    with Session(engine) as session:
        kinds = list(session.scalars(select(Event.kind).order_by(Event.id)))
    assert kinds == [
        "grid_submitted",
        *("checkpoint_recorded", "segment_succeeded") * 3,
        "evaluation_succeeded",
    ]
