"""Profile intervals."""

from dataclasses import replace

import numpy as np
import pytest

from fitting.errors import InvalidObservationsError
from fitting.joint import fit
from fitting.laws import CHINCHILLA, INTERACTIONS, LONG_CONTEXT
from fitting.profile import profile, profiles_of
from fitting.values import Residual
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
