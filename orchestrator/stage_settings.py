"""The settings of a training stage as a grid file writes them, and the values that they resolve to.

None means: not given here, so that the recipe, a scale and a sub-phase can each say a part.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, field_validator, model_validator

from orchestrator.budgets import parse_real, shown
from orchestrator.fields import Count, Flag, Label, Natural, Positive, Ratio, Real, Settings, Share, TokenBudget
from workers.rope import ntk_base
from workers.spec import (
    SHARE_UNIT,
    AdamW,
    BlendedSource,
    DataMix,
    DecayShape,
    Muon,
    MuonScaling,
    OptimizerState,
    Packing,
    Precision,
    Split,
    Yarn,
)

BelowOne = Annotated[Real, Field(ge=0, lt=1)]
_ADAMW = ("beta1", "beta2", "eps", "weight_decay", "clip_norm")
_MUON = ("rate_ratio", "momentum", "nesterov", "newton_schulz_steps", "scaling")


class OptimizerSettings(Settings):
    """AdamW, or Muon with AdamW; what is not given stays as the recipe, or `workers.spec`, has it."""

    name: Literal["adamw", "muon"] | None = None
    beta1: BelowOne | None = None
    beta2: BelowOne | None = None
    eps: Positive | None = None
    weight_decay: Annotated[Real, Field(ge=0)] | None = None
    clip_norm: Positive | None = None
    rate_ratio: Positive | None = None
    momentum: BelowOne | None = None
    nesterov: Flag | None = None
    newton_schulz_steps: Count | None = None
    scaling: MuonScaling | None = None


def resolve_optimizer(given: Mapping[str, Any]) -> AdamW | Muon:
    """The optimizer of merged settings; `weight_decay` is that of both groups of Muon.

    Raises:
        ValueError: if settings of Muon are given without it, or it lacks `rate_ratio`.
    """
    adamw = AdamW(**{name: given[name] for name in _ADAMW if name in given})
    of_muon = {name: given[name] for name in _MUON if name in given}
    if given.get("name", "adamw") == "adamw":
        if of_muon:
            raise ValueError(f"{', '.join(of_muon)}: only muon has this; give name: muon")
        return adamw
    if "rate_ratio" not in of_muon:
        raise ValueError("muon needs rate_ratio, its rate as a multiple of the stage's")
    return Muon(**of_muon, weight_decay=adamw.weight_decay, adamw=adamw)


class RopeSettings(Settings):
    """How the rotary frequencies become those of a longer context.

    `abf` sets the base to `base`. `ntk` derives it from the old `base` so that the slowest frequency is stretched by
    `factor`; `yarn` keeps the old `base` and interpolates. The old base is the short stage's unless given, `factor`
    the stage's length over `original_length`, and that is the short stage's length.
    """

    method: Literal["abf", "ntk", "yarn"]
    base: Positive | None = None
    factor: Annotated[Real, Field(ge=1)] | None = None
    original_length: Count | None = None

    @model_validator(mode="after")
    def _fits_method(self) -> Self:
        if self.method == "abf" and self.base is None:
            raise ValueError("abf needs base, the new one")
        if self.method == "abf" and (self.factor is not None or self.original_length is not None):
            raise ValueError("abf has a base alone; factor and original_length belong to ntk and yarn")
        return self


def resolve_rope(
    rope: RopeSettings, *, seq_len: int, old_base: float | None, old_length: int | None, head_dim: int | None
) -> tuple[float, Yarn | None]:
    """The base to rotate with and YaRN's interpolation.

    Raises:
        ValueError: if what the method starts from is not known.
    """
    base = rope.base or old_base
    length = rope.original_length or old_length
    if base is None:
        raise ValueError(f"{rope.method} needs base: the model does not say which one it has")
    if rope.method == "abf":
        return base, None
    if length is None and (rope.factor is None or rope.method == "yarn"):
        raise ValueError(f"{rope.method} needs original_length, the context before the extension")
    factor = rope.factor or max(1.0, seq_len / (length or seq_len))
    if rope.method == "yarn":
        assert length is not None
        return base, Yarn(factor=factor, original_positions=length)
    if head_dim is None:
        raise ValueError("ntk needs the width of a head: give head_dim under the scale's model")
    if head_dim < 4:
        raise ValueError(f"ntk needs heads at least 4 wide, not {head_dim}")
    return ntk_base(base, factor, head_dim), None


class BlendedSettings(Settings):
    """A further part of the mixture; the split is the stage's own unless given."""

    corpus: Label
    split: Split | None = None
    share: Annotated[Real, Field(gt=0, lt=1)]
    copied_spans: Share = 0.0
    min_document_tokens: Natural = 0


class DataSettings(Settings):
    """What a stage, or a part of it, trains on."""

    copied_spans: Share | None = None
    packing: Packing | None = None
    min_document_tokens: Natural | None = None
    full_length_share: Share | None = None
    blended: tuple[BlendedSettings, ...] | None = None


DATA_FIELDS = tuple(DataSettings.model_fields)


def resolve_data(given: Mapping[str, Any], *, corpus: str, split: Split) -> DataMix:
    """The mixture of merged settings.

    Raises:
        ValueError: if shares leave nothing for the main source, have too many decimals, or need documents that are kept
            apart.
    """
    blended = tuple(
        BlendedSource(
            corpus=part["corpus"],
            split=part.get("split") or split,
            share=part["share"],
            copied_spans=part["copied_spans"],
            min_document_tokens=part["min_document_tokens"],
        )
        for part in given.get("blended", ())
    )
    if sum(Fraction(str(part.share)) for part in blended) >= 1:
        raise ValueError("the shares under blended leave nothing for the corpus itself")
    full_length_share = given.get("full_length_share")
    for share in (*(part.share for part in blended), full_length_share or 0):
        if (Fraction(str(share)) * SHARE_UNIT).denominator != 1:
            raise ValueError(f"a share of {share} has more decimals than the four that can be met exactly: round it")
    packing = given.get("packing", "stream")
    if packing == "stream" and full_length_share is not None:
        raise ValueError("full_length_share needs packing: documents; a stream knows no documents")
    plain = {name: given[name] for name in DATA_FIELDS if name in given and name != "blended"}
    return DataMix(corpus=corpus, split=split, blended=blended, **plain)


class StageSettings(DataSettings):
    """What both stages have."""

    seq_len: Annotated[Count, Field(ge=2)] | None = None
    batch_sequences: Count | None = None
    rope_base: Positive | None = None
    warmup_steps: Natural | None = None
    final_rate_ratio: Ratio | None = None
    decay_shape: DecayShape | None = None
    z_loss: Annotated[Real, Field(ge=0)] | None = None
    precision: Precision | None = None
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


StartRate = Annotated[Literal["inherit"] | float, PlainValidator(_start_rate, json_schema_input_type=float | str)]


def _one_rope(settings: PhaseSettings | LongSettings) -> None:
    if settings.rope is not None and settings.rope_base is not None:
        raise ValueError("rope and rope_base say the same thing; give one of them")


class PhaseSettings(DataSettings):
    """A sub-phase of the long stage, to the D_l `until`; the last one is open. What is not given is the stage's."""

    until: TokenBudget | None = None
    seq_len: Annotated[Count, Field(ge=2)] | None = None
    batch_sequences: Count | None = None
    rope_base: Positive | None = None
    rope: RopeSettings | None = None
    corpus: Label | None = None

    @model_validator(mode="after")
    def _one_rope(self) -> Self:
        _one_rope(self)
        return self


class LongSettings(StageSettings):
    start_rate: StartRate | None = None
    optimizer_state: OptimizerState | None = None
    rope: RopeSettings | None = None
    stages: tuple[PhaseSettings, ...] | None = None

    @field_validator("stages")
    @classmethod
    def _several(cls, stages: tuple[PhaseSettings, ...] | None) -> tuple[PhaseSettings, ...] | None:
        if stages is not None and len(stages) < 2:
            raise ValueError("needs at least 2 phases; one is the long stage itself")
        return stages

    @model_validator(mode="after")
    def _one_rope(self) -> Self:
        _one_rope(self)
        return self
