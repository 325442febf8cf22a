"""Which checkpoints a rule would read at a cell: counted before any list of them is made."""

from __future__ import annotations

from orchestrator.scales import ResolvedScale
from workers.spec import ObservationRule

#: Checkpoints that one model may be made of, whether they are counted out by `m` or found by their spacing.
MAX_POOL = 1_000

#: With fewer a rule is the raw checkpoint under another name: the oldest of one_sqrt weighs nothing.
_FEWEST = {"raw": 1, "one_sqrt": 3}


def pool_size(rule: ObservationRule, step: int) -> int:
    """How many checkpoints `rule` reads at `step` of a segment, those that it would miss among them."""
    return rule.m or -(-step // rule.spacing_steps)


def pool_problem(rule: ObservationRule, scale: ResolvedScale, step: int) -> str | None:
    """Why `rule` cannot be read at `step` of a long stage, if it cannot; what says so goes on after the rule's name."""
    in_phase = scale.step_in_phase(step)
    border = step - in_phase
    size, fewest = pool_size(rule, in_phase), _FEWEST.get(rule.name, 2)
    apart = f"{rule.spacing_steps:,} steps apart"
    if size < fewest:
        stretch = f"back from step {step:,}" + (f" to the border of two phases at step {border:,}" if border else "")
        return f"finds {size} of the {fewest} checkpoints it needs, {apart} {stretch}; lower spacing, or raise D_l"
    if size > MAX_POOL:
        return (
            f"reads {size:,} checkpoints {apart} up to step {step:,}, and a model is made of {MAX_POOL:,} at most; "
            "raise spacing or give m"
        )
    oldest = in_phase - (size - 1) * rule.spacing_steps
    if oldest > 0:
        return None
    reads = f"reads {size:,} checkpoints {apart} up to step {step:,}"
    if border:
        return (
            f"{reads}, across the border of two phases at step {border:,}: models of two lengths make no average; "
            "lower m or spacing, or raise D_l"
        )
    return f"{reads}: the oldest would lie at step {oldest:,}; lower m or spacing, or raise D_l"
