"""Which attention heads look back at the token that is to be repeated.

Only the rows of attention that predict the answer are worked out, and of them only where they are largest; the model
attends as it always does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from workers.errors import ProbeError
from workers.probes_needles import Prompt

_NAME = "longlaw_most_attended"

Places = npt.NDArray[np.int64]


def head_scores(model: Any, prompts: Sequence[Prompt]) -> dict[str, float]:
    """For every head, "layer.head": the share of answer tokens at which it hits, over all prompts.

    A hit: the position it attends to most, of those before the token, lies in the prompt's reference sentence and holds
    the same token id (Wu et al. 2024, "Retrieval head mechanistically explains long-context factuality").

    Raises:
        ProbeError: if this kind of model does not show its queries and keys.
    """
    hits: dict[str, int] = {}
    total = 0
    for prompt in prompts:
        targets = prompt.ids[prompt.answer :]
        total += len(targets)
        for layer, places in most_attended(model, prompt.ids, rows=prompt.answer_positions - 1).items():
            inside = (places >= prompt.reference[0]) & (places < prompt.reference[1])
            hit = inside & (prompt.ids[places] == targets)
            for head, count in enumerate(hit.sum(axis=1).tolist()):
                label = f"{layer}.{head}"
                hits[label] = hits.get(label, 0) + count
    return {label: count / total for label, count in hits.items()}


def most_attended(model: Any, ids: Places, *, rows: Places) -> dict[int, Places]:
    """For each layer the position that each head attends to most from each of `rows`, shape (heads, rows).

    Raises:
        ProbeError: if this kind of model does not show its queries and keys.
    """
    model.eval()
    device = model.get_output_embeddings().weight.device
    with _watching(model, torch.from_numpy(rows).to(device)) as watcher, torch.inference_mode():
        model.base_model(input_ids=torch.from_numpy(ids)[None].to(device), use_cache=False)
    if not watcher.found:
        raise ProbeError(f"retrieval heads: {type(model).__name__} does not show which positions its heads attend to")
    return watcher.found


class _Watcher:
    """Stands in for the model's attention: attends by SDPA, and keeps where the asked rows are largest."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.found: dict[int, Places] = {}

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        _, heads, _, width = query.shape
        _, groups, length, _ = key.shape
        asked = query[0, :, self.rows].float().view(groups, -1, width)  # heads that share keys lie side by side
        scores = (asked @ key[0].float().transpose(1, 2)).view(heads, len(self.rows), length)
        if attention_mask is None:
            seen = torch.arange(length, device=query.device) <= self.rows[:, None]
        else:
            mask = attention_mask[0, :, self.rows]
            seen = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        self.found[module.layer_idx] = scores.masked_fill(~seen, -torch.inf).argmax(-1).cpu().numpy()
        attended: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **options
        )
        return attended


@contextmanager
def _watching(model: Any, rows: torch.Tensor) -> Iterator[_Watcher]:
    watcher = _Watcher(rows)
    before = model.config._attn_implementation
    AttentionInterface.register(_NAME, watcher)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    model.set_attn_implementation(_NAME)
    try:
        yield watcher
    finally:
        model.set_attn_implementation(before)
