"""Per-token losses of a causal language model, without its logits ever being there as a whole.

The backbone runs once over a batch of passes; the head is applied in blocks, in float32, and only where a loss is asked
for. Passes of unequal length are padded on the right, which a causal model cannot see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workers.chunking import chunk_windows
from workers.spec import Chunking

Ids = npt.NDArray[np.int64]
Losses = npt.NDArray[np.float32]

#: Input tokens of one batch: enough to fill the arithmetic units, little enough for the activations of a micro model.
BATCH_TOKENS = 8192
#: Numbers in one block of logits (float32: 64 MiB).
BLOCK_LOGITS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sequence through the model: losses are asked for the tokens `ids[positions]`, each position at least 1."""

    ids: Ids
    positions: Ids


def score(model: Any, passes: Sequence[Pass], *, batch_tokens: int = BATCH_TOKENS) -> list[Losses]:
    """NLL (nats) of the asked tokens of each pass, in the order of `passes`.

    Args:
        model: A Hugging Face causal language model; it is put into evaluation mode.
        batch_tokens: Input tokens of one batch, padding included; it changes memory and speed, not the result.
    """
    model.eval()
    head = model.get_output_embeddings()
    weight, bias = head.weight.detach().float(), getattr(head, "bias", None)
    block = max(1, BLOCK_LOGITS // weight.shape[0])
    results: list[Losses] = [np.empty(0, dtype=np.float32) for _ in passes]
    with torch.inference_mode():
        for batch in _batches(passes, batch_tokens):
            width = _input_length(passes[batch[-1]])
            inputs = torch.zeros((len(batch), width), dtype=torch.long)
            for row, index in enumerate(batch):
                ids = passes[index].ids[: _input_length(passes[index])]
                inputs[row, : len(ids)] = torch.from_numpy(ids)
            hidden = model.base_model(input_ids=inputs.to(weight.device), use_cache=False).last_hidden_state
            counts = [len(passes[index].positions) for index in batch]
            rows = np.repeat(np.arange(len(batch)), counts)
            positions = np.concatenate([passes[index].positions for index in batch])
            targets = np.concatenate([passes[index].ids[passes[index].positions] for index in batch])
            picked = hidden[torch.from_numpy(rows), torch.from_numpy(positions - 1)]
            losses = _head_losses(picked, weight, bias, torch.from_numpy(targets).to(weight.device), block)
            for index, part in zip(batch, np.split(losses, np.cumsum(counts)[:-1]), strict=True):
                results[index] = part
    return results


def full_losses(
    model: Any, documents: Sequence[Ids], *, beginning_id: int | None = None, batch_tokens: int = BATCH_TOKENS
) -> list[Losses]:
    """NLL of every token given all before it, shape (tokens,) for each document.

    The first token is scored only after `beginning_id`; without one its loss is NaN. No other token is put before it.
    """
    lead = () if beginning_id is None else (beginning_id,)
    first = 1 - len(lead)
    passes = [
        Pass(ids=np.array([*lead, *tokens], dtype=np.int64), positions=np.arange(1, len(tokens) + len(lead)))
        for tokens in documents
    ]
    scored = [index for index, item in enumerate(passes) if len(item.positions)]
    losses = [np.full(len(tokens), np.nan, dtype=np.float32) for tokens in documents]
    for index, values in zip(
        scored, score(model, [passes[index] for index in scored], batch_tokens=batch_tokens), strict=True
    ):
        losses[index][first:] = values
    return losses


def local_losses(
    model: Any,
    documents: Sequence[Ids],
    chunking: Chunking,
    *,
    wanted: Sequence[npt.NDArray[np.bool_]] | None = None,
    beginning_id: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[Losses]:
    """NLL of every token given its local context alone, shape (tokens,) for each document.

    NaN where the local context is the whole prefix, and where `wanted` (one mask per document) is false: a window
    without a wanted token is not run. `beginning_id` is put before every window.
    """
    lead = () if beginning_id is None else (beginning_id,)
    passes: list[Pass] = []
    places: list[tuple[int, Ids]] = []
    for index, tokens in enumerate(documents):
        for window in chunk_windows(len(tokens), chunking):
            scored = np.arange(window.first, window.end)
            if wanted is not None:
                scored = scored[wanted[index][scored]]
            if window.start == 0 or not len(scored):
                continue
            ids = np.array([*lead, *tokens[window.start : window.end]], dtype=np.int64)
            passes.append(Pass(ids=ids, positions=scored - window.start + len(lead)))
            places.append((index, scored))
    losses = [np.full(len(tokens), np.nan, dtype=np.float32) for tokens in documents]
    for (index, scored), values in zip(places, score(model, passes, batch_tokens=batch_tokens), strict=True):
        losses[index][scored] = values
    return losses


def _input_length(item: Pass) -> int:
    """Tokens after the last asked one, and that one itself, need not be fed."""
    return int(item.positions.max())


def _batches(passes: Sequence[Pass], batch_tokens: int) -> Iterator[list[int]]:
    """Indices of passes, shortest first, so that little is padding."""
    batch: list[int] = []
    for index in sorted(range(len(passes)), key=lambda index: _input_length(passes[index])):
        if batch and (len(batch) + 1) * _input_length(passes[index]) > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _head_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, block: int
) -> Losses:
    parts = []
    for part, wanted in zip(torch.split(hidden, block), torch.split(targets, block), strict=True):
        logits = functional.linear(part.float(), weight, None if bias is None else bias.float())
        parts.append(functional.cross_entropy(logits, wanted, reduction="none"))
    return torch.cat(parts).cpu().numpy().astype(np.float32, copy=False)
