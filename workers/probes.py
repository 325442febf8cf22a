"""Probes of a model beside perplexity: what each finds, as metrics. `run_probes` is the way in.

Prompts are a function of the probe set, the documents and the tokenizer alone, so every snapshot gets the same ones;
the samples of one length are the same at every depth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from workers.corpus import open_corpus
from workers.documents import Window, evaluation_windows
from workers.errors import DivergedError, ProbeError
from workers.longppl import check_numerics, snapshot_model
from workers.probe_spec import NeedleLoss, Passkey, PositionLoss, ProbeRun, ProbeSet, RetrievalHeads, Ruler
from workers.probes_heads import head_scores
from workers.probes_needles import Haystack, Needle, Prompt
from workers.progress import Report, unreported
from workers.results import Metric
from workers.ruler import run_ruler
from workers.ruler_words import draw_name, draw_number, draw_words
from workers.token_losses import BATCH_TOKENS, Pass, full_losses, logits_at, score

#: Words of the sentence that retrieval heads are asked to repeat.
_REPEATED_WORDS = 4


def evaluate_probes(run: ProbeRun, *, store: Path, report: Report = unreported) -> tuple[Metric, ...]:
    """Builds the snapshot's weights from its checkpoints and probes them, in the corpus's tokens.

    Raises:
        CheckpointError, MergeError, ModelMismatchError, CorpusError: as `workers.longppl.evaluate` does.
        MeasurementError: if the probes were planned for another version of these numerics.
        ProbeError: if a probe cannot be made as asked for.
        DivergedError: if a probe finds a number that is not finite.
    """
    check_numerics(run.probe_set)
    documents = run.probe_set.documents
    corpus = open_corpus(store, documents.corpus)
    model = snapshot_model(run, store=store, max_positions=run.probe_set.longest)
    windows = evaluation_windows(corpus, documents)
    metrics = run_probes(model, corpus.tokenizer, run.probe_set, windows=windows, report=report)
    for metric in metrics:
        if not math.isfinite(metric.value):
            raise DivergedError(step=run.snapshot.step, loss=metric.value)
    return metrics


def run_probes(
    model: Any,
    tokenizer: Tokenizer,
    probe_set: ProbeSet,
    *,
    windows: Sequence[Window],
    beginning_id: int | None = None,
    batch_tokens: int = BATCH_TOKENS,
    report: Report = unreported,
) -> tuple[Metric, ...]:
    """Runs every probe of the set, in order.

    Args:
        model: A Hugging Face causal language model.
        tokenizer: The model's.
        windows: The evaluation documents that `probe_set.documents` names (`workers.documents.evaluation_windows`), in
            the model's tokens (`workers.documents.retokenized` where those are not the corpus's).
        beginning_id: Put before every prompt; as in LongPPL, not before the documents of `PositionLoss`.
        batch_tokens: Changes memory and speed only.
        report: Called before every probe, and before every sample of RULER.

    Raises:
        ProbeError: if a probe cannot be made as asked for; the message says what would fit.
    """
    problems = probe_set.problems()
    if problems:
        raise ProbeError("; ".join(problems))
    haystack = Haystack(windows, tokenizer, beginning_id=beginning_id)
    metrics: list[Metric] = []
    for done, probe in enumerate(probe_set.probes):
        report(probe.kind, done, len(probe_set.probes))
        try:
            match probe:
                case PositionLoss():
                    metrics += _position_loss(model, probe, windows, batch_tokens)
                case Passkey():
                    metrics += _passkey(model, probe, haystack, probe_set.seed, batch_tokens)
                case NeedleLoss():
                    metrics += _needle_loss(model, probe, haystack, probe_set.seed, batch_tokens)
                case RetrievalHeads():
                    metrics += _retrieval_heads(model, probe, haystack, probe_set.seed)
                case Ruler():
                    texts = [window.text for window in windows]
                    metrics += run_ruler(
                        model,
                        tokenizer,
                        probe,
                        texts=texts,
                        seed=probe_set.seed,
                        beginning_id=beginning_id,
                        report=report,
                    )
        except ProbeError as error:
            raise ProbeError(f"probes[{done}] ({probe.kind}): {error}") from error
    report("done", len(probe_set.probes), len(probe_set.probes))
    return tuple(metrics)


def position_bins(n_tokens: int, bins_per_doubling: int) -> tuple[tuple[int, int], ...]:
    """Bins over the positions 1 .. n_tokens - 1, half open; their edges are 2^(k / bins_per_doubling), rounded."""
    edges: list[int] = []
    power = 0
    while not edges or edges[-1] < n_tokens:
        edge = min(round(2 ** (power / bins_per_doubling)), n_tokens)
        if not edges or edge > edges[-1]:
            edges.append(edge)
        power += 1
    return tuple(itertools.pairwise(edges))


def _position_loss(model: Any, probe: PositionLoss, windows: Sequence[Window], batch_tokens: int) -> list[Metric]:
    """A bin holds the same documents as every other: they are looked at as far as the shortest of them reaches."""
    documents = [window.tokens for window in windows]
    reach = min(map(len, documents))
    losses = full_losses(model, [ids[:reach] for ids in documents], batch_tokens=batch_tokens)
    table = np.stack(losses).astype(np.float64)
    return [
        Metric(
            name="position_loss",
            value=float(table[:, first:end].mean()),
            count=len(documents) * (end - first),
            length=end,
            label=f"{first}-{end - 1}",
        )
        for first, end in position_bins(reach, probe.bins_per_doubling)
    ]


def _passkey(model: Any, probe: Passkey, haystack: Haystack, seed: int, batch_tokens: int) -> list[Metric]:
    """Greedy decoding yields the digits' tokens if and only if each is the likeliest after those before it."""
    metrics = []
    for length in probe.lengths:
        for depth in probe.depths:
            prompts = []
            for draw in _draws(seed, probe.kind, length, probe.samples):
                needle = Needle(before="The pass key of this text is", value=f" {draw_number(draw, digits=5)}")
                prompts.append(haystack.prompt(needle, length=length, depth=depth, draw=draw))
            passes = [Pass(ids=prompt.ids, positions=prompt.answer_positions) for prompt in prompts]
            found = logits_at(model, passes, batch_tokens=batch_tokens)
            right = sum(
                bool((logits.argmax(-1).numpy() == prompt.ids[prompt.answer :]).all())
                for logits, prompt in zip(found, prompts, strict=True)
            )
            metrics.append(
                Metric(
                    name="passkey_accuracy",
                    value=right / probe.samples,
                    count=probe.samples,
                    length=length,
                    depth=depth,
                )
            )
    return metrics


def _needle_loss(model: Any, probe: NeedleLoss, haystack: Haystack, seed: int, batch_tokens: int) -> list[Metric]:
    """`needle_nll` in nats per token; `needle_rank` from 1 (likelier than every distractor) to 1 + distractors."""
    metrics = []
    for length in probe.lengths:
        for depth in probe.depths:
            passes: list[Pass] = []
            for draw in _draws(seed, probe.kind, length, probe.samples):
                needles = [_keyed_needle(draw) for _ in range(1 + probe.distractors)]
                prompt = haystack.prompt(needles[0], length=length, depth=depth, draw=draw, others=needles[1:])
                for needle in needles:
                    ids = prompt.with_answer(haystack.tokens(needle.value))
                    passes.append(Pass(ids=ids, positions=np.arange(prompt.answer, len(ids))))
            losses = score(model, passes, batch_tokens=batch_tokens)
            sums = np.array([values.sum(dtype=np.float64) for values in losses]).reshape(probe.samples, -1)
            n_tokens = sum(len(values) for values in losses[:: 1 + probe.distractors])
            ranks = 1 + (sums[:, 1:] < sums[:, :1]).sum(axis=1)
            place: dict[str, Any] = {"length": length, "depth": depth}
            metrics += [
                Metric(name="needle_nll", value=float(sums[:, 0].sum() / n_tokens), count=n_tokens, **place),
                Metric(name="needle_rank", value=float(ranks.mean()), count=probe.samples, **place),
            ]
    return metrics


def _keyed_needle(draw: Random) -> Needle:
    return Needle(before=f"The number of the {draw_name(draw)} is", value=f" {draw_number(draw)}")


def _retrieval_heads(model: Any, probe: RetrievalHeads, haystack: Haystack, seed: int) -> list[Metric]:
    """How many heads pass the threshold, and the scores of those heads and of the tracked ones."""
    prompts: list[Prompt] = []
    for depth in probe.depths:
        for draw in _draws(seed, probe.kind, probe.length, probe.samples):
            value = "".join(f" {word}" for word in draw_words(_REPEATED_WORDS, draw))
            needle = Needle(before=f"The sign above the {draw_name(draw)} gate reads:", value=value)
            prompts.append(haystack.prompt(needle, length=probe.length, depth=depth, draw=draw))
    scores = head_scores(model, prompts)
    unknown = [label for label in probe.tracked if label not in scores]
    if unknown:
        raise ProbeError(f"tracked: the model has no head {', '.join(unknown)}")
    count = sum(len(prompt.ids) - prompt.answer for prompt in prompts)
    found = [label for label, value in scores.items() if value > probe.threshold]
    place: dict[str, Any] = {"count": count, "length": probe.length}
    return [
        Metric(name="retrieval_heads", value=float(len(found)), **place),
        *(
            Metric(name="retrieval_head_score", value=scores[label], label=label, **place)
            for label in dict.fromkeys([*probe.tracked, *found])
        ),
    ]


def _draws(seed: int, kind: str, length: int, samples: int) -> list[Random]:
    """A source of randomness for each sample, the same at every depth."""
    return [Random(f"{seed}/{kind}/{length}/{sample}") for sample in range(samples)]
