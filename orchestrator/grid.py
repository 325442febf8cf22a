"""The grid file: what a user submits, as a checked value (`docs/grid.md` is its reference).

`load_grid` and `parse_grid` are the ways in: they report every problem with its place in the document. Whether budgets
fit the optimizer's steps is for `orchestrator.cells` to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from orchestrator.budgets import Budget
from orchestrator.errors import GridError, Problem
from orchestrator.fields import Count, Label, Natural, Positive, Ratio, Real, Settings, TokenBudget
from orchestrator.grid_file import DocumentFormat, read_document
from orchestrator.grid_problems import ALTERNATIVES, pointer, problems_of
from orchestrator.probe_settings import probe_problems
from orchestrator.recipe import (
    EvaluationSettings,
    ExecutionSettings,
    FolderScale,
    Recipe,
    Scale,
    missing_settings,
    resolve_evaluator,
)
from orchestrator.scales import ResolvedScale, resolve_scale
from orchestrator.stage_settings import DataSettings, RopeSettings, StartRate
from workers.spec import DecayShape, OptimizerState, Precision, Protocol, RuleName, Split

DEFAULT_SCALE = "default"
_ONE, _LIST, _BY_SCALE = ALTERNATIVES[:3]

BudgetList = Annotated[tuple[TokenBudget, ...], Field(min_length=1)]
BudgetsByScale = Annotated[
    Annotated[BudgetList, Tag(_LIST)] | Annotated[dict[str, BudgetList], Tag(_BY_SCALE)],
    Discriminator(lambda value: _BY_SCALE if isinstance(value, dict) else _LIST),
]
BudgetOrList = Annotated[
    Annotated[TokenBudget, Tag(_ONE)] | Annotated[BudgetList, Tag(_LIST)],
    Discriminator(lambda value: _LIST if isinstance(value, (list, tuple)) else _ONE),
]
Seeds = Annotated[tuple[Natural, ...], Field(min_length=1)]


class SeedSettings(Settings):
    """`short` seeds initialise the model and order the short stage; `long` seeds order the long stage."""

    short: Seeds = (0,)
    long: Seeds = (0,)


class CellSeedSettings(Settings):
    short: Seeds | None = None
    long: Seeds | None = None


#: What each rule takes beside its name and pool. `m` may be left out; the rest is needed.
_RULE_PARAMETERS: Mapping[RuleName, tuple[str, ...]] = {
    "raw": (),
    "last_m": ("m", "spacing"),
    "one_sqrt": ("m", "spacing"),
    "ema": ("m", "spacing", "decay"),
    "dare": ("m", "spacing", "density"),
    "ties": ("m", "spacing", "density"),
}
_RULE_NEEDS = {
    "spacing": 'the tokens between its checkpoints, such as 2_048 or "2N"',
    "decay": "the factor by which a checkpoint one spacing older weighs less, such as 0.9",
    "density": "the share of coordinates that it keeps, such as 0.5",
}


class RuleSettings(Settings):
    """An observation rule as written: the spacing may be a multiple of N. Without `m` all checkpoints are read.

    Rules of one `pool` belong to one series whatever their parameters: the paper observes S1-S4 at a spacing of 2N and
    S5 at 1N, and fits them together. Without it, rules are pooled only if they are written alike.
    """

    name: RuleName
    pool: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,59}$")] = None
    m: Annotated[Count | None, Field(ge=2, le=1000, validate_default=True)] = None
    spacing: Annotated[TokenBudget | None, Field(validate_default=True)] = None
    decay: Annotated[Positive | None, Field(lt=1, validate_default=True)] = None
    density: Annotated[Ratio | None, Field(validate_default=True)] = None

    @field_validator("pool")
    @classmethod
    def _raw_is_raw(cls, pool: str | None, info: ValidationInfo) -> str | None:
        if pool == "raw" and info.data.get("name", "raw") != "raw":
            raise ValueError("raw is the series of checkpoints that nothing is merged into; choose another name")
        return pool

    @field_validator("m", "spacing", "decay", "density")
    @classmethod
    def _fits_rule(cls, value: Any, info: ValidationInfo) -> Any:
        name, field = info.data.get("name"), info.field_name
        if name is None or field is None:
            return value
        if value is not None and field not in _RULE_PARAMETERS[name]:
            takers = ", ".join(rule for rule, parameters in _RULE_PARAMETERS.items() if field in parameters)
            raise ValueError(f"{name} has no {field}; {field} belongs to {takers}")
        if value is None and field in _RULE_PARAMETERS[name] and field in _RULE_NEEDS:
            raise ValueError(f"{name} needs {_RULE_NEEDS[field]}")
        if name == "one_sqrt" and field == "m" and value == 2:
            raise ValueError("one_sqrt needs at least 3: the oldest weighs nothing, and of 2 the raw one would remain")
        return 4 if name == "last_m" and field == "m" and value is None else value

    @property
    def text(self) -> str:
        """What names the rule in its series: its pool, else its parameters as written, the same for every scale."""
        if self.pool is not None:
            return self.pool
        given = {field: getattr(self, field) for field in _RULE_PARAMETERS[self.name]}
        parameters = ", ".join(f"{field}={value}" for field, value in given.items() if value is not None)
        return f"{self.name}({parameters})" if parameters else self.name


Rules = Annotated[tuple[RuleSettings, ...], Field(min_length=1)]


class CellSettings(Settings):
    """Explicit cells beside the product: every D_s with every D_l given here. What is not given is the grid's."""

    scale: Label
    short_tokens: BudgetOrList | None = None
    long_tokens: BudgetOrList
    seeds: CellSeedSettings = CellSeedSettings()
    rules: Rules | None = None
    evaluate_every: TokenBudget | None = None


def _holdout(text: str) -> str:
    if text != "long_tokens=largest" and not re.fullmatch(r"scale=.+", text, re.DOTALL):
        raise ValueError('must be null, "long_tokens=largest" or "scale=NAME"')
    return text


def _at(value: object) -> str:
    return _ONE if isinstance(value, str) else _LIST


class FollowUpSettings(DataSettings):
    """A stage that goes on from models of the grid's cells; what is not given is as in their long stage.

    `from` is the rule whose model it begins with, `at` the D_l of those cells. Its end is measured and never fitted.
    """

    model_config = ConfigDict(serialize_by_alias=True)

    name: Label
    start: Annotated[RuleSettings, Field(alias="from")]
    at: Annotated[Annotated[Literal["largest"], Tag(_ONE)] | Annotated[BudgetList, Tag(_LIST)], Discriminator(_at)] = (
        "largest"
    )
    scales: Annotated[tuple[Label, ...], Field(min_length=1)] | None = None
    tokens: TokenBudget
    seq_len: Annotated[Count, Field(ge=2)] | None = None
    batch_sequences: Count | None = None
    rope_base: Positive | None = None
    rope: RopeSettings | None = None
    start_rate: StartRate = "inherit"
    optimizer_state: OptimizerState = "fresh"
    warmup_steps: Natural = 0
    final_rate_ratio: Ratio = 0.1
    decay_shape: DecayShape | None = None
    z_loss: Annotated[Real, Field(ge=0)] | None = None
    precision: Precision | None = None
    corpus: Label | None = None
    split: Split | None = None
    evaluation: EvaluationSettings | None = None

    @field_validator("optimizer_state")
    @classmethod
    def _merged_models_have_no_optimizer(cls, state: str, info: ValidationInfo) -> str:
        start = info.data.get("start")
        if state == "carry" and start is not None and start.name != "raw":
            raise ValueError("a merged model has no optimizer state to carry on; only from raw can")
        return state

    @field_validator("evaluation")
    @classmethod
    def _measured_at_its_end(cls, evaluation: EvaluationSettings | None) -> EvaluationSettings | None:
        if evaluation is not None and (evaluation.every is not None or evaluation.diagnose_zero):
            raise ValueError("a follow-up is measured at its end alone; take out every and diagnose_zero")
        return evaluation

    @model_validator(mode="after")
    def _one_rope(self) -> Self:
        if self.rope is not None and self.rope_base is not None:
            raise ValueError("rope and rope_base say the same thing; give one of them")
        return self


class FitSettings(Settings):
    holdout: Annotated[str, AfterValidator(_holdout)] | None = None
    bootstrap: Annotated[Natural, Field(le=100_000)] = 200


class CostSettings(Settings):
    """The stated rate for GPU-hours: peak floating-point operations per second, and the share that is reached."""

    gpu_flops: Positive = 4.0e14
    gpu_utilisation: Ratio = 0.4


class CapSettings(Settings):
    gpu_hours: Positive | None = None


class Grid(Settings):
    """Scales x D_s x D_l x seeds, a protocol, a recipe, an evaluation and a cap, as the user wrote them."""

    name: Label
    protocol: Protocol
    scales: Annotated[dict[Label, Scale], Field(min_length=1)]
    product_scales: tuple[Label, ...] | None = None
    short_tokens: BudgetsByScale | None = None
    long_tokens: BudgetsByScale | None = None
    seeds: SeedSettings = SeedSettings()
    rules: Rules = (RuleSettings(name="raw"),)
    cells: tuple[CellSettings, ...] = ()
    follow_ups: tuple[FollowUpSettings, ...] = ()
    recipe: Recipe
    evaluation: EvaluationSettings
    fit: FitSettings = FitSettings()
    rounding_tolerance: Annotated[Positive, Field(lt=1)] = 0.01
    cost: CostSettings = CostSettings()
    budget: CapSettings = CapSettings()
    execution: ExecutionSettings = ExecutionSettings()

    @property
    def in_product(self) -> tuple[str, ...]:
        """Names of the scales that take part in the product, in the order of `scales`; none without budgets."""
        if self.short_tokens is None and self.long_tokens is None:
            return ()
        return tuple(name for name in self.scales if self.product_scales is None or name in self.product_scales)

    def resolve(self, scale: str) -> ResolvedScale:
        """Model and stages of one scale, its overrides applied."""
        return self._resolve(scale, [])

    def _resolve(self, scale: str, problems: list[Problem]) -> ResolvedScale:
        return resolve_scale(
            scale,
            self.scales[scale],
            self.recipe,
            self.protocol,
            execution=self.execution,
            tolerance=self.rounding_tolerance,
            problems=problems,
        )


def load_grid(text: str, *, format: DocumentFormat) -> Grid:
    """The grid that a YAML or JSON text holds.

    Raises:
        GridError: with every problem found, each at its JSON Pointer.
    """
    return parse_grid(read_document(text, format=format))


def parse_grid(document: object) -> Grid:
    """The grid that a document (mappings, lists, text, numbers) holds.

    Raises:
        GridError: with every problem found, each at its JSON Pointer.
    """
    if not isinstance(document, Mapping):
        raise GridError([Problem(pointer="", message="must be a mapping with name, protocol, scales, ...")])
    problems = []
    grid = None
    try:
        grid = Grid.model_validate(document)
    except ValidationError as error:
        problems += problems_of(error, Grid)
    # Names are looked up in the document itself, so that a typo elsewhere does not hide a wrong name.
    problems += _unknown_scales(document)
    if grid is not None:
        missing = missing_settings(grid.recipe, grid.scales)
        problems += _missing_parts(grid) + missing + _protocol_misfits(grid) + _holdout_misfits(grid)
        if not missing:
            for name in grid.scales:
                grid._resolve(name, problems)
        problems += _probe_misfits(grid)
    if problems or grid is None:
        raise GridError(problems)
    return grid


def _probe_misfits(grid: Grid) -> list[Problem]:
    """Probes that cannot be, of the grid's own evaluation and of its follow-ups'."""
    evaluations = [("/evaluation", grid.evaluation)]
    for index, follow_up in enumerate(grid.follow_ups):
        if follow_up.evaluation is not None:
            evaluations.append((pointer("follow_ups", index, "evaluation"), follow_up.evaluation))
    problems = []
    for at, evaluation in evaluations:
        if evaluation.probes is not None:
            documents = resolve_evaluator(evaluation, grid.recipe).documents
            problems += probe_problems(evaluation.probes, documents, at=f"{at}/probes")
    return problems


def budget_list(budgets: Any, scale: str, *, at: str) -> list[tuple[str, Budget]]:
    """The budgets that a field gives to one scale, each with its JSON Pointer; `at` is the pointer of the field."""
    if budgets is None:
        return []
    if isinstance(budgets, Budget):
        return [(at, budgets)]
    if isinstance(budgets, Mapping):
        key = scale if scale in budgets else DEFAULT_SCALE
        return budget_list(budgets.get(key, ()), scale, at=at + pointer(key))
    return [(at + pointer(index), budget) for index, budget in enumerate(budgets)]


def _unknown_scales(document: Mapping[str, Any]) -> list[Problem]:
    """Every mention of a scale that `scales` does not define."""
    scales = document.get("scales")
    if not isinstance(scales, Mapping):
        return []
    mentions: list[tuple[str, Any]] = []
    for field in ("short_tokens", "long_tokens"):
        if isinstance(document.get(field), Mapping):
            mentions += [(pointer(field, name), name) for name in document[field] if name != DEFAULT_SCALE]
    if isinstance(document.get("product_scales"), (list, tuple)):
        mentions += [(pointer("product_scales", index), name) for index, name in enumerate(document["product_scales"])]
    if isinstance(document.get("cells"), (list, tuple)):
        for index, cell in enumerate(document["cells"]):
            if isinstance(cell, Mapping) and "scale" in cell:
                mentions.append((pointer("cells", index, "scale"), cell["scale"]))
    if isinstance(document.get("follow_ups"), (list, tuple)):
        for index, follow_up in enumerate(document["follow_ups"]):
            names = follow_up.get("scales") if isinstance(follow_up, Mapping) else None
            if isinstance(names, (list, tuple)):
                places = (pointer("follow_ups", index, "scales", number) for number in range(len(names)))
                mentions += zip(places, names, strict=True)
    fit = document.get("fit")
    if isinstance(fit, Mapping) and str(fit.get("holdout")).startswith("scale="):
        mentions.append(("/fit/holdout", fit["holdout"].removeprefix("scale=")))
    known = ", ".join(str(name) for name in scales)
    problems = [
        Problem(pointer=place, message=f"no scale is named {name!r}; the grid defines {known}")
        for place, name in mentions
        if isinstance(name, str) and name not in scales
    ]
    if DEFAULT_SCALE in scales:
        problems.append(
            Problem(
                pointer=pointer("scales", DEFAULT_SCALE), message="this name is kept for budgets of all other scales"
            )
        )
    return problems


def _missing_parts(grid: Grid) -> list[Problem]:
    """Budgets and cells without which there is nothing to train, or nothing for one scale."""
    fields: tuple[Literal["short_tokens", "long_tokens"], ...] = ("short_tokens", "long_tokens")
    problems = _short_budgets_of_folders(grid)
    if grid.short_tokens is None and grid.long_tokens is None:
        if grid.cells:
            return problems
        return [Problem(pointer="", message="asks for no cells: give short_tokens and long_tokens, or cells")]
    if not grid.in_product and not grid.cells:
        problems.append(
            Problem(pointer="/product_scales", message="is empty, and there are no cells beside the product")
        )
    shapes = [scale for scale in grid.in_product if not isinstance(grid.scales[scale], FolderScale)]
    for field in fields:
        budgets = getattr(grid, field)
        names = shapes if field == "short_tokens" else grid.in_product
        if budgets is None:
            if names:
                problems.append(Problem(pointer=pointer(field), message="is required for the product of budgets"))
            continue
        for scale in names:
            if not budget_list(budgets, scale, at=""):
                message = f"has neither {scale!r} nor {DEFAULT_SCALE!r}, and scale {scale!r} takes part in the product"
                problems.append(Problem(pointer=pointer(field), message=message))
    return problems


def _short_budgets_of_folders(grid: Grid) -> list[Problem]:
    """D_s is asked of shapes; a model from a folder has the one it was trained with."""
    message = "scale {!r} is a model from a folder: its D_s is short_tokens_seen, and no budget is asked of it"
    problems = []
    if isinstance(grid.short_tokens, Mapping):
        for name in grid.short_tokens:
            if isinstance(grid.scales.get(name), FolderScale):
                problems.append(Problem(pointer=pointer("short_tokens", name), message=message.format(name)))
    for index, cell in enumerate(grid.cells):
        scale = grid.scales.get(cell.scale)
        place = pointer("cells", index, "short_tokens")
        if isinstance(scale, FolderScale) and cell.short_tokens is not None:
            problems.append(Problem(pointer=place, message=message.format(cell.scale)))
        elif scale is not None and not isinstance(scale, FolderScale) and cell.short_tokens is None:
            problems.append(Problem(pointer=place, message="is required"))
    return problems


def _holdout_misfits(grid: Grid) -> list[Problem]:
    """A law with a term of D_s predicts nothing where D_s is unknown."""
    held_out = grid.scales.get((grid.fit.holdout or "").removeprefix("scale="))
    if not isinstance(held_out, FolderScale) or held_out.short_tokens_seen is not None:
        return []
    message = "D_s of this scale is unknown, so no fit can predict it; hold out another, or give short_tokens_seen"
    return [Problem(pointer="/fit/holdout", message=message)]


def _protocol_misfits(grid: Grid) -> list[Problem]:
    """What only a constant rate can give: under linear_decay a budget in between is a run of its own."""
    if grid.protocol == "constant":
        return []
    problems = []
    rules = [(pointer("rules", index), rule) for index, rule in enumerate(grid.rules)]
    every = [("/evaluation/every", grid.evaluation.every)]
    for index, cell in enumerate(grid.cells):
        rules += [(pointer("cells", index, "rules", number), rule) for number, rule in enumerate(cell.rules or ())]
        every.append((pointer("cells", index, "evaluate_every"), cell.evaluate_every))
    rules += [(pointer("follow_ups", index, "from"), item.start) for index, item in enumerate(grid.follow_ups)]
    for place, rule in rules:
        if rule.name != "raw":
            message = f"{rule.name} needs protocol constant: under linear_decay only the end of a run is an observation"
            problems.append(Problem(pointer=place, message=message))
    for place, budget in every:
        if budget is not None:
            message = "needs protocol constant: under linear_decay every budget is a run of its own"
            problems.append(Problem(pointer=place, message=message))
    return problems
