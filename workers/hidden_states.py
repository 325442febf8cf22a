"""The last hidden states of a causal language model, by the shortest way that computes the same numbers.

Hugging Face's forward pass of a Llama is written for every use. In training on the CPU much of its time goes into
bookkeeping and into fresh memory for intermediate results: norms, rotations and the gated unit are written out with
their gradients here, in place where that can be, and attention is called directly. A graph serves one backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import LlamaForCausalLM, PreTrainedModel

from workers.attention import packed_hidden_states


def last_hidden_states(model: PreTrainedModel, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
    """Hidden states before the head, (sequences, length, width).

    Args:
        inputs: Token ids, int64 of shape (sequences, length).
        positions: Of the same shape, where documents are kept apart; None where each sequence is one text.
    """
    if positions is not None:
        return packed_hidden_states(model, inputs, positions)
    if _can_be_direct(model, inputs):
        return _direct(model, inputs)
    states: Tensor = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
    return states


def _can_be_direct(model: PreTrainedModel, inputs: Tensor) -> bool:
    """Float32 Llamas on the CPU, unless their layers must be called as modules: shards, layers computed again."""
    return (
        type(model) is LlamaForCausalLM
        and inputs.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and model.config.hidden_act == "silu"
        and not (model.training and model.config.attention_dropout)
        and not model.model.gradient_checkpointing
        and not isinstance(model.model.layers[0], FSDPModule)
    )


def _direct(model: LlamaForCausalLM, inputs: Tensor) -> Tensor:
    decoder = model.model
    states: Tensor = decoder.embed_tokens(inputs)
    cos, sin = decoder.rotary_emb(states, torch.arange(inputs.shape[1])[None])
    cos, sin = cos[0, :, None], sin[0, :, None]
    sin = torch.cat([-sin[..., : sin.shape[-1] // 2], sin[..., sin.shape[-1] // 2 :]], dim=-1)
    for layer in decoder.layers:
        states = _layer(layer, states, cos, sin)
    return _norm(decoder.norm, states)


def _layer(layer: Any, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    attention, feed_forward = layer.self_attn, layer.mlp
    normed = _norm(layer.input_layernorm, states)
    heads = (*states.shape[:2], -1, attention.head_dim)
    q = _rotate(attention.q_proj(normed).view(heads), cos, sin).transpose(1, 2)
    k = _rotate(attention.k_proj(normed).view(heads), cos, sin).transpose(1, 2)
    v = attention.v_proj(normed).view(heads).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    states = attention.o_proj(mixed.transpose(1, 2).flatten(2)).add_(states)
    normed = _norm(layer.post_attention_layernorm, states)
    gated = _GatedUnit.apply(feed_forward.gate_proj(normed), feed_forward.up_proj(normed))  # type: ignore[no-untyped-call]
    moved: Tensor = feed_forward.down_proj(gated).add_(states)
    return moved


def _norm(norm: Any, states: Tensor) -> Tensor:
    normed: Tensor = _RmsNorm.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return normed


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotated: Tensor = _Rotation.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _RmsNorm(torch.autograd.Function):
    """y = w * x / rms(x), rms(x)^2 = mean(x^2) + eps over the last dimension."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        inverse = torch.linalg.vector_norm(flat, dim=1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        unit: Tensor = flat * inverse
        ctx.save_for_backward(unit, inverse, weight)
        return (unit * weight).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        unit, inverse, weight = ctx.saved_tensors
        g = gradients[0].reshape(unit.shape)
        along = g * unit
        of_weight = along.sum(0)
        projected = (along @ weight).div_(-len(weight))
        of_x = torch.mul(g, weight, out=along).addcmul_(unit, projected[:, None]).mul_(inverse)
        return of_x.view(gradients[0].shape), of_weight, None


class _Rotation(torch.autograd.Function):
    """Rotates the pairs (x[i], x[i + d/2]) of every head; x is (sequences, length, heads, d)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(gradients[0], cos, sin, -1.0), None, None


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """`sin` is negative in its first half."""
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin, value=sign)


class _GatedUnit(torch.autograd.Function):
    """y = silu(gate) * up, silu(x) = x s(x), with the logistic function s and silu' = s + silu (1 - s)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        logistic = torch.sigmoid(gate)
        activated = gate * logistic
        ctx.save_for_backward(logistic, activated, up)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        # Nobody else holds the first two: they become the gradients, which at these sizes saves more time than sums do.
        logistic, activated, up = ctx.saved_tensors
        of_gate = logistic.addcmul_(activated, logistic, value=-1).add_(activated).mul_(up).mul_(gradients[0])
        return of_gate, activated.mul_(gradients[0])
