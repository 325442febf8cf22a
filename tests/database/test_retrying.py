"""What failed is opened again, for the grid that asks and for nobody else."""

from __future__ import annotations

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from database.attempts import RetryPolicy, fail_attempt, record_checkpoint
from database.models import Grid
from database.reading import grid_standing
from tests.database.verb_rows import HOPELESS, asked, cells_of, long_stage, missing_steps, state_of
from tests.database.work_rows import checkpoint_of, next_segment, run_all, scheduler_row, segment_row, submitted


def test_retry_opens_what_failed_and_what_was_orphaned_with_fresh_budgets(engine: Engine) -> None:
    grid = submitted(engine)
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    with Session(engine) as session, session.begin():
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 12, scheduled=False))
        fail_attempt(session, trunk.token, HOPELESS, policy=RetryPolicy())
    assert (state_of(engine, grid.grid_id), cells_of(engine, grid.grid_id)) == ("FAILED", {"FAILED": 2})
    done = asked(engine, grid.grid_id, "retry-failed")
    assert (done.counts.segments, done.counts.evaluations) == (3, 2)
    assert cells_of(engine, grid.grid_id) == {"PENDING": 2}
    again = asked(engine, grid.grid_id, "retry-failed")
    assert (again.repeated, again.counts, again.at) == (True, done.counts, done.at)
    row = segment_row(engine, trunk.key)
    assert (row.generation, row.state, row.user_failures, row.target_step) == (2, "PENDING", 0, 24)
    segments, evaluations = run_all(engine, scheduler)
    assert segments[0].run.start is not None
    assert (segments[0].run.start.ref.step, len(segments), len(evaluations)) == (12, 3, 2)
    assert (state_of(engine, grid.grid_id), cells_of(engine, grid.grid_id)) == ("SUCCEEDED", {"MEASURED": 2})
    with Session(engine) as session:
        assert session.get_one(Grid, grid.grid_id).tokens_train == grid.plan.tokens_train  # the price is what it was


def test_retry_trains_what_its_own_grid_lacks_and_nothing_for_others(engine: Engine) -> None:
    """A shared long stage fails for two grids; the one that does not retry is left alone."""
    shorter = submitted(engine, long_steps=(16,)).grid_id
    longer = submitted(engine, name="longer", long_steps=(4, 32)).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    with Session(engine) as session, session.begin():
        fail_attempt(session, long.token, HOPELESS, policy=RetryPolicy())
    asked(engine, shorter, "retry-failed")
    assert missing_steps(engine, long.key) == [16]
    segments, _ = run_all(engine, scheduler)
    assert [claim.run.save_steps for claim in segments] == [(16,)]
    assert cells_of(engine, longer) == {"FAILED": 2}
    asked(engine, longer, "retry-failed")
    assert missing_steps(engine, long.key) == [4, 32]
    run_all(engine, scheduler)
    assert cells_of(engine, longer) == {"MEASURED": 2}
    assert cells_of(engine, shorter) == {"MEASURED": 1}


def test_new_claim_on_what_failed_trains_nothing_that_only_failed_grids_asked_for(engine: Engine) -> None:
    submitted(engine, long_steps=(8, 32))
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    with Session(engine) as session, session.begin():
        fail_attempt(session, long.token, HOPELESS, policy=RetryPolicy())
    submitted(engine, name="shorter", long_steps=(8,))
    segments, _ = run_all(engine, scheduler)
    assert [claim.run.save_steps for claim in segments] == [(8,)]


def test_retry_asks_again_of_a_segment_that_others_opened_without_its_checkpoints(engine: Engine) -> None:
    longer = submitted(engine, long_steps=(8, 32)).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    with Session(engine) as session, session.begin():
        fail_attempt(session, long.token, HOPELESS, policy=RetryPolicy())
    submitted(engine, name="shorter", long_steps=(8,))
    assert segment_row(engine, long.key).target_step == 8
    done = asked(engine, longer, "retry-failed").counts
    assert (done.segments, done.evaluations) == (0, 1)  # the other grid opened the rest
    assert segment_row(engine, long.key).target_step == 32
    run_all(engine, scheduler)
    assert cells_of(engine, longer) == {"MEASURED": 2}


def test_retry_of_a_paused_grid_waits_with_it(engine: Engine) -> None:
    grid_id = submitted(engine, short_steps=(27, 180)).grid_id
    scheduler = scheduler_row(engine)
    long = long_stage(engine, scheduler)
    with Session(engine) as session, session.begin():
        fail_attempt(session, long.token, HOPELESS, policy=RetryPolicy())
    asked(engine, grid_id, "pause")
    asked(engine, grid_id, "retry-failed")
    assert next_segment(engine, scheduler) is None
    asked(engine, grid_id, "resume")
    run_all(engine, scheduler)
    assert cells_of(engine, grid_id) == {"MEASURED": 4}


def test_pause_of_a_grid_that_has_ended_since_does_not_hold_its_retry(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    asked(engine, grid_id, "pause")
    with Session(engine) as session, session.begin():
        fail_attempt(session, trunk.token, HOPELESS, policy=RetryPolicy())
        standing = grid_standing(session, grid_id)
        assert standing is not None
        assert (standing.grid.state, standing.grid.paused_at) == ("FAILED", None)
    asked(engine, grid_id, "retry-failed")
    run_all(engine, scheduler)
    assert cells_of(engine, grid_id) == {"MEASURED": 2}
