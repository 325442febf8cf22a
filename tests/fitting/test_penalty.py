"""The one-sided penalty: its references, its strength, what it does to the offset."""

from dataclasses import replace

import numpy as np
import pytest

from fitting import engine
from fitting.errors import InvalidObservationsError
from fitting.explain import explain
from fitting.joint import fit
from fitting.laws import CHINCHILLA, COMBINED_BUDGET, LONG_CONTEXT
from fitting.predict import log_longppl
from fitting.rows import Procedure, rows_of
from fitting.slices import slice_references
from fitting.values import Reference, Residual, Slicing, Status
from tests.fitting.paper_grid import paper_grid
from tests.fitting.toy_law import FULL_GRID, toy_observations

LOW = (
    Reference(parameter="beta_s", value=0.056, n_slices=20),
    Reference(parameter="beta_l", value=0.115, n_slices=20),
)


def test_slices_with_an_offset_find_the_exponents_and_those_without_do_not() -> None:
    rows = rows_of(LONG_CONTEXT, paper_grid("loss_true"), Residual.LINEAR)
    with_offset = slice_references(LONG_CONTEXT, rows, Procedure())
    assert [item.parameter for item in with_offset] == ["beta_s", "beta_l"]
    assert [item.value for item in with_offset] == pytest.approx([0.30, 0.20], abs=1e-6)
    assert [item.n_slices for item in with_offset] == [20, 20]
    plain = slice_references(LONG_CONTEXT, rows, Procedure(), Slicing.PLAIN)
    assert [item.value for item in plain] == pytest.approx([0.056, 0.115], abs=2e-3)


def test_median_at_the_end_of_its_range_is_no_reference() -> None:
    """On this column most slices along D_s are too noisy to tell an exponent from an offset."""
    rows = rows_of(LONG_CONTEXT, paper_grid("loss"), Residual.LINEAR)
    assert [item.parameter for item in slice_references(LONG_CONTEXT, rows, Procedure())] == ["beta_l"]


def test_binding_penalty_takes_the_meaning_of_the_offset_and_shows_the_fit_without() -> None:
    rows = paper_grid("loss")
    held = fit(LONG_CONTEXT, rows, bootstrap_draws=25, penalty=100.0, references=LOW)
    assert held.penalty.strength == 100.0
    assert held.penalty.binds == ("beta_s", "beta_l")
    assert held.parameters[6] < -1.3  # whatever the offset truly is: here -0.4
    assert held.intervals[6] is None
    assert held.intervals[1] is not None
    assert any("C is not interpretable" in warning for warning in held.warnings)
    assert any("has no meaning here" in sentence for sentence in explain(held))
    plain = fit(LONG_CONTEXT, rows, bootstrap_draws=0)
    assert held.unpenalised is not None
    assert held.unpenalised.parameters == plain.parameters
    assert held.objective > plain.objective


def test_objective_is_that_of_the_rows_alone_and_the_gradient_that_of_both() -> None:
    rows = paper_grid("loss")
    held = fit(LONG_CONTEXT, rows, bootstrap_draws=0, penalty=0.1, references=LOW)
    residuals = log_longppl(held.parameters, *rows.sizes.T) - rows.log_longppl
    assert held.objective == pytest.approx(engine.huber(residuals, 0.05).sum(), rel=1e-12)
    assert held.gradient_norm < 1e-10
    assert held.status is Status.CONVERGED


def test_penalty_beyond_its_reference_is_quadratic_and_not_flattened_by_the_loss() -> None:
    """Held as one more residual under the Huber loss it would pull with 0.05 sqrt(lambda) at most."""
    observations = toy_observations()
    excess = []
    for strength in (1e2, 1e4):
        held = fit(
            LONG_CONTEXT,
            observations,
            bootstrap_draws=0,
            penalty=strength,
            references=(Reference(parameter="beta_s", value=0.1, n_slices=1),),
        )
        excess.append(held.parameters[3] - 0.1)
    assert excess[1] < 0.02 * excess[0]


def test_references_that_the_exponents_do_not_reach_change_nothing() -> None:
    rows = paper_grid("loss")
    high = tuple(replace(item, value=0.9) for item in LOW)
    held = fit(LONG_CONTEXT, rows, bootstrap_draws=0, penalty=1.0, references=high)
    assert held.penalty.binds == ()
    assert held.parameters == pytest.approx(fit(LONG_CONTEXT, rows, bootstrap_draws=0).parameters, rel=1e-6)


def test_strength_is_chosen_by_predicting_the_largest_scale() -> None:
    rows = paper_grid("loss")
    chosen = fit(LONG_CONTEXT, rows, bootstrap_draws=0, penalty="auto", references=LOW)
    assert chosen.penalty.chosen
    assert chosen.penalty.strength <= 0.1  # a wall at these references is far off on S4
    assert any("predicts the largest scale best" in warning for warning in chosen.warnings)


def test_strength_that_cannot_be_chosen_is_zero_and_said() -> None:
    one_scale = toy_observations(tuple(point for point in FULL_GRID if point[0] == 1e9), std=0.01)
    result = fit(LONG_CONTEXT, one_scale, bootstrap_draws=0, penalty="auto")
    assert result.penalty.strength == 0
    assert any(warning.startswith("no penalty: it cannot be chosen") for warning in result.warnings)


@pytest.mark.parametrize("penalty", [-1.0, np.nan, np.inf])
def test_strength_outside_its_range_is_refused(penalty: float) -> None:
    with pytest.raises(InvalidObservationsError, match="the penalty is"):
        fit(LONG_CONTEXT, toy_observations(), penalty=penalty)


def test_law_without_token_exponents_takes_no_penalty() -> None:
    observations = toy_observations(std=0.01)
    with pytest.raises(InvalidObservationsError, match="combined_budget has no exponent"):
        fit(COMBINED_BUDGET, observations, penalty=1.0)
    assert fit(COMBINED_BUDGET, observations, bootstrap_draws=0, penalty="auto").penalty.strength == 0
    with pytest.raises(InvalidObservationsError, match="no parameter beta"):
        fit(LONG_CONTEXT, observations, penalty=1.0, references=(replace(LOW[0], parameter="beta"),))


def test_penalised_exponent_of_an_absent_term_still_obeys() -> None:
    """A clamped amplitude is no excuse: the exponent goes to its reference, where the penalty costs nothing."""
    without_short = (400.0, 0.34, 0.0, 0.28, 30.0, 0.20, 2.7)
    rising = toy_observations(parameters=without_short)
    rising = replace(rising, log_longppl=rising.log_longppl + 0.02 * np.log(rising.short_tokens))
    held = fit(LONG_CONTEXT, rising, bootstrap_draws=0, penalty=1.0, references=LOW)
    assert held.status is Status.TERM_ABSENT
    assert held.parameters[2] == 0.0
    assert held.parameters[3] <= LOW[0].value + 1e-9
    assert held.penalty.binds == ("beta_l",)


def test_one_stage_law_has_one_exponent_to_penalise() -> None:
    assert CHINCHILLA.penalised() == {"long_tokens": 3}
