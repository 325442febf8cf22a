"""A fit in plain words."""

from dataclasses import replace

from fitting.explain import explain
from fitting.joint import fit
from fitting.laws import LONG_CONTEXT
from fitting.values import Interval
from tests.fitting.paper_grid import paper_grid
from tests.fitting.toy_law import ONE_LONG_BUDGET, toy_observations


def test_good_fit_says_what_its_intervals_and_its_offset_mean() -> None:
    result = fit(LONG_CONTEXT, paper_grid("loss"), bootstrap_draws=25, holdout=paper_grid("loss", held_out=True))
    said = " ".join(explain(result))
    assert "found the minimum" in said
    assert "25 refits with the 20 short checkpoints" in said
    assert "cannot hold for ever larger" in said
    assert "25 held-out rows it misses LongPPL by 1.1 %" in said
    assert "N 3.1e+07 to 2.6e+08" in said


def test_fit_that_cannot_know_says_what() -> None:
    said = explain(fit(LONG_CONTEXT, toy_observations(ONE_LONG_BUDGET, std=0.01), bootstrap_draws=0))
    assert said[0] == "These observations cannot determine B_l, beta_l, C: other values fit equally well."
    assert any("no intervals are given" in sentence for sentence in said)
    assert any("The offset C is not known" in sentence for sentence in said)
    assert any("has not been measured" in sentence for sentence in said)


def test_absent_term_is_named_by_its_amplitude() -> None:
    falling_with_two = toy_observations(parameters=(400.0, 0.34, 0.0, 0.28, 30.0, 0.2, 1.7))
    said = explain(fit(LONG_CONTEXT, falling_with_two, bootstrap_draws=0))
    assert said[0] == "The fit does not need one of its terms: B_s ended at zero."


def test_exponent_that_may_be_anything_is_said_to_be_unknown() -> None:
    known = fit(LONG_CONTEXT, toy_observations(std=0.01), bootstrap_draws=25)
    assert not any("It does not know" in sentence for sentence in explain(known))
    intervals = list(known.intervals)
    intervals[1] = Interval(low=0.1, high=2.0)
    said = explain(replace(known, intervals=tuple(intervals)))
    assert "It does not know alpha: the interval holds nearly every value that an exponent may take." in said
