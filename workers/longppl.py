"""LongPPL, ShortPPL and perplexity of a snapshot: pooled over tokens, with the sums of every document kept.

    ln LongPPL  = sum of NLL over key tokens / their number          (likewise ShortPPL over its tokens, PPL over all)
    se^2        = D / (D - 1) * sum_d (s_d - R n_d)^2 / (sum_d n_d)^2

with s_d and n_d the sum and the count of document d, R the pooled ratio and D the number of documents: the
linearisation (delta method) of a ratio of two document totals, Cochran 1977, "Sampling Techniques", chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from workers.checkpoint import verify
from workers.corpus import Corpus, open_corpus
from workers.documents import evaluation_windows
from workers.errors import CorpusError, DivergedError
from workers.key_tokens import Mask
from workers.merge import merge
from workers.model import build_model, load_weights
from workers.reference_cache import KeyTokens, key_tokens
from workers.results import DocumentScore, Evaluation
from workers.spec import EvaluationRun, Evaluator
from workers.token_losses import BATCH_TOKENS, full_losses, local_losses

Losses = npt.NDArray[np.floating]


def evaluate(run: EvaluationRun, *, store: Path) -> Evaluation:
    """Builds the snapshot's weights from its checkpoints and measures them.

    Args:
        store: The store's root; checkpoint paths are relative to it, and the reference's losses are kept in it.

    Raises:
        CheckpointError, MergeError, ModelMismatchError: if the checkpoints do not yield the model.
        CorpusError, ReferenceModelError: if documents or key tokens are not to be had.
        DivergedError: if the model yields losses that are not finite.
    """
    evaluator = run.evaluator
    corpus = open_corpus(store, evaluator.documents.corpus)
    model = build_model(run.shape, rope_base=run.rope_base, max_positions=evaluator.documents.length, seed=0)
    load_weights(model, merge([verify(store, source) for source in run.sources], run.snapshot.rule))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    return measure(model, evaluator, corpus=corpus, store=store, step=run.snapshot.step)


def measure(
    model: Any, evaluator: Evaluator, *, corpus: Corpus, store: Path, step: int, batch_tokens: int = BATCH_TOKENS
) -> Evaluation:
    """Measures a causal language model over the corpus's tokens. `step` is named if it has diverged.

    Windows are fed as they are, without a beginning-of-text token, as they are in training; so the first token of each
    is not scored. `batch_tokens` changes memory and speed only.

    Raises:
        CorpusError, ReferenceModelError, DivergedError: as `evaluate` does.
    """
    vocab_size = model.get_output_embeddings().weight.shape[0]
    if vocab_size < corpus.vocab_size:
        raise CorpusError(f"corpus {corpus.hash} has {corpus.vocab_size} tokens, the model's vocabulary {vocab_size}")
    windows = evaluation_windows(corpus, evaluator.documents)
    selected = key_tokens(evaluator, windows, corpus=corpus, store=store)
    tokens = [window.tokens for window in windows]
    full = full_losses(model, tokens, batch_tokens=batch_tokens)
    local: Sequence[Losses] | None = None
    if evaluator.short_context_gap:
        keys = [item.key for item in selected]
        local = local_losses(model, tokens, evaluator.chunking, wanted=keys, batch_tokens=batch_tokens)
    scores = score_documents(full, selected, local)
    worst = sum(score.all_sum + (score.key_local_sum or 0.0) for score in scores)
    if not math.isfinite(worst):
        raise DivergedError(step=step, loss=worst)
    return pool(scores)


def score_documents(
    full: Sequence[Losses], selected: Sequence[KeyTokens], local: Sequence[Losses] | None = None
) -> tuple[DocumentScore, ...]:
    """Sums and counts per document, in float64.

    Args:
        full: NLL of each token of each document; those of tokens that are not predicted are NaN.
        selected: Which tokens are pooled.
        local: NLL under local context, needed where a key token has one; elsewhere its context is the whole prefix.
    """
    scores = []
    for index, (losses, masks) in enumerate(zip(full, selected, strict=True)):
        scored = np.ones(len(losses), dtype=bool)
        scored[:1] = ~np.isnan(losses[:1])
        key_sum, key_count = _total(losses, masks.key & scored)
        short_sum, short_count = _total(losses, masks.short & scored)
        all_sum, all_count = _total(losses, scored)
        key_local_sum = None
        if local is not None:
            near = np.where(np.isnan(local[index]), losses, local[index])
            key_local_sum, _ = _total(near, masks.key & scored)
        scores.append(
            DocumentScore(
                key_sum=key_sum,
                key_count=key_count,
                short_sum=short_sum,
                short_count=short_count,
                all_sum=all_sum,
                all_count=all_count,
                key_local_sum=key_local_sum,
            )
        )
    return tuple(scores)


def pool(scores: Sequence[DocumentScore]) -> Evaluation:
    """The metrics over all documents' tokens. A metric without tokens is None, and `reason` says so."""
    key = [(score.key_sum, score.key_count) for score in scores]
    short = [(score.short_sum, score.short_count) for score in scores]
    every = [(score.all_sum, score.all_count) for score in scores]
    gap = [
        (score.key_local_sum - score.key_sum, score.key_count) for score in scores if score.key_local_sum is not None
    ]
    missing = [
        text
        for text, parts in (
            ("no key token", key),
            ("no token that local context favours", short),
            ("no predicted token", every),
        )
        if not sum(count for _, count in parts)
    ]
    return Evaluation(
        log_longppl=pooled_mean(key),
        log_longppl_se=pooled_error(key),
        log_shortppl=pooled_mean(short),
        log_shortppl_se=pooled_error(short),
        log_ppl=pooled_mean(every),
        log_ppl_se=pooled_error(every),
        key_gap=pooled_mean(gap),
        key_count=sum(count for _, count in key),
        short_count=sum(count for _, count in short),
        all_count=sum(count for _, count in every),
        documents=tuple(scores),
        reason="; ".join(missing) or None,
    )


def pooled_mean(parts: Sequence[tuple[float, int]]) -> float | None:
    """Sum over count of (sum, count) pairs; None without tokens."""
    count = sum(count for _, count in parts)
    return math.fsum(total for total, _ in parts) / count if count else None


def pooled_error(parts: Sequence[tuple[float, int]]) -> float | None:
    """Standard error over documents of `pooled_mean`; None unless at least two documents have tokens."""
    mean = pooled_mean(parts)
    if mean is None or sum(count > 0 for _, count in parts) < 2:
        return None
    residuals = math.fsum((total - mean * count) ** 2 for total, count in parts)
    documents = len(parts)
    return math.sqrt(documents / (documents - 1) * residuals) / sum(count for _, count in parts)


def _total(losses: Losses, mask: Mask) -> tuple[float, int]:
    return float(losses[mask].sum(dtype=np.float64)), int(mask.sum())
