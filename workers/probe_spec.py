"""What is looked at beside perplexity, as plain values: probes, and RULER's tasks. Free of torch.

Planning and validation import this module. A `ProbeSet` is named by the hash of its content, as everything that decides
numbers is (`workers.spec`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from workers.spec import (
    NUMERICS_VERSION,
    EvaluationDocuments,
    FolderModel,
    ModelShape,
    Snapshot,
    StoredCheckpoint,
    Yarn,
    content_hash,
)

RulerTask = Literal[
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
    "qa_cloze",
]

#: Tokens that a task's answer may take; they count towards the length. `qa_cloze` is Longlaw's own, the others RULER's.
RULER_ANSWER_TOKENS: dict[RulerTask, int] = {
    "niah_single_1": 128,
    "niah_single_2": 128,
    "niah_single_3": 128,
    "niah_multikey_1": 128,
    "niah_multikey_2": 128,
    "niah_multikey_3": 128,
    "niah_multivalue": 128,
    "niah_multiquery": 128,
    "vt": 30,
    "cwe": 120,
    "fwe": 50,
    "qa_1": 32,
    "qa_2": 32,
    "qa_cloze": 32,
}
#: The thirteen of the benchmark. The last two need files of questions.
RULER_TASKS: tuple[RulerTask, ...] = tuple(task for task in RULER_ANSWER_TOKENS if task != "qa_cloze")


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLoss:
    """Mean loss against the position in the evaluation documents, in bins that grow by a constant factor."""

    bins_per_doubling: int = 1
    kind: Literal["position_loss"] = "position_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class Passkey:
    """Share of samples in which greedy decoding repeats five digits that stand in the context, per length and depth."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 10
    kind: Literal["passkey"] = "passkey"


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleLoss:
    """Loss of the value of one of several keys in the context, and its rank among the values of the others."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    samples: int = 10
    distractors: int = 3
    kind: Literal["needle_loss"] = "needle_loss"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalHeads:
    """Attention heads that look at the token that is to be repeated (Wu et al. 2024, "Retrieval head").

    A head's score is the share of answer tokens for which the position it attends to most lies in the reference
    sentence and holds the same token. `tracked` names heads, as "layer.head", whose scores are wanted whatever they
    are: those found at the first checkpoint.
    """

    length: int
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    samples: int = 4
    threshold: float = 0.1
    tracked: tuple[str, ...] = ()
    kind: Literal["retrieval_heads"] = "retrieval_heads"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFile:
    """A JSONL file of questions for `qa_1` or `qa_2` (`workers.ruler_questions`); `digest` is its sha256."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruler:
    """Tasks of RULER (Hsieh et al. 2024) with our own texts, `samples` of each, at one length in tokens."""

    length: int
    tasks: tuple[RulerTask, ...] = RULER_TASKS
    samples: int = 100
    qa_1: QuestionFile | None = None
    qa_2: QuestionFile | None = None
    kind: Literal["ruler"] = "ruler"


Probe = PositionLoss | Passkey | NeedleLoss | RetrievalHeads | Ruler


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSet:
    """What one snapshot is probed with. The text between needles is that of `documents`; `seed` draws everything."""

    documents: EvaluationDocuments
    probes: tuple[Probe, ...]
    seed: int = 42
    numerics_version: int = NUMERICS_VERSION

    @property
    def id(self) -> str:
        return content_hash(self)

    @property
    def forward_tokens(self) -> int:
        """Input tokens of one snapshot's passes, about: for prices. RULER counts its prompts, not what is generated."""
        return sum(_forward_tokens(probe, self.documents) for probe in self.probes)

    @property
    def longest(self) -> int:
        """The longest context of the set, in tokens."""
        return max((_longest(probe, self.documents) for probe in self.probes), default=0)

    def problems(self) -> tuple[str, ...]:
        """What cannot be, whatever the tokenizer: one line for each, beginning with the field's name."""
        found = [] if self.probes else ["probes: there is none"]
        for index, probe in enumerate(self.probes):
            found += [f"probes[{index}].{problem}" for problem in _problems(probe)]
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """One dispatch: build `snapshot` from its `sources` (oldest first) and probe it, as `EvaluationRun` measures it."""

    snapshot: Snapshot
    sources: tuple[StoredCheckpoint, ...]
    probe_set: ProbeSet
    shape: ModelShape | FolderModel
    rope_base: float
    yarn: Yarn | None = None


def _forward_tokens(probe: Probe, documents: EvaluationDocuments) -> int:
    match probe:
        case PositionLoss():
            return documents.count * documents.length
        case Passkey():
            return sum(probe.lengths) * len(probe.depths) * probe.samples
        case NeedleLoss():
            return sum(probe.lengths) * len(probe.depths) * probe.samples * (1 + probe.distractors)
        case RetrievalHeads():
            return probe.length * len(probe.depths) * probe.samples
        case Ruler():
            return probe.length * len(probe.tasks) * probe.samples


def _longest(probe: Probe, documents: EvaluationDocuments) -> int:
    match probe:
        case PositionLoss():
            return documents.length
        case Passkey() | NeedleLoss():
            return max(probe.lengths, default=0)
        case RetrievalHeads() | Ruler():
            return probe.length


def _problems(probe: Probe) -> list[str]:
    if isinstance(probe, PositionLoss):
        return [] if probe.bins_per_doubling >= 1 else ["bins_per_doubling: must be at least 1"]
    found = [] if probe.samples >= 1 else ["samples: must be at least 1"]
    if isinstance(probe, Ruler):
        found += [] if probe.tasks else ["tasks: there is none"]
        found += [
            f"tasks: {task} is listed twice" for task in dict.fromkeys(probe.tasks) if probe.tasks.count(task) > 1
        ]
        found += [
            f"length: {probe.length} tokens leave {task} no prompt beside its {RULER_ANSWER_TOKENS[task]} of answer"
            for task in probe.tasks
            if probe.length <= RULER_ANSWER_TOKENS[task]
        ]
        for task, questions in (("qa_1", probe.qa_1), ("qa_2", probe.qa_2)):
            if task in probe.tasks and questions is None:
                found.append(
                    f"{task}: needs a file of questions (leave the task out, or take qa_cloze, which needs none)"
                )
        return found
    lengths = (probe.length,) if isinstance(probe, RetrievalHeads) else probe.lengths
    found += [] if lengths and min(lengths) >= 1 else ["lengths: at least one, each at least 1"]
    found += [f"depths: {depth} is no share of the context (0 to 1)" for depth in probe.depths if not 0 <= depth <= 1]
    found += [] if probe.depths else ["depths: there is none"]
    if isinstance(probe, NeedleLoss) and probe.distractors < 1:
        found.append("distractors: a rank needs at least one")
    if isinstance(probe, RetrievalHeads):
        found += [f'tracked: "{head}" is no "layer.head"' for head in probe.tracked if not _is_head(head)]
    return found


def _is_head(label: str) -> bool:
    layer, _, head = label.partition(".")
    return layer.isdecimal() and head.isdecimal()
