"""A grid file, read and made fit to be submitted: corpora named by their hashes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from longlaw.errors import LonglawError
from orchestrator.errors import GridError
from orchestrator.grid_file import read_document

_HASH = re.compile(r"[0-9a-f]{32}")
_PLACES = (("recipe", "corpus"), ("evaluation", "documents", "corpus"), ("evaluation", "reference", "digest"))


class GridFileError(LonglawError):
    """The grid file cannot be read, or names a corpus that the store does not have."""


def read_grid_file(path: Path) -> dict[str, Any]:
    """The document in a .json or YAML file; what it says is checked by the service.

    Raises:
        GridFileError: no such file, or not one document.
    """
    try:
        text = path.read_text(encoding="utf-8")
        document = read_document(text, format="json" if path.suffix == ".json" else "yaml")
    except (OSError, UnicodeDecodeError, GridError) as error:
        raise GridFileError(f"{path}: {error}") from None
    if not isinstance(document, dict):
        raise GridFileError(f"{path}: the document must be a mapping with name, protocol, scales, ...")
    return document


def resolve_corpora(document: dict[str, Any], store: str) -> dict[str, Any]:
    """The document with each corpus's name replaced by the hash that it has in the store.

    Raises:
        GridFileError: the store has no corpus of that name.
    """
    for *parents, field in _PLACES:
        part: Any = document
        for key in parents:
            part = part.get(key) if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(part.get(field), str) or _HASH.fullmatch(part[field]):
            continue
        if field == "digest" and part.get("kind") != "copy":  # the digest of a model's weights, not of a corpus
            continue
        part[field] = _corpus_hash(part[field], store)
    return document


def _corpus_hash(name: str, store: str) -> str:
    from workers.corpus import find_corpus  # needs the worker extra, which a document of hashes does not
    from workers.errors import CorpusError

    try:
        return find_corpus(Path(store), name)
    except CorpusError as error:
        raise GridFileError(f"{error}. `longlaw data build` makes a corpus.") from None
