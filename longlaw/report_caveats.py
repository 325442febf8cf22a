"""What a reader must know that no table shows: it follows from how the grids' models were trained and measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longlaw.report_data import ReportData
from longlaw.report_page import Reading, Section

_SMALL = 10_000_000


def what_it_does_not_show(data: ReportData) -> Section:
    """Limits of the numbers, as far as the grid files tell."""
    documents = [facts.document for facts in data.grids]
    sentences = []
    if any(float(_at(document, "recipe", stage, "copied_spans")) > 0 for document in documents for stage in _STAGES):
        sentences.append(
            "Training sequences carry spans copied from earlier in the same sequence, so that models this small learn "
            "to look back at all. What is learned is to continue what was seen before, word for word; other ways of "
            "using a long context are not trained and not measured. Evaluation is on untouched text."
        )
    if any(int(_at(document, "recipe", "model", "attention", "qk_conv_kernel")) > 0 for document in documents):
        sentences.append(
            "A short convolution after the query and key projections makes that copying learnable within these "
            "budgets. It belongs to the miniature; it is no part of a recipe at scale."
        )
    if any(_at(document, "evaluation", "reference", "kind") == "copy" for document in documents):
        sentences.append(
            "Key tokens were chosen by a counting reference (n-grams, and what followed the same tokens earlier in the "
            "document), not by a language model. It favours continuations of names last seen far back. The level of "
            "LongPPL depends on that choice; compare it on these documents only."
        )
    if not any(_at(document, "evaluation", "diagnose_zero") in (True, "true") for document in documents):
        sentences.append(
            "D_l = 0 is not measured, so what the change of the RoPE base brings before any training is not told apart."
        )
    largest = max(start.n_params for start in data.main.starts)
    if largest < _SMALL:
        sentences.append(
            f"The largest model has {largest:,} parameters. Nothing here says that exponents, offsets, the order of "
            "the forms or that of the rules hold at any larger size."
        )
    sentences.append(
        f"Intervals resample {len(data.main.starts)} short checkpoints. They know nothing of another recipe, another "
        "corpus or other evaluation documents."
    )
    return Section(title="What this does not show", blocks=(Reading(sentences=tuple(sentences)),))


_STAGES = ("short", "long")


def _at(document: Mapping[str, Any], *path: str) -> Any:
    """What a grid file says there; 0 where it says nothing. Numbers are texts as they were written."""
    value: Any = document
    for key in path:
        value = value.get(key, 0) if isinstance(value, Mapping) else 0
    return value
