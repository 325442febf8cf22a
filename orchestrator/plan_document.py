"""A plan as a JSON document: what `longlaw grid plan --json` prints and the service answers with.

Tokens and bytes are integers (beyond 2^53 a JavaScript reader must take care); operations are floating-point numbers,
since they exceed 64 bits. Lists have names that end in `_detail`, or are short.
"""

from __future__ import annotations

from typing import Any

from orchestrator.plan_values import Plan, PlannedCell, PlannedEvaluation, PlannedSegment


def plan_document(plan: Plan) -> dict[str, Any]:
    """Counts, totals, totals by scale, warnings, and the lists of cells, segments and evaluations."""
    return {
        "name": plan.name,
        "protocol": plan.protocol,
        "cells": len(plan.cells),
        "segments": len(plan.segments),
        "evaluations": len(plan.evaluations),
        "tokens": {"train": plan.tokens_train, "independent": plan.tokens_independent},
        "flops": float(plan.flops),
        "flops_by_kind": {"train": float(plan.train_flops), "evaluate": float(plan.evaluation_flops)},
        "gpu_hours": plan.gpu_hours,
        "gpu_rate": {"gpu_flops": plan.gpu_flops, "gpu_utilisation": plan.gpu_utilisation},
        "checkpoint_bytes": plan.checkpoint_bytes,
        "per_scale": [
            {
                "scale": totals.scale,
                "n_params": totals.n_params,
                "cells": totals.cells,
                "tokens_train": totals.tokens_train,
                "tokens_independent": totals.tokens_independent,
            }
            for totals in plan.per_scale
        ],
        "warnings": [{"pointer": warning.pointer, "message": warning.message} for warning in plan.warnings],
        "cells_detail": [_cell(cell) for cell in plan.cells],
        "segments_detail": [_segment(segment) for segment in plan.segments],
        "evaluations_detail": [_evaluation(evaluation) for evaluation in plan.evaluations],
    }


def _cell(cell: PlannedCell) -> dict[str, Any]:
    return {
        "key": cell.key,
        "scale": cell.scale,
        "n_params": cell.n_params,
        "short_tokens": cell.short_tokens,
        "long_tokens": cell.long_tokens,
        "short_seed": cell.short_seed,
        "long_seed": cell.long_seed,
        "status": cell.status,
        "reason": cell.reason,
        "evaluations": list(cell.evaluations),
    }


def _segment(planned: PlannedSegment) -> dict[str, Any]:
    segment = planned.segment
    parent = segment.parent
    return {
        "id": planned.id,
        "kind": segment.kind,
        "scale": planned.scale,
        "seed": segment.seed,
        "parent": None if parent is None else {"segment": parent.segment, "step": parent.step},
        "stage_offset_steps": segment.stage_offset_steps,
        "tokens_per_step": segment.stage.tokens_per_step,
        "save_steps": list(planned.save_steps),
        "missing_steps": list(planned.missing_steps),
        "tokens_train": planned.tokens_train,
        "flops": float(planned.flops),
        "checkpoint_bytes": planned.checkpoint_bytes,
        "cells": planned.cells,
    }


def _evaluation(evaluation: PlannedEvaluation) -> dict[str, Any]:
    rule = evaluation.snapshot.rule
    shares = {"decay": rule.decay, "density": rule.density}
    return {
        "key": evaluation.key,
        "scale": evaluation.scale,
        "n_params": evaluation.n_params,
        "short_tokens": evaluation.short_tokens,
        "long_tokens": evaluation.long_tokens,
        "short_seed": evaluation.short_seed,
        "long_seed": evaluation.long_seed,
        "segment": evaluation.snapshot.segment,
        "step": evaluation.snapshot.step,
        "rule": {
            "name": rule.name,
            "m": rule.m,
            "spacing_steps": rule.spacing_steps,
            **{name: value for name, value in shares.items() if value is not None},
        },
        "follow_up": evaluation.follow_up,
        "asked": evaluation.asked,
        "state": evaluation.state,
        "flops": float(evaluation.flops),
    }
