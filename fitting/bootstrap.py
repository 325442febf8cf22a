"""Resampling whole clusters: how far the parameters move when other short checkpoints had been trained."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitting import engine
from fitting.engine import Optimum, Problem
from fitting.values import FloatArray, Interval

# Below this share of good refits the survivors are a biased choice of resamples: no interval is given.
MIN_OK_SHARE = 0.75
# A quantile of fewer draws than this is one of their extremes.
MIN_DRAWS = 20
# Fewer clusters than this have too few different resamples (35 for four) to show a distribution.
MIN_CLUSTERS = 5
# Weights held at once, rows times resamples: large bootstraps go in parts.
_BLOCK = 4_000_000
# Share of what the full set says about a direction, below which a resample does not determine it.
_BLIND = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Resampling:
    """Outcome of a bootstrap.

    Attributes:
        draws: parameters for absolute counts (R x 7); no rows where intervals are withheld.
        n_draws: resamples drawn.
        n_ok: those that held enough distinct points, determined what the full set determines, and converged.
        n_at_bound: good ones with an amplitude at zero or an exponent at a bound.
    """

    draws: FloatArray
    n_draws: int
    n_ok: int
    n_at_bound: int

    @property
    def withheld(self) -> bool:
        """Whether the draws are too few, or from too few clusters, for an interval."""
        return len(self.draws) == 0


def cluster_weights(cluster: NDArray[np.int64], n_draws: int, seed: int) -> FloatArray:
    """How often each row counts in each resample of as many clusters as there are (R x n)."""
    return np.concatenate(list(_drawn(cluster, n_draws, seed)))


def _drawn(cluster: NDArray[np.int64], n_draws: int, seed: int) -> Iterator[FloatArray]:
    codes, index = np.unique(cluster, return_inverse=True)
    generator = np.random.default_rng(seed)
    block = max(1, _BLOCK // len(cluster))
    for start in range(0, max(n_draws, 1), block):
        size = min(block, n_draws - start)
        drawn = generator.multinomial(len(codes), np.full(len(codes), 1 / len(codes)), size=size)
        yield drawn[:, index.ravel()].astype(np.float64)


def resample(
    problem: Problem,
    found: Optimum,
    sizes: FloatArray,
    cluster: NDArray[np.int64],
    *,
    rank: int,
    n_draws: int,
    seed: int,
    searched: bool = False,
) -> Resampling:
    """Refit ``n_draws`` resamples of the clusters, each started from the optimum ``found``.

    Args:
        problem: the problem of the full set.
        found: its optimum.
        sizes: N, D_s, D_l of its rows (n x 3).
        cluster: their clusters (n); rows of their own for a case bootstrap.
        rank: what the full set determines; a resample that determines less is not counted as good.
        n_draws: how many.
        seed: makes the draws repeatable.
        searched: whether each refit searches the lattice too; otherwise only those that end on a bound do.
    """
    law = problem.basis.law
    if n_draws == 0:
        return Resampling(draws=np.empty((0, law.n_parameters)), n_draws=0, n_ok=0, n_at_bound=0)
    _, point = np.unique(sizes, axis=0, return_inverse=True)
    directions = _directions(problem, found, rank)
    parts = []
    for weights in _drawn(cluster, n_draws, seed):
        able = _able(weights > 0, point.ravel(), law.n_parameters, directions)
        refits = engine.refit(problem, weights[able] * problem.weights, found.theta, searched=searched)
        parts.append(refits.thetas[refits.converged])
    thetas = np.concatenate(parts)
    n_ok = len(thetas)
    if n_ok < max(MIN_OK_SHARE * n_draws, MIN_DRAWS) or len(np.unique(cluster)) < MIN_CLUSTERS:
        thetas = thetas[:0]
    crowded = (thetas - problem.lower < 1e-4) | (problem.upper - thetas < 1e-4)
    return Resampling(
        draws=problem.basis.to_parameters(thetas),
        n_draws=n_draws,
        n_ok=n_ok,
        n_at_bound=int((crowded & problem.usable).any(axis=1).sum()),
    )


def intervals(draws: FloatArray, level: float, withheld_for: tuple[int, ...]) -> tuple[Interval | None, ...]:
    """Percentile interval of each parameter, None for those named (by position) and where there are no draws."""
    if not len(draws):
        return tuple([None] * draws.shape[1])
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0).tolist()
    return tuple(
        None if k in withheld_for else Interval(low=a, high=b) for k, (a, b) in enumerate(zip(low, high, strict=True))
    )


def _directions(problem: Problem, found: Optimum, rank: int) -> FloatArray:
    """Orthonormal directions of the rows' space that the law can move along (n x rank)."""
    jacobian = problem.basis.jacobian(found.theta)
    norms = np.linalg.norm(jacobian, axis=0)
    left, _, _ = np.linalg.svd(jacobian / np.where(norms > 0, norms, 1.0), full_matrices=False)
    return left[:, :rank]


def _able(
    kept: NDArray[np.bool_], point: NDArray[np.intp], n_parameters: int, directions: FloatArray
) -> NDArray[np.bool_]:
    """Which resamples hold enough distinct points and tell all directions apart (R)."""
    order = np.argsort(point, kind="stable")
    first = np.flatnonzero(np.diff(point[order], prepend=-1))
    distinct = np.logical_or.reduceat(kept[:, order], first, axis=1).sum(axis=1)
    rank = directions.shape[1]
    gram = kept.astype(np.float64) @ (directions[:, :, None] * directions[:, None, :]).reshape(len(point), -1)
    gram = gram.reshape(len(kept), rank, rank)
    # eigenvalues are at most one, so their product bounds the smallest from below, at a tenth of the price
    seeing = np.linalg.det(gram) > _BLIND
    seeing[~seeing] = np.linalg.eigvalsh(gram[~seeing])[:, 0] > _BLIND
    able: NDArray[np.bool_] = (distinct >= n_parameters) & seeing
    return able
