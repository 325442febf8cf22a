"""Models from elsewhere: counted, kept by digest, opened with another RoPE, and never trusted."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
)

from tests.workers.tiny_training import SHAPE
from workers.errors import ModelMismatchError, ModelMissingError
from workers.folder_model import add_model, own_rope
from workers.model import build_model, built_rope_base, check_model, open_model
from workers.rope import inverse_frequencies, ntk_base
from workers.spec import FolderModel, Yarn

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: Of SIZES as a Llama: attention 16 x (16 + 8 + 8 + 16), feed-forward 3 x 16 x 24, two norms; and the last norm.
LLAMA_N = 2 * (768 + 1152 + 32) + 16
QWEN_N = LLAMA_N + 2 * (16 + 8 + 8)  # biases of queries, keys and values


def llama_folder(folder: Path, *, tied: bool = False, base: float = 5e5, **rope: Any) -> Path:
    torch.manual_seed(0)
    rope_parameters = {"rope_type": "default", "rope_theta": base} | rope
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied, rope_parameters=rope_parameters)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def opened(shape: FolderModel, store: Path, base: float = 5e6, yarn: Yarn | None = None) -> Any:
    return open_model(shape, rope_base=base, yarn=yarn, max_positions=256, store=store, seed=0)


@pytest.mark.parametrize("tied", [False, True])
def test_model_is_counted_from_its_weights(tmp_path: Path, tied: bool) -> None:
    shape = add_model(llama_folder(tmp_path / "released", tied=tied), tmp_path / "store")
    embeddings = 50 * 16 * (1 if tied else 2)
    assert (shape.n_params, shape.embedding_params) == (LLAMA_N, embeddings)
    assert (shape.layers, shape.width, shape.vocab_size) == (2, 16, 50)


def test_another_architecture_is_counted_as_it_is_and_takes_the_base(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).save_pretrained(tmp_path / "qwen")
    shape = add_model(tmp_path / "qwen", tmp_path / "store")
    assert shape.n_params == QWEN_N
    assert built_rope_base(opened(shape, tmp_path / "store")) == pytest.approx(5e6, rel=1e-5)


def test_digest_is_that_of_the_content_wherever_it_lies(tmp_path: Path) -> None:
    first = add_model(llama_folder(tmp_path / "a"), tmp_path / "store")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "README.md").write_text("not a part of the model")
    assert add_model(tmp_path / "b", tmp_path / "store") == first
    assert add_model(llama_folder(tmp_path / "c", base=1e4), tmp_path / "store").digest != first.digest


def test_opened_model_has_the_weights_of_the_folder_and_the_base_asked_for(tmp_path: Path) -> None:
    folder = llama_folder(tmp_path / "released")
    store = tmp_path / "store"
    model = opened(add_model(folder, store), store)
    source = AutoModelForCausalLM.from_pretrained(folder)
    assert built_rope_base(source) == pytest.approx(5e5, rel=1e-5)
    assert built_rope_base(model) == pytest.approx(5e6, rel=1e-5)
    for name, parameter in source.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    assert model.config.max_position_embeddings == 256
    assert next(model.parameters()).dtype is torch.float32


@pytest.mark.parametrize("yarn", [None, Yarn(factor=4.0, original_positions=64)])
def test_reload_without_our_code_rotates_alike(tmp_path: Path, yarn: Yarn | None) -> None:
    store = tmp_path / "store"
    shape = add_model(llama_folder(tmp_path / "released"), store)
    opened(shape, store, yarn=yarn).save_pretrained(tmp_path / "trained")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    check_model(again, shape, rope_base=5e6, yarn=yarn)
    assert again.config.max_position_embeddings == 256


def test_config_as_older_libraries_wrote_it_does_not_keep_its_base(tmp_path: Path) -> None:
    """`rope_theta` at the top level, and interpolation in `rope_scaling`: both are converted on load, and must go."""
    folder = llama_folder(tmp_path / "released")
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config |= {
        "rope_theta": 1e4,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    shape = add_model(folder, tmp_path / "store")
    assert own_rope(folder) == (8, 1e4)
    assert built_rope_base(opened(shape, tmp_path / "store")) == pytest.approx(5e6, rel=1e-5)


def test_settings_that_the_library_ignores_are_caught_by_the_built_frequencies(tmp_path: Path) -> None:
    """What looks like a change of the base and is none: silent there, an error of ours."""
    folder = llama_folder(tmp_path / "released")
    shape = add_model(folder, tmp_path / "store")
    config = AutoConfig.from_pretrained(folder, rope_theta=5e6)
    with pytest.raises(ModelMismatchError, match=r"rotates with base 500000"):
        check_model(AutoModelForCausalLM.from_config(config), shape, rope_base=5e6)
    config = AutoConfig.from_pretrained(folder)
    config.rope_theta = 5e6
    with pytest.raises(ModelMismatchError, match=r"rotates with base 500000"):
        check_model(AutoModelForCausalLM.from_config(config), shape, rope_base=5e6)
    changed_too_late = AutoModelForCausalLM.from_pretrained(folder)
    changed_too_late.config.rope_parameters["rope_theta"] = 5e6
    with pytest.raises(ModelMismatchError, match=r"rotates with base 500000"):
        check_model(changed_too_late, shape, rope_base=5e6)
    changed_too_late.save_pretrained(tmp_path / "saved")  # which keeps the base that it never rotated with
    with pytest.raises(ModelMismatchError, match=r"rotates with base 5e\+06"):
        check_model(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"), shape, rope_base=5e5)


def test_weights_kept_in_half_precision_are_trained_in_full(tmp_path: Path) -> None:
    """The library opens a model in the precision it was saved in."""
    folder = llama_folder(tmp_path / "released")
    AutoModelForCausalLM.from_pretrained(folder).to(torch.bfloat16).save_pretrained(folder)
    shape = add_model(folder, tmp_path / "store")
    assert {parameter.dtype for parameter in opened(shape, tmp_path / "store").parameters()} == {torch.float32}


def test_interpolation_that_was_not_asked_for_is_caught(tmp_path: Path) -> None:
    yarn: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    folder = llama_folder(tmp_path / "released", **yarn)
    shape = add_model(folder, tmp_path / "store")
    with pytest.raises(ModelMismatchError, match="base"):
        check_model(AutoModelForCausalLM.from_pretrained(folder), shape, rope_base=5e5)
    assert built_rope_base(opened(shape, tmp_path / "store", base=5e5)) == pytest.approx(5e5, rel=1e-5)


@pytest.mark.parametrize("base", [1e4, 5e6])
def test_yarn_of_a_model_of_our_own_is_what_the_formula_says(tmp_path: Path, base: float) -> None:
    yarn = Yarn(factor=4.0, original_positions=1024)
    model = build_model(SHAPE, rope_base=base, max_positions=32, seed=0, yarn=yarn)
    rotary = model.model.rotary_emb
    assert rotary.inv_freq.tolist() == pytest.approx(inverse_frequencies(SHAPE.head_dim, base, yarn), rel=1e-6)
    assert rotary.attention_scaling == pytest.approx(1.138629, abs=1e-6)
    assert model.config.max_position_embeddings == 4096
    with pytest.raises(ModelMismatchError, match="base"):
        check_model(model, SHAPE, rope_base=base)
    with pytest.raises(ModelMismatchError, match=r"pair|scales"):
        check_model(model, SHAPE, rope_base=base, yarn=dataclasses.replace(yarn, factor=8.0))


def test_damaged_missing_or_other_models_are_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    shape = add_model(llama_folder(tmp_path / "released"), store)
    with pytest.raises(ModelMismatchError, match=r"n_params=1,"):
        opened(dataclasses.replace(shape, n_params=1), store)
    with pytest.raises(ModelMissingError, match="longlaw model add"):
        opened(dataclasses.replace(shape, digest="0" * 64), store)
    config = store / "models" / shape.digest / "config.json"
    config.unlink()
    config.write_text((tmp_path / "released" / "config.json").read_text() + " ")
    with pytest.raises(ModelMismatchError, match=r"config\.json is not what the manifest says"):
        opened(shape, store)


def test_folders_that_are_no_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelMissingError, match=r"config\.json"):
        add_model(tmp_path / "empty", tmp_path / "store")
    folder = llama_folder(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelMissingError, match="safetensors"):
        add_model(folder, tmp_path / "store")
    foreign = llama_folder(tmp_path / "foreign")
    config = json.loads((foreign / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoModelForCausalLM": "code.Model"}}
    (foreign / "config.json").write_text(json.dumps(config))
    (foreign / "code.py").write_text("raise SystemExit('ran')")
    with pytest.raises(ModelMismatchError, match="can be loaded"):
        add_model(foreign, tmp_path / "store")
    short = llama_folder(tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(ModelMismatchError, match="missing_keys"):
        add_model(short, tmp_path / "store")


def test_the_channels_that_rotate_are_what_a_base_is_stretched_over(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = StableLmConfig(**SIZES | {"hidden_size": 32}, partial_rotary_factor=0.5)
    StableLmForCausalLM(config).save_pretrained(tmp_path / "partial")
    rotating, base = own_rope(tmp_path / "partial")
    assert (rotating, base) == (8, 1e4)
    shape = add_model(tmp_path / "partial", tmp_path / "store")
    stretched = opened(shape, tmp_path / "store", base=ntk_base(1e4, 4.0, rotating))
    assert 4 * stretched.model.rotary_emb.inv_freq[-1].item() == pytest.approx(1e4 ** (-6 / 8), rel=1e-5)


def test_a_model_with_a_base_for_each_kind_of_layer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    Olmo3ForCausalLM(Olmo3Config(**SIZES | {"pad_token_id": None}, sliding_window=8)).save_pretrained(tmp_path / "two")
    shape = add_model(tmp_path / "two", tmp_path / "store")
    with pytest.raises(ModelMismatchError, match="rotates differently in layers of different kinds"):
        opened(shape, tmp_path / "store")


@pytest.mark.parametrize("head_dim", [8, 24])
def test_operations_are_those_that_torch_counts_in_the_model(tmp_path: Path, head_dim: int) -> None:
    """Torch counts attention's whole square, of which the causal half is ours, and nothing for the weights of norms."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=head_dim)).save_pretrained(tmp_path / "qwen3")
    shape = add_model(tmp_path / "qwen3", tmp_path / "store")
    assert shape.attention_width == (None if head_dim == 8 else 48)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "qwen3", attn_implementation="eager")
    length = 64
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros((1, length), dtype=torch.long), use_cache=False).logits.sum().backward()
    square = 12 * SIZES["num_hidden_layers"] * SIZES["num_attention_heads"] * head_dim * length**2
    vectors = sum(weight.numel() for weight in model.parameters() if weight.ndim == 1)
    expected = counter.get_total_flops() - square // 2 + 6 * vectors * length
    assert shape.train_flops_per_token(length) * length == expected
    assert opened(shape, tmp_path / "store").config.head_dim == head_dim
    assert opened(dataclasses.replace(shape, attention_width=None), tmp_path / "store") is not None
