"""What all observation rules share, and the plain mean, on real checkpoint folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.merge_folders import folder_of, folders
from workers import merge_rules
from workers.errors import CheckpointCorruptError, CheckpointMissingError, MergeError
from workers.merge import checkpoint_steps, merge, plan_merge
from workers.model import build_model, load_weights
from workers.spec import ModelShape, ObservationRule, RuleName

SHAPE = ModelShape(layers=1, width=16, heads=2, kv_heads=1, ffn_width=24, vocab_size=300, qk_conv_kernel=3)
RAW = ObservationRule(name="raw")
RULES = [
    ObservationRule(name="last_m", m=0, spacing_steps=1),
    ObservationRule(name="one_sqrt", m=0, spacing_steps=1),
    ObservationRule(name="ema", m=0, spacing_steps=1, decay=0.9),
    ObservationRule(name="dare", m=0, spacing_steps=1, density=0.5),
    ObservationRule(name="ties", m=0, spacing_steps=1, density=0.5),
]


def last(m: int) -> ObservationRule:
    return ObservationRule(name="last_m", m=m, spacing_steps=1)


def test_last_m_is_the_mean_of_its_checkpoints(tmp_path: Path) -> None:
    """Base [1, 1] with deltas [4, -1], [-3, 2], [0.5, 1] and weights 1/3 gives [1.5, 1.666667]."""
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
    """In bfloat16 these six come to 1.0078125: each step of the sum is rounded to 1/128."""
    values = [1.0, 1.0078125, 1.0078125, 1.0078125, 1.015625, 1.0234375]
    models = [{"w": torch.tensor([value], dtype=torch.bfloat16)} for value in values]
    (merged,) = dict(merge(folders(tmp_path, models), last(6))).values()
    assert merged.dtype == torch.float32
    assert merged.item() == pytest.approx(1.010417, abs=5e-7)


def test_every_floating_type_is_averaged_and_counters_are_copied_from_the_newest(tmp_path: Path) -> None:
    """B34 (github.com/lucidrains/ema-pytorch/pull/18): bfloat16 was left out of the average, without a word."""
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
    """github.com/atomistic-machine-learning/schnetpack/pull/785: averages for evaluation leaked into training."""
    sources = folders(tmp_path, [{"w": torch.randn(4)} for _ in range(4)])
    before = [file.read_bytes() for source in sources for file in sorted(source.iterdir())]
    for _, tensor in merge(sources, last(4)):
        tensor.zero_()
    assert [file.read_bytes() for source in sources for file in sorted(source.iterdir())] == before


@pytest.mark.parametrize("m", [1, 3])
def test_a_tied_head_follows_the_merged_embedding(tmp_path: Path, m: int) -> None:
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


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"rope_parameters": {"rope_theta": 1e4}}, {"rope_parameters": {"rope_theta": 1e5}}, "rope_theta = 10000.0"),
        ({"rope_parameters": YARN}, {"rope_parameters": YARN | {"factor": 8.0}}, "factor = 4.0"),
        ({"rope_parameters": YARN}, {"rope_parameters": {"rope_theta": 1e4}}, "factor = 4.0"),
        ({"rope_theta": 5e5}, {"rope_theta": 5e6}, "rope_theta = 500000.0"),
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e6}}, "rope_theta = 500000.0"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 1e4}, "factor = 2.0"),
        (
            {"rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}}},
            {"rope_parameters": {"full": {"rope_theta": 1e5}, "sliding": {"rope_theta": 1e4}}},
            "full.rope_theta = 1000000.0",
        ),
    ],
)
def test_checkpoints_that_rotate_positions_differently_are_refused(
    tmp_path: Path, one: dict[str, object], other: dict[str, object], named: str
) -> None:
    """Whichever layout of transformers, 4 or 5, their configs have."""
    weights = {"w": torch.ones(2)}
    sources = [folder_of(tmp_path / "one", weights, config=one), folder_of(tmp_path / "other", weights, config=other)]
    with pytest.raises(MergeError, match=f"rotates positions with {re.escape(named)}"):
        merge(sources, last(2))


def test_both_layouts_of_one_rope_are_one_model(tmp_path: Path) -> None:
    old = {"rope_theta": 10000, "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 4096}}
    weights = {"w": torch.ones(2)}
    sources = [
        folder_of(tmp_path / "old", weights, config=old),
        folder_of(tmp_path / "new", weights, config={"rope_parameters": YARN}),
    ]
    assert torch.equal(dict(merge(sources, last(2)))["w"], torch.ones(2))


def test_a_tensor_that_is_floating_in_one_checkpoint_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MergeError, match=r"w is torch\.int64 in .*0 and torch\.float32"):
        merge(folders(tmp_path, [{"w": torch.ones(2, dtype=torch.int64)}, {"w": torch.ones(2)}]), last(2))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_checkpoints_merge_to_themselves_to_the_last_bit(
    tmp_path: Path, rule: ObservationRule, dtype: torch.dtype
) -> None:
    weights = torch.randn(64, 65, generator=torch.Generator().manual_seed(0)).to(dtype)
    sources = folders(tmp_path, [{"w": weights}] * 5, steps=(1, 2, 4, 7, 11))
    assert torch.equal(dict(merge(sources, rule))["w"], weights.float())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_a_rule_yields_does_not_depend_on_how_tensors_are_cut_into_blocks(
    tmp_path: Path, rule: ObservationRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = [{"w": torch.randn(3, 101, generator=torch.Generator().manual_seed(seed))} for seed in range(4)]
    sources = folders(tmp_path, values, steps=(3, 5, 6, 9))
    whole = dict(merge(sources, rule))["w"]
    monkeypatch.setattr(merge_rules, "BLOCK", 8)
    assert torch.equal(dict(merge(sources, rule))["w"], whole)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_scalars_and_empty_tensors_have_a_place(tmp_path: Path, rule: ObservationRule) -> None:
    sources = folders(tmp_path, [{"scale": torch.tensor(2.0), "none": torch.empty(0, 4)}] * 3, steps=(1, 2, 3))
    found = dict(merge(sources, rule))
    assert (found["scale"].shape, found["scale"].item(), found["none"].shape) == ((), 2.0, (0, 4))


@pytest.mark.parametrize("name", ["one_sqrt", "ema"])
def test_rules_that_weigh_by_steps_need_to_know_them_in_order(tmp_path: Path, name: RuleName) -> None:
    rule = ObservationRule(name=name, m=0, spacing_steps=1, decay=0.5)
    sources = folders(tmp_path, [{"w": torch.ones(1)}] * 3)
    with pytest.raises(MergeError, match=r"no state\.json that tells its optimizer step: give the steps"):
        merge(sources, rule)
    with pytest.raises(MergeError, match="must come oldest first; these are of steps 1, 3, 3"):
        merge(sources, rule, steps=(1, 3, 3))
    with pytest.raises(MergeError, match="3 checkpoints were given, and 2 steps"):
        merge(sources, rule, steps=(1, 3))
    assert dict(merge(sources, rule, steps=(1, 3, 4)))["w"].item() == 1


def test_steps_come_from_our_state_or_from_that_of_transformers_trainer(tmp_path: Path) -> None:
    ours, theirs = folders(tmp_path, [{"w": torch.zeros(1)}, {"w": torch.ones(1)}])
    (ours / "state.json").write_text('{"step": 100}')
    (theirs / "trainer_state.json").write_text('{"global_step": 250}')
    assert checkpoint_steps([ours, theirs]) == (100, 250)
    (theirs / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointCorruptError, match="does not tell a step"):
        checkpoint_steps([ours, theirs])


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ObservationRule(name="ema", m=0, spacing_steps=1), "ema needs a decay above 0 and at most 1, not None"),
        (ObservationRule(name="ema", m=0, decay=0.9), "ema needs spacing_steps"),
        (ObservationRule(name="dare", m=0, density=0.0), "dare needs a density above 0 and at most 1, not 0"),
        (ObservationRule(name="ties", m=0, density=1.1), "ties needs a density above 0 and at most 1, not 1.1"),
    ],
)
def test_a_rule_without_a_usable_parameter_is_refused(tmp_path: Path, rule: ObservationRule, message: str) -> None:
    with pytest.raises(MergeError, match=message):
        merge(folders(tmp_path, [{"w": torch.ones(1)}] * 2, steps=(1, 2)), rule)


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
