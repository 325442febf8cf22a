"""From budgets to cells: whole optimizer steps for every (scale, D_s, D_l, seeds) that a grid asks for.

Rounding is settled here, once, in integers; a grid whose budgets do not survive it is refused, every offender named.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from orchestrator.budgets import INT64_MAX, Budget, rounding_problem
from orchestrator.errors import GridError, Problem
from orchestrator.grid import CellSettings, Grid, RuleSettings, budget_list
from orchestrator.grid_problems import pointer
from orchestrator.rule_pools import MAX_POOL, pool_problem, pool_size
from orchestrator.scales import ResolvedScale
from workers.spec import ObservationRule, content_hash, steps_for

#: Cells and evaluations of one grid; a larger one is refused before anything is planned.
MAX_CELLS = 200_000
MAX_EVALUATIONS = 1_000_000
#: Checkpoints that all of its models are made of, each counted as often as it is read.
MAX_SOURCES = 4_000_000

#: Nothing of a model from a folder is drawn at random before its long stage.
_NO_SEED = (0,)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CellPlace:
    """A cell's place in the grid, in whole steps; orders cells by scale (as listed), D_s, D_l and seeds."""

    scale_index: int
    short_steps: int
    long_steps: int
    short_seed: int
    long_seed: int


@dataclass(slots=True, kw_only=True)
class AskedCell:
    """One cell: the rules (as written -> in steps) it is observed by, and budgets at whose multiples to look too."""

    scale: ResolvedScale
    place: CellPlace
    rules: dict[str, ObservationRule] = field(default_factory=dict)
    every: set[int] = field(default_factory=set)
    """Tokens of the long stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedCells:
    """All cells of a grid, in order, and what the user should know though it is no error."""

    cells: tuple[AskedCell, ...]
    warnings: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A budget of one scale: tokens as asked and the steps they become."""

    tokens: int
    steps: int
    pointer: str


@dataclass(frozen=True, slots=True)
class _Block:
    """A product of budgets for one scale: the grid's own, or one entry of `cells`."""

    scale: ResolvedScale
    short: list[_Asked]
    long: list[_Asked]
    short_seeds: tuple[int, ...]
    long_seeds: tuple[int, ...]
    rules: dict[str, ObservationRule]
    every: int | None
    at: str
    """JSON Pointer of the entry of `cells`; "" for the product."""


def decay_steps_for(steps: int) -> int:
    """Steps of the WSD decay: the nearest integer to a ninth of all steps of the short stage."""
    return (2 * steps + 9) // 18


def asked_cells(grid: Grid) -> AskedCells:
    """Every cell that the grid asks for, once each.

    Raises:
        GridError: if a budget is below one step, deviates above the tolerance, collapses onto another one's steps or
            leaves no room for warm-up, decay or an observation rule; or if there are too many cells.
    """
    problems: list[Problem] = []
    warnings: list[Problem] = []
    scales = {name: grid.resolve(name) for name in grid.scales}
    problems += _twins(scales)
    problems += [
        Problem(pointer=pointer("scales", name), message=f"has {n:,} parameters, which do not fit in 64 bits")
        for name, n in ((name, scale.shape.n_params) for name, scale in scales.items())
        if n > INT64_MAX
    ]
    blocks = list(_blocks(grid, scales, problems, warnings))
    for block in blocks:
        problems += _misfits(block)
    problems += itertools.chain(_collapsed(blocks), _same_rules(blocks))
    count = sum(len(b.short) * len(b.long) * len(b.short_seeds) * len(b.long_seeds) for b in blocks)
    if count > MAX_CELLS:
        problems.append(Problem(pointer="", message=f"asks for {count:,} cells; a grid may hold {MAX_CELLS:,} at most"))
    problems += _too_much(blocks, probes=grid.evaluation.probes is not None)
    if problems:
        raise GridError(list(dict.fromkeys(problems)))
    tokens = sum(_tokens(block) for block in blocks)
    if tokens > INT64_MAX:
        message = f"its cells take {tokens:.3g} tokens, one by one; their sum does not fit in 64 bits"
        raise GridError([Problem(pointer="", message=message)])
    cells = _merged(blocks, {name: index for index, name in enumerate(scales)}, problems, warnings)
    if problems:
        raise GridError(problems)
    unused = set(scales) - {block.scale.name for block in blocks}
    warnings += [
        Problem(pointer=pointer("scales", name), message="no cell uses this scale") for name in scales if name in unused
    ]
    return AskedCells(cells=cells, warnings=tuple(dict.fromkeys(warnings)))


def _blocks(
    grid: Grid, scales: dict[str, ResolvedScale], problems: list[Problem], warnings: list[Problem]
) -> Iterator[_Block]:
    seeds = _distinct(grid.seeds.short, "/seeds/short", warnings), _distinct(grid.seeds.long, "/seeds/long", warnings)
    for name in grid.in_product:
        scale = scales[name]
        yield _Block(
            scale,
            _asked(grid, scale, "short", budget_list(grid.short_tokens, name, at="/short_tokens"), problems, warnings),
            _asked(grid, scale, "long", budget_list(grid.long_tokens, name, at="/long_tokens"), problems, warnings),
            seeds[0] if scale.short is not None else _NO_SEED,
            seeds[1],
            rules_in_steps(grid, scale, grid.rules, "/rules", problems, warnings),
            _every(grid.evaluation.every, scale, "/evaluation/every", problems),
            at="",
        )
    for index, cell in enumerate(grid.cells):
        at, scale = pointer("cells", index), scales[cell.scale]
        short = budget_list(cell.short_tokens, cell.scale, at=f"{at}/short_tokens")
        short_seeds = _distinct(cell.seeds.short, f"{at}/seeds/short", warnings) if cell.seeds.short else seeds[0]
        long = budget_list(cell.long_tokens, cell.scale, at=f"{at}/long_tokens")
        rules = (cell.rules, f"{at}/rules") if cell.rules is not None else (grid.rules, "/rules")
        yield _Block(
            scale,
            _asked(grid, scale, "short", short, problems, warnings),
            _asked(grid, scale, "long", long, problems, warnings),
            short_seeds if scale.short is not None else _NO_SEED,
            _distinct(cell.seeds.long, f"{at}/seeds/long", warnings) if cell.seeds.long else seeds[1],
            rules_in_steps(grid, scale, *rules, problems, warnings),
            _every(_cell_every(cell, grid), scale, f"{at}/evaluate_every", problems),
            at=at,
        )


def _cell_every(cell: CellSettings, grid: Grid) -> Budget | None:
    """An explicit null switches the grid's `every` off; an absent key keeps it."""
    return cell.evaluate_every if "evaluate_every" in cell.model_fields_set else grid.evaluation.every


def _every(budget: Budget | None, scale: ResolvedScale, at: str, problems: list[Problem]) -> int | None:
    if budget is None:
        return None
    tokens, step = budget.tokens_for(scale.shape.n_params), scale.long.tokens_per_step
    if tokens < step:
        message = f"scale {scale.name}: {tokens:,} tokens are less than one step of {step:,}"
        problems.append(Problem(pointer=at, message=message))
    return max(tokens, step)


def _distinct(seeds: tuple[int, ...], at: str, warnings: list[Problem]) -> tuple[int, ...]:
    distinct = tuple(dict.fromkeys(seeds))
    if len(distinct) < len(seeds):
        warnings.append(Problem(pointer=at, message="a seed is listed twice; it counts once"))
    return distinct


def _asked(
    grid: Grid,
    scale: ResolvedScale,
    stage: str,
    budgets: list[tuple[str, Budget]],
    problems: list[Problem],
    warnings: list[Problem],
) -> list[_Asked]:
    """Budgets of one stage as steps; problems and repeated budgets go to their lists.

    A model from a folder has one D_s, in no steps of ours; an unknown one counts as no tokens.
    """
    if stage == "short" and scale.short is None:
        place = pointer("scales", scale.name, "short_tokens_seen")
        return [_Asked(scale.short_tokens_seen or 0, 0, place)]
    asked_of = scale.short if stage == "short" else scale.long
    assert asked_of is not None
    tokens_per_step = asked_of.tokens_per_step
    asked: dict[int, _Asked] = {}
    for at, budget in budgets:
        tokens = budget.tokens_for(scale.shape.n_params)
        if message := rounding_problem(tokens, tokens_per_step, grid.rounding_tolerance):
            problems.append(Problem(pointer=at, message=f"scale {scale.name}: {message}"))
        elif tokens in asked:
            message = f"{budget} is the same budget as {asked[tokens].pointer} for scale {scale.name}; it counts once"
            warnings.append(Problem(pointer=at, message=message))
        else:
            asked[tokens] = _Asked(tokens, steps_for(tokens, tokens_per_step), at)
    return list(asked.values())


def rules_in_steps(
    grid: Grid,
    scale: ResolvedScale,
    rules: tuple[RuleSettings, ...],
    at: str,
    problems: list[Problem],
    warnings: list[Problem],
) -> dict[str, ObservationRule]:
    """Rules in steps of one scale, by their text as written."""
    in_steps: dict[str, ObservationRule] = {}
    listed: set[str] = set()
    for index, rule in enumerate(rules):
        place = at + pointer(index)
        observed = ObservationRule(name="raw")
        if rule.spacing is not None:
            tokens = rule.spacing.tokens_for(scale.shape.n_params)
            if message := rounding_problem(tokens, scale.long.tokens_per_step, grid.rounding_tolerance):
                problems.append(Problem(pointer=f"{place}/spacing", message=f"scale {scale.name}: {message}"))
                continue
            spacing_steps = steps_for(tokens, scale.long.tokens_per_step)
            observed = ObservationRule(
                name=rule.name,
                m=rule.m or 0,
                spacing_steps=spacing_steps,
                decay=rule.decay,
                density=rule.density,
            )
        if in_steps.setdefault(rule.text, observed) != observed:
            message = f"pool {rule.text!r} has two rules for the same cells; one series holds one value of a cell"
            problems.append(Problem(pointer=f"{place}/pool", message=message))
        elif rule.text in listed:
            warnings.append(Problem(pointer=place, message=f"{rule.text} is listed twice; it counts once"))
        listed.add(rule.text)
    return in_steps


def _misfits(block: _Block) -> Iterator[Problem]:
    """Budgets too small for what the recipe and the rules need."""
    scale = block.scale.name
    warmup = block.scale.short.warmup_steps if block.scale.short is not None else 0
    for asked in block.short if block.scale.short is not None else ():
        decay = decay_steps_for(asked.steps)
        trunk = asked.steps - decay
        cell = f"scale {scale}, D_s = {asked.tokens:,}"
        if decay == 0:
            message = f"{cell}: {asked.steps} steps leave none for the decay, one ninth of them; five are the fewest"
            yield Problem(pointer=asked.pointer, message=message)
        elif trunk < warmup:
            message = f"{cell}: the warm-up of {warmup} steps does not fit before the decay, in {trunk} steps"
            yield Problem(pointer=asked.pointer, message=f"{message}; lower recipe.short.warmup_steps or raise D_s")
    for asked in block.long:
        cell = f"scale {scale}, D_l = {asked.tokens:,}"
        if asked.steps < block.scale.long.warmup_steps:
            message = f"{cell}: {asked.steps} steps are fewer than the warm-up, {block.scale.long.warmup_steps}"
            yield Problem(pointer=asked.pointer, message=f"{message}; lower recipe.long.warmup_steps or raise D_l")
        for text, rule in block.rules.items():
            if misfit := pool_problem(rule, block.scale, asked.steps):
                yield Problem(pointer=asked.pointer, message=f"{cell}: {text} {misfit}")


def _collapsed(blocks: Iterable[_Block]) -> Iterator[Problem]:
    """Different budgets that become the same steps would be measured once and counted twice."""
    seen_short: dict[tuple[str, int], _Asked] = {}
    seen_long: dict[tuple[str, int, int], _Asked] = {}
    told: set[tuple[str, str, str]] = set()
    for block in blocks:
        scale = block.scale.name
        for short in block.short:
            first = seen_short.setdefault((scale, short.steps), short)
            if first.tokens != short.tokens:
                yield _collapse(f"scale {scale}, D_s", short, first)
            for long in block.long:
                first = seen_long.setdefault((scale, short.steps, long.steps), long)
                if first.tokens != long.tokens and (scale, long.pointer, first.pointer) not in told:
                    told.add((scale, long.pointer, first.pointer))  # once, not for every D_s
                    yield _collapse(f"scale {scale}, D_s = {short.tokens:,}, D_l", long, first)


def _collapse(cell: str, asked: _Asked, first: _Asked) -> Problem:
    message = (
        f"{cell} = {asked.tokens:,} and {first.tokens:,} ({first.pointer}) both become {asked.steps} steps; keep one"
    )
    return Problem(pointer=asked.pointer, message=message)


def _same_rules(blocks: Iterable[_Block]) -> Iterator[Problem]:
    """Rules written differently that read the same checkpoints of one scale would count one measurement twice."""
    seen: dict[tuple[str, ObservationRule], str] = {}
    for block in blocks:
        for text, rule in block.rules.items():
            first = seen.setdefault((block.scale.name, rule), text)
            if first != text:
                message = f"scale {block.scale.name}: {text} reads the same checkpoints as {first}; keep one of them"
                yield Problem(pointer=f"{block.at}/rules", message=message)


def _twins(scales: dict[str, ResolvedScale]) -> Iterator[Problem]:
    seen: dict[str, str] = {}
    for name, scale in scales.items():
        first = seen.setdefault(content_hash(scale.recipe), name)
        if first != name:
            yield Problem(
                pointer=pointer("scales", name), message=f"is the same model and recipe as {first!r}; keep one"
            )


def _too_much(blocks: Iterable[_Block], *, probes: bool) -> Iterator[Problem]:
    """More evaluations, or checkpoints behind them, than a grid may hold; both counted from above."""
    evaluations, sources = 0, 0
    for block in blocks:
        if not block.long:
            continue
        trajectories = len(block.short) * len(block.short_seeds) * len(block.long_seeds)
        last = max(block.long, key=lambda asked: asked.steps)
        between = last.tokens // block.every if block.every is not None else 0
        models = len(block.long) * (2 if probes else 1) + between
        evaluations += trajectories * len(block.rules) * models
        each = sum(min(MAX_POOL, pool_size(rule, last.steps)) for rule in block.rules.values())
        sources += trajectories * models * each
    if evaluations > MAX_EVALUATIONS:
        message = f"asks for about {evaluations:,} evaluations; a grid may hold {MAX_EVALUATIONS:,} at most"
        yield Problem(pointer="", message=message)
    elif sources > MAX_SOURCES:
        message = (
            f"its rules read about {sources:,} checkpoints; those of a grid may read {MAX_SOURCES:,} at most: raise "
            "spacing, lower m, or ask for fewer cells"
        )
        yield Problem(pointer="/rules", message=message)


def _tokens(block: _Block) -> int:
    """Realised tokens of a block's cells, each trained by itself."""
    short_step = block.scale.short.tokens_per_step if block.scale.short is not None else 0
    short = sum(asked.steps for asked in block.short) * short_step
    long = sum(asked.steps for asked in block.long) * block.scale.long.tokens_per_step
    seeds = len(block.short_seeds) * len(block.long_seeds)
    return seeds * (short * len(block.long) + long * len(block.short))


def _merged(
    blocks: list[_Block], order: dict[str, int], problems: list[Problem], warnings: list[Problem]
) -> tuple[AskedCell, ...]:
    """Cells of all blocks, one for each place; a cell asked for twice has the rules of both.

    Two rules of one pool at one cell go to `problems`.
    """
    cells: dict[CellPlace, AskedCell] = {}
    for block in blocks:
        scale = block.scale
        repeated = 0
        twofold: set[str] = set()
        for short, long, short_seed, long_seed in itertools.product(
            block.short, block.long, block.short_seeds, block.long_seeds
        ):
            place = CellPlace(
                scale_index=order[scale.name],
                short_steps=short.steps,
                long_steps=long.steps,
                short_seed=short_seed,
                long_seed=long_seed,
            )
            cell = cells.get(place)
            if cell is None:
                cell = cells[place] = AskedCell(scale=scale, place=place)
            elif block.rules.items() <= cell.rules.items():
                repeated += 1
            twofold.update(text for text, rule in block.rules.items() if cell.rules.setdefault(text, rule) != rule)
            if block.every is not None:
                cell.every.add(block.every)
        for pool in sorted(twofold):
            message = f"pool {pool!r} has another rule for some of these cells; one series holds one value of a cell"
            problems.append(Problem(pointer=f"{block.at}/rules", message=message))
        if repeated and block.at:
            message = f"{repeated} of these cells are asked for already; each counts once"
            warnings.append(Problem(pointer=block.at, message=message))
    return tuple(cells[place] for place in sorted(cells))
