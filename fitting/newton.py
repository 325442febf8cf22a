"""Newton's method on all parameters at once, to where the gradient vanishes: the certificate of a fit.

The Huber loss has a Hessian almost everywhere; rows beyond delta contribute their curvature alone (semismooth Newton).
Where delta is far below the residuals, few rows are inside and Newton from afar fails, so delta comes down in steps.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fitting.objective import Objective
from fitting.values import FloatArray

_MAX_ITERATIONS = 60
_MAX_DAMPING = 1e6
_NULL = 1e-11
_EPSILON = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Certificate:
    """What is known of R points.

    Attributes:
        theta: the points (R x P).
        value: the objective (R).
        gradient: its gradient, zero where a component only pushes against a bound or has no effect (R x P).
        size: what each component would be if all rows pulled one way: the scale to judge it by (R x P).
        noise: what rounding alone may leave of it (R x P).
    """

    theta: FloatArray
    value: FloatArray
    gradient: FloatArray
    size: FloatArray
    noise: FloatArray

    def converged(self, share: float) -> NDArray[np.bool_]:
        """Where every component is below this share of its size, or rounding (R)."""
        small: NDArray[np.bool_] = np.all(np.abs(self.gradient) <= share * self.size + 100 * self.noise, axis=1)
        return small

    def __getitem__(self, k: int) -> "Certificate":
        return Certificate(**{name: getattr(self, name)[k : k + 1] for name in self.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Point:
    theta: FloatArray
    value: FloatArray
    gradient: FloatArray
    free: NDArray[np.bool_]
    residual: FloatArray
    jacobian: FloatArray
    values: FloatArray
    noise: FloatArray
    size: FloatArray

    def pick(self, chosen: NDArray[np.bool_]) -> "_Point":
        return _Point(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def put(self, where: NDArray[np.bool_] | NDArray[np.intp], other: "_Point") -> None:
        for name in self.__slots__:
            getattr(self, name)[where] = getattr(other, name)


def certify(objective: Objective, thetas: FloatArray) -> Certificate:
    """Objective and gradient at the points (R x P)."""
    return _certificate(_evaluate(objective, thetas))


def slopes(objective: Objective, thetas: FloatArray) -> FloatArray:
    """The gradient relative to the length of each column of the Jacobian, bounds or not (R x P)."""
    point = _evaluate(objective, thetas)
    lengths = np.sqrt(_along(point.jacobian**2, objective.weights))
    relative: FloatArray = np.divide(point.gradient, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return relative


def polish(objective: Objective, thetas: FloatArray, *, stepwise: bool = True) -> Certificate:
    """Points (R x P) taken down to a vanishing gradient.

    Where delta is far below the residuals it comes down in steps, unless it is known not to be (not ``stepwise``).
    """
    *coarse, last = _levels(objective, thetas) if stepwise else [objective.huber_delta]
    for delta in coarse:
        thetas = _newton(replace(objective, huber_delta=delta), thetas).theta
    return _certificate(_newton(replace(objective, huber_delta=last), thetas))


def _certificate(point: "_Point") -> Certificate:
    gradient = np.where(point.free, point.gradient, 0.0)
    return Certificate(theta=point.theta, value=point.value, gradient=gradient, size=point.size, noise=point.noise)


def _levels(objective: Objective, thetas: FloatArray) -> list[float]:
    residuals = np.abs(objective.residuals(objective.basis.values(thetas)))
    finite = residuals[np.isfinite(residuals)]
    typical = 2 * float(np.median(finite)) if len(finite) else objective.huber_delta
    levels = []
    while typical > 2 * objective.huber_delta:
        levels.append(typical)
        typical /= 3
    return [*levels, objective.huber_delta]


def _newton(objective: Objective, thetas: FloatArray) -> _Point:
    point = ends = _evaluate(objective, thetas.copy())
    remaining = np.arange(len(thetas))
    damping = np.zeros(len(thetas))
    for _ in range(_MAX_ITERATIONS):
        done = (np.abs(point.gradient) <= point.noise).all(axis=1, where=point.free)
        done |= (damping > _MAX_DAMPING) | ~np.isfinite(point.value)
        if done.all() and len(done) == len(thetas):
            return point
        if done.any():
            ends.put(remaining[done], point.pick(done))
            if done.all():
                return ends
            remaining, damping = remaining[~done], damping[~done]
            objective, point = objective.pick(~done), point.pick(~done)
        trial = _evaluate(objective, _clipped(objective, point.theta + _step(objective, point, damping)))
        better = trial.value < point.value
        if not better.all():
            level = trial.value <= point.value * (1 + 1e-13) + 1e-32
            better |= level & (_pull(trial) < 0.9 * _pull(point))
        damping = np.where(better, np.where(damping > 1e-7, damping / 10, 0.0), np.maximum(damping * 10, 1e-6))
        if better.all():
            point = trial
        else:
            point.put(better, trial.pick(better))
    ends.put(remaining, point)
    return ends


def _pull(point: _Point) -> FloatArray:
    size = np.where(point.size > 0, point.size, 1.0)
    largest: FloatArray = np.where(point.free, np.abs(point.gradient) / size, 0.0).max(axis=1)
    return largest


def _clipped(objective: Objective, thetas: FloatArray) -> FloatArray:
    clipped: FloatArray = np.clip(thetas, objective.lower, objective.upper)
    return clipped


def _evaluate(objective: Objective, thetas: FloatArray) -> _Point:
    basis, delta = objective.basis, objective.huber_delta
    jacobian = basis.gradients(thetas)
    coefficients = thetas.copy()
    coefficients[:, basis.nonlinear] = 0.0
    values = (coefficients[:, None, :] @ jacobian)[:, 0, :]
    residual = objective.residuals(values)
    size = np.abs(residual)
    inside = objective.weights * (size <= delta)
    weighted = objective.weights * np.minimum(size, delta)
    pull = np.copysign(weighted, residual)
    if objective.log_residual:
        values = objective.shifted(values)
        jacobian /= values[:, None, :]
        rounding = inside
    else:
        rounding = inside * np.abs(objective.y)
    excess = objective.strength * objective.excess(thetas) if objective.strength > 0 else np.zeros_like(thetas)
    gradient = _along(jacobian, pull) + excess
    magnitude = np.abs(jacobian)
    total = _along(magnitude, weighted) + excess
    free = ((thetas > objective.lower) | (gradient <= 0)) & ((thetas < objective.upper) | (gradient >= 0))
    free &= objective.usable & (objective.lower < objective.upper)
    free &= (total > 0) | (magnitude.max(axis=2) > 0)
    squares = (weighted * np.minimum(size, delta)).sum(axis=1)
    return _Point(
        theta=thetas,
        value=objective.data_loss(residual) + objective.penalty(thetas),
        gradient=gradient,
        free=free,
        residual=residual,
        jacobian=jacobian,
        values=values,
        noise=4 * _EPSILON * (total + _along(magnitude, rounding)),
        size=np.sqrt(_along(np.square(jacobian), objective.weights) * squares[:, None]),
    )


def _along(rows: FloatArray, weights: FloatArray) -> FloatArray:
    """Weighted sums over the last axis of the first (R x P), with weights R x n."""
    sums: FloatArray = (rows @ weights[:, :, None])[:, :, 0]
    return sums


def _step(objective: Objective, point: _Point, damping: FloatArray) -> FloatArray:
    delta = objective.huber_delta
    size = np.abs(point.residual)
    inside = objective.weights * (size <= delta)
    pull = objective.weights * np.clip(point.residual, -delta, delta)
    metric = _along(np.square(point.jacobian), objective.weights * delta / np.maximum(size, delta))
    rows = np.ascontiguousarray(np.swapaxes(point.jacobian, 1, 2))
    hessian = (point.jacobian * (inside - pull if objective.log_residual else inside)[:, None, :]) @ rows
    hessian += objective.basis.curvature(point.theta, pull / point.values if objective.log_residual else pull)
    if objective.strength > 0:
        penalised = objective.strength * (objective.excess(point.theta) > 0)
        metric = metric + penalised
        diagonal = np.arange(hessian.shape[1])
        hessian[:, diagonal, diagonal] += penalised
    free = point.free & (metric > 0)
    scale = np.where(free, np.sqrt(metric), 1.0)
    kept = np.where(free, 1.0, 0.0) / scale
    eigenvalues, vectors = np.linalg.eigh(hessian * kept[:, :, None] * kept[:, None, :])
    along = (np.swapaxes(vectors, 1, 2) @ (point.gradient * kept)[:, :, None])[:, :, 0]
    # a saddle's downward directions count as upward ones, which keeps every step a descent
    steepness = np.abs(eigenvalues)
    inverse = np.where(steepness > _NULL, 1.0 / (np.maximum(steepness, _NULL) + damping[:, None]), 0.0)
    step: FloatArray = -(vectors @ (along * inverse)[:, :, None])[:, :, 0] * kept
    return step
