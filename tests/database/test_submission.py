"""Grids as rows: shared work is opened once, finished work is used again, all or nothing."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session

from database.attempts import record_checkpoint
from database.models import (
    Cell,
    CellEvaluation,
    Checkpoint,
    Evaluation,
    EvaluationSource,
    Evaluator,
    Grid,
    GridEvaluation,
    GridSegment,
    Observation,
    Segment,
    SegmentSave,
    Series,
)
from orchestrator.errors import GridError
from orchestrator.grid import parse_grid
from orchestrator.layout import lay_out
from orchestrator.submit import known, submit
from tests.database.work_rows import CORPUS, checkpoint_of, next_segment, run_all, scheduler_row, submitted, train
from tests.orchestrator.tiny_grid import tiny_document

TABLES = (
    Grid,
    Series,
    Evaluator,
    Segment,
    SegmentSave,
    Evaluation,
    EvaluationSource,
    Cell,
    CellEvaluation,
    GridSegment,
    GridEvaluation,
)


def _count(engine: Engine, table: type) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def test_grid_is_stored_with_everything_it_asks_for(engine: Engine) -> None:
    grid = submitted(engine)
    with Session(engine) as session:
        row = session.get_one(Grid, grid.grid_id)
        segments = session.scalars(select(Segment).order_by(Segment.id)).all()
        saves = session.execute(select(SegmentSave.segment_key, SegmentSave.step)).all()
        sources = session.execute(select(EvaluationSource.segment_key, EvaluationSource.step)).all()
    assert (row.name, row.tokens_train, row.document["name"]) == ("grid", 27 * 64 + 16 * 64, "grid")
    assert [(s.kind, s.target_step, s.state, s.generation) for s in segments] == [
        ("short_trunk", 24, "PENDING", 1),
        ("short_decay", 3, "PENDING", 1),
        ("long_constant", 16, "PENDING", 1),
    ]
    trunk, decay, long = segments
    assert sorted(tuple(save) for save in saves) == sorted(
        [(trunk.key, 24), (decay.key, 3), (long.key, 8), (long.key, 16)]
    )
    assert sorted(tuple(source) for source in sources) == [(long.key, 8), (long.key, 16)]
    assert trunk.priority > decay.priority > long.priority > 0
    assert [_count(engine, table) for table in (Cell, CellEvaluation, Evaluation, Series)] == [2, 2, 2, 1]
    assert [_count(engine, table) for table in (GridSegment, GridEvaluation)] == [3, 2]


def test_same_grid_twice_opens_no_work_and_shares_what_is_under_way(engine: Engine) -> None:
    submitted(engine)
    again = submitted(engine, name="again")
    assert {cell.status for cell in again.plan.cells} == {"in_flight"}
    assert again.plan.tokens_train == 0
    assert [_count(engine, table) for table in (Grid, Cell, Segment, Evaluation)] == [2, 4, 3, 2]
    assert [_count(engine, table) for table in (GridSegment, GridEvaluation)] == [6, 4]


def test_measured_cells_are_reused_and_observed_in_the_new_grid_too(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    run_all(engine, scheduler)
    again = submitted(engine, name="again")
    assert {cell.status for cell in again.plan.cells} == {"reused"}
    assert run_all(engine, scheduler) == ([], [])
    assert _count(engine, Observation) == 2  # one for each evaluation in its series, however many grids ask


def test_extension_opens_the_next_generation_for_the_missing_tokens_alone(engine: Engine) -> None:
    submitted(engine)
    scheduler = scheduler_row(engine)
    run_all(engine, scheduler)
    longer = submitted(engine, name="longer", long_steps=(8, 16, 32))
    assert longer.plan.tokens_train == 16 * 64
    assert [cell.status for cell in longer.plan.cells] == ["reused", "reused", "extended"]
    (segment,), (evaluation,) = run_all(engine, scheduler)
    assert segment.run.start is not None
    assert (segment.run.start.ref.step, segment.run.save_steps) == (16, (32,))
    assert evaluation.run.snapshot.step == 32
    with Session(engine) as session:
        generations = session.execute(
            select(Segment.generation, Segment.state, Segment.target_step)
            .where(Segment.key == segment.key)
            .order_by(Segment.generation)
        ).all()
    assert [tuple(row) for row in generations] == [(1, "SUCCEEDED", 16), (2, "SUCCEEDED", 32)]
    assert _count(engine, Observation) == 3


def test_extension_of_open_work_raises_its_target(engine: Engine) -> None:
    submitted(engine)
    submitted(engine, name="longer", long_steps=(8, 16, 32))
    with Session(engine) as session:
        row = session.scalars(select(Segment).where(Segment.kind == "long_constant")).one()
    assert (row.generation, row.target_step) == (1, 32)
    segments, evaluations = run_all(engine, scheduler_row(engine))
    assert len(segments) == 3
    assert len(evaluations) == 3


def test_recovery_checkpoint_that_a_grid_reads_is_kept(engine: Engine) -> None:
    submitted(engine, short_steps=(180,))
    trunk = next_segment(engine, scheduler_row(engine))
    assert trunk is not None
    with Session(engine) as session, session.begin():
        record_checkpoint(session, trunk.token, checkpoint_of(trunk, 24, scheduled=False))
    submitted(engine, name="shorter", short_steps=(27,))
    with Session(engine) as session:
        assert session.scalars(select(Checkpoint.scheduled)).one()


def test_concurrent_submissions_open_each_piece_of_work_once(engine: Engine) -> None:
    """B85: whoever comes second finds the work of the first; nobody waits for ever."""
    barrier = threading.Barrier(6)
    failures: list[Exception] = []

    def post(number: int) -> None:
        barrier.wait()
        try:
            submitted(engine, name=f"grid {number}", long_steps=(8, 16, 16 + number))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=post, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [_count(engine, table) for table in (Grid, Segment, Evaluation)] == [6, 3, 8]
    segments, evaluations = run_all(engine, scheduler_row(engine))
    assert (len(segments), len(evaluations)) == (3, 8)


def test_grid_above_its_own_cap_stores_nothing(engine: Engine) -> None:
    document = tiny_document(CORPUS) | {"budget": {"gpu_hours": 1e-12}}
    with Session(engine) as session, pytest.raises(GridError, match="GPU-hours") as raised, session.begin():
        submit(session, parse_grid(document), document=document)
    assert [problem.pointer for problem in raised.value.problems] == ["/budget/gpu_hours"]
    assert [_count(engine, table) for table in TABLES] == [0] * len(TABLES)


def test_known_tells_saved_from_scheduled(engine: Engine) -> None:
    submitted(engine)
    trunk = next_segment(engine, scheduler_row(engine))
    assert trunk is not None
    train(engine, trunk)
    with Session(engine) as session:
        seen = known(session, lay_out(parse_grid(tiny_document(CORPUS, widths=(16,), short_steps=(27,)))))
    steps = {frozenset(s.saved_steps): frozenset(s.scheduled_steps) for s in seen.segments.values()}
    assert steps[frozenset({24})] == frozenset()
    assert {frozenset({3}), frozenset({8, 16})} == {
        frozenset(s.scheduled_steps) for s in seen.segments.values() if not s.saved_steps
    }
    assert len(seen.in_flight) == 2
    assert seen.evaluated == frozenset()
