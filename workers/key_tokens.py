"""Which tokens count: selection by two losses, and the way from one tokenizer's tokens to another's.

Losses are NLLs in nats, one per token; NaN stands for a token that was not scored, or whose local context is its whole
prefix. Every comparison with NaN is false, so that such a token is never selected.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
Mask = npt.NDArray[np.bool_]
Spans = npt.NDArray[np.int32]


def key_mask(full: Floats, local: Floats, *, gain_threshold: float, full_nll_ceiling: float) -> Mask:
    """Tokens that distant context makes predictable: local - full > gain and full < ceiling, both strict.

    Source: Fang et al. 2024, "What is wrong with perplexity for long-context language modeling?", equation of LongPPL.
    """
    return (local - full > gain_threshold) & (full < full_nll_ceiling)


def short_mask(full: Floats, local: Floats) -> Mask:
    """Tokens that are likelier without distant context: local < full. ShortPPL pools over them."""
    return local < full


def merge_spans(spans: Iterable[tuple[int, int]]) -> Spans:
    """Joins character spans that touch or overlap; shape (n, 2), sorted, half open. Empty spans vanish."""
    merged: list[list[int]] = []
    for start, end in sorted((int(start), int(end)) for start, end in spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return np.array(merged, dtype=np.int32).reshape(-1, 2)


def carry_over(selected: Iterable[tuple[int, int]], spans: Spans, text: str, *, first_scored: int = 1) -> Mask:
    """Carries selected characters of `text` over to the tokens of another tokenizer.

    A token is selected if all its characters are. White space at its ends is left aside, for one tokenizer puts the
    space before a word into the word's token and another does not; a token of nothing but white space counts with all
    of it. A token that lies across the edge of a selection is not selected, and a token without characters never is:
    no text was predicted. Tokens before `first_scored` have no loss and are never selected.

    Args:
        selected: Character spans, half open, in any order.
        spans: Characters of each token, shape (tokens, 2).
    """
    intervals = merge_spans(selected)
    mask = np.zeros(len(spans), dtype=bool)
    if not len(intervals):
        return mask
    trimmed = np.array([_trim(text, int(start), int(end)) for start, end in spans], dtype=np.int32).reshape(-1, 2)
    holder = np.searchsorted(intervals[:, 0], trimmed[:, 0], side="right") - 1
    inside = (holder >= 0) & (trimmed[:, 1] <= intervals[np.maximum(holder, 0), 1])
    mask[:] = inside & (trimmed[:, 1] > trimmed[:, 0])
    mask[:first_scored] = False
    return mask


def _trim(text: str, start: int, end: int) -> tuple[int, int]:
    piece = text[start:end]
    if not piece.strip():
        return start, end
    return start + len(piece) - len(piece.lstrip()), end - len(piece) + len(piece.rstrip())
