"""What the tables refuse and what they keep exactly."""

import datetime as dt
import math
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from alembic import command
from sqlalchemy import Engine, Executable, delete, func, inspect, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from database import migrate
from database.engine import session_factory
from database.migrate import pending_changes, upgrade
from database.models import (
    Attempt,
    Checkpoint,
    Evaluation,
    Event,
    Fit,
    FitDraw,
    FitObservation,
    FitParameter,
    Observation,
    Segment,
)
from tests.database.seeding import (
    add_grid,
    add_observations,
    add_scheduler,
    add_series,
    evaluation,
    points,
    segment,
)

NOT_NUMBERS = (math.nan, math.inf, -math.inf)


def _attempt(session: Session, subject: Segment, **given: Any) -> Attempt:
    values: dict[str, Any] = {"number": 1, "worker": "w", "lease_expires_at": func.now(), "token": uuid.uuid4()}
    attempt = Attempt(segment_id=subject.id, scheduler_id=add_scheduler(session), **values | given)
    session.add(attempt)
    session.flush()
    return attempt


def _refused(session: Session, *rows: object, match: str) -> None:
    with pytest.raises(IntegrityError, match=match), session.begin_nested():
        session.add_all(rows)  # flushed when the savepoint is released


def _change_refused(session: Session, change: Executable, match: str) -> None:
    with pytest.raises(IntegrityError, match=match), session.begin_nested():
        session.execute(change)


def test_migrations_go_down_and_up_again(engine: Engine, database_url: str) -> None:
    with engine.connect() as connection:
        command.downgrade(migrate._config(connection), "base")
        connection.commit()
        assert inspect(connection).get_table_names() == ["alembic_version"]
        left = "SELECT count(*) FROM pg_proc WHERE pronamespace = 'public'::regnamespace"
        assert connection.scalar(text(left)) == 0
        assert connection.scalar(text("SELECT to_regnamespace('research')")) is None
    upgrade(database_url)
    assert pending_changes(database_url) == []


@pytest.mark.parametrize("loss", NOT_NUMBERS)
@pytest.mark.parametrize("column", ["log_longppl", "log_shortppl", "log_ppl", "key_gap", "log_longppl_se"])
def test_loss_that_is_no_number_cannot_be_stored_as_a_measurement(session: Session, column: str, loss: float) -> None:
    """B91: Postgres would store NaN and rank it above every loss."""
    add_series(session)
    _refused(session, evaluation("e", state="SUCCEEDED", **{column: loss}), match="ck_evaluations")


@pytest.mark.parametrize("loss", NOT_NUMBERS)
def test_diverged_run_leaves_best_and_mean_of_the_others_alone(session: Session, loss: float) -> None:
    """B91: losses 2.5, one that is no number, 2.1."""
    add_series(session)
    session.add(evaluation("first", state="SUCCEEDED", log_longppl=2.5))
    _refused(session, evaluation("second", state="SUCCEEDED", log_longppl=loss), match="ck_evaluations_numbers")
    session.add(evaluation("second", state="FAILED", reason="DivergedError: the loss is not a number"))
    session.add(evaluation("third", state="SUCCEEDED", log_longppl=2.1))
    session.flush()
    value = Evaluation.log_longppl
    assert session.execute(select(func.min(value), func.max(value), func.avg(value))).one() == (2.1, 2.5, 2.3)


@pytest.mark.parametrize("loss", NOT_NUMBERS)
def test_no_observation_checkpoint_or_parameter_holds_a_number_that_is_none(session: Session, loss: float) -> None:
    series = add_series(session)
    subject = segment("s")
    session.add(subject)
    session.flush()
    attempt = _attempt(session, subject)
    with pytest.raises(IntegrityError, match="ck_observations_y"), session.begin_nested():
        add_observations(session, series, points(("S1",), (90,), (10,)), noise=loss)
    _refused(session, _checkpoint(attempt.id, mean_loss=loss), match="ck_checkpoints_mean_loss")
    fit = Fit(series_id=series, law="long_context", bootstrap=0, last_observation_id=1)
    session.add(fit)
    session.flush()
    parameter = FitParameter(fit_id=fit.id, position=0, name="A", value=loss, at_bound=False, identifiable=True)
    _refused(session, parameter, match="ck_fit_parameters_value")


def _checkpoint(attempt_id: int, **given: Any) -> Checkpoint:
    values: dict[str, Any] = {"segment_key": "s", "step": 1, "stage_tokens": 1, "path": "p", "digest": "d"}
    return Checkpoint(attempt_id=attempt_id, **values | {"size_bytes": 1, "scheduled": True} | given)


def test_measurement_without_key_tokens_says_why_its_number_is_missing(session: Session) -> None:
    add_series(session)
    _refused(session, evaluation("e", state="SUCCEEDED", log_longppl=None), match="ck_evaluations_measured")
    session.add(evaluation("e", state="SUCCEEDED", log_longppl=None, key_count=0, reason="no key tokens"))
    session.flush()


@pytest.mark.parametrize("total", [10_251_184_259, 2**31, 2**53 + 1, 370_000_000_001])
def test_token_counts_and_their_sums_are_exact(session: Session, total: int) -> None:
    """B19: 10,251,184,259 tokens do not wrap at 2^31; beyond 2^53 no digit is rounded."""
    add_series(session)
    third = total // 3
    for i, tokens in enumerate((third, third, total - 2 * third)):
        session.add(evaluation(f"e{i}", short_tokens=tokens))
    session.flush()
    session.expire_all()
    assert session.scalar(select(func.sum(Evaluation.short_tokens))) == Decimal(total)
    session.add(evaluation("whole", short_tokens=total, step=total))
    session.flush()
    session.expire_all()
    assert session.scalar(select(Evaluation.short_tokens).where(Evaluation.key == "whole")) == total


def test_doubles_come_back_bit_for_bit(session: Session) -> None:
    """B95: a single-precision column would return 0.33919876813888550 and 2.3456788063."""
    given = (0.3391987654321, 2.3456789012345, 0.1 + 0.2, 5e-324, 1.7976931348623157e308, -2 / 3, math.nextafter(1, 2))
    fit = Fit(series_id=add_series(session), law="long_context", bootstrap=1, last_observation_id=1)
    session.add(fit)
    session.flush()
    names = ("amplitude_n", "alpha", "amplitude_s", "beta_s", "amplitude_l", "beta_l", "offset")
    session.add(FitDraw(fit_id=fit.id, draw=0, **dict(zip(names, given, strict=True))))
    session.flush()
    columns = [getattr(FitDraw, name) for name in names]
    assert [x.hex() for x in session.execute(select(*columns)).one()] == [x.hex() for x in given]


def test_numpy_scalars_are_stored_as_the_plain_values_they_hold(session: Session) -> None:
    """B93: NumPy 2 prints np.float64(...), and psycopg once put that into SQL."""
    series = add_series(session)
    session.add(
        Observation(
            series_id=series,
            scale="S1",
            n_params=np.int64(6_824_241_167),
            short_tokens=np.int32(5),
            long_tokens=1,
            short_seed=0,
            long_seed=0,
            cluster="c",
            y=np.float64(2.3456789012345678),
            y_se=np.float32(2.5),
            source="imported",
        )
    )
    subject = segment("s")
    session.add(subject)
    session.flush()
    session.add(_checkpoint(_attempt(session, subject).id, scheduled=np.bool_(True)))
    session.flush()
    session.expire_all()
    row = session.scalars(select(Observation)).one()
    read = (row.n_params, row.short_tokens, row.y, row.y_se, session.scalars(select(Checkpoint.scheduled)).one())
    assert read == (6_824_241_167, 5, 2.3456789012345678, 2.5, True)
    assert [type(value) for value in read] == [int, int, float, float, bool]


def test_times_are_moments_whatever_the_zone_of_who_writes(engine: Engine) -> None:
    """B124: 10:00 in Berlin is stored and read as 09:00 UTC."""
    sessions = session_factory(engine)
    with sessions.begin() as session:
        session.execute(text("SET LOCAL TIME ZONE 'Europe/Berlin'"))
        berlin = dt.timezone(dt.timedelta(hours=1))
        session.add(Event(kind="k", subject="aware", at=dt.datetime(2026, 1, 15, 10, 0, tzinfo=berlin)))
        session.execute(text("INSERT INTO events (kind, subject, at) VALUES ('k', 'local', '2026-01-15 10:00')"))
    with sessions() as session:
        times = session.scalars(select(Event.at)).all()
    assert times == [dt.datetime(2026, 1, 15, 9, 0, tzinfo=dt.UTC)] * 2
    assert [time.isoformat() for time in times] == ["2026-01-15T09:00:00+00:00"] * 2
    with engine.connect() as connection:
        naive = text("SELECT count(*) FROM information_schema.columns WHERE data_type = 'timestamp without time zone'")
        assert connection.scalar(naive) == 0


@pytest.mark.parametrize("make", [segment, evaluation])
@pytest.mark.parametrize("state", ["SUCCEEDED", "FAILED", "CANCELLED"])
def test_work_that_has_ended_never_changes(session: Session, make: Any, state: str) -> None:
    add_series(session)
    row = make("k", state=state)
    session.add(row)
    session.flush()
    table = type(row)
    reopened, reworded = update(table).values(state="PENDING", ended_at=None), update(table).values(reason="another")
    for change in (reopened, reworded, delete(table)):
        _change_refused(session, change, match=f"is {state}: a row that has ended never changes")
    session.add(make("k", generation=2))
    session.flush()
    session.execute(update(table).where(table.generation == 2).values(state="RUNNING"))


def test_open_work_may_change_until_it_ends(session: Session) -> None:
    row = segment("s")
    session.add(row)
    session.flush()
    for state in ("READY", "RUNNING", "READY"):
        row.state = state
        session.flush()
    row.state, row.ended_at = "SUCCEEDED", dt.datetime.now(dt.UTC)
    session.flush()


def test_identity_has_one_open_generation_and_one_measurement(session: Session) -> None:
    add_series(session)
    session.add_all([segment("s"), evaluation("e", state="SUCCEEDED")])
    session.flush()
    _refused(session, segment("s", generation=2), match="uq_segments_open")
    _refused(session, evaluation("e", generation=2, state="SUCCEEDED"), match="uq_evaluations_succeeded")


def test_segment_has_one_live_attempt(session: Session) -> None:
    subject = segment("s")
    session.add(subject)
    session.flush()
    first = _attempt(session, subject)
    with pytest.raises(IntegrityError, match="uq_attempts_live_segment"), session.begin_nested():
        _attempt(session, subject, number=2)
    first.state, first.ended_at = "LOST", dt.datetime.now(dt.UTC)
    session.flush()
    _attempt(session, subject, number=2)


def test_observations_are_for_ever(session: Session) -> None:
    add_observations(session, add_series(session))
    for change in ("UPDATE observations SET y = 0", "DELETE FROM observations"):
        _change_refused(session, text(change), match="fits name it")


def test_fit_that_has_ended_is_closed_with_all_its_parts(session: Session) -> None:
    series = add_series(session)
    (observation,) = add_observations(session, series, points(("S1",), (90,), (10,)))
    fit = Fit(series_id=series, law="long_context", bootstrap=0, last_observation_id=observation)
    session.add(fit)
    session.flush()
    parts = [
        FitParameter(fit_id=fit.id, position=0, name="A", value=1.0, at_bound=False, identifiable=True),
        FitObservation(fit_id=fit.id, observation_id=observation, role="fitted"),
    ]
    session.add_all(parts)
    session.flush()
    fit.state, fit.reason, fit.ended_at = "FAILED", "why", dt.datetime.now(dt.UTC)
    session.flush()
    changes = (
        "UPDATE fits SET state = 'PENDING', ended_at = NULL",
        "DELETE FROM fits",
        "UPDATE fit_parameters SET value = 2",
        "DELETE FROM fit_parameters",
        "UPDATE fit_observations SET role = 'held_out'",
        "DELETE FROM fit_observations",
        "INSERT INTO fit_draws SELECT id, 0, 0, 0, 0, 0, 0, 0, 0 FROM fits",
    )
    for change in changes:
        _change_refused(session, text(change), match=r"never changes|cannot change: the fit is FAILED")


def test_series_has_one_open_fit_per_law_and_holdout(session: Session) -> None:
    series = add_series(session)

    def fit(holdout: str | None) -> Fit:
        return Fit(series_id=series, law="long_context", holdout=holdout, bootstrap=0, last_observation_id=1)

    session.add_all([fit(None), fit("scale=S1")])
    session.flush()
    _refused(session, fit(None), match="uq_fits_open")
    _refused(session, fit("scale=S1"), match="uq_fits_open")


def test_every_foreign_key_is_indexed(engine: Engine) -> None:
    with engine.connect() as connection:
        inspector = inspect(connection)
        for table in inspector.get_table_names():
            leading: list[list[str | None]] = [[inspector.get_pk_constraint(table)["constrained_columns"][0]]]
            leading += [index["column_names"][:1] for index in inspector.get_indexes(table)]
            for key in inspector.get_foreign_keys(table):
                assert key["constrained_columns"] in leading, f"{table}.{key['constrained_columns']} has no index"


def test_grid_totals_beyond_32_bits_are_kept(session: Session) -> None:
    """B19, B22: 7e9 parameters times 2e12 tokens times 6 is 8.4e22."""
    grid_id = add_grid(session)
    change = "UPDATE grids SET tokens_train = :tokens, flops = :flops WHERE id = :id RETURNING tokens_train, flops"
    given = {"tokens": 9_000_000_000_000_000_001, "flops": 6.0 * 7e9 * 2e12, "id": grid_id}
    assert session.execute(text(change), given).one() == (9_000_000_000_000_000_001, 8.4e22)
