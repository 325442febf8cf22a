"""When training counts as diverged, and what is kept of how it went."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import pytest

from tests.workers.tiny_training import segment_of, short_stage
from workers import health
from workers.errors import DivergedError
from workers.health import HealthSeries, LossWatch, stated_peak_flops

SEGMENT = segment_of("short_trunk", short_stage("corpus"))


def tell(watch: LossWatch, steps: Iterable[int], loss: float) -> None:
    for step in steps:
        watch.check(step, loss, 1.0)


def test_a_mean_that_rises_by_more_than_the_bound_is_divergence_and_a_spike_is_not() -> None:
    watch = LossWatch(None)
    for step in range(1, 201):
        spike = 30.0 if step == 100 else 0.0
        watch.check(step, 3.0 + spike, 1.0)
        if step in (50, 150):
            watch.saved(step)
    with pytest.raises(DivergedError) as caught:
        tell(watch, range(201, 300), 4.1)
    # 64 losses of 4.1 have a mean of 4.1; of 1.0 above 3.0 it takes 59 of them (59 x 1.1 / 64 = 1.01).
    assert caught.value.step == 259
    assert caught.value.best_mean == pytest.approx(3.0)
    assert caught.value.good_step == 50
    assert "the last good checkpoint is that of step 50" in str(caught.value)


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)])
def test_what_is_not_finite_is_divergence_at_once(loss: float, norm: float) -> None:
    watch = LossWatch(7)
    watch.saved(12)
    with pytest.raises(DivergedError, match=r"at step 13: .*checkpoint is that of step 12"):
        watch.check(13, loss, norm)


@pytest.mark.parametrize(("begin", "end"), [(0, 1), (0, 64), (0, 65), (100, 1_100), (5, 100_005)])
def test_points_between_checkpoints_are_few_evenly_spaced_and_end_at_the_checkpoint(begin: int, end: int) -> None:
    series = HealthSeries(SEGMENT, peak_flops=None, step=begin)
    series.expect(begin, end)
    for step in range(begin + 1, end + 1):
        series.record(step, loss=1.0, gradient_norm=1.0, learning_rate=0.1)
    steps = [point.step for point in series.take()]
    assert min(32, end - begin) <= len(steps) <= health.POINTS
    assert steps[-1] == end
    assert len({later - earlier for earlier, later in pairwise(steps)}) <= 1
    assert series.take() == ()


def test_mfu_is_the_models_operations_over_the_devices() -> None:
    series = HealthSeries(SEGMENT, peak_flops=1e9, step=0)
    series.expect(0, 1)
    series.record(1, loss=1.0, gradient_norm=1.0, learning_rate=0.1)
    (point,) = series.take()
    assert point.mfu == pytest.approx(point.tokens_per_s * SEGMENT.shape.train_flops_per_token(32) / 1e9)


def test_peaks_are_known_by_the_names_that_cuda_gives() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA GB200": 2500e12,
        "NVIDIA B200": 2250e12,
        "NVIDIA GeForce GTX 1080": None,
    }
    assert {name: stated_peak_flops(name) for name in names} == names
