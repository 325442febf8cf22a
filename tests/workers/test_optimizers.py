"""Which optimizer moves which parameter, at which rate and with which decay."""

from __future__ import annotations

import copy

import torch
from torch.optim import Optimizer

from tests.workers.tiny_training import SHAPE, short_stage
from workers.model import build_model
from workers.optimizers import build_optimizers, clip_gradients, set_rate
from workers.spec import AdamW, Muon


def named_groups(model: torch.nn.Module, optimizers: tuple[Optimizer, ...]) -> dict[str, tuple[str, float, float]]:
    """Optimizer, rate and weight decay of each parameter; every one must have exactly one place."""
    places: dict[int, list[tuple[str, float, float]]] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                place = (type(optimizer).__name__, group["lr"], group["weight_decay"])
                places.setdefault(id(parameter), []).append(place)
    found = {}
    for name, parameter in model.named_parameters():
        (found[name],) = places.pop(id(parameter))
    assert not places
    return found


def test_adamw_decays_matrices_alone() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    settings = short_stage("corpus").optimizer
    for name, (_, _, decay) in named_groups(model, build_optimizers(model, settings)).items():
        assert decay == (0.0 if "norm" in name or "kernel" in name else 0.1), name


def test_muon_moves_matrices_of_layers_and_one_multiplier_moves_both_rates() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    optimizers = build_optimizers(model, Muon(rate_ratio=4.0, weight_decay=0.2, adamw=AdamW(weight_decay=0.05)))
    for rate in (0.5, 0.125):
        set_rate(optimizers, rate)
        for name, place in named_groups(model, optimizers).items():
            if "norm" in name or "kernel" in name:
                assert place == ("AdamW", rate, 0.0), name
            elif "embed" in name:
                assert place == ("AdamW", rate, 0.05), name
            else:
                assert place == ("Muon", 4 * rate, 0.2), name


def test_muons_update_is_nearly_orthogonal_and_scaled_to_adamws() -> None:
    """The step has singular values near 1, times 0.2 sqrt(max(rows, columns)) (Liu et al. 2025, arXiv 2502.16982)."""
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    optimizers = build_optimizers(model, Muon(rate_ratio=1.0, weight_decay=0.0))
    before = copy.deepcopy(model.model.layers[0].mlp.up_proj.weight)
    model(input_ids=torch.arange(30)[None]).logits.square().mean().backward()
    set_rate(optimizers, 0.01)
    for optimizer in optimizers:
        optimizer.step()
    moved = (before - model.model.layers[0].mlp.up_proj.weight).detach()
    singular = torch.linalg.svdvals(moved) / (0.01 * 0.2 * max(moved.shape) ** 0.5)
    assert singular.max() < 1.3
    assert singular.median() > 0.5


def test_clipping_returns_the_norm_before_and_leaves_the_bound() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    model(input_ids=torch.arange(30)[None]).logits.square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in gradients])).item()
    assert norm > 1.0
    assert abs(clip_gradients(model, 1.0) / norm - 1) < 1e-5
    assert abs(clip_gradients(model, 1.0) - 1.0) < 1e-4
