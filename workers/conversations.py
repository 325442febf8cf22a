"""Conversations as text: prompts and answers as they are, messages plainly or by a chat template.

What a model is to learn are the assistant's turns, the answers. Where a chat template does not mark them itself (by
`{% generation %}`), they are what it writes after its own prompt for an answer.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from workers.answers import MarkedText
from workers.errors import CorpusError

USER, ASSISTANT = "user", "assistant"
#: JSON can spell it, UTF-8 and tokenizers cannot.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: What a template calls to write the day on which it is rendered.
_TODAY = "strftime_now"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    role: str
    content: str


class Chat(Protocol):
    """A way to write turns as text. `name` and, of a template, `digest` go into the manifest."""

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str | None: ...

    def written(self, turns: Sequence[Turn]) -> MarkedText:
        """Raises CorpusError if they cannot be written so, or it cannot be told which part of it is answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedChat:
    """One content after the other, with nothing between."""

    name: str = "joined"
    digest: None = None

    def written(self, turns: Sequence[Turn]) -> MarkedText:
        return _joined([(turn.role == ASSISTANT, turn.content) for turn in turns])


JOINED_CHAT = JoinedChat()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainChat:
    """For each turn a line with its role and a colon, then its content and a line break; of an answer, that line break
    too is answer."""

    name: str = "plain"
    digest: None = None

    def written(self, turns: Sequence[Turn]) -> MarkedText:
        parts = []
        for turn in turns:
            parts += [(False, f"{turn.role}:\n"), (turn.role == ASSISTANT, f"{turn.content}\n")]
        return _joined(parts)


PLAIN_CHAT = PlainChat()


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateChat:
    """A Jinja template in Hugging Face's manner, rendered in their sandbox; it sees `special_tokens` by their names.

    Where the template marks what an assistant says (`{% generation %}`), that is an answer. Else an answer is what
    rendering the turns up to it adds to rendering those before it with the prompt for an answer, provided that each of
    these texts begins with the one before: a template that writes earlier turns in another way later is refused.
    """

    template: str
    special_tokens: Mapping[str, str]
    name: str = "template"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.template.encode()).hexdigest()

    def written(self, turns: Sequence[Turn]) -> MarkedText:
        if _GENERATION.search(self.template):
            text, spans = self._rendered(turns, marked=True)
            return MarkedText(text=text, answers=tuple(spans))
        text, _ = self._rendered(turns)
        answers = []
        for index, turn in enumerate(turns):
            if turn.role != ASSISTANT:
                continue
            prompt, _ = self._rendered(turns[:index], add_generation_prompt=True)
            answered, _ = self._rendered(turns[: index + 1])
            if not (answered.startswith(prompt) and text.startswith(answered)):
                raise CorpusError(
                    f"the chat template writes message {index + 1} in another way than it prompts for it, or than it"
                    " repeats it later, so its answer cannot be told apart: give a template that marks answers with"
                    " {% generation %} (--chat-template), or one answer a row"
                )
            answers.append((len(prompt), len(answered)))
        return MarkedText(text=text, answers=tuple(answers))

    def _rendered(
        self, turns: Sequence[Turn], *, marked: bool = False, add_generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template  # seconds that other sources need not

        try:
            texts, spans = render_jinja_template(
                conversations=[[{"role": turn.role, "content": turn.content} for turn in turns]],
                chat_template=self.template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except Exception as error:  # a template raises what its expressions raise
            raise CorpusError(f"the chat template cannot write these messages: {error}") from error
        return texts[0], spans[0] if marked else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A row of turns, and how they are written."""

    turns: tuple[Turn, ...]
    chat: Chat

    @property
    def n_bytes(self) -> int:
        """Size of what is said, as UTF-8, without what the writing adds."""
        return sum(len(turn.content.encode()) for turn in self.turns)

    @property
    def answered(self) -> bool:
        """Whether there is an answer, and none is blank."""
        answers = [turn.content for turn in self.turns if turn.role == ASSISTANT]
        return bool(answers) and all(answer.strip() for answer in answers)

    def written(self, name: str) -> MarkedText:
        """The text; `name` is the document's in errors.

        Raises:
            CorpusError: if the turns cannot be written.
        """
        try:
            return self.chat.written(self.turns)
        except CorpusError as error:
            raise CorpusError(f"{name}: {error}") from error


def prompt_and_answer(row: Mapping[str, Any], prompt: str, answer: str, *, where: str) -> Exchange:
    """The exchange of a row that holds them in two fields.

    Raises:
        CorpusError: if one is no text; the message names `where` the row is.
    """
    for field in (prompt, answer):
        _check_text(row.get(field), f'{where}: no text in the field "{field}"')
    turns = Turn(role=USER, content=row[prompt]), Turn(role=ASSISTANT, content=row[answer])
    return Exchange(turns=turns, chat=JOINED_CHAT)


def messages(row: Mapping[str, Any], field: str, chat: Chat, *, where: str) -> Exchange:
    """The exchange of a row that holds a list of messages, each with a role and a content.

    Raises:
        CorpusError: if it is none, or a message has more than those two; the message names `where` the row is.
    """
    found = row.get(field)
    if not isinstance(found, list) or not all(isinstance(message, dict) for message in found):
        raise CorpusError(f'{where}: no list of messages in the field "{field}"')
    for number, message in enumerate(found, start=1):
        at = f'{where}: message {number} in the field "{field}"'
        for part in ("role", "content"):
            _check_text(message.get(part), f"{at} has no text as its {part}")
        more = sorted(key for key, value in message.items() if key not in ("role", "content") and value is not None)
        if more:
            raise CorpusError(f"{at} has {', '.join(more)} too, which would be lost: only role and content are read")
    turns = tuple(Turn(role=message["role"], content=message["content"]) for message in found)
    return Exchange(turns=turns, chat=chat)


def chat_of(tokenizer: Path | None, template: Path | None = None) -> Chat:
    """How messages are written for a tokenizer: by `template`, else by the chat template that lies beside its
    `tokenizer.json`, else plainly.

    Raises:
        CorpusError: if a template cannot be read, or would write the day on which it is rendered.
    """
    own, special_tokens = (None, {}) if tokenizer is None else _beside(tokenizer)
    if template is not None:
        try:
            own = template.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CorpusError(f"{template} is no chat template: {error}") from error
    if own is None:
        return PLAIN_CHAT
    if _TODAY in own:
        raise CorpusError(
            f"the chat template writes today's date ({_TODAY}), so every day would make another corpus: give a copy"
            " without it (--chat-template)"
        )
    return TemplateChat(template=own, special_tokens=special_tokens)


def _beside(tokenizer: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template of a Hugging Face folder's tokenizer, if it has one, and its special tokens by name."""
    if tokenizer.name != "tokenizer.json":
        return None, {}
    from transformers import PreTrainedTokenizerFast

    try:
        found = PreTrainedTokenizerFast.from_pretrained(tokenizer.parent, local_files_only=True)
        template = found.get_chat_template() if found.chat_template else None
    except Exception as error:  # of files that hold something else
        raise CorpusError(f"the settings beside {tokenizer} cannot be read: {error}") from error
    return template, dict(found.special_tokens_map)


def _joined(parts: Sequence[tuple[bool, str]]) -> MarkedText:
    answers, at = [], 0
    for is_answer, text in parts:
        if is_answer:
            answers.append((at, at + len(text)))
        at += len(text)
    return MarkedText(text="".join(text for _, text in parts), answers=tuple(answers))


def _check_text(value: object, otherwise: str) -> None:
    if not isinstance(value, str):
        raise CorpusError(otherwise)
    if LONE_SURROGATE.search(value):
        raise CorpusError(f"{otherwise}: it holds half a surrogate pair")
