"""The optimiser of the joint fit, on scipy. Replace this module to replace the engine; nothing else knows it.

The objective is sum_i m_i huber_delta(r_i) with weights m_i, which for unit weights is the ``cost`` of
``scipy.optimize.least_squares(loss="huber", f_scale=delta)``. It is a sum, not a mean: a mean shrinks under the
stopping tolerances as rows are added.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from fitting.basis import AMPLITUDES, CONSTANT, EXPONENTS, N_PARAMETERS, Basis
from fitting.values import FloatArray

_START_EXPONENTS = (0.05, 0.15, 0.4, 1.0)
_MAX_EVALUATIONS = 500
# Residuals of this share of the largest |y| are rounding: fits of noiseless numbers end in them.
_ROUNDING_SHARE = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Precision:
    """When to stop, and what then counts as converged.

    Attributes:
        tolerance: scipy's ftol, xtol and gtol.
        gradient_share: a gradient is zero below this share of what its terms would give if all pulled one way.
        bound_slack: how near a bound is on it; an interior method comes near and never arrives.
    """

    tolerance: float
    gradient_share: float
    bound_slack: float


_FULL = _Precision(tolerance=1e-15, gradient_share=1e-6, bound_slack=0.0)
_REFIT = _Precision(tolerance=1e-10, gradient_share=1e-4, bound_slack=1e-4)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Problem:
    """What is minimised.

    Attributes:
        basis: the rows' coordinates.
        log_longppl: y (n).
        weights: m (n), how often each row counts.
        huber_delta: where the loss turns linear, nats.
        lower: lower bounds of theta (7).
        upper: upper bounds of theta (7).
        varied: which axes the rows vary (3); the term of any other axis is held at zero.
    """

    basis: Basis
    log_longppl: FloatArray
    weights: FloatArray
    huber_delta: float
    lower: FloatArray
    upper: FloatArray
    varied: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Optimum:
    """Where a search ended.

    Attributes:
        theta: the point, in the coordinates of the basis.
        objective: the objective there.
        gradient_norm: largest absolute gradient component that does not push against a bound.
        converged: whether that gradient vanishes to within rounding.
        on_bound: which components lie exactly on a bound (7).
    """

    theta: FloatArray
    objective: float
    gradient_norm: float
    converged: bool
    on_bound: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Refits:
    """Optima of one problem under many sets of weights: ``thetas`` (R x 7) and which of them converged (R)."""

    thetas: FloatArray
    converged: NDArray[np.bool_]


def huber(residuals: FloatArray, delta: float) -> FloatArray:
    """r^2/2 up to delta, delta (|r| - delta/2) beyond, elementwise."""
    size = np.abs(residuals)
    return np.where(size <= delta, 0.5 * residuals**2, delta * (size - 0.5 * delta))


def search(problem: Problem) -> Optimum:
    """The best optimum found from many starts.

    Several starts descend; the best of their ends descends on to machine precision. Components that crowd a bound are
    then put on it, if the objective agrees.
    """
    ends = [_descend(problem, start, precision=_REFIT) for start in _starts(problem)]
    best = min(ends, key=lambda end: end.objective if np.isfinite(end.objective) else np.inf)
    return _settle(problem, _descend(problem, best.theta, precision=_FULL))


def refit(problem: Problem, weights: FloatArray, start: FloatArray) -> Refits:
    """Optima under each row of ``weights`` (R x n), all started from the point ``start``."""
    lifted = _inside(problem, start)
    thetas = np.empty((len(weights), N_PARAMETERS))
    converged = np.zeros(len(weights), dtype=np.bool_)
    for draw, drawn in enumerate(weights):
        kept = drawn > 0
        resampled = replace(
            problem,
            basis=problem.basis.rows(kept),
            log_longppl=problem.log_longppl[kept],
            weights=drawn[kept],
        )
        optimum = _descend(resampled, lifted, precision=_REFIT)
        thetas[draw] = optimum.theta
        converged[draw] = optimum.converged and bool(np.isfinite(optimum.theta).all())
    return Refits(thetas=thetas, converged=converged)


def _starts(problem: Problem) -> list[FloatArray]:
    """The best point of a lattice of exponents, and the best ones with one exponent small or large.

    Amplitudes are the non-negative least-squares solution at each lattice point. The extra starts are for weak terms:
    their exponent may have one optimum at either end of its range.
    """
    y = problem.log_longppl
    axes = np.meshgrid(*(_START_EXPONENTS if varied else (0.4,) for varied in problem.varied), indexing="ij")
    lattice = np.stack([axis.ravel() for axis in axes], axis=1)
    thetas = np.empty((len(lattice), N_PARAMETERS))
    objectives = np.empty(len(lattice))
    for k, exponents in enumerate(lattice):
        columns = problem.basis.columns(exponents)
        means = columns.mean(axis=0)
        amplitudes, _ = nnls(columns - means, y - y.mean())
        thetas[k, EXPONENTS] = exponents
        thetas[k, AMPLITUDES] = amplitudes
        thetas[k, CONSTANT] = y.mean() - means @ amplitudes
        objectives[k] = _objective(problem, thetas[k])
    chosen = {int(np.argmin(objectives))}
    for axis in np.flatnonzero(problem.varied):
        for end in (_START_EXPONENTS[0], _START_EXPONENTS[-1]):
            chosen.add(int(np.argmin(np.where(lattice[:, axis] == end, objectives, np.inf))))
    return [_inside(problem, thetas[k]) for k in sorted(chosen)]


def _inside(problem: Problem, theta: FloatArray) -> FloatArray:
    """The point moved off its bounds: an interior method started on a bound stays there."""
    moved = theta.copy()
    spread = np.where(problem.varied, problem.basis.logs.std(axis=0), 1.0)
    smallest = 0.05 * problem.log_longppl.std() / spread + 1e-6
    moved[AMPLITUDES] = np.where(problem.varied, np.maximum(theta[AMPLITUDES], smallest), 0.0)
    low, high = problem.lower[EXPONENTS], problem.upper[EXPONENTS]
    moved[EXPONENTS] = np.clip(theta[EXPONENTS], 2 * low, 0.9 * high)
    return moved


def _free(problem: Problem) -> NDArray[np.bool_]:
    free = np.ones(N_PARAMETERS, dtype=np.bool_)
    free[AMPLITUDES] = free[EXPONENTS] = problem.varied
    return free


def _descend(
    problem: Problem, start: FloatArray, *, precision: _Precision, free: NDArray[np.bool_] | None = None
) -> Optimum:
    """Minimise over the free components from ``start``; the others stay as they are."""
    free = _free(problem) if free is None else free
    basis, y = problem.basis, problem.log_longppl

    def full(x: FloatArray) -> FloatArray:
        theta = start.copy()
        theta[free] = x
        return theta

    def loss(z: FloatArray) -> FloatArray:
        # rho, rho', rho'' of the Huber loss over z = (r/delta)^2, times the weights
        inverse = 1.0 / np.sqrt(np.maximum(z, 1.0))
        rho = np.empty((3, len(z)))
        rho[0] = np.where(z <= 1.0, z, 2.0 / inverse - 1.0)
        rho[1] = inverse
        rho[2] = np.where(z <= 1.0, 0.0, -0.5 * inverse**3)
        rho *= problem.weights
        return rho

    def residuals(x: FloatArray) -> FloatArray:
        return basis.values(full(x)) - y

    def jacobian(x: FloatArray) -> FloatArray:
        return basis.jacobian(full(x))[:, free]

    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):  # a step that ends in NaN is not converged
        result = least_squares(
            residuals,
            start[free],
            jac=jacobian,
            bounds=(problem.lower[free], problem.upper[free]),
            x_scale="jac",
            loss=loss,  # type: ignore[arg-type]  # the stubs ask for a keyword that scipy never passes
            f_scale=problem.huber_delta,
            ftol=precision.tolerance,
            xtol=precision.tolerance,
            gtol=precision.tolerance,
            max_nfev=_MAX_EVALUATIONS,
        )
    return _optimum(problem, full(result.x), precision)


def _objective(problem: Problem, theta: FloatArray) -> float:
    residuals = problem.basis.values(theta) - problem.log_longppl
    return float(problem.weights @ huber(residuals, problem.huber_delta))


def _optimum(problem: Problem, theta: FloatArray, precision: _Precision) -> Optimum:
    residuals = problem.basis.values(theta) - problem.log_longppl
    pull = problem.weights * np.clip(residuals, -problem.huber_delta, problem.huber_delta)
    jacobian = problem.basis.jacobian(theta)
    gradient = jacobian.T @ pull
    at_lower = theta - problem.lower <= precision.bound_slack
    at_upper = problem.upper - theta <= precision.bound_slack
    blocked = (at_lower & (gradient > 0)) | (at_upper & (gradient < 0)) | ~_free(problem)
    blocked[EXPONENTS] |= at_lower[AMPLITUDES]  # the exponent of an absent term has no effect
    gradient = np.where(blocked, 0.0, gradient)
    rounding = _ROUNDING_SHARE * problem.weights.max() * np.abs(problem.log_longppl).max() * np.sqrt(len(pull))
    allowed = np.linalg.norm(jacobian, axis=0) * (precision.gradient_share * np.linalg.norm(pull) + rounding)
    return Optimum(
        theta=theta,
        objective=float(problem.weights @ huber(residuals, problem.huber_delta)),
        gradient_norm=float(np.abs(gradient).max()),
        converged=bool((np.abs(gradient) <= allowed).all()),
        on_bound=at_lower | at_upper,
    )


def _settle(problem: Problem, found: Optimum) -> Optimum:
    """Put components that crowd a bound exactly on it, all together or one after another, where that costs nothing."""
    free = _free(problem)
    best = found
    rounding = float(problem.weights.sum() * (1e-13 * np.abs(problem.log_longppl).max()) ** 2)
    crowding = [int(k) for k in np.flatnonzero(free) if _crowded_bound(problem, found.theta, int(k)) is not None]
    for group in (crowding, *([k] for k in crowding)):
        pinned, fewer = best.theta.copy(), free.copy()
        for k in group:
            pinned[k] = _crowded_bound(problem, found.theta, k)
            fewer[k] = False
            if k in AMPLITUDES:
                fewer[k + 1] = False
        if (fewer == free).all():
            continue
        settled = _descend(problem, pinned, precision=_FULL, free=fewer)
        if settled.objective <= best.objective * (1 + 1e-12) + rounding:
            best, free = settled, fewer
    return best


def _crowded_bound(problem: Problem, theta: FloatArray, component: int) -> float | None:
    """The bound that a component has come near to, if any."""
    low, high = float(problem.lower[component]), float(problem.upper[component])
    near = 1e-3 * max(1e-3, float(theta[AMPLITUDES].max())) if component in AMPLITUDES else 1e-2
    if theta[component] - low < near:
        return low
    return high if high - theta[component] < near else None
