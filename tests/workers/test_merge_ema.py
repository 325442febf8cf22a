"""ema: weights decay^(age / spacing), ages in steps back from the newest checkpoint, divided by their sum."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.merge_folders import merged
from workers.spec import ObservationRule


def ema(decay: float, *, spacing_steps: int = 10) -> ObservationRule:
    return ObservationRule(name="ema", m=0, spacing_steps=spacing_steps, decay=decay)


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        (0.5, [1 / 7, 2 / 7, 4 / 7]),
        (0.1, [0.01 / 1.11, 0.1 / 1.11, 1 / 1.11]),
        (0.9, [0.81 / 2.71, 0.9 / 2.71, 1 / 2.71]),
        (1.0, [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_weights_fall_by_the_decay_with_every_spacing(tmp_path: Path, decay: float, expected: list[float]) -> None:
    weights = merged(tmp_path, list(torch.eye(3)), ema(decay), steps=(10, 20, 30))
    torch.testing.assert_close(weights, torch.tensor(expected))


def test_the_exponent_is_the_age_in_spacings_whatever_the_gaps(tmp_path: Path) -> None:
    """Steps 5, 20, 30 at a spacing of 10: ages 2.5, 1, 0."""
    weights = merged(tmp_path, list(torch.eye(3)), ema(0.25), steps=(5, 20, 30))
    expected = torch.tensor([1 / 32, 1 / 4, 1.0])
    torch.testing.assert_close(weights, expected / expected.sum())


def test_a_small_share_of_a_bfloat16_checkpoint_is_not_rounded_away(tmp_path: Path) -> None:
    """B32 (github.com/d8ahazard/sd_dreambooth_extension/pull/1415): an average kept in bfloat16 never moved.

    1 and then a hundred times 2, decay 0.999: 2 - w_1, w_1 = 0.999^100 / sum of 0.999^k over k = 0..100.
    """
    values = [torch.tensor([1.0], dtype=torch.bfloat16), *[torch.tensor([2.0], dtype=torch.bfloat16)] * 100]
    found = merged(tmp_path, values, ema(0.999, spacing_steps=1), steps=range(101))
    oldest_weight = 0.999**100 * 0.001 / (1 - 0.999**101)
    assert found.item() == pytest.approx(2 - oldest_weight, abs=2e-7)
    assert found.bfloat16().item() != found.item()  # bfloat16 could not have said it


def test_one_checkpoint_is_itself(tmp_path: Path) -> None:
    assert merged(tmp_path, [[5.0]], ema(0.9), steps=(10,)).item() == 5
