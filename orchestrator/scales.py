"""Scales with nothing left to look up: the model, its short stage, the sub-phases of its long stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.budgets import parse_budget, rounding_problem
from orchestrator.errors import Problem
from orchestrator.grid_problems import pointer
from orchestrator.recipe import (
    LONG_DEFAULTS,
    SHORT_DEFAULTS,
    ExecutionSettings,
    FolderScale,
    Recipe,
    ShapeScale,
    execution_of,
    merged,
    shape_of,
)
from orchestrator.stage_settings import DATA_FIELDS, RopeSettings, resolve_data, resolve_optimizer, resolve_rope
from workers.spec import DataMix, Execution, FolderModel, LongStage, ModelShape, Protocol, ShortStage, Yarn, steps_for

T = TypeVar("T")
_OF_DATA = frozenset(DATA_FIELDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the long stage with one sequence length, base and mixture; `start_step` updates lie before it."""

    start_step: int
    stage: LongStage


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScale:
    """One scale. A model from a folder has no `short` stage; its D_s is `short_tokens_seen`, None where unknown.

    Under `constant` the long stage's final_rate_ratio is 1. `head_dim` is the width of a head, where it is known.
    """

    name: str
    shape: ModelShape | FolderModel
    short: ShortStage | None
    phases: tuple[Phase, ...]
    short_tokens_seen: int | None
    head_dim: int | None
    execution: Execution

    @property
    def long(self) -> LongStage:
        """The long stage as it begins; the tokens of a step are the same in all phases."""
        return self.phases[0].stage

    @property
    def recipe(self) -> list[object]:
        """What its cells have in common, for their identity."""
        long: object = self.long if len(self.phases) == 1 else self.phases
        return [self.shape, self.short, long]

    def phase_at(self, step: int) -> int:
        """The phase whose checkpoint stands at `step` of the long stage: a border belongs to what ends there."""
        return max((i for i, phase in enumerate(self.phases) if phase.start_step < step), default=0)

    def step_in_phase(self, step: int) -> int:
        """Updates of the phase of `step` that are done there."""
        return step - self.phases[self.phase_at(step)].start_step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Before:
    """What an extension starts from, where it is known: the base and the length so far, and the width of a head."""

    base: float | None
    length: int | None
    head_dim: int | None


class _Places:
    """Where a setting of one scale stands: in the scale if it gives it, else in the recipe."""

    def __init__(self, name: str, scale: ShapeScale | FolderScale, problems: list[Problem]) -> None:
        self._name = name
        self._scale = scale
        self.problems = problems

    def note(self, stage: str, field: str, message: object, *more: str | int) -> None:
        own = getattr(getattr(self._scale, stage, None), field, None)
        given = own is not None and (field != "optimizer" or own.model_fields_set)
        at = ("scales", self._name, stage) if given else ("recipe", stage)
        self.problems.append(Problem(pointer=pointer(*at, field, *more), message=f"scale {self._name}: {message}"))

    def attempt(self, stage: str, field: str, resolve: Callable[[], T], fallback: T, *more: str | int) -> T:
        try:
            return resolve()
        except ValueError as error:
            self.note(stage, field, error, *more)
            return fallback


def resolve_scale(
    name: str,
    scale: ShapeScale | FolderScale,
    recipe: Recipe,
    protocol: Protocol,
    *,
    execution: ExecutionSettings,
    tolerance: float,
    problems: list[Problem],
) -> ResolvedScale:
    """The model and the stages of one scale. What cannot be so goes to `problems`; then the result is of no use.

    `missing_settings` must have found nothing.
    """
    shape = shape_of(scale, recipe)
    places = _Places(name, scale, problems)
    if isinstance(scale, ShapeScale):
        assert isinstance(shape, ModelShape)
        short = _short_stage(scale, recipe, places)
        before = _Before(base=short.rope_base, length=short.seq_len, head_dim=shape.head_dim)
    else:
        short = None
        before = _Before(base=scale.model.rope_base, length=None, head_dim=scale.model.head_dim)
    settings = _long_settings(scale, recipe, protocol, short, places)
    phases = settings.pop("stages", None)
    if phases is None:
        resolved = [Phase(start_step=0, stage=_long_stage(settings, recipe.corpus, before, places))]
    else:
        resolved = _phases(settings, phases, recipe.corpus, before, shape.n_params, tolerance, places)
    how = execution_of(execution, scale.execution)
    stages: list[ShortStage | LongStage] = [phase.stage for phase in resolved]
    for stage in stages if short is None else [short, *stages]:
        if misfit := execution_problem(how, stage):
            problems.append(Problem(pointer=pointer("scales", name, "execution"), message=misfit))
    return ResolvedScale(
        name=name,
        shape=shape,
        short=short,
        phases=tuple(resolved),
        short_tokens_seen=scale.short_tokens_seen if isinstance(scale, FolderScale) else None,
        head_dim=before.head_dim,
        execution=how,
    )


def execution_problem(how: Execution, stage: ShortStage | LongStage) -> str | None:
    """Why a stage cannot be run so, if it cannot: every process takes whole sequences, as many as all others."""
    if stage.batch_sequences % how.processes:
        return f"{how.processes} processes do not divide a batch of {stage.batch_sequences} sequences"
    if how.micro_batch_tokens is not None and how.micro_batch_tokens < stage.seq_len:
        return f"micro_batch_tokens {how.micro_batch_tokens:,} do not hold a sequence of {stage.seq_len:,}"
    return None


def _short_stage(scale: ShapeScale, recipe: Recipe, places: _Places) -> ShortStage:
    settings = merged(SHORT_DEFAULTS, recipe.short, scale.short)
    data = {key: settings.pop(key) for key in list(settings) if key in _OF_DATA}
    optimizer = settings.pop("optimizer")
    return ShortStage(
        **settings,
        data=places.attempt(
            "short",
            "blended" if data.get("blended") else "full_length_share",
            lambda: resolve_data(data, corpus=recipe.corpus, split="short"),
            DataMix(corpus=recipe.corpus, split="short"),
        ),
        optimizer=places.attempt("short", "optimizer", lambda: resolve_optimizer(optimizer), resolve_optimizer({})),
    )


def _long_settings(
    scale: ShapeScale | FolderScale, recipe: Recipe, protocol: Protocol, short: ShortStage | None, places: _Places
) -> dict[str, Any]:
    """The settings of the long stage with the optimizer, and what it takes over from the short stage, resolved."""
    settings = merged(LONG_DEFAULTS, recipe.long, scale.long)
    given = settings["optimizer"]
    settings["optimizer"] = places.attempt("long", "optimizer", lambda: resolve_optimizer(given), resolve_optimizer({}))
    if short is None:
        if settings["start_rate"] == "inherit":
            places.note("long", "start_rate", "needs a value: a model from a folder has no rate to go on with")
            settings["start_rate"] = 1.0
        settings["optimizer_state"] = "fresh"
    else:
        if settings["start_rate"] == "inherit":
            settings["start_rate"] = short.end_rate
        if settings["optimizer_state"] == "carry" and type(short.optimizer) is not type(settings["optimizer"]):
            places.note("long", "optimizer_state", "the short stage has another optimizer, so it must be fresh")
    if protocol == "constant":
        settings |= {"final_rate_ratio": 1.0, "decay_shape": "linear"}
    return settings


def _long_stage(
    settings: Mapping[str, Any], corpus: str, before: _Before, places: _Places, *phase: str | int
) -> LongStage:
    """The long stage, or a phase of it by its number."""
    given = dict(settings)
    data = {key: given.pop(key) for key in list(given) if key in _OF_DATA}
    corpus = given.pop("corpus", corpus)
    mix = places.attempt(
        "long",
        "stages" if phase else "blended" if data.get("blended") else "full_length_share",
        lambda: resolve_data(data, corpus=corpus, split="long"),
        DataMix(corpus=corpus, split="long"),
        *phase,
    )
    unknown: tuple[float, Yarn | None] = (10_000.0, None)
    rope_base, yarn = given.pop("rope_base", None), None
    if "rope" in given:
        rope = RopeSettings(**given.pop("rope"))
        rope_base, yarn = places.attempt(
            "long",
            "stages" if phase else "rope",
            lambda: resolve_rope(
                rope,
                seq_len=given["seq_len"],
                old_base=before.base,
                old_length=before.length,
                head_dim=before.head_dim,
            ),
            unknown,
            *phase,
        )
    return LongStage(**given, rope_base=rope_base, yarn=yarn, data=mix)


def _phases(
    settings: Mapping[str, Any],
    given: tuple[Mapping[str, Any], ...],
    corpus: str,
    before: _Before,
    n_params: int,
    tolerance: float,
    places: _Places,
) -> list[Phase]:
    """The phases in order. All take the same tokens a step, and all but the first go on with the optimizer's state."""
    tokens_per_step = settings["seq_len"] * settings["batch_sequences"]
    phases: list[Phase] = []
    start_step = 0
    for number, phase in enumerate(given):
        own = {**phase}
        until = own.pop("until", None)
        base = {key: value for key, value in settings.items() if not (key in ("rope", "rope_base") and _has_rope(own))}
        seq_len = own.get("seq_len", settings["seq_len"])
        if own.get("batch_sequences", tokens_per_step // seq_len) * seq_len != tokens_per_step:
            places.note(
                "long",
                "stages",
                f"a step takes {tokens_per_step:,} tokens in every phase, which sequences of {seq_len:,} do not make"
                " with a whole batch",
                number,
                "seq_len",
            )
        own["batch_sequences"] = max(1, tokens_per_step // seq_len)
        if number:
            own["optimizer_state"] = "carry"
        phases.append(Phase(start_step=start_step, stage=_long_stage(base | own, corpus, before, places, number)))
        last = number == len(given) - 1
        if (until is None) != last:
            message = "the last phase is open and has no until" if last else "is required: where the next phase begins"
            places.note("long", "stages", message, number, "until")
        elif until is not None:
            begun, tokens = start_step, parse_budget(until).tokens_for(n_params)
            start_step = steps_for(tokens, tokens_per_step)
            if misfit := rounding_problem(tokens, tokens_per_step, tolerance):
                places.note("long", "stages", misfit, number, "until")
            elif start_step <= begun:
                message = f"must lie above the phase before, step {begun}, not at step {start_step}"
                places.note("long", "stages", message, number, "until")
    return phases


def _has_rope(phase: Mapping[str, Any]) -> bool:
    return "rope" in phase or "rope_base" in phase
