"""What killed writers of checkpoints leave in a store. Free of torch: whoever schedules clears it away."""

from __future__ import annotations

import contextlib
import shutil
import uuid
from pathlib import Path

from workers import mirror

CHECKPOINTS = "checkpoints"
#: The end of a folder's name while it is being written.
UNFINISHED = ".unfinished"


def whole_checkpoints(store: Path, segment: str) -> dict[int, str]:
    """What lies in the store as checkpoints of a segment, whether or not anybody knows of them: paths by step."""
    folder = f"{CHECKPOINTS}/{segment}"
    return {int(name): f"{folder}/{name}" for name in mirror.names_in(store, folder) if name.isdecimal()}


def remove_unfinished(store: Path, segment: str) -> None:
    """Removes what killed writers of a segment left behind; only for whoever knows that nobody is writing."""
    for path in (store / CHECKPOINTS / segment).glob(f".*{UNFINISHED}"):
        aside = path.with_name(f".{uuid.uuid4().hex}{UNFINISHED}")
        with contextlib.suppress(OSError):
            path.rename(aside)  # at once: a writer that comes back must not seal what is left of a half-removed folder
        shutil.rmtree(aside, ignore_errors=True)
