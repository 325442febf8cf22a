"""Variable projection: descent over the exponents alone, the linear part solved at every step, many problems at once.

Steps are Kaufman's (BIT 15, 1975): the Gauss-Newton matrix of the exponents after the linear coefficients are projected
out. Rows in the linear zone of the Huber loss are reweighted once a step (IRLS): the loss at the new coefficients is at
most that of the reweighted squares. Residuals are linear here; for differences of logarithms they are divided by the
measured loss, which agrees to first order, and :mod:`fitting.newton` finishes.
"""

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fitting.linear import solve_normal
from fitting.objective import Objective
from fitting.values import FloatArray

_MAX_ITERATIONS = 60
_LARGEST_DAMPING = 1e10


def descend(objective: Objective, thetas: FloatArray, *, arrived: float) -> tuple[FloatArray, FloatArray]:
    """Descend from one point for each of the R objectives.

    Args:
        objective: what to minimise; taken with linear residuals.
        thetas: where to start (R x P). Only their nonlinear coordinates matter.
        arrived: a descent ends when a step promises to lower its objective by less than this part.

    Returns:
        end points (R x P), and the objective there (R) as this module sees it.
    """
    ends, reached = thetas.copy(), np.full(len(thetas), np.inf)
    state = _State(objective, thetas[:, objective.basis.nonlinear])
    remaining = np.arange(len(thetas))
    for _ in range(_MAX_ITERATIONS):
        done = state.step(arrived)
        if done.any():
            ends[remaining[done]], reached[remaining[done]] = state.thetas(done), state.values[done]
            remaining = remaining[~done]
            if not len(remaining):
                return ends, reached
            state.keep(~done)
    everything = np.ones(len(remaining), dtype=np.bool_)
    ends[remaining], reached[remaining] = state.thetas(everything), state.values
    return ends, reached


def solve_linear(objective: Objective, nonlinear: FloatArray) -> FloatArray:
    """Points with those nonlinear coordinates (R x p) and the best of everything else (R x P)."""
    return _State(objective, nonlinear).thetas(np.ones(len(nonlinear), dtype=np.bool_))


class _State:
    """The problems still descending: nonlinear coordinates, linear coefficients, residuals, damping."""

    def __init__(self, objective: Objective, nonlinear: FloatArray) -> None:
        basis = objective.basis
        self.linear, self.nonlinear = basis.linear, basis.nonlinear
        self.signed = objective.lower.reshape(-1, basis.law.n_parameters)[0, self.linear] == 0
        self.usable = objective.usable[self.linear]
        self.movable = objective.usable[self.nonlinear]
        self.references = objective.references[self.nonlinear]
        self.objective = objective
        self._part()
        self.q = np.clip(nonlinear, self.low, self.high)
        self.damping = np.full(len(nonlinear), 1e-4)
        # the first residuals are those of a least-squares fit
        self.residual = np.zeros((len(nonlinear), self.weights.shape[1]))
        self.columns, self.b, self.residual, self.values = self._resolve(self.q, self._curvature())

    def _part(self) -> None:
        objective = self.objective
        self.weights, self.target = objective.weights, objective.target
        self.scale = 1.0 / objective.y if objective.log_residual else None
        self.low, self.high = objective.lower[..., self.nonlinear], objective.upper[..., self.nonlinear]

    def keep(self, kept: NDArray[np.bool_]) -> None:
        self.objective = self.objective.pick(kept)
        self._part()
        self.q, self.b, self.damping = self.q[kept], self.b[kept], self.damping[kept]
        self.columns = self.columns[kept]
        self.residual, self.values = self.residual[kept], self.values[kept]

    def thetas(self, chosen: NDArray[np.bool_]) -> FloatArray:
        thetas = np.zeros((int(chosen.sum()), self.objective.basis.law.n_parameters))
        thetas[:, self.nonlinear], thetas[:, self.linear] = self.q[chosen], self.b[chosen]
        return thetas

    def step(self, arrived: float) -> NDArray[np.bool_]:
        """One step for every problem; which of them have arrived."""
        curvature = self._curvature()
        reduced, pull = self._projected(curvature)
        if self.objective.strength > 0:
            excess = np.maximum(self.q - self.references, 0.0)
            pull = pull + self.objective.strength * excess
            _diagonal(reduced)[:] += self.objective.strength * (excess > 0)
        step, decrement = self._damped(reduced, pull)
        trial = np.minimum(np.maximum(self.q + step, self.low), self.high)
        columns, b, residual, values = self._resolve(trial, curvature)
        better = values < self.values
        if better.all():
            self.q, self.b, self.columns, self.residual, self.values = trial, b, columns, residual, values
        else:
            self.q[better], self.b[better], self.columns[better] = trial[better], b[better], columns[better]
            self.residual[better], self.values[better] = residual[better], values[better]
        self.damping = np.where(better, np.maximum(self.damping / 8, 1e-9), np.maximum(self.damping * 6, 1e-3))
        small = decrement <= arrived * self.values + 1e-30 * self.weights.sum(axis=1)
        done: NDArray[np.bool_] = small | (self.damping > _LARGEST_DAMPING)
        return done

    def _projected(self, curvature: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Gauss-Newton matrix (R x p x p) and gradient (R x p) of the exponents, the linear part projected out."""
        slopes, columns = self.objective.basis.slopes(self.q, self.b, self.columns), self.columns
        if self.scale is not None:
            columns, slopes = columns * self.scale, slopes * self.scale
        size = columns.shape[1]
        # inner products of columns, then of slopes, with columns, slopes and residual
        normal = _products([columns, slopes, self.residual[:, None, :]], curvature)[:, :-1]
        inner, cross = normal[:, :size, :size], normal[:, :size, size:]
        # at the best linear part its gradient vanishes, up to the reweighting
        active = self.usable & ((self.b > 0) | ~self.signed)
        if not active.all():
            kept = np.where(active, 1.0, 0.0)
            inner, cross = inner * kept[:, :, None] * kept[:, None, :], cross * kept[:, :, None]
            _diagonal(inner)[:] += 1.0 - kept
        _diagonal(inner)[:] *= 1.0 + 1e-14
        rest = normal[:, size:, size:] - cross[:, :, :-1].swapaxes(1, 2) @ np.linalg.solve(inner, cross)
        return rest[:, :, :-1], rest[:, :, -1]

    def _damped(self, reduced: FloatArray, pull: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The damped step of the coordinates that are free to move, and how much it promises."""
        own = _diagonal(reduced)
        free = self.movable & (own > 0)
        free &= ((self.q > self.low) | (pull <= 0)) & ((self.q < self.high) | (pull >= 0))
        scale = free / np.sqrt(np.maximum(own, 1e-300))
        matrix = reduced * scale[:, :, None] * scale[:, None, :]
        _diagonal(matrix)[:] = 1.0 + self.damping[:, None] + 1e-12
        right = pull * scale
        step = np.linalg.solve(matrix, right[:, :, None])[:, :, 0]
        decrement: FloatArray = (step * right).sum(axis=1)
        return -step * scale, np.abs(decrement)

    def _resolve(self, q: FloatArray, curvature: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The best linear part at q for that curvature: the law's columns, their coefficients, residuals, objective."""
        design, target = self.objective.basis.design(q), self.target
        columns = design
        if self.scale is not None:
            columns, target = columns * self.scale, target * self.scale
        normal = _products([columns, target[..., None, :]], curvature)
        b = solve_normal(normal[:, :-1, :-1], normal[:, :-1, -1], signed=self.signed, usable=self.usable)
        residual = (b[:, None, :] @ columns)[:, 0, :] - target
        values = self.objective.data_loss(residual)
        if self.objective.strength > 0:
            values = values + 0.5 * self.objective.strength * (np.maximum(q - self.references, 0.0) ** 2).sum(axis=1)
        return design, b, residual, values

    def _curvature(self) -> FloatArray:
        return _irls(self.residual, self.objective.huber_delta) * self.weights


def _products(parts: list[FloatArray], weights: FloatArray) -> FloatArray:
    """Weighted products of all rows of all parts, laid on top of one another (each R x something x n)."""
    ends = list(accumulate(part.shape[-2] for part in parts))
    rows = np.empty((len(weights), ends[-1], weights.shape[1]))
    for part, end in zip(parts, ends, strict=True):
        rows[:, end - part.shape[-2] : end] = part
    # a copy with the rows last makes this product three times faster
    products: FloatArray = (rows * weights[:, None, :]) @ np.ascontiguousarray(rows.swapaxes(1, 2))
    return products


def _diagonal(matrices: FloatArray) -> FloatArray:
    """A view of the diagonals (R x k)."""
    view: FloatArray = np.einsum("rkk->rk", matrices)
    return view


def _irls(residuals: FloatArray, delta: float) -> FloatArray:
    size = np.abs(residuals)
    return delta / np.maximum(size, delta)
