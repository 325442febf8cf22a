"""Merged weights on disk: a Hugging Face folder that transformers loads, equal to what is evaluated without it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.workers.merge_folders import folders
from workers import merged_folder
from workers.errors import MergeError, StoreFullError
from workers.merge import merge
from workers.merged_folder import write_merged
from workers.spec import ObservationRule

LAST = ObservationRule(name="last_m", m=0)
RULES = [
    LAST,
    ObservationRule(name="one_sqrt", m=0, spacing_steps=10),
    ObservationRule(name="ema", m=0, spacing_steps=10, decay=0.9),
    ObservationRule(name="dare", m=0, density=0.5),
    ObservationRule(name="ties", m=0, density=0.5),
]
STEPS = (10, 20, 30)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three checkpoints of a small Llama with tied embeddings, as transformers saves them."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    sources = []
    for step in STEPS:
        sources.append(tmp_path_factory.mktemp(f"step-{step}"))
        model.save_pretrained(sources[-1])
        (sources[-1] / "tokenizer.json").write_text(f'"of step {step}"')
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return sources


def loaded(folder: Path) -> LlamaForCausalLM:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_transformers_loads_it_with_a_tied_head_and_the_weights_that_are_evaluated(
    tied: list[Path], rule: ObservationRule, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """github.com/huggingface/transformers/issues/30202: heads that share the embedding were lost on the way."""
    with caplog.at_level(logging.WARNING):
        model = loaded(write_merged(tied, rule, tmp_path / "out", steps=STEPS).folder)
    assert "newly initialized" not in caplog.text
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    weights = dict(model.named_parameters())
    evaluated = dict(merge(tied, rule, steps=STEPS))
    assert weights.keys() == evaluated.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in evaluated.items())


def test_the_raw_checkpoint_written_anew_gives_its_logits(tied: list[Path], tmp_path: Path) -> None:
    write_merged(tied[-1:], ObservationRule(name="raw"), tmp_path / "out")
    ids = torch.arange(16)[None]
    assert torch.equal(loaded(tmp_path / "out")(ids).logits, loaded(tied[-1])(ids).logits)


def test_config_and_tokenizer_are_the_newest_checkpoints(tied: list[Path], tmp_path: Path) -> None:
    write_merged(tied, LAST, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '"of step 30"'
    written, newest = (json.loads((folder / "config.json").read_bytes()) for folder in (tmp_path / "out", tied[-1]))
    assert written == newest


def test_shards_hold_what_one_file_holds(tied: list[Path], tmp_path: Path) -> None:
    whole = write_merged(tied, LAST, tmp_path / "whole")
    cut = write_merged(tied, LAST, tmp_path / "cut", shard_bytes=3_000)
    assert whole.files == ("model.safetensors",)
    assert len(cut.files) > 2
    assert cut.files[0] == f"model-00001-of-{len(cut.files):05d}.safetensors"
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == cut.size_bytes == whole.size_bytes
    shards = [load_file(tmp_path / "cut" / file) for file in cut.files]
    sizes = [sum(tensor.nbytes for tensor in shard.values()) for shard in shards]
    assert all(size <= 3_000 or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    found = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert loaded(tmp_path / "cut").config.vocab_size == 64


def test_a_type_can_be_chosen_and_is_else_the_checkpoints(tmp_path: Path) -> None:
    values = [
        {"w": torch.tensor([value]).bfloat16(), "norm": torch.tensor([value]), "count": torch.tensor([3])}
        for value in (1.0, 1.0078125)
    ]
    sources = folders(tmp_path, values)
    same = load_file(write_merged(sources, LAST, tmp_path / "same").folder / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in same.items()} == {
        "w": torch.bfloat16,
        "norm": torch.float32,
        "count": torch.int64,
    }
    wide = load_file(write_merged(sources, LAST, tmp_path / "wide", dtype=torch.float32).folder / "model.safetensors")
    assert wide["w"].item() == 1.00390625
    assert wide["count"].dtype == torch.int64
    assert json.loads((tmp_path / "wide" / "config.json").read_bytes())["dtype"] == "float32"


def test_progress_ends_with_all_bytes(tied: list[Path], tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    written = write_merged(tied, LAST, tmp_path / "out", on_progress=lambda *state: seen.append(state))
    assert [name for name, _, _ in seen] == sorted((*written.averaged, *written.copied))
    assert seen[-1][1:] == (written.size_bytes, written.size_bytes)


def test_an_existing_folder_is_left_alone(tied: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(MergeError, match="exists already"):
        write_merged(tied, LAST, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("problem", ["full", "refused"])
def test_a_failed_merge_leaves_nothing(
    tied: list[Path], tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if problem == "refused":
        with pytest.raises(MergeError, match="must come oldest first"):
            write_merged(tied, RULES[1], tmp_path / "out", steps=STEPS[::-1])
    else:
        full = Path("/dev/full")  # the kernel's file that never has space
        monkeypatch.setattr(merged_folder, "WEIGHTS", str(full))
        with pytest.raises(StoreFullError, match="no space left"):
            write_merged(tied, LAST, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rule", [LAST, *RULES[-2:]], ids=lambda rule: rule.name)
def test_memory_stays_below_one_tensor(rule: ObservationRule, tmp_path: Path) -> None:
    """Three checkpoints of one tensor of 32 MiB; the kernel's own count of what was resident at most."""
    values: Sequence[dict[str, torch.Tensor]] = [{"w": torch.full((2**23,), float(value))} for value in range(3)]
    sources = folders(tmp_path, values)
    del values
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now
    before = _kib(status, "VmHWM")
    write_merged(sources, rule, tmp_path / "out", steps=STEPS)
    assert _kib(status, "VmHWM") - before < 2**15


def _kib(status: Path, field: str) -> int:
    return int(next(line for line in status.read_text().splitlines() if line.startswith(field)).split()[1])
