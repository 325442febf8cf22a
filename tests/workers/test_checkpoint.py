"""Checkpoints: complete or absent, named by content, numbered, verified."""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.workers.child_processes import NOT_PERMITTED, fill_small_store, fork_server, write_for_ever
from tests.workers.tiny_training import SHAPE, segment_of, short_stage, trained
from workers import checkpoint
from workers.checkpoint_content import CONVOLVED_TYPE, capture
from workers.errors import CheckpointConflictError, CheckpointCorruptError, CheckpointMissingError
from workers.leftovers import remove_unfinished
from workers.model import built_rope_base, load_weights
from workers.spec import CheckpointRef, ModelShape, Segment, StoredCheckpoint

SEGMENT = segment_of("short_trunk", short_stage("corpus"))


def written(store: Path, step: int = 1, *, segment: Segment = SEGMENT, seed: int = 0) -> StoredCheckpoint:
    assert isinstance(segment.shape, ModelShape)
    model, optimizer = trained(segment.shape, seed=seed)
    stored, size_bytes = checkpoint.write(store, segment, step, model=model, optimizers=(optimizer,))
    assert size_bytes == sum(file.stat().st_size for file in (store / stored.path).iterdir())
    return stored


def test_layout_is_the_documented_one(tmp_path: Path) -> None:
    stored = written(tmp_path, 7)
    assert stored.path == f"checkpoints/{SEGMENT.id}/000000000007"
    assert {file.name for file in (tmp_path / stored.path).iterdir()} == {
        "model.safetensors",
        "config.json",
        "optimizer.safetensors",
        "state.json",
        "manifest.json",
    }
    state = checkpoint.read_state(tmp_path / stored.path)
    assert state.ref == stored.ref == CheckpointRef(segment=SEGMENT.id, step=7)
    assert (state.stage_tokens, state.next_sequence) == (7 * 64, 14)
    assert [path.name for path in (tmp_path / stored.path).parent.iterdir()] == ["000000000007"]


def test_equal_training_gives_equal_digests_wherever_and_whenever(tmp_path: Path) -> None:
    first = written(tmp_path / "here")
    time.sleep(0.02)
    assert written(tmp_path / "some" / "where" / "else") == first
    assert written(tmp_path / "here", seed=1, step=2).digest != first.digest
    assert written(tmp_path / "here", step=3).digest != first.digest


def test_read_weights_and_moments_equal_the_written_ones(tmp_path: Path) -> None:
    model, optimizer = trained()
    stored, _ = checkpoint.write(tmp_path, SEGMENT, 1, model=model, optimizers=(optimizer,))
    folder = checkpoint.verify(tmp_path, stored)
    other, other_optimizer = trained(seed=9)
    load_weights(other, checkpoint.read_weights(folder))
    checkpoint.restore_optimizers(folder, other, (other_optimizer,))
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    for mine, theirs in pairs:
        assert torch.equal(mine, theirs)
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, other_optimizer.state[theirs][name]), name


def test_checkpoint_of_a_convolved_model_is_refused_where_its_convolutions_would_be_lost(tmp_path: Path) -> None:
    model, optimizer = trained()
    stored, _ = checkpoint.write(tmp_path, SEGMENT, 1, model=model, optimizers=(optimizer,))
    with pytest.raises(ValueError, match=CONVOLVED_TYPE):
        AutoModelForCausalLM.from_pretrained(tmp_path / stored.path)


def test_checkpoint_of_a_plain_model_opens_in_hugging_face_with_its_tied_head(tmp_path: Path) -> None:
    """B41: the head, absent from the file, follows the embedding and nothing is newly initialised."""
    shape = dataclasses.replace(SHAPE, qk_conv_kernel=0)
    segment = dataclasses.replace(SEGMENT, shape=shape)
    model, optimizer = trained(shape)
    stored, _ = checkpoint.write(tmp_path, segment, 1, model=model, optimizers=(optimizer,))
    opened, report = AutoModelForCausalLM.from_pretrained(tmp_path / stored.path, output_loading_info=True)
    assert isinstance(opened, LlamaForCausalLM)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert opened.lm_head.weight.data_ptr() == opened.model.embed_tokens.weight.data_ptr()
    assert built_rope_base(opened) == pytest.approx(1e4, rel=1e-5)
    ids = torch.arange(30).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(opened(input_ids=ids).logits, model(input_ids=ids).logits)


def test_list_is_numeric_and_complete(tmp_path: Path) -> None:
    """B27: 10,000 is newer than 9,900."""
    model, optimizer = trained()
    for step in (10_000, 9_900, 900, 100_000):
        checkpoint.write(tmp_path, SEGMENT, step, model=model, optimizers=(optimizer,))
    refs = checkpoint.list_checkpoints(tmp_path, SEGMENT.id)
    assert [ref.step for ref in refs] == [900, 9_900, 10_000, 100_000]
    assert checkpoint.list_checkpoints(tmp_path, "0" * 32) == ()


def test_leftovers_are_neither_listed_nor_found(tmp_path: Path) -> None:
    """B25: what a killed writer leaves is no checkpoint."""
    stored = written(tmp_path)
    home = tmp_path / stored.path
    leftover = home.with_name(".000000000002-0123.unfinished")
    shutil.copytree(home, leftover)
    no_manifest = home.with_name("000000000003")
    shutil.copytree(home, no_manifest)
    (no_manifest / "manifest.json").unlink()
    assert checkpoint.list_checkpoints(tmp_path, SEGMENT.id) == (stored.ref,)
    with pytest.raises(CheckpointMissingError):
        checkpoint.find(tmp_path, CheckpointRef(segment=SEGMENT.id, step=3))
    remove_unfinished(tmp_path, SEGMENT.id)
    assert not leftover.exists()
    assert checkpoint.find(tmp_path, stored.ref) == stored


def test_writer_that_comes_back_after_its_folder_was_cleared_away_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = trained()
    building = checkpoint.begin(tmp_path, SEGMENT, 1)
    remove_unfinished(tmp_path, SEGMENT.id)
    with pytest.raises(OSError, match="No such file"):
        checkpoint.finish(tmp_path, SEGMENT, 1, building, capture(model, (optimizer,)))
    assert list(building.parent.iterdir()) == []


@pytest.mark.parametrize(
    "name", ["model.safetensors", "optimizer.safetensors", "config.json", "state.json", "manifest.json"]
)
def test_every_damaged_file_is_noticed(tmp_path: Path, name: str) -> None:
    stored = written(tmp_path)
    file = tmp_path / stored.path / name
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damage in (content[:middle], flipped, b""):
        file.write_bytes(damage)
        with pytest.raises(CheckpointCorruptError):
            checkpoint.verify(tmp_path, stored)
    file.unlink()
    with pytest.raises((CheckpointCorruptError, CheckpointMissingError)):
        checkpoint.verify(tmp_path, stored)
    file.write_bytes(content)
    checkpoint.verify(tmp_path, stored)


def test_digest_of_another_checkpoint_is_refused(tmp_path: Path) -> None:
    first, second = written(tmp_path, 1), written(tmp_path, 2)
    with pytest.raises(CheckpointCorruptError):
        checkpoint.verify(tmp_path, dataclasses.replace(first, digest=second.digest))
    with pytest.raises(CheckpointCorruptError, match="was expected"):
        checkpoint.verify(tmp_path, dataclasses.replace(second, ref=first.ref))
    with pytest.raises(CheckpointMissingError):
        checkpoint.verify(tmp_path, dataclasses.replace(first, path="checkpoints/nowhere"))


def test_same_content_again_leaves_the_files_alone(tmp_path: Path) -> None:
    stored = written(tmp_path)
    before = (tmp_path / stored.path / "model.safetensors").stat().st_ino
    assert written(tmp_path) == stored
    assert (tmp_path / stored.path / "model.safetensors").stat().st_ino == before
    assert [path.name for path in (tmp_path / stored.path).parent.iterdir()] == ["000000000001"]


def test_valid_checkpoint_with_another_content_is_never_overwritten(tmp_path: Path) -> None:
    stored = written(tmp_path)
    with pytest.raises(CheckpointConflictError, match="two results"):
        written(tmp_path, seed=1)
    checkpoint.verify(tmp_path, stored)
    assert [path.name for path in (tmp_path / stored.path).parent.iterdir()] == ["000000000001"]


@pytest.mark.parametrize("damaged", ["model.safetensors", "manifest.json"])
def test_damaged_checkpoint_is_replaced(tmp_path: Path, damaged: str) -> None:
    stored = written(tmp_path)
    (tmp_path / stored.path / damaged).write_bytes(b"{}")
    assert written(tmp_path) == stored
    checkpoint.verify(tmp_path, stored)
    assert [path.name for path in (tmp_path / stored.path).parent.iterdir()] == ["000000000001"]


def test_full_store_leaves_no_partial_checkpoint_and_works_again_with_space(tmp_path: Path) -> None:
    """B29: on a real file system of 400 kB; what is checked lies in `fill_small_store`."""
    child = fork_server().Process(target=fill_small_store, args=(tmp_path, SEGMENT))
    child.start()
    child.join()
    if child.exitcode == NOT_PERMITTED:
        pytest.skip("mounting a small file system needs unprivileged user namespaces")
    assert child.exitcode == 0


def test_killed_writers_leave_only_whole_checkpoints(tmp_path: Path) -> None:
    """B25: SIGKILL at random moments of a save; whatever is listed afterwards is valid."""
    draw = random.Random(0)
    unfinished = 0
    for number in range(8):
        store = tmp_path / str(number)
        writer = fork_server().Process(target=write_for_ever, args=(store, SEGMENT))
        writer.start()
        folder = store / "checkpoints" / SEGMENT.id
        while not (folder / "000000000001").is_dir():
            assert writer.is_alive()
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        writer.kill()
        writer.join()
        refs = checkpoint.list_checkpoints(store, SEGMENT.id)
        assert [ref.step for ref in refs] == list(range(1, len(refs) + 1))
        for ref in refs:
            checkpoint.verify(store, checkpoint.find(store, ref))
        unfinished += sum(path.name.startswith(".") for path in folder.iterdir())
    assert unfinished, "no kill fell into a save: the test proved nothing"
