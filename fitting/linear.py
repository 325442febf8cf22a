"""Small least-squares problems, many at once, some of whose unknowns must not be negative."""

from itertools import product

import numpy as np
from numpy.typing import NDArray

from fitting.values import FloatArray

# Added to the diagonal of a Gram matrix, relative to it: equal columns share their effect instead of failing.
_RIDGE = 1e-14


def solve_normal(
    gram: FloatArray, right: FloatArray, *, signed: NDArray[np.bool_], usable: NDArray[np.bool_]
) -> FloatArray:
    """Minimisers of x'Gx/2 - h'x.

    Unknowns are at least zero where ``signed``, and zero where not ``usable``. Where the free minimiser breaks a sign,
    the best feasible one of all choices of unknowns at zero is taken; their number is small.

    Args:
        gram: G, symmetric and positive semidefinite (... x k x k).
        right: h (... x k).
        signed: which unknowns must not be negative (k).
        usable: which may differ from zero (k).

    Returns:
        x (... x k).
    """
    shape = right.shape
    size = shape[-1]
    gram, right = gram.reshape(-1, size, size).copy(), right.reshape(-1, size)
    diagonal = gram.reshape(-1, size * size)[:, :: size + 1]
    diagonal *= 1.0 + _RIDGE
    idle = ~(usable & (diagonal > 0))
    if idle.any():
        gram, right = _without(gram, right, idle)
    solution = _solve(gram, right)
    wrong = np.flatnonzero((solution[:, signed] < 0).any(axis=1))
    if len(wrong):
        solution[wrong] = _best_subset(gram[wrong], right[wrong], signed)
    return solution.reshape(shape)


def _solve(gram: FloatArray, right: FloatArray) -> FloatArray:
    return np.asarray(np.linalg.solve(gram, right[..., None])[..., 0], dtype=np.float64)


def _without(gram: FloatArray, right: FloatArray, idle: NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
    """The problems with some unknowns (... x k) held at zero."""
    kept = np.where(idle, 0.0, 1.0)
    return gram * kept[..., :, None] * kept[..., None, :] + np.eye(gram.shape[-1]) * (1.0 - kept)[
        ..., None, :
    ], right * kept


def _best_subset(gram: FloatArray, right: FloatArray, signed: NDArray[np.bool_]) -> FloatArray:
    """The feasible minimiser of least value over all choices of signed unknowns at zero."""
    best = np.zeros_like(right)
    least = np.full(len(right), np.inf)
    for choice in product((False, True), repeat=int(signed.sum())):
        if not any(choice):
            continue
        idle = np.zeros(len(signed), dtype=np.bool_)
        idle[signed] = choice
        solution = _solve(*_without(gram, right, idle))
        value = -np.einsum("rk,rk->r", solution, right)
        better = (value < least) & (solution[:, signed] >= 0).all(axis=1)
        best[better], least[better] = solution[better], value[better]
    return best
