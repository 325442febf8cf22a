"""The read contract is what docs/sql.md says, for a role that may read and nothing else."""

import datetime as dt
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, text, update
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

from database.measures import record_metrics, record_points
from database.models import Attempt, Checkpoint, Evaluation, Grid, GridEvaluation, GridSegment, Segment
from database.progress import cell_counts, cell_states
from tests.database.seeding import (
    SCALES,
    add_cell,
    add_fit,
    add_grid,
    add_observations,
    add_scheduler,
    add_series,
    evaluation,
    points,
    segment,
)
from workers.results import HealthPoint, Metric

PAGE = (Path(__file__).parents[2] / "docs" / "sql.md").read_text()
PROMISED = {
    view: re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)
    for view, table in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL)
}
EXAMPLES = re.findall(r"^```sql\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def _all(session: Session, query: str, **given: Any) -> list[Any]:
    return list(session.execute(text(query), given).all())


def test_page_lists_the_views_of_the_architecture() -> None:
    asked = [
        "grids",
        "cells",
        "checkpoints",
        "longppl",
        "observations",
        "fits",
        "fit_parameters",
        "predictions",
        "costs",
    ]
    assert set(asked) <= set(PROMISED)
    assert len(EXAMPLES) >= 6


def test_views_have_the_names_types_and_meanings_that_the_page_promises(session: Session) -> None:
    found: dict[str, list[tuple[str, str, str]]] = {}
    columns = """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), col_description(a.attrelid, a.attnum)
        FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
        WHERE c.relnamespace = 'research'::regnamespace AND a.attnum > 0 ORDER BY c.relname, a.attnum
    """
    for view, name, type_name, meaning in _all(session, columns):
        found.setdefault(view, []).append((name, type_name, meaning))
    assert found == PROMISED


def test_views_and_functions_explain_themselves(session: Session) -> None:
    views = "SELECT obj_description(oid) FROM pg_class WHERE relnamespace = 'research'::regnamespace"
    functions = "SELECT obj_description(oid) FROM pg_proc WHERE pronamespace = 'research'::regnamespace"
    for (comment,) in [*_all(session, views), *_all(session, functions)]:
        assert comment


def test_functions_have_the_signatures_that_the_page_promises(session: Session) -> None:
    found = _all(
        session,
        """
        SELECT 'research.' || proname || '(' || pg_get_function_arguments(oid) || ')', pg_get_function_result(oid)
        FROM pg_proc WHERE pronamespace = 'research'::regnamespace
        """,
    )
    promised = re.findall(r"^\| `(research\.[^`]+)` \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert sorted(tuple(row) for row in found) == sorted(promised)


def test_reader_runs_every_example_of_the_page_on_real_rows(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    add_fit(session, series_id)
    add_fit(session, series_id, holdout="scale=S3", bootstrap=0)
    add_cell(session, add_grid(session), series_id, ["e"])
    measured = evaluation("e", state="SUCCEEDED")
    session.add_all([measured, evaluation("short", state="SUCCEEDED", long_tokens=0), segment("segment")])
    session.flush()
    record_points(
        session,
        "segment",
        [HealthPoint(step=step, loss=3.0, gradient_norm=1.0, learning_rate=0.01, tokens_per_s=1e4) for step in (5, 10)],
    )
    record_metrics(session, measured.id, [Metric(name="passkey_accuracy", value=0.5, count=10, length=64, depth=0.5)])
    session.flush()
    session.execute(text("SET LOCAL ROLE longlaw_reader"))
    assert [len(_all(session, example)) for example in EXAMPLES] == [1, 20, 1, 10, 1, 1, 2, 1]


def test_reader_sees_no_table_and_writes_nothing(session: Session) -> None:
    add_grid(session)
    session.execute(text("SET LOCAL ROLE longlaw_reader"))
    assert len(_all(session, "SELECT * FROM research.grids")) == 1
    for view in PROMISED:
        _all(session, f"SELECT * FROM research.{view}")  # noqa: S608 - names of our own page
    forbidden = (
        "SELECT * FROM grids",
        "SELECT * FROM fit_draws",
        "UPDATE research.fit_draws SET a = 0",
        "DELETE FROM research.fit_parameters",
        "CREATE VIEW research.mine AS SELECT 1",
        "CREATE TABLE mine (i int)",
    )
    for statement in forbidden:
        with pytest.raises(ProgrammingError, match="permission denied"), session.begin_nested():
            session.execute(text(statement))


def test_measurements_show_losses_as_perplexities_too(session: Session) -> None:
    add_series(session)
    session.add(evaluation("done", state="SUCCEEDED", log_longppl=1.25, log_shortppl=2.0, log_ppl=3.0, key_gap=0.5))
    session.add(evaluation("failed", state="FAILED", reason="why"))
    session.add(evaluation("open"))
    session.add(evaluation("none", state="SUCCEEDED", log_longppl=None, key_count=0, reason="no key tokens"))
    session.flush()
    rows = {row.evaluation_key: row for row in _all(session, "SELECT * FROM research.longppl")}
    assert set(rows) == {"done", "none"}
    done = rows["done"]
    assert (done.longppl, done.shortppl, done.ppl) == pytest.approx(
        (3.4903429574618414, 7.38905609893065, 20.085536923)
    )
    assert (done.rule, done.rule_m, done.rule_spacing_steps) == ("last_m", 4, 25)
    assert (done.n_params, done.short_tokens, done.long_tokens) == (31_000_000, 2_790_000_000, 310_000_000)
    assert (rows["none"].longppl, rows["none"].reason) == (None, "no key tokens")


def test_loss_too_large_for_a_perplexity_spoils_no_query(session: Session) -> None:
    add_series(session)
    session.add(evaluation("huge", state="SUCCEEDED", log_longppl=1e4))
    session.flush()
    assert _all(session, "SELECT log_longppl, longppl FROM research.longppl") == [(1e4, None)]


def test_cell_states_follow_from_the_newest_generations(session: Session) -> None:
    series_id, grid_id = add_series(session), add_grid(session)
    session.add_all([segment("trains", state="RUNNING"), segment("rests")])
    states = {
        "measured": [("SUCCEEDED", "rests"), ("SUCCEEDED", "trains")],
        "trained": [("SUCCEEDED", "rests"), ("PENDING", "trains")],
        "evaluated": [("RUNNING", "rests"), ("FAILED", "rests")],
        "waiting": [("READY", "rests"), ("FAILED", "rests")],
        "failed": [("SUCCEEDED", "rests"), ("FAILED", "rests"), ("CANCELLED", "rests")],
        "cancelled": [("SUCCEEDED", "rests"), ("CANCELLED", "rests")],
    }
    cells = {}
    for name, evaluations in states.items():
        keys = [f"{name} {i}" for i in range(len(evaluations))]
        for key, (state, segment_key) in zip(keys, evaluations, strict=True):
            session.add(evaluation(key, state="FAILED", reason="an earlier try"))
            session.flush()
            session.add(evaluation(key, generation=2, state=state, segment_key=segment_key))
        session.flush()
        cells[add_cell(session, grid_id, series_id, keys)] = name
    found = {cells[row.cell_id]: row.state for row in _all(session, "SELECT * FROM research.cells")}
    assert found == {
        "measured": "MEASURED",
        "trained": "RUNNING",
        "evaluated": "RUNNING",
        "waiting": "PENDING",
        "failed": "FAILED",
        "cancelled": "CANCELLED",
    }
    by_rest = {cells[cell_id]: state for cell_id, state in session.execute(cell_states(grid_id))}
    assert by_rest == found
    (grid,) = _all(session, "SELECT * FROM research.grids")
    counts = (grid.cells_measured, grid.cells_running, grid.cells_pending, grid.cells_failed, grid.cells_cancelled)
    assert (grid.cells, *counts) == (6, 1, 2, 1, 1, 1)


def test_grids_count_cells_as_cells_are_shown(session: Session) -> None:
    """Counted from what is not measured alone, also where a cancelled grid's claims ended otherwise than the work."""
    series_id, going_on, cancelled = add_series(session), add_grid(session), add_grid(session)
    session.add(segment("trains", state="RUNNING"))
    for key, state in (("done", "SUCCEEDED"), ("open", "PENDING"), ("trained", "PENDING"), ("failed", "FAILED")):
        session.add(evaluation(key, state=state, segment_key="trains" if key == "trained" else "segment"))
    session.flush()
    cells = [["done"], ["done", "open"], ["done", "trained"], ["failed", "done"], ["failed", "open"]]
    for grid_id in (going_on, cancelled):
        for keys in cells:
            add_cell(session, grid_id, series_id, keys)
    session.execute(update(Grid).where(Grid.id == cancelled).values(cancelled_at=func.now()))
    ends = update(GridEvaluation).where(GridEvaluation.grid_id == cancelled)
    for key, end in (("open", "CANCELLED"), ("trained", "CANCELLED"), ("failed", "FAILED")):
        session.execute(ends.where(GridEvaluation.evaluation_key == key).values(closed_as=end))
    session.execute(update(Evaluation).where(Evaluation.key == "open").values(state="READY"))
    shown = "SELECT state, count(*) FROM research.cells WHERE grid_id = :grid GROUP BY state"
    for grid_id, states in ((going_on, [1, 1, 2, 1, 0]), (cancelled, [1, 0, 0, 2, 2])):
        columns = ("MEASURED", "RUNNING", "PENDING", "FAILED", "CANCELLED")
        counts = dict(zip(columns, states, strict=True))
        assert {state: count for state, count in counts.items() if count} == dict(_all(session, shown, grid=grid_id))
        assert cell_counts(session, grid_id) == counts
        (grid,) = _all(session, "SELECT * FROM research.grids WHERE grid_id = :grid", grid=grid_id)
        assert {state: getattr(grid, f"cells_{state.lower()}") for state in columns} == counts
        assert grid.cells == len(cells)


def test_checkpoints_show_the_segment_they_belong_to_once(session: Session) -> None:
    closed, again = segment("s", state="CANCELLED"), segment("s", generation=2, parent_key="trunk", parent_step=80)
    session.add_all([closed, again])
    session.flush()
    _train(session, closed, reached=30)
    _train(session, again, start=30, reached=60, number=2)
    rows = _all(session, "SELECT * FROM research.checkpoints ORDER BY step")
    assert [(r.segment_key, r.step, r.stage_tokens, r.scale, r.seed, r.parent_step) for r in rows] == [
        ("s", 30, 30_000, "S1", 7, 80),
        ("s", 60, 60_000, "S1", 7, 80),
    ]


def _train(
    session: Session, subject: Segment, *, start: int = 0, reached: int, number: int = 1, lost_at: int | None = None
) -> None:
    """An attempt of ten seconds with a checkpoint at `reached`, lost some steps later if `lost_at`."""
    ended = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    attempt = Attempt(
        segment_id=subject.id,
        number=number,
        token=uuid.uuid4(),
        scheduler_id=add_scheduler(session),
        worker="worker",
        state="SUCCEEDED" if lost_at is None else "LOST",
        start_step=start,
        progress_step=lost_at,
        lease_expires_at=ended,
        started_at=ended - dt.timedelta(seconds=10),
        ended_at=ended,
    )
    session.add(attempt)
    session.flush()
    session.add(
        Checkpoint(
            segment_key=subject.key,
            step=reached,
            stage_tokens=reached * subject.tokens_per_step,
            path=f"{subject.key}/{reached}",
            digest="digest",
            size_bytes=1,
            scheduled=True,
            attempt_id=attempt.id,
        )
    )
    session.flush()


def test_costs_count_what_was_trained_and_what_was_trained_twice(session: Session) -> None:
    series_id, grid_id = add_series(session), add_grid(session)
    add_grid(session, name="asks for nothing")
    first, second = segment("first", tokens_per_step=10**12), segment("second", scale="S2")
    session.add_all([first, second, evaluation("e")])
    session.flush()
    session.add(GridSegment(grid_id=grid_id, segment_key="first", target_step=50))
    session.add(GridSegment(grid_id=grid_id, segment_key="second", target_step=50))
    add_cell(session, grid_id, series_id, ["e"])
    _train(session, first, reached=50, lost_at=70)
    _train(session, first, start=50, reached=90, number=2)
    rows = {row.scale: row for row in _all(session, "SELECT * FROM research.costs")}
    assert set(rows) == {"S1", "S2"}
    s1, s2 = rows["S1"], rows["S2"]
    assert (s1.tokens_trained, s1.tokens_processed) == (50 * 10**12, 110 * 10**12)
    assert (s1.segments, s1.training_attempts, s1.training_attempts_failed, s1.training_worker_s) == (1, 2, 1, 20.0)
    assert (s1.evaluations, s1.evaluation_attempts, s1.evaluation_worker_s) == (1, 0, 0.0)
    assert (s2.tokens_trained, s2.tokens_processed, s2.training_attempts, s2.evaluations) == (0, 0, 0, 0)


def test_predictions_are_those_of_the_newest_fit_of_each_holdout(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id, points(("S1", "S2", "S3"), (90, 270), (10, 20, 40)))
    add_fit(session, series_id, bootstrap=0)
    add_observations(session, series_id, points(("S1",), (180,), (10, 20)), seed=1)
    newest = add_fit(session, series_id)
    held_out = add_fit(session, series_id, holdout="long_tokens=largest")
    rows = _all(session, "SELECT * FROM research.predictions")
    assert {(row.fit_id, row.holdout) for row in rows} == {(newest, None), (held_out, "long_tokens=largest")}
    assert len(rows) == 2 * 20
    assert {row.role for row in rows if row.fit_id == newest} == {"fitted"}
    apart = {(row.scale, row.long_tokens) for row in rows if row.role == "held_out"}
    assert apart == {(scale, 40 * n) for scale, n in SCALES.items() if scale != "S4"}
    assert all(abs(row.observed - row.predicted) < 0.2 for row in rows)
    agree = """
        SELECT count(*) FROM research.predictions p, LATERAL research.predict_log_longppl_interval(
            p.fit_id, p.n_params, p.short_tokens, p.long_tokens, p.level
        ) s
        WHERE abs(s.value - p.predicted) < 1e-12 AND abs(s.low - p.low) < 1e-12 AND abs(s.high - p.high) < 1e-12
    """
    assert _all(session, agree) == [(sum(row.low is not None for row in rows),)]
    (series,) = _all(session, "SELECT * FROM research.series")
    assert series.latest_fit_id == newest
