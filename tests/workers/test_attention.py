"""Attention within documents: what another document holds changes nothing, and nothing of length x length is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from workers.attention import document_blocks, packed_hidden_states, use_document_attention
from workers.errors import ModelMismatchError
from workers.model import build_model
from workers.spec import ModelShape

torch.set_num_threads(1)

SHAPE = ModelShape(layers=2, width=16, heads=4, kv_heads=2, ffn_width=24, vocab_size=50, qk_conv_kernel=3, init_std=0.3)
LENGTHS = ((5, 1, 2, 8), (16,), (3, 9, 4))


def positions_of(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


POSITIONS = positions_of(LENGTHS)
#: What a loss weighs states with: their own squares would sum to a constant after the last norm.
WEIGHTS = torch.randn(*POSITIONS.shape, 16, generator=torch.Generator().manual_seed(3))
INPUTS = torch.randint(50, POSITIONS.shape, generator=torch.Generator().manual_seed(0))


def convolved(*, recompute: bool = False) -> LlamaForCausalLM:
    model = build_model(SHAPE, rope_base=1e4, max_positions=16, seed=1)
    for name, parameter in model.named_parameters():
        if name.endswith("kernel"):
            parameter.data.normal_(generator=torch.Generator().manual_seed(2))
    if recompute:
        model.activation_checkpointing_enable()
        model.train()
    use_document_attention(model)
    return model


def qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_key_value_heads=2, initializer_range=0.3, **sizes))
    use_document_attention(model)
    return model


def places() -> list[tuple[int, slice]]:
    found = []
    for row, lengths in enumerate(LENGTHS):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        found += [(row, slice(end - n, end)) for n, end in zip(lengths, ends, strict=True)]
    return found


@pytest.mark.parametrize("make", [convolved, qwen])
def test_no_token_of_another_document_changes_a_state_or_a_gradient(make) -> None:  # type: ignore[no-untyped-def]
    model = make()

    def states_and_gradients(inputs: Tensor, row: int, part: slice) -> tuple[Tensor, list[Tensor]]:
        states = packed_hidden_states(model, inputs, POSITIONS)[row, part]
        model.zero_grad()
        torch.autograd.backward((states * WEIGHTS[row, part]).sum())
        return states.detach(), [
            p.grad.clone() for n, p in model.named_parameters() if ".layers." in n and p.grad is not None
        ]

    for row, part in places():
        others = torch.ones_like(INPUTS, dtype=torch.bool)
        others[row, part] = False
        changed = torch.where(others, (INPUTS + 7) % 50, INPUTS)
        before, gradients_before = states_and_gradients(INPUTS, row, part)
        after, gradients_after = states_and_gradients(changed, row, part)
        assert torch.equal(before, after)
        for one, other in zip(gradients_before, gradients_after, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(one.abs().max()))


@pytest.mark.parametrize("make", [convolved, qwen])
def test_packed_documents_have_the_states_and_gradients_of_each_alone(make) -> None:  # type: ignore[no-untyped-def]
    model = make()
    packed = packed_hidden_states(model, INPUTS, POSITIONS)
    torch.autograd.backward((packed * WEIGHTS).sum())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for row, part in places():
        alone = model.model(input_ids=INPUTS[row : row + 1, part], use_cache=False).last_hidden_state
        torch.testing.assert_close(packed[row, part], alone[0], rtol=1e-5, atol=1e-5)
        torch.autograd.backward((alone * WEIGHTS[row, part]).sum())
    for name, parameter in model.named_parameters():
        if name in gradients:
            scale = float(gradients[name].abs().max())
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-4 * scale, msg=name)


def test_recomputed_layers_keep_documents_apart_too() -> None:
    gradients = []
    for model in (convolved(), convolved(recompute=True)):
        torch.autograd.backward((packed_hidden_states(model, INPUTS, POSITIONS) * WEIGHTS).sum())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_whole_sequences_give_the_numbers_of_plain_attention() -> None:
    plain, model = build_model(SHAPE, rope_base=1e4, max_positions=16, seed=1), convolved()
    plain.load_state_dict(model.state_dict())
    expected = plain.model(input_ids=INPUTS, use_cache=False).last_hidden_state
    packed_hidden_states(model, INPUTS, POSITIONS)  # leaves nothing behind
    assert torch.equal(model.model(input_ids=INPUTS, use_cache=False).last_hidden_state, expected)
    whole = torch.arange(16).expand(3, 16)
    assert torch.equal(packed_hidden_states(model, INPUTS, whole), expected)


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.largest = max(self.largest, value.numel())
        return result


def test_nothing_of_length_times_length_is_made() -> None:
    length = 1024
    model = convolved()
    positions = positions_of(((300, 24, 700),))
    inputs = torch.randint(50, positions.shape)
    with _Sizes() as sizes:  # type: ignore[no-untyped-call]
        torch.autograd.backward(packed_hidden_states(model, inputs, positions)[..., 0].sum())
    assert sizes.largest < length * length / 8
    with _Sizes() as sizes:  # type: ignore[no-untyped-call]
        document_blocks(positions, block=128)
    assert sizes.largest <= length


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("lengths", [LENGTHS, ((7, 1, 1, 1, 3, 5), (18,), (4, 14)), ((1,) * 16,)])
def test_block_mask_is_that_of_the_dense_rule(lengths: tuple[tuple[int, ...], ...], block: int) -> None:
    positions = positions_of(lengths)
    found = document_blocks(positions, block=block)
    expected = create_block_mask(
        found.mask_mod, len(positions), None, positions.shape[1], positions.shape[1], "cpu", BLOCK_SIZE=block
    )
    assert torch.equal(found.to_dense(), expected.to_dense())
    for ours, theirs in ((found, expected), (expected, found)):
        assert ours.kv_num_blocks.tolist() == theirs.kv_num_blocks.tolist()
        assert ours.full_kv_num_blocks is not None
        assert theirs.full_kv_num_blocks is not None
        assert ours.full_kv_num_blocks.tolist() == theirs.full_kv_num_blocks.tolist()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_under_the_block_mask_is_attention_of_each_document() -> None:
    q, k, v = (torch.randn(3, heads, 16, 8, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    mixed = flex_attention(q, k, v, block_mask=document_blocks(POSITIONS, block=4), enable_gqa=True)
    assert isinstance(mixed, Tensor)
    for row, part in places():
        alone_q, alone_k, alone_v = (tensor[row : row + 1, :, part] for tensor in (q, k, v))
        alone = F.scaled_dot_product_attention(alone_q, alone_k, alone_v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(mixed[row, :, part], alone[0], rtol=1e-5, atol=1e-6)


def test_padding_and_sequences_that_begin_within_a_document_are_refused() -> None:
    model = convolved()
    mask = torch.ones_like(INPUTS)
    mask[0, 3:] = 0
    with pytest.raises(ValueError, match="takes no padding"):
        model.model(input_ids=INPUTS, attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="begin at position 0"):
        packed_hidden_states(model, INPUTS, POSITIONS + 1)


def test_models_that_attend_within_a_window_are_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    windowed = MistralForCausalLM(MistralConfig(vocab_size=50, num_key_value_heads=1, sliding_window=8, **sizes))
    with pytest.raises(ModelMismatchError, match="within 8 positions is not supported"):
        use_document_attention(windowed)


def test_the_way_of_attending_is_not_saved_with_the_model(tmp_path: Path) -> None:
    qwen().save_pretrained(tmp_path)
    assert "longlaw" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


def test_a_model_that_attends_by_a_way_of_its_own_is_found_out_by_a_trial() -> None:
    """It says that it takes attention functions, and does not take ours."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = NemotronConfig(vocab_size=50, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3, **sizes)
    model = NemotronForCausalLM(config)
    assert model._supports_attention_backend
    with pytest.raises(ModelMismatchError, match="does not keep documents apart"):
        use_document_attention(model)
