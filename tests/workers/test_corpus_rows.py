"""Rows as documents: Parquet, datasets on disk, JSON lines; token ids; groups; and errors that name the place."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from workers.conversations import Exchange
from workers.corpus import Corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_rows import RowFields
from workers.corpus_sources import CorpusSource, FolderSource, source_at
from workers.errors import CorpusError


def text(seed: int, size: int = 120) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice("abcdefgh ü\n") for _ in range(size))


ROWS: list[dict[str, Any]] = [{"text": text(n), "repo": f"repo{n % 4}", "stars": n, "ids": [n, 7]} for n in range(20)]


def written(kind: str, folder: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """Where the same rows lie as files of a kind, in several pieces."""
    path = folder / kind
    if kind == "dataset":
        datasets.Dataset.from_list(rows).save_to_disk(path, num_shards=2)
        return path
    path.mkdir()
    for part, chunk in enumerate((rows[:11], rows[11:])):
        if kind == "parquet":
            pq.write_table(pa.Table.from_pylist(chunk), path / f"{part}.parquet", row_group_size=4)
        else:
            (path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chunk))
    return path


KINDS = ["jsonl", "parquet", "dataset"]


def contents(source: CorpusSource) -> dict[str, Any]:
    found = source.documents()
    for document in found:
        content = document.read()
        assert not isinstance(content, Exchange)
        size = len(content.encode()) if isinstance(content, str) else 4 * len(content)
        assert document.n_bytes <= size <= document.n_bytes + 4  # and line breaks between joined parts
    return {document.id: document.read() for document in reversed(found)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_a_document_whatever_holds_it(kind: str, tmp_path: Path) -> None:
    found = contents(source_at(written(kind, tmp_path)))
    assert sorted(found.values()) == sorted(row["text"] for row in ROWS)
    names = {"jsonl": "0.jsonl:3", "parquet": "0.parquet:3", "dataset": "row:3"}
    assert found[names[kind]] == ROWS[2]["text"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_repository_make_one_document(kind: str, tmp_path: Path) -> None:
    found = contents(source_at(written(kind, tmp_path), rows=RowFields(group="repo")))
    assert found == {f"repo{g}": "\n".join(row["text"] for row in ROWS[g::4]) for g in range(4)}


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_taken_as_they_are(kind: str, tmp_path: Path) -> None:
    first = built(source_at(written("jsonl", tmp_path)), tmp_path)
    tokenizer = first.tokenizer
    rows: list[dict[str, Any]] = [{"input_ids": tokenizer.encode(row["text"]).ids, "repo": row["repo"]} for row in ROWS]
    source = source_at(written(kind, tmp_path / "ids", rows), rows=RowFields(ids="input_ids"))
    corpus = built(source, tmp_path, tokenizer_file=first.path / "tokenizer.json")
    assert corpus.manifest.tokenizer == first.manifest.tokenizer
    separated = np.split(corpus.tokens("short"), np.flatnonzero(corpus.tokens("short") == 0) + 1)[:-1]
    given = {tuple(row["input_ids"]) for row in rows}
    assert {tuple(tokens[:-1].tolist()) for tokens in separated} <= given
    assert len(separated) == len(corpus.manifest.of("short"))
    assert {document.text for document in corpus.held_out} <= {row["text"] for row in ROWS}


def built(source: CorpusSource, tmp_path: Path, tokenizer_file: Path | None = None) -> Corpus:
    (tmp_path / "ids").mkdir(exist_ok=True)
    manifest = build_corpus(
        source, store=tmp_path / "store", name="rows", vocab_size=300, tokenizer_file=tokenizer_file
    )
    return open_corpus(tmp_path / "store", manifest.hash)


def test_a_row_group_is_read_once_for_each_split_and_its_rows_stay_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": text(n)} for n in range(200)]
    source = source_at(written("parquet", tmp_path, rows))
    listed = {document.id: document.near for document in source.documents()}
    read: list[int] = []
    plain = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, row_group: int, *args: Any, **options: Any) -> pa.Table:
        read.append(row_group)
        return plain(self, row_group, *args, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    corpus = built(
        source,
        tmp_path,
        tokenizer_file=built(FolderSource(path=written("jsonl", tmp_path)), tmp_path).path / "tokenizer.json",
    )
    groups = len(set(listed.values()))
    assert groups == 51
    assert len(read) <= 4 * groups  # to list, and for each of three splits
    near = [listed[document.id] for document in corpus.manifest.of("short")]
    assert sum(one != other for one, other in pairwise(near)) < groups


def test_a_folder_of_repositories_makes_a_document_of_each(tmp_path: Path) -> None:
    for name in ("a/x.py", "a/sub/y.py", "b/deep/er/z.py", "top.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    found = contents(FolderSource(path=tmp_path, documents_by="repository"))
    assert found == {"a": "a/sub/y.py\na/x.py", "b": "b/deep/er/z.py", ".": "top.py"}


def test_one_file_is_a_source_too(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet"):
        file = written(kind, tmp_path) / f"0.{kind}"
        assert set(contents(source_at(file))) == {f"0.{kind}:{n}" for n in range(1, 12)}


@pytest.mark.parametrize(
    ("kind", "row", "fields", "message"),
    [
        ("parquet", {}, RowFields(text="body"), r'0\.parquet has no field "body"; it has: text, repo, stars, ids'),
        ("dataset", {}, RowFields(text="body"), r'dataset has no field "body"; it has: text, repo, stars, ids'),
        ("parquet", {}, RowFields(text="stars"), r'0\.parquet: the field "stars" holds int64, not text'),
        ("dataset", {}, RowFields(ids="text"), r'the field "text" holds string, not token ids'),
        ("parquet", {}, RowFields(group="stars"), r'the field "stars" holds int64, not names of groups'),
        ("parquet", {"text": None}, RowFields(), r'0\.parquet, row 7: no text in the field "text"'),
        ("dataset", {"text": None}, RowFields(), r'dataset, row 7: no text in the field "text"'),
        ("parquet", {"repo": None}, RowFields(group="repo"), r'row 7: no name of a group in the field "repo"'),
        ("jsonl", {"repo": None}, RowFields(group="repo"), r'0\.jsonl, line 7: no name of a group in the field "repo"'),
        ("jsonl", {"ids": [1, 2.5]}, RowFields(ids="ids"), r'0\.jsonl, line 7: no token ids in the field "ids"'),
        ("jsonl", {"ids": [10**30]}, RowFields(ids="ids"), r"line 7: no token ids"),
        ("jsonl", {"text": 5}, RowFields(), r'0\.jsonl, line 7: no text in the field "text"'),
    ],
)
def test_what_is_no_document_is_told_with_file_row_and_field(
    kind: str, row: dict[str, Any], fields: RowFields, message: str, tmp_path: Path
) -> None:
    rows = [*ROWS[:6], {**ROWS[6], **row}, *ROWS[7:]]
    with pytest.raises(CorpusError, match=message):
        source_at(written(kind, tmp_path, rows), rows=fields).documents()


def test_a_file_that_only_looks_like_parquet_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("nothing")
    with pytest.raises(CorpusError, match=r"x\.parquet cannot be read as a Parquet file"):
        FolderSource(path=tmp_path).documents()


def test_a_folder_of_several_datasets_lists_them(tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "both")
    with pytest.raises(CorpusError, match=r"holds several datasets: give one of .*both/train, .*both/test"):
        source_at(tmp_path / "both").documents()
    assert len(source_at(tmp_path / "both" / "test").documents()) == 20


def test_ids_need_the_tokenizer_that_made_them(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 300]} for _ in range(20)]
    source = source_at(written("jsonl", tmp_path, rows), rows=RowFields(ids="input_ids"))
    with pytest.raises(CorpusError, match=r"jsonl:\d+ holds token ids: give the tokenizer that made them"):
        built(source, tmp_path)
    other = built(source_at(written("dataset", tmp_path)), tmp_path).path / "tokenizer.json"
    with pytest.raises(CorpusError, match=r"jsonl:\d+: token 300 is outside of the tokenizer's vocabulary of \d+"):
        built(source, tmp_path, tokenizer_file=other)
