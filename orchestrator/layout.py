"""From a grid to everything that covers it: segments, trajectories and evaluations, keyed by content. Pure.

Sharing follows identity alone (`workers.spec.Segment`): cells whose trajectories begin alike pass through the same
segments. What is shared is exactly what cannot differ: the constant-rate trunk of the short stage, its decay for one
D_s, and the constant-rate long stage. A linear decay depends on its horizon, so each D_l has a segment of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.cells import AskedCell, asked_cells
from orchestrator.costs import evaluation_flops
from orchestrator.errors import Problem
from orchestrator.follow_ups import AskedFollowUp, asked_follow_ups
from orchestrator.grid import Grid
from orchestrator.plan_values import PlannedEvaluation, Series, evaluation_key
from orchestrator.probe_settings import resolve_probes
from orchestrator.recipe import EvaluationSettings, family_of, long_decay, resolve_evaluator
from orchestrator.rule_pools import pool_problem
from orchestrator.scales import ResolvedScale
from orchestrator.trajectories import Draft, Trajectories, Trajectory
from workers.probe_spec import ProbeSet
from workers.spec import CheckpointRef, Evaluator, LongStage, ObservationRule, Snapshot, content_hash, steps_for

_RAW = ObservationRule(name="raw")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOutCell:
    """A cell with what it passes through and is measured by: `evaluations[i]`, of each rule, belongs to `series[i]`."""

    key: str
    asked: AskedCell
    trajectory: Trajectory
    evaluations: tuple[str, ...]
    series: tuple[str, ...]

    @property
    def n_params(self) -> int:
        return self.asked.scale.shape.n_params

    @property
    def long_tokens(self) -> int:
        return self.asked.place.long_steps * self.asked.scale.long.tokens_per_step


def lay_out(grid: Grid) -> Layout:
    """All that covers `grid`, whatever exists of it.

    Raises:
        GridError: for budgets that do not fit whole steps or each other; nothing else can go wrong.
    """
    asked = asked_cells(grid)
    follow_ups = asked_follow_ups(grid, asked)
    layout = Layout(grid, asked.warnings)
    for cell in asked.cells:
        layout.add(cell)
    layout.add_diagnostics()
    layout.add_probes()
    for follow_up in follow_ups:
        layout.add_follow_up(follow_up)
    return layout


class Layout:
    """Segments, trajectories and evaluations of one grid, each under its identity, before anything is known of them.

    Identities are most of the work of planning, and what is asked of the results database.
    """

    def __init__(self, grid: Grid, warnings: tuple[Problem, ...]) -> None:
        self.grid = grid
        self.warnings = warnings
        self.family = family_of(grid.recipe)
        self.evaluator = resolve_evaluator(grid.evaluation, grid.recipe)
        self.evaluators: dict[str, Evaluator | ProbeSet] = {self.evaluator.id: self.evaluator}
        self.probes = self._probes(grid.evaluation, self.evaluator)
        self.evaluator_id = self.evaluator.id
        self.trajectories = Trajectories(grid.protocol)
        self.evaluations: dict[str, PlannedEvaluation] = {}
        self.series: dict[str, Series] = {}
        self.cells: list[LaidOutCell] = []
        self._scale_ids: dict[str, str] = {}
        self._evaluation_flops: dict[tuple[str, str], int] = {}
        self._series_ids: dict[str, str] = {}

    @property
    def segment_ids(self) -> tuple[str, ...]:
        return tuple(self.trajectories.segments)

    @property
    def evaluation_keys(self) -> tuple[str, ...]:
        return tuple(self.evaluations)

    def add(self, cell: AskedCell) -> None:
        """Everything that one cell passes through and is measured by."""
        trajectory = self.trajectories.through(cell)
        step = cell.place.long_steps
        keys = tuple(self._evaluation(trajectory, step, rule, asked=True) for rule in cell.rules.values())
        for every in cell.every:
            for rule in cell.rules.values():
                last = trajectory.diagnostics.get((every, rule), 0)
                trajectory.diagnostics[every, rule] = max(last, step)
        series = tuple(self._series(rule) for rule in cell.rules)
        self.cells.append(
            LaidOutCell(
                key=self._cell_key(cell, trajectory), asked=cell, trajectory=trajectory, evaluations=keys, series=series
            )
        )

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
        for cell in self.cells:  # by rising D_l
            trajectory, step = cell.trajectory, cell.asked.place.long_steps
            for rule in cell.asked.rules.values():
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

    def _cell_key(self, cell: AskedCell, trajectory: Trajectory) -> str:
        scale, place = cell.scale, cell.place
        if scale.name not in self._scale_ids:
            self._scale_ids[scale.name] = content_hash([self.family, self.grid.protocol, *scale.recipe])
        long_tokens = place.long_steps * scale.long.tokens_per_step
        return content_hash(
            [self._scale_ids[scale.name], trajectory.short_tokens, long_tokens, place.short_seed, place.long_seed]
        )

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
            n_params=scale.shape.n_params,
            short_tokens=trajectory.short_tokens,
            long_tokens=long_steps * scale.long.tokens_per_step,
            short_seed=trajectory.short_seed,
            long_seed=trajectory.long_seed,
            cluster=trajectory.cluster,
            asked=asked,
            state="new",
            flops=self._flops(scale, evaluator_id),
            follow_up=follow_up,
        )
        return key

    def _flops(self, scale: ResolvedScale, evaluator_id: str) -> int:
        place = scale.name, evaluator_id
        if place not in self._evaluation_flops:
            self._evaluation_flops[place] = evaluation_flops(scale.shape, self.evaluators[evaluator_id])
        return self._evaluation_flops[place]

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
