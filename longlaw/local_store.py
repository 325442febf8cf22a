"""The store that a command works with."""

from __future__ import annotations

from pathlib import Path

from database.settings import Settings
from workers.mirror import open_store


def local_store(given: str | None = None) -> Path:
    """The local root of the store: `given`, else LONGLAW_STORE, else `store` in LONGLAW_HOME.

    Raises:
        StoreError: if it is a URL that no installed filesystem knows.
    """
    settings = Settings()
    return open_store(given or settings.store, cache=settings.store_cache)
