"""Specifications as the database keeps them: JSON objects, read back into the values of `workers.spec`."""

from __future__ import annotations

import dataclasses
from typing import Any

from workers.spec import (
    AdamW,
    CheckpointRef,
    Chunking,
    DataMix,
    EvaluationDocuments,
    Evaluator,
    LongStage,
    ModelShape,
    ObservationRule,
    Reference,
    Segment,
    ShortStage,
)

Spec = Segment | Evaluator | ObservationRule


def to_json(spec: Spec) -> dict[str, Any]:
    """The JSON object of `spec`; `canonical_json` of both is the same text."""
    return dataclasses.asdict(spec)


def segment_from_json(document: dict[str, Any]) -> Segment:
    """The segment that `to_json` wrote. JSONB keeps 10000.0 as 10000.0, so identities survive the round trip."""
    stage = document["stage"]
    stage_type = ShortStage if document["kind"].startswith("short") else LongStage
    parent = document["parent"]
    return Segment(
        **document
        | {
            "parent": None if parent is None else CheckpointRef(**parent),
            "shape": ModelShape(**document["shape"]),
            "stage": stage_type(**stage | {"data": DataMix(**stage["data"]), "optimizer": AdamW(**stage["optimizer"])}),
        }
    )


def evaluator_from_json(document: dict[str, Any]) -> Evaluator:
    """The evaluator that `to_json` wrote."""
    return Evaluator(
        **document
        | {
            "reference": Reference(**document["reference"]),
            "documents": EvaluationDocuments(**document["documents"]),
            "chunking": Chunking(**document["chunking"]),
        }
    )


def rule_from_json(document: dict[str, Any]) -> ObservationRule:
    """The observation rule that `to_json` wrote."""
    return ObservationRule(**document)
