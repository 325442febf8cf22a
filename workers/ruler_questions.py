"""Questions about documents, for RULER's question answering: from a file, or made from held-out text.

A file has one JSON object a line, for example a record of SQuAD or HotpotQA brought into this form:

    {"question": "...", "answers": ["...", ...], "documents": ["...", ...]}

`documents` are those that hold the answer; the other lines' documents stand around them.

`cloze_questions` needs no file: a passage of held-out text, one word of which occurs in no other passage, and the
sentence around that word with a gap. It asks for less understanding than written questions do.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from workers.errors import ProbeError
from workers.probe_spec import QuestionFile

#: Words of one passage, and of one sentence, at most.
_PASSAGE_WORDS = 80
_SENTENCE_WORDS = 40
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")
#: What is asked for in a gap.
_WORD = re.compile(r"[A-Za-z]{5,}")
GAP = "____"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]


class _Line(BaseModel):
    """A line of a file."""

    model_config = ConfigDict(strict=True)

    question: str = Field(min_length=1)
    answers: list[str] = Field(min_length=1)
    documents: list[str] = Field(min_length=1)


def read_questions(file: QuestionFile) -> tuple[Question, ...]:
    """The questions of a file, in order.

    Raises:
        ProbeError: if the file is missing, has another digest or a line without the three fields, or holds none.
    """
    try:
        content = Path(file.path).read_bytes()
    except OSError as error:
        raise ProbeError(f"{file.path}: questions cannot be read ({error})") from error
    found = hashlib.sha256(content).hexdigest()
    if found != file.digest:
        raise ProbeError(f"{file.path} has digest {found}, the probe names {file.digest}")
    questions = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = _Line.model_validate_json(line)
        except ValidationError as error:
            told = "; ".join(
                f"{'.'.join(map(str, item['loc']))}: {item['msg']}".removeprefix(": ")
                for item in error.errors(include_url=False, include_input=False, include_context=False)
            )
            raise ProbeError(f"{file.path}, line {number}: {told}") from None
        questions.append(
            Question(question=entry.question, answers=tuple(entry.answers), documents=tuple(entry.documents))
        )
    if not questions:
        raise ProbeError(f"{file.path} holds no questions")
    return tuple(questions)


def cloze_questions(texts: Sequence[str]) -> tuple[Question, ...]:
    """One question for each passage that has a word of its own: the longest such word is asked for.

    Raises:
        ProbeError: if no passage has one.
    """
    passages = [passage for text in texts for passage in _passages(text)]
    spread = Counter(word for passage in passages for word in set(_WORD.findall(" ".join(passage))))
    questions = []
    for passage in passages:
        own = sorted(
            {word for word in _WORD.findall(" ".join(passage)) if spread[word] == 1},
            key=lambda word: (-len(word), word),
        )
        if own:
            gap = re.compile(rf"\b{own[0]}\b")
            sentence = next((part for part in passage if gap.search(part)), None)
            if sentence is not None:
                questions.append(
                    Question(
                        question=f"Which word stands at the gap: {gap.sub(GAP, sentence)}",
                        answers=(own[0],),
                        documents=(" ".join(passage),),
                    )
                )
    if not questions:
        raise ProbeError("qa_cloze: no passage of the held-out text has a word that no other has: take more documents")
    return tuple(questions)


def sentences(text: str) -> list[str]:
    """Sentences or lines, none of more than forty words, their white space collapsed."""
    found = []
    for part in _SENTENCE_END.split(text):
        words = part.split()
        found += [" ".join(words[at : at + _SENTENCE_WORDS]) for at in range(0, len(words), _SENTENCE_WORDS)]
    return found


def _passages(text: str) -> list[list[str]]:
    """Consecutive sentences, up to eighty words together."""
    passages: list[list[str]] = []
    room = 0
    for sentence in sentences(text):
        size = len(sentence.split())
        if size > room or not passages:
            passages.append([])
            room = _PASSAGE_WORDS
        passages[-1].append(sentence)
        room -= size
    return passages
