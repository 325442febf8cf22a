"""In which order sequences come: pure functions of (seed, position), so that a resume neither repeats nor skips.

Every epoch visits each sequence of a source once, in an order of its own; several sources take turns so that their
shares hold at every point. All randomness is Philox output keyed by the seed: no generator has a state that could be
lost or shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from workers.errors import CorpusError
from workers.spec import SHARE_UNIT

#: Lengths of natural runs and of copied spans, in tokens, both ends included.
NATURAL_RUN = (6, 39)
COPIED_SPAN = (6, 40)

_BLOCK = 64
_SPANS_STREAM = 1 << 63


def window_count(n_tokens: int, seq_len: int) -> int:
    """Windows in a stream of `n_tokens`; the last one must still have a target for its last input."""
    return (n_tokens - 1) // seq_len


def sequence_index(seed: int, position: int, count: int) -> int:
    """The window that the `position`-th sequence of a stage trains on, of `count` windows.

    Positions run through all epochs: each `count` of them visit every window once.
    """
    epoch, offset = divmod(position, count)
    return int(permutation(seed, epoch, count)[offset])


@lru_cache(maxsize=32)
def permutation(seed: int, stream: int, count: int) -> npt.NDArray[np.int64]:
    """0 ... count - 1 in an order of its own for each seed and stream (epochs are the streams from 0 on)."""
    # Sorting raw output keeps the order independent of how a NumPy release shuffles.
    return np.argsort(_philox(seed, stream).random_raw(count), kind="stable")


@dataclass(frozen=True, kw_only=True, eq=False)
class Turns:
    """Which source each position belongs to. After n positions a source with share s has had n s, give or take one.

    `sources[i]` is whose turn position i of a period is, `ranks[i]` how many turns that source had before in it.
    """

    sources: npt.NDArray[np.int64]
    ranks: npt.NDArray[np.int64]
    per_period: npt.NDArray[np.int64]

    @classmethod
    def of(cls, shares: Sequence[float | Fraction]) -> Turns:
        """Turns for shares that sum to 1: the source whose next turn is due first, of those that have one due.

        Tijdeman 1980, "The chairman assignment problem": with k sources no count is ever further than
        1 - 1 / (2k - 2) from its share.

        Raises:
            CorpusError: if a share is not positive or has more than four decimals, or their sum is not 1.
        """
        exact = [Fraction(str(share)) * SHARE_UNIT for share in shares]
        if any(share.denominator != 1 or share <= 0 for share in exact) or sum(exact) != SHARE_UNIT:
            raise CorpusError(
                f"shares {', '.join(map(str, shares))}: they must be positive, of at most four decimals, and sum to 1"
            )
        return _turns(tuple(int(share) for share in exact))

    def at(self, position: int) -> tuple[int, int]:
        """The source whose turn `position` is, and how many turns it had before."""
        period, turn = divmod(position, len(self.sources))
        source = int(self.sources[turn])
        return source, period * int(self.per_period[source]) + int(self.ranks[turn])


@lru_cache(maxsize=32)
def _turns(weights: tuple[int, ...]) -> Turns:
    slack = max(1, 2 * len(weights) - 2)
    counts = [0] * len(weights)
    sources = np.empty(SHARE_UNIT, dtype=np.int64)
    ranks = np.empty(SHARE_UNIT, dtype=np.int64)
    for turn in range(SHARE_UNIT):
        behind = [weight * (turn + 1) - count * SHARE_UNIT for weight, count in zip(weights, counts, strict=True)]
        due = [index for index, lag in enumerate(behind) if slack * lag >= SHARE_UNIT]
        chosen = min(due, key=lambda index: ((slack - 1) * SHARE_UNIT - slack * behind[index]) / weights[index])
        sources[turn], ranks[turn] = chosen, counts[chosen]
        counts[chosen] += 1
    return Turns(sources=sources, ranks=ranks, per_period=np.asarray(counts))


def insert_copied_spans(
    rows: Sequence[npt.NDArray[np.int64]], *, seq_len: int, share: float, seed: int, position: int
) -> None:
    """Rewrites the `rows` of a sequence in place, if `position` belongs to the `share` that carries copied spans.

    A sequence is one row of `seq_len` inputs and a last target, or one such row for each of its documents. Runs of
    natural text alternate with spans that repeat, token by token, a random earlier place of the same rewritten row.
    Natural text goes on after a span where it stopped; what no longer fits at the end is dropped.
    """
    draws = _draws(seed, position // _BLOCK, _spans_at_most(seq_len + 1))[position % _BLOCK]
    if draws[0] < share:
        for row in rows:
            _copy_spans(row, draws)


def _copy_spans(row: npt.NDArray[np.int64], draws: npt.NDArray[np.float64]) -> None:
    length = len(row)
    natural = row.copy()
    runs = _between(draws[1::3], NATURAL_RUN)
    spans = _between(draws[2::3], COPIED_SPAN)
    at, taken = 0, 0
    for run, span, place in zip(runs.tolist(), spans.tolist(), draws[3::3].tolist(), strict=True):
        row[at : at + run] = natural[taken : taken + min(run, length - at)]
        at += run
        taken += run
        if at >= length:
            return
        span = min(span, at, length - at)
        source = int(place * (at - span + 1))
        row[at : at + span] = row[source : source + span]
        at += span
        if at >= length:
            return


def _spans_at_most(length: int) -> int:
    return -(-length // (NATURAL_RUN[0] + COPIED_SPAN[0]))


def _between(draws: npt.NDArray[np.float64], bounds: tuple[int, int]) -> npt.NDArray[np.int64]:
    low, high = bounds
    return low + (draws * (high - low + 1)).astype(np.int64)


@lru_cache(maxsize=16)
def _draws(seed: int, block: int, spans: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) for `_BLOCK` positions: one that decides, then three for each pair of run and span."""
    raw = _philox(seed, _SPANS_STREAM + block).random_raw(_BLOCK * (1 + 3 * spans))
    uniform: npt.NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform.reshape(_BLOCK, -1)


def _philox(seed: int, stream: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
