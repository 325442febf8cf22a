import json
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.budgets import INT64_MAX, Budget, parse_budget, parse_integer, parse_real


@pytest.mark.parametrize(
    ("written", "number"),
    [
        ("1e9", 1_000_000_000),
        ("1.0e9", 1_000_000_000),
        ("3E8", 300_000_000),
        ("1_000_000", 1_000_000),
        ("1.0e+9", 1_000_000_000),
        ("1000000000.0", 1_000_000_000),
        ("010", 10),
        (".5e1", 5),
        (1e9, 1_000_000_000),
        (10**15, 10**15),
        ("9007199254740993", 9_007_199_254_740_993),
        (str(INT64_MAX), INT64_MAX),
    ],
)
def test_an_integer_is_one_number_whatever_its_spelling(written: object, number: int) -> None:
    """B106, B109."""
    parsed = parse_integer(written)
    assert parsed == number
    assert type(parsed) is int


@pytest.mark.parametrize(
    "written",
    ["1.5e0", 1.5, "1e-3", "", "x", "1__0", "_1", "1e", "0x10", "1,000", "12:30", True, None, [1], float("nan")],
)
def test_what_is_no_64_bit_integer_is_refused(written: object) -> None:
    """B106, B19."""
    with pytest.raises(ValueError, match="must be a"):
        parse_integer(written)
    for beyond in (str(INT64_MAX + 1), "1e999", -(2**63)):
        with pytest.raises(ValueError, match="must fit in 64 bits"):
            parse_integer(beyond)


def test_reals_are_finite() -> None:
    assert parse_real("2.5e-3") == 0.0025
    assert parse_real("1e-400") == 0.0
    for written in ("1e400", "nan", float("inf"), "abc", None):
        with pytest.raises(ValueError, match="must be a"):
            parse_real(written)


@pytest.mark.parametrize(
    ("written", "budget", "tokens"),
    [
        ("90N", Budget(per_n=Decimal(90)), 90 * 27_168),
        ("2.5N", Budget(per_n=Decimal("2.5")), 67_920),
        ("2.50 N", Budget(per_n=Decimal("2.5")), 67_920),
        ("1e1N", Budget(per_n=Decimal(10)), 271_680),
        ("0.00001N", Budget(per_n=Decimal("0.00001")), 0),
        ("1e6", Budget(tokens=1_000_000), 1_000_000),
        (262_144, Budget(tokens=262_144), 262_144),
    ],
)
def test_a_budget_is_tokens_or_a_multiple_of_n(written: object, budget: Budget, tokens: int) -> None:
    assert parse_budget(written) == budget
    assert parse_budget(written).tokens_for(27_168) == tokens


def test_a_multiple_of_n_is_exact_where_float64_is_not() -> None:
    n_params = 9_007_199_254_740_993
    assert parse_budget("1N").tokens_for(n_params) == n_params
    assert parse_budget("0.5N").tokens_for(n_params) == 4_503_599_627_370_497  # half a token rounds up


@pytest.mark.parametrize("written", [0, "0", -1, "-90N", "0N", "N", "90n", "90NN", "1.5", None, {}])
def test_a_budget_that_is_not_above_zero_or_no_budget_is_refused(written: object) -> None:
    """B69: D_l = 0 is no cell."""
    with pytest.raises(ValueError, match=r"above zero|must be"):
        parse_budget(written)


def test_one_budget_has_one_text() -> None:
    assert {str(parse_budget(text)) for text in ("2N", "2.0N", "2.00 N", "0.2e1N")} == {"2N"}
    assert {str(parse_budget(text)) for text in (2048, "2_048", "2.048e3")} == {"2048"}
    assert str(parse_budget("1e2N")) == "100N"


@given(st.integers(min_value=1, max_value=INT64_MAX))
def test_integers_survive_text_and_json(number: int) -> None:
    assert parse_integer(json.loads(json.dumps(number))) == number
    assert parse_integer(f"{number:_}") == number
    assert parse_integer(f"{Decimal(number):e}" if len(str(number)) < 30 else str(number)) == number


@pytest.mark.parametrize("text", ["1e300N", "1.234567890123456789e-30N", "90N", "2.50N", "1e9"])
def test_a_budget_reads_back_from_its_text(text: str) -> None:
    assert parse_budget(str(parse_budget(text))) == parse_budget(text)
