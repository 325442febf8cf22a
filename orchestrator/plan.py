"""From a grid to the least work that covers it: segments and evaluations, keyed by content. Pure.

Sharing follows identity alone (`workers.spec.Segment`): cells whose trajectories begin alike pass through the same
segments. What is shared is exactly what cannot differ: the constant-rate trunk of the short stage, its decay for one
D_s, and the constant-rate long stage. A linear decay depends on its horizon, so each D_l has a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.cells import AskedCell, asked_cells
from orchestrator.costs import evaluation_flops, gpu_hours
from orchestrator.errors import Problem
from orchestrator.grid import Grid
from orchestrator.plan_values import (
    CellStatus,
    EvaluationState,
    Known,
    Plan,
    PlannedCell,
    PlannedEvaluation,
    PlannedSegment,
    ScaleTotals,
    Series,
    evaluation_key,
)
from orchestrator.recipe import ResolvedScale, family_of, long_floor, resolve_evaluator
from orchestrator.trajectories import Trajectories, Trajectory
from workers.spec import CheckpointRef, ObservationRule, Snapshot, content_hash, steps_for

_RAW = ObservationRule(name="raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaleFacts:
    """What all cells of a scale share, worked out once."""

    identity: str
    n_params: int
    evaluation_flops: int


def plan(grid: Grid, known: Known | None = None) -> Plan:
    """The least training and measuring that covers `grid`, given what is `known` already.

    The plan does not depend on the order in which budgets, seeds or cells are listed.

    Raises:
        GridError: for budgets that do not fit whole steps or each other; nothing else can go wrong.
    """
    asked = asked_cells(grid)
    planner = _Planner(grid, known or Known())
    for cell in asked.cells:
        planner.add(cell)
    planner.add_diagnostics()
    planner.find_missing()
    return planner.result(asked.warnings)


class _Planner:
    """Gathers segments, trajectories and evaluations of one grid, each under its identity."""

    def __init__(self, grid: Grid, known: Known) -> None:
        self.grid = grid
        self.known = known
        self.family = family_of(grid.recipe)
        self.evaluator = resolve_evaluator(grid.evaluation, grid.recipe)
        self.evaluator_id = self.evaluator.id
        self.trajectories = Trajectories(grid.protocol, known.segments)
        self.evaluations: dict[str, PlannedEvaluation] = {}
        self.series: dict[str, Series] = {}
        self.cells: list[tuple[AskedCell, Trajectory, tuple[str, ...]]] = []
        self._scales: dict[str, _ScaleFacts] = {}
        self._series_ids: dict[str, str] = {}

    def add(self, cell: AskedCell) -> None:
        """Everything that one cell passes through and is measured by."""
        trajectory = self.trajectories.through(cell)
        step = cell.place.long_steps
        keys = tuple(self._evaluation(trajectory, step, rule, asked=True) for rule in cell.rules.values())
        for every in cell.every:
            for rule in cell.rules.values():
                last = trajectory.diagnostics.get((every, rule), 0)
                trajectory.diagnostics[every, rule] = max(last, step)
        self.cells.append((cell, trajectory, keys))

    def add_diagnostics(self) -> None:
        """Evaluations between the cells, at every multiple of a budget, and at D_l = 0; after all cells are there."""
        for trajectory in self.trajectories:
            tokens_per_step = trajectory.scale.long.tokens_per_step
            for (every, rule), last in trajectory.diagnostics.items():
                multiple = 1
                while (step := steps_for(multiple * every, tokens_per_step)) <= last:
                    if rule.source_steps(step)[0] > 0:
                        self._evaluation(trajectory, step, rule, asked=False)
                    multiple += 1
        if self.grid.evaluation.diagnose_zero:
            first: dict[CheckpointRef, Trajectory] = {}
            for trajectory in self.trajectories:
                first.setdefault(trajectory.short_checkpoint, trajectory)
            for trajectory in first.values():
                self._evaluation(trajectory, 0, _RAW, asked=False)
                self._evaluation(trajectory, 0, _RAW, asked=False, short_stage=True)

    def find_missing(self) -> None:
        """The steps to train: what open evaluations read, and the parent's where a segment has no start of its own."""
        for evaluation in self.evaluations.values():
            if evaluation.state != "evaluated":
                for source in evaluation.sources:
                    self.trajectories.segments[source.segment].needed.add(source.step)
        for draft in reversed(self.trajectories.segments.values()):  # children come after their parents
            draft.find_missing()

    def result(self, warnings: tuple[Problem, ...]) -> Plan:
        segments = tuple(draft.planned() for draft in self.trajectories.segments.values())
        cells = tuple(self._planned_cell(*entry) for entry in self.cells)
        train_flops = sum(segment.flops for segment in segments)
        measuring_flops = sum(evaluation.flops for evaluation in self.evaluations.values() if evaluation.state == "new")
        cost = self.grid.cost
        reference = self.evaluator.reference
        if reference.kind == "huggingface" and reference.digest is None:
            message = "without a digest, another model at the same path would count as the same evaluator"
            warnings += (Problem(pointer="/evaluation/reference", message=message),)
        return Plan(
            name=self.grid.name,
            protocol=self.grid.protocol,
            family=self.family,
            evaluator=self.evaluator,
            series=tuple(self.series.values()),
            segments=segments,
            evaluations=tuple(self.evaluations.values()),
            cells=cells,
            per_scale=self._per_scale(segments, cells),
            tokens_train=sum(segment.tokens_train for segment in segments),
            tokens_independent=sum(cell.short_tokens + cell.long_tokens for cell in cells),
            train_flops=train_flops,
            evaluation_flops=measuring_flops,
            checkpoint_bytes=sum(segment.checkpoint_bytes for segment in segments),
            gpu_hours=gpu_hours(
                train_flops + measuring_flops, gpu_flops=cost.gpu_flops, gpu_utilisation=cost.gpu_utilisation
            ),
            gpu_flops=cost.gpu_flops,
            gpu_utilisation=cost.gpu_utilisation,
            warnings=warnings,
        )

    def _facts(self, scale: ResolvedScale) -> _ScaleFacts:
        if scale.name not in self._scales:
            self._scales[scale.name] = _ScaleFacts(
                identity=content_hash([self.family, self.grid.protocol, scale.shape, scale.short, scale.long]),
                n_params=scale.shape.n_params,
                evaluation_flops=evaluation_flops(scale.shape, self.evaluator),
            )
        return self._scales[scale.name]

    def _evaluation(
        self, trajectory: Trajectory, step: int, rule: ObservationRule, *, asked: bool, short_stage: bool = False
    ) -> str:
        """The key of measuring `rule` at `step` of a trajectory's long stage, or at the end of its short stage."""
        scale, long = trajectory.scale, trajectory.long
        draft, at = (trajectory.decay, trajectory.short_checkpoint.step) if short_stage else (long, step)
        snapshot = Snapshot(segment=draft.id, step=at, rule=rule)
        key = evaluation_key(snapshot.id, self.evaluator_id)
        if key in self.evaluations:
            return key
        sources = (trajectory.short_checkpoint,) if step == 0 else snapshot.sources
        for source in sources:
            self.trajectories.segments[source.segment].saves.add(source.step)
        state: EvaluationState = "new"
        if key in self.known.evaluated:
            state = "evaluated"
        elif key in self.known.in_flight:
            state = "in_flight"
        facts = self._facts(scale)
        short_checkpoint = trajectory.short_checkpoint
        self.evaluations[key] = PlannedEvaluation(
            key=key,
            snapshot=snapshot,
            evaluator=self.evaluator,
            sources=sources,
            shape=scale.shape,
            rope_base=draft.segment.stage.rope_base,
            scale=scale.name,
            n_params=facts.n_params,
            short_tokens=trajectory.short_tokens,
            long_tokens=step * scale.long.tokens_per_step,
            short_seed=trajectory.short_seed,
            long_seed=trajectory.long_seed,
            cluster=f"{short_checkpoint.segment}:{short_checkpoint.step}",
            asked=asked,
            state=state,
            flops=facts.evaluation_flops,
        )
        return key

    def _planned_cell(self, cell: AskedCell, trajectory: Trajectory, keys: tuple[str, ...]) -> PlannedCell:
        place, facts = cell.place, self._facts(cell.scale)
        long_tokens = place.long_steps * cell.scale.long.tokens_per_step
        status, reason = self._status(trajectory, keys)
        return PlannedCell(
            key=content_hash([facts.identity, trajectory.short_tokens, long_tokens, place.short_seed, place.long_seed]),
            scale=cell.scale.name,
            n_params=facts.n_params,
            short_tokens=trajectory.short_tokens,
            long_tokens=long_tokens,
            short_seed=place.short_seed,
            long_seed=place.long_seed,
            evaluations=keys,
            series=tuple(self._series(rule) for rule in cell.rules),
            status=status,
            reason=reason,
        )

    def _series(self, rule: str) -> str:
        if rule not in self._series_ids:
            series = Series(
                family=self.family,
                protocol=self.grid.protocol,
                final_rate_ratio=1.0 if self.grid.protocol == "constant" else long_floor(self.grid.recipe),
                rule=rule,
                evaluator=self.evaluator_id,
            )
            self._series_ids[rule] = series.id
            self.series[series.id] = series
        return self._series_ids[rule]

    def _status(self, trajectory: Trajectory, keys: tuple[str, ...]) -> tuple[CellStatus, str]:
        pending = [self.evaluations[key] for key in keys if self.evaluations[key].state != "evaluated"]
        if not pending:
            return "reused", "measured already"
        if all(evaluation.state == "in_flight" for evaluation in pending):
            return "in_flight", "another grid is measuring it"
        long, decay, trunk = trajectory.long, trajectory.decay, trajectory.trunk
        missing = long.missing.intersection(source.step for e in pending for source in e.sources)
        if not missing:
            return "extended", "its checkpoints exist; only the measuring is new"
        if start := long.start_before(max(missing)):
            return "extended", f"its long stage goes on from {long.segment.stage_tokens(start):,} tokens"
        if decay.existing:
            return "extended", f"its long stage starts from the known checkpoint at D_s = {trajectory.short_tokens:,}"
        if start := trunk.start_before(trajectory.branch_step + 1):
            return "extended", f"its short stage goes on from {trunk.segment.stage_tokens(start):,} tokens"
        return "new", "nothing of it exists yet"

    def _per_scale(
        self, segments: tuple[PlannedSegment, ...], cells: tuple[PlannedCell, ...]
    ) -> tuple[ScaleTotals, ...]:
        names = dict.fromkeys(cell.scale for cell in cells)
        return tuple(
            ScaleTotals(
                scale=name,
                n_params=next(cell.n_params for cell in cells if cell.scale == name),
                cells=sum(cell.scale == name for cell in cells),
                tokens_train=sum(segment.tokens_train for segment in segments if segment.scale == name),
                tokens_independent=sum(c.short_tokens + c.long_tokens for c in cells if c.scale == name),
            )
            for name in names
        )
