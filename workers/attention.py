"""Attention that never crosses from one document of a sequence to another, without a mask of length x length.

Documents are known by their positions, which begin at 0 with each. On the CPU every document is attended to by itself;
on CUDA FlexAttention skips whatever lies outside, told by blocks. Both are one attention function, registered with
Hugging Face under a name of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from workers.errors import ModelMismatchError
from workers.model import ConvolvedProjection

IMPLEMENTATION = "longlaw_documents"
#: Positions in a block of FlexAttention's mask, along queries and keys; its kernels' own default.
_BLOCK = 128
#: Tokens of each document in a trial.
_TRIAL_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedDocuments:
    """The documents of a batch, for every layer: `positions` are (sequences, length), `lengths` those of all documents
    in order (on the CPU), `blocks` what may see what (on CUDA)."""

    positions: Tensor
    lengths: tuple[int, ...] = ()
    blocks: BlockMask | None = None

    @classmethod
    def of(cls, positions: Tensor) -> PackedDocuments:
        """Raises ValueError, on the CPU, if a sequence does not begin with a document."""
        if positions.is_cuda:
            return cls(positions=positions, blocks=document_blocks(positions))
        if positions[:, 0].any():
            raise ValueError("every sequence must begin at position 0")
        starts = torch.nonzero(positions.flatten() == 0).flatten()
        ends = torch.cat([starts[1:], starts.new_tensor([positions.numel()])])
        return cls(positions=positions, lengths=tuple((ends - starts).tolist()))


def use_document_attention(model: PreTrainedModel) -> None:
    """Lets `packed_hidden_states` work on `model`. Whole sequences give the same numbers as before, by SDPA.

    Raises:
        ModelMismatchError: if a layer could look across documents by another way than attention over all positions, or
            does so in a trial.
    """
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if not model._supports_attention_backend or kinds != {"full_attention"}:
        raise ModelMismatchError(
            f"{type(model).__name__} cannot keep documents apart (layers: {', '.join(sorted(kinds))}): use packing"
            ' "stream"'
        )
    if model.config._attn_implementation == IMPLEMENTATION:
        return
    model.set_attn_implementation(IMPLEMENTATION)
    for module in model.modules():
        if any(isinstance(child, ConvolvedProjection) for child in module.children()):
            # Hooks, and not a context around the forward pass: layers that are computed again in the backward pass
            # run outside of any context.
            module.register_forward_pre_hook(_tell_projections, with_kwargs=True)
            module.register_forward_hook(_clear_projections, always_call=True)
    _check_apart(model)


def _check_apart(model: PreTrainedModel) -> None:
    """Compares two documents in one sequence with each of them alone: a layer may attend by a way of its own."""
    device = model.get_input_embeddings().weight.device
    alone = torch.arange(2 * _TRIAL_TOKENS, device=device).view(2, -1) % model.config.vocab_size
    places = torch.arange(_TRIAL_TOKENS, device=device)
    with torch.no_grad():
        packed = packed_hidden_states(model, alone.view(1, -1), places.repeat(2)[None])
        expected = packed_hidden_states(model, alone, places.expand(2, -1))
    if not torch.allclose(packed.view_as(expected), expected, rtol=1e-2, atol=1e-2, equal_nan=True):
        raise ModelMismatchError(
            f'{type(model).__name__} does not keep documents apart as it should: use packing "stream"'
        )


def packed_hidden_states(model: PreTrainedModel, inputs: Tensor, positions: Tensor) -> Tensor:
    """Hidden states before the head, (sequences, length, width), of a model after `use_document_attention`.

    Args:
        inputs: Token ids, int64 of shape (sequences, length).
        positions: Those of `Batch`, of the same shape: 0 wherever a document begins.
    """
    states: Tensor = model.base_model(
        input_ids=inputs, position_ids=positions, documents=PackedDocuments.of(positions), use_cache=False
    ).last_hidden_state
    return states


def document_blocks(positions: Tensor, *, block: int = _BLOCK) -> BlockMask:
    """FlexAttention's mask of causal attention within documents, from the documents at the borders of blocks.

    Documents are numbered upwards along a sequence, so two blocks share one exactly if the later block's first is not
    beyond the earlier block's last. Nothing of size length x length is made, only (length / block)^2.
    """
    length = positions.shape[1]
    documents = (positions == 0).cumsum(1)
    padded = F.pad(documents, (0, -length % block), value=length + 1)  # no document has that number
    first, last = padded[:, ::block], padded[:, block - 1 :: block]
    index = torch.arange(first.shape[1], device=positions.device)
    earlier = index[:, None] > index
    visible = (first[:, :, None] <= last[:, None, :]) & (earlier | (index[:, None] == index))
    whole = earlier & (last[:, :, None] == first[:, None, :])

    def sees(sequence: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[sequence, query] == documents[sequence, key])

    partial_counts, partial_indices = _listed(visible & ~whole)
    whole_counts, whole_indices = _listed(whole)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        whole_counts,
        whole_indices,
        BLOCK_SIZE=block,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block has, and which: those first, in order, with a dimension for heads."""
    indices = chosen.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32)[:, None], indices.to(torch.int32)[:, None]


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    documents: PackedDocuments | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """(sequences, length, heads, width) from queries, keys and values of (sequences, heads, length, width)."""
    if sliding_window is not None:
        raise ModelMismatchError(f'attention within {sliding_window} positions is not supported: use packing "stream"')
    if documents is not None and documents.blocks is not None:
        mixed, _ = flex_attention_forward(module, query, key, value, documents.blocks, **options)
        return mixed, None
    sequences, _, length, _ = query.shape
    if documents is None or len(documents.lengths) == sequences:
        mixed, _ = sdpa_attention_forward(module, query, key, value, None, **options)
        return mixed, None
    # Splitting, unlike slicing, has a backward pass whose memory does not grow with the number of documents.
    parts = (torch.split(_end_to_end(tensor), list(documents.lengths), dim=2) for tensor in (query, key, value))
    apart = [sdpa_attention_forward(module, *part, None, **options)[0] for part in zip(*parts, strict=True)]
    mixed = torch.cat(apart, dim=1)
    return mixed.view(sequences, length, *mixed.shape[2:]), None


def _end_to_end(tensor: Tensor) -> Tensor:
    """(sequences, heads, length, width) as one sequence: (1, heads, sequences * length, width)."""
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def _no_mask(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> None:
    """Stands where Hugging Face would build a mask of length x length as soon as positions begin anew."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("attention within documents takes no padding")


def _tell_projections(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    documents = kwargs.get("documents")
    for child in module.children():
        if isinstance(child, ConvolvedProjection):
            child.positions = None if documents is None else documents.positions


def _clear_projections(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    for child in module.children():
        if isinstance(child, ConvolvedProjection):
            child.positions = None


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, _no_mask)
