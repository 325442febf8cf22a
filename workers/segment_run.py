"""What a run asks for, checked before anything is loaded, and the steps that follow from it."""

from __future__ import annotations

from workers.errors import SegmentRunError
from workers.schedule import learning_rate
from workers.spec import NUMERICS_VERSION, LongStage, SegmentRun, Snapshot


def check_run(run: SegmentRun, *, processes: int) -> None:
    """Compares a run with itself and with the number of processes that are here.

    Raises:
        SegmentRunError: if it contradicts itself, or was specified for another version of these numerics.
    """
    segment = run.segment
    if segment.numerics_version != NUMERICS_VERSION:
        raise SegmentRunError(
            f"segment {segment.id} was planned for numerics version {segment.numerics_version}; this is version"
            f" {NUMERICS_VERSION}: submit its grid again"
        )
    try:
        learning_rate(segment, 0)
    except ValueError as error:
        raise SegmentRunError(f"segment {segment.id}: {error}") from error
    _check_start(run)
    _check_steps(run)
    _check_execution(run, processes)


def first_step(run: SegmentRun) -> int:
    """Steps of the run's own segment that lie behind it: none where it begins at its parent."""
    return run.start.ref.step if run.start is not None and run.start.ref.segment == run.segment.id else 0


def next_save(run: SegmentRun, step: int) -> int:
    """The first step after `step` that gets a checkpoint, scheduled or for recovery; `step` is not the run's last."""
    scheduled = next(save for save in run.save_steps if save > step)
    every = run.recovery_every_steps
    return scheduled if every is None else min(scheduled, (step // every + 1) * every)


def carries_optimizer(run: SegmentRun) -> bool:
    """A long stage may ask for fresh moments where it begins; all else goes on with those it finds. A model that a rule
    made has none."""
    if run.start is None:
        return False
    begins = run.start.ref.segment != run.segment.id and not run.segment.stage_offset_steps
    return not (begins and isinstance(run.segment.stage, LongStage) and run.segment.stage.optimizer_state == "fresh")


def sequences_per_process(run: SegmentRun) -> int:
    """Sequences of every global batch that one process takes."""
    return run.segment.stage.batch_sequences // run.execution.processes


def sequences_at_once(run: SegmentRun) -> int:
    """Sequences that one process takes through the model at once."""
    most = run.execution.micro_batch_tokens
    share = sequences_per_process(run)
    return share if most is None else min(share, most // run.segment.stage.seq_len)


def _check_start(run: SegmentRun) -> None:
    segment, start = run.segment, run.start
    if start is not None:
        if start.ref.segment != segment.id and (start.ref != segment.parent or segment.parent_rule is not None):
            raise SegmentRunError(f"segment {segment.id} cannot start from {start.ref}: its parent is {segment.parent}")
    elif segment.parent is not None and segment.parent_rule is None:
        raise SegmentRunError(f"segment {segment.id} begins at {segment.parent}, but its run has no start")
    elif segment.parent is not None and segment.parent_rule is not None:
        parent = Snapshot(segment=segment.parent.segment, step=segment.parent.step, rule=segment.parent_rule)
        if tuple(source.ref for source in run.start_sources) != parent.sources:
            raise SegmentRunError(
                f"segment {segment.id} begins with {segment.parent_rule.name} at {segment.parent}: start_sources must"
                f" be its checkpoints, oldest first, {', '.join(str(ref.step) for ref in parent.sources)}"
            )


def _check_steps(run: SegmentRun) -> None:
    segment, steps = run.segment, run.save_steps
    if not steps or list(steps) != sorted(set(steps)):
        raise SegmentRunError(f"save_steps must rise and not be empty: {steps}")
    if steps[0] <= first_step(run):
        raise SegmentRunError(f"save step {steps[0]} does not lie after the start, step {first_step(run)}")
    if segment.horizon_steps is not None and segment.stage_offset_steps + steps[-1] > segment.horizon_steps:
        end = segment.horizon_steps - segment.stage_offset_steps
        raise SegmentRunError(f"save step {steps[-1]} lies past the decay's end, step {end}")
    if run.recovery_every_steps is not None and run.recovery_every_steps < 1:
        raise SegmentRunError(f"recovery_every_steps is {run.recovery_every_steps}: it must be at least 1, or None")


def _check_execution(run: SegmentRun, processes: int) -> None:
    stage, execution = run.segment.stage, run.execution
    if execution.processes != processes:
        raise SegmentRunError(f"the run is for {execution.processes} processes, {processes} have joined")
    if stage.batch_sequences % processes:
        raise SegmentRunError(
            f"{stage.batch_sequences} sequences cannot be shared evenly by {processes} processes: choose processes that"
            " divide batch_sequences"
        )
    if execution.micro_batch_tokens is not None and execution.micro_batch_tokens < stage.seq_len:
        raise SegmentRunError(
            f"micro_batch_tokens is {execution.micro_batch_tokens}, less than one sequence of {stage.seq_len}"
        )
