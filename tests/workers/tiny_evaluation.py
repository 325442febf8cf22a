"""Small real corpora, models and evaluators that the tests of measuring share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from workers.corpus import Corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_sources import FolderSource
from workers.spec import Chunking, ChunkingMode, EvaluationDocuments, Evaluator, Reference

torch.set_num_threads(1)

COPY = Reference(kind="copy")
LENGTH = 96


def named_values(seed: int, names: int, lines: int) -> str:
    """Text that repeats long names far apart, so that a reference finds key tokens."""
    draw = random.Random(seed)
    known = ["".join(draw.choice("abcdeghiknorstu") for _ in range(9)) for _ in range(names)]
    return "".join(f"set {draw.choice(known)} = {draw.randrange(100)} to the ünit\n" for _ in range(lines))


def repeating_corpus(store: Path) -> Corpus:
    texts = store / "texts"
    texts.mkdir(parents=True)
    for number in range(30):
        (texts / f"{number}.txt").write_text(named_values(number, names=4, lines=24))
    source = FolderSource(path=texts)
    manifest = build_corpus(source, store=store, name="repeating", vocab_size=300, held_out_share=0.3)
    return open_corpus(store, manifest.hash)


def evaluator_of(
    corpus: Corpus,
    *,
    reference: Reference = COPY,
    count: int = 6,
    mode: ChunkingMode = "exact",
    gain_threshold: float = 1.0,
    short_context_gap: bool = False,
) -> Evaluator:
    return Evaluator(
        reference=reference,
        documents=EvaluationDocuments(corpus=corpus.hash, count=count, length=LENGTH),
        chunking=Chunking(length=16, stride=8, mode=mode),
        gain_threshold=gain_threshold,
        short_context_gap=short_context_gap,
    )


def tiny_llama(vocab_size: int, seed: int = 0, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    return LlamaForCausalLM(config).eval()


def byte_tokenizer(texts: list[str], vocab_size: int, *, adds_beginning: bool = False) -> Tokenizer:
    """A byte-level BPE with `<unk>`, `<s>` and `</s>` as tokens 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if adds_beginning:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def model_folder(
    folder: Path, tokenizer: Tokenizer, *, seed: int = 0, beginning: str | None = None, dtype: torch.dtype | None = None
) -> Path:
    """A Hugging Face model folder; `beginning` is what its tokenizer_config.json calls bos_token."""
    model = tiny_llama(tokenizer.get_vocab_size(), seed=seed)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    if beginning is not None:
        settings = {"bos_token": beginning, "eos_token": "</s>", "add_bos_token": True}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
