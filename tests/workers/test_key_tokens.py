"""Selection of key tokens and their way to another tokenizer: oracles O1b, O2 and case B53."""

from __future__ import annotations

import math

import numpy as np
import pytest

from workers.key_tokens import Mask, carry_over, key_mask, merge_spans, short_mask
from workers.longppl import pool, score_documents
from workers.reference_cache import KeyTokens

O2_SPANS = [(0, 4), (4, 7), (7, 8), (8, 12), (12, 15), (15, 20)]
O2_KEYS = [O2_SPANS[1], O2_SPANS[2], O2_SPANS[4]]
LETTERS = "abcdefghijklmnopqrst"


def keys(long: list[float], short: list[float], alpha: float = 2.0, beta: float = -2.0) -> Mask:
    """The public notation: log-probabilities, LSD > alpha and LCL > beta."""
    return key_mask(-np.array(long), -np.array(short), gain_threshold=alpha, full_nll_ceiling=-beta)


def carried(selected: list[tuple[int, int]], spans: list[tuple[int, int]], text: str = LETTERS) -> list[int]:
    return np.flatnonzero(carry_over(selected, np.array(spans, dtype=np.int32), text)).tolist()


def test_selection_of_the_six_token_toy() -> None:
    """O1b."""
    long, short = [-1.75, -2.0, -0.25], [-4.25, -9.0, -2.5]
    mask = keys(long, short)
    assert mask.tolist() == [True, False, True]
    assert math.exp(-np.array(long)[mask].mean()) == pytest.approx(math.e, rel=1e-12)


def test_both_thresholds_are_strict() -> None:
    assert keys([-0.5], [-2.5]).tolist() == [False]
    assert keys([-2.0], [-9.0]).tolist() == [False]
    assert keys([-1.9], [-4.0]).tolist() == [True]


def test_known_answer_with_another_evaluated_model() -> None:
    """B53."""
    key = keys([-0.5, -1.0, -3.0, -0.2], [-3.0, -1.5, -6.0, -2.5])
    assert np.flatnonzero(key).tolist() == [0, 3]
    model = np.array([1.0, 9.0, 9.0, 2.0])
    evaluation = pool(score_documents([model], [KeyTokens(key=key, short=np.zeros(4, dtype=bool))]))
    assert evaluation.log_longppl is not None
    assert evaluation.log_ppl is not None
    assert math.exp(evaluation.log_longppl) == pytest.approx(4.4817, abs=5e-5)
    assert math.exp(evaluation.log_ppl) == pytest.approx(190.57, abs=5e-3)


def test_a_token_whose_context_is_the_whole_prefix_enters_neither_set() -> None:
    full, local = np.array([0.1, 0.1, 3.0]), np.array([np.nan, 5.0, 1.0])
    assert key_mask(full, local, gain_threshold=0.0, full_nll_ceiling=100.0).tolist() == [False, True, False]
    assert short_mask(full, local).tolist() == [False, False, True]


def test_equal_losses_do_not_enter_shortppl() -> None:
    assert short_mask(np.array([1.0, 1.0]), np.array([1.0, 0.5])).tolist() == [False, True]


def test_adjacent_spans_become_one() -> None:
    """O2."""
    assert merge_spans(O2_KEYS).tolist() == [[4, 8], [12, 15]]


def test_overlapping_spans_of_one_character_become_one() -> None:
    """O2: the public code keeps [3, 4] and [3, 5] apart; what they select is the same."""
    assert merge_spans([(3, 4), (3, 4), (4, 5)]).tolist() == [[3, 5]]
    assert carried([(3, 4), (3, 4), (4, 5)], [(0, 3), (3, 4), (3, 4), (3, 4), (4, 5)]) == [1, 2, 3, 4]


def test_contained_tokens_are_carried_over_and_zero_width_ones_are_not() -> None:
    """O2 gives loss indices [1, 2, 4, 5, 6], that is tokens 2, 3, 5, 6, 7. Token 7 is (15, 15): it covers no text, and
    we leave it out."""
    spans = [(0, 2), (2, 4), (4, 5), (5, 8), (8, 13), (12, 14), (14, 15), (15, 15), (15, 20)]
    assert carried(O2_KEYS, spans) == [2, 3, 5, 6]


def test_tokens_across_an_edge_are_dropped() -> None:
    """O2: loss index [2] is token 3."""
    assert carried(O2_KEYS, [(0, 3), (3, 8), (8, 12), (12, 13), (13, 16), (16, 20)]) == [3]


def test_the_first_token_has_no_loss_and_never_wraps_to_the_last() -> None:
    """O2: the public code arrives at index -1."""
    assert carried([(0, 2)], [(0, 2), (2, 4)]) == []
    mask = carry_over([(0, 2)], np.array([(0, 2), (2, 4)], dtype=np.int32), LETTERS, first_scored=0)
    assert mask.tolist() == [True, False]


def test_the_space_before_a_word_belongs_to_either_token() -> None:
    """Section 1.4, point 5: the public code finds nothing in the first direction."""
    text = "the cat dog"
    assert carried([(4, 7), (8, 11)], [(0, 3), (3, 7), (7, 11)], text) == [1, 2]
    assert carried([(3, 7), (7, 11)], [(0, 3), (4, 7), (8, 11)], text) == [1, 2]
    assert carried([(3, 7)], [(0, 3), (3, 4), (4, 7), (7, 11)], text) == [1, 2]


def test_a_token_of_white_space_counts_only_with_all_of_it() -> None:
    text = "a  \n  b"
    assert carried([(1, 6)], [(0, 1), (1, 6), (6, 7)], text) == [1]
    assert carried([(2, 7)], [(0, 1), (1, 6), (6, 7)], text) == [2]


def test_nothing_selected_carries_nothing_over() -> None:
    assert carried([], [(0, 3), (3, 8)]) == []
    assert carried([(3, 3)], [(0, 3), (3, 8)]) == []
    assert carry_over([(0, 3)], np.empty((0, 2), dtype=np.int32), "").tolist() == []
