"""ties: deltas to the oldest checkpoint, trimmed to the largest; one sign per coordinate, the mean of its deltas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.merge_folders import folders, merged
from workers import merge_rules
from workers.merge import merge
from workers.spec import ObservationRule


def rule(density: float) -> ObservationRule:
    return ObservationRule(name="ties", m=0, density=density)


@pytest.mark.parametrize(
    ("oldest", "deltas", "density", "expected"),
    [
        # base [1, 1]: trimmed to [4, 0], [-3, 0], [0, 1]; the sum [1, 1] elects +, +
        ([1, 1], [[4, -1], [-3, 2], [0.5, 1]], 0.5, [5, 2]),
        # untrimmed: sums [1.5, 2]; means of [4, .5] and [2, 1]
        ([1, 1], [[4, -1], [-3, 2], [0.5, 1]], 1.0, [3.25, 2.5]),
        # B36 (github.com/arcee-ai/mergekit/issues/474): trimmed to [3, 0, 0, 2], [-1, -2, 0, 0]
        ([0, 0, 0, 0], [[3, -1, 0.5, 2], [-1, -2, 0.4, 0]], 0.5, [3, -2, 0, 2]),
        # the same thread: every checkpoint has one vote, so +0.3 wins against -0.1
        ([0], [[0.3], [-0.1]], 1.0, [0.3]),
        # an exact tie of signs is a plus
        ([0], [[2], [-2]], 1.0, [2]),
        ([0], [[-2], [2]], 1.0, [2]),
        # zeros have no sign and no part in the mean
        ([0, 5], [[0, 0], [6, 0], [2, 0]], 1.0, [4, 5]),
    ],
)
def test_known_answers(
    tmp_path: Path, oldest: list[float], deltas: list[list[float]], density: float, expected: list[float]
) -> None:
    base = torch.tensor(oldest, dtype=torch.float32)
    found = merged(tmp_path, [base, *(base + torch.tensor(delta) for delta in deltas)], rule(density))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=1e-6, atol=0)


def plain(values: list[Tensor], density: float) -> Tensor:
    """The definition written out plainly, for a flat tensor."""
    oldest = values[0].double()
    kept = []
    for value in values[1:]:
        delta = (value.float() - values[0].float()).double()
        largest = torch.argsort(delta.abs(), descending=True, stable=True)[: max(int(density * len(delta)), 1)]
        trimmed = torch.zeros_like(delta)
        trimmed[largest] = delta[largest]
        kept.append(trimmed)
    stacked = torch.stack(kept)
    sign = torch.where(stacked.sum(0) >= 0, 1.0, -1.0)
    agreeing = stacked.sign() == sign
    return (oldest + (stacked * agreeing).sum(0) / agreeing.sum(0).clamp(min=1)).float()


@pytest.mark.parametrize("density", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_its_definition_whether_magnitudes_differ_or_are_often_equal(
    tmp_path: Path, density: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deltas of small whole numbers make thousands of ties at the threshold, across blocks: the first are kept."""
    monkeypatch.setattr(merge_rules, "BLOCK", 512)
    generator = torch.Generator().manual_seed(0)
    smooth = [torch.randn(4_000, generator=generator).to(dtype) for _ in range(4)]
    coarse = [torch.randint(-4, 5, (4_000,), generator=generator).to(dtype) for _ in range(4)]
    for name, values in (("smooth", smooth), ("coarse", coarse)):
        found = merged(tmp_path / name, values, rule(density))
        torch.testing.assert_close(found, plain(values, density), rtol=2e-7, atol=1e-7)


def test_exactly_the_share_is_kept_and_at_least_one_coordinate(tmp_path: Path) -> None:
    zeros = torch.zeros(1_000)
    assert (merged(tmp_path / "equal", [zeros, zeros + 1], rule(0.29)) != 0).sum() == 290
    assert merged(tmp_path / "first", [zeros, zeros + 1], rule(0.29))[:290].eq(1).all()
    assert merged(tmp_path / "one", [[0.0, 0.0], [1.0, 2.0]], rule(0.1)).tolist() == [0, 2]


def test_tensors_are_trimmed_one_by_one(tmp_path: Path) -> None:
    """A tensor of small deltas keeps its share beside one of large deltas."""
    zeros = {"large": torch.zeros(4), "small": torch.zeros(4)}
    ones = {"large": torch.tensor([9.0, 8.0, 7.0, 6.0]), "small": torch.tensor([0.4, 0.3, 0.2, 0.1])}
    found = dict(merge(folders(tmp_path, [zeros, ones]), rule(0.5)))
    assert found["large"].tolist() == [9, 8, 0, 0]
    assert found["small"].tolist() == pytest.approx([0.4, 0.3, 0, 0])


def test_a_nan_is_not_merged_away(tmp_path: Path) -> None:
    found = merged(tmp_path, [[0.0, 0.0], [1.0, float("nan")], [1.0, 1.0]], rule(1.0))
    assert found[0] == 1
    assert found[1].isnan()
