"""The recipe of a grid and what it resolves to, scale by scale: shape, short stage, long stage, evaluator."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationInfo, field_validator

from orchestrator.budgets import parse_real, shown
from orchestrator.errors import Problem
from orchestrator.fields import Count, Flag, Label, Natural, Place, Positive, Ratio, Real, Settings, Share, TokenBudget
from workers.spec import (
    NUMERICS_VERSION,
    AdamW,
    Chunking,
    ChunkingMode,
    DataMix,
    EvaluationDocuments,
    Evaluator,
    LongStage,
    ModelShape,
    OptimizerState,
    Protocol,
    Reference,
    ReferenceKind,
    ShortStage,
    content_hash,
)


class OptimizerSettings(Settings):
    """AdamW; what is not given stays as the recipe, or `workers.spec.AdamW`, has it."""

    beta1: Annotated[Real, Field(ge=0, lt=1)] | None = None
    beta2: Annotated[Real, Field(ge=0, lt=1)] | None = None
    eps: Positive | None = None
    weight_decay: Annotated[Real, Field(ge=0)] | None = None
    clip_norm: Positive | None = None


class StageSettings(Settings):
    """What both stages have. None means: not given here."""

    seq_len: Annotated[Count, Field(ge=2)] | None = None
    batch_sequences: Count | None = None
    rope_base: Positive | None = None
    warmup_steps: Natural | None = None
    final_rate_ratio: Ratio | None = None
    copied_spans: Share | None = None
    optimizer: OptimizerSettings = OptimizerSettings()


class ShortSettings(StageSettings):
    peak_rate: Positive | None = None


def _start_rate(value: object) -> object:
    if value == "inherit":
        return value
    rate = parse_real(value)
    if rate <= 0:
        raise ValueError(f"must be above zero or inherit, not {shown(value)}")
    return rate


class LongSettings(StageSettings):
    start_rate: (
        Annotated[Literal["inherit"] | float, PlainValidator(_start_rate, json_schema_input_type=float | str)] | None
    ) = None
    optimizer_state: OptimizerState | None = None


class AttentionSettings(Settings):
    qk_conv_kernel: Natural = 0


class ModelSettings(Settings):
    vocab_size: Annotated[Count, Field(ge=2)]
    tied_embeddings: Flag = True
    init_std: Positive = 0.02
    norm_eps: Positive = 1e-5
    attention: AttentionSettings = AttentionSettings()


class Recipe(Settings):
    model: ModelSettings
    corpus: Label
    short: ShortSettings
    long: LongSettings


class Scale(Settings):
    """A model shape; `short` and `long` override the recipe for this scale."""

    layers: Count
    width: Count
    heads: Count
    kv_heads: Count | None = None
    ffn_width: Count
    short: ShortSettings = ShortSettings()
    long: LongSettings = LongSettings()

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
    corpus: Label | None = None


class ChunkingSettings(Settings):
    length: Count = 4096
    stride: Count = 1024
    mode: ChunkingMode = "exact"


class EvaluationSettings(Settings):
    """The evaluator, and where else to evaluate: at each multiple of `every`, and at D_l = 0 (`diagnose_zero`)."""

    reference: ReferenceSettings
    documents: DocumentSettings
    chunking: ChunkingSettings = ChunkingSettings()
    gain_threshold: Real = 2.0
    full_nll_ceiling: Positive = 2.0
    short_context_gap: Flag = False
    every: TokenBudget | None = None
    diagnose_zero: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedScale:
    """One scale with nothing left to look up. Under `constant` the long stage's final_rate_ratio is 1."""

    name: str
    shape: ModelShape
    short: ShortStage
    long: LongStage


_SHORT_DEFAULTS: dict[str, Any] = {"rope_base": 10_000.0, "final_rate_ratio": 0.1, "copied_spans": 0.0}
_LONG_DEFAULTS: dict[str, Any] = {
    "start_rate": "inherit",
    "optimizer_state": "carry",
    "warmup_steps": 0,
    "final_rate_ratio": 0.1,
    "copied_spans": 0.0,
}


def _merged(defaults: dict[str, Any], *layers: StageSettings) -> dict[str, Any]:
    """Stage settings by name, later layers winning, `optimizer` field by field; what nobody gives is absent."""
    merged = dict(defaults)
    optimizer: dict[str, Any] = {}
    for layer in layers:
        given = layer.model_dump(exclude_none=True)
        optimizer |= given.pop("optimizer")
        merged |= given
    return merged | {"optimizer": dataclasses.asdict(AdamW(**optimizer))}


def missing_settings(recipe: Recipe, scales: dict[str, Scale]) -> list[Problem]:
    """Stage settings that neither the recipe nor every scale gives."""
    problems = []
    for stage, layer, defaults in (("short", recipe.short, _SHORT_DEFAULTS), ("long", recipe.long, _LONG_DEFAULTS)):
        fields = [field for field in type(layer).model_fields if field != "optimizer"]
        for field in fields:
            given = _merged(defaults, layer)
            lacking = [name for name, scale in scales.items() if getattr(getattr(scale, stage), field) is None]
            if field not in given and lacking:
                message = "is required, here or under every scale"
                if len(lacking) < len(scales):
                    message += f" (not given for {', '.join(lacking)})"
                problems.append(Problem(pointer=f"/recipe/{stage}/{field}", message=message))
    return problems


def resolve_scale(name: str, scale: Scale, recipe: Recipe, protocol: Protocol) -> ResolvedScale:
    """The shape and the stages of one scale; `missing_settings` must have found nothing."""
    model = recipe.model
    shape = ModelShape(
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
    settings = _merged(_SHORT_DEFAULTS, recipe.short, scale.short)
    copied_spans, optimizer = settings.pop("copied_spans"), AdamW(**settings.pop("optimizer"))
    data = DataMix(corpus=recipe.corpus, split="short", copied_spans=copied_spans)
    short = ShortStage(**settings, data=data, optimizer=optimizer)

    settings = _merged(_LONG_DEFAULTS, recipe.long, scale.long)
    copied_spans, optimizer = settings.pop("copied_spans"), AdamW(**settings.pop("optimizer"))
    data = DataMix(corpus=recipe.corpus, split="long", copied_spans=copied_spans)
    if settings["start_rate"] == "inherit":
        settings["start_rate"] = short.end_rate
    if protocol == "constant":
        settings["final_rate_ratio"] = 1.0
    long = LongStage(**settings, data=data, optimizer=optimizer)
    return ResolvedScale(name=name, shape=shape, short=short, long=long)


def family_of(recipe: Recipe) -> str:
    """32 hexadecimal digits for the recipe without scales, their overrides, seeds and protocol.

    The floor of the linear decay belongs to the protocol: it is left out here and part of a series.
    """
    long = _merged(_LONG_DEFAULTS, recipe.long)
    del long["final_rate_ratio"]
    content = {
        "model": recipe.model.model_dump(),
        "corpus": recipe.corpus,
        "short": _merged(_SHORT_DEFAULTS, recipe.short),
        "long": long,
        "numerics_version": NUMERICS_VERSION,
    }
    return content_hash(content)


def long_floor(recipe: Recipe) -> float:
    """Where the linear decay of the long stage ends, as a share of its start, before scales override it."""
    return float(_merged(_LONG_DEFAULTS, recipe.long)["final_rate_ratio"])


def resolve_evaluator(evaluation: EvaluationSettings, recipe: Recipe) -> Evaluator:
    """The evaluator's value; a copy reference counts the recipe's corpus unless told otherwise."""
    reference, documents, chunking = evaluation.reference, evaluation.documents, evaluation.chunking
    digest = reference.digest
    if digest is None and reference.kind == "copy":
        digest = recipe.corpus
    return Evaluator(
        reference=Reference(kind=reference.kind, path=reference.path, digest=digest),
        documents=EvaluationDocuments(
            corpus=documents.corpus or recipe.corpus, count=documents.count, length=documents.length
        ),
        chunking=Chunking(length=chunking.length, stride=chunking.stride, mode=chunking.mode),
        gain_threshold=evaluation.gain_threshold,
        full_nll_ceiling=evaluation.full_nll_ceiling,
        short_context_gap=evaluation.short_context_gap,
    )
