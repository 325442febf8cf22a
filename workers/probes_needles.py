"""Prompts with something to find: needles laid into held-out text, and a question that one of them answers.

A prompt is put together from tokens, so that it has exactly the length asked for and the value has the same tokens
where it stands and where it is to be repeated: haystack with needles, then the question, then the value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers.documents import Window
from workers.errors import ProbeError

Ids = npt.NDArray[np.int64]

#: A haystack of fewer tokens is none.
_LEAST_HAYSTACK = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A sentence of three pieces; the value is what is asked for."""

    before: str
    value: str
    after: str = ".\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`ids` end with the value, which begins at `answer`; the needle lies at `reference[0]` .. `reference[1]` - 1."""

    ids: Ids
    answer: int
    reference: tuple[int, int]

    def with_answer(self, value: Ids) -> Ids:
        """The same question with another value after it."""
        return np.concatenate([self.ids[: self.answer], value])

    @property
    def answer_positions(self) -> Ids:
        return np.arange(self.answer, len(self.ids))


class Haystack:
    """The tokens of evaluation windows, one after another and round again; needles are put into tokens as they are."""

    def __init__(self, windows: Sequence[Window], tokenizer: Tokenizer, *, beginning_id: int | None = None) -> None:
        """`beginning_id` is put before every prompt."""
        self._tokenizer = tokenizer
        self._lead = [] if beginning_id is None else [beginning_id]
        self._ids = np.concatenate([window.tokens for window in windows])
        self._begins_line = np.array(
            [start == 0 or window.text[start - 1] == "\n" for window in windows for start, _ in window.spans.tolist()],
            dtype=bool,
        )
        if not len(self._ids):
            raise ProbeError("the evaluation documents hold no text to hide needles in")

    def tokens(self, text: str) -> Ids:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def prompt(
        self,
        needle: Needle,
        *,
        length: int,
        depth: float,
        draw: Random,
        others: Sequence[Needle] = (),
    ) -> Prompt:
        """A prompt of exactly `length` tokens, beginning and value included.

        The needle lies at the beginning of the line nearest before `depth` (a share of the haystack), `others` at drawn
        places. The question is the needle's beginning.

        Raises:
            ProbeError: if `length` leaves no haystack; the message says how long the prompt must be at least.
        """
        value = self.tokens(needle.value)
        question = self.tokens("\n" + needle.before)
        pieces = [self._needle(item) for item in (needle, *others)]
        around = len(self._lead) + len(question) + len(value) + sum(map(len, pieces))
        if length < around + _LEAST_HAYSTACK:
            raise ProbeError(
                f"a prompt of {length} tokens has no room: needles and question take {around} of them, so ask for"
                f" lengths of at least {around + _LEAST_HAYSTACK}"
            )
        size = length - around
        places = (draw.randrange(len(self._ids)) + np.arange(size)) % len(self._ids)
        hay, lines = self._ids[places], np.flatnonzero(self._begins_line[places])
        cuts = [_cut(lines, share * size) for share in (depth, *(draw.random() for _ in others))]
        parts: list[Ids] = [np.array(self._lead, dtype=np.int64)]
        reference, done = (0, 0), 0
        for index in sorted(range(len(pieces)), key=lambda index: cuts[index]):
            parts += [hay[done : cuts[index]], pieces[index]]
            done = cuts[index]
            if index == 0:
                end = sum(map(len, parts))
                reference = (end - len(pieces[0]), end)
        parts += [hay[done:], question, value]
        return Prompt(ids=np.concatenate(parts), answer=length - len(value), reference=reference)

    def _needle(self, needle: Needle) -> Ids:
        return np.concatenate([self.tokens(needle.before), self.tokens(needle.value), self.tokens(needle.after)])


def _cut(lines: npt.NDArray[np.int64], place: float) -> int:
    """The last beginning of a line at or before `place`; the very place where the text has no such line."""
    at = int(np.searchsorted(lines, place, side="right")) - 1
    return int(lines[at]) if at >= 0 else int(place)
