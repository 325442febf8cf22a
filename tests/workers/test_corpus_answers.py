"""Corpora of prompts with answers and of messages: what is marked, stored, named, left out and refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.test_conversations import MARKED
from tests.workers.test_corpus_rows import KINDS, written
from workers.conversations import PLAIN_CHAT, Chat, TemplateChat
from workers.corpus import AnswersOrigin, Corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_rows import RowFields
from workers.corpus_sources import CorpusSource, FolderSource, HeldOutSource, source_at
from workers.documents import evaluation_windows
from workers.errors import CorpusError
from workers.spec import EvaluationDocuments, Split, content_hash

PAIRS = RowFields(prompt="question", answer="reply")
ROWS: list[dict[str, Any]] = [
    {
        "question": f"What is {n} and ü?\n",
        "reply": f"It is {n * n}, 数." if n % 7 else " \n",
        "chat": [
            {"role": "user", "content": f"Say {n}."},
            {"role": "assistant", "content": f"{n}!"},
            {"role": "user", "content": "Again."},
            *([{"role": "assistant", "content": f"{n} {n}"}] if n % 7 else []),
        ][: 4 if n % 7 else 1],
    }
    for n in range(30)
]


def built(source: CorpusSource | None, tmp_path: Path, **options: Any) -> Corpus:
    manifest = build_corpus(source, store=tmp_path / "store", name="sft", vocab_size=300, **options)
    return open_corpus(tmp_path / "store", manifest.hash, verify_digests=True)


def documents_of(corpus: Corpus, split: Split) -> list[tuple[str, str, list[bool]]]:
    """Text of each document with its separator, the part of it that is marked, and the marks."""
    marks = corpus.answers(split)
    assert marks is not None
    found, at = [], 0
    for document in corpus.manifest.of(split):
        tokens, marked = corpus.tokens(split)[at:][: document.tokens + 1], marks.of(at, document.tokens + 1)
        whole, part = (corpus.tokenizer.decode(ids.tolist(), skip_special_tokens=False) for ids in
                       (tokens, tokens[marked]))  # fmt: skip
        found.append((whole, part, marked.tolist()))
        at += document.tokens + 1
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_answers_and_the_separators_after_them_are_marked(kind: str, tmp_path: Path) -> None:
    corpus = built(source_at(written(kind, tmp_path, ROWS), rows=PAIRS), tmp_path)
    rows = {row["question"] + row["reply"]: row["reply"] for row in ROWS}
    counts = {}
    splits: tuple[Split, ...] = ("short", "long")
    for split in splits:
        found = documents_of(corpus, split)
        for text, part, marks in found:
            assert part == rows[text.removesuffix("<|endoftext|>")] + "<|endoftext|>"
            assert marks == sorted(marks)  # the answer is the end
        counts[f"{split}_tokens"] = sum(sum(marks) for *_, marks in found)
    assert corpus.manifest.answers == AnswersOrigin(chat="joined", template=None, left_out=5, **counts)
    assert len(corpus.manifest.documents) == 25
    size = (corpus.path / "short_answers.bin").stat().st_size
    assert size == -(-corpus.manifest.short_tokens // 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chat", [PLAIN_CHAT, TemplateChat(template=MARKED, special_tokens={})])
def test_the_assistants_turns_are_marked(kind: str, chat: Chat, tmp_path: Path) -> None:
    source = source_at(written(kind, tmp_path, ROWS), rows=RowFields(messages="chat", chat=chat))
    corpus = built(source, tmp_path)
    assert corpus.manifest.answers is not None
    assert (corpus.manifest.answers.chat, corpus.manifest.answers.template) == (chat.name, chat.digest)
    assert corpus.manifest.answers.left_out == 5
    for text, part, marks in documents_of(corpus, "short"):
        number = text.split("Say ")[1].split(".")[0]
        if chat is PLAIN_CHAT:
            said = f"user:\nSay {number}.\nassistant:\n{number}!\nuser:\nAgain.\nassistant:\n{number} {number}\n"
            assert text == f"{said}<|endoftext|>"
            assert part == f"{number}!\n{number} {number}\n<|endoftext|>"
        else:  # the line break after the last answer is not marked, so its separator is not either
            assert part == f"{number}!<|im_end|>{number} {number}<|im_end|>"
            assert not marks[-1]


def test_marks_name_a_corpus_and_corpora_without_them_have_the_names_they_had(tmp_path: Path) -> None:
    source = FolderSource(path=written("jsonl", tmp_path, ROWS), rows=PAIRS)
    corpus = built(source, tmp_path)
    joined = [{"text": row["question"] + row["reply"]} for row in ROWS if row["reply"].strip()]
    (tmp_path / "plain").mkdir()
    plain = built(source_at(written("jsonl", tmp_path / "plain", joined)), tmp_path)
    assert plain.answers("short") is None
    fields = json.loads((plain.path / "manifest.json").read_text())
    assert "answers" not in fields
    assert content_hash(fields) == content_hash(plain.manifest) == plain.hash
    assert sorted(file.name for file in plain.manifest.files) == [
        "held_out.bin", "held_out.txt", "held_out_spans.bin", "long.bin", "short.bin", "tokenizer.json",
    ]  # fmt: skip
    assert built(source, tmp_path).hash == corpus.hash
    answers = corpus.path / "short_answers.bin"
    content = answers.read_bytes()
    answers.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(CorpusError, match=r"short_answers\.bin has the wrong digest"):
        open_corpus(tmp_path / "store", corpus.hash, verify_digests=True)
    manifest = dataclasses.replace(corpus.manifest, answers=None)
    assert content_hash(manifest) != corpus.hash


def test_held_out_conversations_are_measured_as_whole_documents(tmp_path: Path) -> None:
    source = source_at(written("jsonl", tmp_path, ROWS), rows=PAIRS)
    corpus = built(source, tmp_path, held_out_share=0.3)
    rows = {row["question"] + row["reply"] for row in ROWS}
    assert {document.text for document in corpus.held_out} <= rows
    windows = evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=4, length=8))
    for window in windows:
        assert corpus.tokenizer.decode(window.tokens.tolist()) == window.text
    tokenizer = corpus.path / "tokenizer.json"
    only = built(None, tmp_path, held_out=HeldOutSource(source=source, first=3), tokenizer_file=tokenizer)
    assert [document.id for document in only.held_out] == ["0.jsonl:2", "0.jsonl:3", "0.jsonl:4"]
    assert only.manifest.answers is None
    with pytest.raises(CorpusError, match=r"training document .* is held-out document 0\.jsonl:2 as well"):
        built(source, tmp_path, held_out=HeldOutSource(source=source, first=1), tokenizer_file=tokenizer)


@pytest.mark.parametrize(
    ("kind", "row", "fields", "message"),
    [
        ("jsonl", {"reply": None}, PAIRS, r'0\.jsonl, line 7: no text in the field "reply"'),
        ("parquet", {"reply": None}, PAIRS, r'0\.parquet, row 7: no text in the field "reply"'),
        ("dataset", {"question": None}, PAIRS, r'dataset, row 7: no text in the field "question"'),
        ("jsonl", {"chat": {}}, RowFields(messages="chat"), r'line 7: no list of messages in the field "chat"'),
        ("dataset", {"chat": None}, RowFields(messages="chat"), r'row 7: no list of messages in the field "chat"'),
        ("parquet", {"chat": [{"role": "user"}]}, RowFields(messages="chat"), r"row 7: message 1 .* as its content"),
        ("parquet", {}, RowFields(messages="reply"), r'the field "reply" holds string, not messages'),
        ("dataset", {}, RowFields(prompt="chat", answer="reply"), r'"chat" holds .*, not prompts with answers'),
        ("parquet", {}, RowFields(prompt="question", answer="no"), r'0\.parquet has no field "no"; it has: question'),
    ],
)
def test_what_is_no_exchange_is_told_with_file_row_and_field(
    kind: str, row: dict[str, Any], fields: RowFields, message: str, tmp_path: Path
) -> None:
    rows = [*ROWS[:6], {**ROWS[6], **row}, *ROWS[7:]]
    with pytest.raises(CorpusError, match=message):
        source_at(written(kind, tmp_path, rows), rows=fields).documents()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a"}, "belong together: give both"),
        ({"prompt": "a", "answer": "b", "messages": "c"}, "give the fields of one of these"),
        ({"ids": "a", "messages": "c"}, "give the fields of one of these"),
        ({"messages": "a", "group": "b"}, "do not group"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        RowFields(**fields)


def test_rows_without_any_answer_make_no_corpus(tmp_path: Path) -> None:
    silent = [{"question": "a", "reply": ""}] * 5
    with pytest.raises(CorpusError, match="none of 5 rows has an answer"):
        built(source_at(written("jsonl", tmp_path, silent), rows=PAIRS), tmp_path)
    (tmp_path / "jsonl" / "readme.txt").write_text("text")
    with pytest.raises(CorpusError, match=r"readme\.txt is no \.jsonl or \.parquet file"):
        source_at(tmp_path / "jsonl", rows=PAIRS).documents()
    deaf = TemplateChat(template="{% for m in messages %}{{ m.role }}{% endfor %}{% generation %}{% endgeneration %}",
                        special_tokens={})  # fmt: skip
    (tmp_path / "deaf").mkdir()
    rows = RowFields(messages="chat", chat=deaf)
    with pytest.raises(CorpusError, match=r"\d\.jsonl:\d+: no token is left of its answers"):
        built(source_at(written("jsonl", tmp_path / "deaf", ROWS), rows=rows), tmp_path)
    assert not list((tmp_path / "store").rglob("*.bin"))


def test_marks_are_a_small_part_of_the_tokens(tmp_path: Path) -> None:
    corpus = built(source_at(written("jsonl", tmp_path, ROWS), rows=PAIRS), tmp_path)
    marks = corpus.answers("long")
    assert marks is not None
    assert isinstance(marks.bits, np.memmap)
    assert len(marks.bits) <= corpus.tokens("long").nbytes // 16 + 1
