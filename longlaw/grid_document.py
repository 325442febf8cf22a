"""A grid file, read and made fit to be submitted: corpora named by their hashes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longlaw.errors import LonglawError
from orchestrator.errors import GridError
from orchestrator.grid_file import DocumentFormat, read_document

_HASH = re.compile(r"[0-9a-f]{32}")
_STAGES = ("short", "long")


class GridFileError(LonglawError):
    """The grid file cannot be read, or names a corpus that the store does not have."""


def read_grid_text(file: str) -> tuple[str, DocumentFormat]:
    """The text of a grid file and its format by the file's name; `-` reads standard input, either format.

    Raises:
        GridFileError: no such file, or no text.
    """
    source = "standard input" if file == "-" else file
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = content.decode()
    except OSError as error:
        raise GridFileError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError as error:
        raise GridFileError(f"{source}: not a text file (no UTF-8 at byte {error.start})") from None
    as_json = text.lstrip().startswith("{") if file == "-" else file.endswith(".json")
    return text, "json" if as_json else "yaml"


def read_grid_file(file: str) -> dict[str, Any]:
    """The document in a .json or YAML file, or on standard input (`-`); what it says is checked by the service.

    Raises:
        GridFileError: no such file, or not one document.
    """
    text, format = read_grid_text(file)
    try:
        document = read_document(text, format=format)
    except GridError as error:
        raise GridFileError(f"{file}: {error}") from None
    if not isinstance(document, dict):
        raise GridFileError(f"{file}: the document must be a mapping with name, protocol, scales, ...")
    return document


def resolve_corpora(document: dict[str, Any], store: str) -> dict[str, Any]:
    """The document with each corpus's name replaced by the hash that it has in the store.

    Raises:
        GridFileError: the store has no corpus of that name.
    """
    for place, field in _mentions(document):
        name = place.get(field)
        if isinstance(name, str) and not _HASH.fullmatch(name):
            place[field] = _corpus_hash(name, store)
    return document


def _mentions(document: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The places of a document that may name a corpus: of data wherever it is given, and of evaluations."""
    recipe = _part(document, "recipe")
    stages = [
        recipe,
        *(_part(owner, stage) for owner in (recipe, *_parts(document.get("scales"))) for stage in _STAGES),
    ]
    follow_ups = list(_parts(document.get("follow_ups")))
    stages += [*follow_ups, *(phase for stage in list(stages) for phase in _parts(stage.get("stages")))]
    yield from ((stage, "corpus") for stage in stages)
    yield from ((source, "corpus") for stage in stages for source in _parts(stage.get("blended")))
    for owner in (document, *follow_ups):
        evaluation = _part(owner, "evaluation")
        yield _part(evaluation, "documents"), "corpus"
        yield _part(_part(evaluation, "probes"), "documents"), "corpus"
        reference = _part(evaluation, "reference")
        if reference.get("kind") == "copy":  # of another reference it is the digest of a model's weights
            yield reference, "digest"


def _part(of: dict[str, Any], key: str) -> dict[str, Any]:
    part = of.get(key)
    return part if isinstance(part, dict) else {}


def _parts(of: Any) -> Iterator[dict[str, Any]]:
    """The mappings within a list or a mapping; whatever else is there is for the service to refuse."""
    within = of.values() if isinstance(of, dict) else of if isinstance(of, list) else ()
    yield from (part for part in within if isinstance(part, dict))


def _corpus_hash(name: str, store: str) -> str:
    from longlaw.local_store import local_store  # needs the worker extra, which a document of hashes does not
    from workers.corpus import find_corpus
    from workers.errors import CorpusError

    try:
        return find_corpus(local_store(store), name)
    except CorpusError as error:
        raise GridFileError(f"{error}. `longlaw data build` makes a corpus.") from None
