"""Small least-squares problems, many at once, some of whose unknowns must not be negative."""

from itertools import product

import numpy as np
from numpy.typing import NDArray

from fitting.values import FloatArray

# Added to the diagonal of a scaled Gram matrix: columns that say the same share their effect instead of failing.
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
    gram, right = gram.reshape(-1, size, size), right.reshape(-1, size)
    lengths = np.sqrt(np.einsum("rkk->rk", gram))
    scale = np.where(usable & (lengths > 0), lengths, np.inf)
    scaled = gram / (scale[:, :, None] * scale[:, None, :])
    target = right / scale
    solution = _solve(scaled, target)
    wrong = np.flatnonzero((solution[:, signed] < 0).any(axis=1))
    if len(wrong):
        solution[wrong] = _best_subset(scaled[wrong], target[wrong], signed)
    return (solution / scale).reshape(shape)


def _solve(gram: FloatArray, right: FloatArray) -> FloatArray:
    diagonal = np.arange(gram.shape[-1])
    gram = gram.copy()
    gram[..., diagonal, diagonal] = 1.0 + _RIDGE
    return np.asarray(np.linalg.solve(gram, right[..., None])[..., 0], dtype=np.float64)


def _best_subset(gram: FloatArray, right: FloatArray, signed: NDArray[np.bool_]) -> FloatArray:
    """The feasible minimiser of least value over all choices of signed unknowns at zero (scaled problems)."""
    best = np.zeros_like(right)
    least = np.full(len(right), np.inf)
    for choice in product((1.0, 0.0), repeat=int(signed.sum())):
        kept = np.ones(len(signed))
        kept[signed] = choice
        if kept.all():
            continue
        solution = _solve(gram * kept[:, None] * kept, right * kept)
        value = -np.einsum("rk,rk->r", solution, right)
        better = (value < least) & (solution[:, signed] >= 0).all(axis=1)
        best[better], least[better] = solution[better], value[better]
    return best
