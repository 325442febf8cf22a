"""Probes in the grid file: what is looked at beside perplexity, where, and in which texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from orchestrator.errors import Problem
from orchestrator.fields import Count, Label, Natural, Place, Ratio, Settings, Share
from workers.probe_spec import (
    RULER_TASKS,
    NeedleLoss,
    Passkey,
    PositionLoss,
    Probe,
    ProbeSet,
    QuestionFile,
    RetrievalHeads,
    Ruler,
    RulerTask,
)
from workers.spec import EvaluationDocuments

Lengths = Annotated[tuple[Count, ...], Field(min_length=1)]
Depths = Annotated[tuple[Share, ...], Field(min_length=1)]
_PROBLEM = re.compile(r"probes\[(?P<index>\d+)\]\.(?P<field>\w+): (?P<message>.*)", re.DOTALL)
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


class PositionLossSettings(Settings):
    kind: Literal["position_loss"]
    bins_per_doubling: Count = 1


class PasskeySettings(Settings):
    kind: Literal["passkey"]
    lengths: Lengths
    depths: Depths = _DEPTHS
    samples: Count = 10


class NeedleLossSettings(Settings):
    kind: Literal["needle_loss"]
    lengths: Lengths
    depths: Depths = _DEPTHS
    samples: Count = 10
    distractors: Count = 3


class RetrievalHeadsSettings(Settings):
    kind: Literal["retrieval_heads"]
    length: Count
    depths: Depths = (0.1, 0.3, 0.5, 0.7, 0.9)
    samples: Count = 4
    threshold: Ratio = 0.1
    tracked: tuple[str, ...] = ()


class QuestionFileSettings(Settings):
    path: Place
    digest: Label


class RulerSettings(Settings):
    kind: Literal["ruler"]
    length: Count
    tasks: Annotated[tuple[RulerTask, ...], Field(min_length=1)] = RULER_TASKS
    samples: Count = 100
    qa_1: QuestionFileSettings | None = None
    qa_2: QuestionFileSettings | None = None


def _tag(value: object) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return f"<{kind}>"


ProbeSettings = Annotated[
    Annotated[PositionLossSettings, Tag("<position_loss>")]
    | Annotated[PasskeySettings, Tag("<passkey>")]
    | Annotated[NeedleLossSettings, Tag("<needle_loss>")]
    | Annotated[RetrievalHeadsSettings, Tag("<retrieval_heads>")]
    | Annotated[RulerSettings, Tag("<ruler>")],
    Discriminator(_tag),
]


class ProbeDocumentSettings(Settings):
    count: Count
    length: Annotated[Count, Field(ge=2)]
    min_length: Annotated[Count, Field(ge=2)] | None = None
    corpus: Label | None = None


class ProbeSetSettings(Settings):
    """`at`: every cell, or the largest D_l of each trajectory. `documents` are the evaluation's unless given."""

    run: Annotated[tuple[ProbeSettings, ...], Field(min_length=1)]
    at: Literal["cells", "largest"] = "largest"
    documents: ProbeDocumentSettings | None = None
    seed: Natural = 42


def resolve_probes(settings: ProbeSetSettings, documents: EvaluationDocuments) -> ProbeSet:
    """The set of probes as a value; `documents` are those of the evaluation."""
    own = settings.documents
    if own is not None:
        documents = EvaluationDocuments(
            corpus=own.corpus or documents.corpus, count=own.count, length=own.length, min_length=own.min_length
        )
    return ProbeSet(documents=documents, probes=tuple(map(_probe, settings.run)), seed=settings.seed)


def probe_problems(settings: ProbeSetSettings, documents: EvaluationDocuments, *, at: str) -> list[Problem]:
    """What the probes' values themselves refuse; `at` is the JSON Pointer of `probes`."""
    found = map(_PROBLEM.fullmatch, resolve_probes(settings, documents).problems())
    return [
        Problem(pointer=f"{at}/run/{match['index']}/{match['field']}", message=match["message"])
        for match in found
        if match
    ]


def _probe(settings: ProbeSettings) -> Probe:
    values = settings.model_dump(exclude={"kind"})
    match settings:
        case PositionLossSettings():
            return PositionLoss(**values)
        case PasskeySettings():
            return Passkey(**values)
        case NeedleLossSettings():
            return NeedleLoss(**values)
        case RetrievalHeadsSettings():
            return RetrievalHeads(**values)
        case RulerSettings():
            files = {task: QuestionFile(**values[task]) if values[task] else None for task in ("qa_1", "qa_2")}
            return Ruler(**values | files)
