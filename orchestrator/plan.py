"""The least work that covers a grid, beside what exists: what to train, what to measure, and their price. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.costs import gpu_hours
from orchestrator.errors import Problem
from orchestrator.grid import Grid
from orchestrator.layout import LaidOutCell, Layout, lay_out
from orchestrator.plan_values import (
    CellStatus,
    Known,
    KnownSegment,
    Plan,
    PlannedCell,
    PlannedEvaluation,
    PlannedSegment,
    ScaleTotals,
)
from orchestrator.recipe import FolderScale
from orchestrator.trajectories import Draft
from workers.probe_spec import ProbeSet
from workers.spec import Evaluator

_UNKNOWN = KnownSegment()


def plan(grid: Grid, known: Known | None = None) -> Plan:
    """The least training and measuring that covers `grid`, given what is `known` already.

    The plan does not depend on the order in which budgets, seeds or cells are listed.

    Raises:
        GridError: see `orchestrator.layout.lay_out`.
    """
    return plan_of(lay_out(grid), known or Known())


def plan_of(layout: Layout, known: Known) -> Plan:
    """What of a layout is to be done beside what is `known`."""
    drafts = layout.trajectories.segments
    for draft in drafts.values():
        draft.meet(known.segments.get(draft.id, _UNKNOWN))
    evaluations = {key: _beside(evaluation, known) for key, evaluation in layout.evaluations.items()}
    _find_missing(drafts, evaluations.values())
    segments = tuple(draft.planned() for draft in drafts.values())
    cells = tuple(_planned_cell(cell, drafts, [evaluations[key] for key in cell.evaluations]) for cell in layout.cells)
    alone = [_tokens_alone(layout.grid, cell) for cell in cells]
    train_flops = sum(segment.flops for segment in segments)
    measuring_flops = sum(evaluation.flops for evaluation in evaluations.values() if evaluation.state == "new")
    cost = layout.grid.cost
    return Plan(
        name=layout.grid.name,
        protocol=layout.grid.protocol,
        family=layout.family,
        evaluator=layout.evaluator,
        evaluators=tuple(layout.evaluators.values()),
        series=tuple(layout.series.values()),
        segments=segments,
        evaluations=tuple(evaluations.values()),
        cells=cells,
        per_scale=_per_scale(segments, cells, alone),
        tokens_train=sum(segment.tokens_train for segment in segments),
        tokens_independent=sum(alone) + _follow_up_tokens(segments),
        train_flops=train_flops,
        evaluation_flops=measuring_flops,
        checkpoint_bytes=sum(segment.checkpoint_bytes for segment in segments),
        gpu_hours=gpu_hours(
            train_flops + measuring_flops, gpu_flops=cost.gpu_flops, gpu_utilisation=cost.gpu_utilisation
        ),
        gpu_flops=cost.gpu_flops,
        gpu_utilisation=cost.gpu_utilisation,
        warnings=layout.warnings + _without_digest(layout.evaluators.values()),
    )


def _beside(evaluation: PlannedEvaluation, known: Known) -> PlannedEvaluation:
    if evaluation.key in known.evaluated:
        return replace(evaluation, state="evaluated")
    return replace(evaluation, state="in_flight") if evaluation.key in known.in_flight else evaluation


def _find_missing(drafts: dict[str, Draft], evaluations: Iterable[PlannedEvaluation]) -> None:
    """The steps to train: what open evaluations read, and the parent's where a segment has no start of its own."""
    for evaluation in evaluations:
        if evaluation.state != "evaluated":
            for source in evaluation.sources:
                drafts[source.segment].needed.add(source.step)
    for draft in reversed(drafts.values()):  # children come after their parents
        draft.find_missing()


def _planned_cell(
    cell: LaidOutCell, drafts: Mapping[str, Draft], measured_by: Sequence[PlannedEvaluation]
) -> PlannedCell:
    place = cell.asked.place
    status, reason = _status(cell, drafts, measured_by)
    return PlannedCell(
        key=cell.key,
        scale=cell.asked.scale.name,
        n_params=cell.n_params,
        short_tokens=cell.trajectory.short_tokens,
        long_tokens=cell.long_tokens,
        short_seed=place.short_seed,
        long_seed=place.long_seed,
        evaluations=cell.evaluations,
        series=cell.series,
        status=status,
        reason=reason,
    )


def _status(
    cell: LaidOutCell, drafts: Mapping[str, Draft], measured_by: Sequence[PlannedEvaluation]
) -> tuple[CellStatus, str]:
    pending = [evaluation for evaluation in measured_by if evaluation.state != "evaluated"]
    if not pending:
        return "reused", "measured already"
    if all(evaluation.state == "in_flight" for evaluation in pending):
        return "in_flight", "another grid is measuring it"
    sources = [source for evaluation in pending for source in evaluation.sources]
    if not any(source.step in drafts[source.segment].missing for source in sources):
        return "extended", "its checkpoints exist; only the measuring is new"
    trajectory = cell.trajectory
    for long in reversed(trajectory.longs[: trajectory.scale.phase_at(cell.asked.place.long_steps) + 1]):
        ahead = [s.step for s in sources if s.segment == long.id and s.step in long.missing]
        if start := long.start_before(max(ahead) if ahead else max(long.saves) + 1):
            return "extended", f"its long stage goes on from {long.segment.stage_tokens(start):,} tokens"
    decay, trunk = trajectory.decay, trajectory.trunk
    if decay is not None and decay.existing:
        return "extended", f"its long stage starts from the known checkpoint at D_s = {trajectory.short_tokens:,}"
    if trunk is not None and (start := trunk.start_before(trajectory.branch_step + 1)):
        return "extended", f"its short stage goes on from {trunk.segment.stage_tokens(start):,} tokens"
    return "new", "nothing of it exists yet"


def _tokens_alone(grid: Grid, cell: PlannedCell) -> int:
    """Tokens to train for one cell by itself; those that a folder's model has seen are spent."""
    if isinstance(grid.scales[cell.scale], FolderScale):
        return cell.long_tokens
    assert cell.short_tokens is not None
    return cell.short_tokens + cell.long_tokens


def _per_scale(
    segments: Sequence[PlannedSegment], cells: Sequence[PlannedCell], alone: Sequence[int]
) -> tuple[ScaleTotals, ...]:
    """Totals by scale; `alone` are the tokens of each cell by itself."""
    names = dict.fromkeys(cell.scale for cell in cells)
    return tuple(
        ScaleTotals(
            scale=name,
            n_params=next(cell.n_params for cell in cells if cell.scale == name),
            cells=sum(cell.scale == name for cell in cells),
            tokens_train=sum(segment.tokens_train for segment in segments if segment.scale == name),
            tokens_independent=sum(tokens for cell, tokens in zip(cells, alone, strict=True) if cell.scale == name)
            + _follow_up_tokens([segment for segment in segments if segment.scale == name]),
        )
        for name in names
    )


def _follow_up_tokens(segments: Sequence[PlannedSegment]) -> int:
    """Tokens of all follow-up stages, which nothing shares."""
    return sum(
        planned.segment.stage_tokens(planned.segment.horizon_steps or 0)
        for planned in segments
        if planned.segment.kind == "follow_up"
    )


def _without_digest(evaluators: Iterable[Evaluator | ProbeSet]) -> tuple[Problem, ...]:
    references = [evaluator.reference for evaluator in evaluators if isinstance(evaluator, Evaluator)]
    if not any(reference.kind == "huggingface" and reference.digest is None for reference in references):
        return ()
    message = "without a digest, another model at the same path would count as the same evaluator"
    return (Problem(pointer="/evaluation/reference", message=message),)
