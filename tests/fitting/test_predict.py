"""Predictions, their two intervals, and how far they reach."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitting.errors import InvalidPointError, UnknownLawError
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.predict import log_longppl, predict, predict_all, predict_columns
from fitting.values import FittedLaw, Interval, Point, Ranges
from tests.fitting.toy_law import ONE_LONG_BUDGET, TOY, toy_observations

RANGES = Ranges(
    n_params=Interval(low=1e8, high=3e9),
    short_tokens=Interval(low=1e9, high=6.4e10),
    long_tokens=Interval(low=1e8, high=1e11),
)
INSIDE = Point(n_params=1e9, short_tokens=1e10, long_tokens=1e9)


def stored(**changes: object) -> FittedLaw:
    """A fit as it would be read back from a table: no observations, plain numbers."""
    draws = np.tile(np.array(TOY), (5, 1))
    draws[:, 6] += [-0.2, -0.1, 0.0, 0.1, 0.2]
    law = FittedLaw(
        law=LONG_CONTEXT.name, parameters=TOY, draws=draws, ranges=RANGES, residual_std=0.01, not_identifiable=()
    )
    return replace(law, **changes)  # type: ignore[arg-type]


def test_toy_law_has_its_published_values() -> None:
    assert log_longppl(TOY, 1e8, 1e9, 1e8) == pytest.approx(4.453930, abs=5e-7)
    assert log_longppl(TOY, 3e9, 6.4e10, 1e11) == pytest.approx(2.515496, abs=5e-7)


def test_law_is_added_from_left_to_right() -> None:
    a, alpha, b_s, beta_s, b_l, beta_l, c = TOY
    by_hand = ((a * 3e8**-alpha + b_s * 5e9**-beta_s) + b_l * 7e8**-beta_l) + c
    assert float(log_longppl(TOY, 3e8, 5e9, 7e8)) == by_hand


def test_shapes_are_points_sets_of_parameters_and_both() -> None:
    sizes = np.array([1e8, 1e9, 2e9])
    assert log_longppl(TOY, 1e8, 1e9, 1e8).shape == ()
    assert log_longppl(TOY, sizes, sizes, 1e8).shape == (3,)
    assert log_longppl([TOY, TOY], 1e8, 1e9, 1e8).shape == (2,)
    both = log_longppl([TOY, (*TOY[:6], 0.7)], sizes, sizes, sizes)
    assert both.shape == (2, 3)
    assert both[1] == pytest.approx(both[0] - 1.0)


def test_confidence_interval_is_the_linear_quantile_of_the_draws() -> None:
    prediction = predict(stored(), INSIDE, level=0.9)
    assert prediction.value == float(log_longppl(TOY, 1e9, 1e10, 1e9))
    assert prediction.interval is not None
    assert prediction.interval.low == pytest.approx(prediction.value - 0.18, abs=1e-12)
    assert prediction.interval.high == pytest.approx(prediction.value + 0.18, abs=1e-12)


def test_prediction_interval_adds_the_noise_of_one_measurement() -> None:
    prediction = predict(stored(residual_std=0.1), INSIDE, level=0.9)
    assert prediction.prediction_interval is not None
    half = math.hypot(0.18, 1.6448536269514722 * 0.1)
    assert prediction.prediction_interval.low == pytest.approx(prediction.value - half, abs=1e-12)
    assert prediction.prediction_interval.high == pytest.approx(prediction.value + half, abs=1e-12)


def test_without_draws_there_is_a_value_and_no_interval() -> None:
    prediction = predict(stored(draws=np.empty((0, 7))), INSIDE)
    assert prediction.interval is None
    assert prediction.prediction_interval is None
    assert prediction.value == float(log_longppl(TOY, 1e9, 1e10, 1e9))


def test_without_a_noise_estimate_there_is_no_prediction_interval() -> None:
    prediction = predict(stored(residual_std=None), INSIDE)
    assert prediction.interval is not None
    assert prediction.prediction_interval is None


def test_extrapolation_is_measured_per_axis_and_said() -> None:
    prediction = predict(stored(), Point(n_params=6e9, short_tokens=5e8, long_tokens=1e9))
    assert prediction.extrapolation.axes == pytest.approx((2.0, 2.0, 1.0))
    assert [warning.split(" ")[0] for warning in prediction.warnings] == ["N", "D_s"]
    assert predict(stored(), INSIDE).extrapolation.axes == (1.0, 1.0, 1.0)
    assert predict(stored(), INSIDE).warnings == ()


@given(st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_extrapolation_is_never_below_one(up: float, down: float) -> None:
    point = Point(n_params=3e9 * up, short_tokens=1e9 / down, long_tokens=1e9)
    ratios = predict(stored(), point).extrapolation.axes
    assert min(ratios) >= 1.0
    assert ratios[0] == pytest.approx(up)
    assert ratios[1] == pytest.approx(down)


def test_value_below_zero_is_said_to_be_impossible() -> None:
    prediction = predict(stored(parameters=(*TOY[:6], -5.0)), INSIDE)
    assert any("LongPPL below 1" in warning for warning in prediction.warnings)


def test_many_points_are_answered_as_one_by_one() -> None:
    points = [Point(n_params=1e8 * k, short_tokens=1e9 * k, long_tokens=1e9) for k in range(1, 30)]
    assert predict_all(stored(), points) == [predict(stored(), point) for point in points]
    assert predict_all(stored(), []) == []


@given(
    st.lists(st.tuples(*[st.sampled_from([1e8, 5e8, 1e9, 2e9, 3e9, 7e10, 1e11])] * 3), min_size=1, max_size=20),
    st.sets(st.sampled_from(["alpha", "beta_s", "B_l", "beta_l", "C"])),
)
def test_columns_are_what_single_points_are_answered(
    sizes: list[tuple[float, float, float]], is_open: set[str]
) -> None:
    """Values, intervals, ratios, and every warning in its order, to the bit."""
    law = stored(not_identifiable=tuple(is_open), parameters=(*TOY[:6], -1.2))
    columns = predict_columns(law, *zip(*sizes, strict=True))
    beyond = [np.broadcast_to(ratio, len(sizes)) for ratio in columns.extrapolation]
    for row, (n, short, long) in enumerate(sizes):
        one = predict(law, Point(n_params=n, short_tokens=short, long_tokens=long))
        assert columns.value[row] == one.value
        for low, high, interval in (
            (columns.low, columns.high, one.interval),
            (columns.prediction_low, columns.prediction_high, one.prediction_interval),
        ):
            assert (None if np.isnan(low[row]) else Interval(low=low[row], high=high[row])) == interval
        assert tuple(ratio[row] for ratio in beyond) == one.extrapolation.axes
        assert columns.determined[row] == one.determined
        assert columns.warnings[row] == one.warnings


def test_number_holds_for_all_points_of_a_column() -> None:
    """What is evaluated once and what is evaluated for each point is the same number."""
    long = np.geomspace(1e7, 1e12, 1001)
    once = predict_columns(stored(), 6e9, 5e8, long)
    each = predict_columns(stored(), np.full(1001, 6e9), np.full(1001, 5e8), long)
    for name in ("value", "low", "high", "prediction_low", "prediction_high"):
        assert np.array_equal(getattr(once, name), getattr(each, name))
    assert once.warnings == each.warnings


@pytest.mark.parametrize("short", [[1e9, 2e9], [[1e9], [2e9], [3e9]]])
def test_columns_of_different_shapes_are_refused(short: object) -> None:
    with pytest.raises(InvalidPointError, match=r"one length, not arrays of the shapes N \(3,\), D_s"):
        predict_columns(stored(), [1e8, 1e9, 2e9], short, 1e9)  # type: ignore[arg-type]


def test_axis_not_varied_determines_its_own_value_only() -> None:
    """B61: what is determined is still answered, what is not has no interval."""
    result = fit(LONG_CONTEXT, toy_observations(ONE_LONG_BUDGET, std=0.01), bootstrap_draws=40)
    there = predict(result, Point(n_params=1e10, short_tokens=1e11, long_tokens=1e10))
    elsewhere = predict(result, Point(n_params=1e9, short_tokens=1e10, long_tokens=2e10))
    assert there.determined
    assert there.interval is not None
    assert there.value == pytest.approx(float(log_longppl(TOY, 1e10, 1e11, 1e10)), abs=0.1)
    assert not elsewhere.determined
    assert elsewhere.interval is None
    assert any("leave this value open" in warning for warning in elsewhere.warnings)


def test_axis_with_two_values_determines_those_two() -> None:
    law = stored(not_identifiable=("B_l", "beta_l", "C"))
    assert predict(law, replace(INSIDE, long_tokens=1e8)).determined
    assert predict(law, replace(INSIDE, long_tokens=1e11)).determined
    assert not predict(law, INSIDE).determined


def test_two_open_axes_determine_nothing_along_them() -> None:
    law = stored(not_identifiable=("B_s", "beta_s", "B_l", "beta_l", "C"))
    assert not predict(law, Point(n_params=1e9, short_tokens=1e9, long_tokens=1e11)).determined


def test_absent_term_is_no_obstacle() -> None:
    law = stored(parameters=(400.0, 0.34, 0.0, 0.5, 30.0, 0.2, 1.7), not_identifiable=("beta_s",))
    assert predict(law, INSIDE).determined


@pytest.mark.parametrize("size", [0.0, -1.0, math.nan, math.inf])
def test_size_that_is_not_positive_is_refused_by_name(size: float) -> None:
    """B69 at the other end: no infinity comes out of a negative power."""
    with pytest.raises(InvalidPointError, match="D_l is"):
        predict(stored(), replace(INSIDE, long_tokens=size))


def test_level_outside_its_range_and_unknown_law_are_refused() -> None:
    with pytest.raises(InvalidPointError, match="level"):
        predict(stored(), INSIDE, level=1.0)
    with pytest.raises(UnknownLawError, match="known laws: long_context"):
        predict(stored(law="other"), INSIDE)


def test_fit_and_its_stored_numbers_predict_alike() -> None:
    result = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=25)
    assert predict(result, INSIDE) == predict(result.fitted_law, INSIDE)
