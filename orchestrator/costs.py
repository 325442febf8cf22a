"""Prices: floating-point operations, bytes, GPU-hours."""

from __future__ import annotations

from workers.probe_spec import ProbeSet
from workers.spec import AdamW, Evaluator, FolderModel, ModelShape, Muon

_BYTES = 4  # float32


def checkpoint_bytes(shape: ModelShape | FolderModel, optimizer: AdamW | Muon) -> int:
    """Bytes of one checkpoint: weights and the optimizer's moments, two of AdamW and one of Muon.

    Muon has the matrices inside the layers, which are N but for its norms; state and manifest are negligible.
    """
    moments = 1 if isinstance(optimizer, Muon) else 2
    return _BYTES * ((1 + moments) * shape.n_params + 3 * shape.embedding_params)


def evaluation_flops(shape: ModelShape | FolderModel, evaluator: Evaluator | ProbeSet) -> int:
    """Operations of measuring one snapshot: the full-context pass and, for the gap, the local chunks of every document.

    A chunk is `length + stride` tokens long and there is one for every `stride` tokens past the first. The reference's
    own passes are made once for all snapshots and are not part of this. Of probes, the passes over their prompts.
    """
    if isinstance(evaluator, ProbeSet):
        return evaluator.forward_tokens * shape.forward_flops_per_token(evaluator.longest)
    documents, chunking = evaluator.documents, evaluator.chunking
    per_document = documents.length * shape.forward_flops_per_token(documents.length)
    if evaluator.short_context_gap and documents.length > chunking.length:
        chunks = -(-(documents.length - chunking.length) // chunking.stride)
        chunk_tokens = min(chunking.length + chunking.stride, documents.length)
        per_document += chunks * chunk_tokens * shape.forward_flops_per_token(chunk_tokens)
    return documents.count * per_document


def gpu_hours(flops: int, *, gpu_flops: float, gpu_utilisation: float) -> float:
    """Hours on one GPU of `gpu_flops` operations per second, of which the share `gpu_utilisation` is reached."""
    return flops / (gpu_flops * gpu_utilisation) / 3600
