"""What a checkpoint holds of a model and its optimizers, and how both get it back.

Names are those of the Hugging Face model. Where parameters are shared out over processes (FSDP2), every process takes
part in `capture`, and each gets the whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

#: The count of updates of AdamW, one tensor for all parameters: every update moves every parameter.
_STEP = "step"
#: What a model with convolved projections calls itself: a loader without them refuses it instead of dropping them.
CONVOLVED_TYPE = "longlaw_convolved_llama"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointContent:
    """Weights, moments and configuration of one moment in training, on the CPU."""

    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    config: dict[str, Any]


def capture(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, copied: bool = False, kept: bool = True
) -> CheckpointContent:
    """The model's parameters and its optimizers' state by name; a tied head is its embedding and not listed.

    Args:
        copied: Copy every tensor, so that training may go on while the content is written.
        kept: False in a process that only takes part: it drops each tensor once it was gathered.
    """
    parameters = dict(model.named_parameters())
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        weight = _whole(parameter.detach(), copied and kept)
        if kept:
            weights[name] = weight
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    moment = _whole(value, copied and kept)
                    if kept:
                        moments[_STEP if key == _STEP else f"{name}.{key}"] = moment
    return CheckpointContent(weights=weights, moments=moments, config=_config(model))


def restore_optimizers(file: Path, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Gives every optimizer the state that the file holds of its parameters, each on its parameter's device."""
    with safe_open(file, framework="pt") as handle:
        step = handle.get_tensor(_STEP) if _STEP in handle.keys() else None  # noqa: SIM118 - the handle is no dict
        keys: dict[str, list[str]] = {}
        for entry in handle.keys():  # noqa: SIM118
            name, _, key = entry.rpartition(".")
            keys.setdefault(name, []).append(key)
        for name, parameter in model.named_parameters():
            for optimizer in optimizers:
                if not _holds(optimizer, parameter):
                    continue
                state: dict[str, Any] = {
                    key: _placed(handle.get_tensor(f"{name}.{key}"), parameter) for key in keys.get(name, ())
                }
                if step is not None and isinstance(optimizer, torch.optim.AdamW):
                    state[_STEP] = step.clone().to(parameter.device)
                optimizer.state[parameter] = state


def save_content(content: CheckpointContent, *, weights: Path, moments: Path) -> None:
    """Writes both files of tensors."""
    save_file(content.weights, weights, {"format": "pt"})
    save_file(content.moments, moments)


def read_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a safetensors file, one at a time, on the CPU."""
    with safe_open(file, framework="pt") as handle:
        for name in handle.keys():  # noqa: SIM118
            yield name, handle.get_tensor(name)


def _config(model: nn.Module) -> dict[str, Any]:
    """The configuration as Hugging Face reads it. The library's version does not change what the weights are."""
    settings: Any = model.config
    config: dict[str, Any] = settings.to_diff_dict()
    config.pop("transformers_version", None)
    if getattr(settings, "qk_conv_kernel", 0):
        config["model_type"] = CONVOLVED_TYPE
    else:
        config["architectures"] = [type(model).__name__]
    return config


def _whole(tensor: Tensor, copied: bool) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    there = whole.cpu()
    return there.clone() if copied and there.data_ptr() == tensor.data_ptr() else there


def _placed(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The tensor where its parameter lies, shared out as that is."""
    if isinstance(parameter, DTensor):
        return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)
    return tensor.to(parameter.device)


def _holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return any(parameter is held for group in optimizer.param_groups for held in group["params"])
