"""Which tokens of a corpus are answers, the only targets that training counts: a bit for each, beside the tokens.

A token belongs to an answer if its last character does. The end-of-text token after a document is part of the answer
that ends the document: a model learns to stop where its answer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

#: Instead of a target that does not count; what torch and Liger ignore by default.
IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """A text whose characters in `answers` (half open, rising) are answers."""

    text: str
    answers: tuple[tuple[int, int], ...]


def answer_tokens(spans: npt.NDArray[Any], answers: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which tokens are answers, of shape (tokens,).

    Args:
        spans: Characters that each token covers, half open, of shape (tokens, 2). Only their ends are looked at:
            tokenizers leave white space out of beginnings.
        answers: Characters that are answers, half open, rising.
    """
    last = spans[:, 1] - 1
    begins, ends = np.asarray(answers, dtype=np.int64).reshape(-1, 2).T
    before = np.searchsorted(begins, last, side="right")  # answers that begin at the last character or before it
    marks: npt.NDArray[np.bool_] = np.concatenate([[-1], ends])[before] > last
    return marks


class AnswerWriter:
    """Writes marks of one token after another, eight in a byte, the first in the lowest bit; counts the answers."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._left = np.zeros(0, dtype=np.bool_)
        self.answers = 0

    def add(self, marks: npt.NDArray[np.bool_]) -> None:
        self.answers += int(marks.sum())
        marks = np.concatenate([self._left, marks])
        whole = len(marks) // 8 * 8
        self._file.write(np.packbits(marks[:whole], bitorder="little").tobytes())
        self._left = marks[whole:]

    def finish(self) -> None:
        self._file.write(np.packbits(self._left, bitorder="little").tobytes())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerMarks:
    """The marks of a split's tokens, as `AnswerWriter` wrote them."""

    bits: npt.NDArray[np.uint8]

    def of(self, begin: int, length: int) -> npt.NDArray[np.bool_]:
        """Which of `length` tokens from `begin` on are answers."""
        first = begin // 8
        bits = np.unpackbits(self.bits[first : -(-(begin + length) // 8)], bitorder="little")
        return bits[begin - 8 * first :][:length].view(np.bool_)
