"""Optimizers of a training stage, as a tuple: each steps its own parameters, all at rates of one schedule."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from workers.errors import SegmentRunError
from workers.spec import AdamW, Muon

_RATE_RATIO = "rate_ratio"


def build_optimizers(model: PreTrainedModel, settings: AdamW | Muon) -> tuple[Optimizer, ...]:
    """AdamW for everything; or Muon for the matrices inside the layers and AdamW for embeddings, head, norms and
    convolutions.

    Weight decay touches matrices and embeddings alone.
    """
    parameters = list(model.parameters())
    if isinstance(settings, AdamW):
        return (_adamw(parameters, settings),)
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    matrices = [p for p in parameters if p.ndim == 2 and id(p) not in outside]
    chosen = {id(p) for p in matrices}
    muon = torch.optim.Muon(
        [{"params": matrices, _RATE_RATIO: settings.rate_ratio}],
        weight_decay=settings.weight_decay,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        ns_steps=settings.newton_schulz_steps,
        adjust_lr_fn=settings.scaling,
    )
    return muon, _adamw([p for p in parameters if id(p) not in chosen], settings.adamw)


def check_moments(optimizers: Sequence[Optimizer]) -> None:
    """Sees whether restored optimizers have what they need for every parameter; before a first update that is nothing.

    Raises:
        SegmentRunError: if another kind of optimizer made the checkpoint.
    """
    if not any(state for optimizer in optimizers for state in optimizer.state.values()):
        return
    for optimizer in optimizers:
        wanted = "momentum_buffer" if isinstance(optimizer, torch.optim.Muon) else "exp_avg"
        for group in optimizer.param_groups:
            if any(wanted not in optimizer.state[parameter] for parameter in group["params"]):
                raise SegmentRunError(
                    "the start was trained by another optimizer, whose moments cannot be carried on: ask for"
                    " optimizer_state fresh, or for the same optimizer"
                )


def set_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Gives every group the schedule's rate, times its own ratio where it has one."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get(_RATE_RATIO, 1.0)


def clip_gradients(model: PreTrainedModel, norm: float) -> float:
    """Scales all gradients down together where their norm exceeds `norm`; returns what it was."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = torch.nn.utils.get_total_norm(gradients)
    if isinstance(found, DTensor):
        found = found.full_tensor()
    value = float(found)
    if not value <= norm:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), norm, found)
    return value


def _adamw(parameters: Sequence[torch.nn.Parameter], settings: AdamW) -> Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
