"""Made-up words, numbers and identifiers for needles and lists: by rule, so that no list of words is needed."""

from __future__ import annotations

import itertools
import uuid
from functools import cache
from random import Random

_ONSETS = "bdfgklmnprstvz"
_VOWELS = "aeiou"


@cache
def words() -> tuple[str, ...]:
    """All 343,000 words of three syllables, each a consonant and a vowel, in alphabetical order: "babaca"..."""
    syllables = [onset + vowel for onset in _ONSETS for vowel in _VOWELS]
    return tuple("".join(parts) for parts in itertools.product(syllables, repeat=3))


def draw_words(n: int, draw: Random) -> list[str]:
    """`n` different words."""
    return draw.sample(words(), n)


def draw_name(draw: Random) -> str:
    """Two words with a hyphen: a key of a needle."""
    return "-".join(draw_words(2, draw))


def draw_number(draw: Random, digits: int = 7) -> str:
    return str(draw.randrange(10 ** (digits - 1), 10**digits))


def draw_uuid(draw: Random) -> str:
    """A UUID of version 4."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))
