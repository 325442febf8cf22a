"""Profile intervals."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares

from fitting.errors import InvalidObservationsError
from fitting.joint import fit
from fitting.laws import CHINCHILLA, INTERACTIONS, LONG_CONTEXT
from fitting.profile import profile, profiles_of
from fitting.values import FloatArray, Residual
from tests.fitting.paper_grid import paper_grid
from tests.fitting.published import gemstones
from tests.fitting.toy_law import ONE_LONG_BUDGET, toy_observations


@pytest.mark.parametrize("parameter", ["alpha", "C"])
def test_ends_of_the_interval_lie_on_the_threshold(parameter: str) -> None:
    rows = paper_grid("loss")
    found = profile(LONG_CONTEXT, rows, parameter)
    result = fit(LONG_CONTEXT, rows, bootstrap_draws=0)
    assert found.interval is not None
    best = dict(zip(LONG_CONTEXT.parameter_names, result.parameters, strict=True))[parameter]
    assert found.interval.low < best < found.interval.high
    assert (found.open_low, found.open_high) == (False, False)
    assert found.objectives.min() == pytest.approx(result.objective, rel=1e-9)
    at_ends = np.interp([found.interval.low, found.interval.high], found.values, found.objectives)
    assert at_ends == pytest.approx([found.threshold] * 2, rel=1e-3)


def test_profile_agrees_with_the_bootstrap_where_rows_are_independent() -> None:
    rows = paper_grid("loss")
    found = profile(LONG_CONTEXT, rows, "beta_l")
    drawn = fit(LONG_CONTEXT, rows, bootstrap_draws=200).intervals[5]
    assert found.interval is not None
    assert drawn is not None
    ratio = (found.interval.high - found.interval.low) / (drawn.high - drawn.low)
    assert 0.6 < ratio < 1.7


def test_exponent_that_the_rows_leave_open_has_an_open_interval() -> None:
    """B61: no number pretending."""
    found = profile(LONG_CONTEXT, toy_observations(ONE_LONG_BUDGET, std=0.01), "beta_l")
    assert found.open_low
    assert found.open_high
    assert found.interval is not None
    assert (found.interval.low, found.interval.high) == pytest.approx((0.01, 2.0))


def test_log_residuals_have_profiles_of_exponents() -> None:
    found = profile(CHINCHILLA, gemstones(), "alpha", huber_delta=1e-3, residual=Residual.LOG)
    assert found.interval is not None
    assert found.interval.low < 0.3004 < found.interval.high
    assert found.interval.high - found.interval.low < 0.1


@pytest.mark.parametrize("residual", list(Residual))
def test_objective_with_the_offset_held_is_the_least_there_is(residual: Residual) -> None:
    """Descents from the lattice alone once ended up to half above it where the offset was far from its best value."""
    rows = paper_grid("loss")
    found = profile(LONG_CONTEXT, rows, "C", residual=residual)
    best = fit(LONG_CONTEXT, rows, residual=residual, bootstrap_draws=0)
    assert found.interval is not None
    assert (found.open_low, found.open_high) == (False, False)
    assert found.interval.low < best.parameters[6] < found.interval.high
    assert found.objectives.min() == pytest.approx(best.objective, rel=1e-9)
    for k in (12, 24, 60):
        held = float(found.values[k])

        def missed(point: FloatArray, held: float = held) -> FloatArray:
            values: FloatArray = np.exp(point[0:6:2] - np.log(rows.sizes) * point[1:6:2]).sum(axis=1) + held
            logs: FloatArray = np.log(np.maximum(values, 1e-9) / rows.log_longppl)
            return values - rows.log_longppl if residual is Residual.LINEAR else logs

        start = np.zeros(6)
        start[1::2] = (0.2, 0.25, 0.2)
        start[0::2] = np.log((rows.log_longppl.mean() - held) / 3) + np.log(rows.sizes).mean(axis=0) * start[1::2]
        bounds = ([-50, 0.01] * 3, [60, 2.0] * 3)
        end = least_squares(missed, start, bounds=bounds, x_scale="jac", loss="huber", f_scale=0.05, max_nfev=400)
        assert found.objectives[k] == pytest.approx(end.cost, rel=1e-7)


def test_all_profiles_come_in_the_order_of_the_law() -> None:
    settings = {"huber_delta": 0.05, "level": 0.9}
    rows = toy_observations(std=0.01)
    found = profiles_of(INTERACTIONS, rows, residual=Residual.LINEAR, **settings)
    assert [item.parameter for item in found] == ["alpha", "beta_s", "beta_l"]


def test_amplitude_has_no_profile_and_no_spare_row_no_interval() -> None:
    with pytest.raises(InvalidObservationsError, match="no profile of A; profiles exist of alpha, beta_s, beta_l, C"):
        profile(LONG_CONTEXT, paper_grid("loss"), "A")
    spread = toy_observations(std=0.01)
    seven = replace(spread.subset(np.isin(np.arange(64), [0, 7, 13, 26, 37, 51, 62])), excluded=())
    assert profile(LONG_CONTEXT, seven, "alpha").interval is None
