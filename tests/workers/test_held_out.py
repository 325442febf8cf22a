"""Held-out documents with a source of their own: which are taken, how they are cut, and that none is trained on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from workers.corpus import Corpus, HeldOutOrigin, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_rows import RowFields
from workers.corpus_sources import FolderSource, HeldOutSource
from workers.documents import evaluation_windows
from workers.errors import CorpusError
from workers.spec import EvaluationDocuments

SIZES = (50, 400, 20, 300, 500, 250)


def text(seed: int, size: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice("abcdefgh ü\n") for _ in range(size))


REPORTS = [text(100 + n, size) for n, size in enumerate(SIZES)]


@pytest.fixture
def training(tmp_path: Path) -> FolderSource:
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(text(number, 300))
    return FolderSource(path=tmp_path / "texts")


def reports(tmp_path: Path, rows: list[dict[str, Any]] | None = None) -> Path:
    path = tmp_path / "reports.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or [{"text": report} for report in REPORTS]))
    return path


def built(source: FolderSource | None, tmp_path: Path, **options: Any) -> Corpus:
    manifest = build_corpus(source, store=tmp_path / "store", name="with-reports", vocab_size=300, **options)
    return open_corpus(tmp_path / "store", manifest.hash, verify_digests=True)


def test_the_first_documents_that_are_long_enough_are_held_out_in_their_order(
    training: FolderSource, tmp_path: Path
) -> None:
    plain = built(training, tmp_path)
    lengths = [len(plain.tokenizer.encode(report).ids) for report in REPORTS]
    least = sorted(lengths)[2]
    wanted = [report for report, length in zip(REPORTS, lengths, strict=True) if length >= least][:3]
    source = HeldOutSource(source=FolderSource(path=reports(tmp_path)), min_tokens=least, first=3)
    tokenizer = plain.path / "tokenizer.json"
    corpus = built(training, tmp_path, held_out=source, tokenizer_file=tokenizer)
    assert [document.text for document in corpus.held_out] == wanted
    assert [document.id for document in corpus.held_out] == ["reports.jsonl:2", "reports.jsonl:4", "reports.jsonl:5"]
    assert corpus.manifest.held_out_origin == HeldOutOrigin(source="folder", min_tokens=least, max_tokens=None, first=3)
    assert {document.id for document in corpus.manifest.documents if document.split != "held_out"} == {
        f"{n}.txt" for n in range(12)
    }
    fewer = HeldOutSource(source=FolderSource(path=reports(tmp_path)), min_tokens=least, first=2)
    assert built(training, tmp_path, held_out=fewer, tokenizer_file=tokenizer).hash != corpus.hash


def test_documents_are_cut_after_a_number_of_tokens(training: FolderSource, tmp_path: Path) -> None:
    source = HeldOutSource(source=FolderSource(path=reports(tmp_path)), max_tokens=30)
    corpus = built(training, tmp_path, held_out=source)
    assert max(len(document.tokens) for document in corpus.held_out) == 30
    for document, report in zip(corpus.held_out, REPORTS, strict=True):
        assert report.startswith(document.text)
        assert corpus.tokenizer.encode(document.text).ids[:20] == document.tokens[:20].tolist()
        assert document.spans[-1, 1] == len(document.text)


def test_ids_of_another_tokenizer_become_text_that_is_tokenized_anew(training: FolderSource, tmp_path: Path) -> None:
    foreign = built(training, tmp_path)
    (tmp_path / "texts" / "new.txt").write_text("zzz yyy " * 400)  # so that the next tokenizer is another one
    makers = foreign.tokenizer
    rows = [{"input_ids": makers.encode(report).ids} for report in REPORTS]
    source = HeldOutSource(
        source=FolderSource(path=reports(tmp_path, rows), rows=RowFields(ids="input_ids")),
        min_tokens=100,
        max_tokens=150,
        ids_tokenizer=foreign.path / "tokenizer.json",
    )
    corpus = built(training, tmp_path, held_out=source)
    assert corpus.manifest.tokenizer != foreign.manifest.tokenizer
    expected = [makers.decode(row["input_ids"][:150]) for row in rows if len(row["input_ids"]) >= 100]
    assert expected
    assert [document.text for document in corpus.held_out] == expected
    assert [document.tokens.tolist() for document in corpus.held_out] == [
        corpus.tokenizer.encode(each).ids for each in expected
    ]


def test_a_corpus_may_be_there_to_measure_alone(training: FolderSource, tmp_path: Path) -> None:
    trained = built(training, tmp_path)
    source = HeldOutSource(source=FolderSource(path=reports(tmp_path)), min_tokens=64)
    corpus = built(None, tmp_path, held_out=source, tokenizer_file=trained.path / "tokenizer.json")
    assert corpus.manifest.tokenizer == trained.manifest.tokenizer
    windows = evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=2, length=64))
    assert windows[0].text == Tokenizer.from_file(str(corpus.path / "tokenizer.json")).decode(
        windows[0].tokens.tolist()
    )
    with pytest.raises(CorpusError, match="holds held-out documents alone"):
        corpus.tokens("short")


def test_a_document_of_both_sources_is_refused(training: FolderSource, tmp_path: Path) -> None:
    (tmp_path / "texts" / "leak.txt").write_text(REPORTS[3])
    source = HeldOutSource(source=FolderSource(path=reports(tmp_path)))
    with pytest.raises(CorpusError, match=r"training document leak\.txt is held-out document reports\.jsonl:4 as well"):
        built(training, tmp_path, held_out=source)


def test_too_few_that_are_long_enough_are_told(training: FolderSource, tmp_path: Path) -> None:
    source = FolderSource(path=reports(tmp_path))
    for held_out, message in (
        (HeldOutSource(source=source, first=50), "6 held-out documents have at least 1 tokens: 50 or more are needed"),
        (HeldOutSource(source=source, min_tokens=9999), "0 held-out documents have at least 9999 tokens: 1 or more"),
    ):
        with pytest.raises(CorpusError, match=message):
            built(training, tmp_path, held_out=held_out)
    with pytest.raises(CorpusError, match="needs the tokenizer of the models it will measure"):
        built(None, tmp_path, held_out=HeldOutSource(source=source))
