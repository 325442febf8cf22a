"""What killed writers of checkpoints leave in a store. Free of torch: whoever schedules clears it away."""

from __future__ import annotations

import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
#: The end of a folder's name while it is being written.
UNFINISHED = ".unfinished"


def remove_unfinished(store: Path, segment: str) -> None:
    """Removes what killed writers of a segment left behind; only for whoever knows that nobody is writing."""
    for path in (store / CHECKPOINTS / segment).glob(f".*{UNFINISHED}"):
        shutil.rmtree(path, ignore_errors=True)
