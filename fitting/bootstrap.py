"""Resampling whole clusters: how far the parameters move when other short checkpoints had been trained."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fitting import engine
from fitting.basis import N_PARAMETERS, Basis
from fitting.engine import Optimum, Problem
from fitting.identifiability import jacobian_rank
from fitting.values import FloatArray, Interval

# Below this share of good refits the survivors are a biased choice of resamples: no interval is given.
MIN_OK_SHARE = 0.75
# A quantile of fewer draws than this is one of their extremes.
MIN_DRAWS = 20
# Fewer clusters than this have too few different resamples (35 for four) to show a distribution.
MIN_CLUSTERS = 5


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
    codes, index = np.unique(cluster, return_inverse=True)
    drawn = np.random.default_rng(seed).multinomial(len(codes), np.full(len(codes), 1 / len(codes)), size=n_draws)
    weights: FloatArray = drawn[:, index.ravel()].astype(np.float64)
    return weights


def resample(
    problem: Problem,
    found: Optimum,
    sizes: FloatArray,
    cluster: NDArray[np.int64],
    *,
    rank: int,
    n_draws: int,
    seed: int,
) -> Resampling:
    """Refit ``n_draws`` resamples of the clusters, each started from the optimum ``found``.

    Args:
        problem: the problem of the full set.
        found: its optimum.
        sizes: N, D_s, D_l of its rows (n x 3).
        cluster: their clusters (n).
        rank: what the full set determines; a resample that determines less is not counted as good.
        n_draws: how many.
        seed: makes the draws repeatable.
    """
    weights = cluster_weights(cluster, n_draws, seed)
    _, point = np.unique(sizes, axis=0, return_inverse=True)
    able = np.array(
        [_able(problem.basis, found.theta, point.ravel(), drawn > 0, rank) for drawn in weights], dtype=bool
    )
    refits = engine.refit(problem, weights[able], found.theta)
    thetas = refits.thetas[refits.converged]
    n_ok = len(thetas)
    if n_ok < max(MIN_OK_SHARE * n_draws, MIN_DRAWS) or len(np.unique(cluster)) < MIN_CLUSTERS:
        thetas = thetas[:0]
    free = np.repeat(problem.varied, 2)
    crowded = (thetas[:, :-1] - problem.lower[:-1] < 1e-4) | (problem.upper[:-1] - thetas[:, :-1] < 1e-4)
    return Resampling(
        draws=problem.basis.to_parameters(thetas),
        n_draws=n_draws,
        n_ok=n_ok,
        n_at_bound=int((crowded & free).any(axis=1).sum()),
    )


def intervals(draws: FloatArray, level: float, withheld_for: tuple[int, ...]) -> tuple[Interval | None, ...]:
    """Percentile interval of each parameter, None for those named (by position) and where there are no draws."""
    if not len(draws):
        return (None,) * N_PARAMETERS
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=0).tolist()
    return tuple(
        None if k in withheld_for else Interval(low=a, high=b) for k, (a, b) in enumerate(zip(low, high, strict=True))
    )


def _able(basis: Basis, theta: FloatArray, point: NDArray[np.intp], kept: NDArray[np.bool_], rank: int) -> bool:
    if len(np.unique(point[kept])) < N_PARAMETERS:
        return False
    return jacobian_rank(basis.rows(kept).jacobian(theta)) >= rank
