"""The arithmetic of the observation rules, on one tensor of every checkpoint, block by block.

A rule takes sources, oldest first, each of which hands out flat blocks of its tensor, and yields the merged tensor's
blocks in order. So a merge holds some blocks of memory, however large the tensor and however many the checkpoints.
Sums are taken in float64: the weighted mean of equal checkpoints is equal to them to the last bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.errors import MergeError
from workers.spec import ObservationRule, RuleName, canonical_json

#: Elements of a block. Even, so that blocks of masks join seamlessly; small, so that a rule's blocks stay in the cache.
BLOCK = 1 << 16

#: Magnitudes are float32, whose bit patterns sort like the numbers: counted by the upper 16 bits, then by the lower 15.
_UPPER, _LOWER = 1 << 16, 1 << 15
_LOWER_BITS = 15


class Source(Protocol):
    """One checkpoint's tensor, laid out flat."""

    def __call__(self, begin: int, end: int) -> Tensor:
        """Elements [begin, end), in the checkpoint's own type."""


class Masks(Protocol):
    """Which coordinates `dare` keeps of one checkpoint's delta, block after block."""

    def __call__(self, count: int) -> Tensor:
        """The next `count` coordinates, as booleans."""


def check_rule(rule: ObservationRule) -> None:
    """Raises MergeError if the rule lacks a parameter or has one that is out of its range."""
    if rule.name == "ema" and not (rule.decay is not None and 0 < rule.decay <= 1):
        raise MergeError(f"ema needs a decay above 0 and at most 1, not {rule.decay}")
    if rule.name in ("dare", "ties") and not (rule.density is not None and 0 < rule.density <= 1):
        raise MergeError(f"{rule.name} needs a density above 0 and at most 1, not {rule.density}")


def source_weights(rule: ObservationRule, steps: Sequence[int]) -> tuple[float, ...]:
    """Weights of the checkpoints at `steps`, oldest first, in a rule that averages; to be divided by their sum.

    `raw` and `last_m`: 1 each. With a checkpoint's age counted in steps back from the newest, `one_sqrt`:
    1 - sqrt(age / oldest age), `ema`: decay^(age / spacing).
    """
    ages = [steps[-1] - step for step in steps]
    if rule.name == "one_sqrt" and ages[0] > 0:
        return tuple(1.0 - math.sqrt(age / ages[0]) for age in ages)
    if rule.name == "ema":
        assert rule.decay is not None
        return tuple(rule.decay ** (age / rule.spacing_steps) if age else 1.0 for age in ages)
    return (1.0,) * len(ages)


def weighted(sources: Sequence[Source], numel: int, *, weights: Sequence[float]) -> Iterator[Tensor]:
    """Blocks of sum(w_i theta_i) / sum(w_i). A checkpoint of weight zero is not read."""
    read = [(source, weight) for source, weight in zip(sources, weights, strict=True) if weight]
    total = math.fsum(weight for _, weight in read)
    for begin, end in _blocks(numel):
        if len(read) == 1:
            yield read[0][0](begin, end)
            continue
        (first, first_weight), *others = read
        sum_ = first(begin, end).double().mul_(first_weight)
        for source, weight in others:
            sum_.add_(source(begin, end).double(), alpha=weight)
        yield sum_.div_(total)


def dare(sources: Sequence[Source], numel: int, *, density: float, masks: Sequence[Masks]) -> Iterator[Tensor]:
    """Blocks of theta_1 + mean of m_i (theta_i - theta_1) / density over the checkpoints after the oldest, theta_1.

    Yu et al. 2024, "Language models are super Mario", arXiv 2311.03099: what is kept is divided by the probability of
    keeping it, so that the expectation is the plain mean of the deltas.

    Args:
        masks: One for each checkpoint but the oldest.
    """
    oldest, *newer = sources
    for begin, end in _blocks(numel):
        reference = oldest(begin, end).double()
        update = torch.zeros_like(reference)
        for source, kept in zip(newer, masks, strict=True):
            update.add_(source(begin, end).double().sub_(reference).mul_(kept(end - begin)))
        yield reference.add_(update, alpha=1.0 / (density * max(len(newer), 1)))


def ties(sources: Sequence[Source], numel: int, *, density: float) -> Iterator[Tensor]:
    """Blocks of theta_1 plus the deltas of the newer checkpoints, trimmed, with one sign elected, and averaged.

    Yadav et al. 2023, "TIES-merging", arXiv 2306.01708, on float32 deltas. Of each delta, the `density` share of
    coordinates that is largest in magnitude is kept, at least one; of equal ones, those that come first. The sign of a
    coordinate is that of the sum of what was kept, + where that is zero; the mean is over the nonzero entries with it.
    """
    oldest, *newer = sources
    trims = _trims(oldest, newer, numel, density)
    for begin, end in _blocks(numel):
        reference = oldest(begin, end).float()
        total, positive = np.zeros((2, end - begin))
        positives, negatives = np.zeros((2, end - begin), dtype=np.int16)
        for source, trim in zip(newer, trims, strict=True):
            delta = trim(source(begin, end).float().sub_(reference))
            total += delta
            positive += np.maximum(delta, 0)
            positives += delta > 0
            negatives += delta < 0
        plus = total >= 0
        agreeing = np.where(plus, positive, total - positive)
        agreeing /= np.maximum(np.where(plus, positives, negatives), 1)
        yield torch.from_numpy(agreeing).add_(reference)


def random_masks(*, seed: int, tensor: str, index: int, density: float) -> Masks:
    """Independent Bernoulli(density) masks for the checkpoint at `index` of those selected, oldest 0.

    Philox output under a key that hashes (seed, tensor, index): the masks depend on nothing else, neither on other
    tensors nor on the order of work. 32 bits decide a coordinate; the density is met to 2^-33.
    """
    key = hashlib.sha256(canonical_json([seed, tensor, index]).encode()).digest()[:16]
    generator = np.random.Philox(key=int.from_bytes(key, "little"))
    last_kept = np.uint32(max(round(density * 2**32), 1) - 1)

    def next_masks(count: int) -> Tensor:
        draws = generator.random_raw((count + 1) // 2).astype("<u8", copy=False).view("<u4")[:count]
        return torch.from_numpy(draws <= last_kept)

    return next_masks


def merged_blocks(
    rule: ObservationRule, sources: Sequence[Source], numel: int, *, tensor: str, steps: Sequence[int]
) -> Iterator[Tensor]:
    """Blocks of the tensor that `rule` makes of `sources`, oldest first, flat, in float64 or in the source's own type.

    Args:
        tensor: Its name, which is part of `dare`'s masks.
        steps: Of each source; only `one_sqrt` and `ema` look at more than their number.
    """
    if rule.name in _AVERAGES:
        return weighted(sources, numel, weights=source_weights(rule, steps))
    assert rule.density is not None
    if rule.name == "ties":
        return ties(sources, numel, density=rule.density)
    masks = [
        random_masks(seed=rule.seed, tensor=tensor, index=index, density=rule.density)
        for index in range(1, len(sources))
    ]
    return dare(sources, numel, density=rule.density, masks=masks)


_AVERAGES: tuple[RuleName, ...] = ("raw", "last_m", "one_sqrt", "ema")


@dataclass(slots=True)
class _Trim:
    """Keeps what is above the threshold, and the first `equal` of the coordinates that are equal to it."""

    threshold: int
    equal: int

    def __call__(self, delta: Tensor) -> npt.NDArray[np.float32]:
        magnitudes, values = _magnitudes(delta), delta.numpy()
        kept = magnitudes > self.threshold
        if self.equal:
            at_threshold = np.flatnonzero(magnitudes == self.threshold)[: self.equal]
            self.equal -= len(at_threshold)
            kept[at_threshold] = True
        values *= kept
        return values


def _trims(oldest: Source, newer: Sequence[Source], numel: int, density: float) -> list[_Trim]:
    """The exact threshold of every delta, from two passes that count and one number of coordinates to keep."""
    wanted = max(math.floor(Fraction(repr(density)) * numel), 1)
    if wanted >= numel:
        return [_Trim(-1, 0) for _ in newer]
    counts = np.zeros((len(newer), _UPPER), dtype=np.int64)
    for number, magnitudes in _all_magnitudes(oldest, newer, numel):
        counts[number] += np.bincount(magnitudes >> _LOWER_BITS, minlength=_UPPER)
    bins, left = zip(*(_largest(count, wanted) for count in counts), strict=True)
    counts = np.zeros((len(newer), _LOWER), dtype=np.int64)
    for number, magnitudes in _all_magnitudes(oldest, newer, numel):
        within = magnitudes[magnitudes >> _LOWER_BITS == bins[number]]
        counts[number] += np.bincount(within & (_LOWER - 1), minlength=_LOWER)
    trims = []
    for upper, count, missing in zip(bins, counts, left, strict=True):
        lower, equal = _largest(count, missing)
        trims.append(_Trim((upper << _LOWER_BITS) | lower, equal))
    return trims


def _largest(counts: npt.NDArray[np.int64], wanted: int) -> tuple[int, int]:
    """The bin that holds the `wanted`-th largest, and how many of that bin are among the `wanted` largest."""
    from_top = np.cumsum(counts[::-1])
    place = int(np.searchsorted(from_top, wanted))
    above = int(from_top[place - 1]) if place else 0
    return len(counts) - 1 - place, wanted - above


def _all_magnitudes(oldest: Source, newer: Sequence[Source], numel: int) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    for begin, end in _blocks(numel):
        reference = oldest(begin, end).float()
        for number, source in enumerate(newer):
            yield number, _magnitudes(source(begin, end).float().sub_(reference))


def _magnitudes(delta: Tensor) -> npt.NDArray[np.int32]:
    """The bit patterns of |delta|, float32, as integers that sort like the numbers; NaN is above all of them."""
    return delta.abs().numpy().view(np.int32)


def _blocks(numel: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK, numel)) for begin in range(0, numel, BLOCK))
