"""Segments and trajectories while they are being planned: which steps a grid reads, which of them must come to be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field

from orchestrator.cells import AskedCell, decay_steps_for
from orchestrator.costs import checkpoint_bytes
from orchestrator.plan_values import KnownSegment, PlannedSegment
from orchestrator.scales import ResolvedScale
from workers.spec import (
    CheckpointRef,
    Execution,
    FolderModel,
    LongStage,
    ObservationRule,
    Protocol,
    Segment,
    SegmentKind,
    ShortStage,
)


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A segment in the making. `existing` steps have a checkpoint, now or without this plan's doing; sorted.

    `start_steps` are the checkpoints of `parent` that it begins with: one, or those of a rule.
    """

    id: str
    segment: Segment
    scale: str
    parent: Draft | None
    start_steps: tuple[int, ...]
    execution: Execution
    saves: set[int] = field(default_factory=set)
    existing: list[int] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    cells: int = 0

    def meet(self, known: KnownSegment) -> None:
        """Takes note of what exists; nothing is needed or missing then, until somebody says so."""
        self.existing = sorted(known.saved_steps | known.scheduled_steps)
        self.needed, self.missing = set(), set()

    def start_before(self, step: int) -> int:
        """The latest existing step below `step`; 0 is the segment's beginning."""
        position = bisect_left(self.existing, step)
        return self.existing[position - 1] if position else 0

    def find_missing(self) -> None:
        """Settles what must be trained, and asks the parent for its checkpoint if that begins at step 0."""
        self.missing = self.needed.difference(self.existing)
        begins = self.missing and self.start_before(min(self.missing)) == 0
        if begins and self.parent is not None:
            self.parent.needed.update(self.start_steps)

    def planned(self) -> PlannedSegment:
        """The segment with its prices: each missing step is trained from the nearest one below that exists or will."""
        missing = sorted(self.missing)
        steps, reached = 0, 0
        for step in missing:
            steps += step - max(reached, self.start_before(step))
            reached = step
        stage, shape = self.segment.stage, self.segment.shape
        tokens = steps * stage.tokens_per_step
        return PlannedSegment(
            id=self.id,
            segment=self.segment,
            scale=self.scale,
            save_steps=tuple(sorted(self.saves)),
            missing_steps=tuple(missing),
            tokens_train=tokens,
            flops=tokens * shape.train_flops_per_token(stage.seq_len),
            checkpoint_bytes=len(missing) * checkpoint_bytes(shape, stage.optimizer),
            cells=self.cells,
            execution=self.execution,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """The chain of segments to and through a long stage; `longs` holds one for each phase that is reached.

    A model from a folder stands for trunk and decay; `short_checkpoint` is where the short stage ends.
    """

    scale: ResolvedScale
    short_seed: int
    long_seed: int
    short_tokens: int | None
    horizon_steps: int | None
    trunk: Draft | None = None
    branch_step: int = 0
    decay: Draft | None = None
    short_checkpoint: CheckpointRef | None = None
    longs: list[Draft] = field(default_factory=list)
    diagnostics: dict[tuple[int, ObservationRule], int] = field(default_factory=dict)
    """(budget at whose multiples to look, rule) -> the last step that this reaches."""

    @property
    def cluster(self) -> str:
        """Names the model whose noise all long stages from it share."""
        if self.short_checkpoint is not None:
            return f"{self.short_checkpoint.segment}:{self.short_checkpoint.step}"
        assert isinstance(self.scale.shape, FolderModel)
        return f"model:{self.scale.shape.digest}"

    def long_at(self, step: int) -> tuple[Draft, int]:
        """The segment whose checkpoint stands at `step` of the long stage, and the step there."""
        return self.longs[self.scale.phase_at(step)], self.scale.step_in_phase(step)


class Trajectories:
    """All trajectories of a grid; those that begin alike share their first segments.

    `segments` holds every segment once, by id, parents before their children.
    """

    def __init__(self, protocol: Protocol) -> None:
        self.segments: dict[str, Draft] = {}
        self._protocol = protocol
        self._by_place: dict[tuple[object, ...], Trajectory] = {}
        self._short_stages: dict[tuple[object, ...], tuple[Draft, Draft]] = {}

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._by_place.values())

    def through(self, cell: AskedCell, *, counted: bool = True) -> Trajectory:
        """The trajectory that leads to a cell; counts the cell on each of its segments."""
        at = cell.place
        horizon_steps = at.long_steps if self._protocol == "linear_decay" else None
        place = (cell.scale.name, at.short_steps, at.short_seed, at.long_seed, horizon_steps)
        trajectory = self._by_place.get(place)
        if trajectory is None:
            trajectory = self._by_place[place] = self._begin(cell, horizon_steps)
        last = cell.scale.phase_at(at.long_steps)
        while len(trajectory.longs) <= last:
            self._reach_next_phase(trajectory)
        for draft in (trajectory.trunk, trajectory.decay, *trajectory.longs[: last + 1]):
            if draft is not None:
                draft.cells += counted
        return trajectory

    def follow_up(
        self, trajectory: Trajectory, step: int, *, rule: ObservationRule, stage: LongStage, horizon_steps: int
    ) -> Draft:
        """The segment that goes on from what `rule` makes of a trajectory at `step` of its long stage.

        With the same data cut to the same length it goes on in their order too, past what the trajectory has seen.
        """
        parent, at = trajectory.long_at(step)
        before = parent.segment
        goes_on = (stage.data, stage.seq_len) == (before.stage.data, before.stage.seq_len)
        return self._segment(
            "follow_up",
            trajectory.scale,
            stage,
            seed=trajectory.long_seed,
            parent=parent,
            parent_step=at,
            parent_rule=None if rule.name == "raw" else rule,
            horizon_steps=horizon_steps,
            data_offset_sequences=before.first_sequence(at) if goes_on else 0,
        )

    def _begin(self, cell: AskedCell, horizon_steps: int | None) -> Trajectory:
        scale, at = cell.scale, cell.place
        trajectory = Trajectory(
            scale=scale,
            short_seed=at.short_seed,
            long_seed=at.long_seed,
            short_tokens=scale.short_tokens_seen,
            horizon_steps=horizon_steps,
        )
        if scale.short is not None:
            decay_steps = decay_steps_for(at.short_steps)
            trajectory.branch_step = at.short_steps - decay_steps
            trunk, decay = self._short_stage(scale, scale.short, trajectory.branch_step, decay_steps, at.short_seed)
            trajectory.trunk, trajectory.decay = trunk, decay
            trajectory.short_tokens = at.short_steps * scale.short.tokens_per_step
            trajectory.short_checkpoint = CheckpointRef(segment=decay.id, step=decay_steps)
        return trajectory

    def _reach_next_phase(self, trajectory: Trajectory) -> None:
        scale, number = trajectory.scale, len(trajectory.longs)
        phase = scale.phases[number]
        parent, parent_step = trajectory.decay, 0
        if number:
            parent, parent_step = trajectory.longs[-1], phase.start_step - scale.phases[number - 1].start_step
        elif trajectory.short_checkpoint is not None:
            parent_step = trajectory.short_checkpoint.step
        trajectory.longs.append(
            self._segment(
                "long_constant" if trajectory.horizon_steps is None else "long_linear_decay",
                scale,
                phase.stage,
                seed=trajectory.long_seed,
                parent=parent,
                parent_step=parent_step,
                horizon_steps=trajectory.horizon_steps,
                stage_offset_steps=phase.start_step,
            )
        )

    def _short_stage(
        self, scale: ResolvedScale, stage: ShortStage, branch_step: int, decay_steps: int, seed: int
    ) -> tuple[Draft, Draft]:
        place = (scale.name, branch_step, decay_steps, seed)
        if place not in self._short_stages:  # spares the hashes
            trunk = self._segment("short_trunk", scale, stage, seed=seed)
            decay = self._segment(
                "short_decay",
                scale,
                stage,
                seed=seed,
                parent=trunk,
                parent_step=branch_step,
                horizon_steps=decay_steps,
            )
            self._short_stages[place] = trunk, decay
        return self._short_stages[place]

    def _segment(
        self,
        kind: SegmentKind,
        scale: ResolvedScale,
        stage: ShortStage | LongStage,
        *,
        seed: int,
        parent: Draft | None = None,
        parent_step: int = 0,
        parent_rule: ObservationRule | None = None,
        horizon_steps: int | None = None,
        stage_offset_steps: int = 0,
        data_offset_sequences: int = 0,
    ) -> Draft:
        branch: CheckpointRef | None = None
        start_steps: tuple[int, ...] = ()
        if parent is not None:
            branch = CheckpointRef(segment=parent.id, step=parent_step)
            start_steps = (parent_step,) if parent_rule is None else parent_rule.source_steps(parent_step)
            parent.saves.update(start_steps)
        segment = Segment(
            kind=kind,
            parent=branch,
            shape=scale.shape,
            stage=stage,
            seed=seed,
            horizon_steps=horizon_steps,
            parent_rule=parent_rule,
            stage_offset_steps=stage_offset_steps,
            data_offset_sequences=data_offset_sequences,
        )
        key = segment.id
        if key not in self.segments:
            self.segments[key] = Draft(
                id=key,
                segment=segment,
                scale=scale.name,
                parent=parent,
                start_steps=start_steps,
                execution=scale.execution,
            )
        return self.segments[key]
