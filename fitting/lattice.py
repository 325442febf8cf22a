"""Where descents start: a lattice of exponents with the linear part solved at each point.

A column of the law depends on an exponent or two, so a lattice has few different columns. Their Gram matrix is linear
in the weights of the rows and holds that of every lattice point: one matrix product gives all points for all sets of
weights.
"""

from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fitting.laws import Law, Offset
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Lattice:
    """Points on a regular grid of nonlinear coordinates, and the columns that the law has there.

    Attributes:
        points: the points (G x p).
        levels: positions of the points at each level of each coordinate (levels x points, one array per coordinate).
        sources: a point that has each of the C different columns (C).
        kinds: which column of that point's design it is (C).
        places: which of the different columns each point has (G x k).
        pairs: the same for products of two, in a flattened C x C matrix (G x k x k).
    """

    points: FloatArray
    levels: tuple[NDArray[np.intp], ...]
    sources: NDArray[np.intp]
    kinds: NDArray[np.intp]
    places: NDArray[np.intp]
    pairs: NDArray[np.intp]


def best_points(objective: Objective) -> FloatArray:
    """The lattice point of least weighted squares for each of the R objectives: nonlinear coordinates (R x p)."""
    lattice = _lattice(objective)
    chosen: FloatArray = lattice.points[np.argmin(_sums_of_squares(objective, lattice), axis=1)]
    return chosen


def starts(objective: Objective) -> tuple[FloatArray, float]:
    """Starts for the one objective (S x p), the best first: lattice minima, and the best points at each axis' ends.

    With them comes the root of the mean square that the best leaves.

    The ends are for weak terms: their exponent may have one optimum at either end of its range.
    """
    lattice = _lattice(objective)
    (sums,) = _sums_of_squares(objective, lattice)
    chosen = [int(sums.argmin()), *_minima(lattice, sums)[:_BEST_MINIMA].tolist()]
    for levels in lattice.levels:
        for end in (levels[0], levels[-1]):
            chosen.append(int(end[sums[end].argmin()]))
    left = float(max(sums[chosen[0]], 0.0) / objective.weights.sum())
    return lattice.points[list(dict.fromkeys(chosen))], left**0.5


def _lattice(objective: Objective) -> _Lattice:
    basis = objective.basis
    n_terms = len(basis.law.terms)
    movable = tuple(objective.usable[basis.nonlinear].tolist())
    rates = tuple(
        (float(objective.lower[..., k].min()), float(objective.upper[..., k].max())) for k in basis.nonlinear[n_terms:]
    )
    return _regular(basis.law, movable, rates)


@cache
def _regular(law: Law, movable: tuple[bool, ...], rates: tuple[tuple[float, float], ...]) -> _Lattice:
    n_terms = len(law.terms)
    exponents = np.geomspace(_LOWEST, _HIGHEST, _LEVELS.get(sum(movable[:n_terms]), 5))
    axes = [exponents if moves else np.array([_IDLE_EXPONENT]) for moves in movable[:n_terms]]
    for moves, (low, high) in zip(movable[n_terms:], rates, strict=True):
        axes.append(np.linspace(low / 2, high / 2, _RATE_LEVELS) if moves else np.zeros(1))
    positions = np.arange(np.prod([len(axis) for axis in axes])).reshape([len(axis) for axis in axes])
    sources: list[int] = []
    kinds: list[int] = []
    places = []
    for kind, needed in enumerate(_needed(law)):
        # one point for each combination of the coordinates that the column depends on
        part = positions[tuple(slice(None) if k in needed else slice(1) for k in range(len(axes)))]
        numbers = np.arange(len(sources), len(sources) + part.size).reshape(part.shape)
        places.append(np.broadcast_to(numbers, positions.shape).ravel())
        sources += part.ravel().tolist()
        kinds += [kind] * part.size
    place = np.column_stack(places)
    return _Lattice(
        points=np.array(list(product(*axes))),
        levels=tuple(np.moveaxis(positions, k, 0).reshape(len(axis), -1) for k, axis in enumerate(axes)),
        sources=np.array(sources),
        kinds=np.array(kinds),
        places=place,
        pairs=place[:, :, None] * len(sources) + place[:, None, :],
    )


def _needed(law: Law) -> list[set[int]]:
    """The nonlinear coordinates that each column of the law depends on."""
    terms = [{k} | ({len(law.terms)} if term.rate is not None else set()) for k, term in enumerate(law.terms)]
    products = [{i, j} for _, i, j in law.interactions]
    return terms + products + ([set()] if law.offset is not Offset.NONE else [])


def _minima(lattice: _Lattice, sums: FloatArray) -> NDArray[np.intp]:
    """Lattice points that no neighbour along an axis beats, best first."""
    lowest = np.ones(len(sums), dtype=np.bool_)
    for levels in lattice.levels:
        rises = np.diff(sums[levels], axis=0)
        lowest[levels[1:][rises > 0]] = False
        lowest[levels[:-1][rises < 0]] = False
    found = np.flatnonzero(lowest)
    return found[sums[found].argsort(kind="stable")]


def _sums_of_squares(objective: Objective, lattice: _Lattice) -> FloatArray:
    """The least weighted sum of squares at each lattice point, plus the penalty (R x G)."""
    basis, y, weights = objective.basis, objective.target, objective.weights
    if objective.log_residual:
        weights = weights / objective.y**2
    stride = -(-weights.shape[1] // _ROWS)
    if stride > 1:
        basis, y, weights = basis.rows(np.arange(0, weights.shape[1], stride)), y[..., ::stride], weights[:, ::stride]
    columns = basis.design(lattice.points[lattice.sources])[np.arange(len(lattice.kinds)), lattice.kinds]
    if len(weights) == 1:
        products = ((columns * weights[0]) @ columns.T)[None]
    else:
        products = np.empty((len(weights), len(columns), len(columns)))
        one, other = np.triu_indices(len(columns))
        products[:, one, other] = weights @ (columns[one] * columns[other]).T
        products[:, other, one] = products[:, one, other]
    gram = products.reshape(len(weights), -1)[:, lattice.pairs]
    right = ((weights * y) @ columns.T)[:, lattice.places]
    signed = objective.lower.reshape(-1, basis.law.n_parameters)[0, basis.linear] == 0
    solution = solve_normal(gram, right, signed=signed, usable=objective.usable[basis.linear])
    # at a constrained minimiser x'Gx = h'x
    sums: FloatArray = (weights * y * y).sum(axis=1)[:, None] - (solution * right).sum(axis=2)
    if objective.strength > 0:
        excess = np.maximum(lattice.points - objective.references[basis.nonlinear], 0.0)
        sums = sums + objective.strength * (excess**2).sum(axis=1)
    return sums
