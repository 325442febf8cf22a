"""Evaluation documents: windows from the held-out documents of a corpus, and their tokens under another tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers.corpus import Corpus
from workers.errors import CorpusError
from workers.spec import EvaluationDocuments


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of one held-out document. `spans[i]` are the characters of `text` that token i covers, half open."""

    document: str
    tokens: npt.NDArray[np.int64]
    spans: npt.NDArray[np.int32]
    text: str


def evaluation_windows(corpus: Corpus, documents: EvaluationDocuments) -> tuple[Window, ...]:
    """The first `count` windows: the first of every held-out document, then the second of each, and so on.

    With `min_length`, the beginnings of the documents that are long enough, in the corpus's order. They depend on the
    corpus and `documents` alone; fewer are the beginning of more.

    Raises:
        CorpusError: if the held-out documents hold fewer; the message says how many there are.
    """
    length, count = documents.length, documents.count
    if length < 2 or count < 1:
        raise CorpusError(f"evaluation needs windows of at least 2 tokens, and at least one, not {count} of {length}")
    least = documents.min_length
    if least is not None and least < 2:
        raise CorpusError(f"min_length {least}: a document of fewer than 2 tokens has nothing to predict")
    sizes = [len(document.tokens) for document in corpus.held_out]
    if least is None:
        places = sorted((turn, index) for index, size in enumerate(sizes) for turn in range(size // length))
    else:
        places = [(0, index) for index, size in enumerate(sizes) if size >= least]
    if len(places) < count:
        raise CorpusError(
            f"corpus {corpus.hash} has {len(places)} held-out windows of {least or length} tokens, {count} are asked"
            " for: ask for fewer or shorter ones, or build it with a larger held-out share"
        )
    windows = []
    for turn, index in places[:count]:
        document = corpus.held_out[index]
        part = slice(turn * length, (turn + 1) * length)
        spans = np.asarray(document.spans[part])
        start, end = int(spans[0, 0]), int(spans[-1, 1])
        windows.append(
            Window(
                document=document.id,
                tokens=np.asarray(document.tokens[part], dtype=np.int64),
                spans=spans - np.int32(start),
                text=document.text[start:end],
            )
        )
    return tuple(windows)


def retokenized(windows: Sequence[Window], tokenizer: Tokenizer) -> tuple[Window, ...]:
    """The same texts under another tokenizer, without tokens of its own at the ends."""
    encodings = tokenizer.encode_batch([window.text for window in windows], add_special_tokens=False)
    return tuple(
        replace(
            window,
            tokens=np.array(encoding.ids, dtype=np.int64),
            spans=np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2),
        )
        for window, encoding in zip(windows, encodings, strict=True)
    )
