"""LongPPL, ShortPPL and perplexity of a snapshot: pooled over tokens, with the sums of every document kept.

    ln LongPPL  = sum of NLL over key tokens / their number          (likewise ShortPPL over its tokens, PPL over all)
    se^2        = D / (D - 1) * sum_d (s_d - R n_d)^2 / (sum_d n_d)^2

with s_d and n_d the sum and the count of document d, R the pooled ratio and D the number of documents: the
linearisation (delta method) of a ratio of two document totals, Cochran 1977, "Sampling Techniques", chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from workers.checkpoint import verify
from workers.corpus import Corpus, open_corpus, tokenizer_hash
from workers.documents import evaluation_windows, retokenized
from workers.errors import CorpusError, DivergedError, MeasurementError
from workers.key_tokens import Mask
from workers.merge import merge
from workers.model import load_weights, open_model
from workers.probe_spec import ProbeRun, ProbeSet
from workers.progress import Report, unreported
from workers.reference_cache import KeyTokens, key_tokens
from workers.results import DocumentScore, Evaluation
from workers.spec import NUMERICS_VERSION, EvaluationRun, Evaluator
from workers.token_losses import BATCH_TOKENS, check_head, full_losses, local_losses

Losses = npt.NDArray[np.floating]


def evaluate(run: EvaluationRun, *, store: Path) -> Evaluation:
    """Builds the snapshot's weights from its checkpoints and measures them.

    Args:
        store: The store's root; checkpoint paths are relative to it, and the reference's losses are kept in it.

    Raises:
        CheckpointError, MergeError, ModelMismatchError, MeasurementError: if the checkpoints do not yield the model, or
            one that cannot be measured.
        CorpusError, ReferenceModelError: if documents or key tokens are not to be had.
        DivergedError: if the model yields losses that are not finite.
    """
    evaluator = run.evaluator
    check_numerics(evaluator)
    corpus = open_corpus(store, evaluator.documents.corpus)
    model = snapshot_model(run, store=store, max_positions=evaluator.documents.length)
    return measure(model, evaluator, corpus=corpus, store=store, step=run.snapshot.step)


def check_numerics(specification: Evaluator | ProbeSet) -> None:
    """Refuses what was planned for another version of these numerics: its name promises other numbers.

    Raises:
        MeasurementError: if so.
    """
    if specification.numerics_version != NUMERICS_VERSION:
        raise MeasurementError(
            f"the measurement was planned for numerics version {specification.numerics_version}; this is version"
            f" {NUMERICS_VERSION}: submit its grid again"
        )


def snapshot_model(run: EvaluationRun | ProbeRun, *, store: Path, max_positions: int) -> Any:
    """The model of a snapshot, its weights merged as its rule says and never written; on a GPU where there is one.

    Raises:
        CheckpointError, MergeError, ModelMissingError, ModelMismatchError: if the checkpoints do not yield the model.
        MeasurementError: if the model is of a kind that cannot be measured.
    """
    model = open_model(
        run.shape, rope_base=run.rope_base, max_positions=max_positions, store=store, seed=0, yarn=run.yarn
    )
    if run.sources:  # else a folder's model as it came
        load_weights(model, merge([verify(store, source) for source in run.sources], run.snapshot.rule))
    placed = model.to("cuda" if torch.cuda.is_available() else "cpu")
    check_head(placed)
    return placed


def measure(
    model: Any,
    evaluator: Evaluator,
    *,
    corpus: Corpus,
    store: Path,
    step: int | None = None,
    tokenizer: Tokenizer | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report: Report = unreported,
) -> Evaluation:
    """Measures a causal language model over the corpus's held-out documents.

    Windows are fed as they are, without a beginning-of-text token, as they are in training; so the first token of each
    is not scored.

    Args:
        step: That of a snapshot, named if it has diverged.
        tokenizer: The model's own, if not the corpus's: each window's text is put into its tokens, and key tokens are
            carried over by the characters that they cover. Local context, if asked for, is counted in its tokens too.
        batch_tokens: Changes memory and speed only.

    Raises:
        MeasurementError: if the model cannot take windows of this length, or its losses are not finite.
        CorpusError, ReferenceModelError, DivergedError: as `evaluate` does.
    """
    if tokenizer is not None and tokenizer_hash(tokenizer) == corpus.manifest.tokenizer:
        tokenizer = None
    vocab_size = model.get_output_embeddings().weight.shape[0]
    needed = corpus.vocab_size if tokenizer is None else tokenizer.get_vocab_size()
    if vocab_size < needed:
        raise CorpusError(f"corpus {corpus.hash} has {needed} tokens, the model's vocabulary {vocab_size}")
    windows = evaluation_windows(corpus, evaluator.documents)
    selected = key_tokens(evaluator, windows, corpus=corpus, store=store, tokenizer=tokenizer, report=report)
    tokens = [window.tokens for window in (windows if tokenizer is None else retokenized(windows, tokenizer))]
    _check_positions(model, max(map(len, tokens)))
    full = full_losses(model, tokens, batch_tokens=batch_tokens, report=partial(report, "model, full context"))
    local: Sequence[Losses] | None = None
    if evaluator.short_context_gap:
        local = local_losses(
            model,
            tokens,
            evaluator.chunking,
            wanted=[item.key for item in selected],
            batch_tokens=batch_tokens,
            report=partial(report, "model, local context"),
        )
    scores = score_documents(full, selected, local)
    worst = sum(score.all_sum + (score.key_local_sum or 0.0) for score in scores)
    if not math.isfinite(worst):
        if step is None:
            raise MeasurementError(f"the model's losses are no finite numbers; their sum is {worst}")
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


def _check_positions(model: Any, length: int) -> None:
    """Rotations go on for ever, if not well; a table of positions ends."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and positions < length and not getattr(model.config, "rope_parameters", None):
        raise MeasurementError(f"the model has {positions} positions, documents are up to {length} tokens long")


def _total(losses: Losses, mask: Mask) -> tuple[float, int]:
    return float(losses[mask].sum(dtype=np.float64)), int(mask.sum())
