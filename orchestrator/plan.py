"""From a grid to the least work that covers it: segments and evaluations, keyed by content. Pure.

Sharing follows identity alone (`workers.spec.Segment`): cells whose trajectories begin alike pass through the same
segments. What is shared is exactly what cannot differ: the constant-rate trunk of the short stage, its decay for one
D_s, and the constant-rate long stage. A linear decay depends on its horizon, so each D_l has a segment of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.cells import AskedCell, asked_cells
from orchestrator.costs import evaluation_flops, gpu_hours
from orchestrator.errors import Problem
from orchestrator.follow_ups import AskedFollowUp, asked_follow_ups
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
from orchestrator.probe_settings import resolve_probes
from orchestrator.recipe import EvaluationSettings, FolderScale, family_of, long_decay, resolve_evaluator
from orchestrator.rule_pools import pool_problem
from orchestrator.scales import ResolvedScale
from orchestrator.trajectories import Draft, Trajectories, Trajectory
from workers.probe_spec import ProbeSet
from workers.spec import (
    CheckpointRef,
    Evaluator,
    LongStage,
    ObservationRule,
    Snapshot,
    content_hash,
    steps_for,
)

_RAW = ObservationRule(name="raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class _ScaleFacts:
    """What all cells of a scale share, worked out once."""

    identity: str
    n_params: int


def plan(grid: Grid, known: Known | None = None) -> Plan:
    """The least training and measuring that covers `grid`, given what is `known` already.

    The plan does not depend on the order in which budgets, seeds or cells are listed.

    Raises:
        GridError: for budgets that do not fit whole steps or each other; nothing else can go wrong.
    """
    asked = asked_cells(grid)
    follow_ups = asked_follow_ups(grid, asked)
    planner = _Planner(grid, known or Known())
    for cell in asked.cells:
        planner.add(cell)
    planner.add_diagnostics()
    planner.add_probes()
    for follow_up in follow_ups:
        planner.add_follow_up(follow_up)
    planner.find_missing()
    return planner.result(asked.warnings)


class _Planner:
    """Gathers segments, trajectories and evaluations of one grid, each under its identity."""

    def __init__(self, grid: Grid, known: Known) -> None:
        self.grid = grid
        self.known = known
        self.family = family_of(grid.recipe)
        self.evaluator = resolve_evaluator(grid.evaluation, grid.recipe)
        self.evaluators: dict[str, Evaluator | ProbeSet] = {self.evaluator.id: self.evaluator}
        self.probes = self._probes(grid.evaluation, self.evaluator)
        self.evaluator_id = self.evaluator.id
        self.trajectories = Trajectories(grid.protocol, known.segments)
        self.evaluations: dict[str, PlannedEvaluation] = {}
        self.series: dict[str, Series] = {}
        self.cells: list[tuple[AskedCell, Trajectory, tuple[str, ...]]] = []
        self._scales: dict[str, _ScaleFacts] = {}
        self._evaluation_flops: dict[tuple[str, str], int] = {}
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
                    if pool_problem(rule, trajectory.scale, step) is None:
                        self._evaluation(trajectory, step, rule, asked=False)
                    multiple += 1
        if self.grid.evaluation.diagnose_zero:
            first: dict[str, Trajectory] = {}
            for trajectory in self.trajectories:
                first.setdefault(trajectory.cluster, trajectory)
            for trajectory in first.values():
                self._evaluation(trajectory, 0, _RAW, asked=False)
                if trajectory.decay is not None:
                    self._evaluation(trajectory, 0, _RAW, asked=False, short_stage=True)

    def add_probes(self) -> None:
        """Probes of the cells' models, or of those at the largest D_l of each trajectory; after all cells are there."""
        if self.probes is None:
            return
        places: dict[tuple[int, ObservationRule], tuple[Trajectory, int]] = {}
        everywhere = self.grid.evaluation.probes is not None and self.grid.evaluation.probes.at == "cells"
        for cell, trajectory, _ in self.cells:  # by rising D_l
            for rule in cell.rules.values():
                step = cell.place.long_steps
                if everywhere:
                    self._evaluation(trajectory, step, rule, asked=False, evaluator_id=self.probes)
                places[id(trajectory), rule] = trajectory, step
        for (_, rule), (trajectory, step) in places.items():
            self._evaluation(trajectory, step, rule, asked=False, evaluator_id=self.probes)

    def _probes(self, evaluation: EvaluationSettings, evaluator: Evaluator) -> str | None:
        """The id of the set of probes that goes with an evaluation, if one does."""
        if evaluation.probes is None:
            return None
        probe_set = resolve_probes(evaluation.probes, evaluator.documents)
        self.evaluators.setdefault(probe_set.id, probe_set)
        return probe_set.id

    def add_follow_up(self, asked: AskedFollowUp) -> None:
        """A stage that begins at a cell's model, and the measuring of its end; after all cells are there."""
        trajectory = self.trajectories.through(asked.cell, counted=False)
        step = asked.cell.place.long_steps
        draft = self.trajectories.follow_up(
            trajectory, step, rule=asked.rule, stage=asked.stage, horizon_steps=asked.steps
        )
        evaluator_id = asked.evaluator.id
        self.evaluators.setdefault(evaluator_id, asked.evaluator)
        snapshot = Snapshot(segment=draft.id, step=asked.steps, rule=_RAW)
        probes = self._probes(asked.evaluation, asked.evaluator)
        for measured_by in (evaluator_id, *([probes] if probes else [])):
            self._measure(
                trajectory,
                draft,
                snapshot,
                snapshot.sources,
                long_steps=step,
                evaluator_id=measured_by,
                asked=False,
                follow_up=asked.name,
            )

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
        if any(_without_digest(evaluator) for evaluator in self.evaluators.values()):
            message = "without a digest, another model at the same path would count as the same evaluator"
            warnings += (Problem(pointer="/evaluation/reference", message=message),)
        return Plan(
            name=self.grid.name,
            protocol=self.grid.protocol,
            family=self.family,
            evaluator=self.evaluator,
            evaluators=tuple(self.evaluators.values()),
            series=tuple(self.series.values()),
            segments=segments,
            evaluations=tuple(self.evaluations.values()),
            cells=cells,
            per_scale=self._per_scale(segments, cells),
            tokens_train=sum(segment.tokens_train for segment in segments),
            tokens_independent=sum(self._tokens_alone(cell) for cell in cells) + _follow_up_tokens(segments),
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
                identity=content_hash([self.family, self.grid.protocol, *scale.recipe]),
                n_params=scale.shape.n_params,
            )
        return self._scales[scale.name]

    def _evaluation(
        self,
        trajectory: Trajectory,
        step: int,
        rule: ObservationRule,
        *,
        asked: bool,
        short_stage: bool = False,
        evaluator_id: str | None = None,
    ) -> str:
        """The key of measuring `rule` at `step` of a trajectory's long stage, or at the end of its short stage."""
        start = trajectory.short_checkpoint
        if short_stage:
            assert trajectory.decay is not None
            assert start is not None
            draft, at = trajectory.decay, start.step
        else:
            draft, at = trajectory.long_at(step)
        snapshot = Snapshot(segment=draft.id, step=at, rule=rule)
        sources = snapshot.sources if step else (start,) if start is not None else ()
        return self._measure(
            trajectory,
            draft,
            snapshot,
            sources,
            long_steps=step,
            evaluator_id=evaluator_id or self.evaluator_id,
            asked=asked,
        )

    def _measure(
        self,
        trajectory: Trajectory,
        draft: Draft,
        snapshot: Snapshot,
        sources: tuple[CheckpointRef, ...],
        *,
        long_steps: int,
        evaluator_id: str,
        asked: bool,
        follow_up: str | None = None,
    ) -> str:
        key = evaluation_key(snapshot.id, evaluator_id)
        if key in self.evaluations:
            return key
        for source in sources:
            self.trajectories.segments[source.segment].saves.add(source.step)
        state: EvaluationState = "new"
        if key in self.known.evaluated:
            state = "evaluated"
        elif key in self.known.in_flight:
            state = "in_flight"
        scale, stage = trajectory.scale, draft.segment.stage
        self.evaluations[key] = PlannedEvaluation(
            key=key,
            snapshot=snapshot,
            evaluator=self.evaluators[evaluator_id],
            sources=sources,
            shape=scale.shape,
            rope_base=stage.rope_base,
            yarn=stage.yarn if isinstance(stage, LongStage) else None,
            scale=scale.name,
            n_params=self._facts(scale).n_params,
            short_tokens=trajectory.short_tokens,
            long_tokens=long_steps * scale.long.tokens_per_step,
            short_seed=trajectory.short_seed,
            long_seed=trajectory.long_seed,
            cluster=trajectory.cluster,
            asked=asked,
            state=state,
            flops=self._flops(scale, evaluator_id),
            follow_up=follow_up,
        )
        return key

    def _flops(self, scale: ResolvedScale, evaluator_id: str) -> int:
        place = scale.name, evaluator_id
        if place not in self._evaluation_flops:
            self._evaluation_flops[place] = evaluation_flops(scale.shape, self.evaluators[evaluator_id])
        return self._evaluation_flops[place]

    def _planned_cell(self, cell: AskedCell, trajectory: Trajectory, keys: tuple[str, ...]) -> PlannedCell:
        place, facts = cell.place, self._facts(cell.scale)
        long_tokens = place.long_steps * cell.scale.long.tokens_per_step
        status, reason = self._status(trajectory, place.long_steps, keys)
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

    def _tokens_alone(self, cell: PlannedCell) -> int:
        """Tokens to train for one cell by itself; those that a folder's model has seen are spent."""
        if isinstance(self.grid.scales[cell.scale], FolderScale):
            return cell.long_tokens
        assert cell.short_tokens is not None
        return cell.short_tokens + cell.long_tokens

    def _series(self, rule: str) -> str:
        if rule not in self._series_ids:
            floor, decay_shape = long_decay(self.grid.recipe)
            constant = self.grid.protocol == "constant"
            series = Series(
                family=self.family,
                protocol=self.grid.protocol,
                final_rate_ratio=1.0 if constant else floor,
                rule=rule,
                evaluator=self.evaluator_id,
                decay_shape="linear" if constant else decay_shape,
            )
            self._series_ids[rule] = series.id
            self.series[series.id] = series
        return self._series_ids[rule]

    def _status(self, trajectory: Trajectory, step: int, keys: tuple[str, ...]) -> tuple[CellStatus, str]:
        pending = [self.evaluations[key] for key in keys if self.evaluations[key].state != "evaluated"]
        if not pending:
            return "reused", "measured already"
        if all(evaluation.state == "in_flight" for evaluation in pending):
            return "in_flight", "another grid is measuring it"
        sources = [source for evaluation in pending for source in evaluation.sources]
        segments = self.trajectories.segments
        if not any(source.step in segments[source.segment].missing for source in sources):
            return "extended", "its checkpoints exist; only the measuring is new"
        for long in reversed(trajectory.longs[: trajectory.scale.phase_at(step) + 1]):
            ahead = [s.step for s in sources if s.segment == long.id and s.step in long.missing]
            if start := long.start_before(max(ahead) if ahead else max(long.saves) + 1):
                return "extended", f"its long stage goes on from {long.segment.stage_tokens(start):,} tokens"
        decay, trunk = trajectory.decay, trajectory.trunk
        if decay is not None and decay.existing:
            return "extended", f"its long stage starts from the known checkpoint at D_s = {trajectory.short_tokens:,}"
        if trunk is not None and (start := trunk.start_before(trajectory.branch_step + 1)):
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
                tokens_independent=sum(self._tokens_alone(cell) for cell in cells if cell.scale == name)
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


def _without_digest(evaluator: Evaluator | ProbeSet) -> bool:
    return (
        isinstance(evaluator, Evaluator)
        and evaluator.reference.kind == "huggingface"
        and evaluator.reference.digest is None
    )
