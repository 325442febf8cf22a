"""One prediction, whether Python or SQL is asked: values and intervals agree to 1e-12."""

import uuid
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Row, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from database.fits import StoredFit, load_fit
from database.models import Fit
from fitting.laws import LONG_CONTEXT
from fitting.predict import log_longppl, predict_all
from fitting.values import Interval, Point, Ranges
from tests.database.seeding import TRUTH, add_fit, add_observations, add_series

TOLERANCE = 1e-12
NAMES = LONG_CONTEXT.parameter_names
PARAMETERS = {
    "C below zero": TRUTH,
    "C above zero": (110.0, 0.28, 900.0, 0.35, 20.0, 0.15, 0.3),
    "C far below zero": (4.0, 0.05, 6.0, 0.05, 5.0, 0.05, -2.9),
    "C zero": (67.0, 0.25, 238.0, 0.30, 45.0, 0.20, 0.0),
}


def _random_points(count: int = 200) -> list[Point]:
    rng = np.random.default_rng(11)
    n, short, long = 10 ** rng.uniform([6, 8, 6], [11, 13, 12], size=(count, 3)).T
    rows = [Point(n_params=a, short_tokens=b, long_tokens=c) for a, b, c in zip(n, short, long, strict=True)]
    return [*rows, Point(n_params=31_000_000, short_tokens=2_790_000_000, long_tokens=310_000_000)]


def _in_sql(session: Session, fit_id: uuid.UUID, at: list[Point], level: float) -> list[Row[Any]]:
    query = """
        SELECT research.predict_log_longppl(:fit_id, n, short, long) AS alone, p.value, p.low, p.high
        FROM unnest(CAST(:n AS float8[]), CAST(:short AS float8[]), CAST(:long AS float8[]))
            WITH ORDINALITY AS at (n, short, long, place)
        CROSS JOIN LATERAL research.predict_log_longppl_interval(:fit_id, n, short, long, :level) p
        ORDER BY place
    """
    columns = {
        "n": [float(point.n_params) for point in at],
        "short": [float(point.short_tokens) for point in at],
        "long": [float(point.long_tokens) for point in at],
    }
    return list(session.execute(text(query), {"fit_id": fit_id, "level": level} | columns).all())


def _assert_agreement(session: Session, stored: StoredFit, *, level: float) -> None:
    at = _random_points()
    in_sql = _in_sql(session, stored.fit_id, at, level)
    for said, row in zip(predict_all(stored.law, at, level=level), in_sql, strict=True):
        assert row.alone == row.value == pytest.approx(said.value, abs=TOLERANCE)
        if said.interval is None:
            assert (row.low, row.high) == (None, None)
        else:
            assert (row.low, row.high) == pytest.approx((said.interval.low, said.interval.high), abs=TOLERANCE)


def _stored(session: Session, fit_id: uuid.UUID) -> StoredFit:
    stored = load_fit(session, fit_id)
    assert stored is not None
    return stored


def test_real_fit_predicts_the_same_in_sql(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    stored = _stored(session, add_fit(session, series_id))
    assert stored.law.parameters[-1] < 0
    assert len(stored.law.draws) > 20
    _assert_agreement(session, stored, level=0.9)


def test_laws_of_every_kind_predict_the_same_in_sql(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    rng = np.random.default_rng(5)
    for (name, parameters), level in zip(PARAMETERS.items(), (0.5, 0.8, 0.9, 0.99), strict=True):
        draws = np.array(parameters) * rng.uniform(0.9, 1.1, size=(251, 7))
        fit_id = add_fit(session, series_id, bootstrap=0, parameters=parameters, draws=draws)
        stored = _stored(session, fit_id)
        assert stored.law.parameters == parameters, name
        assert np.array_equal(stored.law.draws, draws), name
        _assert_agreement(session, stored, level=level)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 101])
def test_interval_is_the_linear_quantile_of_the_draws(session: Session, count: int) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    draws = np.array(TRUTH) * np.random.default_rng(count).uniform(0.9, 1.1, size=(count, 7))
    fit_id = add_fit(session, series_id, bootstrap=0, draws=draws)
    at = Point(n_params=1e8, short_tokens=1e10, long_tokens=3e9)
    said = log_longppl(draws, 1e8, 1e10, 3e9)
    for level in (0.05, 0.5, 0.9, 0.999):
        (row,) = _in_sql(session, fit_id, [at], level)
        expected = np.quantile(said, [(1 - level) / 2, (1 + level) / 2], method="linear")
        assert (row.low, row.high) == pytest.approx(tuple(expected), abs=TOLERANCE)


@pytest.mark.parametrize("hardly_varied", [False, True])
@pytest.mark.parametrize(
    "open_names", [(), ("beta_l", "C"), ("alpha",), ("beta_s", "beta_l"), ("alpha", "beta_s", "beta_l", "C")]
)
@pytest.mark.parametrize("absent", [None, "B_l"])
def test_interval_is_withheld_in_sql_where_python_withholds_it(
    session: Session, open_names: tuple[str, ...], absent: str | None, hardly_varied: bool
) -> None:
    """Open exponents leave the law known at the ends of a range, or in it where it is that of hardly varied sizes."""
    series_id = add_series(session)
    add_observations(session, series_id)
    draws = np.array(TRUTH) * np.random.default_rng(3).uniform(0.9, 1.1, size=(40, 7))
    ranges = Ranges(
        n_params=Interval(low=1e8, high=4e8),
        short_tokens=Interval(low=1e10, high=3e10),
        long_tokens=Interval(low=1e9, high=1.009e9 if hardly_varied else 2e9),
    )
    parameters = tuple(0.0 if name == absent else value for name, value in zip(NAMES, TRUTH, strict=True))
    changed: dict[str, Any] = {
        "not_identifiable": open_names,
        "ranges": ranges,
        "parameters": parameters,
        "draws": draws,
    }
    stored = _stored(session, add_fit(session, series_id, bootstrap=0, **changed))
    assert set(stored.law.not_identifiable) == set(open_names)
    at = [
        Point(n_params=n, short_tokens=short, long_tokens=long)
        for n in (1e8, 2e8, 8e8)
        for short in (1e10, 2e10)
        for long in (5e8, 1e9, 1.004e9, ranges.long_tokens.high, 9e9)
    ]
    known = [said.interval is not None for said in predict_all(stored.law, at)]
    assert known == [row.low is not None for row in _in_sql(session, stored.fit_id, at, 0.9)]
    assert all(known) == (not open_names or (absent == "B_l" and open_names == ("beta_l", "C") and not hardly_varied))


def test_fit_without_draws_gives_a_value_and_no_interval(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    _assert_agreement(session, _stored(session, add_fit(session, series_id, bootstrap=0)), level=0.9)


def test_questions_without_an_answer_are_errors_in_sql(session: Session) -> None:
    series_id = add_series(session)
    add_observations(session, series_id)
    fit_id = add_fit(session, series_id, bootstrap=0)
    open_fit = Fit(series_id=series_id, law="long_context", bootstrap=0, last_observation_id=1)
    session.add(open_fit)
    session.flush()
    cases = [
        ("predict_log_longppl(:fit, 0, 1e9, 1e9)", fit_id, "each must be a positive finite number"),
        ("predict_log_longppl(:fit, 1e8, -1, 1e9)", fit_id, "each must be a positive finite number"),
        ("predict_log_longppl(:fit, 1e8, 1e9, 'NaN')", fit_id, "each must be a positive finite number"),
        ("predict_log_longppl(:fit, 1e8, 1e9, 'Infinity')", fit_id, "each must be a positive finite number"),
        ("predict_log_longppl_interval(:fit, 1e8, 1e9, 1e9, 1)", fit_id, "it must lie between 0 and 1"),
        ("predict_log_longppl_interval(:fit, 1e8, 1e9, 1e9, 'NaN')", fit_id, "it must lie between 0 and 1"),
        ("predict_log_longppl(:fit, 1e8, 1e9, 1e9)", uuid.UUID(int=0), "there is no fit"),
        ("predict_log_longppl(:fit, 1e8, 1e9, 1e9)", open_fit.id, "is PENDING, it has no parameters"),
    ]
    for call, fit, complaint in cases:
        with pytest.raises(DBAPIError, match=complaint), session.begin_nested():
            session.execute(text(f"SELECT research.{call}"), {"fit": fit})
    assert session.scalar(text("SELECT research.predict_log_longppl(:fit, NULL, 1e9, 1e9)"), {"fit": fit_id}) is None


def test_counts_of_any_numeric_type_are_accepted(session: Session) -> None:
    """B22: integers become doubles before any arithmetic."""
    series_id = add_series(session)
    add_observations(session, series_id)
    fit_id = add_fit(session, series_id, bootstrap=0)
    query = """
        SELECT research.predict_log_longppl(:fit, 7000000000, 2000000000000::bigint, 4e11::numeric),
               research.predict_log_longppl(:fit, 7e9::float8, 2e12::float8, 4e11::float8)
    """
    whole, double = session.execute(text(query), {"fit": fit_id}).one()
    assert whole == double
