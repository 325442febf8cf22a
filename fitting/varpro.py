"""Variable projection: descent over the exponents alone, the linear part solved at every step, many problems at once.

Steps are Kaufman's (BIT 15, 1975): the Gauss-Newton matrix of the exponents after the linear coefficients are projected
out. Rows in the linear zone of the Huber loss are reweighted (IRLS). Residuals are linear here; for differences of
logarithms they are divided by the measured loss, which agrees to first order, and :mod:`fitting.newton` finishes.
"""

import numpy as np
from numpy.typing import NDArray

from fitting.linear import solve_normal
from fitting.objective import Objective
from fitting.values import FloatArray

_MAX_ITERATIONS = 60
_MAX_REWEIGHTINGS = 2
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
        self.b = np.zeros((len(nonlinear), len(self.linear)))
        self.damping = np.full(len(nonlinear), 1e-4)
        # the first residuals are those of a least-squares fit
        self.residual = np.zeros((len(nonlinear), self.weights.shape[1]))
        self.columns, self.b, self.residual, self.values = self._resolve(self.q, self.residual)

    def _part(self) -> None:
        objective = self.objective
        self.weights, self.target = objective.weights, objective.y
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
        slopes = self.objective.basis.slopes(self.q, self.b, self.columns)
        columns = self.columns
        if self.scale is not None:
            columns, slopes = columns * self._scaled(), slopes * self._scaled()
        curvature = self.weights * _irls(self.residual, self.objective.huber_delta)
        size = slopes.shape[1]
        both = np.concatenate([slopes, columns], axis=1)
        weighted = both * curvature[:, None, :]
        normal = weighted @ np.swapaxes(both, 1, 2)
        gradient = (weighted @ self.residual[:, :, None])[:, :, 0]
        # at the best linear part its gradient vanishes, up to the reweighting
        active = self.usable & ((self.b > 0) | ~self.signed)
        inner, cross, rest = normal[:, size:, size:], normal[:, size:, :size], gradient[:, size:, None]
        diagonal = np.arange(inner.shape[1])
        if not active.all():
            kept = np.where(active, 1.0, 0.0)
            inner = inner * kept[:, :, None] * kept[:, None, :]
            inner[:, diagonal, diagonal] += 1.0 - kept
            cross, rest = cross * kept[:, :, None], rest * kept[:, :, None]
        inner[:, diagonal, diagonal] *= 1.0 + 1e-14
        right = np.concatenate([cross, rest], axis=2)
        projected = np.swapaxes(right, 1, 2) @ np.linalg.solve(inner, right)
        reduced = normal[:, :size, :size] - projected[:, :size, :size]
        pull = gradient[:, :size] - projected[:, :size, size]
        if self.objective.strength > 0:
            excess = np.maximum(self.q - self.references, 0.0)
            pull = pull + self.objective.strength * excess
            outer = np.arange(size)
            reduced[:, outer, outer] += self.objective.strength * (excess > 0)

        step, decrement = self._damped(reduced, pull)
        trial = np.clip(self.q + step, self.low, self.high)
        columns, b, residual, values = self._resolve(trial, self.residual)
        better = values < self.values
        self.q[better], self.b[better], self.columns[better] = trial[better], b[better], columns[better]
        self.residual[better], self.values[better] = residual[better], values[better]
        self.damping = np.where(better, np.maximum(self.damping / 8, 1e-9), self.damping * 6)
        self.damping = np.where(~better & (self.damping < 1e-3), 1e-3, self.damping)
        small = decrement <= arrived * self.values + 1e-30 * self.weights.sum(axis=1)
        done: NDArray[np.bool_] = small | (self.damping > _LARGEST_DAMPING)
        return done

    def _damped(self, reduced: FloatArray, pull: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The damped step of the coordinates that are free to move, and how much it promises."""
        diagonal = np.arange(reduced.shape[1])
        own = np.maximum(reduced[:, diagonal, diagonal], 0.0)
        blocked = ((self.q <= self.low) & (pull > 0)) | ((self.q >= self.high) & (pull < 0))
        free = self.movable & (own > 0) & ~blocked
        kept = np.where(free, 1.0, 0.0)
        scale = np.where(free, np.sqrt(own), 1.0)
        matrix = reduced * kept[:, :, None] * kept[:, None, :] / (scale[:, :, None] * scale[:, None, :])
        matrix[:, diagonal, diagonal] = 1.0 + self.damping[:, None] + 1e-12
        right = pull * kept / scale
        step = np.linalg.solve(matrix, right[:, :, None])[:, :, 0]
        decrement: FloatArray = np.einsum("rp,rp->r", step, right)
        return -step / scale, np.abs(decrement)

    def _resolve(self, q: FloatArray, residual: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """The best linear part at q: the law's columns there, their coefficients, residuals, objective."""
        delta = self.objective.huber_delta
        design = columns = self.objective.basis.design(q)
        target = self.target
        if self.scale is not None:
            columns, target = columns * self._scaled(), target * self.scale
        values = np.full(len(q), np.inf)
        for _ in range(_MAX_REWEIGHTINGS):
            weighted = columns * (self.weights * _irls(residual, delta))[:, None, :]
            b = solve_normal(
                weighted @ np.swapaxes(columns, 1, 2),
                (weighted @ target[..., None])[..., 0],
                signed=self.signed,
                usable=self.usable,
            )
            bent = np.abs(residual) > delta
            residual = (b[:, None, :] @ columns)[:, 0, :] - target
            if not (bent | (np.abs(residual) > delta)).any():
                break
        values = self.objective.data_loss(residual)
        if self.objective.strength > 0:
            values = values + 0.5 * self.objective.strength * (np.maximum(q - self.references, 0.0) ** 2).sum(axis=1)
        return design, b, residual, values

    def _scaled(self) -> FloatArray:
        assert self.scale is not None
        return self.scale[:, None, :] if self.scale.ndim == 2 else self.scale


def _irls(residuals: FloatArray, delta: float) -> FloatArray:
    size = np.abs(residuals)
    return delta / np.maximum(size, delta)
