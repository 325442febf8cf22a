"""Checkpoint folders of a few numbers, for the tests of merging."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from workers.merge import merge
from workers.spec import ObservationRule

torch.set_num_threads(1)

Tensors = Mapping[str, Tensor]


def folder_of(
    path: Path, tensors: Tensors, *, config: Mapping[str, Any] | None = None, step: int | None = None
) -> Path:
    """A checkpoint of these tensors. `config` is its config.json, `step` what its state.json tells."""
    path.mkdir(parents=True)
    save_file(dict(tensors), path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config or {"rope_parameters": {"rope_theta": 1e4}}))
    if step is not None:
        (path / "state.json").write_text(json.dumps({"step": step}))
    return path


def sharded_folder_of(path: Path, shards: Sequence[Tensors]) -> Path:
    """The same with a file for each of `shards` and the index that names them."""
    path.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(dict(tensors), path / name)
        weight_map |= dict.fromkeys(tensors, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({"rope_parameters": {"rope_theta": 1e4}}))
    return path


def folders(root: Path, values: Sequence[Tensors], *, steps: Sequence[int] | None = None) -> list[Path]:
    return [
        folder_of(root / str(index), tensors, step=steps[index] if steps else None)
        for index, tensors in enumerate(values)
    ]


def merged(
    root: Path, values: Sequence[Sequence[float] | Tensor], rule: ObservationRule, *, steps: Sequence[int] | None = None
) -> Tensor:
    """What a rule makes of checkpoints that hold one tensor each, oldest first, called "w"."""
    tensors = [{"w": value if isinstance(value, Tensor) else torch.tensor(value)} for value in values]
    (pair,) = merge(folders(root, tensors, steps=steps), rule)
    assert pair[0] == "w"
    return pair[1]
