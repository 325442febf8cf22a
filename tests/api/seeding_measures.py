"""A grid that was looked at: how its training went, and what probes found, in numbers as they might be."""

from __future__ import annotations

import math
from typing import Any

from database.models import Evaluation
from database.work import ClaimedSegment
from tests.api.seeding import document
from workers.results import HealthPoint, Metric

LENGTHS = (64, 128, 256)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
FOLLOW_UP = "extension"
RELEASED = "released"
_MODEL = {"digest": "d" * 64, "n_params": 20_000, "embedding_params": 4_096, "layers": 2, "width": 32, "vocab_size": 64}


def looked_at(**changes: Any) -> dict[str, Any]:
    """Two shapes and a model from a folder whose D_s nobody knows, each with a stage that follows its largest D_l."""
    made = document(name="looked at", long_tokens=[8 * 64, 16 * 64, 64 * 64])
    made["scales"][RELEASED] = {"model": _MODEL, "short_tokens_seen": "unknown"}
    made["recipe"]["long"]["start_rate"] = 0.004
    made["follow_ups"] = [{"name": FOLLOW_UP, "from": {"name": "raw"}, "tokens": 16 * 64, "final_rate_ratio": 0.1}]
    return made | changes


def health(claimed: ClaimedSegment) -> tuple[HealthPoint, ...]:
    """A point of every step; larger models lose less, and later stages go on where those before ended."""
    segment = claimed.run.segment
    earlier = {"short_trunk": 0, "short_decay": 24, "follow_up": 150}.get(segment.kind, 40)
    width = getattr(segment.shape, "width", 32)
    return tuple(
        HealthPoint(
            step=step,
            loss=2.0 + 20 / width + 2.5 / (1 + 0.2 * (earlier + step)) ** 0.5 + 0.03 * math.sin(1.7 * step + width),
            gradient_norm=0.6 + 1.5 / (earlier + step) ** 0.5 + 0.1 * math.sin(2.3 * step),
            learning_rate=0.01 / (1 + 0.02 * (earlier + step)),
            tokens_per_s=3.2e6 / width * (1 + 0.03 * math.sin(step)),
            mfu=0.4 + 0.01 * math.sin(step),
        )
        for step in range(1, max(claimed.run.save_steps) + 1)
    )


def probes(row: Evaluation) -> tuple[Metric, ...]:
    """The numbers of every probe that the dashboard draws, and one that it lists."""
    grown = math.log2(1 + row.long_tokens / 256) * row.n_params**0.2 / 7 + (0.5 if row.follow_up else 0.0)
    metrics = []
    for length in LENGTHS:
        for depth in DEPTHS:
            middle = 1 - 0.6 * math.sin(math.pi * depth)
            found = min(1.0, max(0.0, 0.3 * grown * middle * LENGTHS[0] / length + 0.2))
            metrics += [
                Metric(name="passkey_accuracy", value=round(found, 1), count=10, length=length, depth=depth),
                Metric(
                    name="needle_nll", value=4.0 - 0.5 * grown * middle, count=40 + length, length=length, depth=depth
                ),
            ]
    metrics += [
        Metric(
            name="position_loss",
            value=2.6 + 3.0 / (first + 1) ** 0.5 - 0.1 * grown,
            count=2 * first,
            length=2 * first,
            label=f"{first}-{2 * first - 1}",
        )
        for first in (1, 2, 4, 8, 16, 32, 64)
    ]
    metrics += [
        Metric(name="retrieval_heads", value=float(round(2 + 2 * grown)), count=160, length=128),
        Metric(name="retrieval_head_score", value=0.4, count=160, length=128, label="0.1"),
    ]
    return tuple(metrics)
