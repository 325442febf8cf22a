"""Every law, by the same checks: its coordinates, its fit to its own values, its count of parameters."""

import numpy as np
import pytest

from fitting.basis import Basis
from fitting.errors import InvalidObservationsError, NotEnoughObservationsError, UnknownLawError
from fitting.identifiability import varied_axes
from fitting.joint import fit
from fitting.laws import LAWS, TRAJECTORY, VARIANTS, Law, law_named
from fitting.observations import Observations
from fitting.predict import law_values, predict
from fitting.values import FloatArray, Point, Status
from tests.fitting.toy_law import FULL_GRID, observed

TRUTHS = {
    "long_context": (400.0, 0.34, 410.0, 0.28, 30.0, 0.20, 1.7),
    "no_offset": (400.0, 0.34, 410.0, 0.28, 30.0, 0.20),
    "nonnegative_offset": (400.0, 0.34, 410.0, 0.28, 30.0, 0.20, 0.4),
    "combined_budget": (400.0, 0.34, 410.0, 0.28, 1.7),
    "effective_data": (400.0, 0.34, 410.0, 0.28, 3.0, 1.7),
    "interactions": (300.0, 0.34, 300.0, 0.28, 25.0, 0.20, 9000.0, 3000.0, 1500.0, 1.7),
    "trajectory": (30.0, 0.2, 1.7),
    "chinchilla": (400.0, 0.34, 410.0, 0.28, 1.7),
}
LAWS_TESTED = pytest.mark.parametrize("law", LAWS.values(), ids=lambda law: law.name)


def sizes_for(law: Law) -> FloatArray:
    if law is TRAJECTORY:
        return np.column_stack([np.full(8, 1e8), np.full(8, 1e9), np.geomspace(1e8, 1e11, 8)])
    sizes = np.array(FULL_GRID)
    sizes[:, [axis for axis in range(3) if axis not in law.axes]] = 1.0
    return np.unique(sizes, axis=0)


def table_of(law: Law, std: float = 0.0) -> Observations:
    return observed(law, TRUTHS[law.name], sizes_for(law), std)


@LAWS_TESTED
def test_fit_to_its_own_values_gives_back_its_parameters(law: Law) -> None:
    result = fit(law, table_of(law), bootstrap_draws=0)
    assert result.status is Status.CONVERGED
    assert result.parameters == pytest.approx(TRUTHS[law.name], rel=1e-5)
    assert result.objective < 1e-18


@LAWS_TESTED
def test_centred_values_and_derivatives_are_those_of_the_law(law: Law) -> None:
    sizes = sizes_for(law)
    basis = Basis.of(sizes, varied_axes(law.term_sizes(sizes)), law)
    lower, upper = basis.bounds
    generator = np.random.default_rng(1)
    theta = np.where(np.isfinite(lower), np.maximum(lower, 0.05), 0.3) * generator.uniform(1, 2, law.n_parameters)
    assert (theta < upper).all()
    parameters = basis.to_parameters(theta)
    assert basis.values(theta) == pytest.approx(law_values(law, parameters, *sizes.T), rel=1e-9)
    jacobian, gradients = basis.jacobian(theta), basis.parameter_gradients(theta)
    for k in range(law.n_parameters):
        step = np.zeros(law.n_parameters)
        step[k] = 1e-6
        slope = (basis.values(theta + step) - basis.values(theta - step)) / 2e-6
        assert jacobian[:, k] == pytest.approx(slope, rel=1e-5, abs=1e-8)
        change = (basis.to_parameters(theta + step) - basis.to_parameters(theta - step)) / 2e-6
        assert gradients[:, k] == pytest.approx(change, rel=1e-5, abs=1e-5 * np.abs(parameters).max())


@LAWS_TESTED
def test_law_is_told_by_its_name_and_describes_itself(law: Law) -> None:
    assert law_named(law.name) is law
    assert len(law.parameter_units) == len(law.lower) == len(law.upper) == law.n_parameters
    assert all(name in law.formula for name in law.parameter_names)


@LAWS_TESTED
def test_too_few_points_are_counted_as_the_law_sees_them(law: Law) -> None:
    few = table_of(law).subset(np.arange(len(table_of(law))) < law.n_parameters - 1)
    with pytest.raises(NotEnoughObservationsError, match=f"need at least {law.n_parameters} distinct"):
        fit(law, few)


def test_resamples_and_predictions_know_every_law() -> None:
    for law in VARIANTS:
        result = fit(law, table_of(law, std=0.01), bootstrap_draws=25)
        assert result.n_draws_ok >= 20, law.name
        said = predict(result, Point(n_params=6e9, short_tokens=1e11, long_tokens=1e10))
        assert said.interval is not None
        assert said.interval.low < said.value < said.interval.high or law.name == "interactions"
        assert said.extrapolation.n_params == pytest.approx(2.0)


def test_trajectory_law_refuses_rows_of_several_trajectories() -> None:
    sizes = np.array(FULL_GRID)
    with pytest.raises(InvalidObservationsError, match="one N and one D_s, and these rows have 16 pairs"):
        fit(TRAJECTORY, observed(LAWS["no_offset"], TRUTHS["no_offset"], sizes))


def test_size_that_a_law_does_not_use_says_nothing() -> None:
    law = LAWS["chinchilla"]
    result = fit(law, table_of(law, std=0.01), bootstrap_draws=0)
    assert predict(result, Point(n_params=1e9, short_tokens=7e7, long_tokens=1e10)).warnings == ()


def test_unknown_law_is_refused_with_those_known() -> None:
    with pytest.raises(UnknownLawError, match="no_offset"):
        law_named("kaplan")
