"""From a grid to the least work that covers it: segments and evaluations, keyed by content. Pure.

Sharing follows identity alone (`workers.spec.Segment`): cells whose trajectories begin alike pass through the same
segments. What is shared is exactly what cannot differ: the constant-rate trunk of the short stage, its decay for one
D_s, and the constant-rate long stage. A linear decay depends on its horizon, so each D_l has a segment of its own.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from orchestrator.cells import AskedCell, asked_cells, decay_steps_for
from orchestrator.costs import checkpoint_bytes, evaluation_flops, gpu_hours
from orchestrator.errors import Problem
from orchestrator.grid import Grid
from orchestrator.plan_values import (
    CellStatus,
    EvaluationState,
    Known,
    KnownSegment,
    Plan,
    PlannedCell,
    PlannedEvaluation,
    PlannedSegment,
    ScaleTotals,
    Series,
    evaluation_key,
)
from orchestrator.recipe import ResolvedScale, family_of, long_floor, resolve_evaluator
from workers.spec import (
    CheckpointRef,
    ObservationRule,
    Segment,
    SegmentKind,
    Snapshot,
    content_hash,
    steps_for,
)

_UNKNOWN = KnownSegment()
_RAW = ObservationRule(name="raw")


@dataclass(slots=True, kw_only=True, eq=False)
class _Draft:
    """A segment while it is being planned: which steps the grid reads, and which of them must come to be."""

    id: str
    segment: Segment
    scale: str
    parent: _Draft | None
    existing: list[int]
    """Steps with a checkpoint, now or without this plan's doing; sorted."""
    saves: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    cells: int = 0

    def start_before(self, step: int) -> int:
        """The latest existing step below `step`; 0 is the segment's beginning."""
        position = bisect_left(self.existing, step)
        return self.existing[position - 1] if position else 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Trajectory:
    """The chain of segments that leads to a cell, from scratch to its long stage."""

    scale: ResolvedScale
    short_seed: int
    long_seed: int
    short_tokens: int
    trunk: _Draft
    branch_step: int
    decay: _Draft
    long: _Draft
    diagnostics: dict[tuple[int, ObservationRule], int] = field(default_factory=dict)
    """(budget at whose multiples to look, rule) -> the last step that this reaches."""

    @property
    def short_checkpoint(self) -> CheckpointRef:
        parent = self.long.segment.parent
        assert parent is not None
        return parent


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
        self.drafts: dict[str, _Draft] = {}
        self.trajectories: dict[str, _Trajectory] = {}
        self.evaluations: dict[str, PlannedEvaluation] = {}
        self.series: dict[str, Series] = {}
        self.cells: list[tuple[AskedCell, _Trajectory, tuple[str, ...]]] = []
        self._places: dict[tuple[object, ...], _Draft] = {}
        self._scales: dict[str, _ScaleFacts] = {}
        self._series_ids: dict[str, str] = {}

    def add(self, cell: AskedCell) -> None:
        """Everything that one cell passes through and is measured by."""
        trajectory = self._trajectory(cell)
        step = cell.place.long_steps
        keys = tuple(self._evaluation(trajectory, step, rule, asked=True) for rule in cell.rules.values())
        for every in cell.every:
            for rule in cell.rules.values():
                last = trajectory.diagnostics.get((every, rule), 0)
                trajectory.diagnostics[every, rule] = max(last, step)
        self.cells.append((cell, trajectory, keys))

    def add_diagnostics(self) -> None:
        """Evaluations between the cells, at every multiple of a budget, and at D_l = 0; after all cells are there."""
        for trajectory in self.trajectories.values():
            tokens_per_step = trajectory.scale.long.tokens_per_step
            for (every, rule), last in trajectory.diagnostics.items():
                multiple = 1
                while (step := steps_for(multiple * every, tokens_per_step)) <= last:
                    if rule.source_steps(step)[0] > 0:
                        self._evaluation(trajectory, step, rule, asked=False)
                    multiple += 1
        if self.grid.evaluation.diagnose_zero:
            clusters = {trajectory.short_checkpoint: trajectory for trajectory in reversed(self.trajectories.values())}
            for trajectory in reversed(clusters.values()):
                self._evaluation(trajectory, 0, _RAW, asked=False)
                self._evaluation(trajectory, 0, _RAW, asked=False, short_stage=True)

    def find_missing(self) -> None:
        """The steps to train: what open evaluations read, and the parent's where a segment has no start of its own."""
        for evaluation in self.evaluations.values():
            if evaluation.state != "evaluated":
                for source in evaluation.sources:
                    self.drafts[source.segment].needed.add(source.step)
        for draft in reversed(self.drafts.values()):  # children come after their parents
            draft.missing = draft.needed.difference(draft.existing)
            parent = draft.segment.parent
            begins = draft.missing and draft.start_before(min(draft.missing)) == 0
            if begins and draft.parent is not None and parent is not None:
                draft.parent.needed.add(parent.step)

    def result(self, warnings: tuple[Problem, ...]) -> Plan:
        segments = tuple(_planned_segment(draft) for draft in self.drafts.values())
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

    def _trajectory(self, cell: AskedCell) -> _Trajectory:
        scale, place = cell.scale, cell.place
        decay_steps = decay_steps_for(place.short_steps)
        trunk = self._draft("short_trunk", scale, None, None, place.short_seed, None)
        branch = place.short_steps - decay_steps
        decay = self._draft("short_decay", scale, trunk, branch, place.short_seed, decay_steps)
        if self.grid.protocol == "constant":
            long = self._draft("long_constant", scale, decay, decay_steps, place.long_seed, None)
        else:
            long = self._draft("long_linear_decay", scale, decay, decay_steps, place.long_seed, place.long_steps)
        trunk.saves.add(branch)
        decay.saves.add(decay_steps)
        for draft in (trunk, decay, long):
            draft.cells += 1
        trajectory = self.trajectories.get(long.id)
        if trajectory is None:
            trajectory = self.trajectories[long.id] = _Trajectory(
                scale=scale,
                short_seed=place.short_seed,
                long_seed=place.long_seed,
                short_tokens=place.short_steps * scale.short.tokens_per_step,
                trunk=trunk,
                branch_step=branch,
                decay=decay,
                long=long,
            )
        return trajectory

    def _draft(
        self,
        kind: SegmentKind,
        scale: ResolvedScale,
        parent: _Draft | None,
        parent_step: int | None,
        seed: int,
        horizon_steps: int | None,
    ) -> _Draft:
        place = (kind, scale.name, parent and parent.id, parent_step, seed, horizon_steps)
        if place in self._places:  # spares the hash
            return self._places[place]
        branch = None
        if parent is not None and parent_step is not None:
            branch = CheckpointRef(segment=parent.id, step=parent_step)
        stage = scale.short if kind in ("short_trunk", "short_decay") else scale.long
        segment = Segment(
            kind=kind, parent=branch, shape=scale.shape, stage=stage, seed=seed, horizon_steps=horizon_steps
        )
        key = segment.id
        draft = self.drafts.get(key)
        if draft is None:
            seen = self.known.segments.get(key, _UNKNOWN)
            draft = self.drafts[key] = _Draft(
                id=key,
                segment=segment,
                scale=scale.name,
                parent=parent,
                existing=sorted(seen.saved_steps | seen.scheduled_steps),
            )
        self._places[place] = draft
        return draft

    def _facts(self, scale: ResolvedScale) -> _ScaleFacts:
        if scale.name not in self._scales:
            self._scales[scale.name] = _ScaleFacts(
                identity=content_hash([self.family, self.grid.protocol, scale.shape, scale.short, scale.long]),
                n_params=scale.shape.n_params,
                evaluation_flops=evaluation_flops(scale.shape, self.evaluator),
            )
        return self._scales[scale.name]

    def _evaluation(
        self, trajectory: _Trajectory, step: int, rule: ObservationRule, *, asked: bool, short_stage: bool = False
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
            self.drafts[source.segment].saves.add(source.step)
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

    def _planned_cell(self, cell: AskedCell, trajectory: _Trajectory, keys: tuple[str, ...]) -> PlannedCell:
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

    def _status(self, trajectory: _Trajectory, keys: tuple[str, ...]) -> tuple[CellStatus, str]:
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


def _planned_segment(draft: _Draft) -> PlannedSegment:
    """Each missing step is trained from the nearest one below it that exists or comes to be."""
    segment = draft.segment
    missing = sorted(draft.missing)
    steps, reached = 0, 0
    for step in missing:
        steps += step - max(reached, draft.start_before(step))
        reached = step
    tokens = steps * segment.stage.tokens_per_step
    return PlannedSegment(
        id=draft.id,
        segment=segment,
        scale=draft.scale,
        save_steps=tuple(sorted(draft.saves)),
        missing_steps=tuple(missing),
        tokens_train=tokens,
        flops=tokens * segment.shape.train_flops_per_token(segment.stage.seq_len),
        checkpoint_bytes=len(missing) * checkpoint_bytes(segment.shape),
        cells=draft.cells,
    )
