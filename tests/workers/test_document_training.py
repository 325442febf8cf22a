"""Training on documents kept apart and on mixtures: the loss is that of each document alone, resumes are exact."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.workers.tiny_training import SHAPE, segment_of, short_stage
from workers.corpus_build import build_corpus
from workers.corpus_sources import FolderSource
from workers.mixture import open_training_data
from workers.model import build_model
from workers.spec import BlendedSource, DataMix, Execution, Segment, SegmentRun, StoredCheckpoint
from workers.train import train


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    store = tmp_path_factory.mktemp("store")
    draw = random.Random(0)
    for number in range(60):
        file = store / "texts" / f"{number}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(draw.choice("abcdefgh \n") for _ in range(draw.choice([8, 25, 60, 300]))))
    manifest = build_corpus(FolderSource(path=store / "texts"), store=store, name="mixed", vocab_size=300)
    return store, manifest.hash


def segment(corpus: str, **options: object) -> Segment:
    blended = BlendedSource(corpus=corpus, split="long", share=0.25)
    data = DataMix(corpus=corpus, split="short", packing="documents", blended=(blended,))
    stage = dataclasses.replace(short_stage(corpus), data=dataclasses.replace(data, **options))  # type: ignore[arg-type]
    return segment_of("short_trunk", stage)


@pytest.mark.parametrize("options", [{}, {"full_length_share": 0.75}, {"copied_spans": 1.0}, {"packing": "stream"}])
def test_first_loss_is_the_mean_over_each_document_alone(
    corpora: tuple[Path, str], options: dict[str, object], tmp_path: Path
) -> None:
    store, corpus = corpora
    (tmp_path / "corpora").symlink_to(store / "corpora")
    trunk = segment(corpus, **options)
    (found,) = train(SegmentRun(segment=trunk, start=None, save_steps=(1,)), store=tmp_path)
    batch = open_training_data(store, trunk.stage.data, seq_len=32).batch(seed=0, first=0, count=2)
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    summed, counted = 0.0, 0
    for row in range(2):
        starts = [0] if batch.positions is None else (batch.positions[row] == 0).nonzero()[0].tolist()
        for begin, end in zip(starts, [*starts[1:], 32], strict=True):
            inputs = torch.from_numpy(batch.inputs[row, begin:end])[None]
            targets = torch.from_numpy(batch.targets[row, begin:end])
            summed += F.cross_entropy(model(input_ids=inputs).logits[0], targets, reduction="sum").item()
            counted += end - begin
    assert counted == trunk.stage_tokens(1) == 64
    assert found.mean_loss == pytest.approx(summed / counted, rel=1e-6)


def test_training_on_documents_is_bit_identical_however_it_is_cut(corpora: tuple[Path, str], tmp_path: Path) -> None:
    store, corpus = corpora
    trunk = segment(corpus, full_length_share=0.5)
    found = []
    for name, cuts, execution in (
        ("whole", ((6,),), Execution()),
        ("cut", ((1,), (3,), (6,)), Execution()),
        ("recomputed", ((6,),), Execution(recompute_activations=True)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "corpora").symlink_to(store / "corpora")
        start: StoredCheckpoint | None = None
        for steps in cuts:
            run = SegmentRun(segment=trunk, start=start, save_steps=steps, execution=execution)
            (checkpoint,) = train(run, store=folder)
            start = StoredCheckpoint(ref=checkpoint.ref, path=checkpoint.path, digest=checkpoint.digest)
        found.append(checkpoint.digest)
    assert found[0] == found[1] == found[2]
