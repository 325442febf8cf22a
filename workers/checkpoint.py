"""Checkpoints in the store: written whole or not at all, named by the digest of their content.

    <store>/checkpoints/<segment id>/<step, 12 digits>/
        model.safetensors      weights under their Hugging Face names; a tied head is not stored twice
        config.json            the Hugging Face config of the model
        optimizer.safetensors  <weight>.exp_avg and <weight>.exp_avg_sq of AdamW, `step`, its count of updates, and
                           <weight>.momentum_buffer of Muon
        optimizer/             all of those but `step` where processes share them out: a file of parts of each
    state.json             segment, step, tokens, the next sequence and the key of all random choices
        manifest.json          size and SHA-256 of each file above; its own SHA-256 is the checkpoint's digest

Equal training gives equal bytes: nothing in a checkpoint tells when, where or by which attempt it was written. Random
choices of training are counter-based (`workers.order`), so a seed and a position are their whole state.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from workers import checkpoint_content, mirror, sharded_moments
from workers.checkpoint_content import CheckpointContent, capture, read_tensors, save_content
from workers.errors import (
    CheckpointConflictError,
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMissingError,
    StoreFullError,
)
from workers.leftovers import CHECKPOINTS, UNFINISHED
from workers.mirror import MANIFEST
from workers.spec import CheckpointRef, Segment, StoredCheckpoint, canonical_json
from workers.weight_files import CONFIG, WEIGHTS

FORMAT = 1
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"

_STEP_DIGITS = 12
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """What state.json says: which checkpoint this is and where its stage goes on."""

    ref: CheckpointRef
    stage_tokens: int
    next_sequence: int


def relative_path(ref: CheckpointRef) -> str:
    """Where a checkpoint lies below the store's root."""
    return f"{CHECKPOINTS}/{ref.segment}/{ref.step:0{_STEP_DIGITS}d}"


def list_checkpoints(store: Path, segment: str) -> tuple[CheckpointRef, ...]:
    """Complete checkpoints of a segment, by rising step. Unfinished ones are no checkpoints and are not listed."""
    folder = store / CHECKPOINTS / segment
    if not folder.is_dir():
        return ()
    steps = sorted(
        int(path.name)
        for path in folder.iterdir()
        if len(path.name) == _STEP_DIGITS and path.name.isdecimal() and (path / MANIFEST).is_file()
    )
    return tuple(CheckpointRef(segment=segment, step=step) for step in steps)


def find(store: Path, ref: CheckpointRef) -> StoredCheckpoint:
    """The stored checkpoint with its digest, as its manifest names it; `verify` tells whether the files agree.

    Raises:
        CheckpointMissingError: if there is none.
    """
    path = relative_path(ref)
    mirror.fetch(store, path)
    return StoredCheckpoint(ref=ref, path=path, digest=hashlib.sha256(_manifest(store / path)).hexdigest())


def verify(store: Path, stored: StoredCheckpoint) -> Path:
    """The folder of a checkpoint, after every byte of it was compared with the digest.

    Raises:
        CheckpointMissingError: if it is not there.
        CheckpointCorruptError: if it is not what the digest says.
    """
    folder = store / stored.path
    mirror.fetch(store, stored.path)
    try:
        digest = _digest_or_refetch(store, stored)
        if digest != stored.digest:
            raise CheckpointCorruptError(f"{folder} has digest {digest}, {stored.digest} was expected")
        if read_state(folder).ref != stored.ref:
            raise CheckpointCorruptError(f"{folder} holds {read_state(folder).ref}, {stored.ref} was expected")
    except CheckpointError as error:
        error.ref = stored.ref
        raise
    return folder


def read_state(folder: Path) -> CheckpointState:
    """What state.json of a verified folder says."""
    state = json.loads((folder / STATE).read_bytes())
    ref = CheckpointRef(segment=state["segment_id"], step=state["step"])
    return CheckpointState(ref=ref, stage_tokens=state["stage_tokens"], next_sequence=state["next_sequence"])


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of a verified folder, one tensor at a time, on the CPU."""
    return read_tensors(folder / WEIGHTS)


def restore_optimizers(folder: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Gives the optimizers the state that a verified folder holds of their parameters."""
    if sharded_moments.are_sharded(folder):
        step = dict(read_tensors(folder / OPTIMIZER)).get("step")
        sharded_moments.restore_moments(folder, model, optimizers, step=step)
        return
    checkpoint_content.restore_optimizers(folder / OPTIMIZER, model, optimizers)


def write(
    store: Path, segment: Segment, step: int, *, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> tuple[StoredCheckpoint, int]:
    """Saves the model as it is now; see `write_content`."""
    return write_content(store, segment, step, capture(model, optimizers))


def write_content(store: Path, segment: Segment, step: int, content: CheckpointContent) -> tuple[StoredCheckpoint, int]:
    """Saves a checkpoint after `step` updates of a segment; returns it with its size in bytes once it is durable.

    A valid checkpoint with the same content is left as it is; a damaged one is replaced.

    Raises:
        StoreFullError: if the store has no space; what was written is gone again.
        StoreError: if the store lies at a URL that cannot be written.
        CheckpointConflictError: if a valid checkpoint with another content is there.
    """
    return finish(store, segment, step, begin(store, segment, step), content)


def begin(store: Path, segment: Segment, step: int) -> Path:
    """An empty folder for a checkpoint in the making, which `finish` turns into one."""
    home = store / relative_path(CheckpointRef(segment=segment.id, step=step))
    building = home.with_name(f".{home.name}-{uuid.uuid4().hex}{UNFINISHED}")
    try:
        _make_durable_folder(home.parent)
        building.mkdir()
    except OSError as error:
        if _is_full(error):
            raise StoreFullError(f"no space left in {store} for step {step} of segment {segment.id}") from error
        raise
    return building


def finish(
    store: Path,
    segment: Segment,
    step: int,
    building: Path,
    content: CheckpointContent,
    *,
    parts: Future[Any] | None = None,
) -> tuple[StoredCheckpoint, int]:
    """As `write_content`, in a folder that `begin` made, and where all processes write `parts` of the moments."""
    ref = CheckpointRef(segment=segment.id, step=step)
    try:
        if parts is not None:
            sharded_moments.complete(building, parts)
        _write_files(building, segment, step, content)
        digest = _seal(building)
        size_bytes = sum(file.stat().st_size for file in building.rglob("*") if file.is_file())
        _settle(store, building, ref, digest)
        _publish(store, relative_path(ref), digest)
    except (OSError, SafetensorError) as error:
        if _is_full(error):
            raise StoreFullError(f"no space left in {store} for step {step} of segment {segment.id}") from error
        number = _os_error(error)
        if isinstance(error, SafetensorError) and number is not None:
            raise OSError(number, str(error)) from error
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return StoredCheckpoint(ref=ref, path=relative_path(ref), digest=digest), size_bytes


def _write_files(folder: Path, segment: Segment, step: int, content: CheckpointContent) -> None:
    save_content(content, weights=folder / WEIGHTS, moments=folder / OPTIMIZER)
    (folder / CONFIG).write_text(json.dumps(content.config, indent=2, sort_keys=True) + "\n")
    state = {
        "format": FORMAT,
        "segment": segment,
        "segment_id": segment.id,
        "step": step,
        "stage_tokens": segment.stage_tokens(step),
        "next_sequence": segment.first_sequence(step),
        "random": {"generator": "philox", "key": segment.seed},
    }
    (folder / STATE).write_text(canonical_json(state))


def _seal(folder: Path) -> str:
    """Writes the manifest, forces everything to disk, and returns the digest."""
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    entries = {name: {"sha256": _sha256(folder / name), "size_bytes": (folder / name).stat().st_size} for name in names}
    manifest = canonical_json({"format": FORMAT, "files": entries}).encode()
    (folder / MANIFEST).write_bytes(manifest)
    for name in (*names, MANIFEST):
        _fsync(folder / name)
    for inner in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        _fsync(inner)
    return hashlib.sha256(manifest).hexdigest()


def _settle(store: Path, building: Path, ref: CheckpointRef, digest: str) -> None:
    """Renames `building` to its home. Another attempt may be doing the same, so what is there is judged."""
    home = store / relative_path(ref)
    while True:
        try:
            building.rename(home)
            break
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        existing = _standing(store, relative_path(ref))
        if existing == digest:
            break
        if existing is not None:
            raise CheckpointConflictError(_conflict(home, existing, digest))
        aside = building.with_name(f".{home.name}-{uuid.uuid4().hex}{UNFINISHED}")
        home.rename(aside)
        shutil.rmtree(aside)
    _fsync(home.parent)


def _standing(store: Path, relative: str) -> str | None:
    """The digest of a checkpoint that may not be replaced; None of a damaged one, and of a mirror's that was never sent
    or is at the URL no more: nobody else has seen it."""
    try:
        digest = _digest(store / relative)
    except (CheckpointCorruptError, CheckpointMissingError):
        return None
    if not mirror.is_mirror(store):
        return digest
    there = mirror.published_manifest(store, relative)
    return digest if there is not None and hashlib.sha256(there).hexdigest() == digest else None


def _digest(folder: Path) -> str:
    manifest = _manifest(folder)
    try:
        entries = json.loads(manifest)["files"]
        for name, entry in entries.items():
            file = folder / name
            if file.stat().st_size != entry["size_bytes"] or _sha256(file) != entry["sha256"]:
                raise CheckpointCorruptError(f"{file} is not what the manifest says")
    except (ValueError, KeyError, TypeError, AttributeError, FileNotFoundError) as error:
        raise CheckpointCorruptError(f"{folder} is damaged: {error}") from error
    return hashlib.sha256(manifest).hexdigest()


def _digest_or_refetch(store: Path, stored: StoredCheckpoint) -> str:
    """A mirror's copy that is damaged, or that another attempt left here, is fetched once more."""
    folder = store / stored.path
    try:
        if (digest := _digest(folder)) == stored.digest or not mirror.is_mirror(store):
            return digest
    except CheckpointCorruptError:
        if not mirror.is_mirror(store):
            raise
    mirror.fetch(store, stored.path, again=True)
    return _digest(folder)


def _publish(store: Path, relative: str, digest: str) -> None:
    """Sends a checkpoint to where the store lies, unless it is there; another content under its name is a conflict."""
    there = mirror.published_manifest(store, relative)
    if there is None:
        mirror.publish(store, relative)
    elif (found := hashlib.sha256(there).hexdigest()) != digest:
        raise CheckpointConflictError(_conflict(relative, found, digest))


def _conflict(home: object, existing: str, digest: str) -> str:
    return (
        f"{home} is a valid checkpoint with digest {existing}, but this attempt arrived at {digest}: the same"
        " training gave two results (another number of processes or threads, device or library version?)"
    )


def _manifest(folder: Path) -> bytes:
    try:
        return (folder / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointMissingError(f"no complete checkpoint in {folder}") from None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_durable_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_durable_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _fsync(folder.parent)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_full(error: Exception) -> bool:
    return _os_error(error) in _NO_SPACE


def _os_error(error: Exception) -> int | None:
    """The operating system's number of an error. That of safetensors is not Python's: it has it in words alone."""
    if isinstance(error, OSError):
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error))
    return None if found is None else int(found[1])
