"""Least absolute deviations, the limit of the Huber loss for small delta, by successive linear programmes.

At the optimum as many residuals are exactly zero as there are free parameters, so a step that solves the linearised
problem converges quadratically. The certificate is that of a subdifferential: zero must be a combination of the
gradients of the other rows and of multiples in [-1, 1] of the gradients of the rows that are met exactly.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog, lsq_linear
from scipy.sparse import csr_array, eye_array, hstack, vstack

from fitting.objective import Objective
from fitting.values import FloatArray

_MAX_STEPS = 60
_MET = 1e-9
_SHARE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Corner:
    """Where least absolute deviations ended: point, sum of |r|, distance of zero from the subdifferential."""

    theta: FloatArray
    value: float
    gradient_norm: float
    converged: bool


def descend(objective: Objective, theta: FloatArray) -> Corner:
    """The least-absolute-deviations optimum near ``theta`` of the one objective given."""
    value, residual = _value(objective, theta)
    reach = 0.1
    for _ in range(_MAX_STEPS):
        step = _programme(objective, theta, residual, reach)
        trial = np.clip(theta + step, objective.lower, objective.upper)
        reached, fresh = _value(objective, trial)
        if reached < value:
            gain = value - reached
            theta, value, residual = trial, reached, fresh
            reach = min(2 * reach, 1.0)
            if gain <= 1e-16 * value:
                break
        else:
            reach /= 8
            if reach < 1e-14:
                break
    gradient_norm, converged = _certificate(objective, theta, residual)
    return Corner(theta=theta, value=value, gradient_norm=gradient_norm, converged=converged)


def _value(objective: Objective, theta: FloatArray) -> tuple[float, FloatArray]:
    residual = objective.residuals(objective.basis.values(theta[None, :]))[0]
    penalty = float(objective.penalty(theta[None, :])[0])
    return float(objective.weights[0] @ np.abs(residual)) + penalty, residual


def _jacobian(objective: Objective, theta: FloatArray) -> FloatArray:
    jacobian = objective.basis.jacobian(theta)
    return jacobian / objective.basis.values(theta)[:, None] if objective.log_residual else jacobian


def _programme(objective: Objective, theta: FloatArray, residual: FloatArray, reach: float) -> FloatArray:
    """The step that minimises the linearised sum of |r| within ``reach`` (relative to each component)."""
    jacobian = _jacobian(objective, theta)
    n, size = jacobian.shape
    scale = float(np.abs(residual).mean()) or 1.0
    width = reach * np.maximum(np.abs(theta), 0.1)
    pull = objective.strength * objective.excess(theta[None, :])[0]
    cost = np.concatenate([pull, objective.weights[0]])
    rows = csr_array(jacobian)
    slack = eye_array(n)
    constraint = vstack([hstack([rows, -slack]), hstack([-rows, -slack])])
    low = np.where(objective.usable, np.maximum(-width, objective.lower - theta), 0.0) / scale
    high = np.where(objective.usable, np.minimum(width, objective.upper - theta), 0.0) / scale
    bounds = np.column_stack([np.append(low, np.zeros(n)), np.append(high, np.full(n, np.inf))])
    limits = np.concatenate([-residual, residual]) / scale
    # the stubs know neither sparse constraints nor an array of bounds
    answer = linprog(cost, A_ub=constraint, b_ub=limits, bounds=bounds, method="highs-ds")  # type: ignore[call-overload]
    return np.zeros(size) if answer.x is None else scale * answer.x[:size]


def _certificate(objective: Objective, theta: FloatArray, residual: FloatArray) -> tuple[float, bool]:
    jacobian = _jacobian(objective, theta)
    weights = objective.weights[0]
    met = np.abs(residual) <= _MET * max(float(np.abs(residual).mean()), 1e-12)
    gradient = jacobian.T @ (weights * np.sign(residual) * ~met)
    gradient += objective.strength * objective.excess(theta[None, :])[0]
    free = objective.usable & (theta > objective.lower) & (theta < objective.upper)
    if met.any():
        edges = (jacobian[met] * weights[met, None]).T
        multiples = lsq_linear(edges[free], -gradient[free], bounds=(-1.0, 1.0), tol=1e-14).x
        gradient = gradient + edges @ multiples
    total = np.abs(jacobian).T @ weights
    left = np.where(free, np.abs(gradient), 0.0)
    return float(left.max()), bool((left <= _SHARE * total).all())
