"""one_sqrt: weights 1 - sqrt(age), ages from 0 at the newest checkpoint to 1 at the oldest, divided by their sum."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.workers.merge_folders import merged
from workers.merge_rules import source_weights
from workers.spec import ObservationRule

RULE = ObservationRule(name="one_sqrt", m=0, spacing_steps=10)


def one_hot(count: int) -> torch.Tensor:
    """Checkpoints whose merge is their weights: the i-th is 1 at coordinate i and 0 elsewhere."""
    return torch.eye(count)


def test_weights_of_evenly_spaced_checkpoints(tmp_path: Path) -> None:
    """By hand: 1 - sqrt(1, .75, .5, .25, 0) = 0, .1339746, .2928932, .5, 1; their sum is 1.9268678."""
    weights = merged(tmp_path, list(one_hot(5)), RULE, steps=(10, 20, 30, 40, 50))
    expected = torch.tensor([0.0, 0.1339746, 0.2928932, 0.5, 1.0]) / 1.9268678
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=0)
    assert weights[0] == 0


def test_real_gaps_between_checkpoints_count_and_ranks_do_not(tmp_path: Path) -> None:
    """Steps 0, 64, 100: ages 1, .36, 0 and weights 0, .4, 1 over 1.4."""
    weights = merged(tmp_path, list(one_hot(3)), RULE, steps=(0, 64, 100))
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.4 / 1.4, 1 / 1.4]))


def test_the_newest_weighs_most_and_weights_fall_with_age() -> None:
    """Not the rule that inverts a decay by 1 - sqrt, which puts most weight on the oldest (arXiv 2507.17634)."""
    weights = source_weights(RULE, range(0, 260, 10))
    assert list(weights) == sorted(weights)
    assert weights[0] == 0
    assert weights[-1] == 1


def test_the_oldest_is_not_even_read(tmp_path: Path) -> None:
    found = merged(tmp_path, [[math.nan], [1.0], [3.0]], RULE, steps=(0, 64, 100))
    assert found.item() == pytest.approx((0.4 * 1 + 1 * 3) / 1.4, rel=1e-6)


def test_two_checkpoints_are_the_newest_and_one_is_itself(tmp_path: Path) -> None:
    assert merged(tmp_path / "two", [[1.0], [3.0]], RULE, steps=(10, 20)).item() == 3
    assert merged(tmp_path / "one", [[5.0]], RULE, steps=(10,)).item() == 5


def test_bfloat16_checkpoints_are_averaged_in_a_wider_type(tmp_path: Path) -> None:
    values = [torch.tensor([value], dtype=torch.bfloat16) for value in (9.0, 1.0, 1.0078125)]
    found = merged(tmp_path, values, RULE, steps=(0, 64, 100))
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx((0.4 + 1.0078125) / 1.4, rel=1e-7)
