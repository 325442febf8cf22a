"""The joint fit against optima certified to machine precision on a published-size grid."""

import lmfit
import numpy as np
import pytest

from fitting.holdout import evaluate
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.predict import log_longppl
from fitting.values import FloatArray, Status
from tests.fitting.paper_grid import paper_grid

# column: F, (A, alpha, B_s, beta_s, B_l, beta_l, C), S5 MAPE % of LongPPL against the truth
REFERENCE = {
    "loss": (5.0069066020e-03, (42.32202, 0.21657286, 564.5052, 0.34365746, 65.7409, 0.22268362, -0.42023259), 0.2511),
    "loss_clustered": (
        4.0147747396e-03,
        (117.51, 0.28989277, 91.24483, 0.24925336, 44.25779, 0.19888038, -0.34889296),
        0.7737,
    ),
    "loss_outliers": (
        2.8579304914e-02,
        (83.70427, 0.26757953, 113.2384, 0.26097265, 46.56914, 0.20220891, -0.36526576),
        0.7198,
    ),
}
TRUTH = (67.0, 0.25, 238.0, 0.30, 45.0, 0.20, -0.40)


@pytest.mark.parametrize("column", REFERENCE)
def test_fit_reaches_the_certified_optimum(column: str) -> None:
    objective, parameters, _ = REFERENCE[column]
    result = fit(LONG_CONTEXT, paper_grid(column), bootstrap_draws=0)
    assert result.status is Status.CONVERGED
    assert result.objective == pytest.approx(objective, rel=1e-9)
    # exponents to seven digits, amplitudes and C to the digits that are printed
    assert result.parameters[1:6:2] == pytest.approx(parameters[1:6:2], abs=1.5e-8)
    assert result.parameters[0:6:2] == pytest.approx(parameters[0:6:2], rel=1e-6)
    assert result.parameters[6] == pytest.approx(parameters[6], abs=1e-7)
    assert result.gradient_norm < 1e-8


@pytest.mark.parametrize("column", REFERENCE)
def test_held_out_scale_is_predicted_as_well_as_the_certified_optimum_does(column: str) -> None:
    result = fit(LONG_CONTEXT, paper_grid(column), bootstrap_draws=0)
    against_truth = evaluate(result.parameters, paper_grid("loss_true", held_out=True))
    assert against_truth.mape_ppl == pytest.approx(REFERENCE[column][2], abs=5e-5)


def test_noiseless_table_gives_back_its_parameters() -> None:
    result = fit(LONG_CONTEXT, paper_grid("loss_true"), bootstrap_draws=0)
    assert result.objective < 1e-20
    assert result.parameters[1:6:2] == pytest.approx(TRUTH[1:6:2], abs=1e-8)
    assert result.parameters == pytest.approx(TRUTH, rel=1e-7)


@pytest.mark.parametrize("column", REFERENCE)
def test_objective_is_not_above_that_of_lmfit(column: str) -> None:
    observations = paper_grid(column)
    y = observations.log_longppl

    def residuals(parameters: lmfit.Parameters) -> FloatArray:
        values = list(parameters.valuesdict().values())
        return log_longppl(values, observations.n_params / 1e8, *(observations.sizes[:, 1:] / 1e9).T) - y

    start = lmfit.Parameters()
    for name, low, high in zip(LONG_CONTEXT.parameter_names, LONG_CONTEXT.lower, LONG_CONTEXT.upper, strict=True):
        start.add(name, value=0.3 if high == 2 else y.mean() / 3 if low == 0 else 0.0, min=low, max=high)
    rival = lmfit.minimize(residuals, start, method="least_squares", loss="huber", f_scale=0.05, x_scale="jac")
    size = np.abs(residuals(rival.params))
    theirs = np.where(size <= 0.05, size**2 / 2, 0.05 * (size - 0.025)).sum()
    assert fit(LONG_CONTEXT, observations, bootstrap_draws=0).objective <= theirs * (1 + 1e-9)
