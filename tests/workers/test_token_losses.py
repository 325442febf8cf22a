"""Losses from tiles of logits: what cross entropy of the whole logits says, however the tiles fall."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.workers.tiny_evaluation import tiny_llama
from workers.errors import MeasurementError
from workers.token_losses import Pass, check_head, head_losses, logits_at, score


def whole(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    return functional.cross_entropy(logits, targets, reduction="none")


@pytest.mark.parametrize(("n", "vocab_size"), [(1, 3), (512, 512), (513, 1025), (700, 2000)])
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_give_the_cross_entropy_of_the_whole_logits(n: int, vocab_size: int, biased: bool) -> None:
    draw = torch.Generator().manual_seed(n)
    hidden, weight = torch.randn(n, 8, generator=draw), torch.randn(vocab_size, 8, generator=draw)
    bias = torch.randn(vocab_size, generator=draw) if biased else None
    targets = torch.randint(0, vocab_size, (n,), generator=draw)
    found = head_losses(hidden, weight, bias, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), whole(hidden, weight, bias, targets), rtol=0, atol=2e-5)


def test_large_logits_neither_overflow_nor_vanish() -> None:
    """exp of 300 is no float32; the largest logit stands in the last tile, and after it a tile of nothing but small."""
    weight = torch.zeros(1600, 1)
    weight[0], weight[1300], weight[1599] = 299.0, 300.0, -300.0
    targets = torch.tensor([0, 1300, 1599, 7])
    hidden = torch.ones(4, 1)
    found = head_losses(hidden, weight, None, targets)
    torch.testing.assert_close(found.double(), whole(hidden, weight, None, targets), rtol=1e-6, atol=1e-4)


def test_a_half_precision_head_is_multiplied_in_float32() -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(20, 16, generator=draw).bfloat16()
    weight = torch.randn(600, 16, generator=draw).bfloat16()
    targets = torch.randint(0, 600, (20,), generator=draw)
    found = head_losses(hidden, weight, None, targets)
    torch.testing.assert_close(found.double(), whole(hidden, weight, None, targets), rtol=0, atol=2e-5)


def test_a_loss_that_is_no_number_stays_one() -> None:
    hidden = torch.tensor([[1.0], [float("nan")]])
    found = head_losses(hidden, torch.ones(4, 1), None, torch.tensor([0, 0]))
    assert torch.isfinite(found).tolist() == [True, False]


def test_logits_of_asked_positions_are_the_model_s_own() -> None:
    model = tiny_llama(64)
    draw = np.random.default_rng(0)
    passes = [
        Pass(ids=draw.integers(0, 64, length), positions=np.array(positions))
        for length, positions in ((9, [8]), (30, [3, 4, 29]), (12, [1, 2]))
    ]
    losses = score(model, passes)
    for item, logits, loss in zip(passes, logits_at(model, passes, batch_tokens=40), losses, strict=True):
        with torch.inference_mode():
            own = model(input_ids=torch.from_numpy(item.ids)[None]).logits[0, item.positions - 1]
        torch.testing.assert_close(logits, own, rtol=0, atol=1e-5)
        nll = functional.cross_entropy(own, torch.from_numpy(item.ids[item.positions]), reduction="none")
        np.testing.assert_allclose(loss, nll.numpy(), rtol=0, atol=1e-5)


def test_a_cap_on_logits_is_seen_where_it_hardly_changes_them() -> None:
    """A model's first logits are small: 30 tanh(x / 30) is x to five digits there, and half of x after training."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    config = Gemma2Config(vocab_size=64, num_attention_heads=2, num_key_value_heads=1, **sizes)
    model = Gemma2ForCausalLM(config).eval()
    with pytest.raises(MeasurementError, match="changes its logits"):
        check_head(model)
    config.final_logit_softcapping = None
    check_head(model)
    check_head(tiny_llama(64))
