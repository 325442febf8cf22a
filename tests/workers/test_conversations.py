"""Conversations as text, with what the assistant says marked: plainly, and by chat templates of both kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from workers.answers import MarkedText, answer_tokens
from workers.conversations import (
    JOINED_CHAT,
    PLAIN_CHAT,
    Chat,
    Exchange,
    TemplateChat,
    Turn,
    chat_of,
    messages,
    prompt_and_answer,
)
from workers.errors import CorpusError

TURNS = (
    Turn(role="system", content="Be brief."),
    Turn(role="user", content="2 + 2?"),
    Turn(role="assistant", content="4"),
    Turn(role="user", content="und ü?"),
    Turn(role="assistant", content="Ü 数"),
)
#: As most models are published: nothing says where an answer is.
SILENT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content"
    " + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
WRITTEN = (
    "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 2?<|im_end|>\n"
    "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nund ü?<|im_end|>\n<|im_start|>assistant\nÜ 数<|im_end|>\n"
)


def template(text: str) -> TemplateChat:
    return TemplateChat(template=text, special_tokens={"bos_token": "<s>"})


def answers_of(written: MarkedText) -> list[str]:
    return [written.text[begin:end] for begin, end in written.answers]


@pytest.mark.parametrize(
    ("chat", "text", "answers"),
    [
        (JOINED_CHAT, "Be brief.2 + 2?4und ü?Ü 数", ["4", "Ü 数"]),
        (
            PLAIN_CHAT,
            "system:\nBe brief.\nuser:\n2 + 2?\nassistant:\n4\nuser:\nund ü?\nassistant:\nÜ 数\n",
            ["4\n", "Ü 数\n"],
        ),
        (template(MARKED), WRITTEN, ["4<|im_end|>", "Ü 数<|im_end|>"]),
        (template(SILENT), WRITTEN, ["4<|im_end|>\n", "Ü 数<|im_end|>\n"]),
    ],
)
def test_turns_become_one_text_whose_answers_are_known(chat: Chat, text: str, answers: list[str]) -> None:
    written = chat.written(TURNS)
    assert written.text == text
    assert answers_of(written) == answers


@pytest.mark.parametrize("trim_offsets", [True, False])
def test_marks_are_those_of_transformers_where_a_template_marks_answers(trim_offsets: bool) -> None:
    tokenizer = small_tokenizer()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=MARKED)
    theirs = wrapped.apply_chat_template(
        [{"role": turn.role, "content": turn.content} for turn in TURNS],
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    written = template(MARKED).written(TURNS)
    encoding = tokenizer.encode(written.text, add_special_tokens=False)
    assert encoding.ids == theirs["input_ids"]
    assert (
        answer_tokens(np.asarray(encoding.offsets), written.answers).astype(int).tolist() == theirs["assistant_masks"]
    )
    assert 0 < sum(theirs["assistant_masks"]) < len(encoding.ids)


def small_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WRITTEN], trainer)
    return tokenizer


#: Thoughts of all turns but the last are forgotten.
FORGETFUL = SILENT.replace("message.content", "(message.content if loop.last else message.content.split('|')[-1])")
#: The prompt for an answer says more than what the answer follows later.
PROMPTING = SILENT.replace("assistant\n", "assistant\n<think>\n")


@pytest.mark.parametrize("text", [FORGETFUL, PROMPTING])
def test_an_answer_that_cannot_be_told_apart_is_refused(text: str) -> None:
    turns = (
        Turn(role="user", content="a"),
        Turn(role="assistant", content="hm|b"),
        Turn(role="user", content="c"),
        Turn(role="assistant", content="hm|d"),
    )
    with pytest.raises(CorpusError, match=r"rows:7: the chat template writes message 2 in another way than it prompts"):
        Exchange(turns=turns, chat=template(text)).written("rows:7")
    if text == FORGETFUL:  # with one answer a row nothing is forgotten
        assert answers_of(template(text).written(turns[:2])) == ["hm|b<|im_end|>\n"]


def test_what_a_template_will_not_write_is_told_with_its_words() -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    for text, said in ((strict + SILENT, "System role not supported"), ("{% if %}", "Expected an expression")):
        with pytest.raises(CorpusError, match=f"x: the chat template cannot write these messages: {said}"):
            Exchange(turns=TURNS, chat=template(text)).written("x")


def folder(tmp_path: Path, **config: Any) -> Path:
    small_tokenizer().save(str(tmp_path / "tokenizer.json"))
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path / "tokenizer.json"


def test_a_tokenizers_own_template_is_found_beside_it(tmp_path: Path) -> None:
    file = folder(tmp_path, chat_template=SILENT, bos_token={"content": "<s>", "__type": "AddedToken"})
    assert chat_of(file) == template(SILENT)
    (tmp_path / "chat_template.jinja").write_text(MARKED)  # where it lies in newer folders
    assert chat_of(file) == template(MARKED)
    other = tmp_path / "other.jinja"
    other.write_text("other")
    assert chat_of(file, other) == template("other")
    assert chat_of(file, other).digest != chat_of(file).digest


def test_without_a_template_messages_are_written_plainly(tmp_path: Path) -> None:
    assert chat_of(None) == chat_of(folder(tmp_path)) == PLAIN_CHAT
    moved = (tmp_path / "tokenizer.json").rename(tmp_path / "mine.json")  # whose settings are not known
    assert chat_of(moved) == PLAIN_CHAT


def test_a_template_that_would_write_the_day_is_refused(tmp_path: Path) -> None:
    dated = folder(tmp_path, chat_template="{{ strftime_now('%d %b %Y') }}" + SILENT)
    with pytest.raises(CorpusError, match="writes today's date"):
        chat_of(dated)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CorpusError, match=r"settings beside .*tokenizer\.json cannot be read"):
        chat_of(dated)
    with pytest.raises(CorpusError, match=r"missing\.jinja is no chat template"):
        chat_of(None, tmp_path / "missing.jinja")


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, 'x: no list of messages in the field "chat"'),
        ("text", 'x: no list of messages in the field "chat"'),
        (["text"], 'x: no list of messages in the field "chat"'),
        ([USER, {"role": "assistant"}], 'x: message 2 in the field "chat" has no text as its content'),
        ([{"content": "a"}], 'x: message 1 in the field "chat" has no text as its role'),
        ([USER | {"content": [{"type": "text", "text": "a"}]}], "message 1 .* has no text as its content"),
        ([USER | {"content": "\ud800"}], "no text as its content: it holds half a surrogate pair"),
        ([USER | {"tool_calls": [], "name": "b"}], "has name, tool_calls too, which would be lost"),
    ],
)
def test_what_are_no_messages_is_told_with_its_place(found: Any, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        messages({"chat": found}, "chat", PLAIN_CHAT, where="x")


def test_an_exchange_is_answered_if_every_answer_says_something() -> None:
    def answered(*answers: str) -> bool:
        said = [{"role": "assistant", "content": answer, "name": None} for answer in answers]
        return messages({"m": [USER, *said]}, "m", PLAIN_CHAT, where="").answered

    assert answered("a", "b")
    assert not answered("a", " \n")
    assert not answered()
    pair = prompt_and_answer({"p": "", "a": "ü"}, "p", "a", where="")
    assert (pair.answered, pair.n_bytes) == (True, 2)
    with pytest.raises(CorpusError, match='y: no text in the field "a"'):
        prompt_and_answer({"p": "b"}, "p", "a", where="y")
