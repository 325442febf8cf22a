"""The recipe of a grid and what it resolves to, scale by scale: shape, short stage, long stage, evaluator."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Discriminator, Field, PlainValidator, Tag, ValidationInfo, field_validator

from orchestrator.budgets import parse_integer, shown
from orchestrator.errors import Problem
from orchestrator.fields import Count, Flag, Label, Natural, Place, Positive, Real, Settings, TokenBudget
from orchestrator.grid_problems import ALTERNATIVES
from orchestrator.probe_settings import ProbeSetSettings
from orchestrator.stage_settings import LongSettings, ShortSettings, StageSettings, resolve_optimizer
from workers.spec import (
    NUMERICS_VERSION,
    Chunking,
    ChunkingMode,
    DecayShape,
    EvaluationDocuments,
    Evaluator,
    Execution,
    FolderModel,
    ModelShape,
    Reference,
    ReferenceKind,
    Sharding,
    content_hash,
)

_SHAPE, _MODEL = ALTERNATIVES[3:]


class AttentionSettings(Settings):
    qk_conv_kernel: Natural = 0


class ModelSettings(Settings):
    vocab_size: Annotated[Count, Field(ge=2)]
    tied_embeddings: Flag = True
    init_std: Positive = 0.02
    norm_eps: Positive = 1e-5
    attention: AttentionSettings = AttentionSettings()


class Recipe(Settings):
    """`model` and `short` are for scales that begin with random weights."""

    model: ModelSettings | None = None
    corpus: Label
    short: ShortSettings = ShortSettings()
    long: LongSettings


class ExecutionSettings(Settings):
    """How segments are run: it changes no number and no identity. What a scale does not give is the grid's."""

    processes: Count | None = None
    sharding: Sharding | None = None
    micro_batch_tokens: Count | None = None
    recompute_activations: Flag | None = None


class ShapeScale(Settings):
    """A model shape; `short` and `long` override the recipe for this scale."""

    layers: Count
    width: Count
    heads: Count
    kv_heads: Count | None = None
    ffn_width: Count
    short: ShortSettings = ShortSettings()
    long: LongSettings = LongSettings()
    execution: ExecutionSettings = ExecutionSettings()

    @field_validator("heads")
    @classmethod
    def _heads_divide_width(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width")
        if width is not None and width % heads:
            raise ValueError(f"{heads} heads do not divide the width {width}")
        if width is not None and width // heads % 2:
            raise ValueError(f"a head of width {width} / {heads} = {width // heads} is odd; RoPE needs it even")
        return heads

    @field_validator("kv_heads")
    @classmethod
    def _kv_heads_divide_heads(cls, kv_heads: int | None, info: ValidationInfo) -> int | None:
        heads = info.data.get("heads")
        if heads is not None and kv_heads is not None and heads % kv_heads:
            raise ValueError(f"{kv_heads} kv_heads do not divide the {heads} heads")
        return kv_heads


def _tokens_seen(value: object) -> int | None:
    if value is None or value == "unknown":
        return None
    tokens = parse_integer(value)
    if tokens < 1:
        raise ValueError(f"must be above zero or unknown, not {shown(value)}")
    return tokens


class FolderModelSettings(Settings):
    """A model in the store, as `longlaw model add` prints it. `head_dim` (the channels of a head that rotate) and
    `rope_base` are those it came with."""

    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    n_params: Count
    embedding_params: Count
    layers: Count
    width: Count
    vocab_size: Count
    attention_width: Count | None = None
    head_dim: Count | None = None
    rope_base: Positive | None = None


class FolderScale(Settings):
    """A model that somebody else trained stands for the short stage; `short_tokens_seen` is its D_s, where known."""

    model: FolderModelSettings
    short_tokens_seen: Annotated[int | None, PlainValidator(_tokens_seen, json_schema_input_type=int | str)]
    long: LongSettings = LongSettings()
    execution: ExecutionSettings = ExecutionSettings()


Scale = Annotated[
    Annotated[ShapeScale, Tag(_SHAPE)] | Annotated[FolderScale, Tag(_MODEL)],
    Discriminator(lambda value: _MODEL if _has_model(value) else _SHAPE),
]


def _has_model(value: object) -> bool:
    return isinstance(value, FolderScale) or (isinstance(value, Mapping) and "model" in value)


class ReferenceSettings(Settings):
    kind: ReferenceKind
    path: Annotated[Place | None, Field(validate_default=True)] = None
    digest: Label | None = None

    @field_validator("path")
    @classmethod
    def _path_fits_kind(cls, path: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("kind") == "copy" and path is not None:
            raise ValueError("the copy reference has no path; it counts the training documents of a corpus")
        if info.data.get("kind") == "huggingface" and path is None:
            raise ValueError("is required: where the reference model lies")
        return path


class DocumentSettings(Settings):
    count: Count
    length: Annotated[Count, Field(ge=2)]
    min_length: Annotated[Count, Field(ge=2)] | None = None
    corpus: Label | None = None


class ChunkingSettings(Settings):
    length: Count = 4096
    stride: Count = 1024
    mode: ChunkingMode = "exact"


class EvaluationSettings(Settings):
    """The evaluator, where else to evaluate (each multiple of `every`, D_l = 0 with `diagnose_zero`), and `probes`."""

    reference: ReferenceSettings
    documents: DocumentSettings
    chunking: ChunkingSettings = ChunkingSettings()
    gain_threshold: Real = 2.0
    full_nll_ceiling: Positive = 2.0
    short_context_gap: Flag = False
    every: TokenBudget | None = None
    diagnose_zero: Flag = False
    probes: ProbeSetSettings | None = None


SHORT_DEFAULTS: dict[str, Any] = {"rope_base": 10_000.0, "final_rate_ratio": 0.1, "copied_spans": 0.0}
LONG_DEFAULTS: dict[str, Any] = {
    "start_rate": "inherit",
    "optimizer_state": "carry",
    "warmup_steps": 0,
    "final_rate_ratio": 0.1,
    "copied_spans": 0.0,
}
#: Settings that came later, with the values that mean what was done before: at those they rename nothing.
_AS_BEFORE = {"packing": "stream", "min_document_tokens": 0, "blended": (), "z_loss": 0.0, "precision": "fp32"}
_NEVER_REQUIRED = frozenset(
    {"optimizer", "rope", "stages", "decay_shape", "full_length_share", *_AS_BEFORE},
)


def merged(defaults: Mapping[str, Any], *layers: StageSettings) -> dict[str, Any]:
    """Stage settings by name, later layers winning, `optimizer` field by field; what nobody gives is absent."""
    settings = dict(defaults)
    optimizer: dict[str, Any] = {}
    for layer in layers:
        given = layer.model_dump(exclude_none=True)
        optimizer |= given.pop("optimizer")
        for one, other in (("rope", "rope_base"), ("rope_base", "rope")):
            if one in given:
                settings.pop(other, None)
        settings |= given
    return settings | {"optimizer": optimizer}


def missing_settings(recipe: Recipe, scales: Mapping[str, ShapeScale | FolderScale]) -> list[Problem]:
    """Stage settings that neither the recipe nor every scale that needs them gives."""
    shapes = [name for name, scale in scales.items() if isinstance(scale, ShapeScale)]
    problems = []
    if shapes and recipe.model is None:
        problems.append(Problem(pointer="/recipe/model", message="is required, with vocab_size"))
    stages: tuple[tuple[str, StageSettings, dict[str, Any], list[str]], ...] = (
        ("short", recipe.short, SHORT_DEFAULTS, shapes),
        ("long", recipe.long, LONG_DEFAULTS, list(scales)),
    )
    for stage, layer, defaults, names in stages:
        for field in type(layer).model_fields:
            if field in _NEVER_REQUIRED:
                continue
            lacking = [
                name for name in names if not _gives(field, merged(defaults, layer, getattr(scales[name], stage)))
            ]
            if lacking:
                message = "is required, here or under every scale"
                if len(lacking) < len(names):
                    message += f" (not given for {', '.join(lacking)})"
                problems.append(Problem(pointer=f"/recipe/{stage}/{field}", message=message))
    return problems


def _gives(field: str, settings: Mapping[str, Any]) -> bool:
    if field == "rope_base" and field not in settings:
        phases = settings.get("stages", ())
        return "rope" in settings or (bool(phases) and all("rope" in phase or field in phase for phase in phases))
    return field in settings


def shape_of(scale: ShapeScale | FolderScale, recipe: Recipe) -> ModelShape | FolderModel:
    """The model of one scale; `missing_settings` must have found nothing."""
    if isinstance(scale, FolderScale):
        return FolderModel(**scale.model.model_dump(exclude={"head_dim", "rope_base"}))
    model = recipe.model
    assert model is not None
    return ModelShape(
        layers=scale.layers,
        width=scale.width,
        heads=scale.heads,
        kv_heads=scale.kv_heads or scale.heads,
        ffn_width=scale.ffn_width,
        vocab_size=model.vocab_size,
        tied_embeddings=model.tied_embeddings,
        qk_conv_kernel=model.attention.qk_conv_kernel,
        init_std=model.init_std,
        norm_eps=model.norm_eps,
    )


def execution_of(*layers: ExecutionSettings) -> Execution:
    """How segments are run, later layers winning field by field."""
    given: dict[str, Any] = {}
    for layer in layers:
        given |= layer.model_dump(exclude_none=True)
    return Execution(**given)


def family_of(recipe: Recipe) -> str:
    """32 hexadecimal digits for the recipe without scales, their overrides, seeds and protocol.

    The floor and the shape of the linear decay belong to the protocol: they are left out here and part of a series.
    """
    long = _canonical(merged(LONG_DEFAULTS, recipe.long))
    del long["final_rate_ratio"]
    long.pop("decay_shape", None)
    content = {
        "model": None if recipe.model is None else recipe.model.model_dump(),
        "corpus": recipe.corpus,
        "short": _canonical(merged(SHORT_DEFAULTS, recipe.short)),
        "long": long,
        "numerics_version": NUMERICS_VERSION,
    }
    return content_hash(content)


def _canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """One form for one meaning: what came later is left out where it changes nothing."""
    kept = {name: value for name, value in settings.items() if name not in _AS_BEFORE or value != _AS_BEFORE[name]}
    if kept.get("decay_shape") == "linear":
        del kept["decay_shape"]
    if kept.get("rope", {}).get("method") == "abf":
        kept["rope_base"] = kept.pop("rope")["base"]
    kept["optimizer"] = dataclasses.asdict(resolve_optimizer(kept["optimizer"]))
    return kept


def long_decay(recipe: Recipe) -> tuple[float, DecayShape]:
    """Where the decay of the long stage ends, as a share of its start, and its shape, before scales override them."""
    settings = merged(LONG_DEFAULTS, recipe.long)
    return float(settings["final_rate_ratio"]), settings.get("decay_shape", "linear")


def resolve_evaluator(evaluation: EvaluationSettings, recipe: Recipe) -> Evaluator:
    """The evaluator's value; a copy reference counts the recipe's corpus unless told otherwise."""
    reference, documents, chunking = evaluation.reference, evaluation.documents, evaluation.chunking
    digest = reference.digest
    if digest is None and reference.kind == "copy":
        digest = recipe.corpus
    return Evaluator(
        reference=Reference(kind=reference.kind, path=reference.path, digest=digest),
        documents=EvaluationDocuments(
            corpus=documents.corpus or recipe.corpus,
            count=documents.count,
            length=documents.length,
            min_length=documents.min_length,
        ),
        chunking=Chunking(length=chunking.length, stride=chunking.stride, mode=chunking.mode),
        gain_threshold=evaluation.gain_threshold,
        full_nll_ceiling=evaluation.full_nll_ceiling,
        short_context_gap=evaluation.short_context_gap,
    )
