"""Evaluation documents: windows of equal length from the held-out documents of a corpus."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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

    They depend on the corpus and `documents` alone; fewer windows are the beginning of more.

    Raises:
        CorpusError: if the held-out documents hold fewer; the message says how many there are.
    """
    length, count = documents.length, documents.count
    if length < 2 or count < 1:
        raise CorpusError(f"evaluation needs windows of at least 2 tokens, and at least one, not {count} of {length}")
    places = sorted(
        (turn, index)
        for index, document in enumerate(corpus.held_out)
        for turn in range(len(document.tokens) // length)
    )
    if len(places) < count:
        raise CorpusError(
            f"corpus {corpus.hash} has {len(places)} held-out windows of {length} tokens, {count} are asked for:"
            " ask for fewer or shorter ones, or build it with a larger held-out share"
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
