"""References: the copy model's probabilities, any Hugging Face model, and the store that keeps what they found."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional

from tests.workers.tiny_evaluation import (
    LENGTH,
    byte_tokenizer,
    evaluator_of,
    model_folder,
    named_values,
    repeating_corpus,
)
from workers.chunking import context_starts
from workers.corpus import Corpus
from workers.documents import Window, evaluation_windows
from workers.errors import CorpusError, ReferenceModelError
from workers.reference_cache import key_tokens, reference_losses
from workers.reference_copy import CONTEXTS, CopyReference, Ngrams, SeenContexts
from workers.reference_digest import reference_digest
from workers.reference_huggingface import HuggingFaceReference
from workers.spec import Chunking, EvaluationDocuments, Evaluator, Reference

TEXTS = [named_values(seed, names=4, lines=20) for seed in range(5)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return repeating_corpus(tmp_path_factory.mktemp("store"))


@pytest.fixture
def store(corpus: Corpus, tmp_path: Path) -> Path:
    """A store that has the corpus and no references yet."""
    shutil.copytree(corpus.path, tmp_path / "corpora" / corpus.hash)
    return tmp_path


def windows_of(corpus: Corpus, evaluator: Evaluator) -> tuple[Window, ...]:
    return evaluation_windows(corpus, evaluator.documents)


# --- evaluation documents ---------------------------------------------------------------------------------------------


def test_windows_are_spread_over_documents_and_never_cross_two(corpus: Corpus) -> None:
    windows = evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=12, length=LENGTH))
    held_out = {document.id: document for document in corpus.held_out}
    first = [window.document for window in windows[: len(held_out)]]
    assert len(set(first)) == len(first) == len(held_out)
    for window in windows:
        assert window.text in held_out[window.document].text
        assert corpus.tokenizer.decode(window.tokens.tolist()) == window.text
        start, end = window.spans[10]
        assert corpus.tokenizer.decode([int(window.tokens[10])]) == window.text[start:end]


def test_fewer_windows_are_the_beginning_of_more(corpus: Corpus) -> None:
    few = evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=3, length=LENGTH))
    more = evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=12, length=LENGTH))
    assert [window.tokens.tolist() for window in few] == [window.tokens.tolist() for window in more[:3]]


def test_too_many_windows_are_refused_with_the_number_there_is(corpus: Corpus) -> None:
    there = sum(len(document.tokens) // LENGTH for document in corpus.held_out)
    with pytest.raises(CorpusError, match=f"has {there} held-out windows of {LENGTH} tokens, 999 are asked for"):
        evaluation_windows(corpus, EvaluationDocuments(corpus=corpus.hash, count=999, length=LENGTH))


# --- copy reference ---------------------------------------------------------------------------------------------------


def test_ngram_probabilities_sum_to_one_in_every_context() -> None:
    tokens = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2, 4, 4, 4, 0, 1], dtype=np.int64)
    ngrams = Ngrams(tokens, vocab_size=6)
    for context in ([0, 1], [4, 4], [5, 5], [2, 0], [3, 5]):
        total = sum(ngrams.probabilities(np.array([*context, token]))[2] for token in range(6))
        assert total == pytest.approx(1.0, abs=1e-12)


def test_ngram_probability_by_hand() -> None:
    """Tokens 0 1 0 1 1, vocabulary 2. Order 1: p(1) = (3 + 2/2) / (5 + 2) = 4/7. After 0 came 1 twice:
    p(1|0) = (2 + 1 * 4/7) / (2 + 1) = 6/7. After 1 0 came 1 once: p(1|1 0) = (1 + 6/7) / 2 = 13/14."""
    ngrams = Ngrams(np.array([0, 1, 0, 1, 1], dtype=np.int64), vocab_size=2)
    found = ngrams.probabilities(np.array([1, 0, 1], dtype=np.int64))
    assert found[0] == pytest.approx(4 / 7, abs=1e-15)
    assert found[2] == pytest.approx(13 / 14, abs=1e-15)


def test_seen_contexts_give_a_distribution_over_the_vocabulary() -> None:
    ids = [3, 1, 2, 3, 1, 2, 3, 1, 4, 3, 1, 2, 3, 1]
    seen = SeenContexts(ids)
    for position in range(1, len(ids)):
        contexts = seen.contexts(position)
        total = sum(seen.probability(contexts, token, 1 / 7) for token in range(7))
        assert total == pytest.approx(1.0, abs=1e-12)
        seen.add(position, contexts)


def test_seen_contexts_probability_by_hand() -> None:
    """5 6 5 7 5: after 5 came 6 and 7, so p(6) = (1 + 2 * 1/8) / (2 + 2); the context 7 5 is new."""
    seen = SeenContexts([5, 6, 5, 7, 5, 6])
    for position in range(1, 5):
        seen.add(position, seen.contexts(position))
    assert seen.probability(seen.contexts(5), 6, 1 / 8) == pytest.approx(1.25 / 4, abs=1e-15)


def test_forgetting_leaves_what_a_fresh_reader_of_the_chunk_knows() -> None:
    ids = np.random.default_rng(0).integers(0, 3, 60).tolist()
    near = SeenContexts(ids)
    for position in range(1, len(ids)):
        start = max(0, position - 12)
        near.forget_before(start)
        fresh = SeenContexts(ids)
        for earlier in range(start + 1, position):
            fresh.add(earlier, [context for context in fresh.contexts(earlier) if len(context) <= earlier - start])
        contexts = near.contexts(position)
        for token in range(3):
            assert near.probability(contexts, token, 0.1) == fresh.probability(contexts, token, 0.1)
        near.add(position, contexts)
    assert CONTEXTS[-1] < 12


def test_copy_reference_sees_less_in_a_chunk_and_nothing_of_it_is_lost(corpus: Corpus) -> None:
    evaluator = evaluator_of(corpus)
    windows = windows_of(corpus, evaluator)
    losses = CopyReference(corpus).score(windows, evaluator.chunking)
    starts = context_starts(LENGTH, evaluator.chunking)
    for item in losses:
        assert np.isnan(item.full).tolist() == [True] + [False] * (LENGTH - 1)
        assert np.isnan(item.local).tolist() == (starts == 0).tolist()
    assert np.nanmean([item.full for item in losses]) < np.nanmean([item.local for item in losses])


def test_copy_reference_gives_the_same_numbers_every_time(corpus: Corpus) -> None:
    evaluator = evaluator_of(corpus)
    windows = windows_of(corpus, evaluator)
    once, again = (CopyReference(corpus).score(windows, evaluator.chunking) for _ in range(2))
    for a, b in zip(once, again, strict=True):
        np.testing.assert_array_equal(a.full, b.full)
        np.testing.assert_array_equal(a.local, b.local)


# --- Hugging Face reference -------------------------------------------------------------------------------------------


def plain_losses(folder: Path, ids: list[int]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """NLL of ids[1:] by the model's own logits, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").numpy()


def test_own_tokenizer_is_scored_as_the_model_itself_scores(corpus: Corpus, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", corpus.tokenizer)
    evaluator = evaluator_of(corpus, count=2)
    windows = windows_of(corpus, evaluator)
    losses = HuggingFaceReference(folder, corpus=corpus).score(windows, evaluator.chunking)
    starts = context_starts(LENGTH, evaluator.chunking)
    for window, item in zip(windows, losses, strict=True):
        ids = window.tokens.tolist()
        assert item.spans is None
        assert np.isnan(item.full[0])
        np.testing.assert_allclose(item.full[1:], plain_losses(folder, ids), rtol=0, atol=2e-5)
        for position in (17, 24, 25, 50, LENGTH - 1):
            alone = plain_losses(folder, ids[starts[position] : position + 1])[-1]
            assert item.local[position] == pytest.approx(alone, abs=2e-5)


def test_exactly_one_beginning_stands_before_window_and_chunk(corpus: Corpus, tmp_path: Path) -> None:
    """B46 and B48: a tokenizer that adds <s> (1) itself and one that does not give the same; </s> (2) is not used."""
    evaluator = evaluator_of(corpus, count=2)
    windows = windows_of(corpus, evaluator)
    results = []
    for adds in (False, True):
        tokenizer = byte_tokenizer(TEXTS, 290, adds_beginning=adds)
        folder = model_folder(tmp_path / f"adds-{adds}", tokenizer, beginning="<s>")
        reference = HuggingFaceReference(folder, corpus=corpus)
        assert reference.beginning_id == 1
        results.append(reference.score(windows, evaluator.chunking))
    for plain, adding, window in zip(*results, windows, strict=True):
        np.testing.assert_array_equal(plain.full, adding.full)
        np.testing.assert_array_equal(plain.local, adding.local)
        ids = tokenizer.encode(window.text, add_special_tokens=False).ids
        np.testing.assert_allclose(plain.full, plain_losses(folder, [1, *ids]), rtol=0, atol=2e-5)
        start = context_starts(len(ids), evaluator.chunking)[-1]
        assert plain.local[-1] == pytest.approx(plain_losses(folder, [1, *ids[start:]])[-1], abs=2e-5)


def test_without_a_named_beginning_the_first_token_is_not_scored(corpus: Corpus, tmp_path: Path) -> None:
    """B48: config.json's default bos_token_id is not taken for one."""
    tokenizer = byte_tokenizer(TEXTS, 290)
    folder = model_folder(tmp_path / "model", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "bos_token_id": 1}))
    reference = HuggingFaceReference(folder, corpus=corpus)
    assert reference.beginning_id is None
    (item,) = reference.score(windows_of(corpus, evaluator_of(corpus, count=1)), Chunking(length=16, stride=8))
    assert np.isnan(item.full).tolist() == [True] + [False] * (len(item.full) - 1)


def test_another_tokenizer_s_key_tokens_are_found_by_their_characters(corpus: Corpus, store: Path) -> None:
    tokenizer = byte_tokenizer(TEXTS, 340)
    folder = model_folder(store / "model", tokenizer, beginning="<s>")
    evaluator = evaluator_of(corpus, reference=Reference(kind="huggingface", path=str(folder)), gain_threshold=-1.0)
    evaluator = dataclasses.replace(evaluator, full_nll_ceiling=6.0)
    windows = windows_of(corpus, evaluator)
    losses = reference_losses(evaluator, windows, corpus=corpus, store=store)
    selected = key_tokens(evaluator, windows, corpus=corpus, store=store)
    count = 0
    for item, window, masks in zip(losses, windows, selected, strict=True):
        assert item.spans is not None
        assert len(item.full) != len(window.tokens)
        of_reference = np.zeros(len(window.text), dtype=bool)
        for start, end in item.spans[(item.local - item.full > -1.0) & (item.full < 6.0)]:
            of_reference[start:end] = True
        for start, end in window.spans[masks.key]:
            inside = [of_reference[at] for at in range(start, end) if not window.text[at].isspace()]
            assert all(inside)
        count += int(masks.key.sum())
    assert count > 20


def test_a_half_precision_model_is_scored_from_float32_logits(corpus: Corpus, tmp_path: Path) -> None:
    """A bfloat16 loss between 4 and 8 has steps of 1/32: thresholds on it would be noise."""
    folder = model_folder(tmp_path / "model", corpus.tokenizer, dtype=torch.bfloat16)
    reference = HuggingFaceReference(folder, corpus=corpus)
    (item,) = reference.score(windows_of(corpus, evaluator_of(corpus, count=1)), Chunking(length=16, stride=8))
    losses = item.full[1:]
    assert losses.dtype == np.float32
    assert (np.abs(losses * 32 - np.round(losses * 32)) > 1e-3).mean() > 0.5


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("model.safetensors", r"holds no \.safetensors weights"),
        ("config.json", "has no config.json"),
        ("tokenizer.json", "without character offsets cannot place key tokens"),
    ],
)
def test_an_incomplete_model_folder_is_refused_before_any_work(
    corpus: Corpus, store: Path, remove: str, message: str
) -> None:
    """B53: a tokenizer without offsets is one of them."""
    folder = model_folder(store / "model", corpus.tokenizer)
    (folder / remove).unlink()
    evaluator = evaluator_of(corpus, reference=Reference(kind="huggingface", path=str(folder)))
    with pytest.raises(ReferenceModelError, match=message):
        key_tokens(evaluator, windows_of(corpus, evaluator), corpus=corpus, store=store)


def test_other_weights_than_the_evaluator_names_are_refused(corpus: Corpus, store: Path) -> None:
    named = reference_digest(model_folder(store / "one", corpus.tokenizer, seed=0))
    other = model_folder(store / "two", corpus.tokenizer, seed=1)
    evaluator = evaluator_of(corpus, reference=Reference(kind="huggingface", path=str(other), digest=named))
    with pytest.raises(ReferenceModelError, match="the evaluator names"):
        key_tokens(evaluator, windows_of(corpus, evaluator), corpus=corpus, store=store)


def test_weights_that_the_config_does_not_describe_are_refused(corpus: Corpus, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", corpus.tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ReferenceModelError, match=r"do not agree: missing_keys model\.layers\.1"):
        HuggingFaceReference(folder, corpus=corpus)


def test_a_vocabulary_smaller_than_the_tokenizer_s_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", byte_tokenizer(TEXTS, 280))
    byte_tokenizer(TEXTS, 290).save(str(folder / "tokenizer.json"))
    with pytest.raises(ReferenceModelError, match="the model has 280 tokens, its tokenizer 290"):
        HuggingFaceReference(folder, corpus=corpus)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_computed(corpus: Corpus, store: Path) -> None:
    folder = model_folder(store / "model", corpus.tokenizer)
    reference = Reference(kind="huggingface", path=str(folder), digest=reference_digest(folder))
    evaluator = evaluator_of(corpus, reference=reference, gain_threshold=0.1)
    windows = windows_of(corpus, evaluator)
    first = key_tokens(evaluator, windows, corpus=corpus, store=store)
    shutil.rmtree(folder)
    again = key_tokens(evaluator, windows, corpus=corpus, store=store)
    assert [item.key.tolist() for item in first] == [item.key.tolist() for item in again]
    assert [item.short.tolist() for item in first] == [item.short.tolist() for item in again]
    other = dataclasses.replace(evaluator, gain_threshold=-100.0, full_nll_ceiling=1e9)
    positions = [int(item.key.sum()) for item in key_tokens(other, windows, corpus=corpus, store=store)]
    assert positions == [LENGTH - 17] * len(windows)


def test_thresholds_share_the_losses_and_chunking_does_not(corpus: Corpus, store: Path) -> None:
    for gain_threshold, mode in ((1.0, "exact"), (1.5, "exact"), (1.0, "pku")):
        evaluator = evaluator_of(corpus, gain_threshold=gain_threshold, mode=mode)  # type: ignore[arg-type]
        key_tokens(evaluator, windows_of(corpus, evaluator), corpus=corpus, store=store)
    kept = [len(list(home.glob("key_tokens/*.npz"))) for home in (store / "references").iterdir()]
    assert sorted(kept) == [1, 2]
    assert len(list((store / "references").glob("*/scores.npz"))) == 2


def test_a_model_is_the_same_reference_wherever_it_lies(corpus: Corpus, store: Path) -> None:
    folder = model_folder(store / "model", corpus.tokenizer)
    for path in (folder, folder.rename(store / "moved")):
        if path.is_dir():
            evaluator = evaluator_of(corpus, reference=Reference(kind="huggingface", path=str(path)))
            key_tokens(evaluator, windows_of(corpus, evaluator), corpus=corpus, store=store)
    assert len(list((store / "references").iterdir())) == 1


def test_a_damaged_file_is_computed_again(corpus: Corpus, store: Path) -> None:
    evaluator = evaluator_of(corpus)
    windows = windows_of(corpus, evaluator)
    first = key_tokens(evaluator, windows, corpus=corpus, store=store)
    for file in (store / "references").rglob("*.npz"):
        file.write_bytes(file.read_bytes()[:50])
    again = key_tokens(evaluator, windows, corpus=corpus, store=store)
    assert [item.key.tolist() for item in again] == [item.key.tolist() for item in first]


def test_two_processes_at_once_find_the_same(corpus: Corpus, store: Path) -> None:
    script = """
import sys; from pathlib import Path
from workers.corpus import open_corpus; from workers.documents import evaluation_windows
from workers.reference_cache import key_tokens; from workers.spec import *
store, name = Path(sys.argv[1]), sys.argv[2]
evaluator = Evaluator(reference=Reference(kind="copy"), chunking=Chunking(length=16, stride=8),
                      documents=EvaluationDocuments(corpus=name, count=6, length=96))
corpus = open_corpus(store, name)
windows = evaluation_windows(corpus, evaluator.documents)
print([item.key.tolist() for item in key_tokens(evaluator, windows, corpus=corpus, store=store)])
assert "torch" not in sys.modules
"""
    command = [sys.executable, "-c", script, str(store), corpus.hash]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sorted(path.suffix for path in (store / "references").rglob("*.*")) == [".npz", ".npz"]


def test_counts_of_another_corpus_need_the_same_tokenizer(corpus: Corpus, store: Path) -> None:
    from tests.workers.tiny_training import tiny_corpus

    other = tiny_corpus(store / "other")
    shutil.copytree(store / "other" / "corpora" / other, store / "corpora" / other)
    evaluator = evaluator_of(corpus, reference=Reference(kind="copy", digest=other))
    with pytest.raises(ReferenceModelError, match="different tokenizers"):
        key_tokens(evaluator, windows_of(corpus, evaluator), corpus=corpus, store=store)


def test_tokenizer_of_the_corpus_is_recognised_in_a_model_folder(corpus: Corpus, tmp_path: Path) -> None:
    copied = Tokenizer.from_str(corpus.tokenizer.to_str())
    (item,) = HuggingFaceReference(model_folder(tmp_path / "model", copied), corpus=corpus).score(
        windows_of(corpus, evaluator_of(corpus, count=1)), Chunking(length=16, stride=8)
    )
    assert item.spans is None
