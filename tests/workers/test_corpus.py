"""Corpora: what lands in which split, that content alone names them, and what refuses to become one."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from workers.corpus import Corpus, corpus_names, find_corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_sources import FolderSource, TorchSource
from workers.errors import CorpusError

WORDS = ["def", "return", "self", "class", "value", "tensor", "shape", "ünïcode", "数", "loop", "import", "size"]


def prose(seed: int, words: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice([" ", "\n", ", "]) for _ in range(words))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in range(12):
        file = tmp_path / "texts" / f"part{number % 4}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(prose(number, 200 + 10 * number))
    (tmp_path / "texts" / ".hidden.txt").write_bytes(b"\xff\xfe")
    return tmp_path / "texts"


def built(folder: Path, store: Path, max_bytes: int | None = None) -> Corpus:
    source = FolderSource(path=folder)
    manifest = build_corpus(source, store=store, name="texts", vocab_size=300, max_bytes=max_bytes)
    return open_corpus(store, manifest.hash)


def files_of(corpus: Corpus) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in corpus.path.iterdir()}


def test_every_document_lies_whole_in_exactly_one_split(folder: Path, tmp_path: Path) -> None:
    corpus = built(folder, tmp_path / "store")
    entries = corpus.manifest.documents
    assert sorted(entry.id for entry in entries) == sorted(f"part{n % 4}/{n}.txt" for n in range(12))
    for split in ("short", "long"):
        pieces = corpus.tokenizer.decode(corpus.tokens(split).tolist(), skip_special_tokens=False).split(
            "<|endoftext|>"
        )
        assert pieces.pop() == ""
        texts = [(folder / entry.id).read_text() for entry in corpus.manifest.of(split)]
        assert pieces == texts
    assert [document.text for document in corpus.held_out] == [
        (folder / entry.id).read_text() for entry in corpus.manifest.of("held_out")
    ]


def test_counts_include_separators_and_add_up(folder: Path, tmp_path: Path) -> None:
    manifest = built(folder, tmp_path / "store").manifest
    for split, counted in (("short", manifest.short_tokens), ("long", manifest.long_tokens)):
        documents = manifest.of(split)  # type: ignore[arg-type]
        assert documents
        assert counted == sum(document.tokens + 1 for document in documents)
    assert manifest.held_out_tokens == sum(document.tokens for document in manifest.of("held_out"))


def test_short_stage_gets_the_share_that_the_others_leave(tmp_path: Path) -> None:
    for number in range(60):
        (tmp_path / f"{number}.txt").write_text(prose(number, 100))
    manifest = build_corpus(FolderSource(path=tmp_path), store=tmp_path / ".store", name="texts", vocab_size=300)
    assert [len(manifest.of(split)) for split in ("short", "long", "held_out")] == [45, 9, 6]


def test_held_out_spans_point_at_the_characters_of_each_token(folder: Path, tmp_path: Path) -> None:
    for document in built(folder, tmp_path / "store").held_out:
        assert document.spans.shape == (len(document.tokens), 2)
        covered = np.zeros(len(document.text), dtype=bool)
        for start, end in document.spans:
            covered[start:end] = True
        assert covered.all()
        assert document.spans[-1, 1] == len(document.text)


def test_rebuild_is_byte_identical_in_another_process_and_place(folder: Path, tmp_path: Path) -> None:
    first = built(folder, tmp_path / "store")
    script = (
        "import sys; from pathlib import Path; from workers.corpus_build import build_corpus;"
        "from workers.corpus_sources import FolderSource;"
        "build_corpus(FolderSource(path=Path(sys.argv[1])), store=Path(sys.argv[2]), name='other', vocab_size=300)"
    )
    moved = folder.rename(tmp_path / "moved")
    subprocess.run([sys.executable, "-c", script, str(moved), str(tmp_path / "store2")], check=True, timeout=120)
    second = open_corpus(tmp_path / "store2", find_corpus(tmp_path / "store2", "other"), verify_digests=True)
    assert second.hash == first.hash
    assert files_of(second) == files_of(first)


def test_building_again_keeps_one_corpus_and_nothing_half_built(folder: Path, tmp_path: Path) -> None:
    first, second = built(folder, tmp_path / "store"), built(folder, tmp_path / "store")
    assert first.hash == second.hash
    assert sorted(path.name for path in (tmp_path / "store" / "corpora").iterdir()) == sorted(["names", first.hash])


def test_a_changed_text_changes_the_hash_and_the_name_follows(folder: Path, tmp_path: Path) -> None:
    before = built(folder, tmp_path / "store").hash
    (folder / "part0" / "0.txt").write_text(prose(99, 200))
    after = built(folder, tmp_path / "store").hash
    assert before != after
    assert corpus_names(tmp_path / "store") == {"texts": after}
    assert open_corpus(tmp_path / "store", before).hash == before


def test_documents_by_directory_join_the_files_of_a_directory(folder: Path, tmp_path: Path) -> None:
    source = FolderSource(path=folder, documents_by="directory")
    assert sorted(document.id for document in source.documents()) == ["part0", "part1", "part2", "part3"]
    texts = {document.id: document.read() for document in source.documents()}
    assert texts["part1"] == "\n".join((folder / "part1" / f"{n}.txt").read_text() for n in (1, 5, 9))


def test_max_bytes_bounds_the_text_and_leaves_giants_out(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text("a" * 100)
    (tmp_path / "giant.txt").write_text("a" * 5_000)
    corpus = built(tmp_path, tmp_path / ".store", max_bytes=6_000)
    ids = [entry.id for entry in corpus.manifest.documents]
    assert len(ids) == 60
    assert "giant.txt" not in ids


def test_json_lines_are_documents_of_their_own(tmp_path: Path) -> None:
    lines = [json.dumps({"text": prose(number, 80), "other": 1}, ensure_ascii=False) for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:3], "", *lines[3:]]) + "\n")
    documents = FolderSource(path=tmp_path).documents()
    assert [document.id for document in documents] == [f"rows.jsonl:{line}" for line in (1, 2, 3, 5, 6, 7)]
    assert [document.read() for document in documents] == [prose(number, 80) for number in range(6)]


def test_an_existing_tokenizer_is_used_as_it_is(folder: Path, tmp_path: Path) -> None:
    first = built(folder, tmp_path / "store")
    manifest = build_corpus(
        FolderSource(path=folder), store=tmp_path / "store2", name="again", tokenizer_file=first.path / "tokenizer.json"
    )
    assert manifest.tokenizer == first.manifest.tokenizer
    assert manifest.hash == first.hash


def test_torch_sources_are_found_without_importing_torch() -> None:
    script = (
        "import sys; from workers.corpus_sources import TorchSource; found = TorchSource().documents();"
        "assert 'torch' not in sys.modules; print(len(found), sum(d.n_bytes for d in found))"
    )
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    count, size = map(int, run.stdout.split())
    assert count > 100
    assert size > 10_000_000


def test_torch_corpus_leaves_out_the_file_that_differs_between_builds() -> None:
    top = next(document for document in TorchSource().documents() if document.id == "torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    build = Path(spec.origin).with_name("version.py").read_text()
    assert build not in str(top.read())


def empty(folder: Path) -> None:
    folder.mkdir()


def only_empty_files(folder: Path) -> None:
    folder.mkdir()
    (folder / "a.txt").touch()


def not_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(4):
        (folder / f"{number}.txt").write_bytes(b"fine \xff\xfe")


def two_documents(folder: Path) -> None:
    folder.mkdir()
    for number in range(2):
        (folder / f"{number}.txt").write_text("some text")


def no_field(folder: Path) -> None:
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')


def broken_json(folder: Path) -> None:
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n{"text": \n')


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "not a folder"),
        (empty, "holds no text"),
        (only_empty_files, "holds no text"),
        (not_text, r"\d\.txt: not UTF-8 text \(byte 5\)"),
        (two_documents, "2 documents are too few"),
        (no_field, r'rows\.jsonl, line 2: no text in the field "text"'),
        (broken_json, r"rows\.jsonl, line 2: not JSON"),
    ],
)
def test_what_is_no_corpus_is_refused_and_leaves_nothing(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    make(tmp_path / "texts")
    with pytest.raises(CorpusError, match=message):
        built(tmp_path / "texts", tmp_path / "store")
    assert not list((tmp_path / "store").rglob("*.*"))


def test_a_vocabulary_below_the_byte_alphabet_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="vocab_size 200 is too small"):
        build_corpus(FolderSource(path=folder), store=tmp_path / "store", name="texts", vocab_size=200)


@pytest.mark.parametrize(("long_share", "held_out_share"), [(0.5, 0.5), (0.2, 0.0), (0.0, 0.2)])
def test_shares_that_leave_a_split_empty_are_refused(
    folder: Path, tmp_path: Path, long_share: float, held_out_share: float
) -> None:
    source = FolderSource(path=folder)
    with pytest.raises(CorpusError, match="must be positive and leave something"):
        build_corpus(
            source, store=tmp_path / "store", name="texts", long_share=long_share, held_out_share=held_out_share
        )


def test_damage_is_found_when_the_corpus_is_opened(folder: Path, tmp_path: Path) -> None:
    corpus = built(folder, tmp_path / "store")
    tokens = (corpus.path / "short.bin").read_bytes()
    (corpus.path / "short.bin").write_bytes(tokens[:-2])
    with pytest.raises(CorpusError, match=r"short\.bin is missing or has the wrong size"):
        open_corpus(tmp_path / "store", corpus.hash)
    (corpus.path / "short.bin").write_bytes(bytes([tokens[0] ^ 1]) + tokens[1:])
    open_corpus(tmp_path / "store", corpus.hash)
    with pytest.raises(CorpusError, match=r"short\.bin has the wrong digest"):
        open_corpus(tmp_path / "store", corpus.hash, verify_digests=True)
    manifest = corpus.path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"folder"', '"torch"'))
    with pytest.raises(CorpusError, match="it was changed after it was built"):
        open_corpus(tmp_path / "store", corpus.hash)


def test_an_unknown_name_or_hash_says_what_there_is(folder: Path, tmp_path: Path) -> None:
    built(folder, tmp_path / "store")
    with pytest.raises(CorpusError, match=r'no corpus "torch" .* there is: texts'):
        find_corpus(tmp_path / "store", "torch")
    with pytest.raises(CorpusError, match="no corpus abc"):
        open_corpus(tmp_path / "store", "abc")
