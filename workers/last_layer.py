"""The last layer of a Llama, where only the end of a sequence is asked for: the same numbers for less.

Windows of local context are scored at their ends. Every layer but the last has to run over the whole window, because
the next one attends to it; of the last layer only the keys and values are needed everywhere, and queries, attention,
output projection and feed-forward at the asked end alone. In a model of two layers that is a good part of the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def last_states(model: Any, inputs: torch.Tensor, *, first: int) -> torch.Tensor:
    """Final hidden states of the positions from `first` on, shape (sequences, length - first, width)."""
    if not _pays(model, inputs, first):
        states: torch.Tensor = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        return states[:, first:]
    with _only_the_end(model.model.layers[-1], first):
        end: torch.Tensor = model.base_model(input_ids=inputs, use_cache=False).last_hidden_state
        return end


def _pays(model: Any, inputs: torch.Tensor, first: int) -> bool:
    """Rows of attention before the half cost less than the mask that the others need. A layer whose `forward` is set
    already (accelerate does that to models on several devices) stays as it is."""
    return (
        type(model) is LlamaForCausalLM
        and model.config._attn_implementation == "sdpa"
        and 2 * first > inputs.shape[1]
        and "forward" not in vars(model.model.layers[-1])
    )


@contextmanager
def _only_the_end(layer: nn.Module, first: int) -> Iterator[None]:
    layer.forward = partial(_end_of_layer, layer, first)
    try:
        yield
    finally:
        del layer.forward


def _end_of_layer(
    layer: Any,
    first: int,
    states: torch.Tensor,
    *,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    **_: Any,
) -> torch.Tensor:
    """`LlamaDecoderLayer.forward` for the positions from `first` on; they see all before them."""
    attention = layer.self_attn
    normed = layer.input_layernorm(states)
    heads = (*states.shape[:2], -1, attention.head_dim)
    queries = attention.q_proj(normed).view(heads).transpose(1, 2)
    keys = attention.k_proj(normed).view(heads).transpose(1, 2)
    values = attention.v_proj(normed).view(heads).transpose(1, 2)
    queries, keys = apply_rotary_pos_emb(queries, keys, *position_embeddings)
    groups = queries.shape[1] // keys.shape[1]
    mixed = functional.scaled_dot_product_attention(
        queries[:, :, first:],
        keys.repeat_interleave(groups, dim=1),
        values.repeat_interleave(groups, dim=1),
        attn_mask=_seen(states.shape[1], first, states.device),
        scale=attention.scaling,
    )
    end = states[:, first:]
    end = end + attention.o_proj(mixed.transpose(1, 2).reshape(end.shape[0], end.shape[1], -1))
    ended: torch.Tensor = end + layer.mlp(layer.post_attention_layernorm(end))
    return ended


def _seen(length: int, first: int, device: torch.device) -> torch.Tensor:
    """Which positions each of `first` .. `length` - 1 attends to: itself and those before it."""
    places = torch.arange(length, device=device)
    return places <= places[first:, None]
