"""The short way through a Llama equals Hugging Face's, in values and in gradients."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.workers.tiny_evaluation import tiny_llama
from tests.workers.tiny_training import SHAPE
from workers import hidden_states
from workers.hidden_states import last_hidden_states
from workers.model import build_model
from workers.spec import ModelShape

GROUPED = dataclasses.replace(SHAPE, layers=2, width=32, heads=4, kv_heads=2)


def gradients(model: LlamaForCausalLM, states: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(1))
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = torch.autograd.grad((states * weights).sum(), list(named.values()))
    return dict(zip(named, found, strict=True))


@pytest.mark.parametrize(
    "shape", [SHAPE, GROUPED, dataclasses.replace(GROUPED, qk_conv_kernel=0, tied_embeddings=True)]
)
def test_values_and_gradients_equal_hugging_faces(shape: ModelShape) -> None:
    model = build_model(shape, rope_base=1e4, max_positions=48, seed=0)
    draws = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5, generator=draws)
    ids = torch.randint(shape.vocab_size, (3, 48), generator=draws)
    theirs = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden_states._can_be_direct(model, ids)
    ours = last_hidden_states(model, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    expected = gradients(model, theirs)
    for name, found in gradients(model, ours).items():
        assert torch.dist(found, expected[name]) < 1e-6 * expected[name].norm(), name


def test_heads_need_not_be_as_wide_together_as_the_model() -> None:
    """As in folders that name a head_dim; biases and another base come along."""
    model = tiny_llama(64, head_dim=12, attention_bias=True, mlp_bias=True)
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(3))
    theirs = model.model(input_ids=ids, use_cache=False).last_hidden_state
    assert hidden_states._can_be_direct(model, ids)
    ours = last_hidden_states(model, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    expected = gradients(model, theirs)
    for name, found in gradients(model, ours).items():
        assert torch.dist(found, expected[name]) <= 1e-5 * expected[name].norm() + 1e-5, name


def test_models_that_need_their_layers_called_take_the_long_way() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=8, seed=0)
    ids = torch.arange(8)[None]
    with torch.autocast("cpu", torch.bfloat16):
        assert not hidden_states._can_be_direct(model, ids)
    model.activation_checkpointing_enable()
    assert not hidden_states._can_be_direct(model, ids)
