"""Which tokens a step trains on: a pure function of (seed, position), so that a resume neither repeats nor skips.

A split is one stream of tokens, cut into windows of `seq_len` inputs plus the target of the last one. Every epoch
visits each window once in an order of its own. All randomness is Philox output keyed by the seed: no generator has a
state that could be lost or shared.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.errors import CorpusError
from workers.spec import LongStage, ShortStage

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
    return int(_permutation(seed, epoch, count)[offset])


def batch(tokens: npt.NDArray[Any], stage: ShortStage | LongStage, *, seed: int, step: int) -> npt.NDArray[np.int64]:
    """The sequences of update `step` of a stage, int64 of shape (batch_sequences, seq_len + 1).

    Inputs are `[:, :-1]`, targets `[:, 1:]`; nothing is padded, so every input counts as one token of the budget.

    Raises:
        CorpusError: if the stream is shorter than one window.
    """
    length = stage.seq_len
    count = window_count(len(tokens), length)
    if count < 1:
        raise CorpusError(f"the {stage.data.split} split has {len(tokens)} tokens: a window needs {length + 1}")
    out = np.empty((stage.batch_sequences, length + 1), dtype=np.int64)
    for row, position in zip(out, range(step * len(out), (step + 1) * len(out)), strict=True):
        begin = sequence_index(seed, position, count) * length
        row[:] = tokens[begin : begin + length + 1]
        if stage.data.copied_spans:
            insert_copied_spans(row, share=stage.data.copied_spans, seed=seed, position=position)
    return out


def insert_copied_spans(row: npt.NDArray[np.int64], *, share: float, seed: int, position: int) -> None:
    """Rewrites `row` in place, if `position` belongs to the `share` that carries copied spans.

    Runs of natural text alternate with spans that repeat, token by token, a random earlier place of the rewritten row.
    Natural text goes on after a span where it stopped; what no longer fits at the end is dropped.
    """
    length = len(row)
    draws = _draws(seed, position // _BLOCK, _spans_at_most(length))[position % _BLOCK]
    if draws[0] >= share:
        return
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


@lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, count: int) -> npt.NDArray[np.int64]:
    # Sorting raw output keeps the order independent of how a NumPy release shuffles.
    return np.argsort(_philox(seed, epoch).random_raw(count), kind="stable")


@lru_cache(maxsize=4)
def _draws(seed: int, block: int, spans: int) -> npt.NDArray[np.float64]:
    """Uniform numbers in [0, 1) for `_BLOCK` positions: one that decides, then three for each pair of run and span."""
    raw = _philox(seed, _SPANS_STREAM + block).random_raw(_BLOCK * (1 + 3 * spans))
    uniform: npt.NDArray[np.float64] = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform.reshape(_BLOCK, -1)


def _philox(seed: int, stream: int) -> np.random.Philox:
    return np.random.Philox(key=np.array([seed, stream], dtype=np.uint64))
