"""Key tokens are selected once for all models: the reference's losses and the selections, kept in the store.

`<store>/references/<hash>/scores.npz` holds both losses under the hash of everything that decides them
(`reference.losses_identity`); `<hash>/key_tokens/<hash>.npz` adds the thresholds, and the tokenizer of evaluated models
that have one of their own. Files are written under a temporary
name and renamed; whoever comes second writes the same content.
"""

from __future__ import annotations

import os
import uuid
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers import mirror
from workers.corpus import Corpus, tokenizer_hash
from workers.documents import Window, retokenized
from workers.key_tokens import Mask, carry_over, key_mask, short_mask
from workers.progress import Report, unreported
from workers.reference import ReferenceLosses, losses_identity, open_reference
from workers.spec import Evaluator, content_hash

Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyTokens:
    """Masks over the evaluated model's tokens of one window: which are key tokens, which enter ShortPPL."""

    key: Mask
    short: Mask


def key_tokens(
    evaluator: Evaluator,
    windows: Sequence[Window],
    *,
    corpus: Corpus,
    store: Path,
    tokenizer: Tokenizer | None = None,
    report: Report = unreported,
) -> tuple[KeyTokens, ...]:
    """The tokens that enter LongPPL and ShortPPL, for each window; from the store if they were selected before.

    Args:
        tokenizer: The evaluated model's, if not the corpus's: the masks are over `retokenized(windows, tokenizer)`.

    Raises:
        ReferenceModelError: if the reference has to be run and cannot be.
    """
    decisive: dict[str, float | str] = {
        "gain_threshold": evaluator.gain_threshold,
        "full_nll_ceiling": evaluator.full_nll_ceiling,
    }
    measured: Sequence[Window] = windows
    if tokenizer is not None:
        decisive["tokenizer"] = tokenizer_hash(tokenizer)
        measured = retokenized(windows, tokenizer)
    file = _home(evaluator, corpus, store) / "key_tokens" / f"{content_hash(decisive)}.npz"
    stored = _read(file, store)
    if stored is None:
        losses = reference_losses(evaluator, windows, corpus=corpus, store=store, report=report)
        selected = [
            select(item, window, evaluator, measured=None if tokenizer is None else other)
            for item, window, other in zip(losses, windows, measured, strict=True)
        ]
        key, short = ([item.key for item in selected], [item.short for item in selected])
        stored = {"key": np.concatenate(key), "short": np.concatenate(short)}
        _write(file, stored, store)
    lengths = [len(window.tokens) for window in measured]
    masks = zip(_cut(stored["key"], lengths), _cut(stored["short"], lengths), strict=True)
    return tuple(KeyTokens(key=key, short=short) for key, short in masks)


def reference_losses(
    evaluator: Evaluator, windows: Sequence[Window], *, corpus: Corpus, store: Path, report: Report = unreported
) -> list[ReferenceLosses]:
    """Both losses of every token under the evaluator's reference; from the store if they were computed before.

    Raises:
        ReferenceModelError: if the reference has to be run and cannot be.
    """
    file = _home(evaluator, corpus, store) / "scores.npz"
    stored = _read(file, store)
    if stored is None:
        scorer = open_reference(evaluator.reference, corpus=corpus, store=store)
        losses = scorer.score(windows, evaluator.chunking, report=report)
        stored = {
            "full": np.concatenate([item.full for item in losses]),
            "local": np.concatenate([item.local for item in losses]),
            "lengths": np.array([len(item.full) for item in losses]),
        }
        spans = [item.spans for item in losses if item.spans is not None]
        if spans:
            stored["spans"] = np.concatenate(spans)
        _write(file, stored, store)
        return losses
    lengths = stored["lengths"].tolist()
    spans_of = _cut(stored["spans"], lengths) if "spans" in stored else [None] * len(lengths)
    columns = zip(_cut(stored["full"], lengths), _cut(stored["local"], lengths), spans_of, strict=True)
    return [ReferenceLosses(full=full, local=local, spans=spans) for full, local, spans in columns]


def select(
    losses: ReferenceLosses, window: Window, evaluator: Evaluator, *, measured: Window | None = None
) -> KeyTokens:
    """Applies the thresholds, and carries the result over where reference and evaluated model have other tokens.

    Args:
        window: The corpus's tokens, which are the reference's where `losses.spans` is None.
        measured: The same text in the evaluated model's tokens, if they are not the corpus's.
    """
    key = key_mask(
        losses.full,
        losses.local,
        gain_threshold=evaluator.gain_threshold,
        full_nll_ceiling=evaluator.full_nll_ceiling,
    )
    short = short_mask(losses.full, losses.local)
    if losses.spans is not None or measured is not None:
        spans = window.spans if losses.spans is None else losses.spans
        target = measured or window
        key = carry_over(spans[key], target.spans, target.text)
        short = carry_over(spans[short], target.spans, target.text)
    return KeyTokens(key=key, short=short)


def _home(evaluator: Evaluator, corpus: Corpus, store: Path) -> Path:
    return store / "references" / losses_identity(evaluator, corpus)


def _cut(values: npt.NDArray[Any], lengths: Sequence[int]) -> list[npt.NDArray[Any]]:
    return np.split(values, np.cumsum(lengths)[:-1])


def _read(file: Path, store: Path) -> Arrays | None:
    mirror.fetch(store, file.relative_to(store).as_posix())
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as stored:
            return dict(stored)
    except (FileNotFoundError, zipfile.BadZipFile, ValueError, EOFError):
        return None  # absent or damaged: it can be computed again


def _write(file: Path, arrays: Arrays, store: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.stem}-{uuid.uuid4().hex}.npz")
    try:
        with temporary.open("wb") as out:
            np.savez_compressed(out, allow_pickle=False, **arrays)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
    mirror.publish(store, file.relative_to(store).as_posix())
