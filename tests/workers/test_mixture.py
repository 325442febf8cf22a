"""Mixtures: exact shares over any prefix, one order whoever reads it, and what was before stays as it was."""

from __future__ import annotations

import dataclasses
import random
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.tiny_training import short_stage, tiny_answers, tiny_corpus
from workers.answers import IGNORED
from workers.corpus import find_corpus, open_corpus
from workers.corpus_build import build_corpus
from workers.corpus_sources import FolderSource
from workers.errors import CorpusError
from workers.mixture import Batch, open_training_data
from workers.order import Turns, insert_copied_spans, sequence_index, window_count
from workers.spec import SHARE_UNIT, BlendedSource, DataMix


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four corpora: `tiny`, `other` and `answers` with the same tokenizer, and `foreign` with one of its own."""
    root = tmp_path_factory.mktemp("store")
    tiny = tiny_corpus(root)
    tiny_answers(root, tiny)
    tokenizer = root / "corpora" / tiny / "tokenizer.json"
    for name, letters in (("other", "stuvwxyz \n"), ("foreign", "0123456789 \n")):
        draw = random.Random(name)
        texts = root / name
        texts.mkdir()
        for number in range(40):
            size = draw.choice([30, 200, 900])
            (texts / f"{number}.txt").write_text("".join(draw.choice(letters) for _ in range(size)))
        build_corpus(
            FolderSource(path=texts),
            store=root,
            name=name,
            vocab_size=290,
            tokenizer_file=tokenizer if name == "other" else None,
        )
    return root


def mix(store: Path, *, share: float = 0.3, **options: object) -> DataMix:
    other = BlendedSource(corpus=find_corpus(store, "other"), split="long", share=share)
    data = DataMix(corpus=find_corpus(store, "tiny"), split="short", copied_spans=0.5, blended=(other,))
    return dataclasses.replace(data, **options)  # type: ignore[arg-type]


@given(weights=st.lists(st.integers(1, 400), min_size=1, max_size=8))
@settings(max_examples=10, deadline=None)
def test_every_source_is_within_one_sequence_of_its_share_after_any_number(weights: list[int]) -> None:
    weights[0] += SHARE_UNIT - sum(weights)
    turns = Turns.of([weight / SHARE_UNIT for weight in weights])
    taken = np.stack([np.cumsum(turns.sources == index) for index in range(len(weights))])
    due = np.outer(weights, np.arange(1, SHARE_UNIT + 1))
    assert (np.abs(taken * SHARE_UNIT - due) < SHARE_UNIT).all()


def test_turns_count_each_source_from_its_own_beginning_and_go_on_after_a_period() -> None:
    turns = Turns.of([0.5, 0.2, 0.3])
    seen: list[list[int]] = [[], [], []]
    for position in [*range(40), *range(SHARE_UNIT - 20, SHARE_UNIT + 20)]:
        source, rank = turns.at(position)
        seen[source].append(rank)
    for ranks, share in zip(seen, (0.5, 0.2, 0.3), strict=True):
        n = round(40 * share)
        assert ranks[:n] == list(range(n))
        assert ranks[n:] == list(range(ranks[n], ranks[n] + n))
        assert abs(ranks[n] - (SHARE_UNIT - 20) * share) < 1


@pytest.mark.parametrize("shares", [[0.5, 0.4], [1.2, -0.2], [1 / 3, 2 / 3], [1.0, 0.0]])
def test_shares_that_are_none_are_refused(shares: list[float]) -> None:
    with pytest.raises(CorpusError, match="positive, of at most four decimals, and sum to 1"):
        Turns.of(shares)


def test_one_source_as_a_stream_is_what_it_has_always_been(store: Path) -> None:
    """Windows of the whole split in the order of the seed, with copied spans drawn by position."""
    corpus = open_corpus(store, find_corpus(store, "tiny"))
    data = open_training_data(store, DataMix(corpus=corpus.hash, split="short", copied_spans=0.5), seq_len=32)
    tokens = corpus.tokens("short")
    count = window_count(len(tokens), 32)
    batch = data.batch(seed=3, first=count - 20, count=40)  # across epochs
    assert batch.positions is None
    for row, position in enumerate(range(count - 20, count + 20)):
        begin = sequence_index(3, position, count) * 32
        expected = tokens[begin : begin + 33].astype(np.int64)
        insert_copied_spans([expected], seq_len=32, share=0.5, seed=3, position=position)
        assert np.array_equal(batch.inputs[row], expected[:-1])
        assert np.array_equal(batch.targets[row], expected[1:])


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_sequences_come_from_the_sources_in_their_shares(store: Path, packing: str) -> None:
    data = open_training_data(store, mix(store, share=0.25, packing=packing, copied_spans=0.0), seq_len=32)
    tokenizer = open_corpus(store, find_corpus(store, "other")).tokenizer
    letters = [set(tokenizer.decode(row.tolist())) for row in data.batch(seed=0, first=0, count=80).inputs]
    other = [bool(found & set("stuvwxyz")) for found in letters]
    assert not any(found & set("stuvwxyz") and found & set("abcdefgh") for found in letters)
    for n in range(1, 81):
        assert abs(sum(other[:n]) - 0.25 * n) < 1


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_readers_ahead_of_time_and_resumes_get_the_same_sequences(store: Path, packing: str) -> None:
    """B10: read alone, by one thread and by four, from the beginning and from step 7 on."""
    stage = short_stage("", copied_spans=0.5)

    def step(number: int) -> Batch:
        data = open_training_data(store, mix(store, packing=packing), seq_len=stage.seq_len)
        return data.batch(seed=1, first=number * stage.batch_sequences, count=stage.batch_sequences)

    unbroken = [step(number) for number in range(14)]
    for workers in (1, 4):
        with ThreadPoolExecutor(workers) as pool:
            for first in (0, 7):
                for ours, theirs in zip(pool.map(step, range(first, 14)), unbroken[first:], strict=True):
                    assert np.array_equal(ours.inputs, theirs.inputs)
                    assert np.array_equal(ours.targets, theirs.targets)


def test_batches_of_any_size_are_cut_from_one_order(store: Path) -> None:
    """B17, B24: what several processes take together is what one takes."""
    data = open_training_data(store, mix(store, packing="documents"), seq_len=16)
    whole = data.batch(seed=2, first=40, count=24)
    for size in (1, 3, 8):
        parts = [data.batch(seed=2, first=at, count=size) for at in range(40, 64, size)]
        assert np.array_equal(np.concatenate([part.inputs for part in parts]), whole.inputs)
        assert whole.positions is not None
        positions = [part.positions for part in parts if part.positions is not None]
        assert np.array_equal(np.concatenate(positions), whole.positions)


def test_sources_of_one_corpus_have_orders_of_their_own(store: Path) -> None:
    tiny = find_corpus(store, "tiny")
    again = BlendedSource(corpus=tiny, split="short", share=0.5)
    data = open_training_data(store, DataMix(corpus=tiny, split="short", blended=(again,)), seq_len=32)
    order = [[source.seed(0) for source in data.sources], [source.seed(1) for source in data.sources]]
    assert len({seed for seeds in order for seed in seeds}) == 4
    assert order[0][0] == 0


def test_a_source_of_another_tokenizer_is_refused(store: Path) -> None:
    foreign = BlendedSource(corpus=find_corpus(store, "foreign"), split="short", share=0.5)
    with pytest.raises(CorpusError, match="different tokenizers: build both with one"):
        open_training_data(store, mix(store, blended=(foreign,)), seq_len=32)


def test_what_makes_no_mixture_is_refused(store: Path) -> None:
    twice = (*mix(store).blended, *mix(store, share=0.1).blended)
    for data, message in (
        (mix(store, blended=twice), "add their shares"),
        (mix(store, share=1.0), "sum to 1"),
        (mix(store, full_length_share=0.5), 'needs packing "documents"'),
        (mix(store, min_document_tokens=10**6), r"short split: 0 tokens qualify: a window needs 33"),
        (mix(store, packing="documents", full_length_share=0.5, min_document_tokens=10**6), r"cannot be met: 0 tokens"),
    ):
        with pytest.raises(CorpusError, match=message):
            open_training_data(store, data, seq_len=32)
    with pytest.raises(CorpusError, match="the model's vocab_size is 10"):
        open_training_data(store, mix(store), seq_len=32, vocab_size=10)


def test_a_missing_corpus_is_named(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store / "corpora" / find_corpus(store, "tiny"), tmp_path / "corpora" / find_corpus(store, "tiny"))
    with pytest.raises(CorpusError, match=f"no corpus {find_corpus(store, 'other')}"):
        open_training_data(tmp_path, mix(store), seq_len=32)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_only_answers_count_where_a_corpus_marks_them_and_all_tokens_elsewhere(store: Path, packing: str) -> None:
    """Inputs are those of a corpus without marks; a target counts if its token is marked, which the text tells."""
    answers = open_corpus(store, find_corpus(store, "answers"))
    plain = BlendedSource(corpus=find_corpus(store, "tiny"), split="short", share=0.25)
    mixed = DataMix(corpus=answers.hash, split="short", packing=packing, blended=(plain,))  # type: ignore[arg-type]
    data = open_training_data(store, mixed, seq_len=32)
    batch = data.batch(seed=1, first=0, count=40)
    unmarked = dataclasses.replace(data, sources=tuple(dataclasses.replace(s, answers=None) for s in data.sources))
    whole = unmarked.batch(seed=1, first=0, count=40)
    assert np.array_equal(batch.inputs, whole.inputs)
    counted = batch.targets != IGNORED
    assert np.array_equal(batch.targets[counted], whole.targets[counted])
    of_plain = [data.turns.at(position)[0] == 1 for position in range(40)]
    assert counted[of_plain].all()
    per_sequence = counted.sum(axis=1)[[not plain for plain in of_plain]]
    assert per_sequence.min() == 0  # a piece of a long prompt
    assert per_sequence.max() > per_sequence.mean() > 0
    for first, count in ((0, 40), (3, 1), (17, 5)):
        found = data.counted_targets(seed=1, first=first, count=count)
        assert found == counted[first : first + count].sum()
    assert unmarked.counted_targets(seed=1, first=3, count=5) == 5 * 32


def test_an_epoch_counts_every_answer_once(store: Path) -> None:
    corpus = open_corpus(store, find_corpus(store, "answers"))
    assert corpus.manifest.answers is not None
    data = open_training_data(store, DataMix(corpus=corpus.hash, split="short", packing="documents"), seq_len=1)
    per_epoch = data.sources[0].packing.per_epoch
    assert data.counted_targets(seed=0, first=0, count=per_epoch) == corpus.manifest.answers.short_tokens


def test_copied_spans_in_a_corpus_of_answers_are_refused(store: Path) -> None:
    answers = find_corpus(store, "answers")
    blended = BlendedSource(corpus=answers, split="short", share=0.25, copied_spans=0.5)
    for data in (DataMix(corpus=answers, split="long", copied_spans=0.25), mix(store, blended=(blended,))):
        with pytest.raises(CorpusError, match=f"corpus {answers} marks answers, .* set its copied_spans to 0"):
            open_training_data(store, data, seq_len=32)
