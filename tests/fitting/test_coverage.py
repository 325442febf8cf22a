"""Coverage of intervals where rows share noise, in small; the benchmark has the large run."""

import numpy as np

from benchmarks.fitting_coverage import grid, held, noise
from fitting.values import Resampled


def test_noise_is_shared_within_a_short_checkpoint() -> None:
    rows = grid(held_out=False)
    drawn = np.array([noise(rows, seed) for seed in range(400)])
    same, other = drawn[:, 0], drawn[:, np.flatnonzero(rows.cluster != rows.cluster[0])[0]]
    partner = drawn[:, np.flatnonzero(rows.cluster == rows.cluster[0])[1]]
    assert np.corrcoef(same, partner)[0, 1] > 0.5
    assert abs(np.corrcoef(same, other)[0, 1]) < 0.15


def test_held_out_scale_lies_in_cluster_intervals_more_often_than_in_those_of_rows() -> None:
    rows, target = grid(held_out=False), grid(held_out=True)
    shares = {
        resampled: np.mean([held(rows, target, seed, 100, resampled)["S5"] for seed in range(8)])
        for resampled in Resampled
    }
    assert shares[Resampled.CLUSTERS] >= 0.75
    assert shares[Resampled.CLUSTERS] > shares[Resampled.ROWS]
