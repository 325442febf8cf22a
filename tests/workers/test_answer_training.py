"""Training on answers alone: losses and gradients are theirs, however a batch is cut, shared out or resumed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.workers.test_processes import elsewhere, losses_of, run_of, together
from tests.workers.tiny_training import SHAPE, segment_of, short_stage, tiny_answers, tiny_corpus
from workers.answers import IGNORED
from workers.mixture import TrainingData, open_training_data
from workers.model import build_model
from workers.processes import current
from workers.results import Checkpoint
from workers.spec import AdamW, BlendedSource, DataMix, Packing, Segment, SegmentRun, StoredCheckpoint
from workers.train import train
from workers.trainee import prepare


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A store, a corpus of text in it, and one of prompts with answers."""
    store = tmp_path_factory.mktemp("store")
    plain = tiny_corpus(store)
    return store, plain, tiny_answers(store, plain)


def segment(
    corpora: tuple[Path, str, str],
    *,
    seq_len: int = 32,
    batch_sequences: int = 8,
    z_loss: float = 0.0,
    blended: float = 0.0,
    packing: Packing = "stream",
) -> Segment:
    _, plain, answers = corpora
    parts = (BlendedSource(corpus=plain, split="short", share=blended),) if blended else ()
    data = DataMix(corpus=answers, split="short", packing=packing, blended=parts)
    stage = dataclasses.replace(
        short_stage(answers), seq_len=seq_len, batch_sequences=batch_sequences, z_loss=z_loss, data=data
    )
    return segment_of("short_trunk", stage)


def data_of(corpora: tuple[Path, str, str], trunk: Segment) -> TrainingData:
    return open_training_data(corpora[0], trunk.stage.data, seq_len=trunk.stage.seq_len)


@pytest.mark.parametrize(
    "options", [{"packing": "stream"}, {"packing": "documents"}, {"packing": "documents", "blended": 0.25}]
)
def test_first_loss_is_the_mean_over_the_answers(
    corpora: tuple[Path, str, str], options: dict[str, Any], tmp_path: Path
) -> None:
    """By Hugging Face's model, document by document, one target at a time."""
    trunk = segment(corpora, **options)
    (found,) = train(SegmentRun(segment=trunk, start=None, save_steps=(1,)), store=elsewhere(corpora[0], tmp_path))
    batch = data_of(corpora, trunk).batch(seed=0, first=0, count=8)
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    losses = []
    for row in range(8):
        starts = [0] if batch.positions is None else (batch.positions[row] == 0).nonzero()[0].tolist()
        for begin, end in zip(starts, [*starts[1:], 32], strict=True):
            logits = model(input_ids=torch.from_numpy(batch.inputs[row, begin:end])[None]).logits[0]
            for at, target in enumerate(batch.targets[row, begin:end]):
                if target != IGNORED:
                    losses.append(F.cross_entropy(logits[at], torch.tensor(target)).item())
    assert 0 < len(losses) < 256
    assert found.mean_loss == pytest.approx(sum(losses) / len(losses), rel=1e-6)
    assert found.stage_tokens == 256  # inputs, whether or not their targets count


def test_targets_in_a_prompt_change_no_gradient(corpora: tuple[Path, str, str]) -> None:
    """The gradients are those of the answers' mean loss alone, and no other token becomes a target."""
    trunk = segment(corpora, z_loss=0.01)
    unclipped = dataclasses.replace(trunk.stage, optimizer=AdamW(clip_norm=1e9))
    run = SegmentRun(segment=dataclasses.replace(trunk, stage=unclipped), start=None, save_steps=(1,))
    data = data_of(corpora, trunk)
    trainee = prepare(run, data, store=corpora[0], group=current())
    trainee.gradients(0)

    batch = data.batch(seed=0, first=0, count=8)
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    counted = torch.from_numpy(batch.targets) != IGNORED
    logits = model(input_ids=torch.from_numpy(batch.inputs)).logits[counted]
    answers = torch.from_numpy(batch.targets)[counted]
    (F.cross_entropy(logits, answers) + 0.01 * logits.logsumexp(1).square().mean()).backward()
    for (name, ours), (_, theirs) in zip(trainee.model.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=name)

    (source,) = data.sources
    assert source.answers is not None
    tokens = np.array(source.tokens)
    prompts = ~source.answers.of(0, len(tokens))
    tokens[prompts] = (tokens[prompts] + 7) % SHAPE.vocab_size
    other = dataclasses.replace(data, sources=(dataclasses.replace(source, tokens=tokens),))
    changed = other.batch(seed=0, first=0, count=8)
    assert np.array_equal(changed.targets, batch.targets)
    assert not np.array_equal(changed.inputs, batch.inputs)


def test_halves_with_different_numbers_of_answers_make_one_mean(corpora: tuple[Path, str, str], tmp_path: Path) -> None:
    """Two replicas, and micro-batches of one sequence, train what one process does that takes the batch as a whole."""
    trunk = segment(corpora, z_loss=1e-3)
    data = data_of(corpora, trunk)
    halves = [data.counted_targets(seed=0, first=first, count=4) for first in range(0, 48, 4)]
    assert any(one > 2 * other for one, other in zip(halves[::2], halves[1::2], strict=True))
    homes = [tmp_path / name for name in ("alone", "cut", "two")]
    for home in homes:
        home.mkdir()
        elsewhere(corpora[0], home)
    alone = list(train(run_of(trunk), store=homes[0]))
    cut = list(train(run_of(trunk, micro_batch_tokens=32), store=homes[1]))
    ends = together(run_of(trunk, processes=2), homes[2])
    assert ends[0] == ends[1]
    for found in (cut, ends[0]):
        assert losses_of(found) == pytest.approx(losses_of(alone), rel=1e-5)
        assert norms_of(found) == pytest.approx(norms_of(alone), rel=1e-5)


def norms_of(found: list[Checkpoint]) -> list[float]:
    return [point.gradient_norm for one in found for point in one.health]


def cut_runs(trunk: Segment, store: Path, cuts: tuple[tuple[int, ...], ...], **execution: Any) -> list[Checkpoint]:
    """One run after another, each from where the last one ended."""
    found: list[Checkpoint] = []
    for steps in cuts:
        start = StoredCheckpoint(ref=found[-1].ref, path=found[-1].path, digest=found[-1].digest) if found else None
        run = dataclasses.replace(run_of(trunk, **execution), start=start, save_steps=steps)
        found += together(run, store)[0] if execution else train(run, store=store)
    return found


def test_a_resume_is_bit_identical(corpora: tuple[Path, str, str], tmp_path: Path) -> None:
    trunk = segment(corpora, batch_sequences=2, packing="documents")
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = cut_runs(trunk, elsewhere(corpora[0], tmp_path / "whole"), ((6,),))
    cut = cut_runs(trunk, elsewhere(corpora[0], tmp_path / "cut"), ((1,), (4,), (6,)))
    assert whole[-1].digest == cut[-1].digest


@pytest.fixture(scope="module")
def sparse(corpora: tuple[Path, str, str]) -> tuple[Segment, list[int]]:
    """Batches of two short sequences, the first of which has no answer, and how many each has."""
    trunk = segment(corpora, seq_len=16, batch_sequences=2)
    for seed in range(50):
        trunk = dataclasses.replace(trunk, seed=seed)
        data = data_of(corpora, trunk)
        counts = [data.counted_targets(seed=seed, first=first, count=2) for first in range(0, 12, 2)]
        if counts[0] == 0 and counts[3] == 0 and all(counts[index] for index in (1, 2, 4, 5)):
            return trunk, counts
    raise AssertionError("no order begins so")


def test_an_update_without_any_answer_moves_nothing(
    corpora: tuple[Path, str, str], sparse: tuple[Segment, list[int]], tmp_path: Path
) -> None:
    """Its tokens count, its loss is not told, and the next one goes on from what was: weights, moments and all."""
    trunk, _ = sparse
    store = elsewhere(corpora[0], tmp_path)
    found = list(train(dataclasses.replace(run_of(trunk), save_steps=(1, 3, 4, 6)), store=store))
    assert [one.mean_loss is None for one in found] == [True, False, True, False]
    assert [[point.step for point in one.health] for one in found] == [[], [2, 3], [], [5, 6]]
    assert [one.stage_tokens for one in found] == [32, 96, 128, 192]
    files = [store / one.path for one in found]
    assert (files[1] / "model.safetensors").read_bytes() == (files[2] / "model.safetensors").read_bytes()
    assert (files[1] / "optimizer.safetensors").read_bytes() == (files[2] / "optimizer.safetensors").read_bytes()


def test_a_run_resumes_from_before_its_first_update(
    corpora: tuple[Path, str, str], sparse: tuple[Segment, list[int]], tmp_path: Path
) -> None:
    """A checkpoint after batches without an answer holds no moments yet, in one file or in parts."""
    trunk, _ = sparse
    homes = [tmp_path / name for name in ("whole", "cut", "shards")]
    for home in homes:
        home.mkdir()
        elsewhere(corpora[0], home)
    whole = cut_runs(trunk, homes[0], ((3,),))
    cut = cut_runs(trunk, homes[1], ((1,), (3,)))
    assert whole[-1].digest == cut[-1].digest
    shards = cut_runs(trunk, homes[2], ((1,), (3,)), processes=2, sharding="shard")
    assert losses_of(shards) == pytest.approx(losses_of(whole), rel=1e-5)
