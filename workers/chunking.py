"""Windows of local context: what a token may see when distant context is taken away.

Window s feeds the tokens s .. end-1 alone and scores first .. end-1, where first = s + length; so the token at
s + length + r sees length + r tokens, 0 <= r < stride. Mode `pku` starts its windows at 0, stride, 2 stride, ..., as
the public implementation of LongPPL does: the first one is the whole prefix and can tell nothing. Mode `exact` starts
at 1, so that every token past position `length` has a context that is truly shorter than its prefix.

Positions count from 0 and leave out a beginning-of-text token, which the scorer puts before every window alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.spec import Chunking


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkWindow:
    """Tokens `start` .. `end` - 1 are fed, `first` .. `end` - 1 are scored."""

    start: int
    first: int
    end: int


def chunk_windows(n_tokens: int, chunking: Chunking) -> tuple[ChunkWindow, ...]:
    """The windows over a document of `n_tokens`, in order; the last may be shorter, down to one scored token.

    Raises:
        ValueError: if length or stride is not positive.
    """
    length, stride = chunking.length, chunking.stride
    if length < 1 or stride < 1:
        raise ValueError(f"chunking needs a length and a stride of at least 1, not {length} and {stride}")
    starts = range(0 if chunking.mode == "pku" else 1, n_tokens - length, stride)
    return tuple(
        ChunkWindow(start=start, first=start + length, end=min(start + length + stride, n_tokens)) for start in starts
    )


def context_starts(n_tokens: int, chunking: Chunking) -> npt.NDArray[np.int64]:
    """For each position, the first token of its local context; 0 where that is the whole prefix. Never decreases."""
    starts = np.zeros(n_tokens, dtype=np.int64)
    for window in chunk_windows(n_tokens, chunking):
        starts[window.first : window.end] = window.start
    return starts
