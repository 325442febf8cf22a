"""Segments and trajectories while they are being planned: which steps a grid reads, which of them must come to be."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from orchestrator.cells import AskedCell, decay_steps_for
from orchestrator.costs import checkpoint_bytes
from orchestrator.plan_values import KnownSegment, PlannedSegment
from orchestrator.recipe import ResolvedScale
from workers.spec import CheckpointRef, ObservationRule, Protocol, Segment, SegmentKind

_UNKNOWN = KnownSegment()


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """A segment in the making. `existing` steps have a checkpoint, now or without this plan's doing; sorted."""

    id: str
    segment: Segment
    scale: str
    parent: Draft | None
    existing: list[int]
    saves: set[int] = field(default_factory=set)
    needed: set[int] = field(default_factory=set)
    missing: set[int] = field(default_factory=set)
    cells: int = 0

    def start_before(self, step: int) -> int:
        """The latest existing step below `step`; 0 is the segment's beginning."""
        position = bisect_left(self.existing, step)
        return self.existing[position - 1] if position else 0

    def find_missing(self) -> None:
        """Settles what must be trained, and asks the parent for its checkpoint if that begins at step 0."""
        self.missing = self.needed.difference(self.existing)
        branch = self.segment.parent
        begins = self.missing and self.start_before(min(self.missing)) == 0
        if begins and self.parent is not None and branch is not None:
            self.parent.needed.add(branch.step)

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
            checkpoint_bytes=len(missing) * checkpoint_bytes(shape),
            cells=self.cells,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Trajectory:
    """The chain of segments from scratch to a long stage. `short_checkpoint` is where the short stage ends."""

    scale: ResolvedScale
    short_seed: int
    long_seed: int
    short_tokens: int
    trunk: Draft
    branch_step: int
    decay: Draft
    long: Draft
    short_checkpoint: CheckpointRef
    diagnostics: dict[tuple[int, ObservationRule], int] = field(default_factory=dict)
    """(budget at whose multiples to look, rule) -> the last step that this reaches."""


class Trajectories:
    """All trajectories of a grid; those that begin alike share their first segments.

    `segments` holds every segment once, by id, parents before their children.
    """

    def __init__(self, protocol: Protocol, known: Mapping[str, KnownSegment]) -> None:
        self.segments: dict[str, Draft] = {}
        self._protocol = protocol
        self._known = known
        self._by_place: dict[tuple[object, ...], Trajectory] = {}
        self._short_stages: dict[tuple[object, ...], tuple[Draft, Draft]] = {}

    def __iter__(self) -> Iterator[Trajectory]:
        return iter(self._by_place.values())

    def through(self, cell: AskedCell) -> Trajectory:
        """The trajectory that leads to a cell; counts the cell on each of its segments."""
        at = cell.place
        horizon_steps = at.long_steps if self._protocol == "linear_decay" else None
        place = (cell.scale.name, at.short_steps, at.short_seed, at.long_seed, horizon_steps)
        trajectory = self._by_place.get(place)
        if trajectory is None:
            trajectory = self._by_place[place] = self._chain(cell, horizon_steps)
        trajectory.trunk.cells += 1
        trajectory.decay.cells += 1
        trajectory.long.cells += 1
        return trajectory

    def _chain(self, cell: AskedCell, horizon_steps: int | None) -> Trajectory:
        scale, at = cell.scale, cell.place
        decay_steps = decay_steps_for(at.short_steps)
        branch_step = at.short_steps - decay_steps
        trunk, decay = self._short_stage(scale, branch_step, decay_steps, at.short_seed)
        kind: SegmentKind = "long_constant" if horizon_steps is None else "long_linear_decay"
        long = self._segment(kind, scale, decay, decay_steps, at.long_seed, horizon_steps)
        return Trajectory(
            scale=scale,
            short_seed=at.short_seed,
            long_seed=at.long_seed,
            short_tokens=at.short_steps * scale.short.tokens_per_step,
            trunk=trunk,
            branch_step=branch_step,
            decay=decay,
            long=long,
            short_checkpoint=CheckpointRef(segment=decay.id, step=decay_steps),
        )

    def _short_stage(self, scale: ResolvedScale, branch_step: int, decay_steps: int, seed: int) -> tuple[Draft, Draft]:
        place = (scale.name, branch_step, decay_steps, seed)
        if place not in self._short_stages:  # spares the hashes
            trunk = self._segment("short_trunk", scale, None, 0, seed, None)
            decay = self._segment("short_decay", scale, trunk, branch_step, seed, decay_steps)
            self._short_stages[place] = trunk, decay
        return self._short_stages[place]

    def _segment(
        self,
        kind: SegmentKind,
        scale: ResolvedScale,
        parent: Draft | None,
        parent_step: int,
        seed: int,
        horizon_steps: int | None,
    ) -> Draft:
        branch = None
        if parent is not None:
            branch = CheckpointRef(segment=parent.id, step=parent_step)
            parent.saves.add(parent_step)
        segment = Segment(
            kind=kind,
            parent=branch,
            shape=scale.shape,
            stage=scale.short if kind in ("short_trunk", "short_decay") else scale.long,
            seed=seed,
            horizon_steps=horizon_steps,
        )
        key = segment.id
        if key not in self.segments:
            seen = self._known.get(key, _UNKNOWN)
            existing = sorted(seen.saved_steps | seen.scheduled_steps)
            self.segments[key] = Draft(id=key, segment=segment, scale=scale.name, parent=parent, existing=existing)
        return self.segments[key]
