"""A grid document whose numbers can be worked out by hand, and what a finished plan leaves behind."""

from __future__ import annotations

import copy
from typing import Any

from orchestrator.grid import parse_grid
from orchestrator.plan import plan
from orchestrator.plan_values import Known, KnownSegment, Plan

#: Tokens of one optimizer step of either stage.
SHORT_STEP = 8
LONG_STEP = 16


def small_document(**changes: Any) -> dict[str, Any]:
    """Two scales x D_s of 90 and 180 steps x D_l of 10 and 20 steps, one seed each, raw, constant.

    Trunks branch at 80 and 160 steps, decays take 10 and 20. `changes` replace top-level keys.
    """
    document: dict[str, Any] = {
        "name": "small",
        "protocol": "constant",
        "scales": {
            "a": {"layers": 1, "width": 4, "heads": 2, "ffn_width": 8},
            "b": {"layers": 2, "width": 8, "heads": 2, "ffn_width": 16},
        },
        "short_tokens": [90 * SHORT_STEP, 180 * SHORT_STEP],
        "long_tokens": [10 * LONG_STEP, 20 * LONG_STEP],
        "recipe": {
            "corpus": "0123456789abcdef0123456789abcdef",
            "model": {"vocab_size": 32},
            "short": {"seq_len": 4, "batch_sequences": 2, "peak_rate": 0.01, "warmup_steps": 5},
            "long": {"seq_len": 16, "batch_sequences": 1, "rope_base": 100_000},
        },
        "evaluation": {"reference": {"kind": "copy"}, "documents": {"count": 2, "length": 16}},
    }
    return copy.deepcopy(document | changes)


def small_plan(known: Known | None = None, **changes: Any) -> Plan:
    return plan(parse_grid(small_document(**changes)), known)


def known_after(*plans: Plan) -> Known:
    """What is known once everything in `plans` is trained and measured."""
    steps: dict[str, set[int]] = {}
    for finished in plans:
        for segment in finished.segments:
            steps.setdefault(segment.id, set()).update(segment.save_steps)
    return Known(
        segments={key: KnownSegment(saved_steps=frozenset(saved)) for key, saved in steps.items()},
        evaluated=frozenset(evaluation.key for finished in plans for evaluation in finished.evaluations),
    )
