"""The end of a sequence alone is worth what it is in the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.workers.tiny_evaluation import tiny_llama
from workers.last_layer import last_states
from workers.model import build_model
from workers.spec import ModelShape


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("convolution", [0, 3])
@pytest.mark.parametrize("first", [0, 10, 21, 39])
def test_the_end_is_that_of_the_whole(heads: int, kv_heads: int, convolution: int, first: int) -> None:
    shape = ModelShape(
        layers=2,
        width=32,
        heads=heads,
        kv_heads=kv_heads,
        ffn_width=48,
        vocab_size=64,
        init_std=0.3,
        qk_conv_kernel=convolution,
    )
    model = build_model(shape, rope_base=1e4, max_positions=64, seed=1).eval()
    inputs = torch.randint(0, 64, (3, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        whole = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        end = last_states(model, inputs, first=first)
        again = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    assert end.shape == (3, 40 - first, 32)
    torch.testing.assert_close(end, whole[:, first:], rtol=0, atol=2e-5)
    torch.testing.assert_close(again, whole, rtol=0, atol=0)


def test_the_feed_forward_runs_over_the_end_alone() -> None:
    model = tiny_llama(64)
    rows: list[int] = []
    model.model.layers[-1].mlp.register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0].shape[1]))
    with torch.inference_mode():
        last_states(model, torch.zeros((1, 40), dtype=torch.long), first=30)
        last_states(model, torch.zeros((1, 40), dtype=torch.long), first=5)
    assert rows == [10, 40]


def test_a_layer_that_was_given_another_forward_keeps_it() -> None:
    """Libraries that spread a model over devices put their own in its place, for good."""
    model = tiny_llama(64)
    layer = model.model.layers[-1]
    calls: list[int] = []
    plain: Callable[..., torch.Tensor] = layer.forward

    def counted(states: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(states.shape[1])
        return plain(states, **options)

    layer.forward = counted
    inputs = torch.randint(0, 64, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        end = last_states(model, inputs, first=30)
    assert calls == [40]
    assert layer.forward is counted
    del layer.forward
    with torch.inference_mode():
        torch.testing.assert_close(last_states(model, inputs, first=30), end, rtol=0, atol=2e-5)
