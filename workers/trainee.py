"""What is trained: a model with its objective and its optimizers, and what one update does to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from workers import checkpoint
from workers.attention import use_document_attention
from workers.errors import MeasurementError, ModelMismatchError
from workers.loss import NextTokenLoss
from workers.merge import merge
from workers.mixture import TrainingData
from workers.model import load_weights, open_model
from workers.optimizers import build_optimizers, check_moments, clip_gradients, set_rate
from workers.processes import Group, keeping_gradients, spread
from workers.segment_run import carries_optimizer, sequences_at_once, sequences_per_process
from workers.spec import LongStage, SegmentRun
from workers.token_losses import check_head


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trainee:
    """One process's part of a run. `loss_of` is the objective, spread over the group; it holds `model`."""

    run: SegmentRun
    group: Group
    data: TrainingData
    model: PreTrainedModel
    loss_of: nn.Module
    optimizers: tuple[Optimizer, ...]

    def gradients(self, step: int, *, flag: bool = False) -> tuple[float | None, float, bool]:
        """Leaves the gradients of update `step` of the segment, 0-based, with the parameters.

        Losses are pooled over the targets of the global batch that count, however it is shared out and cut. Where there
        are none, there is no gradient.

        Returns:
            The mean loss (nats) of the global batch, None where no target counts; the norm of its gradient before
            clipping; and whether any process raised its `flag`: the same in all processes.
        """
        segment, stage, device = self.run.segment, self.run.segment.stage, self.group.device
        share, at_once = sequences_per_process(self.run), sequences_at_once(self.run)
        begin = segment.first_sequence(step) + self.group.rank * share
        counted = self._counted_targets(begin, share)
        scale = self.group.size / max(1, counted)  # the group takes the mean over its processes
        total = torch.zeros(2, dtype=torch.float64, device=device)
        total[1] = float(flag)
        for at in range(0, share, at_once) if counted else ():
            count = min(at_once, share - at)
            batch = self.data.batch(seed=segment.seed, first=begin + at, count=count)
            inputs, targets = torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).to(device)
            positions = None if batch.positions is None else torch.from_numpy(batch.positions).to(device)
            with keeping_gradients(self.loss_of, more=at + count < share):
                with torch.autocast(device.type, torch.bfloat16, enabled=stage.precision == "bf16"):
                    objective, summed = self.loss_of(inputs, targets, scale, positions)
                objective.backward()
            total[0] += summed
        summed_loss, flags = self.group.sum(total).tolist()
        norm = clip_gradients(self.model, stage.optimizer.clip_norm)
        return summed_loss / counted if counted else None, norm, flags > 0

    def _counted_targets(self, begin: int, share: int) -> int:
        """Targets of the global batch that count: known before the first forward pass, from the marks of answers."""
        if not self.data.marks_answers:
            return self.run.segment.stage.tokens_per_step
        own = self.data.counted_targets(seed=self.run.segment.seed, first=begin, count=share)
        return int(self.group.sum(torch.tensor(own, device=self.group.device)))

    def update(self, rate: float) -> None:
        """Moves the parameters by the gradients that they have, which are gone then."""
        set_rate(self.optimizers, rate)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def prepare(run: SegmentRun, data: TrainingData, *, store: Path, group: Group) -> Trainee:
    """Everything as it stood where the run starts.

    Raises:
        CheckpointMissingError, CheckpointCorruptError: if the start is not there, or not what its digest says.
        ModelMissingError, ModelMismatchError, MergeError: if the model is not the segment's.
        SegmentRunError: if moments are to be carried on that another optimizer made.
    """
    segment, stage = run.segment, run.segment.stage
    model = open_model(
        segment.shape,
        rope_base=stage.rope_base,
        max_positions=stage.seq_len,
        store=store,
        seed=segment.seed,
        yarn=stage.yarn if isinstance(stage, LongStage) else None,
    )
    folder = None if run.start is None else checkpoint.verify(store, run.start)
    if folder is not None:
        load_weights(model, checkpoint.read_weights(folder))
    elif run.start_sources and segment.parent_rule is not None:
        sources = [checkpoint.verify(store, source) for source in run.start_sources]
        load_weights(model, merge(sources, segment.parent_rule))
    _check_objective(model)
    _configure(model, run)
    loss_of = spread(NextTokenLoss(model, z_loss=stage.z_loss), model, group, run.execution.sharding)
    optimizers = build_optimizers(model, stage.optimizer)
    if folder is not None and carries_optimizer(run):
        checkpoint.restore_optimizers(folder, model, optimizers)
        check_moments(optimizers)
    return Trainee(run=run, group=group, data=data, model=model, loss_of=loss_of, optimizers=optimizers)


def _check_objective(model: PreTrainedModel) -> None:
    """The loss is made of hidden states and the head's weight alone."""
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ModelMismatchError(f"{type(model).__name__} has a bias at its head, with which it cannot be trained")
    try:
        check_head(model)
    except MeasurementError as error:
        raise ModelMismatchError(str(error)) from error


def _configure(model: PreTrainedModel, run: SegmentRun) -> None:
    if run.segment.stage.data.packing == "documents":
        use_document_attention(model)
    model.eval()  # dropout would draw random numbers that no checkpoint holds
    if run.execution.recompute_activations:
        model.activation_checkpointing_enable({"use_reentrant": False})
        for layer in model.get_decoder().layers:
            layer.training = True  # of the layer alone: it recomputes itself in training only
