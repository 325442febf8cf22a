"""A fit in plain words: what it knows, what it cannot know."""

import math

from fitting.laws import Law, Offset, law_named
from fitting.values import Fit, Resampled, Status

_NEARLY_ALL = 0.9
_OPENING = {
    Status.CONVERGED: "The fit found the minimum of its objective, with every parameter inside its range.",
    Status.AT_BOUND: "The fit found the minimum, but an exponent ended at the edge of its range: {at_bound}.",
    Status.TERM_ABSENT: "The fit does not need one of its terms: {at_bound} ended at zero.",
    Status.NOT_IDENTIFIABLE: "These observations cannot determine {open}: other values fit equally well.",
    Status.NOT_CONVERGED: "The optimiser did not reach a minimum. Nothing below should be relied on.",
}


def explain(fit: Fit) -> list[str]:
    """Sentences for a reader who does not know the statistics, the most important first."""
    law = law_named(fit.law)
    names = [law.parameter_names[term.amplitude] for term in law.terms]
    amplitudes = [name for name in fit.at_bound if name in names]
    at_bound = amplitudes if fit.status is Status.TERM_ABSENT else fit.at_bound
    sentences = [_OPENING[fit.status].format(at_bound=", ".join(at_bound), open=", ".join(fit.not_identifiable))]
    if fit.residual_std is not None:
        sentences.append(
            f"One observation lies about {fit.residual_std:.2g} nats from the law, "
            f"or {100 * math.expm1(fit.residual_std):.2g} % in LongPPL."
        )
    sentences.append(_what_intervals_mean(fit))
    if unknown := _unknown_exponents(fit, law):
        sentences.append(
            f"It does not know {', '.join(unknown)}: the interval holds nearly every value that an exponent may take."
        )
    spans = ", ".join(
        f"{law.symbols[axis]} {fit.ranges.axes[axis].low:.3g} to {fit.ranges.axes[axis].high:.3g}" for axis in law.axes
    )
    sentences.append(f"It has seen {spans}; outside of that it extrapolates.")
    if law.offset is Offset.FREE:
        sentences.append(_about_offset(fit, law))
    if fit.holdout is None:
        sentences.append("No rows were held out: how well it extrapolates has not been measured.")
    elif fit.holdout.mape_ppl is not None:
        sentences.append(
            f"On {fit.holdout.n_observations} held-out rows it misses LongPPL by {fit.holdout.mape_ppl:.2g} % on "
            f"average, with a bias of {fit.holdout.bias:+.2g} nats."
        )
    return sentences


def _what_intervals_mean(fit: Fit) -> str:
    if not len(fit.draws):
        return "It cannot say how uncertain its parameters are: no intervals are given."
    drawn = (
        f"{fit.n_clusters} short checkpoints" if fit.resampled is Resampled.CLUSTERS else f"{fit.n_observations} rows"
    )
    return (
        f"Intervals are meant to hold the truth in {fit.level:.0%} of cases; they come from {fit.n_draws_ok} refits "
        f"with the {drawn} drawn anew. Amplitudes and exponents trade off: predictions "
        "are known better than parameters."
    )


def _unknown_exponents(fit: Fit, law: Law) -> list[str]:
    """Exponents whose interval holds nearly all that they may be."""
    return [
        law.parameter_names[at]
        for at in (term.exponent for term in law.terms)
        if (interval := fit.intervals[at]) is not None
        and interval.high - interval.low > _NEARLY_ALL * (law.upper[at] - law.lower[at])
    ]


def _about_offset(fit: Fit, law: Law) -> str:
    name, offset = law.parameter_names[-1], fit.parameters[-1]
    if fit.penalty.binds:
        return f"The offset {name} has no meaning here: the penalty on {', '.join(fit.penalty.binds)} moved it."
    if fit.intervals[-1] is None:
        return f"The offset {name} is not known here, so neither is the limit for ever more data."
    if offset < 0:
        return f"{name} is below zero: the law describes this range of sizes and cannot hold for ever larger ones."
    return f"{name} is the loss (log LongPPL) that this law approaches for ever larger sizes, if it kept holding."
