"""Fits as rows: when one is queued, what it freezes, who may end it, and that it stays as it is."""

import datetime as dt
import itertools
import threading
import uuid
from dataclasses import replace

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from database.engine import session_factory
from database.fits import (
    SeriesObservation,
    claim_fit,
    fail_fit,
    held_out,
    latest_fit,
    load_fit,
    load_job,
    queue_fits,
    requeue_fit,
    requeue_running_fits,
    store_fit,
)
from database.models import Evaluation, Event, Fit, FitObservation, Observation
from orchestrator.fit_job import fit_job
from tests.database.seeding import (
    add_cell,
    add_fit,
    add_grid,
    add_observations,
    add_series,
    evaluation,
    points,
)

LONG_AGO = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


def _queued(session: Session) -> list[tuple[str | None, int, int]]:
    """Holdout, bootstrap and number of frozen observations of each waiting fit."""
    size = select(func.count()).where(FitObservation.fit_id == Fit.id).scalar_subquery()
    rows = session.execute(select(Fit.holdout, Fit.bootstrap, size).where(Fit.state == "PENDING").order_by(Fit.holdout))
    return [tuple(row) for row in rows]


def test_new_observations_queue_one_fit_that_freezes_them(session: Session) -> None:
    ids = add_observations(session, add_series(session))
    assert queue_fits(session, debounce_s=60) == 1
    assert queue_fits(session, debounce_s=60) == 0
    add_observations(session, "series", points(("S1",), (360,), (10,)))
    job = claim_fit(session)
    assert job is not None
    assert [row.id for row in job.observations] == ids
    assert (job.law, job.holdout, job.series_id) == ("long_context", None, "series")
    assert session.scalar(select(Fit.last_observation_id)) == ids[-1]


def test_fit_waits_for_more_observations_until_they_are_old_or_none_are_on_their_way(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    session.add(evaluation("open"))
    add_cell(session, add_grid(session), series_id, ["open"])
    assert queue_fits(session, debounce_s=60) == 0
    assert queue_fits(session, debounce_s=0) == 1
    job = claim_fit(session)
    assert job is not None
    assert fail_fit(session, job.fit_id, "why")
    add_observations(session, series_id, points(("S1",), (360,), (10,)))
    assert queue_fits(session, debounce_s=60) == 0
    row = session.scalars(select(Evaluation)).one()
    row.state, row.reason, row.ended_at = "FAILED", "why", LONG_AGO
    session.flush()
    assert queue_fits(session, debounce_s=60) == 1


def test_old_observations_are_fitted_while_work_goes_on(session: Session) -> None:
    series_id = add_series(session)
    session.add(evaluation("open"))
    add_cell(session, add_grid(session), series_id, ["open"])
    add_observations(session, series_id, created_at=LONG_AGO)
    assert queue_fits(session, debounce_s=60) == 1


def test_fewer_distinct_points_than_parameters_queue_nothing(session: Session) -> None:
    """B63."""
    series_id = add_series(session)
    six = list(itertools.islice(points(), 6))
    add_observations(session, series_id, iter(six))
    add_observations(session, series_id, iter(six), seed=1)
    assert queue_fits(session, debounce_s=0) == 0
    add_observations(session, series_id, itertools.islice(points(), 6, 7))
    assert queue_fits(session, debounce_s=0) == 1
    assert _queued(session) == [(None, 200, 13)]


def test_each_holdout_of_the_grids_of_a_series_gets_a_fit_of_its_own(session: Session) -> None:
    series_id, other = add_series(session), add_series(session, "other")
    add_observations(session, series_id)
    add_observations(session, other)
    session.add_all([evaluation(key, state="SUCCEEDED") for key in "abc"])
    add_cell(session, add_grid(session, holdout="long_tokens=largest", bootstrap=300), series_id, ["a"])
    add_cell(session, add_grid(session, holdout="scale=S3", bootstrap=50), series_id, ["b"])
    add_cell(session, add_grid(session, holdout="scale=S9", bootstrap=70), series_id, ["c"])
    assert queue_fits(session, debounce_s=0) == 4
    of_series = select(Fit.holdout, Fit.bootstrap).where(Fit.series_id == series_id)
    assert {tuple(row) for row in session.execute(of_series)} == {
        (None, 300),
        ("long_tokens=largest", 300),
        ("scale=S3", 50),
    }
    assert session.scalars(select(Fit.holdout).where(Fit.series_id == other)).all() == [None]


def test_holdout_that_leaves_too_few_points_is_not_fitted(session: Session) -> None:
    series_id = add_series(session)
    session.add(evaluation("a", state="SUCCEEDED"))
    add_cell(session, add_grid(session, holdout="scale=S2"), series_id, ["a"])
    add_observations(session, series_id, points(("S1",), (90, 180), (10, 20, 30)))
    add_observations(session, series_id, points(("S2",), (90,), (10, 20, 30)))
    assert queue_fits(session, debounce_s=0) == 1
    assert [holdout for holdout, _, _ in _queued(session)] == [None]


def _row(scale: str, long_tokens: int) -> SeriesObservation:
    return SeriesObservation(id=1, scale=scale, n_params=1, short_tokens=1, long_tokens=long_tokens, cluster="c", y=1.0)


def test_holdout_names_a_scale_or_the_largest_long_budget_of_every_scale() -> None:
    rows = [_row("S1", 10), _row("S1", 20), _row("S2", 30), _row("S2", 40)]
    assert held_out(rows, None) == [False, False, False, False]
    assert held_out(rows, "long_tokens=largest") == [False, True, False, True]
    assert held_out(rows, "scale=S2") == [False, False, True, True]
    for nonsense in ("scale=", "short_tokens=largest", "largest"):
        with pytest.raises(ValueError, match="neither scale=NAME nor"):
            held_out(rows, nonsense)


def test_failed_fit_is_not_repeated_before_something_new_is_observed(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    queue_fits(session, debounce_s=0)
    job = claim_fit(session)
    assert job is not None
    assert fail_fit(session, job.fit_id, "why")
    assert queue_fits(session, debounce_s=0) == 0
    add_observations(session, series_id, points(("S1",), (360,), (10,)))
    assert queue_fits(session, debounce_s=0) == 1


def test_observation_that_commits_after_one_with_a_later_id_is_fitted_too(engine: Engine) -> None:
    sessions = session_factory(engine)
    with sessions.begin() as session:
        add_series(session)
    with sessions() as slow:
        late = add_observations(slow, "series", points(("S1",), (360,), (10,)))
        with sessions.begin() as session:
            early = add_observations(session, "series")
            assert early[0] > late[0]
        with sessions.begin() as session:
            assert queue_fits(session, debounce_s=0) == 1
            job = claim_fit(session)
            assert job is not None
            assert store_fit(session, job.fit_id, fit_job(replace(job, bootstrap=0)))
        slow.commit()
    with sessions.begin() as session:
        assert queue_fits(session, debounce_s=0) == 1
        again = claim_fit(session)
        assert again is not None
        assert {row.id for row in again.observations} == {*early, *late}


def test_two_schedulers_queue_and_claim_each_fit_once(engine: Engine) -> None:
    sessions = session_factory(engine)
    with sessions.begin() as session:
        for name in ("a", "b", "c"):
            add_observations(session, add_series(session, name))
    claimed: list[uuid.UUID] = []
    start = threading.Barrier(2)

    def scheduler() -> None:
        start.wait()
        with sessions.begin() as session:
            queue_fits(session, debounce_s=0)
        while True:
            with sessions.begin() as session:
                job = claim_fit(session)
            if job is None:
                return
            claimed.append(job.fit_id)

    threads = [threading.Thread(target=scheduler) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with sessions() as session:
        assert sorted(claimed) == sorted(session.scalars(select(Fit.id)))
    assert len(claimed) == 3


def test_fit_runs_again_from_its_stored_observations_to_the_same_bits(session: Session) -> None:
    """Invariant: a fit names a frozen set of observations."""
    series_id = add_series(session)
    add_observations(session, series_id)
    fit_id = add_fit(session, series_id)
    add_observations(session, series_id, points(("S1",), (360,), (10, 20)), seed=2)
    session.expire_all()
    stored, job = load_fit(session, fit_id), load_job(session, fit_id)
    assert stored is not None
    assert job is not None
    again = fit_job(job).fit
    assert again.seed == session.scalar(select(Fit.seed))
    assert stored.law.parameters == again.parameters
    assert stored.law.draws.tobytes() == again.draws.tobytes()
    assert (stored.law.residual_std, stored.law.ranges) == (again.residual_std, again.ranges)


def test_same_observations_in_another_order_have_the_same_intervals(session: Session) -> None:
    add_observations(session, add_series(session))
    queue_fits(session, debounce_s=0)
    job = claim_fit(session)
    assert job is not None
    elsewhere = replace(job, fit_id=uuid.uuid4(), observations=job.observations[::-1])
    assert fit_job(elsewhere).fit.draws.tobytes() == fit_job(job).fit.draws.tobytes()


def test_stored_fit_is_latest_of_its_holdout_alone(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    assert latest_fit(session, series_id) is None
    first = add_fit(session, series_id, bootstrap=0)
    apart = add_fit(session, series_id, bootstrap=0, holdout="scale=S3")
    latest, latest_apart = latest_fit(session, series_id), latest_fit(session, series_id, holdout="scale=S3")
    assert latest is not None
    assert latest_apart is not None
    assert (latest.fit_id, latest.holdout) == (first, None)
    assert (latest_apart.fit_id, latest_apart.holdout) == (apart, "scale=S3")
    second = add_fit(session, series_id, bootstrap=0)
    latest = latest_fit(session, series_id)
    assert latest is not None
    assert latest.fit_id == second


def test_held_out_rows_are_predicted_and_judged_but_not_fitted(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id, points(("S1", "S2", "S3", "S4")))  # three sizes are the fewest for an exponent
    fit_id = add_fit(session, series_id, holdout="scale=S4", bootstrap=0)
    row = session.get_one(Fit, fit_id)
    roles = session.execute(
        select(FitObservation.role, func.count(), func.count(FitObservation.predicted)).group_by(FitObservation.role)
    )
    assert {role: (count, predicted) for role, count, predicted in roles} == {"fitted": (36, 36), "held_out": (12, 12)}
    assert (row.n_observations, row.holdout_n, row.n_params_max) == (36, 12, 126_000_000.0)
    assert row.holdout_r2 is not None
    assert row.holdout_r2 > 0.9
    assert row.holdout_bias is not None
    assert row.warnings
    assert row.explanation


def test_rows_without_short_tokens_are_named_and_left_out(session: Session) -> None:
    series_id = add_series(session)
    unknown = [
        Observation(
            series_id=series_id,
            scale="released",
            n_params=8_000_000_000,
            long_tokens=number * 1_000_000_000,
            short_seed=0,
            long_seed=0,
            cluster="model:d",
            y=1.0 / number,
            source="run",
        )
        for number in range(1, 11)
    ]
    session.add_all(unknown)
    session.flush()
    assert queue_fits(session, debounce_s=0) == 0  # ten points, and none that this law could use
    add_observations(session, series_id)
    assert queue_fits(session, debounce_s=0) == 1
    job = claim_fit(session)
    assert job is not None
    result = fit_job(replace(job, bootstrap=0))
    assert store_fit(session, job.fit_id, result)
    session.expire_all()
    row = session.get_one(Fit, job.fit_id)
    assert (row.n_observations, row.n_params_max) == (36, 126_000_000.0)
    assert "10 observations are left out" in str(row.explanation)
    uses = session.scalars(select(FitObservation).where(FitObservation.role == "excluded")).all()
    assert {use.observation_id for use in uses} == {item.id for item in unknown}
    assert all("D_s" in (use.reason or "") and use.predicted is None for use in uses)
    assert queue_fits(session, debounce_s=0) == 0


def test_largest_long_budget_is_that_of_the_rows_with_short_tokens(session: Session) -> None:
    """Rows without D_s lie further out at every scale: no law predicts them, so they are not what is held out."""
    series_id = add_series(session)
    session.add(evaluation("a", state="SUCCEEDED"))
    add_cell(session, add_grid(session, holdout="long_tokens=largest"), series_id, ["a"])
    add_observations(session, series_id)
    for scale, n_params, short_tokens, long_tokens in points(short=(90,), long=(80,)):
        session.add(
            Observation(
                series_id=series_id,
                scale=scale,
                n_params=n_params,
                long_tokens=long_tokens,
                short_seed=0,
                long_seed=0,
                cluster=f"model:{short_tokens}",
                y=1.0,
                source="run",
            )
        )
    session.flush()
    assert queue_fits(session, debounce_s=0) == 2
    jobs = {job.holdout: job for job in (claim_fit(session), claim_fit(session)) if job is not None}
    uses = fit_job(replace(jobs["long_tokens=largest"], bootstrap=0)).uses
    assert sum(use.role == "held_out" for use in uses) == 9
    assert sum(use.role == "excluded" for use in uses) == 3


def test_only_a_running_fit_can_be_ended(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    queue_fits(session, debounce_s=0)
    fit_id = session.scalars(select(Fit.id)).one()
    job = load_job(session, fit_id)
    assert job is not None
    result = fit_job(replace(job, bootstrap=0))
    assert not store_fit(session, fit_id, result)
    assert not fail_fit(session, fit_id, "why")
    assert not requeue_fit(session, fit_id)
    assert load_fit(session, fit_id) is None
    assert claim_fit(session) is not None
    assert claim_fit(session) is None
    assert requeue_running_fits(session) == 1
    assert claim_fit(session) is not None
    assert store_fit(session, fit_id, result)
    assert not store_fit(session, fit_id, result)
    assert not fail_fit(session, fit_id, "late")
    assert requeue_running_fits(session) == 0
    session.expire_all()
    assert session.get_one(Fit, fit_id).state == "SUCCEEDED"
    with pytest.raises(IntegrityError, match="never changes"), session.begin_nested():
        session.execute(text("UPDATE fits SET objective = 0"))
    with pytest.raises(IntegrityError, match="the fit is SUCCEEDED"), session.begin_nested():
        session.execute(text("DELETE FROM fit_parameters"))


def test_unknown_fit_is_none(session: Session) -> None:
    nobody = uuid.UUID(int=1)
    assert load_fit(session, nobody) is None
    assert load_job(session, nobody) is None
    assert not fail_fit(session, nobody, "why")


def test_each_step_of_a_fit_leaves_an_event(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    queue_fits(session, debounce_s=0)
    job = claim_fit(session)
    assert job is not None
    fail_fit(session, job.fit_id, "why")
    session.flush()
    events = session.execute(select(Event.kind, Event.subject).order_by(Event.id))
    assert [tuple(row) for row in events] == [("fit_queued", str(job.fit_id)), ("fit_failed", str(job.fit_id))]
