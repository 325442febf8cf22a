"""The lmfit face of a fit."""

import lmfit
import pytest

from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.lmfit_view import lmfit_parameters, lmfit_report
from tests.fitting.toy_law import ONE_LONG_BUDGET, toy_observations


def test_view_has_values_bounds_and_the_spread_of_the_draws() -> None:
    result = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=25)
    view = lmfit_parameters(result)
    assert tuple(view.valuesdict().values()) == pytest.approx(result.parameters, rel=1e-12)
    assert (view["alpha"].min, view["alpha"].max, view["A"].min) == (0.01, 2.0, 0.0)
    assert view["alpha"].stderr == pytest.approx(result.draws[:, 1].std(ddof=1))
    assert view["A"].correl["alpha"] > 0.9
    assert "beta_l" in lmfit.fit_report(view)


def test_parameter_without_interval_has_no_spread() -> None:
    view = lmfit_parameters(fit(LONG_CONTEXT, toy_observations(ONE_LONG_BUDGET, std=0.01), bootstrap_draws=25))
    assert view["beta_l"].stderr is None
    assert view["alpha"].stderr is not None


def test_report_reads_like_lmfits_and_says_what_was_minimised() -> None:
    result = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=25)
    report = lmfit_report(result)
    for expected in ("[[Model]]", "[[Fit Statistics]]", "# data points      = 64", "[[Variables]]", "(huber)", "alpha"):
        assert expected in report
