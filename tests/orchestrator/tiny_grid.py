"""A grid that real training and measuring finish in seconds, and what it must end with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from database.models import Checkpoint, Evaluation
from orchestrator.grid import parse_grid
from orchestrator.submit import SubmittedGrid, submit
from tests.workers.tiny_training import SHAPE, tiny_corpus

__all__ = ["Numbers", "measured_numbers", "submit_tiny", "tiny_corpus", "tiny_document"]

SHORT_STEP_TOKENS = 64
LONG_STEP_TOKENS = 64


def tiny_document(
    corpus: str,
    *,
    name: str = "tiny",
    widths: tuple[int, ...] = (16, 32),
    short_steps: tuple[int, ...] = (27, 180),
    long_steps: tuple[int, ...] = (8, 16),
    peak_rate: float = 0.01,
) -> dict[str, Any]:
    """Cells: widths x short_steps x long_steps, one seed, raw; protocol constant."""
    return {
        "name": name,
        "protocol": "constant",
        "scales": {
            f"w{width}": {"layers": 1, "width": width, "heads": 2, "kv_heads": 1, "ffn_width": width}
            for width in widths
        },
        "short_tokens": [steps * SHORT_STEP_TOKENS for steps in short_steps],
        "long_tokens": [steps * LONG_STEP_TOKENS for steps in long_steps],
        "recipe": {
            "model": {
                "vocab_size": SHAPE.vocab_size,
                "init_std": 0.05,
                "attention": {"qk_conv_kernel": 3},
            },
            "corpus": corpus,
            "short": {
                "seq_len": 32,
                "batch_sequences": 2,
                "rope_base": 10_000,
                "peak_rate": peak_rate,
                "warmup_steps": 4,
                "final_rate_ratio": 0.25,
                "copied_spans": 0.5,
            },
            "long": {
                "seq_len": 64,
                "batch_sequences": 1,
                "rope_base": 100_000,
                "start_rate": "inherit",
                "optimizer_state": "carry",
                "warmup_steps": 0,
                "final_rate_ratio": 1.0,
                "copied_spans": 0.5,
            },
        },
        "evaluation": {
            "reference": {"kind": "copy"},
            "documents": {"count": 2, "length": 128},
            "chunking": {"length": 32, "stride": 16, "mode": "exact"},
            "gain_threshold": 0.05,
            "full_nll_ceiling": 4.0,
        },
    }


def submit_tiny(engine: Engine, document: dict[str, Any]) -> SubmittedGrid:
    with Session(engine) as session, session.begin():
        return submit(session, parse_grid(document), document=document)


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Everything that training and measuring came to, to the last bit."""

    digests: tuple[tuple[str, int, str], ...]
    values: tuple[tuple[str, float | None, float | None], ...]


def measured_numbers(engine: Engine) -> Numbers:
    with Session(engine) as session:
        digests = session.execute(
            select(Checkpoint.segment_key, Checkpoint.step, Checkpoint.digest)
            .where(Checkpoint.scheduled)
            .order_by(Checkpoint.segment_key, Checkpoint.step)
        )
        values = session.execute(
            select(Evaluation.key, Evaluation.log_longppl, Evaluation.log_ppl)
            .where(Evaluation.state == "SUCCEEDED")
            .order_by(Evaluation.key)
        )
        return Numbers(
            digests=tuple((key, step, digest) for key, step, digest in digests),
            values=tuple((key, longppl, ppl) for key, longppl, ppl in values),
        )
