"""Merged weights as a Hugging Face folder, written block by block: no tensor and no shard is ever in memory whole."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from workers.errors import MergeError, StoreFullError
from workers.merge import MergePlan, merged_tensors, plan_merge
from workers.spec import ObservationRule
from workers.weight_files import CONFIG, INDEX, WEIGHTS, safetensors_header

SHARD_BYTES = 5_000_000_000

#: What a model needs beside its weights, where the newest checkpoint has it.
_COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
)

#: Told the name of a tensor that is finished, and how many of all bytes to write are written.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedFolder:
    """What was written. `averaged` and `copied` together name all tensors."""

    folder: Path
    files: tuple[str, ...]
    size_bytes: int
    averaged: tuple[str, ...]
    copied: tuple[str, ...]


def write_merged(
    sources: Sequence[Path],
    rule: ObservationRule,
    folder: Path,
    *,
    steps: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_progress: OnProgress | None = None,
) -> MergedFolder:
    """Writes the model that `rule` makes of `sources`; the folder appears under its name when it is whole.

    Config and tokenizer are the newest checkpoint's.

    Args:
        folder: Must not exist yet, or be empty.
        dtype: Of the floating-point tensors; None keeps the type that each has in the newest checkpoint.
        shard_bytes: The most tensor data in one file; a larger tensor has a file of its own.

    Raises:
        MergeError: as `workers.merge.merge`, or if the folder is there already.
        StoreFullError: if there is no space; what was written is gone again.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MergeError(f"{folder} exists already: merged weights go to a new folder")
    plan = plan_merge(sources, rule, steps=steps)
    files = _shards(plan, dtype, shard_bytes)
    building = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building.mkdir()
        _write_companions(plan.sources[-1], building, dtype)
        size_bytes = _write_shards(building, plan, files, on_progress)
        _fsync(building)
        building.rename(folder)
        _fsync(folder.parent)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFullError(f"no space left for {folder}") from error
        raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return MergedFolder(
        folder=folder, files=tuple(files), size_bytes=size_bytes, averaged=plan.averaged, copied=plan.copied
    )


_Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _shards(plan: MergePlan, dtype: torch.dtype | None, shard_bytes: int) -> dict[str, _Layout]:
    """Which tensors, in which type, go to which file; tensors by name, filling one file after the other."""
    shards: list[_Layout] = [{}]
    filled = 0
    for name in sorted(plan.tensors):
        stored = plan.tensors[name]
        written = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
        size = stored.numel * written.itemsize
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = written, stored.shape
        filled += size
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {
        f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, start=1)
    }


def _write_shards(folder: Path, plan: MergePlan, files: dict[str, _Layout], on_progress: OnProgress | None) -> int:
    total = sum(math.prod(shape) * dtype.itemsize for shard in files.values() for dtype, shape in shard.values())
    written = 0
    tensors = merged_tensors(plan)
    for file, shard in files.items():
        with (folder / file).open("wb") as content:
            content.write(safetensors_header(shard))
            for name, blocks in _taken(tensors, len(shard)):
                written += _write_blocks(content, blocks, shard[name][0])
                if on_progress is not None:
                    on_progress(name, written, total)
            content.flush()
            os.fsync(content.fileno())
    if len(files) > 1:
        weight_map = {name: file for file, shard in files.items() for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")
    return total


def _taken(tensors: Iterator[tuple[str, Iterator[Tensor]]], count: int) -> Iterator[tuple[str, Iterator[Tensor]]]:
    return (next(tensors) for _ in range(count))


def _write_blocks(content: BinaryIO, blocks: Iterator[Tensor], dtype: torch.dtype) -> int:
    size = 0
    for block in blocks:
        if block.dtype == torch.float64:
            block = block.float()  # what an evaluation of the same merge sees
        size += content.write(block.to(dtype).view(torch.uint8).numpy().data)
    return size


def _write_companions(source: Path, folder: Path, dtype: torch.dtype | None) -> None:
    config = json.loads((source / CONFIG).read_bytes())
    if dtype is not None:
        config.pop("torch_dtype", None)  # the name that `dtype` had before transformers 5
        config["dtype"] = str(dtype).removeprefix("torch.")
    _write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
                _fsync(folder / file.name)


def _write_text(file: Path, text: str) -> None:
    file.write_text(text)
    _fsync(file)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
