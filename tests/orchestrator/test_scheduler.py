"""Grids on real workers, disturbed and undisturbed: the numbers are the same to the last bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from database.engine import create_engine
from database.models import Attempt, Cell, Checkpoint, Evaluation, Event, Observation, Scheduler, Segment
from database.progress import cell_counts
from database.specs import segment_from_json
from database.verbs import Obeyed, Verb, obey
from orchestrator import scheduler as scheduler_module
from orchestrator.executor import RayExecutor
from orchestrator.scheduler_settings import SchedulerSettings
from tests.conftest import MakeDatabase
from tests.orchestrator.tiny_grid import LONG_STEP_TOKENS, Numbers, measured_numbers, submit_tiny, tiny_document
from tests.workers.tiny_training import trained
from workers import checkpoint

SETTINGS = SchedulerSettings(recovery_steps=20, backoff_s=0.1, poll_s=0.05, tend_s=0.2, stop_grace_s=2.0)
DEADLINE_S = 240.0


class Lab:
    """A database, the session's workers, and a scheduler that is turned by hand."""

    def __init__(self, engine: Engine, workers: RayExecutor, store: Path) -> None:
        self.engine, self.workers, self.store = engine, workers, store
        self.scheduler = self.new_scheduler()

    def new_scheduler(self, **changes: object) -> scheduler_module.Scheduler:
        settings = SETTINGS.model_copy(update=changes)
        return scheduler_module.Scheduler(self.engine, self.workers, store=self.store, settings=settings)

    def turn_until(self, condition: Callable[[Session], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            self.scheduler.turn()
            with Session(self.engine) as session:
                if condition(session):
                    return
        raise AssertionError("the condition did not come true")


def asked(engine: Engine, grid_id: uuid.UUID, verb: Verb) -> Obeyed:
    with Session(engine) as session, session.begin():
        obeyed = obey(session, grid_id, verb)
        assert obeyed is not None
        return obeyed


def nothing_runs(session: Session) -> bool:
    return session.scalar(select(func.count()).where(Attempt.state == "RUNNING")) == 0


def all_closed(session: Session) -> bool:
    """Whether no work is open."""
    return not any(
        session.scalar(select(func.count()).where(table.state.in_(("PENDING", "READY", "RUNNING"))))
        for table in (Segment, Evaluation)
    )


def trunk_runs(session: Session) -> bool:
    """Whether a trunk has a checkpoint and is still being trained."""
    saved = select(Checkpoint.segment_key)
    running = select(func.count()).where(
        Segment.kind == "short_trunk", Segment.state == "RUNNING", Segment.key.in_(saved)
    )
    return session.scalar(running) != 0


@pytest.fixture(scope="module")
def undisturbed(
    migrated_database: MakeDatabase, ray_workers: RayExecutor, corpus: str, store: Path
) -> Iterator[tuple[Engine, Numbers]]:
    """The grid, run from beginning to end without a fault; its files are gone afterwards."""
    with migrated_database() as url:
        engine = create_engine(url, application_name="longlaw-test")
        submit_tiny(engine, tiny_document(corpus))
        deadline_s = time.monotonic() + DEADLINE_S
        while len(ray_workers.free()) < len(ray_workers) and time.monotonic() < deadline_s:
            ray_workers.poll(timeout_s=0.1)  # so that both trunks can begin at once
        lab = Lab(engine, ray_workers, store)
        lab.turn_until(all_closed)
        lab.scheduler.close()
        yield engine, measured_numbers(engine)
        engine.dispose()


@pytest.fixture
def lab(engine: Engine, idle_workers: RayExecutor, store: Path) -> Iterator[Lab]:
    """A fresh database and an empty store of checkpoints."""
    shutil.rmtree(store / "checkpoints", ignore_errors=True)
    lab = Lab(engine, idle_workers, store)
    yield lab
    lab.scheduler.close()


def test_grid_ends_with_exactly_the_asked_cells_measured(undisturbed: tuple[Engine, Numbers]) -> None:
    with Session(undisturbed[0]) as session:
        assert session.scalar(select(func.count()).select_from(Cell)) == 8
        assert list(session.scalars(select(Evaluation.state))) == ["SUCCEEDED"] * 8
        assert set(session.scalars(select(Segment.state))) == {"SUCCEEDED"}
        assert session.scalar(select(func.count(Observation.evaluation_key.distinct()))) == 8
        assert session.scalar(select(func.count()).select_from(Observation)) == 8
        assert set(session.scalars(select(Attempt.state))) == {"SUCCEEDED"}
        assert set(session.scalars(select(Attempt.number))) == {1}


def test_both_workers_train_whenever_two_segments_are_ready(undisturbed: tuple[Engine, Numbers]) -> None:
    with Session(undisturbed[0]) as session:
        first, second = session.execute(
            select(Attempt.worker, Attempt.started_at, Attempt.ended_at)
            .join(Segment, Segment.id == Attempt.segment_id)
            .where(Segment.kind == "short_trunk")
            .order_by(Attempt.started_at)
        ).all()
    assert {first.worker, second.worker} == {"worker-1", "worker-2"}
    assert second.started_at < first.ended_at


def test_evaluation_overlaps_training(undisturbed: tuple[Engine, Numbers]) -> None:
    with Session(undisturbed[0]) as session:
        rows = session.execute(select(Attempt.segment_id, Attempt.worker, Attempt.started_at, Attempt.ended_at)).all()
    measuring = [row for row in rows if row.segment_id is None]
    training = [row for row in rows if row.segment_id is not None]
    assert any(m.started_at < t.ended_at and t.started_at < m.ended_at for m in measuring for t in training)


def test_recovery_checkpoints_are_pruned_and_scheduled_ones_stay(
    undisturbed: tuple[Engine, Numbers], store: Path
) -> None:
    with Session(undisturbed[0]) as session:
        rows = session.execute(select(Checkpoint.segment_key, Checkpoint.step, Checkpoint.path, Checkpoint.scheduled))
        trunks = set(session.scalars(select(Segment.key).where(Segment.kind == "short_trunk")))
        saved = [(row.segment_key, row.step) for row in rows]
    assert {step for key, step in saved if key in trunks} == {24, 160}


def test_restarted_scheduler_launches_nothing_that_is_done(
    undisturbed: tuple[Engine, Numbers], ray_workers: RayExecutor, corpus: str, store: Path
) -> None:
    """B80: neither a restart nor the same grid submitted again runs anything twice."""
    engine, numbers = undisturbed
    submitted = submit_tiny(engine, tiny_document(corpus, name="again"))
    assert {cell.status for cell in submitted.plan.cells} == {"reused"}
    scheduler = Lab(engine, ray_workers, store).scheduler
    for _ in range(5):
        scheduler.turn()
    assert scheduler.leading
    scheduler.close()
    with Session(engine) as session:
        assert session.scalar(select(func.max(Attempt.number))) == 1
        assert session.scalar(select(func.count()).select_from(Attempt)) == 10 + 8
        assert session.scalar(select(func.count()).select_from(Observation)) == 8
    assert measured_numbers(engine) == numbers


def test_grid_goes_on_from_the_last_checkpoint_of_a_killed_worker(
    undisturbed: tuple[Engine, Numbers], lab: Lab, corpus: str
) -> None:
    """B74, B78: the work of a worker killed in the middle of a segment is resumed, and its numbers do not tell."""
    submit_tiny(lab.engine, tiny_document(corpus))
    pids = lab.workers.pids()
    lab.turn_until(trunk_runs)
    with Session(lab.engine) as session:
        worker = session.scalars(
            select(Attempt.worker)
            .join(Segment, Segment.id == Attempt.segment_id)
            .where(Attempt.state == "RUNNING", Segment.key.in_(select(Checkpoint.segment_key)))
            .where(Segment.kind == "short_trunk")
        ).first()
    assert worker is not None
    os.kill(pids[worker], signal.SIGKILL)
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        lost = session.scalars(select(Attempt).where(Attempt.state == "LOST")).one()
        again = session.scalars(select(Attempt).where(Attempt.segment_id == lost.segment_id, Attempt.number == 2)).one()
        row = session.get_one(Segment, lost.segment_id)
    assert lost.failure_kind == "infrastructure"
    assert lost.reason is not None
    assert lost.reason.startswith(f"{worker} died: its process crashed, or was killed")
    assert again.start_step is not None
    assert again.start_step > 0
    assert (row.state, row.user_failures) == ("SUCCEEDED", 0)
    assert measured_numbers(lab.engine) == undisturbed[1]


def test_killed_scheduler_is_replaced_without_a_trace_in_the_numbers(
    undisturbed: tuple[Engine, Numbers], lab: Lab, corpus: str, database_url: str, tmp_path: Path
) -> None:
    """SIGKILL in the middle of a grid: exactly the asked cells, identical bits, no row doubled, nothing left over."""
    submit_tiny(lab.engine, tiny_document(corpus))
    environment = os.environ | {
        "LONGLAW_DATABASE_URL": database_url,
        "LONGLAW_HOME": str(tmp_path / "home"),
        "LONGLAW_STORE": str(lab.store),
        "LONGLAW_WORKERS": "2",
        "LONGLAW_WORKER_NICENESS": "0",
        "LONGLAW_RECOVERY_STEPS": "20",
    }
    process = subprocess.Popen([sys.executable, "-m", "orchestrator.scheduler"], env=environment)
    try:
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s and process.poll() is None:
            with Session(lab.engine) as session:
                if trunk_runs(session):
                    break
            time.sleep(0.02)
        children = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
    with Session(lab.engine) as session:
        running = session.scalar(select(func.count()).where(Attempt.state == "RUNNING"))
        assert running in (1, 2)

    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        assert list(session.scalars(select(Evaluation.state))) == ["SUCCEEDED"] * 8
        assert session.scalar(select(func.count()).select_from(Observation)) == 8
        assert session.scalar(select(func.count()).where(Attempt.state == "LOST")) == running
        assert session.scalar(select(func.count()).where(Attempt.state == "RUNNING")) == 0
        assert session.scalar(select(func.max(Segment.infrastructure_failures))) == 0
        assert list(session.scalars(select(Scheduler.id).where(Scheduler.leading))) == [lab.scheduler.id]
    assert measured_numbers(lab.engine) == undisturbed[1]
    assert list(lab.store.rglob("*.unfinished")) == []
    # Ray's two agents look after their parent once in a while and are gone within a minute; nothing else is left.
    left = [" ".join(child.cmdline()) for child in children if child.is_running()]
    assert [command for command in left if command and "Agent" not in command] == []


def test_paused_grid_ends_at_its_next_checkpoints_and_goes_on_without_a_trace_in_the_numbers(
    undisturbed: tuple[Engine, Numbers], lab: Lab, corpus: str
) -> None:
    grid_id = submit_tiny(lab.engine, tiny_document(corpus)).grid_id
    pids = lab.workers.pids()
    lab.turn_until(trunk_runs)
    assert asked(lab.engine, grid_id, "pause").counts.attempts in (1, 2)
    lab.turn_until(nothing_runs)
    assert lab.workers.attempts() == ()
    with Session(lab.engine) as session:
        stopped = session.scalars(select(Attempt.segment_id).where(Attempt.state == "STOPPED")).all()
        states = set(session.scalars(select(Segment.state).where(Segment.id.in_(stopped))))
        begun = session.scalar(select(func.count()).select_from(Attempt))
    assert (len(stopped) in (1, 2), states) == (True, {"READY"})
    for _ in range(5):
        lab.scheduler.turn()
    with Session(lab.engine) as session:
        assert session.scalar(select(func.count()).select_from(Attempt)) == begun
    assert lab.workers.pids() == pids  # nobody was killed for it
    asked(lab.engine, grid_id, "resume")
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        again = select(Attempt.start_step).where(Attempt.segment_id.in_(stopped), Attempt.number == 2)
        saved = {24, *range(20, 180, 20)}  # for the grid's cells, and every 20 steps
        assert saved.issuperset(session.scalars(again))
        assert session.scalar(select(func.sum(Segment.infrastructure_failures + Segment.user_failures))) == 0
    assert measured_numbers(lab.engine) == undisturbed[1]


def test_cancelled_grid_stops_at_once_and_another_ends_with_exactly_its_cells(
    undisturbed: tuple[Engine, Numbers], lab: Lab, corpus: str
) -> None:
    """The other shares the trunk of one scale, and asks for less of it."""
    cancelled = submit_tiny(lab.engine, tiny_document(corpus)).grid_id
    other = tiny_document(corpus, name="other", widths=(16,), short_steps=(27,), long_steps=(8,))
    other_id = submit_tiny(lab.engine, other).grid_id
    lab.turn_until(trunk_runs)
    done = asked(lab.engine, cancelled, "cancel").counts
    assert (done.evaluations, done.evaluations_kept) == (7, 1)
    with Session(lab.engine) as session:
        before = session.scalar(select(func.count()).where(Checkpoint.segment_key == only_asked_by_it(session)))
    lab.turn_until(all_closed)
    lab.turn_until(lambda _: lab.workers.attempts() == ())
    with Session(lab.engine) as session:
        after = session.scalar(select(func.count()).where(Checkpoint.segment_key == only_asked_by_it(session)))
        assert after == before  # late reports changed nothing
        assert {state: n for state, n in cell_counts(session, cancelled).items() if n} == {"CANCELLED": 8}
        assert {state: n for state, n in cell_counts(session, other_id).items() if n} == {"MEASURED": 1}
        assert session.scalar(select(func.count()).select_from(Observation)) == 1
    (measured,) = measured_numbers(lab.engine).values
    assert measured in undisturbed[1].values
    assert list(lab.store.rglob("*.unfinished")) == []


def only_asked_by_it(session: Session) -> str:
    """The trunk of the larger scale."""
    return session.scalars(select(Segment.key).where(Segment.kind == "short_trunk", Segment.scale == "w32")).one()


def test_checkpoint_that_no_row_names_gives_way_to_what_is_trained(
    undisturbed: tuple[Engine, Numbers], lab: Lab, corpus: str
) -> None:
    """A killed attempt left it, in another number of processes: only its place is the same."""
    grid = tiny_document(corpus, widths=(16,), short_steps=(27,), long_steps=(8,))
    submit_tiny(lab.engine, grid)
    with Session(lab.engine) as session:
        trunk = session.scalars(select(Segment).where(Segment.kind == "short_trunk")).one()
    model, optimizer = trained()
    left, _ = checkpoint.write(lab.store, segment_from_json(trunk.spec), 20, model=model, optimizers=(optimizer,))
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        failed = session.scalars(select(Attempt).where(Attempt.state == "FAILED")).one()
        states = set(session.scalars(select(Segment.state)))
        kinds = set(session.scalars(select(Event.kind).where(Event.subject == trunk.key)))
    assert failed.failure_kind == "infrastructure"
    assert failed.reason is not None
    assert f"{left.path} is a valid checkpoint with digest {left.digest}" in failed.reason
    assert states == {"SUCCEEDED"}
    assert "unrecorded_checkpoint_removed" in kinds
    (measured,) = measured_numbers(lab.engine).values
    assert measured in undisturbed[1].values


def test_checkpoint_that_is_gone_from_the_store_is_trained_again_on_retry(lab: Lab, corpus: str) -> None:
    document = tiny_document(corpus, widths=(16,), short_steps=(27,), long_steps=(8,))
    submit_tiny(lab.engine, document)
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        long = select(Segment.key).where(Segment.kind == "long_constant")
        recorded = session.scalars(select(Checkpoint).where(Checkpoint.segment_key.in_(long))).one()
    shutil.rmtree(lab.store / recorded.path)
    mean_of_two = {"name": "last_m", "m": 2, "spacing": 4 * LONG_STEP_TOKENS}
    otherwise = submit_tiny(lab.engine, {**document, "name": "measured otherwise", "rules": [mean_of_two]})
    lab.scheduler.close()
    lab.scheduler = lab.new_scheduler(infrastructure_retries=1)
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        reason = session.scalars(select(Evaluation.reason).where(Evaluation.state == "FAILED")).one()
    assert reason is not None
    assert "`longlaw grid retry` trains it again" in reason
    asked(lab.engine, otherwise.grid_id, "retry-failed")
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        again = session.scalars(select(Checkpoint).where(Checkpoint.path == recorded.path)).one()
        assert (again.id != recorded.id, again.digest) == (True, recorded.digest)
        assert cell_counts(session, otherwise.grid_id)["MEASURED"] == 1


def test_database_that_goes_away_interrupts_no_training(
    undisturbed: tuple[Engine, Numbers], lab: Lab, corpus: str, postgres_url: str
) -> None:
    """B100: workers carry on, their reports are recorded after the return, no attempt fails."""
    submit_tiny(lab.engine, tiny_document(corpus))
    lab.turn_until(trunk_runs)
    server = create_engine(postgres_url).execution_options(isolation_level="AUTOCOMMIT")
    name = lab.engine.url.database
    with server.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
        )
    for _ in range(4):
        lab.scheduler.turn()
    assert not lab.scheduler.leading
    with server.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    server.dispose()
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        assert set(session.scalars(select(Attempt.state))) == {"SUCCEEDED"}
        assert set(session.scalars(select(Attempt.number))) == {1}
    assert measured_numbers(lab.engine) == undisturbed[1]


def test_diverging_segment_fails_with_all_that_waits_for_it(lab: Lab, corpus: str) -> None:
    """B91-like: the reason names the step; nothing stays pending; no retry is wasted on what must fail again."""
    submit_tiny(lab.engine, tiny_document(corpus, widths=(16,), peak_rate=1e30))
    lab.turn_until(all_closed)
    with Session(lab.engine) as session:
        trunk = session.scalars(select(Segment).where(Segment.kind == "short_trunk")).one()
        others = set(session.scalars(select(Segment.reason).where(Segment.kind != "short_trunk")))
        evaluations = {tuple(row) for row in session.execute(select(Evaluation.state, Evaluation.reason))}
        assert session.scalar(select(func.count()).select_from(Attempt)) == 1
    assert trunk.state == "FAILED"
    assert trunk.reason is not None
    assert trunk.reason.startswith("DivergedError: ")
    assert others == {f"parent failed: {trunk.reason}"}
    assert evaluations == {("FAILED", f"parent failed: {trunk.reason}")}


def test_standby_takes_over_when_the_leader_goes(lab: Lab, tmp_path: Path) -> None:
    lab.turn_until(lambda _: lab.scheduler.leading)
    idle = RayExecutor(workers=1, store=tmp_path, state_dir=tmp_path)
    standby = scheduler_module.Scheduler(lab.engine, idle, store=tmp_path, settings=SETTINGS)
    waiting = threading.Thread(target=standby.stand_by)
    waiting.start()
    lab.turn_until(lambda session: session.scalar(select(func.count()).select_from(Scheduler)) == 2)
    assert lab.scheduler.leading
    assert not standby.leading
    lab.scheduler.close()
    waiting.join(timeout=60.0)
    assert standby.leading
    with Session(lab.engine) as session:
        assert list(session.scalars(select(Scheduler.id).where(Scheduler.leading))) == [standby.id]
    standby.close()


def test_closed_scheduler_puts_running_work_back_at_no_ones_expense(lab: Lab, corpus: str) -> None:
    submit_tiny(lab.engine, tiny_document(corpus))
    lab.turn_until(trunk_runs)
    lab.scheduler.close()
    with Session(lab.engine) as session:
        assert session.scalar(select(func.count()).where(Attempt.state == "RUNNING")) == 0
        assert session.scalar(select(func.count()).where(Attempt.state == "STOPPED")) in (1, 2)
        assert session.scalar(select(func.count()).where(Segment.state == "RUNNING")) == 0
        assert session.scalar(select(func.sum(Segment.infrastructure_failures + Segment.user_failures))) == 0
