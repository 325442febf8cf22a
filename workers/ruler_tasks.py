"""Generators of RULER's task types (Hsieh et al. 2024, "RULER: What's the real context size of your long-context
language models?"), in our own words and with made-up words for names.

A maker writes a sample of a given size (sentences, lines, distinct words, words, documents); how large it may be is
`workers.ruler`'s affair. Structure and counts follow the public generator, but not its fixed places: the documents of a
question are shuffled for every sample.
"""

from __future__ import annotations

import itertools
import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from workers.errors import ProbeError
from workers.probe_spec import RulerTask
from workers.ruler_questions import Question, sentences
from workers.ruler_words import draw_name, draw_number, draw_uuid, draw_words, words

HaystackKind = Literal["noise", "needles", "text"]
ValueKind = Literal["name", "number", "uuid"]

#: Where needles may lie, in percent of the haystack: forty places, evenly spread and rounded.
DEPTHS = tuple(round(100 * step / 39) for step in range(40))
#: A unit of a haystack that says nothing.
NOISE = "Rain fell on the roof. The kettle was warm. A cart rolled by. Somebody hummed a tune. Evening came early."
#: What stands for the most frequent word of `fwe`, which is not asked for.
FILLER = "..."

_KINDS: dict[ValueKind, str] = {"name": "word", "number": "number", "uuid": "identifier"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A sample as text: the model is given `prompt` and `answer_prefix`, and one or all of `answers` are looked for."""

    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]


class Maker(Protocol):
    """Writes samples; `smallest` is the least size that makes sense, `largest` the greatest there is material for."""

    @property
    def smallest(self) -> int: ...

    @property
    def largest(self) -> int | None: ...

    def draft(self, size: int, draw: Random) -> Draft: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Needles:
    """`niah`: keys with values, hidden in a haystack of `size` units; `queries` of the keys are asked for."""

    haystack: HaystackKind
    key: ValueKind = "name"
    value: ValueKind = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    text: tuple[str, ...] = ()
    order_seed: int = 42

    @property
    def smallest(self) -> int:
        return self.keys * self.values

    @property
    def largest(self) -> int | None:
        return None

    def draft(self, size: int, draw: Random) -> Draft:
        keys = [_value(self.key, draw) for _ in range(self.keys)]
        values = {key: [_value(self.value, draw) for _ in range(self.values)] for key in keys}
        hidden = [self._sentence(key, value) for key in keys for value in values[key]]
        hidden = [hidden[index] for index in needle_order(len(hidden), self.order_seed)]
        asked = keys[: self.queries]
        kind = _KINDS[self.value]
        one = len(asked) * self.values == 1
        subject = f"the special {kind} for {_listing(asked)}" if one else f"all special {kind}s for {_listing(asked)}"
        return Draft(
            prompt=(
                f"A text follows in which special {kind}s are hidden. Keep them in mind: you will be asked for them.\n"
                f"{self._context(size, hidden, draw)}\n"
                f"Which {'is' if one else 'are'} {subject} in the text above?"
            ),
            answer_prefix=f"\nIn the text above, {subject} {'is' if one else 'are'}",
            answers=tuple(value for key in asked for value in values[key]),
        )

    def _sentence(self, key: str, value: str) -> str:
        return f"A special {_KINDS[self.value]} for {key} is: {value}."

    def _context(self, size: int, hidden: Sequence[str], draw: Random) -> str:
        if self.haystack == "text":
            return " ".join(lay_at_depths(_round(self.text, size, draw), hidden, draw))
        if self.haystack == "noise":
            return "\n".join(lay_anywhere([NOISE] * size, hidden, draw))
        others = [self._sentence(_value(self.key, draw), _value(self.value, draw)) for _ in range(size)]
        return "\n".join(lay_anywhere(others, hidden, draw))


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableTracking:
    """`vt`: a number handed on from variable to variable, in order, between `size` lines of noise."""

    hops: int = 4

    @property
    def smallest(self) -> int:
        return self.hops + 1

    @property
    def largest(self) -> int | None:
        return None

    def draft(self, size: int, draw: Random) -> Draft:
        example = self._part(self.hops + 1, letters=3, draw=draw)
        own = self._part(size, letters=5, draw=draw)
        return Draft(
            prompt=f"{example.prompt}{example.answer_prefix} {' '.join(example.answers)}\n\n{own.prompt}",
            answer_prefix=own.answer_prefix,
            answers=own.answers,
        )

    def _part(self, size: int, *, letters: int, draw: Random) -> Draft:
        names: list[str] = []
        while len(names) < self.hops + 1:
            name = "".join(draw.choice(string.ascii_uppercase) for _ in range(letters))
            if name not in names:
                names.append(name)
        number = draw_number(draw, digits=5)
        chain = [f"VAR {names[0]} = {number}"]
        chain += [f"VAR {later} = VAR {earlier}" for earlier, later in itertools.pairwise(names)]
        lines = "\n".join(lay_anywhere([NOISE] * size, chain, draw))
        return Draft(
            prompt=(
                "Follow the assignments of variables that are hidden in this text.\n"
                f"{lines}\nWhich variables hold the value {number}, directly or by way of others?"
            ),
            answer_prefix=f"\nIn the text above, {len(names)} variables hold the value {number}:",
            answers=tuple(names),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWords:
    """`cwe`: a numbered list of `size` different words, ten of which come more often than the others."""

    common_times: int
    other_times: int
    common: int = 10
    example_words: int = 20
    example_times: tuple[int, int] = (3, 1)

    @property
    def smallest(self) -> int:
        return self.common + 1

    @property
    def largest(self) -> int | None:
        return len(words()) - self.example_words

    def draft(self, size: int, draw: Random) -> Draft:
        drawn = draw_words(self.example_words + size, draw)
        example = self._part(drawn[: self.example_words], *self.example_times, draw)
        own = self._part(drawn[self.example_words :], self.common_times, self.other_times, draw)
        return Draft(
            prompt=f"{example.prompt}{example.answer_prefix} {_numbered(example.answers)}\n\n{own.prompt}",
            answer_prefix=own.answer_prefix,
            answers=own.answers,
        )

    def _part(self, drawn: Sequence[str], common_times: int, other_times: int, draw: Random) -> Draft:
        common = tuple(drawn[: self.common])
        entries = list(common) * common_times + list(drawn[self.common :]) * other_times
        draw.shuffle(entries)
        return Draft(
            prompt=(
                f"In the numbered list below some words come more often than others.\n{_numbered(entries)}\n"
                f"Which {self.common} words come most often in the list?"
            ),
            answer_prefix=f"\nThe {self.common} words that come most often are:",
            answers=common,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequentWords:
    """`fwe`: about `size` made-up words whose counts fall with the square of their rank; rank 1 is filler."""

    vocabulary: int
    exponent: int = 2

    @property
    def smallest(self) -> int:
        return 74  # below, ranks 4 and 5 may come equally often

    @property
    def largest(self) -> int | None:
        return None

    def draft(self, size: int, draw: Random) -> Draft:
        drawn = [FILLER, *draw_words(self.vocabulary - 1, draw)]
        counts = rank_counts(size, self.vocabulary)
        text = [word for word, count in zip(drawn, counts, strict=True) for _ in range(count)]
        draw.shuffle(text)
        return Draft(
            prompt=(
                "The text below is in a code whose words come with different frequencies. Dots are no word.\n"
                f"{' '.join(text)}\nWhich three words of the code come most often?"
            ),
            answer_prefix="\nThe three words of the code that come most often are:",
            answers=tuple(drawn[1:4]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnswering:
    """`qa`: the documents that answer a question among others, `size` of them together."""

    questions: tuple[Question, ...]

    @property
    def smallest(self) -> int:
        return max(len(question.documents) for question in self.questions)

    @property
    def largest(self) -> int | None:
        return len({document for question in self.questions for document in question.documents})

    def draft(self, size: int, draw: Random) -> Draft:
        asked = draw.choice(self.questions)
        own = dict.fromkeys(asked.documents)
        pool = sorted({document for question in self.questions for document in question.documents} - own.keys())
        shown = [*own, *draw.sample(pool, min(max(size - len(own), 0), len(pool)))]
        draw.shuffle(shown)
        documents = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(shown, start=1))
        return Draft(
            prompt=(
                "Answer the question from the documents below. Give the answer and nothing else.\n\n"
                f"{documents}\n\nQuestion: {asked.question}"
            ),
            answer_prefix="\nAnswer:",
            answers=asked.answers,
        )


def maker_of(
    task: RulerTask,
    *,
    length: int,
    texts: Sequence[str],
    seed: int,
    questions: tuple[Question, ...] = (),
) -> Maker:
    """The generator of a task, set up as the benchmark has it.

    Args:
        length: The samples' length in tokens; short ones repeat words less often.
        texts: Held-out text, for the tasks whose haystack is text.
        questions: For the tasks of question answering.

    Raises:
        ProbeError: if the material is missing.
    """
    if task in ("qa_1", "qa_2", "qa_cloze"):
        if not questions:
            raise ProbeError(f"{task} needs questions")
        return QuestionAnswering(questions=questions)
    if task == "vt":
        return VariableTracking()
    if task == "cwe":
        if length < 4096:
            return CommonWords(common_times=6, other_times=1)
        return CommonWords(common_times=30, other_times=3, example_words=40, example_times=(10, 3))
    if task == "fwe":
        return FrequentWords(vocabulary=max(length // 50, 5))
    if task == "niah_single_1":
        return Needles(haystack="noise", order_seed=seed)
    if task == "niah_multikey_2":
        return Needles(haystack="needles", order_seed=seed)
    if task == "niah_multikey_3":
        return Needles(haystack="needles", key="uuid", value="uuid", order_seed=seed)
    text = tuple(sentence for document in texts for sentence in sentences(document))
    if not text:
        raise ProbeError(f"{task} needs held-out text")
    return Needles(
        haystack="text",
        text=text,
        order_seed=seed,
        value="uuid" if task == "niah_single_3" else "number",
        keys=4 if task in ("niah_multikey_1", "niah_multiquery") else 1,
        values=4 if task == "niah_multivalue" else 1,
        queries=4 if task == "niah_multiquery" else 1,
    )


def needle_order(n: int, seed: int) -> list[int]:
    """The order in which needles lie: one for all samples of a seed."""
    order = list(range(n))
    Random(seed).shuffle(order)
    return order


def rank_counts(size: int, ranks: int) -> list[int]:
    """How often each rank comes in a text of about `size` words: int(size k^-2 / zeta(2))."""
    zeta = math.pi**2 / 6
    return [int(size * rank**-2 / zeta) for rank in range(1, ranks + 1)]


def lay_at_depths(units: Sequence[str], needles: Sequence[str], draw: Random) -> list[str]:
    """Needles in their order, before the units int(n depth / 100), at depths drawn from DEPTHS without replacement."""
    places = sorted(int(len(units) * depth / 100) for depth in draw.sample(DEPTHS, len(needles)))
    return _laid(units, needles, places)


def lay_anywhere(units: Sequence[str], needles: Sequence[str], draw: Random) -> list[str]:
    """Needles in their order, at different places drawn anew."""
    return _laid(units, needles, sorted(draw.sample(range(len(units)), len(needles))))


def _laid(units: Sequence[str], needles: Sequence[str], places: Sequence[int]) -> list[str]:
    laid: list[str] = []
    done = 0
    for place, needle in zip(places, needles, strict=True):
        laid += [*units[done:place], needle]
        done = place
    return [*laid, *units[done:]]


def _round(units: Sequence[str], size: int, draw: Random) -> list[str]:
    """`size` units from a drawn place on, and from the first one again after the last."""
    first = draw.randrange(len(units))
    return [units[(first + at) % len(units)] for at in range(size)]


def _value(kind: ValueKind, draw: Random) -> str:
    return {"name": draw_name, "number": draw_number, "uuid": draw_uuid}[kind](draw)


def _listing(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"


def _numbered(entries: Sequence[str]) -> str:
    return " ".join(f"{number}. {entry}" for number, entry in enumerate(entries, start=1))
