"""Follow-up stages: what goes on from the models of a grid's cells, such as an extension to 128K."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from orchestrator.budgets import rounding_problem
from orchestrator.cells import MAX_CELLS, MAX_SOURCES, AskedCell, AskedCells, rules_in_steps
from orchestrator.errors import GridError, Problem
from orchestrator.grid import FollowUpSettings, Grid
from orchestrator.grid_problems import pointer
from orchestrator.recipe import EvaluationSettings, resolve_evaluator
from orchestrator.rule_pools import pool_problem, pool_size
from orchestrator.scales import ResolvedScale, execution_problem
from orchestrator.stage_settings import DATA_FIELDS, resolve_data, resolve_rope
from workers.spec import Evaluator, LongStage, ObservationRule, steps_for


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedFollowUp:
    """`steps` updates of `stage` from what `rule` makes of the cell's trajectory at the cell's D_l."""

    name: str
    cell: AskedCell
    rule: ObservationRule
    stage: LongStage
    steps: int
    evaluation: EvaluationSettings
    evaluator: Evaluator


def asked_follow_ups(grid: Grid, asked: AskedCells) -> tuple[AskedFollowUp, ...]:
    """Every follow-up of every cell that it goes on from, in the order of the grid.

    Raises:
        GridError: if one does not fit whole steps, begins at no cell, or reads checkpoints that cannot be.
    """
    problems: list[Problem] = []
    found: list[AskedFollowUp] = []
    seen: set[str] = set()
    sources = 0
    for index, settings in enumerate(grid.follow_ups):
        at = pointer("follow_ups", index)
        if settings.name in seen:
            problems.append(Problem(pointer=f"{at}/name", message=f"{settings.name!r} is taken by one before"))
        seen.add(settings.name)
        evaluator = resolve_evaluator(settings.evaluation or grid.evaluation, grid.recipe)
        cells = [cell for cell in asked.cells if settings.scales is None or cell.scale.name in settings.scales]
        by_scale: dict[str, list[AskedCell]] = {}
        for cell in cells:
            by_scale.setdefault(cell.scale.name, []).append(cell)
        for number, name in enumerate(settings.scales or ()):
            if name not in by_scale:
                message = f"scale {name} has no cells to go on from"
                problems.append(Problem(pointer=f"{at}/scales/{number}", message=message))
        for of_scale in by_scale.values():
            for follow_up in _of_scale(grid, settings, of_scale, evaluator, at, problems):
                sources += pool_size(follow_up.rule, follow_up.cell.place.long_steps)
                found.append(follow_up)
                if len(found) > MAX_CELLS or sources > MAX_SOURCES:
                    message = (
                        f"go on from more than {MAX_CELLS:,} models, or from models of more than {MAX_SOURCES:,} "
                        "checkpoints in all; narrow at or scales"
                    )
                    raise GridError([*dict.fromkeys(problems), Problem(pointer="/follow_ups", message=message)])
    problems += _twins(found, {settings.name: index for index, settings in enumerate(grid.follow_ups)})
    if problems:
        raise GridError(list(dict.fromkeys(problems)))
    return tuple(found)


def _of_scale(
    grid: Grid,
    settings: FollowUpSettings,
    cells: Sequence[AskedCell],
    evaluator: Evaluator,
    at: str,
    problems: list[Problem],
) -> Iterator[AskedFollowUp]:
    scale = cells[0].scale
    misfits: list[Problem] = []
    rules = rules_in_steps(grid, scale, (settings.start,), f"{at}/from", misfits, [])
    if misfits:  # told as of a list with one rule
        place = f"{at}/from"
        problems += [replace(found, pointer=place + found.pointer.removeprefix(f"{place}/0")) for found in misfits]
        return
    (rule,) = rules.values()
    stages: dict[int, LongStage | None] = {}
    for cell in _begun(settings, cells, at, problems):
        step = cell.place.long_steps
        if misfit := pool_problem(rule, scale, step):
            begins = f"scale {scale.name}, D_l = {step * scale.long.tokens_per_step:,}"
            message = f"{begins}: {settings.start.text} {misfit}"
            problems.append(Problem(pointer=f"{at}/from", message=message))
            continue
        phase = scale.phase_at(step)
        if phase not in stages:  # the rate to go on with is one for all D_l, even where it has decayed
            stages[phase] = _stage(settings, scale, scale.phases[phase].stage, at, problems)
        stage = stages[phase]
        if stage is None:
            continue
        if misfit := execution_problem(scale.execution, stage):
            problems.append(Problem(pointer=at, message=f"scale {scale.name}: {misfit}"))
        tokens = settings.tokens.tokens_for(scale.shape.n_params)
        if misfit := rounding_problem(tokens, stage.tokens_per_step, grid.rounding_tolerance):
            problems.append(Problem(pointer=f"{at}/tokens", message=f"scale {scale.name}: {misfit}"))
            continue
        steps = steps_for(tokens, stage.tokens_per_step)
        if steps < stage.warmup_steps:
            message = f"scale {scale.name}: the warm-up takes more than all {steps} steps; lower it or raise tokens"
            problems.append(Problem(pointer=f"{at}/warmup_steps", message=message))
        yield AskedFollowUp(
            name=settings.name,
            cell=cell,
            rule=rule,
            stage=stage,
            steps=steps,
            evaluation=settings.evaluation or grid.evaluation,
            evaluator=evaluator,
        )


def _twins(found: Sequence[AskedFollowUp], order: Mapping[str, int]) -> Iterator[Problem]:
    """Two that train and measure the same: the second would have no numbers under its name."""
    first: dict[tuple[object, ...], str] = {}
    for item in found:
        place = item.cell.scale.name, item.cell.place, item.rule, item.stage, item.steps, item.evaluator
        name = first.setdefault(place, item.name)
        if name != item.name:
            yield Problem(pointer=pointer("follow_ups", order[item.name]), message=f"is the same as {name!r}; keep one")


def _begun(
    settings: FollowUpSettings, cells: Sequence[AskedCell], at: str, problems: list[Problem]
) -> Iterator[AskedCell]:
    """The cells that a follow-up goes on from: those at the D_l of `at`, or the largest of each trajectory."""
    if settings.at == "largest":
        largest: dict[tuple[int, int, int], AskedCell] = {}
        for cell in cells:  # by rising D_l
            largest[cell.place.short_steps, cell.place.short_seed, cell.place.long_seed] = cell
        yield from largest.values()
        return
    scale = cells[0].scale
    tokens_per_step = scale.long.tokens_per_step
    for number, budget in enumerate(settings.at):
        steps = steps_for(budget.tokens_for(scale.shape.n_params), tokens_per_step)
        begun = [cell for cell in cells if cell.place.long_steps == steps]
        if not begun:
            known = ", ".join(f"{s * tokens_per_step:,}" for s in sorted({cell.place.long_steps for cell in cells}))
            message = f"scale {scale.name}: no cell has D_l = {steps * tokens_per_step:,}; its cells have {known}"
            problems.append(Problem(pointer=f"{at}/at/{number}", message=message))
        yield from begun


def _stage(
    settings: FollowUpSettings, scale: ResolvedScale, parent: LongStage, at: str, problems: list[Problem]
) -> LongStage | None:
    """The stage: the parent's, changed by what is given; None, with a problem, where it cannot be."""
    seq_len = settings.seq_len or parent.seq_len
    batch_sequences = settings.batch_sequences or parent.tokens_per_step // seq_len
    if settings.batch_sequences is None and batch_sequences * seq_len != parent.tokens_per_step:
        message = (
            f"scale {scale.name}: a step of {parent.tokens_per_step:,} tokens holds no whole number of sequences of"
            f" {seq_len:,}; give batch_sequences"
        )
        problems.append(Problem(pointer=f"{at}/seq_len", message=message))
        return None
    end_rate = parent.start_rate * parent.final_rate_ratio  # the ratio is 1 under constant
    changes: dict[str, Any] = {
        "seq_len": seq_len,
        "batch_sequences": batch_sequences,
        "start_rate": end_rate if settings.start_rate == "inherit" else settings.start_rate,
        "optimizer_state": settings.optimizer_state,
        "warmup_steps": settings.warmup_steps,
        "final_rate_ratio": settings.final_rate_ratio,
        "decay_shape": settings.decay_shape or "linear",
    }
    changes |= {name: value for name in ("z_loss", "precision") if (value := getattr(settings, name)) is not None}
    data = settings.model_dump(include=set(DATA_FIELDS), exclude_none=True)
    try:
        if data or settings.corpus is not None or settings.split is not None:
            # Another corpus is another mixture; whether documents see one another is not its affair.
            kept = asdict(parent.data) if settings.corpus is None else {"packing": parent.data.packing}
            changes["data"] = resolve_data(
                kept | data,
                corpus=settings.corpus or parent.data.corpus,
                split=settings.split or parent.data.split,
            )
        if settings.rope_base is not None:
            changes |= {"rope_base": settings.rope_base, "yarn": None}
        elif settings.rope is not None:
            rope_base, yarn = resolve_rope(
                settings.rope,
                seq_len=seq_len,
                old_base=parent.rope_base,
                old_length=parent.seq_len,
                head_dim=scale.head_dim,
            )
            changes |= {"rope_base": rope_base, "yarn": yarn}
    except ValueError as error:
        problems.append(Problem(pointer=at, message=f"scale {scale.name}: {error}"))
        return None
    return replace(parent, **changes)
