"""Any causal language model in a folder as a reference: safetensors weights, no code from the folder, no network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from workers.corpus import Corpus, tokenizer_hash
from workers.documents import Window, retokenized
from workers.errors import MeasurementError, ReferenceModelError
from workers.progress import Report, unreported
from workers.reference import ReferenceLosses
from workers.spec import Chunking
from workers.token_losses import BATCH_TOKENS, check_head, full_losses, local_losses


class HuggingFaceReference:
    """Scores windows with the model in `folder`; on a GPU where there is one."""

    def __init__(self, folder: Path, *, corpus: Corpus, batch_tokens: int = BATCH_TOKENS) -> None:
        """Loads tokenizer and weights.

        Raises:
            ReferenceModelError: if a file is missing or unreadable, weights are incomplete, the vocabulary is too small
                for the tokenizer, or the model changes its logits after the head.
        """
        self._model, self._tokenizer = load_model(folder)
        self._own_tokens = tokenizer_hash(self._tokenizer) == corpus.manifest.tokenizer
        self._beginning_id = _beginning_id(folder, self._tokenizer)
        self._batch_tokens = batch_tokens

    @property
    def beginning_id(self) -> int | None:
        """The token put once before every window and chunk; None if the tokenizer names none."""
        return self._beginning_id

    def score(
        self, windows: Sequence[Window], chunking: Chunking, *, report: Report = unreported
    ) -> list[ReferenceLosses]:
        """Both losses of every token of each window, under this model's own tokenizer."""
        own = windows if self._own_tokens else retokenized(windows, self._tokenizer)
        documents = [window.tokens for window in own]
        options: dict[str, Any] = {"beginning_id": self._beginning_id, "batch_tokens": self._batch_tokens}
        full = full_losses(self._model, documents, report=partial(report, "reference, full context"), **options)
        local = local_losses(
            self._model, documents, chunking, report=partial(report, "reference, local context"), **options
        )
        return [
            ReferenceLosses(full=full[index], local=local[index], spans=None if self._own_tokens else window.spans)
            for index, window in enumerate(own)
        ]


def load_model(folder: Path, *, tokenizer_file: Path | None = None) -> tuple[Any, Tokenizer]:
    """The causal language model of a folder, on a GPU where there is one, and its tokenizer, from the same folder or
    from `tokenizer_file`.

    Raises:
        ReferenceModelError: if a file is missing or unreadable, weights are incomplete, the vocabulary is too small for
            the tokenizer, or the model changes its logits after the head.
    """
    file = tokenizer_file or folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ReferenceModelError(f"{file} is missing or unreadable: {error}") from error
    model = _load_weights(folder)
    vocab_size, known = model.get_output_embeddings().weight.shape[0], tokenizer.get_vocab_size()
    if vocab_size < known:
        raise ReferenceModelError(f"{folder}: the model has {vocab_size} tokens, its tokenizer {known}")
    return model, tokenizer


def _beginning_id(folder: Path, tokenizer: Tokenizer) -> int | None:
    """The id of what tokenizer_config.json calls `bos_token`. config.json has a default that means nothing."""
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text()).get("bos_token")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ReferenceModelError(f"{folder / 'tokenizer_config.json'} is unreadable: {error}") from error
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ReferenceModelError(f'{folder}: the tokenizer does not know its bos_token "{token}"')
    return found


def _load_weights(folder: Path) -> Any:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype="auto",
            device_map="auto" if torch.cuda.is_available() else "cpu",  # accelerate's: over all GPUs that are seen
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ReferenceModelError(f"{folder} is not a causal language model that can be loaded: {error}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[problem]:
            names = ", ".join(sorted(map(str, report[problem]))[:5])
            raise ReferenceModelError(f"{folder}: weights and config.json do not agree: {problem} {names}")
    model = model.eval()
    try:
        check_head(model)
    except MeasurementError as error:
        raise ReferenceModelError(f"{folder}: {error}") from error
    return model
