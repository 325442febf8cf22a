"""The optimiser: its objective, its starts, its weights."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from fitting import engine
from fitting.basis import Basis
from fitting.engine import Problem
from fitting.identifiability import varied_axes
from fitting.laws import LONG_CONTEXT
from fitting.observations import Observations
from fitting.values import FloatArray
from tests.fitting.toy_law import TOY, toy_observations


def problem_of(observations: Observations, *, huber_delta: float = 0.05, weights: FloatArray | None = None) -> Problem:
    sizes = observations.sizes
    varied = varied_axes(sizes)
    return Problem(
        basis=Basis.of(sizes, varied),
        log_longppl=observations.log_longppl,
        weights=np.ones(len(observations)) if weights is None else weights,
        huber_delta=huber_delta,
        lower=np.array(LONG_CONTEXT.lower),
        upper=np.array(LONG_CONTEXT.upper),
        varied=varied,
    )


def parameters_of(problem: Problem) -> FloatArray:
    return problem.basis.to_parameters(engine.search(problem).theta)


def test_huber_loss_has_its_half_and_turns_linear_at_delta() -> None:
    """B71: residual 0.01 at delta 1e-3 costs 9.5e-6."""
    assert engine.huber(np.array([0.01, -0.01]), 1e-3).tolist() == pytest.approx([9.5e-6, 9.5e-6], rel=1e-12)
    assert engine.huber(np.array([0.01]), 0.05)[0] == pytest.approx(5e-5)


def test_huber_loss_summed_is_the_cost_of_scipy() -> None:
    residuals = np.array([0.001, -0.04, 0.05, 0.2, -1.0])

    def unmoved(x: FloatArray) -> FloatArray:
        return residuals + np.zeros(5) * x

    cost = least_squares(unmoved, [0.0], loss="huber", f_scale=0.05).cost
    assert engine.huber(residuals, 0.05).sum() == pytest.approx(cost, rel=1e-14)


@pytest.mark.parametrize("scale", [1 / 64, 64.0])
def test_scaling_the_objective_moves_no_parameter(scale: float) -> None:
    """B59: a mean instead of a sum must not stop the search early."""
    observations = toy_observations()
    scaled = problem_of(observations, weights=np.full(64, scale))
    assert parameters_of(scaled) == pytest.approx(np.array(TOY), rel=1e-3)
    noisy = toy_observations(std=0.01)
    assert parameters_of(problem_of(noisy, weights=np.full(64, scale))) == pytest.approx(
        parameters_of(problem_of(noisy)), rel=1e-5
    )


def test_refit_started_on_every_bound_reaches_the_optimum() -> None:
    """B65: amplitudes at zero and exponents at their bounds are no trap."""
    problem = problem_of(toy_observations())
    on_bounds = np.array([0.0, 0.01, 0.0, 2.0, 0.0, 0.01, 0.0])
    refits = engine.refit(problem, np.ones((1, 64)), on_bounds)
    assert refits.converged.tolist() == [True]
    assert problem.basis.to_parameters(refits.thetas)[0] == pytest.approx(np.array(TOY), rel=1e-3)


def test_weight_of_a_row_counts_it_that_many_times() -> None:
    observations = toy_observations(std=0.02)
    weights = np.random.default_rng(5).integers(0, 3, 64).astype(np.float64)
    start = engine.search(problem_of(observations)).theta
    weighted = engine.refit(problem_of(observations), weights[None, :], start).thetas[0]

    repeated = np.repeat(np.arange(64), weights.astype(int))
    problem = problem_of(observations)
    copied = Problem(
        basis=Basis(centre=problem.basis.centre, logs=problem.basis.logs[repeated]),
        log_longppl=observations.log_longppl[repeated],
        weights=np.ones(len(repeated)),
        huber_delta=problem.huber_delta,
        lower=problem.lower,
        upper=problem.upper,
        varied=problem.varied,
    )
    assert weighted == pytest.approx(engine.search(copied).theta, rel=1e-4)


def test_weak_term_with_an_optimum_at_either_end_of_its_range_gets_the_better_one() -> None:
    """A table like this once ended 0.1 % above the optimum: the scan's best points all led to one end."""
    for seed in (3, 8):
        observations = toy_observations(std=0.06, seed=seed, parameters=(2.0, 0.3, *TOY[2:]))
        problem = problem_of(observations)
        found = engine.search(problem)
        assert found.converged
        others = [
            engine.refit(problem, np.ones((1, 64)), np.array([0.05, alpha, 0.1, beta, 0.1, 0.2, 3.0]))
            for alpha in (0.02, 1.8)
            for beta in (0.1, 1.0)
        ]
        for other in others:
            residuals = problem.basis.values(other.thetas[0]) - problem.log_longppl
            assert found.objective <= engine.huber(residuals, 0.05).sum() * (1 + 1e-9)
