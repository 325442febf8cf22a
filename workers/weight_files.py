"""Weights of a Hugging Face folder, read block by block: one safetensors file or shards with an index.

Blocks are copied out of the files rather than mapped: mapped pages stay in the process's memory after their tensor is
done with, and a merge reads every byte of many files. Layout of a file: the length of the header as 8 bytes, the header
(JSON: name -> dtype, shape, offsets), the tensors (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from workers.errors import CheckpointCorruptError, CheckpointMissingError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_LENGTH_BYTES = 8
#: The format's names of types; the reverse names what we write.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies: its first byte in `file`, and what the bytes are."""

    file: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class WeightFolder:
    """An open folder: `tensors` by name, `config` as written. Close it, or use it as a context manager.

    Raises:
        CheckpointMissingError: if there are no safetensors weights.
        CheckpointCorruptError: if a file is unreadable, or shards and index contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files = _files(folder)
        self.tensors: Mapping[str, StoredTensor] = _tensors(folder, files)
        self.config = _json(folder / CONFIG)
        self._open: tuple[Path, int] | None = None

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of a tensor laid out flat, in their own type, in memory of their own."""
        tensor = self.tensors[name]
        block = torch.empty(end - begin, dtype=tensor.dtype)
        if begin == end:
            return block
        view = block.view(torch.uint8).numpy().data
        offset = tensor.offset + begin * tensor.dtype.itemsize
        while view:
            count = os.preadv(self._descriptor(tensor.file), [view], offset)
            if count == 0:
                raise CheckpointCorruptError(f"{tensor.file} ends within {name}")
            view, offset = view[count:], offset + count
        return block

    def _descriptor(self, file: Path) -> int:
        """One shard is open at a time: many checkpoints of many shards would exceed what a process may open."""
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = file, os.open(file, os.O_RDONLY)
        return self._open[1]


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The beginning of a safetensors file that holds these tensors one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (offset, end)}
        offset = end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _LENGTH_BYTES)
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header


def _files(folder: Path) -> list[Path]:
    whole, index = folder / WEIGHTS, folder / INDEX
    if whole.is_file() and index.is_file():
        raise CheckpointCorruptError(f"{folder} holds both {WEIGHTS} and {INDEX}: remove the one that is out of date")
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise CheckpointMissingError(f"{folder} holds no {WEIGHTS} and no {INDEX}")
    names = sorted(set(_weight_map(index).values()))
    if any(name != Path(name).name for name in names):
        raise CheckpointCorruptError(f"{index} names files outside its folder")
    files = [folder / name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointMissingError(f"{folder} lacks {', '.join(missing)}, which {INDEX} names")
    return files


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointCorruptError(f"{index} has no weight_map of tensors to files")
    return weight_map


def _tensors(folder: Path, files: list[Path]) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in files:
        entries = _header(file)
        if twice := found.keys() & entries.keys():
            raise CheckpointCorruptError(f"{folder} holds {', '.join(sorted(twice)[:5])} in two files")
        found |= entries
    index = folder / INDEX
    if index.is_file():
        placed = {name: tensor.file.name for name, tensor in found.items()}
        if misplaced := sorted({name for name, _ in placed.items() ^ _weight_map(index).items()}):
            raise CheckpointCorruptError(f"{index} and its files do not agree on {', '.join(misplaced[:5])}")
    return found


def _header(file: Path) -> dict[str, StoredTensor]:
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass  # checks the header, and that the file is as long as it says
    except SafetensorError as error:
        raise CheckpointCorruptError(f"{file} is unreadable: {error}") from error
    with file.open("rb") as content:
        length = int.from_bytes(content.read(_LENGTH_BYTES), "little")
        entries = json.loads(content.read(length))
    entries.pop("__metadata__", None)
    if unknown := sorted({entry["dtype"] for entry in entries.values()} - _DTYPES.keys()):
        raise CheckpointCorruptError(f"{file} holds tensors of type {', '.join(unknown)}, which cannot be merged")
    return {
        name: StoredTensor(
            file=file,
            offset=_LENGTH_BYTES + length + entry["data_offsets"][0],
            dtype=_DTYPES[entry["dtype"]],
            shape=tuple(entry["shape"]),
        )
        for name, entry in entries.items()
    }


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (FileNotFoundError, ValueError) as error:
        raise CheckpointCorruptError(f"{file} is missing or unreadable: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointCorruptError(f"{file} holds no JSON object")
    return content
