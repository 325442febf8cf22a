"""Learning rates, computed from the number of the update: no scheduler object can be lost, restarted or advanced once
per process, and a resumed run reads the same curve."""

from __future__ import annotations

import math

from workers.spec import DecayShape, LongStage, Segment, ShortStage


def learning_rate(segment: Segment, step: int) -> float:
    """The rate of update `step` of a segment, 0-based.

    Warm-up reaches the full rate with its last update. A decay over `horizon_steps` updates is one step down at its
    first already, has exactly the final rate at its last, and the rate stays there past it. Where a long stage is cut
    into sub-phases, warm-up and decay are those of the whole stage: neither starts anew at a border.

    Raises:
        ValueError: for a negative step, a decay without a horizon, or a kind that does not belong to the stage.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    at = segment.stage_offset_steps + step
    match segment.kind, segment.stage:
        case "short_trunk", ShortStage() as stage:
            return stage.peak_rate * _warmup(at, stage.warmup_steps)
        case "short_decay", ShortStage() as stage:
            return stage.peak_rate * _decay(at, segment.horizon_steps, stage)
        case "long_constant", LongStage() as stage:
            return stage.start_rate * _warmup(at, stage.warmup_steps)
        case "long_linear_decay", LongStage() as stage:
            return stage.start_rate * _decay(at, segment.horizon_steps, stage) * _warmup(at, stage.warmup_steps)
        case "follow_up", LongStage() as stage:
            decay = 1.0 if segment.horizon_steps is None else _decay(at, segment.horizon_steps, stage)
            return stage.start_rate * decay * _warmup(at, stage.warmup_steps)
        case kind, stage:
            raise ValueError(f"a {kind} segment cannot have a {type(stage).__name__}")


def decayed(shape: DecayShape, done: float) -> float:
    """The share of the way from the full to the final rate that lies behind when `done` of the decay does, in [0, 1].

    One minus it is the shape f that is drawn as a rate: 1 - x, 1 - sqrt(x) (Hägele et al. 2024, arXiv 2405.18392,
    equation 2) or (1 + cos(pi x)) / 2.
    """
    match shape:
        case "linear":
            return done
        case "one_sqrt":
            return math.sqrt(done)
        case "cosine":
            return (1.0 - math.cos(math.pi * done)) / 2


def _warmup(at: int, warmup_steps: int) -> float:
    return min(1.0, (at + 1) / warmup_steps) if warmup_steps else 1.0


def _decay(at: int, horizon_steps: int | None, stage: ShortStage | LongStage) -> float:
    if not horizon_steps:
        raise ValueError("a decay needs horizon_steps")
    way = decayed(stage.decay_shape, min(1.0, (at + 1) / horizon_steps))
    return (1.0 - way) + stage.final_rate_ratio * way
