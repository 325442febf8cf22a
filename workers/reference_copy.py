"""The copy reference: a scorer that is exact, deterministic and needs no weights.

It stands where a large reference model would, for corpora in which distant context is mostly identifiers to be
repeated. p(token) starts from an n-gram model of the training text and is sharpened by what followed the same contexts
earlier in the window itself:

    p_1 = n-gram, orders 1 to 3 over the training tokens
    p_k = (count_k(context, token) + kinds_k(context) p_{k-1}) / (total_k(context) + kinds_k(context)),  k in CONTEXTS

where kinds is the number of different tokens seen after the context (Witten and Bell 1991; the same estimate serves the
n-gram orders, down to the uniform distribution). Full context counts in the whole window so far, local context in the
tokens of the chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from workers.chunking import context_starts
from workers.corpus import Corpus
from workers.documents import Window
from workers.progress import Report, unreported
from workers.reference import ReferenceLosses
from workers.spec import Chunking

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: Lengths of the contexts looked up in the window.
CONTEXTS = (1, 2, 3, 4, 6, 8)
#: Training tokens that are counted, the short stage's first.
COUNTED_TOKENS = 1_500_000


class CopyReference:
    """Scores windows by counts of `corpus`; nothing in it depends on a machine or a seed."""

    def __init__(self, corpus: Corpus, *, counted_tokens: int = COUNTED_TOKENS) -> None:
        tokens = np.concatenate([corpus.tokens("short"), corpus.tokens("long")])[:counted_tokens].astype(np.int64)
        self._ngrams = Ngrams(tokens, corpus.vocab_size)

    def score(
        self, windows: Sequence[Window], chunking: Chunking, *, report: Report = unreported
    ) -> list[ReferenceLosses]:
        """Both losses of each window's tokens; the first token of a window has none."""
        losses = []
        for done, window in enumerate(windows):
            report("reference, both contexts", done, len(windows))
            losses.append(self._score(window.tokens, chunking))
        return losses

    def _score(self, tokens: Ids, chunking: Chunking) -> ReferenceLosses:
        prior = self._ngrams.probabilities(tokens)
        starts = context_starts(len(tokens), chunking)
        full, local = np.full(len(tokens), np.nan), np.full(len(tokens), np.nan)
        ids = tokens.tolist()
        seen, near = SeenContexts(ids), SeenContexts(ids)
        for position in range(1, len(ids)):
            contexts = seen.contexts(position)
            full[position] = seen.probability(contexts, ids[position], float(prior[position]))
            start = int(starts[position])
            near.forget_before(start)
            if start > 0:
                local[position] = near.probability(contexts, ids[position], float(prior[position]))
            seen.add(position, contexts)
            near.add(position, contexts)
        return ReferenceLosses(full=(-np.log(full)).astype(np.float32), local=(-np.log(local)).astype(np.float32))


@dataclass(slots=True)
class _Followers:
    total: int = 0
    counts: dict[int, int] = field(default_factory=dict)


class SeenContexts:
    """What followed each context of the lengths CONTEXTS, among the tokens read and not forgotten."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = ids
        self._followers: defaultdict[tuple[int, ...], _Followers] = defaultdict(_Followers)
        self._forgotten = dict.fromkeys(CONTEXTS, 0)
        self._read = 0

    def contexts(self, position: int) -> list[tuple[int, ...]]:
        """The contexts before a position, shortest first."""
        return [tuple(self._ids[position - length : position]) for length in CONTEXTS if length <= position]

    def probability(self, contexts: list[tuple[int, ...]], token: int, prior: float) -> float:
        """p(token): the prior, sharpened by one context after another while each has been seen."""
        for context in contexts:
            followers = self._followers.get(context)
            if followers is None or not followers.total:
                break  # a longer context was seen no more often than its end
            kinds = len(followers.counts)
            prior = (followers.counts.get(token, 0) + kinds * prior) / (followers.total + kinds)
        return prior

    def add(self, position: int, contexts: list[tuple[int, ...]]) -> None:
        """Reads the token at `position`; positions come in order."""
        token = self._ids[position]
        for context in contexts:
            followers = self._followers[context]
            followers.total += 1
            followers.counts[token] = followers.counts.get(token, 0) + 1
        self._read = position + 1

    def forget_before(self, start: int) -> None:
        """Drops every continuation whose context begins before `start`."""
        for length in CONTEXTS:
            first = max(self._forgotten[length], length)
            last = min(start + length, self._read)
            for position in range(first, last):
                context, token = tuple(self._ids[position - length : position]), self._ids[position]
                followers = self._followers[context]
                followers.total -= 1
                followers.counts[token] -= 1
                if not followers.counts[token]:
                    del followers.counts[token]
            self._forgotten[length] = max(first, last)


class Ngrams:
    """Interpolated n-gram model, orders 1 to 3, with the estimate of Witten and Bell."""

    def __init__(self, tokens: Ids, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._orders = [_Order(_keys(tokens, order, vocab_size), vocab_size) for order in (1, 2, 3)]

    def probabilities(self, tokens: Ids) -> Floats:
        """p(token | the two before it) for each position, shape (tokens,)."""
        result = np.full(len(tokens), 1.0 / self._vocab_size)
        for order, counts in enumerate(self._orders, start=1):
            place = slice(order - 1, None)
            result[place] = counts.sharpen(_keys(tokens, order, self._vocab_size), result[place])
        return result


class _Order:
    """Counts of one order; an n-gram is the number whose digits, base vocab_size, are its tokens."""

    def __init__(self, keys: Ids, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._grams, self._counts = np.unique(keys, return_counts=True)
        self._contexts, first = np.unique(self._grams // vocab_size, return_index=True)
        self._totals = np.add.reduceat(self._counts, first) if len(first) else np.empty(0, dtype=np.int64)
        self._kinds = np.diff(np.append(first, len(self._grams)))

    def sharpen(self, keys: Ids, prior: Floats) -> Floats:
        count = _look_up(self._grams, self._counts, keys)
        total = _look_up(self._contexts, self._totals, keys // self._vocab_size)
        kinds = _look_up(self._contexts, self._kinds, keys // self._vocab_size)
        return np.where(total > 0, (count + kinds * prior) / np.maximum(total + kinds, 1), prior)


def _keys(tokens: Ids, order: int, vocab_size: int) -> Ids:
    keys = np.zeros(max(len(tokens) - order + 1, 0), dtype=np.int64)
    for offset in range(order):
        keys = keys * vocab_size + tokens[offset : offset + len(keys)]
    return keys


def _look_up(names: Ids, values: Ids, wanted: Ids) -> Ids:
    if not len(names):
        return np.zeros(len(wanted), dtype=np.int64)
    place = np.minimum(np.searchsorted(names, wanted), len(names) - 1)
    return np.where(names[place] == wanted, values[place], 0)
