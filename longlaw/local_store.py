"""The store that a command works with, and what it finds there by name."""

from __future__ import annotations

from pathlib import Path

from database.settings import Settings
from workers.corpus import corpus_names, find_corpus, open_corpus
from workers.errors import CorpusError
from workers.mirror import open_store


def local_store(given: str | None = None) -> Path:
    """The local root of the store: `given`, else LONGLAW_STORE, else `store` in LONGLAW_HOME.

    Raises:
        StoreError: if it is a URL that no installed filesystem knows.
    """
    settings = Settings()
    return open_store(given or settings.store, cache=settings.store_cache)


def tokenizer_at(store: Path, tokenizer: str) -> Path:
    """A tokenizer.json, or that of the corpus with this name.

    Raises:
        CorpusError: it is neither.
    """
    if Path(tokenizer).is_file():
        return Path(tokenizer)
    if tokenizer in corpus_names(store):
        return open_corpus(store, find_corpus(store, tokenizer)).path / "tokenizer.json"
    raise CorpusError(f'"{tokenizer}" is no tokenizer.json, and no corpus in {store} has that name')
