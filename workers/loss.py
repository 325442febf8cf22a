"""Next-token loss without full logits: the head's product, the loss and both gradients, block by block of positions.

The gradients of hidden states and head are computed in the forward pass, where the logits of a block are at hand, and
kept until the backward pass asks for them: nothing of the size positions x vocabulary outlives its block.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.answers import IGNORED
from workers.hidden_states import last_hidden_states

#: Logits that exist at once, as numbers of float32 (256 MiB): 512 positions with a vocabulary of 131,072.
LOGITS_AT_ONCE = 1 << 26


class NextTokenLoss(nn.Module):
    """A causal language model together with its training objective."""

    def __init__(self, model: PreTrainedModel, *, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss

    def forward(
        self, inputs: Tensor, targets: Tensor, scale: float, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The objective of `linear_cross_entropy` and the summed loss of all targets that count.

        `inputs`, `targets` and `positions` are those of `workers.mixture.Batch`; `scale` turns the sum over these
        targets into their part of the mean over the global batch.
        """
        hidden = last_hidden_states(self.model, inputs, positions)
        head = self.model.get_output_embeddings().weight
        return linear_cross_entropy(hidden.flatten(0, 1), head, targets.flatten(), scale=scale, z_loss=self.z_loss)


def linear_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, *, scale: float, z_loss: float = 0.0, block: int | None = None
) -> tuple[Tensor, Tensor]:
    """Cross entropy of `hidden @ head.T`, from float32 logits, in blocks of positions.

    Under autocast the products are made in its type, everything else in float32.

    Args:
        hidden: (positions, width).
        head: (vocabulary, width).
        targets: int64 of shape (positions,). Where it is `IGNORED`, a position has no part in anything.
        z_loss: Weight of the squared log-partition (Chowdhery et al. 2022, section 5).
        block: Positions at once; by default as many as `LOGITS_AT_ONCE` allows.

    Returns:
        scale * (sum of NLL + z_loss * sum of log(Z)^2), which can be differentiated, and the sum of NLL alone (nats,
        float64), which cannot.
    """
    if hidden.is_cuda and importlib.util.find_spec("liger_kernel"):
        return _by_liger(hidden, head, targets, scale, z_loss)
    counted = targets != IGNORED
    if not counted.all():
        hidden, targets = hidden[counted], targets[counted]
    block = block or max(1, LOGITS_AT_ONCE // len(head))
    found: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(hidden, head, targets, scale, z_loss, block)  # type: ignore[no-untyped-call]
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    """Gradients of the plain sum are kept, and scaled in place when they are asked for, once."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, scale: float, z_loss: float, block: int
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else head.dtype
        wanted = any(ctx.needs_input_grad)
        grad_hidden, grad_head = (torch.empty_like(hidden), torch.zeros_like(head)) if wanted else (None, None)
        sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        with torch.autocast(device, enabled=False):
            product_head = head.to(dtype)
            for at in range(0, len(targets), block):
                states, target = hidden[at : at + block].to(dtype), targets[at : at + block, None]
                logits = (states @ product_head.t()).float()
                at_target = logits.gather(1, target)
                torch.log_softmax(logits, 1, out=logits)
                log_likelihood = logits.gather(1, target)
                log_partition = at_target - log_likelihood
                sums[0] -= log_likelihood.sum(dtype=torch.float64)
                sums[1] += log_partition.square().sum(dtype=torch.float64)
                if grad_hidden is None or grad_head is None:
                    continue
                gradient = logits.exp_()
                if z_loss:
                    gradient.mul_(1 + 2 * z_loss * log_partition)
                gradient.scatter_add_(1, target, torch.full_like(at_target, -1))
                if dtype == head.dtype:
                    torch.mm(gradient, head, out=grad_hidden[at : at + block])
                    grad_head.addmm_(gradient.t(), states)
                else:
                    gradient = gradient.to(dtype)
                    grad_hidden[at : at + block] = gradient @ product_head
                    grad_head += gradient.t() @ states
        ctx.gradients, ctx.scale = (grad_hidden, grad_head), scale
        nll = sums[0].clone()
        ctx.mark_non_differentiable(nll)
        return (scale * (sums[0] + z_loss * sums[1])).float(), nll

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        factor = ctx.scale * gradients[0]
        grad_hidden, grad_head = ctx.gradients
        return grad_hidden.mul_(factor), grad_head.mul_(factor), None, None, None, None


def _by_liger(hidden: Tensor, head: Tensor, targets: Tensor, scale: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """The same by Liger's kernels, which make gradients in the forward pass too."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED,
        reduction="sum",
        lse_square_scale=z_loss,
        return_z_loss=True,
        accum_dtype=torch.float32,
    )
    found = loss(head, hidden, targets)
    return scale * found.loss, (found.loss - found.z_loss).detach().double()
