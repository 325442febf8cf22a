"""Resampling of clusters."""

from dataclasses import replace

import numpy as np
import pytest

from fitting.bootstrap import MIN_OK_SHARE, cluster_weights, intervals
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from tests.fitting.toy_law import FULL_GRID, toy_observations

# Nine runs that vary all three axes: each size meets each short budget once, and each long budget thrice.
NINE_RUNS = tuple(
    (n, s, (1e8, 1e10, 1e11)[(i + j) % 3])
    for i, n in enumerate((1e8, 1e9, 3e9))
    for j, s in enumerate((1e9, 1.6e10, 6.4e10))
)


def test_rows_of_a_cluster_are_drawn_together() -> None:
    cluster = np.repeat(np.arange(5), 4).astype(np.int64)
    weights = cluster_weights(cluster, 100, seed=1)
    by_cluster = weights.reshape(100, 5, 4)
    assert (by_cluster == by_cluster[:, :, :1]).all()
    assert (weights.sum(axis=1) == 20).all()


@pytest.mark.parametrize(("runs", "share"), [(9, 0.749), (12, 0.114), (16, 0.0009)])
def test_resamples_with_too_few_distinct_runs_are_as_frequent_as_they_should_be(runs: int, share: float) -> None:
    """B73: how often a resample of n runs holds fewer than seven distinct ones."""
    weights = cluster_weights(np.arange(runs), 20_000, seed=2)
    assert ((weights > 0).sum(axis=1) < 7).mean() == pytest.approx(share, abs=0.01)


def test_nine_single_runs_get_no_interval() -> None:
    """B73: withheld, with the share of good refits said."""
    result = fit(LONG_CONTEXT, toy_observations(NINE_RUNS, std=0.01), bootstrap_draws=100)
    assert result.n_draws == 100
    assert result.n_draws_ok <= 40 < MIN_OK_SHARE * 100
    assert result.intervals == (None,) * 7
    assert result.draws.shape == (0, 7)
    assert any(f"{result.n_draws_ok} of 100 refits of 9 clusters" in warning for warning in result.warnings)


def test_one_seed_gives_one_set_of_draws_and_another_seed_another() -> None:
    """B73: repeatable."""
    observations = toy_observations(FULL_GRID[::2], std=0.01)
    first, again, other = (fit(LONG_CONTEXT, observations, bootstrap_draws=25, seed=seed) for seed in (4, 4, 5))
    assert first.draws.tolist() == again.draws.tolist()
    assert first.draws.tolist() != other.draws.tolist()
    assert first.parameters == other.parameters


def test_names_of_clusters_do_not_change_what_is_drawn() -> None:
    observations = toy_observations(FULL_GRID[::2], std=0.01)
    renamed = replace(observations, cluster=(7 * observations.cluster) % 101)
    assert np.argsort(renamed.cluster).tolist() != np.argsort(observations.cluster).tolist()
    first, again = (fit(LONG_CONTEXT, rows, bootstrap_draws=25) for rows in (observations, renamed))
    assert first.draws.tolist() == again.draws.tolist()


@pytest.mark.parametrize("n_clusters", [1, 4])
def test_few_clusters_get_no_interval_however_well_each_refit_does(n_clusters: int) -> None:
    """One cluster alone would be redrawn as itself every time: an interval of no width."""
    clean = toy_observations(std=0.01)
    few = replace(clean, cluster=np.random.default_rng(0).permutation(np.arange(64, dtype=np.int64) % n_clusters))
    result = fit(LONG_CONTEXT, few, bootstrap_draws=25)
    assert result.n_clusters == n_clusters
    assert result.n_draws_ok >= 20
    assert result.intervals == (None,) * 7
    assert any(f"refits of {n_clusters} clusters" in warning for warning in result.warnings)


def test_no_resampling_asked_for_is_said() -> None:
    result = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=0)
    assert result.draws.shape == (0, 7)
    assert "no intervals: no resampling was asked for" in result.warnings


def test_intervals_are_linear_quantiles() -> None:
    draws = np.arange(11.0)[:, None] * np.ones(7)
    spans = intervals(draws, 0.9, withheld_for=(6,))
    assert spans[0] is not None
    assert (spans[0].low, spans[0].high) == pytest.approx((0.5, 9.5))
    assert spans[6] is None


def test_interval_holds_the_truth_where_noise_is_shared_by_a_cluster() -> None:
    """Four tables of known truth: the interval of the D_l exponent holds it in most of them."""
    held = 0
    for seed in range(4):
        clean = toy_observations()
        shared = np.random.default_rng(seed).normal(0, 0.01, 16)[clean.cluster]
        own = np.random.default_rng(100 + seed).normal(0, 0.006, 64)
        noisy = replace(clean, log_longppl=clean.log_longppl + shared + own)
        span = fit(LONG_CONTEXT, noisy, bootstrap_draws=25, seed=seed).intervals[5]
        assert span is not None
        assert span.high - span.low < 0.2
        held += span.low <= 0.20 <= span.high
    assert held >= 3
