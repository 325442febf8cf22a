"""Forecasts of a trajectory, elasticities, agreement of protocols."""

import numpy as np
import pytest

from fitting.agreement import concordance
from fitting.errors import InvalidObservationsError, NotEnoughObservationsError
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT, TRAJECTORY
from fitting.observations import Observations, observations_from_arrays
from fitting.trajectory import elasticity_ratio, forecast, reference_exponent
from fitting.values import Fit, Reference
from tests.fitting.toy_law import noise, toy_observations

TOKENS = 1e8 * np.arange(5, 121, 5)  # 5N to 120N at N = 1e8


def trajectory(std: float = 0.0, *, amplitude: float = 30.0, exponent: float = 0.2, seed: int = 0) -> Observations:
    y = amplitude * TOKENS**-exponent + 1.7 + noise(len(TOKENS), std, seed)
    return observations_from_arrays(np.full(len(TOKENS), 1e8), np.full(len(TOKENS), 1e9), TOKENS, y)


def test_forecast_from_a_prefix_of_clean_losses_is_exact() -> None:
    ahead = forecast(trajectory(), until_tokens=20e8)
    assert ahead.fit.n_observations == 4
    assert ahead.fit.parameters == pytest.approx((30.0, 0.2, 1.7), rel=1e-6)
    assert ahead.later is not None
    assert ahead.later.n_observations == 20
    assert ahead.final_error_percent == pytest.approx(0.0, abs=1e-9)
    assert ahead.carried is not None
    assert ahead.carried.bias > 0.05


def test_reference_from_complete_trajectories_helps_a_noisy_prefix() -> None:
    others = [trajectory(0.001, amplitude=a, seed=s) for s, a in enumerate((20.0, 35.0, 50.0))]
    reference = reference_exponent(others)
    assert reference.value == pytest.approx(0.2, abs=0.03)
    errors = {}
    for penalty in (0.0, 1.0):
        ahead = [
            forecast(
                trajectory(0.004, seed=10 + s), until_tokens=25e8, penalty=penalty, reference=reference
            ).final_error_percent
            for s in range(6)
        ]
        errors[penalty] = np.mean([abs(error) for error in ahead if error is not None])
    assert errors[1.0] < errors[0.0]


def test_forecast_has_the_interval_that_other_trajectories_missed_theirs_by() -> None:
    held = 0
    for seed in range(20):
        others = [trajectory(0.002, amplitude=24 + 2 * k, seed=1000 + 10 * seed + k) for k in range(7)]
        ahead = forecast(trajectory(0.002, seed=500 + seed), until_tokens=40e8, others=others)
        assert ahead.interval is not None
        assert ahead.warnings == ()
        held += ahead.interval.low <= 30 * 120e8**-0.2 + 1.7 <= ahead.interval.high
    assert 15 <= held <= 20  # 18 expected


def test_forecast_beyond_the_rows_goes_where_the_others_went() -> None:
    others = [trajectory(0.001, amplitude=a, seed=int(a)) for a in (20.0, 25.0, 30.0, 35.0, 40.0)]
    running = trajectory(0.001, seed=77)
    ahead = forecast(running.subset(running.long_tokens <= 40e8), until_tokens=40e8, others=others)
    assert ahead.later is None
    assert ahead.final == pytest.approx(30 * 120e8**-0.2 + 1.7, abs=0.02)
    assert ahead.interval is not None
    assert ahead.interval.low < 30 * 120e8**-0.2 + 1.7 < ahead.interval.high


def test_forecast_of_one_trajectory_says_that_it_has_no_interval() -> None:
    ahead = forecast(trajectory(0.002), until_tokens=40e8)
    assert ahead.interval is None
    assert ahead.warnings == ("no interval: it takes 5 other trajectories that go on, have 0",)


def test_forecast_of_a_finished_trajectory_has_nothing_to_judge() -> None:
    ahead = forecast(trajectory(), until_tokens=1e12)
    assert (ahead.later, ahead.carried, ahead.final_error_percent) == (None, None, None)


def test_forecast_refuses_what_it_cannot_do() -> None:
    with pytest.raises(NotEnoughObservationsError, match="need at least 3 distinct observations, have 2"):
        forecast(trajectory(), until_tokens=10e8)
    with pytest.raises(InvalidObservationsError, match="one N and one D_s"):
        forecast(toy_observations(), until_tokens=1e10)
    with pytest.raises(InvalidObservationsError, match="needs a reference"):
        forecast(trajectory(), until_tokens=20e8, penalty=1.0)
    with pytest.raises(InvalidObservationsError, match="at least one trajectory"):
        reference_exponent([])


def test_elasticity_ratio_is_that_of_the_two_laws() -> None:
    of_long = fit(TRAJECTORY, trajectory(amplitude=60.0, exponent=0.25), bootstrap_draws=0)
    of_short = fit(TRAJECTORY, trajectory(amplitude=10.0, exponent=0.15), bootstrap_draws=0)
    at = np.array([5e8, 120e8])
    by_hand = (0.25 * 60 * at**-0.25) / (0.15 * 10 * at**-0.15)
    assert elasticity_ratio(of_long, of_short, at) == pytest.approx(by_hand, rel=1e-5)


def test_elasticity_needs_trajectory_fits() -> None:
    joint: Fit = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=0)
    with pytest.raises(InvalidObservationsError, match="needs fits of the law trajectory"):
        elasticity_ratio(joint, joint, [1e9])


def test_single_trajectory_has_no_cluster_interval_but_one_of_rows() -> None:
    from fitting.values import Resampled

    rows = trajectory(0.005)
    assert fit(TRAJECTORY, rows, bootstrap_draws=40).intervals == (None,) * 3
    by_rows = fit(TRAJECTORY, rows, bootstrap_draws=40, resampled=Resampled.ROWS)
    assert by_rows.intervals[1] is not None
    assert any("one by one" in warning for warning in by_rows.warnings)


def test_penalty_needs_only_the_reference_given() -> None:
    low = Reference(parameter="beta_l", value=0.1, n_slices=3)
    held = forecast(trajectory(), until_tokens=40e8, penalty=1.0, reference=low)
    assert held.fit.penalty.binds == ("beta_l",)


def test_concordance_is_lins() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    assert concordance(x, x) == pytest.approx(1.0)
    assert concordance(x, x + 1) == pytest.approx(2 * 1.25 / (1.25 + 1.25 + 1.0))
    assert concordance(x, -x) < 0
    assert concordance(x, [2.0] * 4) == 0.0


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([1.0, 2.0], [1.0], "two lists of one length"),
        ([1.0], [1.0], "two lists of one length"),
        ([1.0, np.nan], [1.0, 2.0], "finite"),
        ([1.0, 1.0], [1.0, 1.0], "no value differs"),
    ],
)
def test_concordance_refuses_what_has_none(x: list[float], y: list[float], message: str) -> None:
    with pytest.raises(InvalidObservationsError, match=message):
        concordance(x, y)
