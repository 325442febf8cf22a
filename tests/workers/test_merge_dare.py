"""dare: deltas to the oldest checkpoint, coordinates dropped at random, the rest divided by the share that is kept."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.workers.merge_folders import folders, merged
from workers.errors import MergeError
from workers.merge import merge
from workers.merge_rules import Masks, Source, dare, random_masks
from workers.spec import ObservationRule


def rule(density: float, *, seed: int = 42) -> ObservationRule:
    return ObservationRule(name="dare", m=0, density=density, seed=seed)


def source(values: Sequence[float]) -> Source:
    return lambda begin, end: torch.tensor(values)[begin:end]


def mask(kept: str) -> Masks:
    bits = iter(kept)
    return lambda count: torch.tensor([next(bits) == "1" for _ in range(count)])


def with_masks(oldest: list[float], deltas: list[list[float]], masks: list[str], *, density: float) -> Tensor:
    newer = [[a + b for a, b in zip(oldest, delta, strict=True)] for delta in deltas]
    sources = [source(oldest), *map(source, newer)]
    return torch.cat(list(dare(sources, len(oldest), density=density, masks=list(map(mask, masks)))))


@pytest.mark.parametrize(
    ("kept", "expected"),
    [("1100", [2, 4, 0, 0]), ("1001", [2, 0, 0, 8]), ("0011", [0, 0, 6, 8]), ("0000", [0, 0, 0, 0])],
)
def test_what_is_kept_is_divided_by_the_density(kept: str, expected: list[float]) -> None:
    """As in the paper (arXiv 2311.03099); not by the ratio of L1 norms, as mergekit has done since 0.1."""
    found = with_masks([0.0] * 4, [[1.0, 2.0, 3.0, 4.0]], [kept], density=0.5)
    assert found.tolist() == expected


def test_the_mean_of_the_sparse_deltas_is_added_to_the_oldest() -> None:
    """By hand: ([2, 4, 0, 0] + [0, 2, -2, 0]) / 2 + 1. The oldest has no delta and does not count in the mean."""
    found = with_masks([1.0] * 4, [[1.0, 2.0, 3.0, 4.0], [-1.0, 1.0, -1.0, 1.0]], ["1100", "0110"], density=0.5)
    assert found.tolist() == [2, 4, 0, 1]


def test_half_precision_gives_no_nan_and_the_mean_of_the_delta(tmp_path: Path) -> None:
    """B38 (github.com/arcee-ai/mergekit/pull/69): a million deltas of 1 in float16, nine tenths dropped."""
    halves = [torch.zeros(1_000_000, dtype=torch.float16), torch.ones(1_000_000, dtype=torch.float16)]
    found = merged(tmp_path, halves, rule(0.1))
    assert set(found.tolist()) == {0, 10}
    assert found.double().mean().item() == pytest.approx(1, abs=0.012)  # four standard deviations


def test_keeping_everything_is_the_plain_mean_of_the_deltas_and_keeping_nothing_is_refused(tmp_path: Path) -> None:
    found = merged(tmp_path / "all", [[1.0, 1.0], [2.0, 5.0], [4.0, -1.0]], rule(1.0))
    assert found.tolist() == [3, 2]
    with pytest.raises(MergeError, match="density above 0"):
        merged(tmp_path / "none", [[1.0], [2.0]], rule(0.0))


def test_over_many_seeds_the_expectation_is_the_plain_mean_of_the_deltas(tmp_path: Path) -> None:
    """Variance of one coordinate: (1/density - 1) times the sum of squared deltas over n^2; five deviations of 400."""
    oldest, deltas = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([[1.0, -2.0, 4.0], [3.0, 2.0, 0.5]])
    sources = folders(tmp_path, [{"w": oldest}, *({"w": oldest + delta} for delta in deltas)])
    found = torch.stack([dict(merge(sources, rule(0.1, seed=seed)))["w"].double() for seed in range(400)]).mean(0)
    deviation = (9 * deltas.double().square().sum(0) / 4 / 400).sqrt()
    assert ((found - (oldest + deltas.mean(0))).abs() < 5 * deviation).all()


def test_a_tensors_masks_do_not_depend_on_the_other_tensors(tmp_path: Path) -> None:
    values = [torch.randn(50, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    alone = merged(tmp_path / "alone", values, rule(0.5))
    others = {"a": torch.ones(31), "z": torch.ones(7)}
    among = dict(merge(folders(tmp_path / "among", [{**others, "w": value} for value in values]), rule(0.5)))
    assert torch.equal(among["w"], alone)


def test_every_seed_tensor_and_checkpoint_has_masks_of_its_own() -> None:
    """Independent fair masks agree on half of 10,000 coordinates, five standard deviations of 50 allowed."""

    def kept(seed: int = 42, tensor: str = "w", index: int = 1) -> Tensor:
        return random_masks(seed=seed, tensor=tensor, index=index, density=0.5)(10_000)

    assert torch.equal(kept(), kept())
    all_masks = [kept(), kept(seed=43), kept(tensor="v"), kept(index=2), kept(index=3)]
    for one, other in pairwise(all_masks):
        assert abs((one == other).sum().item() - 5_000) < 250


@pytest.mark.parametrize("density", [0.1, 0.5, 1.0])
def test_the_share_that_is_kept_is_the_density(density: float) -> None:
    kept = random_masks(seed=0, tensor="w", index=1, density=density)(100_000).double().mean().item()
    assert kept == pytest.approx(density, abs=5 * np.sqrt(density * (1 - density) / 100_000))


def test_bfloat16_checkpoints_are_merged_in_a_wider_type(tmp_path: Path) -> None:
    values = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 1.0078125, 1.015625)]
    assert merged(tmp_path, values, rule(1.0)).item() == pytest.approx(1.01171875, rel=1e-7)
