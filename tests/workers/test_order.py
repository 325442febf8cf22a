"""Order of training sequences and copied spans: pure functions of (seed, position)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tests.workers.tiny_training import long_stage, short_stage
from workers.errors import CorpusError
from workers.order import (
    COPIED_SPAN,
    NATURAL_RUN,
    insert_copied_spans,
    sequence_index,
    window_count,
)
from workers.packing import Documents, StreamPacking
from workers.spec import LongStage, ShortStage

#: Every token of this stream tells its own place.
STREAM = np.arange(32 * 50 + 1, dtype=np.uint16)
NATURAL = short_stage("corpus", copied_spans=0.0)
MIXED = short_stage("corpus", copied_spans=0.5)


def batch(
    tokens: npt.NDArray[np.uint16], stage: ShortStage | LongStage, *, seed: int, step: int
) -> npt.NDArray[np.int64]:
    """The sequences of an update over one document and its end: inputs and the last target."""
    one = Documents(begins=np.zeros(1, dtype=np.int64), lengths=np.array([len(tokens) - 1]))
    packing = StreamPacking.of(one, seq_len=stage.seq_len)
    rows = [
        packing.read(tokens, seed=seed, position=position, copied_spans=stage.data.copied_spans)
        for position in range(step * stage.batch_sequences, (step + 1) * stage.batch_sequences)
    ]
    return np.stack([np.append(row.inputs, row.targets[-1]) for row in rows])


def test_every_epoch_visits_each_window_once_and_a_resume_continues_the_order() -> None:
    """B01: 1,000 sequences, batches of 8, 500 steps, resumed in the second epoch at step 200."""
    unbroken = [sequence_index(3, position, 1000) for position in range(4000)]
    assert set(Counter(unbroken).values()) == {4}
    resumed = [sequence_index(3, position, 1000) for position in range(200 * 8, 4000)]
    assert resumed == unbroken[1600:]
    epochs = [unbroken[start : start + 1000] for start in range(0, 4000, 1000)]
    assert all(first != second for first, second in pairwise(epochs))


def test_restart_after_every_step_skips_nothing() -> None:
    """B04: eleven restarts, one per step, cover the same sequences as one run."""
    whole = [sequence_index(0, position, 88) for position in range(88)]
    pieces = [[sequence_index(0, step * 8 + row, 88) for row in range(8)] for step in range(11)]
    assert [index for piece in pieces for index in piece] == whole
    assert sorted(whole) == list(range(88))


def test_segments_of_one_seed_never_draw_a_window_twice_within_an_epoch() -> None:
    """B05: three segments of 50 steps with 4 sequences out of 600."""
    drawn = [sequence_index(1337, position, 600) for position in range(3 * 50 * 4)]
    assert len(set(drawn)) == 600


def test_order_depends_on_the_seed() -> None:
    assert [sequence_index(0, p, 50) for p in range(50)] != [sequence_index(1, p, 50) for p in range(50)]


def test_first_windows_of_seed_zero_are_what_they_have_always_been() -> None:
    """Another order under the same seed would be another experiment under the same identity."""
    assert [sequence_index(0, position, 1000) for position in range(6)] == [998, 162, 670, 664, 185, 322]


def test_batch_holds_windows_and_targets_one_token_on() -> None:
    sequences = batch(STREAM, NATURAL, seed=0, step=5)
    assert sequences.dtype == np.int64
    assert sequences.shape == (2, 33)
    for row, position in zip(sequences, (10, 11), strict=True):
        begin = 32 * sequence_index(0, position, 50)
        assert row.tolist() == list(range(begin, begin + 33))


def test_one_epoch_uses_every_input_token_once() -> None:
    """B24: nothing is padded, so the tokens that a budget counts are the tokens that were read."""
    inputs = np.concatenate([batch(STREAM, NATURAL, seed=0, step=step)[:, :-1].ravel() for step in range(25)])
    assert sorted(inputs.tolist()) == list(range(32 * 50))
    assert window_count(32 * 50, 32) == 49
    assert window_count(32 * 50 + 1, 32) == 50


@pytest.mark.parametrize("stage", [NATURAL, MIXED])
def test_sequences_do_not_depend_on_the_batch_size(stage: ShortStage) -> None:
    """B24: the n-th sequence of a stage is the same in batches of one and of two."""
    ones = dataclasses.replace(stage, batch_sequences=1)
    singles = [batch(STREAM, ones, seed=4, step=step)[0].tolist() for step in range(40)]
    pairs = [row for step in range(20) for row in batch(STREAM, stage, seed=4, step=step).tolist()]
    assert singles == pairs


def test_split_shorter_than_a_window_is_an_error() -> None:
    with pytest.raises(CorpusError, match="a window needs 33"):
        batch(STREAM[:32], NATURAL, seed=0, step=0)


def test_memory_mapped_tokens_stay_as_they_are(tmp_path: Path) -> None:
    STREAM.tofile(tmp_path / "tokens.bin")
    tokens = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    mixed = dataclasses.replace(MIXED, data=dataclasses.replace(MIXED.data, copied_spans=1.0))
    assert np.array_equal(batch(tokens, mixed, seed=0, step=3), batch(STREAM, mixed, seed=0, step=3))
    assert np.array_equal(tokens, STREAM)


def copied(length: int, *, position: int, seed: int = 0, share: float = 1.0) -> list[int]:
    row = np.arange(length, dtype=np.int64)
    insert_copied_spans([row], seq_len=length - 1, share=share, seed=seed, position=position)
    return [int(token) for token in row]


@pytest.mark.parametrize("length", [5, 8, 33, 129, 1025])
def test_natural_runs_alternate_with_spans_copied_from_earlier_in_the_new_sequence(length: int) -> None:
    for position in range(30):
        row = copied(length, position=position)
        at, natural = 0, 0
        while at < length:
            run = at
            while run < length and row[run] == natural:  # the next natural token cannot occur any earlier
                run, natural = run + 1, natural + 1
            assert run - at <= NATURAL_RUN[1]
            assert run - at >= NATURAL_RUN[0] or run == length
            at = run
            while run < length and row[run] != natural:
                run += 1
            span = row[at:run]
            assert len(span) <= COPIED_SPAN[1]
            assert len(span) >= COPIED_SPAN[0] or run == length
            assert any(row[start : start + len(span)] == span for start in range(at - len(span) + 1))
            at = run


def test_about_half_of_the_positions_carry_spans_and_the_rest_is_untouched() -> None:
    changed = [copied(129, position=position, share=0.5) != list(range(129)) for position in range(2000)]
    assert 900 <= sum(changed) <= 1100
    assert not any(copied(129, position=position, share=0.0) != list(range(129)) for position in range(100))


def test_copied_spans_are_a_function_of_seed_and_position() -> None:
    assert copied(129, position=100) == copied(129, position=100)
    assert copied(129, position=100) != copied(129, position=101)
    assert copied(129, position=100) != copied(129, position=100, seed=1)


def test_copied_tokens_fill_about_half_of_a_long_sequence() -> None:
    """Runs and spans are about equally long (22.5 and 23 tokens), so half of a sequence is copies."""
    shares = [1 - len(set(copied(1025, position=position))) / 1025 for position in range(100)]
    assert 0.45 < float(np.mean(shares)) < 0.55


def test_spans_of_seed_zero_are_what_they_have_always_been() -> None:
    """Other spans under the same seed would be another experiment under the same identity."""
    assert [p for p in range(16) if copied(129, position=p, share=0.5) != list(range(129))] == [1, 2, 3, 7, 14, 15]
    assert copied(129, position=3)[:60] == [*range(28), *range(8, 22), *range(28, 40), *range(20, 26)]


def test_later_visit_to_a_window_gets_other_spans() -> None:
    stage = dataclasses.replace(
        long_stage("corpus"), data=dataclasses.replace(long_stage("corpus").data, copied_spans=1.0)
    )
    tokens = STREAM[: 64 + 1]  # one window: every step visits it
    assert not np.array_equal(batch(tokens, stage, seed=0, step=0), batch(tokens, stage, seed=0, step=1))
