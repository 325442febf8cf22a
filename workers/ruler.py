"""RULER: samples that fit a length, greedy answers, string-match scores.

A sample is as large as it can be: prompt, answer prefix and room for the answer together take at most the length asked
for. Sizes only fall on the way there, down to a floor; what does not fit at its smallest is an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from workers.errors import ProbeError
from workers.model import ConvolvedProjection
from workers.probe_spec import RULER_ANSWER_TOKENS, Ruler, RulerTask
from workers.progress import Report, unreported
from workers.results import Metric
from workers.ruler_questions import Question, cloze_questions, read_questions
from workers.ruler_tasks import Draft, Maker, maker_of

#: By how much of its size a sample is made smaller at once, when it turns out longer than the first one.
_SHRINK = 0.02
#: A sample that fills less of the length than this is not what its length says.
_LEAST_FILLED = 0.9

_CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RulerSample:
    """Sample `index` of a task. `n_tokens` are those of prompt and answer prefix, and of a beginning-of-text token."""

    index: int
    task: RulerTask
    prompt: str
    answer_prefix: str
    answers: tuple[str, ...]
    n_tokens: int

    @property
    def text(self) -> str:
        """What the model is given: the answer prefix is part of it."""
        return self.prompt + self.answer_prefix


def run_ruler(
    model: Any,
    tokenizer: Tokenizer,
    probe: Ruler,
    *,
    texts: Sequence[str],
    seed: int,
    beginning_id: int | None = None,
    report: Report = unreported,
) -> list[Metric]:
    """`ruler_score` (0 to 100) of every task, and `ruler_mean` over them if there are several.

    Raises:
        ProbeError: if a task cannot be made at this length.
    """
    metrics = []
    for task in probe.tasks:
        samples = make_samples(task, probe, tokenizer, texts=texts, seed=seed, beginning_id=beginning_id)
        predictions = []
        for sample in samples:
            report(f"ruler, {task}", sample.index, len(samples))
            predictions.append(
                answer(model, tokenizer, sample.text, max_tokens=RULER_ANSWER_TOKENS[task], beginning_id=beginning_id)
            )
        match = string_match_part if task.startswith("qa_") else string_match_all
        value = match(predictions, [sample.answers for sample in samples])
        metrics.append(
            Metric(name="ruler_score", value=value, count=len(samples), length=probe.length, label=task),
        )
    if len(metrics) > 1:
        mean = sum(metric.value for metric in metrics) / len(metrics)
        metrics.append(
            Metric(name="ruler_mean", value=mean, count=sum(metric.count for metric in metrics), length=probe.length)
        )
    return metrics


def make_samples(
    task: RulerTask,
    probe: Ruler,
    tokenizer: Tokenizer,
    *,
    texts: Sequence[str],
    seed: int,
    beginning_id: int | None = None,
) -> tuple[RulerSample, ...]:
    """The samples of a task: a function of the arguments alone.

    Raises:
        ProbeError: if the task cannot be made at this length.
    """
    maker = maker_of(task, length=probe.length, texts=texts, seed=seed, questions=_questions(task, probe, texts))
    room = probe.length - RULER_ANSWER_TOKENS[task] - (beginning_id is not None)

    def n_tokens(draft: Draft) -> int:
        return len(tokenizer.encode(draft.prompt + draft.answer_prefix, add_special_tokens=False).ids)

    def draft_of(index: int, size: int) -> Draft:
        return maker.draft(size, Random(f"{seed}/{task}/{index}"))

    def tokens_at(index: int, size: int) -> int:
        return n_tokens(draft_of(index, size))

    size = _largest_size(maker, room, partial(tokens_at, 0))
    samples = []
    for index in range(probe.samples):
        own_size = size
        draft, used = _fit(maker, size, room, partial(draft_of, index), n_tokens)
        if used < _LEAST_FILLED * room and size != maker.largest:  # its text is in shorter pieces than the first one's
            own_size = _largest_size(maker, room, partial(tokens_at, index))
            draft, used = _fit(maker, own_size, room, partial(draft_of, index), n_tokens)
        if draft is None:
            raise ProbeError(
                f"{task} does not fit into {probe.length} tokens: its smallest prompt takes {used}, its answer up to"
                f" {RULER_ANSWER_TOKENS[task]}; ask for about {probe.length - room + used} or more"
            )
        if maker.largest == own_size and used < _LEAST_FILLED * room:
            raise ProbeError(
                f"{task} has {own_size} documents, which fill {used} of {room} tokens: give more, or ask for less"
            )
        samples.append(
            RulerSample(
                index=index,
                task=task,
                prompt=draft.prompt,
                answer_prefix=draft.answer_prefix,
                answers=draft.answers,
                n_tokens=used + (beginning_id is not None),
            )
        )
    return tuple(samples)


def answer(model: Any, tokenizer: Tokenizer, text: str, *, max_tokens: int, beginning_id: int | None = None) -> str:
    """What greedy decoding adds to `text`; it ends with the model's end-of-text token, or after `max_tokens`.

    A model with convolved projections keeps no past, so it reads the whole prefix again for every token.
    """
    lead = [] if beginning_id is None else [beginning_id]
    ids = torch.tensor([[*lead, *tokenizer.encode(text, add_special_tokens=False).ids]])
    ids = ids.to(model.get_output_embeddings().weight.device)
    keeps_past = not any(isinstance(module, ConvolvedProjection) for module in model.modules())
    end = model.generation_config.eos_token_id
    padding = end[0] if isinstance(end, list) else end
    model.eval()
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=keeps_past,
            pad_token_id=0 if padding is None else padding,
        )
    added: str = tokenizer.decode(found[0, ids.shape[1] :].tolist())
    return added


def string_match_all(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Mean share of a sample's answers that its prediction holds, whatever their case; times 100, two decimals."""
    return _match(predictions, answers, lambda found: sum(found) / len(found))


def string_match_part(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Share of samples whose prediction holds one of their answers, whatever its case; times 100, two decimals."""
    return _match(predictions, answers, lambda found: float(any(found)))


def _match(predictions: Sequence[str], answers: Sequence[Sequence[str]], of: Callable[[list[bool]], float]) -> float:
    shares = []
    for prediction, wanted in zip(predictions, answers, strict=True):
        text = _CONTROL.sub("\n", prediction).strip().lower()
        shares.append(of([item.lower() in text for item in wanted]))
    return round(100 * float(np.mean(shares)), 2)


def _questions(task: RulerTask, probe: Ruler, texts: Sequence[str]) -> tuple[Question, ...]:
    if task == "qa_cloze":
        return cloze_questions(texts)
    file = {"qa_1": probe.qa_1, "qa_2": probe.qa_2}.get(task)
    return () if file is None else read_questions(file)


def _largest_size(maker: Maker, room: int, n_tokens: Callable[[int], int]) -> int:
    """The largest size whose sample fits, or the smallest one. A unit is a token or more: none above `room` fits."""
    low, most = maker.smallest, max(maker.smallest, room)
    if maker.largest is not None:
        most = min(most, maker.largest)
    high = low
    while high < most and n_tokens(high) <= room:
        low, high = high, min(2 * high, most)
    if n_tokens(high) <= room:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if n_tokens(middle) <= room else (low, middle)
    return low


def _fit(
    maker: Maker, size: int, room: int, draft_of: Callable[[int], Draft], n_tokens: Callable[[Draft], int]
) -> tuple[Draft | None, int]:
    """The sample at `size`, or smaller until it fits; with its tokens. None where the smallest one does not fit."""
    while True:
        draft = draft_of(size)
        used = n_tokens(draft)
        if used <= room:
            return draft, used
        if size <= maker.smallest:
            return None, used
        size = max(maker.smallest, size - max(1, int(size * _SHRINK)))
