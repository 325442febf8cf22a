"""The queue of fits is worked off by real processes that may die, hang or lose the database."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Iterator

import psutil
import pytest
from sqlalchemy import Engine, make_url, select, text
from sqlalchemy.orm import Session, sessionmaker

from database.engine import session_factory
from database.fits import claim_fit, load_fit, load_job, queue_fits, requeue_running_fits
from database.models import Fit, FitObservation
from orchestrator.fit_job import fit_job, main, run_fit
from orchestrator.refit import FitProcess
from tests.database.seeding import add_cell, add_grid, add_observations, add_series, evaluation, points

DEADLINE_S = 120.0


@pytest.fixture
def sessions(engine: Engine) -> sessionmaker[Session]:
    return session_factory(engine)


@pytest.fixture
def fits(engine: Engine) -> Iterator[FitProcess]:
    process = FitProcess(engine)
    yield process
    process.close()


def _queue(sessions: sessionmaker[Session], series_id: str = "series") -> uuid.UUID:
    with sessions.begin() as session:
        add_observations(session, add_series(session, series_id))
        session.add(evaluation(series_id, state="SUCCEEDED"))
        add_cell(session, add_grid(session, bootstrap=25), series_id, [series_id])
        assert queue_fits(session, debounce_s=0) == 1
        return session.scalars(select(Fit.id).where(Fit.series_id == series_id)).one()


def _state(sessions: sessionmaker[Session], fit_id: uuid.UUID) -> tuple[str, str | None]:
    with sessions() as session:
        row = session.get_one(Fit, fit_id)
        return row.state, row.reason


def _poll_until(fits: FitProcess, done: Callable[[], bool]) -> None:
    give_up = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < give_up, "the fit has not ended"
        fits.poll()
        time.sleep(0.05)


def _child(of: FitProcess) -> psutil.Process:
    """The process of a fit that has just been started."""
    assert of._process is not None
    return psutil.Process(of._process.pid)


def test_fits_are_done_one_at_a_time_and_a_killed_one_is_tried_again(
    sessions: sessionmaker[Session], fits: FitProcess, database_url: str
) -> None:
    first, second = _queue(sessions, "first"), _queue(sessions, "second")
    assert fits.poll()
    assert fits.fit_id == first
    assert not fits.poll()
    command_line, password = " ".join(_child(fits).cmdline()), make_url(database_url).password
    assert password
    assert password not in command_line, "every user of the machine can read that"
    _child(fits).kill()
    _poll_until(fits, lambda: fits.fit_id == second)
    assert _state(sessions, first) == ("SUCCEEDED", None)
    with sessions() as session:
        stored, job = load_fit(session, first), load_job(session, first)
    assert stored is not None
    assert job is not None
    here = fit_job(job).fit
    assert stored.law.parameters == here.parameters
    assert stored.law.draws.tobytes() == here.draws.tobytes()


def test_process_that_always_dies_fails_its_fit_with_the_reason(
    sessions: sessionmaker[Session], fits: FitProcess
) -> None:
    fit_id = _queue(sessions)
    killed: set[int] = set()

    def failed() -> bool:
        if fits.fit_id is not None and (child := _child(fits)).pid not in killed:
            killed.add(child.pid)
            child.kill()
        return _state(sessions, fit_id)[0] == "FAILED"

    _poll_until(fits, failed)
    assert len(killed) == 3
    assert _state(sessions, fit_id) == ("FAILED", "the fitting process ended with exit code -9, 3 times in a row")


def test_process_past_its_deadline_is_stopped(engine: Engine, sessions: sessionmaker[Session]) -> None:
    fit_id = _queue(sessions)
    now = 0.0
    fits = FitProcess(engine, timeout_s=30, clock=lambda: now)
    assert fits.poll()
    for _ in range(3):
        child = _child(fits)
        child.suspend()
        assert not fits.poll()
        now += 31
        assert fits.poll()
        assert not child.is_running()
    assert fits.fit_id is None
    assert _state(sessions, fit_id) == ("FAILED", "the fit took more than 30 s, 3 times in a row")


def test_closing_stops_the_process_and_puts_the_fit_back(sessions: sessionmaker[Session], fits: FitProcess) -> None:
    fit_id = _queue(sessions)
    fits.poll()
    child = _child(fits)
    fits.close()
    assert not psutil.pid_exists(child.pid)
    assert _state(sessions, fit_id) == ("PENDING", None)
    fits.close()


def test_fit_that_cannot_be_done_ends_with_its_reason(sessions: sessionmaker[Session], database_url: str) -> None:
    with sessions.begin() as session:
        series_id = add_series(session)
        fit = Fit(series_id=series_id, law="long_context", bootstrap=0, state="RUNNING", last_observation_id=1)
        session.add(fit)
        session.flush()
        fit_id = fit.id
        for observation_id in add_observations(session, series_id, points(("S1",), (90,), (10, 20))):
            session.add(FitObservation(fit_id=fit_id, observation_id=observation_id))
    assert run_fit(database_url, fit_id)
    assert _state(sessions, fit_id) == ("FAILED", "need at least 7 distinct observations, have 2")


def test_error_that_nobody_foresaw_ends_the_fit_too(sessions: sessionmaker[Session], database_url: str) -> None:
    fit_id = _queue(sessions)
    with sessions.begin() as session:
        session.execute(text("UPDATE fits SET holdout = 'no such form', state = 'RUNNING'"))
    with pytest.raises(ValueError, match="no such form"):
        run_fit(database_url, fit_id)
    state, reason = _state(sessions, fit_id)
    assert state == "FAILED"
    assert (reason or "").startswith("ValueError: holdout 'no such form'")


def test_fit_whose_scheduler_died_is_finished_by_whoever_is_first(
    sessions: sessionmaker[Session], database_url: str
) -> None:
    fit_id = _queue(sessions)
    assert not run_fit(database_url, fit_id), "a PENDING fit is nobody's yet"
    with sessions.begin() as session:
        assert claim_fit(session) is not None
    with sessions.begin() as session:
        assert requeue_running_fits(session) == 1
        assert claim_fit(session) is not None
    assert run_fit(database_url, fit_id)
    assert not run_fit(database_url, fit_id)
    assert not run_fit(database_url, uuid.UUID(int=1))
    assert _state(sessions, fit_id) == ("SUCCEEDED", None)


def test_process_without_a_database_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_id = str(uuid.UUID(int=1))
    monkeypatch.delenv("LONGLAW_DATABASE_URL", raising=False)
    assert main([fit_id]) == 2
    assert capsys.readouterr().err == "LONGLAW_DATABASE_URL is not set\n"
    monkeypatch.setenv("LONGLAW_DATABASE_URL", "postgresql://ada:S3cr3tPw@127.0.0.1:1/laws")
    assert main([fit_id]) == 1
    said = capsys.readouterr().err
    assert said.startswith("the database is gone:")
    assert "S3cr3tPw" not in said


def test_one_job_gives_one_answer_whatever_the_order_of_its_rows(sessions: sessionmaker[Session]) -> None:
    fit_id = _queue(sessions)
    with sessions() as session:
        job = load_job(session, fit_id)
    assert job is not None
    turned = dataclasses.replace(job, observations=job.observations[::-1])
    one, other = fit_job(job).fit, fit_job(turned).fit
    assert one.parameters == other.parameters
    assert one.draws.tobytes() == other.draws.tobytes()
