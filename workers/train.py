"""Training one segment: from scratch, from its parent or from a checkpoint of its own, to the last step to be saved."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as recompute
from transformers import LlamaForCausalLM

from workers import checkpoint, order
from workers.corpus import open_corpus
from workers.errors import CorpusError, DivergedError, SegmentRunError
from workers.model import build_model, load_weights
from workers.results import Checkpoint, TrainProgress
from workers.schedule import learning_rate
from workers.spec import NUMERICS_VERSION, AdamW, LongStage, Segment, SegmentRun

#: Float32 logits beyond this many numbers (1 GiB) are computed in blocks of positions, and again in the backward pass.
_LOGITS_AT_ONCE = 1 << 28
_PROGRESS_EVERY_S = 1.0


class NextTokenLoss(nn.Module):
    """Mean negative log-likelihood (nats) of all targets, from float32 logits."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """`inputs` and `targets` are int64 of shape (sequences, length); the result is a scalar."""
        hidden = self.model.model(input_ids=inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        targets = targets.flatten()
        head = self.model.lm_head.weight
        block = max(1, _LOGITS_AT_ONCE // len(head))
        if len(targets) <= block:
            return F.cross_entropy(F.linear(hidden, head).float(), targets)
        sums = [
            recompute(_summed_loss, hidden[at : at + block], head, targets[at : at + block], use_reentrant=False)
            for at in range(0, len(targets), block)
        ]
        return torch.stack(sums).sum() / len(targets)


def train(
    run: SegmentRun,
    *,
    store: Path,
    on_progress: Callable[[TrainProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Checkpoint]:
    """Trains `run.segment` and yields each checkpoint once it is durable, scheduled and recovery ones alike.

    On the CPU the result is bit-identical however the way is cut into runs. The process's random state is neither read
    nor changed.

    Args:
        on_progress: Called about once a second between checkpoints.
        should_stop: Asked after each checkpoint; training ends there if it says so.

    Raises:
        SegmentRunError: if the run contradicts itself, or was specified for another version of these numerics.
        CheckpointMissingError, CheckpointCorruptError: if the start is not there, or not what its digest says.
        ModelMismatchError, CorpusError: if the model or the data are not those of the segment.
        DivergedError: if the loss or the gradient is not finite; no checkpoint of that state is written.
        StoreFullError, CheckpointConflictError: if a checkpoint cannot be saved.
    """
    segment, stage = run.segment, run.segment.stage
    _check(run)
    tokens = _open_tokens(segment, store)
    first, last = _first_step(run), run.save_steps[-1]

    model = build_model(segment.shape, rope_base=stage.rope_base, max_positions=stage.seq_len, seed=segment.seed)
    folder = None if run.start is None else checkpoint.verify(store, run.start)
    if folder is not None:
        load_weights(model, checkpoint.read_weights(folder))
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), mixed_precision="no")
    if accelerator.num_processes != 1:
        raise SegmentRunError(f"training runs in one process, this one is one of {accelerator.num_processes}")
    loss_of = accelerator.prepare(NextTokenLoss(model))
    # The optimizer stays plain: accelerate's wrapper serves scaled half precision, and costs a millisecond an update.
    optimizer = _optimizer(model, stage.optimizer)
    if folder is not None and _carries_optimizer(run):
        checkpoint.restore_optimizers(folder, model, (optimizer,))
    parameters = list(model.parameters())
    loss_of.train()

    progress = _Progress(segment, first, on_progress)
    losses: list[float] = []
    for step in range(first, last):
        rate = learning_rate(segment, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        rows = order.batch(tokens, stage, seed=segment.seed, step=segment.first_stage_step + step)
        sequences = torch.from_numpy(rows).to(accelerator.device)
        loss = loss_of(sequences[:, :-1], sequences[:, 1:])
        accelerator.backward(loss)
        norm = float(accelerator.clip_grad_norm_(parameters, stage.optimizer.clip_norm))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise DivergedError(step=step + 1, loss=losses[-1])
        if not math.isfinite(norm):
            raise DivergedError(step=step + 1, loss=losses[-1], gradient_norm=norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        done = step + 1
        progress.report(done, losses[-1], rate)
        scheduled = done in run.save_steps
        if scheduled or (run.recovery_every_steps and done % run.recovery_every_steps == 0):
            stored, size_bytes = checkpoint.write(store, segment, done, model=model, optimizers=(optimizer,))
            yield Checkpoint(
                ref=stored.ref,
                path=stored.path,
                digest=stored.digest,
                size_bytes=size_bytes,
                stage_tokens=segment.stage_tokens(done),
                scheduled=scheduled,
                mean_loss=math.fsum(losses) / len(losses),
            )
            losses.clear()
            if should_stop is not None and should_stop():
                return


class _Progress:
    """Passes a sign of life on, at most once in `_PROGRESS_EVERY_S`."""

    def __init__(self, segment: Segment, first: int, on_progress: Callable[[TrainProgress], None] | None) -> None:
        self._segment = segment
        self._on_progress = on_progress
        self._since_step = first
        self._since = time.monotonic()

    def report(self, step: int, loss: float, rate: float) -> None:
        elapsed_s = time.monotonic() - self._since
        if self._on_progress is None or elapsed_s < _PROGRESS_EVERY_S:
            return
        tokens = (step - self._since_step) * self._segment.stage.tokens_per_step
        self._on_progress(
            TrainProgress(
                step=step,
                stage_tokens=self._segment.stage_tokens(step),
                loss=loss,
                learning_rate=rate,
                tokens_per_s=tokens / elapsed_s,
            )
        )
        self._since_step = step
        self._since = time.monotonic()


def _check(run: SegmentRun) -> None:
    segment, start = run.segment, run.start
    if segment.numerics_version != NUMERICS_VERSION:
        raise SegmentRunError(
            f"segment {segment.id} was planned for numerics version {segment.numerics_version}; this is version"
            f" {NUMERICS_VERSION}: plan it again"
        )
    if start is None:
        if segment.parent is not None:
            raise SegmentRunError(f"segment {segment.id} begins at {segment.parent}, but its run has no start")
    elif start.ref.segment != segment.id and start.ref != segment.parent:
        raise SegmentRunError(f"segment {segment.id} cannot start from {start.ref}: its parent is {segment.parent}")
    try:
        learning_rate(segment, 0)
    except ValueError as error:
        raise SegmentRunError(f"segment {segment.id}: {error}") from error
    steps = run.save_steps
    if not steps or list(steps) != sorted(set(steps)):
        raise SegmentRunError(f"save_steps must rise and not be empty: {steps}")
    if steps[0] <= _first_step(run):
        raise SegmentRunError(f"save step {steps[0]} does not lie after the start, step {_first_step(run)}")
    if segment.horizon_steps is not None and steps[-1] > segment.horizon_steps:
        raise SegmentRunError(f"save step {steps[-1]} lies past the decay's end, step {segment.horizon_steps}")
    if run.recovery_every_steps is not None and run.recovery_every_steps < 1:
        raise SegmentRunError(f"recovery_every_steps is {run.recovery_every_steps}: it must be at least 1, or None")


def _first_step(run: SegmentRun) -> int:
    """Steps of the run's own segment that lie behind it: none where it begins at its parent."""
    return run.start.ref.step if run.start is not None and run.start.ref.segment == run.segment.id else 0


def _carries_optimizer(run: SegmentRun) -> bool:
    """A long stage may ask for fresh moments where it begins; everything else goes on with those it finds."""
    begins = run.start is not None and run.start.ref.segment != run.segment.id
    return not (begins and isinstance(run.segment.stage, LongStage) and run.segment.stage.optimizer_state == "fresh")


def _open_tokens(segment: Segment, store: Path) -> npt.NDArray[Any]:
    data = segment.stage.data
    corpus = open_corpus(store, data.corpus)
    if corpus.vocab_size > segment.shape.vocab_size:
        raise CorpusError(
            f"corpus {corpus.hash} has {corpus.vocab_size} tokens, the model's vocab_size is {segment.shape.vocab_size}"
        )
    return corpus.tokens(data.split)


def _optimizer(model: LlamaForCausalLM, settings: AdamW) -> torch.optim.AdamW:
    """AdamW that decays matrices and embeddings, and leaves norms and convolutions alone."""
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim == 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.ndim != 2], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )


def _summed_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, head).float(), targets, reduction="sum")
