"""What is trained and measured, as plain values: shapes, recipes, segments, rules, evaluators.

Free of torch: planning, validation and the database import this module. Everything here is frozen; whatever changes a
number is part of a value, and a value's identity is the hash of its content (`content_hash`).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, Literal

#: Raised whenever a change of ours alters trained or measured numbers for the same specification.
NUMERICS_VERSION = 2

SegmentKind = Literal["short_trunk", "short_decay", "long_constant", "long_linear_decay", "follow_up"]
Protocol = Literal["constant", "linear_decay"]
OptimizerState = Literal["carry", "fresh"]
Split = Literal["short", "long"]
RuleName = Literal["raw", "last_m", "one_sqrt", "ema", "dare", "ties"]
DecayShape = Literal["linear", "one_sqrt", "cosine"]
Precision = Literal["fp32", "bf16"]
Packing = Literal["stream", "documents"]
Sharding = Literal["replicate", "shard"]
MuonScaling = Literal["original", "match_rms_adamw"]
ReferenceKind = Literal["copy", "huggingface"]
ChunkingMode = Literal["exact", "pku"]


def optional(default: Any) -> Any:
    """A field that is left out of the canonical form where it has its default.

    A setting that came later, and whose default is how things were before, must not rename what was trained before it.
    """
    return dataclasses.field(default=default, metadata={_OMIT: True})


_OMIT = "left out at its default"


@functools.cache
def _fields(cls: type) -> tuple[tuple[str, bool, Any], ...]:
    return tuple((field.name, _OMIT in field.metadata, field.default) for field in dataclasses.fields(cls))


def _plain(item: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        plain = {}
        for name, may_be_omitted, default in _fields(type(item)):
            value = getattr(item, name)
            if not (may_be_omitted and value == default):
                plain[name] = value
        return plain
    raise TypeError(f"{type(item).__name__} has no canonical form")


#: Kept, and fed dataclasses one level at a time: a plan hashes hundreds of thousands of values.
_ENCODER = json.JSONEncoder(default=_plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical_json(value: Any) -> str:
    """The one JSON text of a specification: sorted keys, no spaces, dataclasses as objects.

    Raises:
        ValueError: for NaN or infinity, which have no place in an identity.
    """
    return _ENCODER.encode(value)


def content_hash(value: Any) -> str:
    """32 hexadecimal digits that name the content of `value` (first half of SHA-256 over `canonical_json`)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def steps_for(tokens: int, tokens_per_step: int) -> int:
    """Optimizer steps nearest to a token budget: floor(tokens / tokens_per_step + 1/2), in integers."""
    return (2 * tokens + tokens_per_step) // (2 * tokens_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A Llama-like decoder. `qk_conv_kernel` 0 means plain projections (no convolution after q and k)."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocab_size: int
    tied_embeddings: bool = True
    qk_conv_kernel: int = 0
    init_std: float = 0.02
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def n_params(self) -> int:
        """N: every weight but the input embedding and the output head."""
        kv_width = self.kv_heads * self.head_dim
        attention = 2 * self.width * self.width + 2 * self.width * kv_width
        convolution = self.qk_conv_kernel * (self.width + kv_width)
        feed_forward = 3 * self.width * self.ffn_width
        norms = 2 * self.width
        return self.layers * (attention + convolution + feed_forward + norms) + self.width

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.width * (1 if self.tied_embeddings else 2)

    def train_flops_per_token(self, seq_len: int) -> int:
        """Floating-point operations of forward and backward for one token, causal attention included.

        6 per weight that multiplies (N and the output head), and 6 x layers x width x seq_len for scores and mixing at
        the mean causal context of seq_len / 2 (Kaplan et al. 2020, table 1, times three for forward and backward).
        """
        return _train_flops_per_token(self, seq_len)

    def forward_flops_per_token(self, seq_len: int) -> int:
        """A third of `train_flops_per_token`: the forward pass alone."""
        return _train_flops_per_token(self, seq_len) // 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderModel:
    """A Hugging Face causal language model that somebody else trained, under `<store>/models/<digest>/`.

    `digest` is its identity; the sizes are counted from it when it is brought into the store and checked when it is
    loaded. `n_params` is N: every weight but the input embedding and the output head (`embedding_params`).
    `attention_width` is that of all heads together, where it is not `width`.
    """

    digest: str
    n_params: int
    embedding_params: int
    layers: int
    width: int
    vocab_size: int
    attention_width: int | None = optional(None)

    def train_flops_per_token(self, seq_len: int) -> int:
        """As `ModelShape.train_flops_per_token`."""
        return _train_flops_per_token(self, seq_len)

    def forward_flops_per_token(self, seq_len: int) -> int:
        """As `ModelShape.forward_flops_per_token`."""
        return _train_flops_per_token(self, seq_len) // 3


def _train_flops_per_token(model: ModelShape | FolderModel, seq_len: int) -> int:
    width = (model.attention_width or model.width) if isinstance(model, FolderModel) else model.width
    return 6 * (model.n_params + model.vocab_size * model.width) + 6 * model.layers * width * seq_len


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamW:
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Muon:
    """Muon on the matrices inside the layers, AdamW on everything else. One multiplier moves both groups' rates.

    Muon's rate is the stage's rate times `rate_ratio` at every step. `scaling` is `torch.optim.Muon`'s `adjust_lr_fn`.
    Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """

    rate_ratio: float
    momentum: float = 0.95
    nesterov: bool = True
    newton_schulz_steps: int = 5
    weight_decay: float = 0.1
    scaling: MuonScaling = "match_rms_adamw"
    adamw: AdamW = AdamW()

    @property
    def clip_norm(self) -> float:
        return self.adamw.clip_norm


#: Shares are multiples of one over this, so that turns of sources repeat after as many.
SHARE_UNIT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlendedSource:
    """A further part of a mixture: `share` of all training tokens comes from this split of this corpus."""

    corpus: str
    split: Split
    share: float
    copied_spans: float = 0.0
    min_document_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataMix:
    """Training tokens: one split of a corpus; `copied_spans` is the share of sequences that carry copied spans.

    `packing` "stream" cuts the split into windows that may cross documents, as one text. "documents" keeps documents
    apart: positions start anew with each and attention never crosses from one to another. Documents shorter than
    `min_document_tokens` are left out. `full_length_share`, with packing "documents", is the share of the main source's
    sequences that are one document from the first token to the last; the others are filled with shorter ones. `blended`
    sources take their shares of the tokens, the main source what they leave. Shares have at most four decimals.
    """

    corpus: str
    split: Split
    copied_spans: float = 0.0
    packing: Packing = optional("stream")
    min_document_tokens: int = optional(0)
    full_length_share: float | None = optional(None)
    blended: tuple[BlendedSource, ...] = optional(())


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """YaRN's interpolation of rotary frequencies (Peng et al. 2023, arXiv 2309.00071), beside the base."""

    factor: float
    original_positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortStage:
    """WSD: warm-up and stable rate on the trunk, then a decay over one ninth of D_s to `final_rate_ratio`.

    `z_loss` is the weight of the mean squared log-partition (PaLM, Chowdhery et al. 2022, section 5).
    """

    seq_len: int
    batch_sequences: int
    rope_base: float
    peak_rate: float
    warmup_steps: int
    final_rate_ratio: float
    data: DataMix
    optimizer: AdamW | Muon = AdamW()
    decay_shape: DecayShape = optional("linear")
    z_loss: float = optional(0.0)
    precision: Precision = optional("fp32")

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_sequences

    @property
    def end_rate(self) -> float:
        return self.peak_rate * self.final_rate_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class LongStage:
    """LCCP. `start_rate` is resolved (the planner replaces "inherit" by the short stage's end rate).

    `final_rate_ratio` belongs to `long_linear_decay` alone and is 1 for the constant protocol, so that it does not
    split the identity of constant-rate segments.
    """

    seq_len: int
    batch_sequences: int
    rope_base: float
    start_rate: float
    optimizer_state: OptimizerState
    warmup_steps: int
    final_rate_ratio: float
    data: DataMix
    optimizer: AdamW | Muon = AdamW()
    decay_shape: DecayShape = optional("linear")
    z_loss: float = optional(0.0)
    precision: Precision = optional("fp32")
    yarn: Yarn | None = optional(None)

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef:
    """A checkpoint's identity: steps taken since the beginning of its segment."""

    segment: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservationRule:
    """How checkpoints become the model that is evaluated. `raw` has m = 1 and spacing_steps = 0.

    The others read `m` checkpoints `spacing_steps` apart, newest at the observed step; m = 0 takes all of them back to
    the beginning of the segment, whose own start is not among them. `decay` is the base of `ema`'s weights for one
    spacing, `density` the share of coordinates that `dare` and `ties` keep, `seed` that of `dare`'s masks.
    """

    name: RuleName
    m: int = 1
    spacing_steps: int = 0
    decay: float | None = optional(None)
    density: float | None = optional(None)
    seed: int = optional(42)

    def source_steps(self, step: int) -> tuple[int, ...]:
        """Steps of the checkpoints the rule reads at `step`, oldest first. Values <= 0 mean: too early for the rule."""
        if self.m == 0:
            return tuple(reversed(range(step, 0, -self.spacing_steps)))
        return tuple(step - k * self.spacing_steps for k in reversed(range(self.m)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A stretch of training with one schedule. Its id hashes all that changes its weights and nothing else.

    `seed` is the short_seed in the short stage (initialisation and order), the long_seed in the long stage (order).
    `horizon_steps` is set where the schedule depends on it (decays) and None where the rate is constant: such a segment
    is open-ended, and extending it only raises its target.

    `parent_rule` says that the segment starts from the model which that rule yields at `parent`, not from the raw
    checkpoint. A segment without a parent starts from random weights, or from its `FolderModel`. Where a long stage
    is cut into sub-phases, each is a segment: `stage_offset_steps` are the updates of the stage before this one, and
    `horizon_steps` spans all of them, so that a decay never starts anew at a border. `data_offset_sequences` are the
    sequences of the same data, in the same order, that the segments before a follow-up have trained on.
    """

    kind: SegmentKind
    parent: CheckpointRef | None
    shape: ModelShape | FolderModel
    stage: ShortStage | LongStage
    seed: int
    horizon_steps: int | None = None
    numerics_version: int = NUMERICS_VERSION
    parent_rule: ObservationRule | None = optional(None)
    stage_offset_steps: int = optional(0)
    data_offset_sequences: int = optional(0)

    @property
    def id(self) -> str:
        return content_hash(self)

    @property
    def start_sources(self) -> tuple[CheckpointRef, ...]:
        """Checkpoints of the parent that `parent_rule` reads, oldest first; none without a rule."""
        if self.parent is None or self.parent_rule is None:
            return ()
        steps = self.parent_rule.source_steps(self.parent.step)
        return tuple(CheckpointRef(segment=self.parent.segment, step=step) for step in steps)

    @property
    def first_stage_step(self) -> int:
        """Steps of the same stage that lie before this segment: a decay goes on where its trunk stands."""
        if self.kind == "short_decay" and self.parent is not None:
            return self.parent.step
        return self.stage_offset_steps

    def first_sequence(self, step: int) -> int:
        """The position, in the order of the data, at which the batch of update `step` begins, 0-based."""
        return self.data_offset_sequences + (self.first_stage_step + step) * self.stage.batch_sequences

    def stage_tokens(self, step: int) -> int:
        """Tokens of the stage (D_s or D_l) consumed when `step` steps of this segment are done."""
        return (self.first_stage_step + step) * self.stage.tokens_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint in the store: where it lies (relative to the store's root) and the digest it must have."""

    ref: CheckpointRef
    path: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How a segment is run: provenance, never identity.

    `processes` work on one batch together, each with the whole model ("replicate", DDP) or with a share of it ("shard",
    FSDP2). `micro_batch_tokens` is the most that one process takes through the model at once (None: its whole share of
    the batch); gradients are accumulated over the rest. `recompute_activations` trades time for memory.
    """

    processes: int = 1
    sharding: Sharding = "replicate"
    micro_batch_tokens: int | None = None
    recompute_activations: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRun:
    """One dispatch: train `segment` from `start` and write a checkpoint at every step of `save_steps`.

    `start` is a checkpoint of this segment (resume), of its parent (begin), or None (from scratch, or from a folder).
    Where the segment begins with a rule's model, `start` is None and `start_sources` are that rule's checkpoints,
    oldest first. The run ends at the last of `save_steps`. Recovery checkpoints are written in between every
    `recovery_every_steps`, if given.
    """

    segment: Segment
    start: StoredCheckpoint | None
    save_steps: tuple[int, ...]
    recovery_every_steps: int | None = None
    start_sources: tuple[StoredCheckpoint, ...] = ()
    execution: Execution = Execution()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The model a rule yields at one step of a segment; its weights are a function of this value alone."""

    segment: str
    step: int
    rule: ObservationRule

    @property
    def id(self) -> str:
        return content_hash(self)

    @property
    def sources(self) -> tuple[CheckpointRef, ...]:
        return tuple(CheckpointRef(segment=self.segment, step=step) for step in self.rule.source_steps(self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The model that selects key tokens. `digest` names its weights (huggingface) or its counts' corpus (copy)."""

    kind: ReferenceKind
    path: str | None = None
    digest: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunking:
    """Local context of the reference's second pass. `exact`: every position past the first chunk sees between `length`
    and `length + stride - 1` tokens; `pku`: the windows of the public reference implementation."""

    length: int = 4096
    stride: int = 1024
    mode: ChunkingMode = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDocuments:
    """The first `count` windows of `length` tokens from the held-out documents of a corpus; none crosses two.

    With `min_length`: the first `count` documents of at least so many tokens, each cut after `length`.
    """

    corpus: str
    count: int
    length: int
    min_length: int | None = optional(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Everything that decides K_long and the measured numbers.

    Key tokens have chunk - full > `gain_threshold` and full < `full_nll_ceiling` (the reference's NLLs, nats).
    """

    reference: Reference
    documents: EvaluationDocuments
    chunking: Chunking = Chunking()
    gain_threshold: float = 2.0
    full_nll_ceiling: float = 2.0
    short_context_gap: bool = False
    numerics_version: int = NUMERICS_VERSION

    @property
    def id(self) -> str:
        return content_hash(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRun:
    """One dispatch: build `snapshot` from its `sources` (oldest first) and measure it with `evaluator`.

    `shape`, `rope_base` and `yarn` describe the model that the checkpoints hold.
    """

    snapshot: Snapshot
    sources: tuple[StoredCheckpoint, ...]
    evaluator: Evaluator
    shape: ModelShape | FolderModel
    rope_base: float
    yarn: Yarn | None = None
