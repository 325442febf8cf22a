"""Where descents start: a lattice of exponents with the linear part solved at each point.

The Gram matrix of a lattice point is linear in the weights of the rows, so one matrix product gives all points for all
sets of weights.
"""

from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fitting.basis import Basis
from fitting.linear import solve_normal
from fitting.objective import Objective
from fitting.values import FloatArray

_LOWEST, _HIGHEST = 0.03, 1.6
_LEVELS = {1: 25, 2: 9, 3: 5}
_RATE_LEVELS = 7
_IDLE_EXPONENT = 0.4
# Starts need no more rows than this: longer tables are thinned for them.
_ROWS = 2_000
_BEST_MINIMA = 4


def best_points(objective: Objective) -> FloatArray:
    """The lattice point of least weighted squares for each of the R objectives: nonlinear coordinates (R x p)."""
    lattice = _lattice(objective)
    chosen: FloatArray = lattice[np.argmin(_sums_of_squares(objective, lattice), axis=1)]
    return chosen


def starts(objective: Objective) -> tuple[FloatArray, float]:
    """Starts for the one objective (S x p), the best first: lattice minima, and the best points at each axis' ends.

    With them comes the root of the mean square that the best leaves.

    The ends are for weak terms: their exponent may have one optimum at either end of its range.
    """
    lattice = _lattice(objective)
    (sums,) = _sums_of_squares(objective, lattice)
    chosen = [int(np.argmin(sums)), *_minima(lattice, sums)[:_BEST_MINIMA].tolist()]
    for coordinate in lattice.T:
        for end in (coordinate.min(), coordinate.max()):
            chosen.append(int(np.argmin(np.where(coordinate == end, sums, np.inf))))
    left = float(max(sums[chosen[0]], 0.0) / objective.weights.sum())
    return lattice[list(dict.fromkeys(chosen))], left**0.5


def _lattice(objective: Objective) -> FloatArray:
    basis = objective.basis
    n_terms = len(basis.law.terms)
    movable = tuple(objective.usable[basis.nonlinear].tolist())
    rates = tuple(
        (float(objective.lower[..., k].min()), float(objective.upper[..., k].max())) for k in basis.nonlinear[n_terms:]
    )
    return _points(movable[:n_terms], movable[n_terms:], rates)


@cache
def _points(movable: tuple[bool, ...], rated: tuple[bool, ...], ranges: tuple[tuple[float, float], ...]) -> FloatArray:
    levels = np.geomspace(_LOWEST, _HIGHEST, _LEVELS.get(sum(movable), 5))
    axes = [levels if moves else np.array([_IDLE_EXPONENT]) for moves in movable]
    for moves, (low, high) in zip(rated, ranges, strict=True):
        axes.append(np.linspace(low / 2, high / 2, _RATE_LEVELS) if moves else np.zeros(1))
    lattice = np.array(list(product(*axes)))
    lattice.flags.writeable = False  # one array for all who ask
    return lattice


def _minima(lattice: FloatArray, sums: FloatArray) -> NDArray[np.intp]:
    """Lattice points that no neighbour along an axis beats, best first."""
    axes = [np.unique(coordinate) for coordinate in lattice.T]
    grid = sums.reshape([len(axis) for axis in axes])
    lowest = np.ones(grid.shape, dtype=np.bool_)
    for axis in range(grid.ndim):
        values, low = np.moveaxis(grid, axis, 0), np.moveaxis(lowest, axis, 0)
        low[1:] &= values[1:] <= values[:-1]
        low[:-1] &= values[:-1] <= values[1:]
    found = np.flatnonzero(lowest.ravel())
    return found[np.argsort(sums[found], kind="stable")]


def _design(basis: Basis, lattice: FloatArray) -> FloatArray:
    """The columns at all lattice points; without products or a rate, from those of the few different exponents."""
    law = basis.law
    if law.interactions or basis.stages is not None:
        return basis.design(lattice)
    levels, place = np.unique(lattice, return_inverse=True)
    few = basis.design(np.repeat(levels[:, None], lattice.shape[1], axis=1))
    columns = few[np.zeros(len(lattice), dtype=np.intp)]
    for term, where in enumerate(place.reshape(lattice.shape).T):
        columns[:, term] = few[where, term]
    return columns


def _sums_of_squares(objective: Objective, lattice: FloatArray) -> FloatArray:
    """The least weighted sum of squares at each lattice point, plus the penalty (R x G)."""
    basis, y, weights = objective.basis, objective.y, objective.weights
    stride = -(-weights.shape[1] // _ROWS)
    if stride > 1:
        basis, y, weights = basis.rows(np.arange(0, weights.shape[1], stride)), y[..., ::stride], weights[:, ::stride]
    columns = _design(basis, lattice)
    if objective.log_residual:
        weights = weights / y**2
    n_points, size, n = columns.shape
    if len(weights) == 1:
        gram = ((columns * weights[0]) @ np.swapaxes(columns, 1, 2))[None]
    else:
        upper = np.triu_indices(size)
        products = (columns[:, upper[0], :] * columns[:, upper[1], :]).reshape(-1, n)
        gram = np.empty((len(weights), n_points, size, size))
        gram[..., upper[0], upper[1]] = (weights @ products.T).reshape(len(weights), n_points, -1)
        gram[..., upper[1], upper[0]] = gram[..., upper[0], upper[1]]
    flat = columns.reshape(-1, n)
    right = ((weights * y) @ flat.T).reshape(len(weights), n_points, size)
    signed = objective.lower.reshape(-1, basis.law.n_parameters)[0, basis.linear] == 0
    solution = solve_normal(gram, right, signed=signed, usable=objective.usable[basis.linear])
    # at a constrained minimiser x'Gx = h'x
    sums: FloatArray = (weights * y * y).sum(axis=1)[:, None] - np.einsum("rgk,rgk->rg", solution, right)
    if objective.strength > 0:
        excess = np.maximum(lattice - objective.references[basis.nonlinear], 0.0)
        sums = sums + objective.strength * (excess**2).sum(axis=1)
    return sums
