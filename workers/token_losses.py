"""Per-token losses of a causal language model, without its logits ever being there as a whole.

The backbone runs once over a batch of passes; the head is applied in blocks, in float32, and only where a loss is asked
for. Passes of unequal length are padded on the right, which a causal model cannot see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from workers.chunking import chunk_windows
from workers.errors import MeasurementError
from workers.last_layer import last_states
from workers.spec import Chunking

Ids = npt.NDArray[np.int64]
Losses = npt.NDArray[np.float32]
#: Called with the tokens that are through and those there are.
Progress = Callable[[int, int], None]

#: Input tokens of one batch: enough to fill the arithmetic units, little enough for the activations of a micro model.
BATCH_TOKENS = 8192
#: Rows and columns of one tile of logits: 1 MiB on a CPU, which its cache holds; enough work for a GPU's arithmetic.
_CPU_TILE = (512, 512)
_CUDA_TILE = (4096, 16_384)
#: Tokens of a trial that looks at what goes into the head, and what becomes of logits as large as this.
_TRIAL_TOKENS = 8
_TRIAL_LOGIT = 100.0
_TRIAL_TOLERANCE = 1e-2


def _unreported(done: int, total: int) -> None:
    """Where nobody listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One sequence through the model: losses are asked for the tokens `ids[positions]`, each position at least 1."""

    ids: Ids
    positions: Ids


def check_head(model: Any) -> None:
    """Makes sure that the model's logits are what its head makes of its last states, as everything here takes them.

    Raises:
        MeasurementError: if the model scales, caps or moves them afterwards.
    """
    head = model.get_output_embeddings()
    ids = torch.arange(_TRIAL_TOKENS, device=head.weight.device)[None] % head.weight.shape[0]
    fed: list[torch.Tensor] = []
    made: list[torch.Tensor] = []

    def stretched(_: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        """Logits far from zero in the place of the head's: a cap leaves small ones nearly as they are."""
        fed.append(inputs[0])
        made.append(torch.linspace(-_TRIAL_LOGIT, _TRIAL_LOGIT, output.numel()).to(output).view_as(output))
        return made[-1]

    model.eval()
    hook = head.register_forward_hook(stretched)
    try:
        with torch.no_grad():
            own = model(input_ids=ids, use_cache=False).logits
            states = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    finally:
        hook.remove()
    if not (
        fed
        and torch.allclose(fed[0].float(), states.float(), atol=_TRIAL_TOLERANCE, rtol=_TRIAL_TOLERANCE, equal_nan=True)
        and torch.equal(own.float(), made[0].float())
    ):
        raise MeasurementError(
            f"{type(model).__name__} with this configuration changes its logits after the head, which is not supported"
        )


def score(
    model: Any, passes: Sequence[Pass], *, batch_tokens: int = BATCH_TOKENS, report: Progress = _unreported
) -> list[Losses]:
    """NLL (nats) of the asked tokens of each pass, in the order of `passes`.

    Args:
        model: A Hugging Face causal language model; it is put into evaluation mode.
        batch_tokens: Input tokens of one batch, padding included; it changes memory and speed, not the result.
        report: Called with the tokens that are through and those there are.
    """
    weight, bias = _head(model)
    results: list[Losses] = [np.empty(0, dtype=np.float32) for _ in passes]
    total, done = sum(len(item.ids) for item in passes), 0
    report(done, total)
    with torch.inference_mode():
        for batch, hidden in _hidden_batches(model, passes, batch_tokens):
            targets = np.concatenate([passes[index].ids[passes[index].positions] for index in batch])
            losses = head_losses(hidden, weight, bias, torch.from_numpy(targets).to(weight.device)).cpu().numpy()
            counts = [len(passes[index].positions) for index in batch]
            for index, part in zip(batch, np.split(losses, np.cumsum(counts)[:-1]), strict=True):
                results[index] = part
                done += len(passes[index].ids)
            report(done, total)
    return results


def logits_at(model: Any, passes: Sequence[Pass], *, batch_tokens: int = BATCH_TOKENS) -> list[torch.Tensor]:
    """Float32 logits of the asked tokens of each pass, shape (positions, vocabulary): for few positions."""
    weight, bias = _head(model)
    results = [torch.empty(0)] * len(passes)
    with torch.inference_mode():
        for batch, hidden in _hidden_batches(model, passes, batch_tokens):
            logits = functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
            counts = [len(passes[index].positions) for index in batch]
            for index, part in zip(batch, torch.split(logits.cpu(), counts), strict=True):
                results[index] = part
    return results


def head_losses(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """NLL (nats, float32) of `targets`, shape (n,), from hidden states (n, width) and a head (vocabulary, width).

    The logits are there tile by tile, in float32. Their log-partition is gathered on the way: with m the largest logit
    so far and s the sum of exp(logit - m), a tile whose largest is t makes s into s exp(m - m') + sum exp(logit - m'),
    m' = max(m, t) (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
    """
    hidden = hidden.float()
    n, (vocab_size, _) = len(hidden), weight.shape
    n_rows, n_columns = _CPU_TILE if hidden.device.type == "cpu" else _CUDA_TILE
    largest = torch.full((n, 1), torch.finfo(torch.float32).min, device=hidden.device)
    total = torch.zeros((n, 1), device=hidden.device)
    buffer = torch.empty(min(n, n_rows) * min(vocab_size, n_columns), device=hidden.device)
    for left in range(0, vocab_size, n_columns):
        columns = slice(left, min(left + n_columns, vocab_size))
        piece = weight[columns].float().t()
        for top in range(0, n, n_rows):
            rows = slice(top, min(top + n_rows, n))
            height, width = rows.stop - rows.start, columns.stop - columns.start
            tile = torch.mm(hidden[rows], piece, out=buffer[: height * width].view(height, width))
            if bias is not None:
                tile += bias[columns].float()
            higher = torch.maximum(largest[rows], tile.amax(1, keepdim=True))
            part = tile.sub_(higher).exp_().sum(1, keepdim=True)
            total[rows] = total[rows] * (largest[rows] - higher).exp_() + part
            largest[rows] = higher
    log_partition = (largest + total.log_())[:, 0]
    return log_partition - _target_logits(hidden, weight, bias, targets, n_rows)


def full_losses(
    model: Any,
    documents: Sequence[Ids],
    *,
    beginning_id: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report: Progress = _unreported,
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
    found = score(model, [passes[index] for index in scored], batch_tokens=batch_tokens, report=report)
    for index, values in zip(scored, found, strict=True):
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
    report: Progress = _unreported,
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
    found = score(model, passes, batch_tokens=batch_tokens, report=report)
    for (index, scored), values in zip(places, found, strict=True):
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


def _head(model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    return head.weight.detach(), None if bias is None else bias.detach()


def _hidden_batches(model: Any, passes: Sequence[Pass], batch_tokens: int) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Batches of indices, and the states (positions, width) from which their asked tokens are predicted."""
    model.eval()
    device = model.get_output_embeddings().weight.device
    for batch in _batches(passes, batch_tokens):
        width = _input_length(passes[batch[-1]])
        inputs = torch.zeros((len(batch), width), dtype=torch.long)
        for row, index in enumerate(batch):
            ids = passes[index].ids[: _input_length(passes[index])]
            inputs[row, : len(ids)] = torch.from_numpy(ids)
        first = min(int(passes[index].positions.min()) for index in batch) - 1
        hidden = last_states(model, inputs.to(device), first=first)
        rows = np.repeat(np.arange(len(batch)), [len(passes[index].positions) for index in batch])
        positions = np.concatenate([passes[index].positions for index in batch])
        yield batch, hidden[torch.from_numpy(rows), torch.from_numpy(positions - 1 - first)]


def _target_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, n_rows: int
) -> torch.Tensor:
    logits = torch.cat(
        [
            (part * weight[wanted].float()).sum(1)
            for part, wanted in zip(torch.split(hidden, n_rows), torch.split(targets, n_rows), strict=True)
        ]
    )
    return logits if bias is None else logits + bias[targets].float()
