"""Corpora are named by people and known by hashes: every place of a grid document that may name one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from longlaw.grid_document import GridFileError, resolve_corpora
from tests.workers.tiny_training import tiny_corpus


def document() -> dict[str, Any]:
    blended = [{"corpus": "tiny", "share": 0.5}]
    evaluation = {"documents": {"corpus": "tiny"}, "reference": {"kind": "copy", "digest": "tiny"}}
    return {
        "recipe": {
            "corpus": "tiny",
            "short": {"blended": blended},
            "long": {"blended": list(blended), "stages": [{"corpus": "tiny", "until": "10N"}, {"blended": blended}]},
        },
        "scales": {"a": {"long": {"blended": [{"corpus": "tiny", "share": 0.25}]}}},
        "follow_ups": [{"corpus": "tiny", "evaluation": evaluation}],
        "evaluation": {"documents": {}, "reference": {"kind": "huggingface", "digest": "tiny"}},
    }


def test_every_name_of_a_corpus_becomes_its_hash(tmp_path: Path) -> None:
    corpus = tiny_corpus(tmp_path)
    resolved = resolve_corpora(document(), str(tmp_path))
    assert resolved["evaluation"]["reference"]["digest"] == "tiny"  # that of a model
    resolved["evaluation"]["reference"]["digest"] = corpus
    assert str(resolved).count(corpus) == 10
    assert "tiny" not in str(resolved)
    assert resolve_corpora(resolved, "nowhere") == resolved


def test_unknown_names_are_refused_wherever_they_stand(tmp_path: Path) -> None:
    with pytest.raises(GridFileError, match="longlaw data build"):
        resolve_corpora({"follow_ups": [{"corpus": "tiny"}]}, str(tmp_path))


def test_what_is_no_grid_is_left_to_the_service() -> None:
    odd_ones: list[dict[str, Any]] = [{"scales": 3, "follow_ups": "x"}, {"recipe": [], "evaluation": None}, {}]
    for odd in odd_ones:
        assert resolve_corpora(dict(odd), "nowhere") == odd
