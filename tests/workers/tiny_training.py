"""Small real corpora, segments and runs that the tests of training share."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from workers.corpus_build import build_corpus
from workers.corpus_rows import RowFields
from workers.corpus_sources import FolderSource
from workers.model import build_model
from workers.spec import (
    AdamW,
    CheckpointRef,
    DataMix,
    LongStage,
    ModelShape,
    OptimizerState,
    Segment,
    SegmentKind,
    ShortStage,
    StoredCheckpoint,
)

torch.set_num_threads(1)

SHAPE = ModelShape(
    layers=1, width=16, heads=2, kv_heads=1, ffn_width=24, vocab_size=300, qk_conv_kernel=3, init_std=0.05
)


def tiny_corpus(store: Path) -> str:
    """The hash of a corpus of a few thousand tokens below `store`."""
    texts = store / "texts"
    texts.mkdir(parents=True)
    draw = random.Random(0)
    for number in range(24):
        (texts / f"{number}.txt").write_text("".join(draw.choice("abcdefgh \n") for _ in range(1200)))
    return build_corpus(FolderSource(path=texts), store=store, name="tiny", vocab_size=SHAPE.vocab_size).hash


def tiny_answers(store: Path, corpus: str) -> str:
    """The hash of a corpus of prompts with answers, both of very different lengths, with the tokenizer of `corpus`."""
    draw = random.Random(0)
    rows = [
        {part: "".join(draw.choice("abcdefgh") for _ in range(draw.randint(2, most))) for part, most in sizes.items()}
        for sizes in [{"prompt": 200, "answer": 60}] * 60
    ]
    file = store / "answers.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_corpus(
        FolderSource(path=file, rows=RowFields(prompt="prompt", answer="answer")),
        store=store,
        name="answers",
        tokenizer_file=store / "corpora" / corpus / "tokenizer.json",
    ).hash


def short_stage(corpus: str, *, copied_spans: float = 0.5) -> ShortStage:
    return ShortStage(
        seq_len=32,
        batch_sequences=2,
        rope_base=1e4,
        peak_rate=0.01,
        warmup_steps=4,
        final_rate_ratio=0.25,
        data=DataMix(corpus=corpus, split="short", copied_spans=copied_spans),
        optimizer=AdamW(beta2=0.98),
    )


def long_stage(
    corpus: str,
    *,
    optimizer_state: OptimizerState = "fresh",
    final_rate_ratio: float = 1.0,
    copied_spans: float = 0.5,
) -> LongStage:
    return LongStage(
        seq_len=64,
        batch_sequences=1,
        rope_base=1e5,
        start_rate=0.0025,
        optimizer_state=optimizer_state,
        warmup_steps=2,
        final_rate_ratio=final_rate_ratio,
        data=DataMix(corpus=corpus, split="long", copied_spans=copied_spans),
    )


def segment_of(
    kind: SegmentKind,
    stage: ShortStage | LongStage,
    *,
    parent: CheckpointRef | None = None,
    horizon_steps: int | None = None,
    seed: int = 0,
    shape: ModelShape = SHAPE,
) -> Segment:
    return Segment(kind=kind, parent=parent, shape=shape, stage=stage, seed=seed, horizon_steps=horizon_steps)


def trained(shape: ModelShape = SHAPE, *, seed: int = 0) -> tuple[LlamaForCausalLM, torch.optim.Optimizer]:
    """A model after one update that moved every weight, and its optimizer."""
    model = build_model(shape, rope_base=1e4, max_positions=32, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(input_ids=torch.arange(30).unsqueeze(0)).logits.square().mean().backward()
    optimizer.step()
    return model, optimizer


def somewhere(ref: CheckpointRef) -> StoredCheckpoint:
    """A checkpoint that is only named."""
    return StoredCheckpoint(ref=ref, path="checkpoints/none", digest="0" * 64)
