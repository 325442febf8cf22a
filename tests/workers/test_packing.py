"""Packing: documents kept apart, nothing padded, every token once in an epoch, the same at any cut of the run."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from workers.errors import CorpusError
from workers.packing import DocumentPacking, Documents, StreamPacking

END = 0


def split_of(*lengths: int) -> tuple[np.ndarray, Documents]:
    """A split whose token says its document and place (1000 d + i + 1), and where its documents lie."""
    tokens = [[*(1000 * d + i + 1 for i in range(n)), END] for d, n in enumerate(lengths)]
    sizes = np.array([n + 1 for n in lengths], dtype=np.int64)
    where = Documents(begins=np.cumsum(sizes) - sizes, lengths=sizes - 1)
    return np.array([token for document in tokens for token in document], dtype=np.uint16), where


TOKENS, DOCUMENTS = split_of(40, 3, 9, 16, 1, 25, 7, 7, 33, 12)


def pieces(positions: np.ndarray) -> list[slice]:
    starts = [*np.flatnonzero(positions == 0).tolist(), len(positions)]
    return [slice(begin, end) for begin, end in pairwise(starts)]


@pytest.mark.parametrize(
    ("seq_len", "share"), [(1, None), (2, None), (16, None), (40, None), (2, 0.75), (16, 0.75), (40, 0.75)]
)
def test_every_input_has_its_target_in_its_own_document(seq_len: int, share: float | None) -> None:
    """B24: each sequence counts seq_len tokens, none of them padding and none without a prediction."""
    packing = DocumentPacking.of(DOCUMENTS, seq_len=seq_len, full_length_share=share)
    for position in range(60):
        sequence = packing.read(TOKENS, seed=1, position=position, copied_spans=0.0)
        assert sequence.positions is not None
        assert sequence.inputs.shape == sequence.targets.shape == sequence.positions.shape == (seq_len,)
        assert sequence.positions[0] == 0
        assert END not in sequence.inputs
        for part in pieces(sequence.positions):
            inputs, targets = sequence.inputs[part], sequence.targets[part]
            assert sequence.positions[part].tolist() == list(range(len(inputs)))
            assert inputs.tolist() == list(range(inputs[0], inputs[0] + len(inputs)))
            assert targets[:-1].tolist() == inputs[1:].tolist()
            length = int(DOCUMENTS.lengths[inputs[-1] // 1000])
            assert targets[-1] == (END if inputs[-1] % 1000 == length else inputs[-1] + 1)


def test_an_epoch_uses_every_input_token_once_but_for_a_last_piece() -> None:
    packing = DocumentPacking.of(DOCUMENTS, seq_len=8)
    for epoch in range(3):
        positions = range(epoch * packing.per_epoch, (epoch + 1) * packing.per_epoch)
        read = [packing.read(TOKENS, seed=5, position=p, copied_spans=0.0).inputs for p in positions]
        counts = Counter(np.concatenate(read).tolist())
        assert set(counts.values()) == {1}
        assert int(DOCUMENTS.lengths.sum()) - len(counts) < 8


def test_epochs_pack_shorter_pieces_anew_and_seeds_differ() -> None:
    packing = DocumentPacking.of(DOCUMENTS, seq_len=16)

    def epoch(seed: int, number: int) -> set[tuple[int, ...]]:
        positions = range(number * packing.per_epoch, (number + 1) * packing.per_epoch)
        return {tuple(packing.read(TOKENS, seed=seed, position=p, copied_spans=0.0).inputs.tolist()) for p in positions}

    assert epoch(0, 0) != epoch(0, 1) != epoch(1, 1)
    assert epoch(0, 0) == epoch(0, 0)


def test_full_length_share_holds_over_every_prefix() -> None:
    packing = DocumentPacking.of(DOCUMENTS, seq_len=16, full_length_share=0.75)
    full = 0
    for n in range(1, 200):
        positions = packing.read(TOKENS, seed=2, position=n - 1, copied_spans=0.0).positions
        assert positions is not None
        full += positions[-1] == 15
        assert abs(full - 0.75 * n) < 1


@pytest.mark.parametrize(("share", "full"), [(0.0, 0), (1.0, 50)])
def test_full_length_share_may_be_none_or_all(share: float, full: int) -> None:
    tokens, documents = split_of(40, 3, 9, 25, 2)
    packing = DocumentPacking.of(documents, seq_len=10, full_length_share=share)
    read = [packing.read(tokens, seed=0, position=p, copied_spans=0.0).positions for p in range(50)]
    assert sum(positions is not None and positions[-1] == 9 for positions in read) == full


def test_repacking_at_a_new_length_reads_the_same_tokens() -> None:
    def inputs(seq_len: int) -> set[int]:
        packing = DocumentPacking.of(DOCUMENTS, seq_len=seq_len)
        read = [packing.read(TOKENS, seed=0, position=p, copied_spans=0.0) for p in range(packing.per_epoch)]
        return {int(token) for sequence in read for token in sequence.inputs}

    assert inputs(1) == {int(token) for token in TOKENS if token}  # no piece is left over
    assert len(inputs(1) - inputs(32)) < 32


@pytest.mark.parametrize(
    ("seq_len", "share", "message"),
    [
        (64, 0.75, "0.75 cannot be met: 153 tokens qualify, 0 of them in documents of at least 64"),
        (200, None, "153 tokens qualify, 0 .*: one sequence of 200 cannot be filled"),
        (1, 0.5, "0 in shorter pieces do not fill one sequence of 1 for the others"),
        (16, 1.5, "full_length_share is 1.5: it must lie between 0 and 1"),
        (16, 0.12345, "at most four decimals"),
    ],
)
def test_what_cannot_be_met_names_the_tokens_that_qualify(seq_len: int, share: float | None, message: str) -> None:
    with pytest.raises(CorpusError, match=message):
        DocumentPacking.of(DOCUMENTS, seq_len=seq_len, full_length_share=share)


def test_reach_is_what_the_sequences_of_an_epoch_hold() -> None:
    for share in (None, 0.75):
        packing = DocumentPacking.of(DOCUMENTS, seq_len=16, full_length_share=share)
        n = packing.per_epoch if share is None else 4 * packing.filled
        read = [packing.read(TOKENS, seed=0, position=p, copied_spans=0.0).positions for p in range(n)]
        positions = np.concatenate([row for row in read if row is not None])
        reach = packing.reach(6)
        assert reach.largest == positions.max()
        assert reach.share_past == pytest.approx(float((positions >= 6).mean()), abs=1e-12)


def test_documents_shorter_than_the_old_length_reach_no_new_position() -> None:
    """A stage of 64 over documents of at most 12 tokens trains on none of its new positions."""
    _, documents = split_of(*[12] * 40)
    reach = DocumentPacking.of(documents, seq_len=64).reach(16)
    assert (reach.largest, reach.share_past) == (11, 0.0)
    assert StreamPacking.of(documents, seq_len=64).reach(16).share_past == 0.75  # one text to the model


def test_copied_spans_stay_within_their_document() -> None:
    tokens, documents = split_of(*[64] * 30)
    packing = DocumentPacking.of(documents, seq_len=192)
    changed = 0
    for position in range(20):
        plain = packing.read(tokens, seed=0, position=position, copied_spans=0.0)
        mixed = packing.read(tokens, seed=0, position=position, copied_spans=1.0)
        assert plain.positions is not None
        assert mixed.positions is not None
        assert np.array_equal(plain.positions, mixed.positions)
        changed += not np.array_equal(plain.inputs, mixed.inputs)
        for part in pieces(plain.positions):
            own = {*plain.inputs[part].tolist(), *plain.targets[part].tolist()}
            assert own >= {*mixed.inputs[part].tolist(), *mixed.targets[part].tolist()}
            assert np.array_equal(mixed.targets[part][:-1], mixed.inputs[part][1:])
    assert changed == 20


def test_a_stream_leaves_documents_out_and_reads_the_others_as_one_text() -> None:
    kept = DOCUMENTS.lengths >= 9
    packing = StreamPacking.of(Documents(begins=DOCUMENTS.begins[kept], lengths=DOCUMENTS.lengths[kept]), seq_len=10)
    text = [t for begin, n in zip(DOCUMENTS.begins[kept], DOCUMENTS.lengths[kept], strict=True)
            for t in TOKENS[begin : begin + n + 1].tolist()]  # fmt: skip
    windows = {tuple(text[i * 10 : i * 10 + 11]) for i in range((len(text) - 1) // 10)}
    read = [packing.read(TOKENS, seed=0, position=p, copied_spans=0.0) for p in range(packing.per_epoch)]
    assert {(*row.inputs.tolist(), int(row.targets[-1])) for row in read} == windows


def test_token_totals_beyond_32_bits_are_exact() -> None:
    """B19: documents of 10,251,184,259 tokens, each shorter than 2^31."""
    lengths = np.array([2_050_236_851] * 4 + [2_050_236_855], dtype=np.int64)
    begins = np.cumsum(lengths + 1) - (lengths + 1)
    packing = DocumentPacking.of(Documents(begins=begins, lengths=lengths), seq_len=1 << 20)
    assert int(lengths.sum()) == 10_251_184_259
    assert packing.per_epoch == 10_251_184_259 >> 20
    assert int(packing.full[-1]) == int(begins[-1]) + ((2_050_236_855 >> 20) - 1 << 20)
