"""Snapshots that are probed and measured without their weights being written: merged ones, and those of a folder."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, PreTrainedModel

from tests.workers.tiny_evaluation import LENGTH, evaluator_of, model_folder, repeating_corpus
from tests.workers.tiny_training import SHAPE, long_stage, segment_of
from workers import checkpoint
from workers.corpus import Corpus
from workers.documents import evaluation_windows
from workers.errors import DivergedError, MeasurementError
from workers.folder_model import add_model
from workers.longppl import evaluate, snapshot_model
from workers.model import build_model, open_model
from workers.probe_spec import NeedleLoss, Passkey, PositionLoss, ProbeRun, ProbeSet, RetrievalHeads, Ruler
from workers.probes import evaluate_probes, run_probes
from workers.spec import (
    EvaluationDocuments,
    EvaluationRun,
    FolderModel,
    ModelShape,
    ObservationRule,
    Snapshot,
    StoredCheckpoint,
    Yarn,
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return repeating_corpus(tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(corpus: Corpus, tmp_path: Path) -> Path:
    shutil.copytree(corpus.path, tmp_path / "corpora" / corpus.hash)
    return tmp_path


def saved(store: Path, corpus: Corpus, models: list[PreTrainedModel]) -> tuple[StoredCheckpoint, ...]:
    """Checkpoints of one segment, ten steps apart, that hold these models."""
    segment = segment_of("long_constant", long_stage(corpus.hash))
    found = []
    for index, model in enumerate(models, start=1):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
        model(input_ids=torch.arange(8)[None]).logits.sum().backward()
        optimizer.step()
        found.append(checkpoint.write(store, segment, index * 10, model=model, optimizers=(optimizer,))[0])
    return tuple(found)


def snapshot_of(sources: tuple[StoredCheckpoint, ...]) -> Snapshot:
    m = len(sources)
    rule = ObservationRule(name="last_m", m=m, spacing_steps=10) if m > 1 else ObservationRule(name="raw")
    return Snapshot(segment=sources[-1].ref.segment, step=sources[-1].ref.step, rule=rule)


def probe_run(
    corpus: Corpus, sources: tuple[StoredCheckpoint, ...], shape: ModelShape | FolderModel = SHAPE
) -> ProbeRun:
    probe_set = ProbeSet(
        documents=EvaluationDocuments(corpus=corpus.hash, count=4, length=LENGTH),
        probes=(
            PositionLoss(),
            Passkey(lengths=(LENGTH,), depths=(0.5,), samples=2),
            NeedleLoss(lengths=(256,), depths=(0.5,), samples=2, distractors=2),
            RetrievalHeads(length=160, depths=(0.5,), samples=2, tracked=("0.1",)),
            Ruler(length=520, tasks=("niah_single_1",), samples=1),
        ),
    )
    return ProbeRun(snapshot=snapshot_of(sources), sources=sources, probe_set=probe_set, shape=shape, rope_base=1e5)


def models(seeds: tuple[int, ...]) -> list[PreTrainedModel]:
    return [build_model(SHAPE, rope_base=1e5, max_positions=LENGTH, seed=seed) for seed in seeds]


def test_a_merged_snapshot_is_probed_as_the_averaged_model(corpus: Corpus, store: Path) -> None:
    ends = models((1, 2))
    run = probe_run(corpus, saved(store, corpus, ends))
    mean = build_model(SHAPE, rope_base=1e5, max_positions=512, seed=0)
    with torch.no_grad():
        for parameter, first, second in zip(*(model.parameters() for model in (mean, *ends)), strict=True):
            parameter.copy_((first + second) / 2)
    windows = evaluation_windows(corpus, run.probe_set.documents)
    expected = run_probes(mean, corpus.tokenizer, run.probe_set, windows=windows)
    files = sorted(store.rglob("*.safetensors"))
    found = evaluate_probes(run, store=store)
    assert sorted(store.rglob("*.safetensors")) == files
    assert [dataclasses.replace(metric, value=0.0) for metric in found] == [
        dataclasses.replace(metric, value=0.0) for metric in expected
    ]
    np.testing.assert_allclose(
        [metric.value for metric in found], [metric.value for metric in expected], rtol=1e-4, atol=1e-5
    )
    assert {metric.name for metric in found} >= {
        "position_loss",
        "passkey_accuracy",
        "needle_nll",
        "needle_rank",
        "retrieval_heads",
        "retrieval_head_score",
        "ruler_score",
    }


def test_a_probe_that_finds_no_number_is_a_divergence_with_its_step(corpus: Corpus, store: Path) -> None:
    (model,) = models((1,))
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.inf)
    run = probe_run(corpus, saved(store, corpus, [model]))
    with pytest.raises(DivergedError, match="at step 10"):
        evaluate_probes(run, store=store)


def test_a_model_from_a_folder_is_measured_with_its_checkpoint_s_weights_and_the_run_s_rope(
    corpus: Corpus, store: Path, tmp_path: Path
) -> None:
    shape = add_model(model_folder(tmp_path / "found", corpus.tokenizer), store)
    model = open_model(shape, rope_base=1e5, max_positions=LENGTH, store=store, seed=0)
    sources = saved(store, corpus, [model])
    run = EvaluationRun(
        snapshot=snapshot_of(sources),
        sources=sources,
        evaluator=evaluator_of(corpus),
        shape=shape,
        rope_base=1e5,
    )
    found = evaluate(run, store=store)
    assert found.log_longppl is not None
    ids = torch.from_numpy(evaluation_windows(corpus, run.evaluator.documents)[0].tokens)[None]
    model.eval()
    with torch.inference_mode():
        built = snapshot_model(run, store=store, max_positions=LENGTH)
        torch.testing.assert_close(built(input_ids=ids).logits, model(input_ids=ids).logits, rtol=0, atol=1e-5)
        stretched = dataclasses.replace(run, yarn=Yarn(factor=4.0, original_positions=32))
        other = snapshot_model(stretched, store=store, max_positions=LENGTH)(input_ids=ids).logits
    assert not torch.allclose(other, model(input_ids=ids).logits, atol=1e-3)
    assert len(evaluate_probes(probe_run(corpus, sources, shape), store=store)) > 10


def test_a_folder_s_model_that_changes_its_logits_after_the_head_is_refused(
    corpus: Corpus, store: Path, tmp_path: Path
) -> None:
    """Losses from the head alone would be those of another model."""
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        logit_scale=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    CohereForCausalLM(config).save_pretrained(tmp_path / "scaled")
    shape = add_model(tmp_path / "scaled", store)
    sources = saved(store, corpus, [open_model(shape, rope_base=1e5, max_positions=LENGTH, store=store, seed=0)])
    run = EvaluationRun(
        snapshot=snapshot_of(sources), sources=sources, evaluator=evaluator_of(corpus), shape=shape, rope_base=1e5
    )
    with pytest.raises(MeasurementError, match="changes its logits after the head"):
        evaluate(run, store=store)


def test_what_is_measured_otherwise_has_another_name(corpus: Corpus) -> None:
    """B52: one checkpoint at two context lengths is two evaluations, and so it is for all that decides the numbers."""
    base = evaluator_of(corpus)
    others = [
        dataclasses.replace(base, documents=dataclasses.replace(base.documents, length=2 * LENGTH)),
        dataclasses.replace(base, documents=dataclasses.replace(base.documents, min_length=LENGTH)),
        dataclasses.replace(base, documents=dataclasses.replace(base.documents, corpus="0" * 32)),
        dataclasses.replace(base, chunking=dataclasses.replace(base.chunking, stride=4)),
        dataclasses.replace(base, chunking=dataclasses.replace(base.chunking, mode="pku")),
        dataclasses.replace(base, reference=dataclasses.replace(base.reference, digest="0" * 32)),
        dataclasses.replace(base, gain_threshold=2.5),
        dataclasses.replace(base, full_nll_ceiling=2.5),
    ]
    assert len({item.id for item in [base, *others]}) == 1 + len(others)
