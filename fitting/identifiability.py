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
    """What a set of rows determines at one point.

    Attributes:
        rank: directions of parameter space that the rows determine.
        open_parameters: positions of the parameters left open.
        correlations: of the logarithms of each two terms' sizes that vary, with the terms' positions.
        condition: condition number of the exponents' Gauss-Newton matrix, all else projected out; infinite where an
            exponent has no effect.
    """

    rank: int
    open_parameters: tuple[int, ...]
    correlations: tuple[tuple[int, int, float], ...]
    condition: float


def varied_axes(sizes: FloatArray) -> NDArray[np.bool_]:
    """Which columns take values more than 1 % apart: N, D_s, D_l, or the sizes of a law's terms."""
    varied: NDArray[np.bool_] = sizes.max(axis=0) > VARIED_RATIO * sizes.min(axis=0)
    return varied


def identify(basis: Basis, theta: FloatArray, *, weights: FloatArray, usable: NDArray[np.bool_]) -> Identifiability:
    """Which parameters for absolute counts the rows determine at ``theta``.

    A parameter is open when its gradient has a part along the null space of the Jacobian, or when it belongs to one
    of two terms whose axes move together (they could exchange roles).

    Args:
        basis: the rows' coordinates.
        theta: the point.
        weights: how often each row counts (n).
        usable: which components of theta have an effect.
    """
    # there are at least as many rows as parameters, and the triangle of a QR decomposition says all that they say
    triangle: FloatArray = np.asarray(np.linalg.qr((basis.gradients(theta) * np.sqrt(weights)).T, mode="r"))
    norms = np.linalg.norm(triangle, axis=0)
    norms[norms == 0] = 1.0
    _, singular, directions = np.linalg.svd(triangle / norms)
    rank = int(np.count_nonzero(singular > _RANK_TOLERANCE * singular[0]))
    is_open = np.zeros(len(theta), dtype=np.bool_)
    if rank < len(theta):
        # theta = t / norm: gradients with respect to the scaled coordinates t
        gradients = basis.parameter_gradients(theta) / norms
        along_null = np.linalg.norm(gradients @ directions[rank:].T, axis=1)
        is_open = along_null > _OPEN_SHARE * np.linalg.norm(gradients, axis=1)
    correlations = _correlations(basis.logs)
    for i, j, correlation in correlations:
        if abs(correlation) >= _COLLINEAR:
            for term in (basis.law.terms[i], basis.law.terms[j]):
                is_open[[term.amplitude, term.exponent]] = True
    inner, outer = ([k for k in part if usable[k]] for part in (basis.linear, basis.nonlinear))
    return Identifiability(
        rank=rank,
        open_parameters=tuple(np.flatnonzero(is_open).tolist()),
        correlations=correlations,
        condition=_condition(triangle, inner, outer),
    )


def _correlations(logs: FloatArray) -> tuple[tuple[int, int, float], ...]:
    """Pairs of columns that vary, with their correlation; the columns are centred, and zero where they do not vary."""
    products = logs.T @ logs
    lengths = np.sqrt(np.diagonal(products))
    pairs = combinations(np.flatnonzero(lengths).tolist(), 2)
    return tuple((i, j, float(products[i, j] / (lengths[i] * lengths[j]))) for i, j in pairs)


def _condition(jacobian: FloatArray, inner: list[int], outer: list[int]) -> float:
    if not outer:
        return 1.0
    projected, rest = jacobian[:, inner], jacobian[:, outer]
    rest = rest - projected @ np.linalg.lstsq(projected, rest, rcond=None)[0]
    singular = np.linalg.svd(rest, compute_uv=False)
    return float((singular[0] / singular[-1]) ** 2) if singular[-1] > 1e-9 * singular[0] else float("inf")
