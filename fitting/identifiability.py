"""What the observations determine, and what they leave open."""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fitting.basis import Basis
from fitting.values import FloatArray

# An axis whose largest value is within 1 % of its smallest was not varied: budgets are rounded to whole steps, and
# rounding may move them by that much (the limit on a deviation that a grid accepts).
VARIED_RATIO = 1.01
# Singular values below this share of the largest are zero. Exact dependence leaves about 1e-16, weak but real
# information about 1e-5 (a seven-parameter law at 1 % noise has a condition number near 1e2 in these coordinates).
_RANK_TOLERANCE = 1e-9
# Two log-axes this close to a straight line carry one effect between them.
_COLLINEAR = 1 - 1e-6
# Share of a parameter's gradient along directions that the rows leave open, from which it counts as open.
_OPEN_SHARE = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Identifiability:
    """What a set of rows determines at one point: the rank there, and the parameters left open (by position)."""

    rank: int
    open_parameters: tuple[int, ...]


def varied_axes(sizes: FloatArray) -> NDArray[np.bool_]:
    """Which columns take values more than 1 % apart: N, D_s, D_l, or the sizes of a law's terms."""
    varied: NDArray[np.bool_] = sizes.max(axis=0) > VARIED_RATIO * sizes.min(axis=0)
    return varied


def axis_correlations(sizes: FloatArray) -> list[tuple[int, int, float]]:
    """Pairs of varied columns and the correlation of their logarithms."""
    varied = np.flatnonzero(varied_axes(sizes))
    if len(varied) < 2:
        return []
    correlations = np.corrcoef(np.log(sizes[:, varied]), rowvar=False)
    pairs = combinations(range(len(varied)), 2)
    return [(int(varied[i]), int(varied[j]), float(correlations[i, j])) for i, j in pairs]


def jacobian_rank(jacobian: FloatArray) -> int:
    """Numerical rank of a Jacobian (n x 7) after scaling its columns to unit length."""
    singular = np.linalg.svd(_unit_columns(jacobian), compute_uv=False)
    return int(np.count_nonzero(singular > _RANK_TOLERANCE * singular[0]))


def identify(basis: Basis, theta: FloatArray, sizes: FloatArray) -> Identifiability:
    """Which parameters for absolute counts the rows determine at ``theta``.

    A parameter is open when its gradient has a part along the null space of the Jacobian, or when it belongs to one
    of two terms whose axes move together (they could exchange roles).
    """
    jacobian = basis.jacobian(theta)
    # there are at least as many rows as parameters, so the right factor is square
    _, singular, directions = np.linalg.svd(_unit_columns(jacobian), full_matrices=False)
    rank = int(np.count_nonzero(singular > _RANK_TOLERANCE * singular[0]))
    # theta = t / norm: gradients with respect to the scaled coordinates t
    gradients = basis.parameter_gradients(theta) / _column_norms(jacobian)
    along_null = np.linalg.norm(gradients @ directions[rank:].T, axis=1)
    is_open = along_null > _OPEN_SHARE * np.linalg.norm(gradients, axis=1)
    terms = basis.law.terms
    for i, j, correlation in axis_correlations(basis.law.term_sizes(sizes)):
        if abs(correlation) >= _COLLINEAR:
            for term in (terms[i], terms[j]):
                is_open[[term.amplitude, term.exponent]] = True
    return Identifiability(rank=rank, open_parameters=tuple(int(k) for k in np.flatnonzero(is_open)))


def _column_norms(jacobian: FloatArray) -> FloatArray:
    norms = np.linalg.norm(jacobian, axis=0)
    return np.where(norms > 0, norms, 1.0)


def _unit_columns(jacobian: FloatArray) -> FloatArray:
    scaled: FloatArray = jacobian / _column_norms(jacobian)
    return scaled
