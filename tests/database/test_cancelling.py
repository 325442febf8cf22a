"""A cancelled grid stops, what others ask for goes on, whoever does what at the same time."""

from __future__ import annotations

import threading
from collections import Counter

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from database.attempts import (
    RetryPolicy,
    fail_attempt,
    finish_segment,
    hold_attempts,
    lose_attempts,
    record_checkpoint,
    record_evaluation,
    renew,
    stop_attempt,
    to_stop,
)
from database.errors import VerbNotAllowedError
from database.models import Attempt, Checkpoint, Evaluation, Observation, Segment
from database.reading import grid_standing, list_observations
from database.reading_cells import list_cells
from database.verbs import Obeyed
from database.work import fail_orphans, promote
from tests.database.verb_rows import (
    HOPELESS,
    asked,
    cells_of,
    long_stage,
    missing_steps,
    record,
    state_of,
    states,
    together,
    told_to_stop,
)
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


def test_cancelled_grid_leaves_nothing_to_do(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    done = asked(engine, grid_id, "cancel")
    assert (done.counts.segments, done.counts.evaluations, done.counts.attempts) == (3, 2, 0)
    assert done.counts.tokens_saved == (27 + 16) * 64
    assert states(engine, Segment) == {"CANCELLED": 3}
    assert states(engine, Evaluation) == {"CANCELLED": 2}
    assert (state_of(engine, grid_id), cells_of(engine, grid_id)) == ("CANCELLED", {"CANCELLED": 2})
    assert run_all(engine, scheduler_row(engine)) == ([], [])


def test_running_attempt_is_superseded_and_its_late_reports_change_nothing(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    assert record(engine, long, 8)
    evaluation = next_evaluation(engine, scheduler)
    assert evaluation is not None
    done = asked(engine, grid_id, "cancel")
    assert (done.counts.segments, done.counts.evaluations, done.counts.attempts) == (1, 2, 2)
    assert done.counts.tokens_saved == 8 * 64
    with Session(engine) as session, session.begin():
        assert not renew(session, long.token, lease_s=60.0)  # the scheduler stops the worker
        assert not record_checkpoint(session, long.token, checkpoint_of(long, 16))
        assert not finish_segment(session, long.token)
        assert not stop_attempt(session, long.token)
        assert not fail_attempt(session, long.token, HOPELESS, policy=RetryPolicy())
        assert not record_evaluation(session, evaluation.token, evaluation_result())
        assert lose_attempts(session, scheduler_id=scheduler, held=()) == 0
        assert promote(session) + fail_orphans(session) == 0
        assert list(session.scalars(select(Checkpoint.step).where(Checkpoint.segment_key == long.key))) == [8]
        assert session.scalar(select(func.count()).select_from(Observation)) == 0
        assert Counter(session.scalars(select(Attempt.state))) == {"SUCCEEDED": 2, "STOPPED": 2}
    assert states(engine, Segment) == {"SUCCEEDED": 2, "CANCELLED": 1}
    assert run_all(engine, scheduler_row(engine)) == ([], [])


def test_measured_cells_stay_measured(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    record(engine, long, 8)
    evaluation = next_evaluation(engine, scheduler)
    assert evaluation is not None
    with Session(engine) as session, session.begin():
        record_evaluation(session, evaluation.token, evaluation_result())
    assert asked(engine, grid_id, "cancel").counts.cells_measured == 1
    assert cells_of(engine, grid_id) == {"MEASURED": 1, "CANCELLED": 1}
    with Session(engine) as session:
        measured, cancelled = list_cells(session, grid_id, after=None, limit=10)
        assert (measured.why, cancelled.why) == (None, "the grid was cancelled")
        assert [cell.evaluations[0].log_longppl for cell in (measured, cancelled)] == [2.0, None]
        standing = grid_standing(session, grid_id)
        assert standing is not None
        assert (standing.grid.state, standing.verbs, standing.progress.waiting) == ("CANCELLED", (), ())
        assert standing.progress.failures == ()


def test_segment_that_lacks_nothing_any_more_ends_by_itself(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    long = long_stage(engine, scheduler_row(engine))
    record(engine, long, 8)
    record(engine, long, 16)
    done = asked(engine, grid_id, "cancel").counts
    assert (done.segments, done.segments_kept, done.evaluations, done.attempts, done.tokens_saved) == (0, 0, 2, 0, 0)
    with Session(engine) as session, session.begin():
        assert finish_segment(session, long.token)
    assert states(engine, Segment) == {"SUCCEEDED": 3}


def test_same_grid_again_opens_new_generations_that_go_on_from_the_old_checkpoints(engine: Engine) -> None:
    first = submitted(engine).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    record(engine, long, 8)
    with Session(engine) as session, session.begin():
        record_checkpoint(session, long.token, checkpoint_of(long, 12, scheduled=False))
    asked(engine, first, "cancel")
    again = submitted(engine, name="again")
    assert again.plan.tokens_train == 4 * 64
    segments, evaluations = run_all(engine, scheduler)
    ((start, save_steps),) = [(claim.run.start, claim.run.save_steps) for claim in segments]
    assert start is not None
    assert (start.ref.step, save_steps, len(evaluations)) == (12, (16,), 2)
    assert segment_row(engine, long.key).generation == 2
    assert (state_of(engine, first), cells_of(engine, first)) == ("CANCELLED", {"CANCELLED": 2})
    assert (state_of(engine, again.grid_id), cells_of(engine, again.grid_id)) == ("SUCCEEDED", {"MEASURED": 2})


def test_what_another_grid_asks_for_goes_on_and_only_that(engine: Engine) -> None:
    """The longer grid shares trunk, decay and the long stage; its own checkpoints go with it, the target shrinks."""
    shorter = submitted(engine, long_steps=(8, 16)).grid_id
    longer = submitted(engine, name="longer", long_steps=(4, 8, 32)).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    assert long.run.save_steps == (4, 8, 16, 32)
    done = asked(engine, longer, "cancel").counts
    assert (done.segments, done.segments_kept, done.attempts) == (0, 1, 0)
    assert (done.evaluations, done.evaluations_kept, done.tokens_saved) == (2, 1, 16 * 64)
    assert missing_steps(engine, long.key) == [8, 16]
    assert segment_row(engine, long.key).target_step == 16
    assert told_to_stop(engine, scheduler) == (long.token,)  # it is on its way to 32
    assert record(engine, long, 8)
    with Session(engine) as session, session.begin():
        assert stop_attempt(session, long.token, reason="no longer asked for")
    segments, evaluations = run_all(engine, scheduler)
    assert [(claim.run.start and claim.run.start.ref.step, claim.run.save_steps) for claim in segments] == [(8, (16,))]
    assert len(evaluations) == 2
    assert (state_of(engine, shorter), cells_of(engine, shorter)) == ("SUCCEEDED", {"MEASURED": 2})
    assert (state_of(engine, longer), cells_of(engine, longer)) == ("CANCELLED", {"CANCELLED": 3})
    with Session(engine) as session:
        rows = {id: list_observations(session, grid_id=id, after=None, limit=10) for id in (shorter, longer)}
    assert [len(rows[id]) for id in (shorter, longer)] == [2, 0]


def test_cancelling_the_shorter_grid_takes_its_own_checkpoints_alone(engine: Engine) -> None:
    shorter = submitted(engine, long_steps=(8, 16)).grid_id
    longer = submitted(engine, name="longer", long_steps=(4, 8, 32)).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    done = asked(engine, shorter, "cancel").counts
    assert (done.segments, done.evaluations, done.tokens_saved) == (0, 1, 0)  # all of the way is needed
    assert missing_steps(engine, long.key) == [4, 8, 32]
    assert told_to_stop(engine, scheduler) == ()
    train(engine, long)
    run_all(engine, scheduler)
    assert cells_of(engine, longer) == {"MEASURED": 3}
    assert cells_of(engine, shorter) == {"CANCELLED": 2}


def test_attempt_whose_whole_stretch_nobody_asks_for_ends_at_once(engine: Engine) -> None:
    """A grid between the checkpoints of another: the other's stretch, further on, is next."""
    submitted(engine, long_steps=(8, 16))
    scheduler = scheduler_row(engine)
    run_all(engine, scheduler)
    denser = submitted(engine, name="denser", long_steps=(4,)).grid_id
    longer = submitted(engine, name="longer", long_steps=(32,)).grid_id
    claim = next_segment(engine, scheduler)
    assert claim is not None
    assert claim.run.save_steps == (4,)
    done = asked(engine, denser, "cancel").counts
    assert (done.segments, done.segments_kept, done.attempts, done.tokens_saved) == (0, 1, 1, 4 * 64)
    assert not record(engine, claim, 4)
    (next_claim,), _ = run_all(engine, scheduler)
    assert next_claim.run.start is not None
    assert (next_claim.run.start.ref.step, next_claim.run.save_steps) == (16, (32,))
    assert cells_of(engine, longer) == {"MEASURED": 1}


def test_last_grid_to_go_stops_what_both_shared(engine: Engine) -> None:
    first, second = submitted(engine).grid_id, submitted(engine, name="second").grid_id
    trunk = next_segment(engine, scheduler_row(engine))
    assert trunk is not None
    kept = asked(engine, first, "cancel").counts
    assert (kept.segments, kept.segments_kept, kept.evaluations, kept.evaluations_kept) == (0, 3, 0, 2)
    assert (kept.attempts, kept.tokens_saved) == (0, 0)
    with Session(engine) as session, session.begin():
        assert renew(session, trunk.token, lease_s=60.0)
        standing = grid_standing(session, first)
        assert standing is not None
        assert standing.progress.attempts == ()  # it runs, but not for this grid
    stopped = asked(engine, second, "cancel").counts
    assert (stopped.segments, stopped.evaluations, stopped.attempts) == (3, 2, 1)
    assert states(engine, Segment) == {"CANCELLED": 3}


def test_failed_cells_of_a_cancelled_grid_stay_failed_when_another_grid_retries(engine: Engine) -> None:
    first = submitted(engine).grid_id
    second = submitted(engine, name="second").grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    record(engine, long, 8)
    evaluation = next_evaluation(engine, scheduler)
    assert evaluation is not None
    with Session(engine) as session, session.begin():
        fail_attempt(session, evaluation.token, HOPELESS, policy=RetryPolicy())
    asked(engine, first, "cancel")
    assert cells_of(engine, first) == {"FAILED": 1, "CANCELLED": 1}
    assert asked(engine, second, "retry-failed").counts.evaluations == 1
    assert cells_of(engine, first) == {"FAILED": 1, "CANCELLED": 1}
    train(engine, long)
    run_all(engine, scheduler)
    assert cells_of(engine, second) == {"MEASURED": 2}
    assert (state_of(engine, first), cells_of(engine, first)) == ("CANCELLED", {"FAILED": 1, "CANCELLED": 1})


def test_cancel_and_the_last_measurement_agree_on_who_was_first(engine: Engine) -> None:
    """Either the grid was done and cannot be cancelled, or it is cancelled and the measurement changes nothing."""
    scheduler = scheduler_row(engine)
    outcomes = set()
    for number in range(6):
        grid_id = submitted(engine, name=f"grid {number}", long_steps=(8 + number,)).grid_id
        while (segment := next_segment(engine, scheduler)) is not None:
            train(engine, segment)
        evaluation = next_evaluation(engine, scheduler)
        assert evaluation is not None
        token = evaluation.token

        def measure() -> bool:
            with Session(engine) as session, session.begin():
                return record_evaluation(session, token, evaluation_result())  # noqa: B023

        acts = (measure, lambda: asked(engine, grid_id, "cancel"))  # noqa: B023
        results = together(*(acts if number % 2 else reversed(acts)))
        recorded, cancelled = results if number % 2 else reversed(results)
        if recorded:
            assert recorded is True
            assert isinstance(cancelled, VerbNotAllowedError)
            assert (state_of(engine, grid_id), cells_of(engine, grid_id)) == ("SUCCEEDED", {"MEASURED": 1})
        else:
            assert isinstance(cancelled, Obeyed)
            assert (state_of(engine, grid_id), cells_of(engine, grid_id)) == ("CANCELLED", {"CANCELLED": 1})
        outcomes.add(recorded)
    with Session(engine) as session:
        assert session.scalar(select(func.count()).where(Attempt.state == "RUNNING")) == 0
    assert outcomes <= {True, False}


def test_a_scheduler_at_work_and_a_cancel_never_wait_for_each_other_in_a_circle(engine: Engine) -> None:
    """Claims, reports and losses go on while grids that share all of their work are cancelled one after the other."""
    grids = [
        submitted(engine, name=f"grid {n}", widths=(16, 32), short_steps=(27, 180), long_steps=(8, 16 + n)).grid_id
        for n in range(6)
    ]
    scheduler = scheduler_row(engine)
    over = threading.Event()

    def schedule() -> int:
        turns = 0
        while not over.is_set():
            claims = [claim for _ in range(2) if (claim := next_segment(engine, scheduler)) is not None]
            tokens = tuple(claim.token for claim in reversed(claims))
            with Session(engine) as session, session.begin():
                hold_attempts(session, tokens)
                for token in tokens:
                    renew(session, token, lease_s=60.0)
            with Session(engine) as session, session.begin():
                lose_attempts(session, scheduler_id=scheduler, held=tokens)
                to_stop(session, scheduler_id=scheduler)
            for claim in claims:
                for step in claim.run.save_steps:
                    record(engine, claim, step)
                with Session(engine) as session, session.begin():
                    finish_segment(session, claim.token)
            with Session(engine) as session, session.begin():
                promote(session)
                fail_orphans(session)
            if (evaluation := next_evaluation(engine, scheduler)) is not None:
                with Session(engine) as session, session.begin():
                    record_evaluation(session, evaluation.token, evaluation_result())
            turns += 1
        return turns

    def cancel() -> list[Obeyed | VerbNotAllowedError]:
        done: list[Obeyed | VerbNotAllowedError] = []
        try:
            for grid_id in grids:
                try:
                    done.append(asked(engine, grid_id, "cancel"))
                except VerbNotAllowedError as error:  # it was measured already
                    done.append(error)
        finally:
            over.set()
        return done

    turns, cancelled = together(schedule, cancel)
    assert isinstance(turns, int), turns
    assert isinstance(cancelled, list), cancelled
    for grid_id in grids:
        counts = cells_of(engine, grid_id)
        assert sum(counts.values()) == 8
        assert state_of(engine, grid_id) in ("CANCELLED", "SUCCEEDED")
    with Session(engine) as session:
        open_rows = select(func.count()).where(Segment.state.in_(("PENDING", "READY", "RUNNING")))
        assert session.scalar(open_rows) == 0
        assert session.scalar(select(func.count()).where(Attempt.state == "RUNNING")) == 0
