"""Moments of an optimizer whose parameters are shared out: every process saves and restores its own part.

`torch.distributed.checkpoint` writes one safetensors file for each process, with the place of each part in its
metadata, so that any number of processes can go on from them, one included.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.optim import Optimizer

from workers.errors import StoreError

FOLDER = "optimizer"
#: AdamW's count of updates, one for all parameters: it has no parts.
_STEP = "step"


class MomentShards:
    """Saves beside training. All processes of the group make one, at the same time: it has a group of its own, so that
    what saving tells the others is never taken for what training does. A context manager; on leaving it waits."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo")
        self._begun: Future[Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._wait()

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], folder: Path) -> Future[Any]:
        """Copies this process's part and begins to write it below `folder`; the first process's future ends when all
        parts are written."""
        self._wait()
        writer = HuggingFaceStorageWriter(str(folder / FOLDER), save_distributed=True)
        begun = async_save(_state(model, optimizers), storage_writer=writer, process_group=self._group)
        assert isinstance(begun, Future)
        self._begun = begun
        return begun

    def _wait(self) -> None:
        """Until this process, too, has heard that all parts of the save before are written: it may be behind the first,
        and what two saves tell the others must not mix."""
        if self._begun is not None:
            wait((self._begun,))


def complete(folder: Path, written: Future[Any]) -> None:
    """Waits until every process has written its part, then writes the metadata of each in order of its keys:
    safetensors has them in any, and equal training must give equal bytes.

    Raises:
        StoreError: if parts are not there, because another process wrote them elsewhere.
        Exception: what writing raised in the first process that could not.
    """
    try:
        metadata = written.result()
    except CheckpointException as error:
        first, _ = error.failures[min(error.failures)]
        raise first from error
    missing = sum(one.size.numel() for one in metadata.state_dict_metadata.values())
    for file in (folder / FOLDER).iterdir():
        with file.open("r+b") as part:
            size = int.from_bytes(part.read(8), "little")
            header = json.loads(part.read(size))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            part.seek(8)
            part.write(text.ljust(size))
        missing -= sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    if missing:
        raise StoreError(
            f"{missing} of the optimizer's moments are not in {folder / FOLDER}: processes that share them out must see"
            " one folder, so run them on one machine or put the store on a folder that all machines mount"
        )


def are_sharded(folder: Path) -> bool:
    """Whether a checkpoint's moments lie in parts."""
    return (folder / FOLDER).is_dir()


def step_count(optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """AdamW's count of updates, which the parts leave out; nothing where there is none."""
    counts = (state[_STEP] for optimizer in optimizers for state in optimizer.state.values() if _STEP in state)
    first = next(counts, None)
    return {} if first is None else {_STEP: first.detach().cpu().clone()}


def restore_moments(folder: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, step: Tensor | None) -> None:
    """Gives every optimizer the state that the parts hold of its parameters, shared out as those are now."""
    keys: dict[str, list[str]] = {}
    for file in sorted((folder / FOLDER).glob("*.safetensors")):
        with safe_open(file, framework="pt") as handle:
            for entry in handle.keys():  # noqa: SIM118 - the handle is no dict
                name, _, key = entry.rpartition(".")
                if key not in keys.setdefault(name, []):
                    keys[name].append(key)
    wanted: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for key in keys.get(name, ()):
            wanted[f"{name}.{key}"] = torch.zeros_like(parameter.detach())
    with warnings.catch_warnings():  # it warns of a single process, which is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(
            wanted,
            storage_reader=HuggingFaceStorageReader(str(folder / FOLDER)),
            no_dist=not dist.is_initialized(),
        )
    for optimizer in optimizers:
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in model.named_parameters():
            if id(parameter) in held:
                state: dict[str, Any] = {key: wanted[f"{name}.{key}"] for key in keys.get(name, ())}
                if step is not None and isinstance(optimizer, torch.optim.AdamW):
                    state[_STEP] = step.clone().to(parameter.device)
                optimizer.state[parameter] = state


def _state(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if key != _STEP and isinstance(value, Tensor):
                    state[f"{name}.{key}"] = value
    return state
