"""Numbers as people write them: one number, whatever its spelling (1e9, 1_000_000_000, "1.0e+9"), and token budgets.

YAML 1.1 reads `1e9` as text and `010` as eight, so grid files keep numbers as text until a field asks for one; these
functions are that moment. They take JSON numbers too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

from workers.spec import steps_for

INT64_MAX = 2**63 - 1

_NUMBER = re.compile(r"[+-]?(?:\d+(?:_\d+)*(?:\.(?:\d+(?:_\d+)*)?)?|\.\d+(?:_\d+)*)(?:[eE][+-]?\d{1,3})?")
_MAX_NUMBER_LENGTH = 40
#: Wide enough to normalise any text of `_MAX_NUMBER_LENGTH` without rounding it.
_EXACT = Context(prec=_MAX_NUMBER_LENGTH)


def parse_decimal(value: object) -> Decimal:
    """The exact decimal that `value` (a number or its text) stands for.

    Raises:
        ValueError: if it is not a finite number.
    """
    if isinstance(value, Decimal):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, float) and math.isfinite(value):
        return Decimal(repr(value))
    if isinstance(value, str) and len(value) <= _MAX_NUMBER_LENGTH and _NUMBER.fullmatch(value.strip()):
        return Decimal(value.strip().replace("_", ""))
    raise ValueError(f"must be a number, not {shown(value)}")


def parse_integer(value: object) -> int:
    """The integer that `value` stands for, in the range of int64.

    Raises:
        ValueError: if it is not a number, has a fraction, or does not fit.
    """
    number = parse_decimal(value)
    whole = int(number)
    if whole != number:
        raise ValueError(f"must be a whole number, not {shown(value)}")
    if abs(whole) > INT64_MAX:
        raise ValueError(f"must fit in 64 bits: {shown(value)} is above {INT64_MAX:,}")
    return whole


def parse_real(value: object) -> float:
    """The float64 nearest to the number that `value` stands for.

    Raises:
        ValueError: if it is not a finite number.
    """
    number = float(parse_decimal(value))
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {shown(value)}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """An amount of tokens: absolute (`tokens`) or a multiple of the model's N (`per_n`); exactly one is set."""

    tokens: int | None = None
    per_n: Decimal | None = None

    def tokens_for(self, n_params: int) -> int:
        """Tokens for a model with N = `n_params`, half a token rounded up."""
        if self.tokens is not None:
            return self.tokens
        assert self.per_n is not None
        exact = Fraction(self.per_n) * n_params
        return (2 * exact.numerator + exact.denominator) // (2 * exact.denominator)

    def __str__(self) -> str:
        """As `parse_budget` reads it: digits alone, or with an exponent where those are too many for it."""
        if self.per_n is None:
            return str(self.tokens)
        digits = f"{self.per_n:f}"
        return f"{digits if len(digits) <= _MAX_NUMBER_LENGTH else self.per_n}N"


def parse_budget(value: object) -> Budget:
    """A token count or a multiple of N such as "90N" or "2.5N".

    Raises:
        ValueError: if it is neither, or not above zero.
    """
    if isinstance(value, Budget):
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text.endswith("N"):
        multiple = _EXACT.normalize(parse_decimal(text[:-1]))
        if multiple <= 0:
            raise ValueError(f"a budget must be above zero, not {shown(value)}")
        return Budget(per_n=multiple)
    try:
        tokens = parse_integer(value)
    except ValueError as error:
        raise ValueError(f'{error}; write tokens (1e9, 1_000_000) or a multiple of N ("90N")') from None
    if tokens <= 0:
        raise ValueError(f"a budget must be above zero, not {shown(value)}")
    return Budget(tokens=tokens)


def rounding_problem(tokens: int, tokens_per_step: int, tolerance: float) -> str | None:
    """What is wrong with `tokens` as a whole number of optimizer steps, if anything."""
    if tokens > INT64_MAX:
        return f"{tokens:,} tokens do not fit in 64 bits"
    steps = steps_for(tokens, tokens_per_step)
    if steps == 0:
        return f"{tokens:,} tokens are less than one step of {tokens_per_step:,}; raise the budget or lower the batch"
    realised = steps * tokens_per_step
    deviation = abs(realised - tokens) / tokens
    if deviation > tolerance:
        return (
            f"{tokens:,} tokens become {realised:,} in whole steps of {tokens_per_step:,}, off by {deviation:.2%}; "
            f"rounding_tolerance is {tolerance:.2%}: choose a multiple of {tokens_per_step:,} or a smaller batch"
        )
    return None


def shown(value: object) -> str:
    """`value` as an error message may quote it: short, on one line, and never unfolded."""
    if isinstance(value, (list, tuple, dict)):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
