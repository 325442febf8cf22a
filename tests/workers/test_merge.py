"""Observation rules on real checkpoint folders: B32, B34, B40, B41 and the linear oracles of section 2.8."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.workers.tiny_training import SHAPE
from workers.errors import CheckpointCorruptError, CheckpointMissingError, MergeError
from workers.merge import merge, plan_merge
from workers.model import build_model, load_weights
from workers.spec import ObservationRule

RAW = ObservationRule(name="raw")


def last(m: int) -> ObservationRule:
    return ObservationRule(name="last_m", m=m, spacing_steps=1)


def folder_of(path: Path, tensors: dict[str, Tensor], rope_base: float = 1e4) -> Path:
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"rope_parameters": {"rope_theta": rope_base}}))
    return path


def folders(tmp_path: Path, values: Sequence[dict[str, Tensor]]) -> list[Path]:
    return [folder_of(tmp_path / str(index), tensors) for index, tensors in enumerate(values)]


def test_last_m_is_the_mean_of_its_checkpoints(tmp_path: Path) -> None:
    """Section 2.8: base [1, 1] with deltas [4, -1], [-3, 2], [0.5, 1] and weights 1/3 gives [1.5, 1.666667]."""
    models = [{"w": torch.tensor(value)} for value in ([5.0, 0.0], [-2.0, 3.0], [1.5, 2.0])]
    merged = dict(merge(folders(tmp_path, models), last(3)))
    torch.testing.assert_close(merged["w"], torch.tensor([1.5, 5 / 3]), rtol=1e-7, atol=0)


def test_raw_is_the_checkpoint_itself(tmp_path: Path) -> None:
    weights = torch.randn(7, 5)
    merged = dict(merge(folders(tmp_path, [{"w": weights}]), RAW))
    assert torch.equal(merged["w"], weights)


@pytest.mark.parametrize("m", [2, 3, 4, 7])
def test_the_mean_of_equal_checkpoints_is_the_checkpoint_to_the_last_bit(tmp_path: Path, m: int) -> None:
    weights = torch.randn(64, 64)
    merged = dict(merge(folders(tmp_path, [{"w": weights}] * m), last(m)))
    assert torch.equal(merged["w"], weights)


def test_bfloat16_checkpoints_are_averaged_in_a_wider_type(tmp_path: Path) -> None:
    """B32 for a plain mean; section 2.5: in bfloat16 these six come to 1.0078125."""
    values = [1.0, 1.0078125, 1.0078125, 1.0078125, 1.015625, 1.0234375]
    models = [{"w": torch.tensor([value], dtype=torch.bfloat16)} for value in values]
    (merged,) = dict(merge(folders(tmp_path, models), last(6))).values()
    assert merged.dtype == torch.float32
    assert merged.item() == pytest.approx(1.010417, abs=5e-7)


def test_every_floating_type_is_averaged_and_counters_are_copied_from_the_newest(tmp_path: Path) -> None:
    """B34."""
    models = [
        {
            "norm": torch.full((3,), float(value)),
            "linear": torch.full((2, 2), float(value), dtype=torch.bfloat16),
            "half": torch.full((2,), float(value), dtype=torch.float16),
            "steps": torch.tensor([value], dtype=torch.int64),
            "flag": torch.tensor([value > 1]),
        }
        for value in (1, 3)
    ]
    sources = folders(tmp_path, models)
    plan = plan_merge(sources, last(2))
    merged = dict(merge(sources, last(2)))
    assert (merged["norm"] == 2).all()
    assert (merged["linear"] == 2).all()
    assert (merged["half"] == 2).all()
    assert merged["steps"].item() == 3
    assert merged["steps"].dtype == torch.int64
    assert merged["flag"].item() is True
    assert plan.averaged == ("half", "linear", "norm")
    assert plan.copied == ("flag", "steps")
    assert len(plan.averaged) + len(plan.copied) == len(merged) == 5


def test_merging_leaves_the_checkpoints_that_training_continues_from_untouched(tmp_path: Path) -> None:
    """B40."""
    sources = folders(tmp_path, [{"w": torch.randn(4)} for _ in range(4)])
    before = [file.read_bytes() for source in sources for file in sorted(source.iterdir())]
    for _, tensor in merge(sources, last(4)):
        tensor.zero_()
    assert [file.read_bytes() for source in sources for file in sorted(source.iterdir())] == before


@pytest.mark.parametrize("m", [1, 3])
def test_a_tied_head_follows_the_merged_embedding(tmp_path: Path, m: int) -> None:
    """B41."""
    models = [build_model(SHAPE, rope_base=1e4, max_positions=32, seed=seed) for seed in range(m)]
    sources = []
    for index, model in enumerate(models):
        sources.append(folder_of(tmp_path / str(index), {name: p.detach() for name, p in model.named_parameters()}))
    merged: LlamaForCausalLM = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=99)
    load_weights(merged, merge(sources, last(m) if m > 1 else RAW))
    assert merged.lm_head.weight.data_ptr() == merged.model.embed_tokens.weight.data_ptr()
    mean = torch.stack([model.model.embed_tokens.weight.detach().double() for model in models]).mean(0).float()
    assert torch.equal(merged.model.embed_tokens.weight.detach(), mean)
    if m == 1:
        ids = torch.arange(16)[None]
        assert torch.equal(merged(input_ids=ids).logits, models[0](input_ids=ids).logits)


def test_checkpoints_with_other_tensors_are_refused_by_name(tmp_path: Path) -> None:
    sources = folders(tmp_path, [{"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(2), "c": torch.ones(2)}])
    with pytest.raises(MergeError, match="do not hold the same tensors: b, c"):
        merge(sources, last(2))


def test_checkpoints_with_other_dimensions_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match="embed has other dimensions"):
        merge(folders(tmp_path, [{"embed": torch.ones(3, 2)}, {"embed": torch.ones(4, 2)}]), last(2))


def test_checkpoints_with_other_rope_bases_are_refused(tmp_path: Path) -> None:
    sources = [folder_of(tmp_path / str(base), {"w": torch.ones(2)}, base) for base in (1e4, 1e5)]
    with pytest.raises(MergeError, match="rotates positions with"):
        merge(sources, last(2))


def test_a_rule_takes_exactly_its_number_of_checkpoints(tmp_path: Path) -> None:
    sources = folders(tmp_path, [{"w": torch.ones(1)}] * 3)
    with pytest.raises(MergeError, match="takes 4 checkpoints, 3 were given"):
        merge(sources, last(4))
    with pytest.raises(MergeError, match="takes 1 checkpoints, 3 were given"):
        merge(sources, RAW)


def test_missing_and_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissingError, match=r"nowhere holds no model\.safetensors"):
        merge([tmp_path / "nowhere"], RAW)
    (source,) = folders(tmp_path, [{"w": torch.ones(64)}])
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointCorruptError, match="unreadable"):
        merge([source], RAW)
