"""Marks of answers: which tokens they are of, how they lie in a file, and what a batch makes of them."""

from __future__ import annotations

import io

import numpy as np
import pytest

from workers.answers import AnswerMarks, AnswerWriter, answer_tokens
from workers.packing import DocumentPacking, Documents, StreamPacking


@pytest.mark.parametrize(
    ("spans", "answers", "expected"),
    [
        ([(0, 2), (2, 5), (5, 6)], [(2, 5)], [0, 1, 0]),
        ([(0, 2), (2, 5), (5, 6)], [(2, 4)], [0, 0, 0]),  # a token that ends in a prompt belongs to it
        ([(0, 2), (2, 5), (5, 6)], [(4, 6)], [0, 1, 1]),  # one that begins in a prompt and ends in an answer does not
        ([(0, 1), (0, 1), (1, 2)], [(0, 1)], [1, 1, 0]),  # two tokens of one character
        ([(0, 1), (2, 2), (3, 4)], [(1, 2)], [0, 1, 0]),  # white space that its token's span leaves out
        ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (1, 1), (2, 3)], [1, 0, 1, 0]),
        ([(0, 0), (0, 3)], [(0, 3)], [0, 1]),
        ([(0, 1), (1, 2)], [], [0, 0]),
    ],
)
def test_a_token_belongs_to_whom_its_last_character_belongs(
    spans: list[tuple[int, int]], answers: list[tuple[int, int]], expected: list[int]
) -> None:
    assert answer_tokens(np.array(spans), answers).tolist() == [bool(mark) for mark in expected]


def test_marks_are_a_bit_each_and_read_back_from_any_place() -> None:
    written = np.random.default_rng(0).random(53) < 0.4
    file = io.BytesIO()
    writer = AnswerWriter(file)
    for part in np.split(written, [0, 3, 8, 9, 30]):  # documents of any length, one of them without a token
        writer.add(part)
    writer.finish()
    assert len(file.getvalue()) == 7
    assert writer.answers == written.sum()
    marks = AnswerMarks(bits=np.frombuffer(file.getvalue(), dtype=np.uint8))
    for begin in range(53):
        for length in range(54 - begin):
            assert np.array_equal(marks.of(begin, length), written[begin : begin + length])


def marks(*positions: int) -> AnswerMarks:
    found = np.zeros(32, dtype=np.bool_)
    found[list(positions)] = True
    return AnswerMarks(bits=np.packbits(found, bitorder="little"))


#: Documents of 4, 2 and 5 tokens, each followed by its separator: at 0-3 4, 5-6 7, 8-12 13.
DOCUMENTS = Documents(begins=np.array([0, 5, 8]), lengths=np.array([4, 2, 5]))
TOKENS = np.arange(100, 114)
#: Answers: the end of the first with its separator, the beginning of the second, the middle of the third.
ANSWERS = marks(2, 3, 4, 5, 10)


def test_windows_of_a_stream_count_the_targets_that_are_answers() -> None:
    packing = StreamPacking.of(DOCUMENTS, seq_len=4)  # targets 1-4, 5-8 and 9-12
    expected = {101: [0, 1, 1, 1], 105: [1, 0, 0, 0], 109: [0, 1, 0, 0]}
    for position in range(3):
        sequence = packing.read(TOKENS, seed=0, position=position, copied_spans=0.0)
        found = packing.answered(ANSWERS, seed=0, position=position)
        assert found.tolist() == [bool(mark) for mark in expected.pop(int(sequence.targets[0]))]


def test_documents_kept_apart_count_the_targets_that_are_answers() -> None:
    """The first token of a document is no target, whoever's it is; its separator is."""
    packing = DocumentPacking.of(DOCUMENTS, seq_len=11)
    sequence = packing.read(TOKENS, seed=0, position=0, copied_spans=0.0)
    found = packing.answered(ANSWERS, seed=0, position=0)
    assert sorted(sequence.targets.tolist()) == [101, 102, 103, 104, 106, 107, 109, 110, 111, 112, 113]
    assert sorted(sequence.targets[found].tolist()) == [102, 103, 104, 110]


@pytest.mark.parametrize("seq_len", [1, 3, 5])
def test_marks_go_with_their_targets_however_documents_are_cut(seq_len: int) -> None:
    answers = {102, 103, 104, 105, 110}
    for packing in (
        StreamPacking.of(DOCUMENTS, seq_len=seq_len),
        DocumentPacking.of(DOCUMENTS, seq_len=seq_len),
        DocumentPacking.of(DOCUMENTS, seq_len=3, full_length_share=0.5),
    ):
        for position in range(20):
            sequence = packing.read(TOKENS, seed=3, position=position, copied_spans=0.0)
            found = packing.answered(ANSWERS, seed=3, position=position)
            assert found.tolist() == [int(target) in answers for target in sequence.targets]
