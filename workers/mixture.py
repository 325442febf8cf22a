"""The training tokens of a stage: one or several sources in exact shares, packed, as batches of equal sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

from workers.answers import IGNORED, AnswerMarks
from workers.corpus import Corpus, Tokens, open_corpus
from workers.errors import CorpusError
from workers.order import Turns
from workers.packing import DocumentPacking, Packing, Sequence, StreamPacking, documents_of
from workers.spec import BlendedSource, DataMix, Split, content_hash
from workers.spec import Packing as PackingName


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one length, int64 of shape (sequences, seq_len) each.

    `targets` hold the token after each input, or `IGNORED` where a corpus marks answers and that token is none.
    `positions`, with packing "documents", count from 0 in every document, so that a 0 is where the next one begins;
    None where each sequence is one text. Nothing is padded: every input counts as one token of the budget, in the same
    way with both packings, and whether or not its target counts in the loss.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64] | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Source:
    """One source of a mixture. `salt` makes its order its own; the main source's is None. `answers` are the only
    targets that count; None where all do."""

    tokens: Tokens
    answers: AnswerMarks | None
    packing: Packing
    copied_spans: float
    salt: str | None

    def seed(self, seed: int) -> int:
        return seed if self.salt is None else int(content_hash([seed, self.salt])[:16], 16)

    def read(self, seed: int, position: int) -> Sequence:
        """The sequence at a position of the source's own order."""
        seed = self.seed(seed)
        sequence = self.packing.read(self.tokens, seed=seed, position=position, copied_spans=self.copied_spans)
        if self.answers is None:
            return sequence
        counted = self.packing.answered(self.answers, seed=seed, position=position)
        return replace(sequence, targets=np.where(counted, sequence.targets, IGNORED))

    def counted(self, seed: int, position: int) -> int | None:
        """Targets of that sequence that count in the loss; None: all."""
        if self.answers is None:
            return None
        return int(self.packing.answered(self.answers, seed=self.seed(seed), position=position).sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainingData:
    """All sequences of a stage by position, without end. After n of them each source has had its share of n, give or
    take one sequence; as sequences are equally long, that is its share of the tokens."""

    seq_len: int
    sources: tuple[Source, ...]
    turns: Turns

    def batch(self, *, seed: int, first: int, count: int) -> Batch:
        """`count` sequences from position `first` on: a function of the seed and the positions alone.

        So a resume, another batch size, several processes or readers ahead of time get the same sequences.
        """
        sequences = [source.read(seed, rank) for source, rank in self._places(first, count)]
        positions = [sequence.positions for sequence in sequences if sequence.positions is not None]
        return Batch(
            inputs=np.stack([sequence.inputs for sequence in sequences]),
            targets=np.stack([sequence.targets for sequence in sequences]),
            positions=np.stack(positions) if positions else None,
        )

    @property
    def marks_answers(self) -> bool:
        """Whether a source marks answers, so that not all targets count in the loss."""
        return any(source.answers is not None for source in self.sources)

    def counted_targets(self, *, seed: int, first: int, count: int) -> int:
        """Targets of those sequences that count in the loss, found without reading a token."""
        counted = [source.counted(seed, rank) for source, rank in self._places(first, count)]
        return sum(self.seq_len if of_sequence is None else of_sequence for of_sequence in counted)

    def _places(self, first: int, count: int) -> Iterator[tuple[Source, int]]:
        """The source of each position, and the position in its own order."""
        for position in range(first, first + count):
            index, rank = self.turns.at(position)
            yield self.sources[index], rank


def open_training_data(store: Path, data: DataMix, *, seq_len: int, vocab_size: int | None = None) -> TrainingData:
    """Opens every corpus of a mixture and plans its packing for one length.

    `full_length_share` is that of the main source's sequences; blended ones have as many full ones as they have.

    Args:
        vocab_size: Tokens that the model knows; a corpus with more is refused.

    Raises:
        CorpusError: if a corpus is missing, too small or of another tokenizer, the shares are no shares, or spans are
            to be copied in a corpus that marks answers. The message names the corpus.
    """
    _check(data)
    opened = [open_corpus(store, corpus) for corpus in (data.corpus, *(part.corpus for part in data.blended))]
    for corpus in opened:
        if corpus.manifest.tokenizer != opened[0].manifest.tokenizer:
            raise CorpusError(
                f"corpora {opened[0].hash} and {corpus.hash} have different tokenizers: build both with one"
                " (`longlaw data build --tokenizer`)"
            )
        if vocab_size is not None and corpus.vocab_size > vocab_size:
            raise CorpusError(
                f"corpus {corpus.hash} has {corpus.vocab_size} tokens, the model's vocab_size is {vocab_size}"
            )
    shares = [Fraction(str(part.share)) for part in data.blended]
    parts: tuple[DataMix | BlendedSource, ...] = (data, *data.blended)
    return TrainingData(
        seq_len=seq_len,
        sources=tuple(_open(corpus, part, data, seq_len) for corpus, part in zip(opened, parts, strict=True)),
        turns=Turns.of([1 - sum(shares), *shares]),
    )


def plan_packing(corpus: Corpus, part: DataMix | BlendedSource, data: DataMix, *, seq_len: int) -> Packing:
    """The packing of one source of `data`.

    Raises:
        CorpusError: if it has too few tokens; the message says how many qualify.
    """
    documents = documents_of(corpus.manifest, part.split, min_tokens=part.min_document_tokens)
    try:
        if data.packing == "stream":
            return StreamPacking.of(documents, seq_len=seq_len)
        share = part.full_length_share if isinstance(part, DataMix) else None
        return DocumentPacking.of(documents, seq_len=seq_len, full_length_share=share)
    except CorpusError as error:
        raise CorpusError(f"corpus {corpus.hash}, {part.split} split: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingDescription:
    """What sequences a source gives. Tokens are those of documents, without end-of-text tokens.

    `largest_position` counts from 0; `share_past_old_length` is the share of input tokens at or beyond that position.
    """

    split: Split
    packing: PackingName
    seq_len: int
    documents: int
    tokens: int
    full_length_documents: int
    full_length_tokens: int
    sequences_per_epoch: int
    full_length_sequences: int
    largest_position: int
    old_length: int | None
    share_past_old_length: float | None


def describe_packing(
    corpus: Corpus, data: DataMix, *, seq_len: int, old_length: int | None = None
) -> PackingDescription:
    """Counts the sequences of the main source of `data`, and the positions that they reach in an epoch.

    Raises:
        CorpusError: if it has too few tokens.
    """
    _check(data)
    packing = plan_packing(corpus, data, data, seq_len=seq_len)
    lengths = documents_of(corpus.manifest, data.split, min_tokens=data.min_document_tokens).lengths
    long = lengths[lengths >= seq_len]
    reach = packing.reach(seq_len if old_length is None else old_length)
    return PackingDescription(
        split=data.split,
        packing=data.packing,
        seq_len=seq_len,
        documents=len(lengths),
        tokens=int(lengths.sum()),
        full_length_documents=len(long),
        full_length_tokens=int(long.sum()),
        sequences_per_epoch=packing.per_epoch,
        full_length_sequences=len(packing.full) if isinstance(packing, DocumentPacking) else 0,
        largest_position=reach.largest,
        old_length=old_length,
        share_past_old_length=None if old_length is None else reach.share_past,
    )


def _open(corpus: Corpus, part: DataMix | BlendedSource, data: DataMix, seq_len: int) -> Source:
    answers = corpus.answers(part.split)
    if answers is not None and part.copied_spans:
        raise CorpusError(
            f"corpus {corpus.hash} marks answers, and copied spans would be none: set its copied_spans to 0, not"
            f" {part.copied_spans}"
        )
    return Source(
        tokens=corpus.tokens(part.split),
        answers=answers,
        packing=plan_packing(corpus, part, data, seq_len=seq_len),
        copied_spans=part.copied_spans,
        salt=f"{part.corpus}/{part.split}/{part.min_document_tokens}" if isinstance(part, BlendedSource) else None,
    )


def _check(data: DataMix) -> None:
    if data.full_length_share is not None and data.packing != "documents":
        raise CorpusError('full_length_share needs packing "documents": in a stream no sequence is one document')
    parts = [(part.corpus, part.split, part.min_document_tokens) for part in data.blended]
    if len(set(parts)) < len(parts):
        raise CorpusError("two blended sources are the same split of the same corpus: add their shares")
