"""LongPPL: oracles O1 and O3, cases B43, B48 and B50, and snapshots measured as the plain definition measures them."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.workers.tiny_evaluation import LENGTH, evaluator_of, repeating_corpus, tiny_llama
from tests.workers.tiny_training import SHAPE, long_stage, segment_of
from workers import checkpoint
from workers.chunking import context_starts
from workers.corpus import Corpus
from workers.documents import evaluation_windows
from workers.errors import CheckpointCorruptError, CorpusError, DivergedError, MeasurementError, MergeError
from workers.key_tokens import key_mask, short_mask
from workers.longppl import check_numerics, evaluate, measure, pool, pooled_error, pooled_mean, score_documents
from workers.model import build_model
from workers.reference_cache import KeyTokens, key_tokens
from workers.results import DocumentScore, Evaluation
from workers.spec import Chunking, ChunkingMode, EvaluationRun, ObservationRule, Snapshot, StoredCheckpoint
from workers.token_losses import full_losses, local_losses


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return repeating_corpus(tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(corpus: Corpus, tmp_path: Path) -> Path:
    shutil.copytree(corpus.path, tmp_path / "corpora" / corpus.hash)
    return tmp_path


# --- oracle O1: eight tokens whose probabilities are given ------------------------------------------------------------

FULL = [math.nan, -3.0, -0.5, -1.0, -0.5, -1.75, -2.0, -0.25]
SHORT = [math.nan, math.nan, -0.5, -1.0, -2.5, -4.25, -9.0, -2.5]
TOY = np.arange(8, dtype=np.int64)


class GivenProbabilities(nn.Module):
    """A causal model over the tokens 0 .. 7 (8 is the rest): token t follows t - 1 with the given log-probability, that
    of FULL if the sequence begins with token 0 and that of SHORT if it begins later."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 9, bias=False)
        self.head.weight = nn.Parameter(torch.eye(9))

    def base_model(self, *, input_ids: Tensor, use_cache: bool) -> Any:
        hidden = torch.full((*input_ids.shape, 9), -1e4)
        for row, ids in enumerate(input_ids.tolist()):
            table = FULL if ids[0] == 0 else SHORT
            for place, token in enumerate(ids[: 8 - ids[0]]):
                given = table[token + 1] if token < 7 else math.nan
                if not math.isnan(given):
                    hidden[row, place, token + 1] = given
                    hidden[row, place, 8] = math.log1p(-math.exp(given))
        return type("Output", (), {"last_hidden_state": hidden})

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def toy(
    *, alpha: float = 2.0, beta: float = -2.0, length: int = 2, stride: int = 2, mode: ChunkingMode = "pku"
) -> tuple[list[int], Evaluation]:
    model = GivenProbabilities()
    (full,) = full_losses(model, [TOY])
    (local,) = local_losses(model, [TOY], Chunking(length=length, stride=stride, mode=mode))
    full, local = np.round(full, 5), np.round(local, 5)  # the toy has a gain of exactly 2 and a loss of exactly 2
    key = key_mask(full, local, gain_threshold=alpha, full_nll_ceiling=-beta)
    evaluation = pool(score_documents([full], [KeyTokens(key=key, short=short_mask(full, local))]))
    return np.flatnonzero(key).tolist(), evaluation


def longppl_of(evaluation: Evaluation) -> float:
    assert evaluation.log_longppl is not None
    return math.exp(evaluation.log_longppl)


@pytest.mark.parametrize("mode", ["pku", "exact"])
def test_eight_token_oracle(mode: ChunkingMode) -> None:
    """O1. `exact` scores token 3 under a context of two as well (LSD 0) and selects the same key tokens."""
    keys, evaluation = toy(mode=mode)
    assert keys == [5, 7]
    assert evaluation.key_count == 2
    assert longppl_of(evaluation) == pytest.approx(2.718282, abs=5e-7)
    assert evaluation.log_ppl is not None
    assert math.exp(evaluation.log_ppl) == pytest.approx(3.617251, abs=5e-7)
    assert evaluation.all_count == 7


def test_eight_token_oracle_local_contexts() -> None:
    """O1: windows {2, 3}, {4, 5}, {6, 7}; the first is the whole prefix. `exact`: {3, 4}, {5, 6}, {7}."""
    model = GivenProbabilities()
    for mode, first in (("pku", 4), ("exact", 3)):
        (local,) = local_losses(model, [TOY], Chunking(length=2, stride=2, mode=mode))  # type: ignore[arg-type]
        assert np.isnan(local[:first]).all()
        np.testing.assert_allclose(local[first:], -np.array(SHORT[first:]), rtol=1e-6)


@pytest.mark.parametrize(
    ("alpha", "beta", "expected", "longppl"),
    [
        (1.9, -2.0, [4, 5, 7], 2.300976),
        (2.0, -2.5, [5, 6, 7], 3.793668),
        (0.0, -100.0, [4, 5, 6, 7], 3.080217),
    ],
)
def test_eight_token_oracle_with_other_thresholds(
    alpha: float, beta: float, expected: list[int], longppl: float
) -> None:
    """O1's variants."""
    keys, evaluation = toy(alpha=alpha, beta=beta)
    assert keys == expected
    assert longppl_of(evaluation) == pytest.approx(longppl, abs=5e-7)


def test_a_chunk_as_long_as_the_document_leaves_no_key_token_and_says_so() -> None:
    """O1, K = 8."""
    keys, evaluation = toy(length=8)
    assert keys == []
    assert evaluation.log_longppl is None
    assert evaluation.log_longppl_se is None
    assert evaluation.log_ppl is not None
    assert evaluation.reason == "no key token; no token that local context favours"


@pytest.mark.parametrize("mode", ["pku", "exact"])
def test_a_stride_of_one_works(mode: ChunkingMode) -> None:
    """O1, d = 1: the public code crashes; only tokens past the chunk can be key."""
    keys, _ = toy(stride=1, mode=mode)
    assert keys == [5, 7]


# --- pooling ----------------------------------------------------------------------------------------------------------


def document(key: tuple[float, int], every: tuple[float, int] = (0.0, 0), gap: float | None = None) -> DocumentScore:
    return DocumentScore(
        key_sum=key[0],
        key_count=key[1],
        short_sum=0.0,
        short_count=0,
        all_sum=every[0],
        all_count=every[1],
        key_local_sum=gap,
    )


def test_measurement_planned_for_other_numerics_is_refused_with_the_way_out(corpus: Corpus) -> None:
    """Its name promises other numbers."""
    old = dataclasses.replace(evaluator_of(corpus), numerics_version=0)
    with pytest.raises(MeasurementError, match=r"numerics version 0.*submit its grid again"):
        check_numerics(old)


def test_key_tokens_are_pooled_over_documents() -> None:
    """O3: not 1.862633 (mean of perplexities by tokens), not 2.183502 (mean over documents)."""
    evaluation = pool([document((2 * 1.0, 2)), document((8 * 0.5, 8)), document((0.0, 0))])
    assert longppl_of(evaluation) == pytest.approx(1.822119, abs=5e-7)
    assert evaluation.key_count == 10


def test_perplexity_is_no_mean_of_document_means() -> None:
    """B43."""
    evaluation = pool([document((0.0, 0), (16.0, 8)), document((0.0, 0), (8.0, 2))])
    assert evaluation.log_ppl is not None
    assert math.exp(evaluation.log_ppl) == pytest.approx(11.0232, abs=5e-5)
    assert evaluation.reason == "no key token; no token that local context favours"


def test_the_error_of_equal_documents_is_that_of_a_mean() -> None:
    means = np.array([1.0, 1.5, 0.7, 2.2, 1.1])
    parts = [(float(mean) * 40, 40) for mean in means]
    assert pooled_error(parts) == pytest.approx(means.std(ddof=1) / math.sqrt(5), rel=1e-12)


def test_the_error_agrees_with_what_repetition_shows() -> None:
    draw = np.random.default_rng(7)
    estimates, errors = [], []
    for _ in range(400):
        counts = draw.integers(5, 60, 40)
        sums = counts * draw.normal(2.0, 0.5, 40)
        parts = list(zip(sums.tolist(), counts.tolist(), strict=True))
        estimates.append(pooled_mean(parts))
        errors.append(pooled_error(parts))
    assert np.mean(np.array(errors)) == pytest.approx(np.std(np.array(estimates)), rel=0.12)


def test_one_document_has_no_error() -> None:
    assert pooled_error([(3.0, 2)]) is None
    assert pooled_error([(3.0, 2), (0.0, 0)]) is None
    assert pooled_error([]) is None
    assert pooled_mean([(0.0, 0)]) is None


def test_empty_and_one_token_documents_count_nothing_without_a_beginning() -> None:
    """B48: with one, the single token counts."""
    model = tiny_llama(32)
    documents = [np.array([], dtype=np.int64), np.array([5], dtype=np.int64), np.array([5, 6], dtype=np.int64)]
    for beginning_id, counts in ((None, [0, 0, 1]), (1, [0, 1, 2])):
        losses = full_losses(model, documents, beginning_id=beginning_id)
        empty = [KeyTokens(key=np.zeros(len(d), dtype=bool), short=np.zeros(len(d), dtype=bool)) for d in documents]
        scores = score_documents(losses, empty)
        assert [score.all_count for score in scores] == counts
        assert all(math.isfinite(score.all_sum) for score in scores)
    assert pool(score_documents(losses[:1], empty[:1])).reason == (
        "no key token; no token that local context favours; no predicted token"
    )


# --- losses -----------------------------------------------------------------------------------------------------------


def plain(model: Any, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """NLL of ids[1:] from the whole logits of one sequence."""
    with torch.inference_mode():
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, :-1].double()
    return functional.cross_entropy(logits, torch.from_numpy(ids[1:]), reduction="none").numpy()


def random_documents(lengths: list[int], vocab_size: int) -> list[npt.NDArray[np.int64]]:
    draw = np.random.default_rng(3)
    return [draw.integers(0, vocab_size, length) for length in lengths]


def test_losses_do_not_depend_on_the_batch_or_on_padding() -> None:
    """B50."""
    model = tiny_llama(64)
    documents = random_documents([40, 7, 33, 40, 2, 21, 40, 15], 64)
    expected = [plain(model, ids) for ids in documents]
    chunking = Chunking(length=5, stride=3)
    alone = local_losses(model, documents, chunking, batch_tokens=1)
    for batch_tokens in (1, 160, 200, 320):
        for ids, losses, values in zip(
            documents, full_losses(model, documents, batch_tokens=batch_tokens), expected, strict=True
        ):
            assert len(losses) == len(ids)
            np.testing.assert_allclose(losses[1:], values, rtol=0, atol=1e-5)
        batched = local_losses(model, documents, chunking, batch_tokens=batch_tokens)
        for one, many in zip(alone, batched, strict=True):
            np.testing.assert_allclose(one, many, rtol=0, atol=1e-5)


@pytest.mark.parametrize("mode", ["exact", "pku"])
def test_local_losses_are_those_of_the_chunk_fed_alone(mode: ChunkingMode) -> None:
    model = tiny_llama(64)
    chunking = Chunking(length=6, stride=4, mode=mode)
    documents = random_documents([30, 9], 64)
    for ids, losses in zip(documents, local_losses(model, documents, chunking), strict=True):
        starts = context_starts(len(ids), chunking)
        assert np.isnan(losses).tolist() == (starts == 0).tolist()
        for position in np.flatnonzero(starts):
            alone = plain(model, ids[starts[position] : position + 1])[-1]
            assert losses[position] == pytest.approx(alone, abs=1e-5)


def test_only_windows_with_wanted_tokens_are_run() -> None:
    model = tiny_llama(64)
    documents = random_documents([40, 40], 64)
    wanted = [np.zeros(40, dtype=bool), np.zeros(40, dtype=bool)]
    wanted[0][[3, 20, 22]] = True
    fed: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    chunking = Chunking(length=6, stride=4)
    some = local_losses(model, documents, chunking, wanted=wanted)
    assert sum(fed) <= 2 * (6 + 4 - 1)
    everything = local_losses(model, documents, chunking)
    assert np.flatnonzero(~np.isnan(some[0])).tolist() == [20, 22]
    assert np.isnan(some[1]).all()
    np.testing.assert_allclose(some[0][[20, 22]], everything[0][[20, 22]], rtol=0, atol=1e-5)


# --- a snapshot, end to end -------------------------------------------------------------------------------------------


def saved_checkpoints(store: Path, corpus: Corpus, seeds: tuple[int, ...]) -> tuple[StoredCheckpoint, ...]:
    """Checkpoints of one segment with weights drawn from the given seeds."""
    segment = segment_of("long_constant", long_stage(corpus.hash))
    saved = []
    for index, seed in enumerate(seeds, start=1):
        model = build_model(SHAPE, rope_base=1e5, max_positions=LENGTH, seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
        model(input_ids=torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
        saved.append(checkpoint.write(store, segment, index * 10, model=model, optimizers=(optimizer,))[0])
    return tuple(saved)


def run_of(corpus: Corpus, sources: tuple[StoredCheckpoint, ...], **options: Any) -> EvaluationRun:
    m = len(sources)
    rule = ObservationRule(name="last_m", m=m, spacing_steps=10) if m > 1 else ObservationRule(name="raw")
    snapshot = Snapshot(segment=sources[-1].ref.segment, step=sources[-1].ref.step, rule=rule)
    return EvaluationRun(
        snapshot=snapshot,
        sources=sources,
        evaluator=evaluator_of(corpus, **options),
        shape=SHAPE,
        rope_base=1e5,
    )


@pytest.mark.parametrize("mode", ["exact", "pku"])
def test_a_merged_snapshot_measures_what_the_definition_says(corpus: Corpus, store: Path, mode: ChunkingMode) -> None:
    run = run_of(corpus, saved_checkpoints(store, corpus, (1, 2, 3)), mode=mode, short_context_gap=True)
    evaluation = evaluate(run, store=store)

    model = build_model(SHAPE, rope_base=1e5, max_positions=LENGTH, seed=0)
    weights = [dict(checkpoint.read_weights(store / source.path)) for source in run.sources]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.stack([tensors[name].double() for tensors in weights]).mean(0))
    windows = evaluation_windows(corpus, run.evaluator.documents)
    selected = key_tokens(run.evaluator, windows, corpus=corpus, store=store)
    key_losses: list[float] = []
    short_losses: list[float] = []
    all_losses: list[float] = []
    gaps: list[float] = []
    for window, masks in zip(windows, selected, strict=True):
        losses = np.concatenate([[np.nan], plain(model, window.tokens)])
        starts = context_starts(LENGTH, run.evaluator.chunking)
        key_losses.extend(losses[masks.key])
        short_losses.extend(losses[masks.short])
        all_losses.extend(losses[1:])
        for position in np.flatnonzero(masks.key):
            local = plain(model, window.tokens[starts[position] : position + 1])[-1]
            gaps.append(local - losses[position])
    assert evaluation.key_count == len(key_losses) > 10
    assert evaluation.short_count == len(short_losses) > 10
    assert evaluation.all_count == len(all_losses) == 6 * (LENGTH - 1)
    assert evaluation.log_longppl == pytest.approx(np.mean(key_losses), abs=1e-5)
    assert evaluation.log_shortppl == pytest.approx(np.mean(short_losses), abs=1e-5)
    assert evaluation.log_ppl == pytest.approx(np.mean(all_losses), abs=1e-5)
    assert evaluation.key_gap == pytest.approx(np.mean(gaps), abs=1e-5)
    assert evaluation.reason is None
    assert len(evaluation.documents) == 6
    assert evaluation.log_longppl_se is not None
    assert 0 < evaluation.log_longppl_se < 1


def test_the_same_snapshot_is_measured_the_same_whatever_the_batch(corpus: Corpus, store: Path) -> None:
    """B50."""
    model = tiny_llama(SHAPE.vocab_size)
    evaluator = evaluator_of(corpus, short_context_gap=True)
    results = [
        measure(model, evaluator, corpus=corpus, store=store, step=1, batch_tokens=LENGTH * batch)
        for batch in (1, 4, 5, 8)
    ]
    for result in results[1:]:
        assert result.log_longppl == pytest.approx(results[0].log_longppl, abs=1e-5)
        assert result.key_gap == pytest.approx(results[0].key_gap, abs=1e-5)
        for one, other in zip(results[0].documents, result.documents, strict=True):
            assert other.key_sum == pytest.approx(one.key_sum, abs=1e-3)
            assert (other.key_count, other.all_count) == (one.key_count, one.all_count)


def test_without_the_gap_no_local_pass_is_run(corpus: Corpus, store: Path) -> None:
    model = tiny_llama(SHAPE.vocab_size)
    fed: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, inputs: fed.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    evaluation = measure(model, evaluator_of(corpus), corpus=corpus, store=store, step=1)
    assert sum(fed) == 6 * (LENGTH - 1)
    assert evaluation.key_gap is None
    assert all(score.key_local_sum is None for score in evaluation.documents)


def test_no_key_tokens_give_none_and_a_reason(corpus: Corpus, store: Path) -> None:
    evaluator = evaluator_of(corpus, gain_threshold=1e6, short_context_gap=True)
    evaluation = measure(tiny_llama(SHAPE.vocab_size), evaluator, corpus=corpus, store=store, step=1)
    assert evaluation.log_longppl is None
    assert evaluation.key_gap is None
    assert evaluation.key_count == 0
    assert evaluation.log_ppl is not None
    assert evaluation.reason == "no key token"
    numbers = [value for score in evaluation.documents for value in dataclasses.astuple(score)]
    assert all(math.isfinite(value) for value in numbers)


def test_a_diverged_model_is_an_error_and_no_number(corpus: Corpus, store: Path) -> None:
    model = tiny_llama(SHAPE.vocab_size)
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(DivergedError, match="at step 70"):
        measure(model, evaluator_of(corpus), corpus=corpus, store=store, step=70)


def test_a_model_without_the_corpus_s_tokens_is_refused(corpus: Corpus, store: Path) -> None:
    with pytest.raises(CorpusError, match="has 300 tokens, the model's vocabulary 299"):
        measure(tiny_llama(299), evaluator_of(corpus), corpus=corpus, store=store, step=1)


def test_a_changed_checkpoint_is_not_measured(corpus: Corpus, store: Path) -> None:
    (source,) = saved_checkpoints(store, corpus, (1,))
    file = store / source.path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointCorruptError):
        evaluate(run_of(corpus, (source,)), store=store)


def test_a_rule_without_its_checkpoints_is_not_measured(corpus: Corpus, store: Path) -> None:
    sources = saved_checkpoints(store, corpus, (1, 2))
    run = dataclasses.replace(run_of(corpus, sources), sources=sources[1:])
    with pytest.raises(MergeError, match="takes 2 checkpoints, 1 were given"):
        evaluate(run, store=store)
