"""A store at an fsspec URL: two machines' mirrors of one folder that only fsspec touches."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from tests.workers.test_checkpoint import SEGMENT, written
from tests.workers.tiny_training import tiny_corpus, trained
from workers import checkpoint, mirror
from workers.corpus import find_corpus, open_corpus
from workers.documents import evaluation_windows
from workers.errors import CheckpointConflictError, CheckpointCorruptError, CheckpointMissingError, StoreError
from workers.reference_cache import key_tokens
from workers.spec import CheckpointRef, Chunking, EvaluationDocuments, Evaluator, Reference


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'far'}"


def test_a_folder_is_its_own_root_and_a_url_has_one_mirror(tmp_path: Path, url: str) -> None:
    assert mirror.open_store(str(tmp_path / "plain"), cache=tmp_path / "cache") == tmp_path / "plain"
    assert not mirror.is_mirror(tmp_path / "plain")
    here = mirror.open_store(url, cache=tmp_path / "cache")
    assert here == mirror.open_store(url, cache=tmp_path / "cache")
    assert here != mirror.open_store(url + "/other", cache=tmp_path / "cache")
    assert mirror.is_mirror(here)


def test_checkpoint_of_one_machine_is_read_bit_for_bit_on_another(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    stored = written(here)
    folder = checkpoint.verify(elsewhere, stored)
    assert folder.is_relative_to(elsewhere)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in (here / stored.path).iterdir()
    }
    assert checkpoint.find(elsewhere, stored.ref) == stored


def test_half_sent_checkpoint_is_absent_elsewhere(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    stored = written(here)
    (tmp_path / "far" / stored.path / "manifest.json").unlink()
    with pytest.raises(CheckpointMissingError):
        checkpoint.verify(elsewhere, stored)


def test_what_another_attempt_had_half_sent_is_no_part_of_a_checkpoint(tmp_path: Path, url: str) -> None:
    """Parts of moments of an attempt with more processes would be taken for those of this one."""
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    ref = CheckpointRef(segment=SEGMENT.id, step=1)
    part = tmp_path / "far" / checkpoint.relative_path(ref) / "optimizer" / "part.safetensors"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    stored = written(here)
    assert stored.ref == ref
    folder = checkpoint.verify(elsewhere, stored)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in (here / stored.path).iterdir()
    )


def test_damaged_copy_is_fetched_again_and_damage_at_the_url_is_named(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    stored = written(here)
    weights = checkpoint.verify(elsewhere, stored) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    checkpoint.verify(elsewhere, stored)
    weights.write_bytes(b"")
    (tmp_path / "far" / stored.path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointCorruptError, match=r"model\.safetensors"):
        checkpoint.verify(elsewhere, stored)


def test_other_content_under_the_same_name_is_a_conflict_across_machines(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    stored = written(here)
    assert written(elsewhere) == stored
    third = mirror.open_store(url, cache=tmp_path / "c")
    model, optimizer = trained(seed=5)
    with pytest.raises(CheckpointConflictError, match="two results"):
        checkpoint.write(third, SEGMENT, stored.ref.step, model=model, optimizers=(optimizer,))
    assert checkpoint.verify(mirror.open_store(url, cache=tmp_path / "d"), stored)


def test_checkpoint_that_was_never_sent_gives_way_to_another(tmp_path: Path, url: str) -> None:
    """A writer that was killed in between left it on this machine: nobody has seen it, and nobody can remove it."""
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    mirror.remove(elsewhere, written(here).path)
    model, optimizer = trained(seed=5)
    stored, _ = checkpoint.write(here, SEGMENT, 1, model=model, optimizers=(optimizer,))
    assert checkpoint.verify(here, stored)
    assert checkpoint.verify(mirror.open_store(url, cache=tmp_path / "c"), stored)


def test_removed_checkpoint_is_gone_everywhere_but_in_mirrors_that_have_it(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    stored = written(here)
    mirror.remove(here, stored.path)
    mirror.remove(here, stored.path)
    assert not (tmp_path / "far" / stored.path).exists()
    with pytest.raises(CheckpointMissingError):
        checkpoint.verify(elsewhere, dataclasses.replace(stored))


def test_single_files_travel_and_change_when_asked_again(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    (here / "names").mkdir()
    (here / "names" / "one").write_text("1")
    mirror.publish(here, "names/one")
    mirror.fetch(elsewhere, "names/one")
    (here / "names" / "one").write_text("2")
    mirror.publish(here, "names/one")
    mirror.fetch(elsewhere, "names/one")
    assert (elsewhere / "names" / "one").read_text() == "1"
    mirror.fetch(elsewhere, "names/one", again=True)
    assert (elsewhere / "names" / "one").read_text() == "2"
    assert mirror.names_in(elsewhere, "names") == ("one",)
    assert mirror.names_in(elsewhere, "nothing") == ()


def test_unknown_filesystem_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="install the filesystem's package"):
        mirror.open_store("nosuch://bucket/store", cache=tmp_path)


def test_url_that_cannot_be_written_is_a_store_error(tmp_path: Path, url: str) -> None:
    here = mirror.open_store(url, cache=tmp_path / "a")
    (tmp_path / "far").write_text("in the way")
    with pytest.raises(StoreError, match="cannot be"):
        written(here)
    assert json.loads((here / ".mirror.json").read_text()) == {"url": url}


def test_corpus_and_reference_losses_of_one_machine_serve_another(tmp_path: Path, url: str) -> None:
    here, elsewhere = (mirror.open_store(url, cache=tmp_path / name) for name in ("a", "b"))
    corpus = tiny_corpus(here)
    assert find_corpus(elsewhere, "tiny") == corpus
    opened = open_corpus(elsewhere, corpus, verify_digests=True)
    documents = EvaluationDocuments(corpus=corpus, count=2, length=32)
    evaluator = Evaluator(
        reference=Reference(kind="copy", digest=corpus), documents=documents, chunking=Chunking(length=8, stride=4)
    )
    windows = evaluation_windows(opened, documents)
    selected = key_tokens(evaluator, windows, corpus=opened, store=elsewhere)
    there = sorted(path.name for path in (tmp_path / "far" / "references").rglob("*.npz"))
    assert len(there) == 2
    third = mirror.open_store(url, cache=tmp_path / "c")
    again = key_tokens(evaluator, windows, corpus=open_corpus(third, corpus), store=third)
    assert all((a.key == b.key).all() for a, b in zip(selected, again, strict=True))
    assert sorted(path.name for path in (third / "references").rglob("*.npz")) == [
        name for name in there if name != "scores.npz"
    ]
