"""Learning rates, computed from the number of the update: no scheduler object can be lost, restarted or advanced once
per process, and a resumed run reads the same curve."""

from __future__ import annotations

from workers.spec import LongStage, Segment, ShortStage


def learning_rate(segment: Segment, step: int) -> float:
    """The rate of update `step` of a segment, 0-based.

    Warm-up reaches the full rate with its last update. A decay over `horizon_steps` updates is a straight line: its
    first update is one step down already, its last has exactly the final rate, and the rate stays there past it.

    Raises:
        ValueError: for a negative step, a decay without a horizon, or a kind that does not belong to the stage.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    match segment.kind, segment.stage:
        case "short_trunk", ShortStage() as stage:
            return stage.peak_rate * _warmup(step, stage.warmup_steps)
        case "short_decay", ShortStage() as stage:
            return stage.peak_rate * _linear(step, segment.horizon_steps, stage.final_rate_ratio)
        case "long_constant", LongStage() as stage:
            return stage.start_rate * _warmup(step, stage.warmup_steps)
        case "long_linear_decay", LongStage() as stage:
            line = _linear(step, segment.horizon_steps, stage.final_rate_ratio)
            return stage.start_rate * line * _warmup(step, stage.warmup_steps)
        case kind, stage:
            raise ValueError(f"a {kind} segment cannot have a {type(stage).__name__}")


def _warmup(step: int, warmup_steps: int) -> float:
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0


def _linear(step: int, horizon_steps: int | None, final_ratio: float) -> float:
    if not horizon_steps:
        raise ValueError("a decay needs horizon_steps")
    done = min(1.0, (step + 1) / horizon_steps)
    return (1.0 - done) + final_ratio * done
