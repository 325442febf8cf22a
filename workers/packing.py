"""How the documents of a split become sequences of equal length, at any length: nothing is padded.

`StreamPacking` cuts the split as one text. `DocumentPacking` keeps documents apart. Both are indexes of offsets, built
once for a length from the manifest; no token is read or held until a sequence is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from workers.answers import AnswerMarks
from workers.corpus import Manifest
from workers.errors import CorpusError
from workers.order import Turns, insert_copied_spans, permutation, sequence_index, window_count
from workers.spec import Split

Ints = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

#: Orders of short pieces are drawn here, orders of sequences at the epochs themselves.
_PIECES_STREAM = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """Where the documents of a split lie in its tokens. `lengths` leave out the end-of-text token that follows each."""

    begins: Ints
    lengths: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """`seq_len` inputs, the token after each, and its position in its document (None: the sequence is one text)."""

    inputs: Ints
    targets: Ints
    positions: Ints | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Positions that a model sees in one epoch.

    `largest` counts from 0; `share_past` is the share of input tokens whose position is `old_length` or more.
    """

    old_length: int
    largest: int
    share_past: float


class Packing(Protocol):
    """Sequences of a split, without end: epoch after epoch."""

    @property
    def per_epoch(self) -> int:
        """Sequences after which the data repeat, as far as that is one number."""
        ...

    def read(self, tokens: npt.NDArray[Any], *, seed: int, position: int, copied_spans: float) -> Sequence:
        """The sequence at `position`: a function of the seed and the position alone."""
        ...

    def answered(self, answers: AnswerMarks, *, seed: int, position: int) -> Marks:
        """Which targets of the sequence at `position` are answers, shape (seq_len,)."""
        ...

    def reach(self, old_length: int) -> Reach: ...


def documents_of(manifest: Manifest, split: Split, *, min_tokens: int = 0) -> Documents:
    """The documents of a split that have at least `min_tokens` tokens, in the order in which they lie there."""
    lengths = np.fromiter((document.tokens for document in manifest.of(split)), dtype=np.int64)
    begins = np.cumsum(lengths + 1) - (lengths + 1)
    kept = lengths >= min_tokens
    return Documents(begins=begins[kept], lengths=lengths[kept])


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamPacking:
    """Documents and their end-of-text tokens as one text, cut into windows of `seq_len` inputs and a last target.

    Windows overlap in that target alone. Every epoch visits each once; what is left after the last is not used.
    """

    seq_len: int
    begins: Ints
    ends: Ints  # of each stretch of tokens, in the text

    @classmethod
    def of(cls, documents: Documents, *, seq_len: int) -> StreamPacking:
        """Raises CorpusError if the documents do not fill one window."""
        sizes = documents.lengths + 1
        # Neighbours are one stretch: a window is one slice wherever no document is left out.
        apart = np.flatnonzero(documents.begins[1:] != documents.begins[:-1] + sizes[:-1]) + 1
        starts = np.concatenate([np.zeros(min(1, len(sizes)), dtype=np.int64), apart])
        stretches = np.add.reduceat(sizes, starts) if len(sizes) else sizes
        packing = cls(seq_len=seq_len, begins=documents.begins[starts], ends=np.cumsum(stretches))
        if packing.per_epoch < 1:
            have = int(packing.ends[-1]) if len(packing.ends) else 0
            raise CorpusError(f"{have} tokens qualify: a window needs {seq_len + 1}")
        return packing

    @property
    def per_epoch(self) -> int:
        return window_count(int(self.ends[-1]), self.seq_len) if len(self.ends) else 0

    def read(self, tokens: npt.NDArray[Any], *, seed: int, position: int, copied_spans: float) -> Sequence:
        row = np.concatenate([tokens[at : at + n] for at, n in self._pieces(seed, position)]).astype(np.int64)
        if copied_spans:
            insert_copied_spans([row], seq_len=self.seq_len, share=copied_spans, seed=seed, position=position)
        return Sequence(inputs=row[:-1], targets=row[1:], positions=None)

    def answered(self, answers: AnswerMarks, *, seed: int, position: int) -> Marks:
        return np.concatenate([answers.of(at, n) for at, n in self._pieces(seed, position)])[1:]

    def _pieces(self, seed: int, position: int) -> list[tuple[int, int]]:
        """(begin, length) of the stretches of a window and its last target."""
        begin = sequence_index(seed, position, self.per_epoch) * self.seq_len
        return _cut(self, begin, self.seq_len + 1)

    def reach(self, old_length: int) -> Reach:
        """Every window is one text to the model, whatever documents lie in it."""
        past = max(0, self.seq_len - old_length)
        return Reach(old_length=old_length, largest=self.seq_len - 1, share_past=past / self.seq_len)


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentPacking:
    """Sequences whose documents do not know of each other.

    A document is cut into full pieces of `seq_len` tokens, each a sequence by itself, and a shorter piece that is left.
    The shorter pieces are shuffled anew each epoch, laid end to end and cut every `seq_len` tokens; a piece that is cut
    goes on in the next sequence as a document of its own. Each token is an input once in an epoch, but for fewer than
    `seq_len` at its end. The target of a document's last token is its end-of-text token, which is no input: so each
    input has a target, in its own document.
    """

    seq_len: int
    full: Ints  # begins of full pieces
    begins: Ints  # of shorter pieces
    lengths: Ints
    full_share: Fraction | None
    turns: Turns | None

    @classmethod
    def of(cls, documents: Documents, *, seq_len: int, full_length_share: float | None = None) -> DocumentPacking:
        """Packs for one length.

        Args:
            full_length_share: Share of sequences that are full pieces; else as many as there are. Where it is given,
                full pieces and filled sequences have epochs of their own, and the smaller kind repeats more often.

        Raises:
            CorpusError: if there are too few tokens for one sequence of each kind that is needed.
        """
        whole, rest = np.divmod(documents.lengths, seq_len)
        nth = np.arange(int(whole.sum())) - np.repeat(np.cumsum(whole) - whole, whole)
        left = rest > 0
        packing = cls(
            seq_len=seq_len,
            full=np.repeat(documents.begins, whole) + nth * seq_len,
            begins=(documents.begins + whole * seq_len)[left],
            lengths=rest[left],
            full_share=None if full_length_share is None else Fraction(str(full_length_share)),
            turns=_turns(full_length_share),
        )
        packing._check(documents)
        return packing

    @property
    def filled(self) -> int:
        """Sequences that shorter pieces fill, in an epoch."""
        return int(self.lengths.sum()) // self.seq_len

    @property
    def per_epoch(self) -> int:
        return len(self.full) + self.filled

    def read(self, tokens: npt.NDArray[Any], *, seed: int, position: int, copied_spans: float) -> Sequence:
        pieces = self._pieces(seed, position)
        rows = [tokens[at : at + n + 1].astype(np.int64) for at, n in pieces]
        if copied_spans:
            insert_copied_spans(rows, seq_len=self.seq_len, share=copied_spans, seed=seed, position=position)
        return Sequence(
            inputs=np.concatenate([row[:-1] for row in rows]),
            targets=np.concatenate([row[1:] for row in rows]),
            positions=np.concatenate([np.arange(n) for _, n in pieces]),
        )

    def answered(self, answers: AnswerMarks, *, seed: int, position: int) -> Marks:
        return np.concatenate([answers.of(at + 1, n) for at, n in self._pieces(seed, position)])

    def reach(self, old_length: int) -> Reach:
        """Of the first epoch of seed 0: other orders cut a few shorter pieces at other places."""
        lengths = _filled_lengths(self)
        past_full = max(0, self.seq_len - old_length) / self.seq_len
        past_filled = float(np.maximum(0, lengths - old_length).sum() / max(1, lengths.sum()))
        share = len(self.full) / self.per_epoch if self.full_share is None else float(self.full_share)
        longest = max(self.seq_len if share > 0 else 0, int(lengths.max(initial=0)) if share < 1 else 0)
        return Reach(
            old_length=old_length, largest=longest - 1, share_past=share * past_full + (1 - share) * past_filled
        )

    def _pieces(self, seed: int, position: int) -> list[tuple[int, int]]:
        """(begin, length) of each piece of a sequence, in order."""
        if self.turns is None:
            epoch = position // self.per_epoch
            index = sequence_index(seed, position, self.per_epoch)
            if index < len(self.full):
                return [(int(self.full[index]), self.seq_len)]
            return self._fill(seed, epoch, index - len(self.full))
        filled, rank = self.turns.at(position)
        if self.full_share == 0 or filled:
            return self._fill(seed, *divmod(rank, self.filled))
        return [(int(self.full[sequence_index(seed, rank, len(self.full))]), self.seq_len)]

    def _fill(self, seed: int, epoch: int, index: int) -> list[tuple[int, int]]:
        return _cut(_laid_out(self, seed, epoch), index * self.seq_len, self.seq_len)

    def _check(self, documents: Documents) -> None:
        total, share = int(documents.lengths.sum()), self.full_share
        tokens = f"{total} tokens qualify, {int(documents.lengths[documents.lengths >= self.seq_len].sum())} of them in"
        tokens += f" documents of at least {self.seq_len}"
        if share is None:
            if not self.per_epoch:
                raise CorpusError(f"{tokens}: one sequence of {self.seq_len} cannot be filled")
        elif share > 0 and not len(self.full):
            raise CorpusError(f"full_length_share {float(share)} cannot be met: {tokens}, which no document has")
        elif share < 1 and not self.filled:
            raise CorpusError(
                f"full_length_share {float(share)} cannot be met: {tokens}; {int(self.lengths.sum())} in shorter pieces"
                f" do not fill one sequence of {self.seq_len} for the others"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Laid:
    """Stretches of tokens laid end to end: where each begins in the split, and where it ends in the row."""

    begins: Ints
    ends: Ints


def _cut(laid: StreamPacking | _Laid, start: int, length: int) -> list[tuple[int, int]]:
    """(begin, length) of the stretches that make up `length` tokens from `start` on."""
    index = int(np.searchsorted(laid.ends, start, side="right"))
    pieces = []
    while length:
        end = int(laid.ends[index])
        before = int(laid.ends[index - 1]) if index else 0
        taken = min(length, end - start)
        pieces.append((int(laid.begins[index]) + start - before, taken))
        start, length, index = start + taken, length - taken, index + 1
    return pieces


@lru_cache(maxsize=8)
def _laid_out(packing: DocumentPacking, seed: int, epoch: int) -> _Laid:
    order = permutation(seed, _PIECES_STREAM + epoch, len(packing.lengths))
    return _Laid(begins=packing.begins[order], ends=np.cumsum(packing.lengths[order]))


def _filled_lengths(packing: DocumentPacking) -> Ints:
    """Lengths of the pieces, as cut, of all filled sequences of an epoch."""
    size = packing.filled * packing.seq_len
    if not size:
        return np.zeros(0, dtype=np.int64)
    ends = _laid_out(packing, 0, 0).ends
    borders = np.concatenate([ends[ends < size], np.arange(packing.seq_len, size + 1, packing.seq_len)])
    borders.sort(kind="stable")  # two sorted runs: merged, not sorted
    lengths = np.diff(borders, prepend=0)
    return lengths[lengths > 0]


def _turns(full_length_share: float | None) -> Turns | None:
    if full_length_share is None:
        return None
    share = Fraction(str(full_length_share))
    if not 0 <= share <= 1:
        raise CorpusError(f"full_length_share is {full_length_share}: it must lie between 0 and 1")
    return Turns.of([part for part in (share, 1 - share) if part])
