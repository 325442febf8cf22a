"""The block-wise loss against the plain one: values, gradients, z-loss."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.workers.tiny_training import SHAPE
from workers.answers import IGNORED
from workers.loss import NextTokenLoss, linear_cross_entropy
from workers.model import build_model


def random_problem() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, 16, generator=generator, requires_grad=True)
    head = torch.randn(300, 16, generator=generator, requires_grad=True)
    return hidden, head, torch.randint(300, (33,), generator=generator)


@pytest.mark.parametrize("block", [1, 7, 33, 64])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_loss_in_blocks_equals_the_plain_loss_with_its_gradients(block: int, z_loss: float) -> None:
    hidden, head, targets = random_problem()
    logits = F.linear(hidden, head)
    nll = F.cross_entropy(logits, targets, reduction="sum")
    plain = (nll + z_loss * logits.logsumexp(1).square().sum()) / 50
    expected = torch.autograd.grad(plain, (hidden, head))
    objective, summed = linear_cross_entropy(hidden, head, targets, scale=1 / 50, z_loss=z_loss, block=block)
    torch.testing.assert_close(objective, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(summed, nll.detach().double(), rtol=1e-6, atol=1e-6)
    for found, wanted in zip(torch.autograd.grad(3 * objective, (hidden, head)), expected, strict=True):
        torch.testing.assert_close(found, 3 * wanted, rtol=1e-5, atol=1e-6)


def test_loss_of_certain_and_of_impossible_tokens_is_exact() -> None:
    """Probabilities that float32 cannot hold still have a logarithm."""
    hidden = torch.eye(2, requires_grad=True)
    head = torch.tensor([[200.0, 0.0], [0.0, 200.0]], requires_grad=True)
    objective, summed = linear_cross_entropy(hidden, head, torch.tensor([0, 0]), scale=0.5)
    assert summed.item() == pytest.approx(200.0)
    (gradient,) = torch.autograd.grad(objective, (hidden,))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, 0.0], [-100.0, 100.0]]))


def test_loss_without_gradients_is_the_same() -> None:
    hidden, head, targets = random_problem()
    with torch.no_grad():
        without, _ = linear_cross_entropy(hidden, head, targets, scale=1.0)
    assert without.item() == linear_cross_entropy(hidden, head, targets, scale=1.0)[0].item()


def test_loss_agrees_with_hugging_faces_own() -> None:
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    ids = torch.randint(SHAPE.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    theirs = model(input_ids=ids, labels=ids).loss
    objective, summed = NextTokenLoss(model)(ids[:, :-1], ids[:, 1:], 1 / 64)
    torch.testing.assert_close(objective, theirs)
    assert summed.item() / 64 == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_ignored_targets_have_no_part_in_loss_or_gradients(block: int, z_loss: float) -> None:
    """Whatever stands at their places, numbers or not."""
    hidden, head, targets = random_problem()
    ignored = torch.arange(33) % 3 > 0
    targets[ignored] = IGNORED
    logits = F.linear(hidden, head)
    nll = F.cross_entropy(logits, targets, reduction="sum")
    plain = (nll + z_loss * logits.logsumexp(1)[~ignored].square().sum()) / 11
    expected = torch.autograd.grad(plain, (hidden, head))
    with torch.no_grad():
        hidden[ignored] = torch.nan
    objective, summed = linear_cross_entropy(hidden, head, targets, scale=1 / 11, z_loss=z_loss, block=block)
    torch.testing.assert_close(objective, plain, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(summed, nll.detach().double(), rtol=1e-6, atol=1e-6)
    of_hidden, of_head = torch.autograd.grad(objective, (hidden, head))
    torch.testing.assert_close(of_hidden, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(of_head, expected[1], rtol=1e-5, atol=1e-6)
    assert not of_hidden[ignored].any()


def test_loss_of_known_numbers_counts_the_answer_alone() -> None:
    """Two tokens, logits (ln 3, 0): the first has probability 3/4."""
    hidden = torch.tensor([[1.0], [1.0], [1.0]], requires_grad=True)
    head = torch.tensor([[math.log(3)], [0.0]], requires_grad=True)
    objective, summed = linear_cross_entropy(hidden, head, torch.tensor([IGNORED, 0, IGNORED]), scale=0.5)
    assert summed.item() == pytest.approx(math.log(4 / 3))
    assert objective.item() == pytest.approx(math.log(4 / 3) / 2)
    of_hidden, of_head = torch.autograd.grad(objective, (hidden, head))
    torch.testing.assert_close(of_head, torch.tensor([[-0.125], [0.125]]))
    torch.testing.assert_close(of_hidden, torch.tensor([[0.0], [-0.125 * math.log(3)], [0.0]]))


def test_where_every_target_is_ignored_loss_and_gradients_are_zero() -> None:
    """As a process may have it whose companions have the answers."""
    hidden, head, targets = random_problem()
    objective, summed = linear_cross_entropy(hidden, head, torch.full_like(targets, IGNORED), scale=0.5, z_loss=0.1)
    assert (objective.item(), summed.item()) == (0.0, 0.0)
    for gradient in torch.autograd.grad(objective, (hidden, head)):
        assert torch.equal(gradient, torch.zeros_like(gradient))
