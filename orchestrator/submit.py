"""From a grid to rows: planned against what is known, and stored, in one transaction."""

from __future__ import annotations

import uuid
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from database import submission
from orchestrator.errors import GridError, Problem
from orchestrator.grid import Grid
from orchestrator.layout import Layout, lay_out
from orchestrator.plan import plan_of
from orchestrator.plan_values import Known, KnownSegment, Plan, PlannedSegment


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmittedGrid:
    grid_id: uuid.UUID
    plan: Plan


def known(session: Session, layout: Layout, *, hold: bool = False) -> Known:
    """What the database already has, or has under way, of all that a grid needs.

    Args:
        hold: it stays so until the transaction ends.
    """
    work = submission.known_work(
        session, segment_keys=layout.segment_ids, evaluation_keys=layout.evaluation_keys, hold=hold
    )
    return Known(
        segments={
            steps.segment_key: KnownSegment(saved_steps=steps.saved, scheduled_steps=steps.scheduled)
            for steps in work.segments
        },
        evaluated=work.evaluated,
        in_flight=work.in_flight,
    )


def submit(session: Session, grid: Grid, *, document: Any) -> SubmittedGrid:
    """Stores the grid and opens the work that is missing; the caller commits.

    Submissions wait for each other, so that two grids that need the same segment open it once.

    Args:
        document: what the user sent, a JSON value kept as it is.

    Raises:
        GridError: see `orchestrator.plan.plan`; also if the plan costs more than the grid's own cap. Nothing is stored.
    """
    layout = lay_out(grid)
    planned = plan_of(layout, known(session, layout, hold=True))
    cap = grid.budget.gpu_hours
    if cap is not None and planned.gpu_hours > cap:
        message = f"the plan needs {planned.gpu_hours:.4g} GPU-hours, the cap is {cap:g}: raise it or ask for less"
        raise GridError([Problem(pointer="/budget/gpu_hours", message=message)])
    return SubmittedGrid(grid_id=submission.store(session, _submission(grid, planned, document)), plan=planned)


def _submission(grid: Grid, planned: Plan, document: Any) -> submission.Submission:
    priorities = _priorities(planned)
    return submission.Submission(
        grid=submission.NewGrid(
            name=planned.name,
            protocol=planned.protocol,
            document=document,
            tokens_train=planned.tokens_train,
            tokens_independent=planned.tokens_independent,
            flops=float(planned.flops),
            gpu_hours=planned.gpu_hours,
            holdout=grid.fit.holdout,
            bootstrap=grid.fit.bootstrap,
        ),
        evaluators=planned.evaluators,
        series=tuple(
            submission.NewSeries(
                id=series.id,
                family=series.family,
                protocol=series.protocol,
                rule=series.rule,
                evaluator_id=series.evaluator,
                metric=series.metric,
                label=series.label,
            )
            for series in planned.series
        ),
        segments=tuple(
            submission.ClaimOnSegment(
                key=segment.id,
                scale=segment.scale,
                spec=segment.segment,
                save_steps=segment.save_steps,
                missing_steps=segment.missing_steps,
                priority=priorities[segment.id],
                execution=segment.execution,
            )
            for segment in planned.segments
        ),
        evaluations=tuple(
            submission.ClaimOnEvaluation(
                key=evaluation.key,
                snapshot=evaluation.snapshot,
                sources=evaluation.sources,
                evaluator_id=evaluation.evaluator.id,
                scale=evaluation.scale,
                n_params=evaluation.n_params,
                short_tokens=evaluation.short_tokens,
                long_tokens=evaluation.long_tokens,
                short_seed=evaluation.short_seed,
                long_seed=evaluation.long_seed,
                cluster=evaluation.cluster,
                follow_up=evaluation.follow_up,
                new=evaluation.state == "new",
            )
            for evaluation in planned.evaluations
        ),
        cells=tuple(
            submission.NewCell(
                key=cell.key,
                scale=cell.scale,
                n_params=cell.n_params,
                short_tokens=cell.short_tokens,
                long_tokens=cell.long_tokens,
                short_seed=cell.short_seed,
                long_seed=cell.long_seed,
                plan_status=cell.status,
                measured_by=tuple(zip(cell.evaluations, cell.series, strict=True)),
            )
            for cell in planned.cells
        ),
    )


def _priorities(planned: Plan) -> dict[str, float]:
    """By segment: operations of the longest chain of missing training that begins with it (the critical path)."""
    children: dict[str, list[PlannedSegment]] = defaultdict(list)
    longest: dict[str, float] = {}
    for planned_segment in reversed(planned.segments):  # children before their parents
        branches = (
            _flops_until_branch(planned_segment, child) + longest[child.id] for child in children[planned_segment.id]
        )
        longest[planned_segment.id] = max(float(planned_segment.flops), *branches, 0.0)
        if planned_segment.segment.parent is not None:
            children[planned_segment.segment.parent.segment].append(planned_segment)
    return longest


def _flops_until_branch(parent: PlannedSegment, child: PlannedSegment) -> float:
    """Operations of the parent's missing training until the child can start; 0 if its checkpoint exists already."""
    branch = child.segment.parent
    if branch is None or branch.step not in parent.missing_steps:
        return 0.0
    return parent.flops * branch.step / parent.missing_steps[-1]
