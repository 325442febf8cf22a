"""Training that begins at a folder's model: its weights, its architecture, its config, our RoPE."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereForCausalLM, PhiForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.workers.test_folder_model import SIZES
from tests.workers.tiny_training import SHAPE, long_stage, tiny_corpus
from workers.errors import ModelMismatchError
from workers.folder_model import add_model
from workers.model import built_rope_base
from workers.spec import FolderModel, Segment, SegmentRun, StoredCheckpoint
from workers.train import train


@pytest.fixture
def released(tmp_path: Path) -> FolderModel:
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": SHAPE.vocab_size}
    Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)).save_pretrained(tmp_path / "qwen")
    return add_model(tmp_path / "qwen", tmp_path / "store")


@pytest.mark.parametrize("horizon_steps", [None, 6])
def test_training_goes_on_from_the_folders_weights_and_resumes_bit_by_bit(
    released: FolderModel, tmp_path: Path, horizon_steps: int | None
) -> None:
    store = tmp_path / "store"
    stage = dataclasses.replace(
        long_stage(tiny_corpus(store), final_rate_ratio=1.0 if horizon_steps is None else 0.1), warmup_steps=0
    )
    segment = Segment(
        kind="long_constant" if horizon_steps is None else "long_linear_decay",
        parent=None,
        shape=released,
        stage=stage,
        seed=3,
        horizon_steps=horizon_steps,
    )
    first, last = train(SegmentRun(segment=segment, start=None, save_steps=(4, 6)), store=store)
    folder = store / first.path
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen2"
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert built_rope_base(model) == pytest.approx(stage.rope_base, rel=1e-5)
    source = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen")
    moved = [(model.get_parameter(name) - weight).abs().max() for name, weight in source.named_parameters()]
    assert 0 < max(moved) < 4 * 1.5 * stage.start_rate  # no weight moves further than its rate at each step

    start = StoredCheckpoint(ref=first.ref, path=first.path, digest=first.digest)
    (store / last.path).rename(tmp_path / "aside")
    (again,) = train(SegmentRun(segment=segment, start=start, save_steps=(6,)), store=store)
    assert again.digest == last.digest


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (PhiForCausalLM, {"partial_rotary_factor": 0.5}, "bias at its head"),
        (CohereForCausalLM, {"logit_scale": 0.25}, "changes its logits after the head"),
    ],
)
def test_a_model_whose_loss_is_more_than_its_head_s_weight_is_not_trained(
    tmp_path: Path, kind: Any, changes: dict[str, Any], message: str
) -> None:
    """Its gradients would be those of another objective."""
    torch.manual_seed(0)
    store = tmp_path / "store"
    sizes = SIZES | {"vocab_size": SHAPE.vocab_size, "pad_token_id": None}
    kind(kind.config_class(**sizes, **changes)).save_pretrained(tmp_path / "other")
    shape = add_model(tmp_path / "other", store)
    stage = long_stage(tiny_corpus(store))
    segment = Segment(kind="long_constant", parent=None, shape=shape, stage=stage, seed=0)
    with pytest.raises(ModelMismatchError, match=message):
        next(train(SegmentRun(segment=segment, start=None, save_steps=(1,)), store=store))
