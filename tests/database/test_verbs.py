"""What may be asked of a grid when, what a pause holds back, and that repeating does no harm."""

from __future__ import annotations

import uuid

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from database.attempts import renew, stop_attempt
from database.errors import VerbNotAllowedError
from database.models import Event, Grid
from database.reading import grid_standing
from database.reading_cells import list_cells
from database.verbs import Obeyed, Verb, obey
from tests.database.verb_rows import asked, cells_of, fail_trunk, record, state_of, together, told_to_stop
from tests.database.work_rows import next_evaluation, next_segment, run_all, scheduler_row, submitted


def test_repeated_verbs_are_told_as_they_were_done(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    other = submitted(engine, name="other").grid_id
    for verb in ("pause", "resume", "pause", "cancel"):
        first, again = asked(engine, grid_id, verb), asked(engine, grid_id, verb)
        assert (first.repeated, again.repeated) == (False, True)
        assert (again.at, again.counts) == (first.at, first.counts)
    assert asked(engine, other, "resume").repeated  # it never was paused
    with Session(engine) as session:
        events = session.scalars(select(Event.kind).where(Event.grid_id == grid_id).order_by(Event.id)).all()
    assert events == ["grid_submitted", "grid_paused", "grid_resumed", "grid_paused", "grid_cancelled"]


@pytest.mark.parametrize(
    ("end", "verbs", "legal"),
    [
        ("SUCCEEDED", ("cancel", "pause", "resume", "retry-failed"), ()),
        ("CANCELLED", ("pause", "resume", "retry-failed"), ()),
        ("FAILED", ("cancel", "pause", "resume"), ("retry-failed",)),
        ("PENDING", ("retry-failed",), ("cancel", "pause")),
    ],
)
def test_what_the_state_does_not_allow_is_refused_with_what_it_does(
    engine: Engine, end: str, verbs: tuple[Verb, ...], legal: tuple[Verb, ...]
) -> None:
    grid_id = submitted(engine).grid_id
    scheduler = scheduler_row(engine)
    if end == "SUCCEEDED":
        run_all(engine, scheduler)
    elif end == "CANCELLED":
        asked(engine, grid_id, "cancel")
    elif end == "FAILED":
        fail_trunk(engine, scheduler)
    for verb in verbs:
        with pytest.raises(VerbNotAllowedError) as raised:
            asked(engine, grid_id, verb)
        assert (raised.value.state, raised.value.verbs) == (end, legal)
    with Session(engine) as session:
        assert session.scalar(select(func.count()).where(Event.grid_id == grid_id)) == (2 if end == "CANCELLED" else 1)
        standing = grid_standing(session, grid_id)
        assert standing is not None
        assert standing.verbs == legal


def test_grid_that_there_is_not_obeys_nothing(engine: Engine) -> None:
    with Session(engine) as session:
        assert obey(session, uuid.uuid4(), "cancel") is None


def test_paused_grid_begins_nothing_and_ends_at_the_next_checkpoint(engine: Engine) -> None:
    grid_id = submitted(engine, short_steps=(27, 180)).grid_id
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    assert told_to_stop(engine, scheduler) == ()
    done = asked(engine, grid_id, "pause").counts
    assert (done.segments, done.segments_kept, done.evaluations, done.attempts) == (5, 0, 4, 1)
    assert told_to_stop(engine, scheduler) == (trunk.token,)
    assert record(engine, trunk, 24)
    with Session(engine) as session, session.begin():
        assert renew(session, trunk.token, lease_s=60.0)  # nothing is torn away
        assert stop_attempt(session, trunk.token, reason="its grids are paused")
    assert next_segment(engine, scheduler) is None
    assert next_evaluation(engine, scheduler) is None
    with Session(engine) as session:
        standing = grid_standing(session, grid_id)
        assert standing is not None
        assert standing.grid.paused_at is not None
        assert standing.verbs == ("cancel", "resume")
        assert {waiting.why[:7] for waiting in standing.progress.waiting} == {"paused:"}
        cells = list_cells(session, grid_id, after=None, limit=10)
        assert {(cell.state, cell.why and cell.why[:7]) for cell in cells} == {("PENDING", "paused:")}
        times = session.execute(text("SELECT paused_at, cancelled_at FROM research.grids")).one()
        assert (times.paused_at, times.cancelled_at) == (standing.grid.paused_at, None)
    assert asked(engine, grid_id, "resume").counts.segments == 5
    segments, evaluations = run_all(engine, scheduler)
    assert segments[0].run.start is not None
    assert (segments[0].run.start.ref.step, len(evaluations)) == (24, 4)
    assert cells_of(engine, grid_id) == {"MEASURED": 4}


def test_paused_grid_holds_up_nothing_that_another_asks_for(engine: Engine) -> None:
    shorter = submitted(engine, long_steps=(8,)).grid_id
    longer = submitted(engine, name="longer", long_steps=(4, 16)).grid_id
    done = asked(engine, longer, "pause").counts
    assert (done.segments, done.segments_kept, done.evaluations, done.evaluations_kept) == (0, 3, 2, 0)
    scheduler = scheduler_row(engine)
    segments, evaluations = run_all(engine, scheduler)
    assert segments[-1].run.save_steps == (4, 8)  # on the way, but no further
    assert [claim.run.snapshot.step for claim in evaluations] == [8]
    assert (state_of(engine, shorter), cells_of(engine, longer)) == ("SUCCEEDED", {"PENDING": 2})
    with Session(engine) as session:
        standing = grid_standing(session, longer)
        assert standing is not None
        assert {(item.kind, item.count) for item in standing.progress.waiting} == {("SEGMENT", 1), ("EVALUATION", 2)}
    asked(engine, longer, "resume")
    run_all(engine, scheduler)
    assert cells_of(engine, longer) == {"MEASURED": 2}


def test_running_attempt_goes_on_while_one_of_its_grids_is_not_paused(engine: Engine) -> None:
    grids = [submitted(engine, name=name).grid_id for name in ("first", "second")]
    scheduler = scheduler_row(engine)
    trunk = next_segment(engine, scheduler)
    assert trunk is not None
    asked(engine, grids[0], "pause")
    assert told_to_stop(engine, scheduler) == ()
    asked(engine, grids[1], "pause")
    assert told_to_stop(engine, scheduler) == (trunk.token,)
    asked(engine, grids[0], "cancel")
    assert told_to_stop(engine, scheduler) == (trunk.token,)
    asked(engine, grids[1], "resume")
    assert told_to_stop(engine, scheduler) == ()


def test_paused_grid_can_be_cancelled(engine: Engine) -> None:
    grid_id = submitted(engine).grid_id
    asked(engine, grid_id, "pause")
    assert asked(engine, grid_id, "cancel").counts.segments == 3
    with Session(engine) as session:
        row = session.get_one(Grid, grid_id)
        assert (row.paused_at, row.cancelled_at is not None) == (None, True)


@pytest.mark.parametrize("verb", ["cancel", "pause", "retry-failed"])
def test_same_verb_from_several_sides_at_once_is_done_once(engine: Engine, verb: Verb) -> None:
    grid_id = submitted(engine).grid_id
    if verb == "retry-failed":
        fail_trunk(engine, scheduler_row(engine))
    results = together(*[lambda: asked(engine, grid_id, verb)] * 4)
    assert all(isinstance(result, Obeyed) for result in results), results
    told = [result for result in results if isinstance(result, Obeyed)]
    assert sorted(result.repeated for result in told) == [False, True, True, True]
    assert len({(result.at, result.counts) for result in told}) == 1
