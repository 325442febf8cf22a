"""Training one segment: from scratch, from its parent or from a checkpoint of its own, to the last step to be saved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from workers import checkpoint, processes
from workers.background_writer import BackgroundWriter
from workers.checkpoint_content import CheckpointContent, capture
from workers.errors import DivergedError
from workers.health import HealthSeries, LossWatch, ProgressReporter, peak_flops
from workers.mixture import open_training_data
from workers.results import Checkpoint, HealthPoint, TrainProgress
from workers.schedule import learning_rate
from workers.segment_run import check_run, first_step, next_save
from workers.sharded_moments import MomentShards, step_count
from workers.spec import SegmentRun
from workers.trainee import Trainee, prepare


def train(
    run: SegmentRun,
    *,
    store: Path,
    on_progress: Callable[[TrainProgress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Iterator[Checkpoint]:
    """Trains `run.segment` and yields each checkpoint once it is durable, scheduled and recovery ones alike.

    Checkpoints are written beside training, which waits only where the next one is due before the last is durable. On
    the CPU the result is bit-identical however the way is cut into runs, at one number of processes. The process's
    random state is neither read nor changed.

    Where several processes train together (`processes.joined`), every one of them iterates and gets the same
    checkpoints; the first writes them, and its `should_stop` counts.

    Args:
        on_progress: Called about once a second between checkpoints.
        should_stop: Asked after each checkpoint; training ends there if it says so.

    Raises:
        SegmentRunError: if the run contradicts itself, or was specified for another version of these numerics.
        CheckpointMissingError, CheckpointCorruptError: if the start is not there, or not what its digest says.
        ModelMissingError, ModelMismatchError, CorpusError, MergeError: if model or data are not those of the segment.
        DivergedError: if the loss or the gradient is not finite, or the loss rose too far (`workers.health`); no
            checkpoint of that state is written.
        StoreFullError, StoreError, CheckpointConflictError: if a checkpoint cannot be saved.
    """
    segment, stage, group = run.segment, run.segment.stage, processes.current()
    check_run(run, processes=group.size)
    data = open_training_data(store, stage.data, seq_len=stage.seq_len, vocab_size=segment.shape.vocab_size)
    trainee = prepare(run, data, store=store, group=group)

    first, last = first_step(run), run.save_steps[-1]
    due = next_save(run, first)
    losses: list[float] = []
    watch = LossWatch(first or None)
    progress = ProgressReporter(segment, first, on_progress)
    health = HealthSeries(segment, peak_flops=peak_flops(group.device, group.size), step=first)
    health.expect(first, due)

    sharded = group.size > 1 and run.execution.sharding == "shard"
    with MomentShards() if sharded else nullcontext() as shards, BackgroundWriter() as writer:

        def durable() -> tuple[Checkpoint, ...]:
            return group.from_leader(lambda: tuple(writer.finished(wait=True)))

        def stops() -> bool:
            return group.from_leader(lambda: should_stop is not None and should_stop())

        for step in range(first, last):
            rate = learning_rate(segment, step)
            loss, norm, written = trainee.gradients(step, flag=writer.ready)
            done = step + 1
            if loss is not None:  # else there was nothing to learn: the tokens count, and nothing moves
                try:
                    watch.check(done, loss, norm)
                except DivergedError:
                    yield from durable()
                    raise
                trainee.update(rate)
                losses.append(loss)
                progress.report(done, loss=loss, gradient_norm=norm, learning_rate=rate)
                health.record(done, loss=loss, gradient_norm=norm, learning_rate=rate)
            if written or done == due:
                for found in durable():
                    yield found
                    if stops():
                        return
            if done == due:
                content = _Content.of(trainee, shards, store=store, step=done)
                if group.leads:
                    mean_loss = math.fsum(losses) / len(losses) if losses else None
                    writer.submit(partial(_save, run, store, done, content, mean_loss, health.take()))
                watch.saved(done)
                losses.clear()
                if done < last:
                    due = next_save(run, done)
                    health.expect(done, due)
        yield from durable()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Content:
    """A copy of everything a checkpoint holds, in the process that leads. Where moments are shared out, all processes
    are writing their parts into `building` until `shards_written`."""

    whole: CheckpointContent
    building: Path | None = None
    shards_written: Future[Any] | None = None

    @classmethod
    def of(cls, trainee: Trainee, shards: MomentShards | None, *, store: Path, step: int) -> _Content:
        model, leads = trainee.model, trainee.group.leads
        if shards is None:
            return cls(whole=capture(model, trainee.optimizers, copied=True, kept=leads))
        building = trainee.group.from_leader(lambda: checkpoint.begin(store, trainee.run.segment, step))
        written = shards.begin(model, trainee.optimizers, building)
        weights = capture(model, (), copied=True, kept=leads)
        whole = dataclasses.replace(weights, moments=step_count(trainee.optimizers))
        return cls(whole=whole, building=building, shards_written=written)


def _save(
    run: SegmentRun,
    store: Path,
    step: int,
    content: _Content,
    mean_loss: float | None,
    health: tuple[HealthPoint, ...],
) -> Checkpoint:
    building = content.building or checkpoint.begin(store, run.segment, step)
    stored, size_bytes = checkpoint.finish(
        store, run.segment, step, building, content.whole, parts=content.shards_written
    )
    return Checkpoint(
        ref=stored.ref,
        path=stored.path,
        digest=stored.digest,
        size_bytes=size_bytes,
        stage_tokens=run.segment.stage_tokens(step),
        scheduled=step in run.save_steps,
        mean_loss=mean_loss,
        health=health,
    )
