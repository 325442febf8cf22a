"""What a fit reports, and what it refuses."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitting.errors import InvalidObservationsError, NotEnoughObservationsError, UnknownLawError
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.observations import Observations, observations_from_arrays
from fitting.predict import log_longppl
from fitting.values import Fit, Status
from tests.fitting.toy_law import (
    FULL_GRID,
    LONG_EQUALS_SHORT,
    LONG_TOKENS,
    ONE_LONG_BUDGET,
    TOY,
    noise,
    toy_observations,
)


def quick_fit(observations: Observations, **settings: float) -> Fit:
    return fit(LONG_CONTEXT, observations, bootstrap_draws=0, **settings)  # type: ignore[arg-type]


def test_full_grid_gives_back_the_toy_law() -> None:
    """B59: all parameters within 0.1 % and the far prediction right."""
    result = quick_fit(toy_observations())
    assert result.status is Status.CONVERGED
    assert result.parameters == pytest.approx(TOY, rel=1e-3)
    assert log_longppl(result.parameters, 1e10, 2.56e11, 4e11) == pytest.approx(2.264802, abs=1e-4)


@pytest.mark.parametrize(("points", "rank"), [(ONE_LONG_BUDGET, 5), (LONG_EQUALS_SHORT, 6)])
def test_axis_that_was_not_varied_leaves_its_exponent_and_the_offset_open(
    points: tuple[tuple[float, float, float], ...], rank: int
) -> None:
    """B61: no interval for what cannot be known."""
    result = fit(LONG_CONTEXT, toy_observations(points, std=0.01), bootstrap_draws=25)
    assert result.status is Status.NOT_IDENTIFIABLE
    assert result.jacobian_rank == rank
    assert {"B_l", "beta_l", "C"} <= set(result.not_identifiable)
    assert not {"A", "alpha"} & set(result.not_identifiable)
    shown = dict(zip(LONG_CONTEXT.parameter_names, result.intervals, strict=True))
    assert all(shown[name] is None for name in result.not_identifiable)
    assert shown["alpha"] is not None
    assert any("D_l" in warning for warning in result.warnings)


def test_axis_with_two_values_leaves_its_exponent_open() -> None:
    points = tuple(point for point in FULL_GRID if point[2] in LONG_TOKENS[:2])
    result = quick_fit(toy_observations(points))
    assert result.not_identifiable == ("B_l", "beta_l", "C")
    assert any("D_l has two values" in warning for warning in result.warnings)


def test_rounding_of_budgets_is_no_variation() -> None:
    points = tuple((n, s, 1e10 * (1 + 0.0005 * k)) for k, (n, s, _) in enumerate(ONE_LONG_BUDGET))
    assert quick_fit(toy_observations(points)).not_identifiable == ("B_l", "beta_l", "C")


def test_six_distinct_points_are_refused_with_both_numbers() -> None:
    """B63: repeated points do not count twice."""
    six = FULL_GRID[::11]
    with pytest.raises(NotEnoughObservationsError, match="need at least 7 distinct observations, have 6") as raised:
        quick_fit(toy_observations(six + six))
    assert (raised.value.needed, raised.value.have) == (7, 6)


def test_no_observation_at_all_is_refused_likewise() -> None:
    with pytest.raises(NotEnoughObservationsError, match="have 0"):
        quick_fit(observations_from_arrays([1e8], [1e9], [1e9], [math.nan]))


def test_absent_term_is_named_and_has_no_interval() -> None:
    """B65: a parameter that ends on a bound is listed, and its spread is null."""
    without_short = (400.0, 0.34, 0.0, 0.28, 30.0, 0.20, 2.7)
    rising = toy_observations(parameters=without_short)
    rising = replace(rising, log_longppl=rising.log_longppl + 0.02 * np.log(rising.short_tokens))
    result = fit(LONG_CONTEXT, rising, bootstrap_draws=25)
    assert result.status is Status.TERM_ABSENT
    assert result.at_bound == ("B_s",)
    assert result.parameters[2] == 0.0
    assert result.not_identifiable == ("beta_s",)
    assert result.intervals[2] is None
    assert result.intervals[3] is None
    assert result.intervals[5] is not None
    assert any("no effect of D_s" in warning for warning in result.warnings)


def test_exponent_beyond_its_range_ends_at_the_bound() -> None:
    steep = toy_observations(parameters=(400.0, 0.34, 1e29, 3.2, 30.0, 0.20, 1.7))
    result = fit(LONG_CONTEXT, steep, bootstrap_draws=25)
    assert result.status is Status.AT_BOUND
    assert result.at_bound == ("beta_s",)
    assert result.parameters[3] == 2.0
    assert result.intervals[3] is None


def test_loss_that_does_not_vary_is_all_offset() -> None:
    observations = toy_observations()
    result = quick_fit(replace(observations, log_longppl=np.full(len(observations), 2.0)))
    assert result.status is Status.TERM_ABSENT
    assert result.at_bound == ("A", "B_s", "B_l")
    assert result.parameters[6] == pytest.approx(2.0, abs=1e-12)
    assert result.r2 is None


def test_one_wild_loss_hardly_moves_the_exponent() -> None:
    """B71: with the Huber loss an error of +1.0 moves alpha by less than 1 %."""
    clean = toy_observations()
    wild = clean.log_longppl.copy()
    wild[21] += 1.0
    result = quick_fit(replace(clean, log_longppl=wild), huber_delta=1e-3)
    assert result.parameters[1] == pytest.approx(TOY[1], rel=0.01)


def test_objective_is_the_summed_huber_loss_of_the_residuals() -> None:
    observations = toy_observations(std=0.05)
    result = quick_fit(observations)
    residuals = log_longppl(result.parameters, *observations.sizes.T) - observations.log_longppl
    by_hand = sum(0.5 * r * r if abs(r) <= 0.05 else 0.05 * (abs(r) - 0.025) for r in residuals.tolist())
    assert max(abs(residuals)) > 0.05
    assert result.objective == pytest.approx(by_hand, rel=1e-12)


@settings(max_examples=3, deadline=None)
@given(st.permutations(range(32)))
def test_order_of_rows_changes_nothing(order: list[int]) -> None:
    observations = toy_observations(FULL_GRID[::2], std=0.01)
    n_params, short_tokens, long_tokens = observations.sizes[order].T
    shuffled = observations_from_arrays(n_params, short_tokens, long_tokens, observations.log_longppl[order])
    one, other = (fit(LONG_CONTEXT, rows, bootstrap_draws=4, seed=3) for rows in (observations, shuffled))
    assert one.parameters == other.parameters
    assert one.objective == other.objective
    assert one.n_draws_ok == other.n_draws_ok


@settings(max_examples=3, deadline=None)
@given(st.floats(-2.0, 2.0), st.floats(1e-3, 1e3))
def test_shifted_loss_shifts_the_offset_and_other_units_scale_an_amplitude(shift: float, unit: float) -> None:
    observations = toy_observations(std=0.01)
    base = quick_fit(observations)
    moved = quick_fit(
        replace(
            observations,
            log_longppl=observations.log_longppl + shift,
            long_tokens=observations.long_tokens * unit,
        )
    )
    assert moved.parameters[1:6:2] == pytest.approx(base.parameters[1:6:2], rel=1e-6)
    assert moved.parameters[6] == pytest.approx(base.parameters[6] + shift, abs=1e-6)
    assert moved.parameters[4] == pytest.approx(base.parameters[4] * unit ** base.parameters[5], rel=1e-5)


def test_large_integers_are_floats_before_any_arithmetic() -> None:
    """B22: int64 sizes whose product overflows, under a negative power."""
    sizes = np.array([(70 * n, 30_000 * s, 20_000 * d) for n, s, d in FULL_GRID]).astype(np.int64)
    assert sizes.max() > 1_900_000_000_000_000
    n_params, short_tokens, long_tokens = sizes.T
    y = log_longppl(TOY, n_params, short_tokens, long_tokens)
    result = quick_fit(observations_from_arrays(n_params, short_tokens, long_tokens, y))
    assert result.parameters == pytest.approx(TOY, rel=1e-3)
    assert log_longppl(TOY, np.int64(7_000_000_000), np.int64(2_000_000_000_000), np.int64(10)) == pytest.approx(
        400 * 7e9**-0.34 + 410 * 2e12**-0.28 + 30 * 10**-0.2 + 1.7, rel=1e-15
    )
    assert log_longppl((1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0), 4, 1, 1) == 0.25


def test_values_are_plain_python_numbers() -> None:
    """B93: a NumPy scalar would bind neither to SQL nor to JSON."""
    result = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=20, holdout=toy_observations(std=0.02))
    assert result.holdout is not None
    scalars = [
        *(getattr(result, field.name) for field in fields(result)),
        *(getattr(result.holdout, field.name) for field in fields(result.holdout)),
        *result.parameters,
        *(bound for interval in result.intervals if interval for bound in (interval.low, interval.high)),
        *(bound for span in result.ranges.axes for bound in (span.low, span.high)),
    ]
    assert not [value for value in scalars if isinstance(value, np.generic)]


def test_held_out_rows_are_compared_and_not_fitted() -> None:
    observations = toy_observations(std=0.01)
    elsewhere = replace(observations, log_longppl=observations.log_longppl + 0.5)
    alone, beside = quick_fit(observations), fit(LONG_CONTEXT, observations, bootstrap_draws=0, holdout=elsewhere)
    assert alone.holdout is None
    assert beside.holdout is not None
    assert beside.holdout.bias == pytest.approx(-0.5, abs=0.01)
    assert beside.parameters == alone.parameters


def test_held_out_set_without_a_usable_row_is_refused() -> None:
    nothing = observations_from_arrays([1e8], [1e9], [1e9], [math.nan])
    with pytest.raises(InvalidObservationsError, match="no held-out row has a usable loss"):
        fit(LONG_CONTEXT, toy_observations(), bootstrap_draws=0, holdout=nothing)


@pytest.mark.parametrize(
    "bad", [{"huber_delta": 0.0}, {"huber_delta": math.nan}, {"level": 1.0}, {"bootstrap_draws": -1}]
)
def test_setting_outside_its_range_is_refused_by_name(bad: dict[str, float]) -> None:
    with pytest.raises(InvalidObservationsError, match=next(iter(bad))):
        fit(LONG_CONTEXT, toy_observations(), **bad)  # type: ignore[arg-type]


def test_law_may_be_named_and_an_unknown_one_is_refused() -> None:
    observations = toy_observations(std=0.01)
    assert fit("long_context", observations, bootstrap_draws=0).parameters == quick_fit(observations).parameters
    with pytest.raises(UnknownLawError, match="long_context"):
        fit("short_context", observations)


def test_clusters_below_ten_are_mentioned() -> None:
    nine = tuple(point for point in FULL_GRID if point[0] < 3e9 and point[1] < 6e10)
    result = fit(LONG_CONTEXT, toy_observations(nine, std=0.01), bootstrap_draws=20)
    assert result.n_clusters == 9
    assert any("only 9 clusters" in warning for warning in result.warnings)


def test_repeated_rows_are_mentioned() -> None:
    observations = toy_observations((*FULL_GRID, FULL_GRID[4]))
    result = quick_fit(observations)
    assert any(warning.startswith("rows 5, 65 repeat") for warning in result.warnings)


def test_residual_noise_is_estimated() -> None:
    observations = toy_observations(FULL_GRID * 4)
    noisy = replace(observations, log_longppl=observations.log_longppl + noise(256, 0.02))
    result = quick_fit(noisy)
    assert result.residual_std == pytest.approx(0.02, rel=0.1)
    assert result.mape_log is not None
    assert result.r2 is not None
    assert 0.9 < result.r2 < 1.0
