"""The identity of a model folder. Free of torch, so that planning can name a reference it never loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

from workers.errors import ReferenceModelError
from workers.spec import content_hash


def reference_digest(folder: Path) -> str:
    """Names a Hugging Face model folder by its weights, configuration and tokenizer, wherever it lies.

    Raises:
        ReferenceModelError: if it holds no safetensors weights, no config.json or no tokenizer.json.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ReferenceModelError(f"{folder} holds no .safetensors weights (other formats are not read)")
    files = [*weights, folder / "config.json", folder / "tokenizer.json"]
    for file in files[-2:]:
        if not file.is_file():
            raise ReferenceModelError(
                f"{folder} has no {file.name}"
                + (": a tokenizer without character offsets cannot place key tokens" if "token" in file.name else "")
            )
    return content_hash({file.name: _sha256(file) for file in files})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
