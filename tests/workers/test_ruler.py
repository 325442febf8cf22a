"""RULER: the structure of its tasks, fitting to a length, scores. Oracles are those of the public generator."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from tokenizers import Tokenizer

from tests.workers.tiny_evaluation import byte_tokenizer, tiny_llama
from workers.errors import ProbeError
from workers.model import build_model
from workers.probe_spec import RULER_ANSWER_TOKENS, RULER_TASKS, QuestionFile, Ruler, RulerTask
from workers.ruler import answer, make_samples, run_ruler, string_match_all, string_match_part
from workers.ruler_questions import GAP, Question, cloze_questions, read_questions, sentences
from workers.ruler_tasks import (
    DEPTHS,
    FILLER,
    NOISE,
    CommonWords,
    FrequentWords,
    QuestionAnswering,
    VariableTracking,
    lay_at_depths,
    maker_of,
    needle_order,
    rank_counts,
)
from workers.ruler_words import draw_name, words
from workers.spec import ModelShape


@cache
def texts() -> tuple[str, ...]:
    """Prose of drawn words, a dozen a sentence."""
    draw = Random(5)
    known = draw.sample(words(), 400)
    return tuple(" ".join(f"{' '.join(draw.choices(known, k=12))}.".capitalize() for _ in range(150)) for _ in range(3))


@cache
def tokenizer() -> Tokenizer:
    return byte_tokenizer([*texts(), NOISE, *(str(number) for number in range(300))], 600)


def question_file(folder: Path, lines: list[object]) -> QuestionFile:
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    (folder / "questions.jsonl").write_bytes(content)
    return QuestionFile(path=str(folder / "questions.jsonl"), digest=hashlib.sha256(content).hexdigest())


def written_questions(folder: Path, n: int = 60) -> QuestionFile:
    draw = Random(1)
    lines: list[object] = []
    for number in range(n):
        place, person = draw_name(draw), draw_name(draw)
        document = (
            f"Nobody knew at first who had built {place}. It was {person} who did it in the year {1500 + number}."
        )
        lines.append({"question": f"Who built {place}?", "answers": [person], "documents": [document]})
    return question_file(folder, lines)


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_needles_lie_in_one_order_for_a_seed() -> None:
    assert needle_order(4, 42) == [2, 1, 3, 0]


def test_depths_are_forty_places_from_beginning_to_end() -> None:
    assert len(DEPTHS) == len(set(DEPTHS)) == 40
    assert DEPTHS[:6] == (0, 3, 5, 8, 10, 13)
    assert DEPTHS[-2:] == (97, 100)


def test_needles_go_before_the_unit_at_their_depth() -> None:
    units = [f"u{number}" for number in range(200)]
    needles = ["n0", "n1", "n2", "n3"]
    laid = lay_at_depths(units, needles, Random(3))
    assert [item for item in laid if item.startswith("u")] == units
    assert [item for item in laid if item.startswith("n")] == needles
    before = [laid[: laid.index(needle)] for needle in needles]
    places = [sum(item.startswith("u") for item in part) for part in before]
    assert len(set(places)) == 4
    assert set(places) <= {int(200 * depth / 100) for depth in DEPTHS}


@pytest.mark.parametrize(("distinct", "entries"), [(10, 300), (11, 303), (100, 570)])
def test_common_words_are_thirty_times_ten_and_three_times_the_others(distinct: int, entries: int) -> None:
    draft = CommonWords(common_times=30, other_times=3, example_words=40, example_times=(10, 3)).draft(
        distinct, Random(0)
    )
    own = draft.prompt.split("\n\n")[1]
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", own))
    assert counts.total() == entries == 300 + 3 * (distinct - 10)
    assert Counter(counts.values()) == ({30: 10} if distinct == 10 else {30: 10, 3: distinct - 10})
    assert {word for word, count in counts.items() if count == 30} == set(draft.answers)


def test_short_lists_repeat_words_less_often() -> None:
    maker = maker_of("cwe", length=2048, texts=(), seed=42)
    draft = maker.draft(20, Random(0))
    example, own = draft.prompt.split("\n\n")
    listed = Counter(re.findall(r"\d+\. ([a-z]+)", own))
    assert sorted(listed.values()) == [1] * 10 + [6] * 10
    shown, told = example.split("come most often are:")
    assert {word for word, count in Counter(re.findall(r"\d+\. ([a-z]+)", shown)).items() if count == 3} == set(
        re.findall(r"\d+\. ([a-z]+)", told)
    )


def test_frequent_words_fall_with_the_square_of_their_rank() -> None:
    assert rank_counts(500, 5) == [303, 75, 33, 18, 12]
    draft = FrequentWords(vocabulary=80).draft(500, Random(0))
    counts = Counter(draft.prompt.split("\n")[1].split())
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked[0] == FILLER
    assert tuple(ranked[1:]) == draft.answers
    assert [counts[word] for word in ranked] == [303, 75, 33, 18]


@pytest.mark.parametrize("size", [74, 75, 80, 90, 101, 130])
def test_the_three_most_frequent_words_are_never_ambiguous(size: int) -> None:
    assert FrequentWords(vocabulary=5).smallest == 74
    counts = rank_counts(size, 5)
    assert counts[3] > counts[4]


def test_variables_hand_a_number_on_in_order() -> None:
    draft = VariableTracking().draft(30, Random(9))
    example, own = draft.prompt.split("\n\n")
    lines = [line for line in own.split("\n") if line.startswith("VAR ")]
    assert len(lines) == 5
    name, number = re.fullmatch(r"VAR ([A-Z]{5}) = (\d{5})", lines[0]).groups()  # type: ignore[union-attr]
    chain = [name]
    for line in lines[1:]:
        later, earlier = re.fullmatch(r"VAR ([A-Z]{5}) = VAR ([A-Z]{5})", line).groups()  # type: ignore[union-attr]
        assert earlier == chain[-1]
        chain.append(later)
    assert tuple(chain) == draft.answers
    assert number in own.split("\n")[-1]
    assert own.count(NOISE) == 30
    assert len(re.findall(r"^VAR [A-Z]{3} = ", example, flags=re.M)) == 5
    assert not draft.answer_prefix.endswith(" ")


NIAH_ANSWERS = {
    "niah_single_1": (1, r"\d{7}"),
    "niah_single_2": (1, r"\d{7}"),
    "niah_single_3": (1, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
    "niah_multikey_1": (1, r"\d{7}"),
    "niah_multikey_2": (1, r"\d{7}"),
    "niah_multikey_3": (1, r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"),
    "niah_multivalue": (4, r"\d{7}"),
    "niah_multiquery": (4, r"\d{7}"),
}


@pytest.mark.parametrize("task", list(NIAH_ANSWERS))
def test_needles_of_each_kind(task: RulerTask) -> None:
    maker = maker_of(task, length=4096, texts=texts(), seed=42)
    draft = maker.draft(60, Random(4))
    n_answers, form = NIAH_ANSWERS[task]
    assert len(draft.answers) == n_answers
    needles = re.findall(r"A special \w+ for (\S+) is: (\S+)\.", draft.prompt)
    expected = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    assert len(needles) == expected + (60 if task in ("niah_multikey_2", "niah_multikey_3") else 0)
    for wanted in draft.answers:
        assert re.fullmatch(form, wanted)
        (key,) = [key for key, value in needles if value == wanted]
        assert key in draft.answer_prefix
    plural = n_answers > 1
    assert draft.answer_prefix.endswith(" are" if plural else " is")


def test_the_documents_of_a_question_lie_elsewhere_in_every_sample(tmp_path: Path) -> None:
    """The public generator shuffles with one seed, so that the answer always stands at the same place."""
    questions = read_questions(written_questions(tmp_path))
    maker = QuestionAnswering(questions=questions)
    places = set()
    for index in range(12):
        draft = maker.draft(10, Random(index))
        shown = re.findall(r"Document \d+:\n(.+)", draft.prompt)
        assert len(shown) == len(set(shown)) == 10
        (place,) = [place for place, text in enumerate(shown) if draft.answers[0] in text]
        places.add(place)
    assert len(places) > 4


def test_a_question_keeps_its_documents_however_many_are_shown() -> None:
    questions = tuple(
        Question(question=f"q{number}", answers=("a",), documents=(f"one {number}", f"two {number}"))
        for number in range(5)
    )
    maker = QuestionAnswering(questions=questions)
    assert (maker.smallest, maker.largest) == (2, 10)
    draft = maker.draft(10, Random(0))
    assert len(re.findall(r"Document \d+:", draft.prompt)) == 10
    number = draft.prompt[-1]
    small = maker.draft(2, Random(0))
    assert small.prompt.endswith(f"q{number}")
    assert f"one {number}" in small.prompt
    assert f"two {number}" in small.prompt


def test_a_gap_stands_for_a_word_of_one_passage() -> None:
    found = cloze_questions(texts())
    assert len(found) > 10
    whole = "\n".join(" ".join(sentences(text)) for text in texts())
    for question in found:
        (word,), (passage,) = question.answers, question.documents
        assert GAP in question.question
        assert word not in question.question
        assert len(re.findall(rf"\b{word}\b", whole)) == len(re.findall(rf"\b{word}\b", passage)) >= 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"question": "q", "answers": ["a"]}], "line 1: documents"),
        ([{"question": "q", "answers": [], "documents": ["d"]}], "line 1: answers"),
        ([{"question": "q", "answers": ["a"], "documents": ["d"]}, {"question": 3}], "line 2: question"),
        ([], "holds no questions"),
    ],
)
def test_a_file_of_questions_says_where_it_is_wrong(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        read_questions(question_file(tmp_path, lines))


def test_other_questions_than_the_probe_names_are_refused(tmp_path: Path) -> None:
    file = written_questions(tmp_path)
    Path(file.path).write_text('{"question": "q", "answers": ["a"], "documents": ["d"]}\n')
    with pytest.raises(ProbeError, match="the probe names"):
        read_questions(file)


# --- fitting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [*RULER_TASKS, "qa_cloze"])
def test_samples_fill_the_length_and_never_exceed_it(task: RulerTask, tmp_path: Path) -> None:
    file = written_questions(tmp_path)
    probe = Ruler(length=3000, tasks=(task,), samples=3, qa_1=file, qa_2=file)
    samples = make_samples(task, probe, tokenizer(), texts=texts(), seed=42, beginning_id=1)
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert len({sample.text for sample in samples}) == 3
    for sample in samples:
        counted = 1 + len(tokenizer().encode(sample.text, add_special_tokens=False).ids)
        assert counted == sample.n_tokens
        assert 0.75 * 3000 < sample.n_tokens + RULER_ANSWER_TOKENS[task] <= 3000
        assert sample.text.endswith(sample.answer_prefix)
        assert sample.answers
    again = make_samples(task, replace(probe, samples=2), tokenizer(), texts=texts(), seed=42, beginning_id=1)
    assert again == samples[:2]


def test_text_of_shorter_sentences_fills_the_length_too() -> None:
    """A sample begins anywhere in the text; its size in sentences is not that of another."""
    short = " ".join(f"{word.capitalize()} is." for word in texts()[0].replace(".", "").split()[:1500])
    probe = Ruler(length=1500, tasks=("niah_single_2",), samples=12)
    samples = make_samples("niah_single_2", probe, tokenizer(), texts=(*texts(), short), seed=42)
    assert min(sample.n_tokens for sample in samples) >= 0.9 * (1500 - 128)
    assert len({sample.text.count(".") > 60 for sample in samples}) == 2  # text of either kind


@pytest.mark.parametrize("task", [*RULER_TASKS, "qa_cloze"])
def test_a_length_that_cannot_hold_a_task_is_an_error_that_says_what_can(task: RulerTask, tmp_path: Path) -> None:
    """B56: the public generators search for ever."""
    file = written_questions(tmp_path)
    probe = Ruler(length=RULER_ANSWER_TOKENS[task] + 20, tasks=(task,), samples=3, qa_1=file, qa_2=file)
    with pytest.raises(ProbeError, match=f"{task} does not fit into {probe.length} tokens") as raised:
        make_samples(task, probe, tokenizer(), texts=texts(), seed=42)
    least = int(re.search(r"for about (\d+)", str(raised.value)).group(1))  # type: ignore[union-attr]
    enough = replace(probe, length=round(1.05 * least), samples=1)
    (sample,) = make_samples(task, enough, tokenizer(), texts=texts(), seed=42)
    assert sample.n_tokens + RULER_ANSWER_TOKENS[task] <= enough.length


def test_too_few_documents_for_a_length_are_an_error(tmp_path: Path) -> None:
    file = written_questions(tmp_path, n=5)
    probe = Ruler(length=3000, tasks=("qa_1",), samples=1, qa_1=file)
    with pytest.raises(ProbeError, match=r"qa_1 has 5 documents, which fill \d+ of 2968 tokens"):
        make_samples("qa_1", probe, tokenizer(), texts=texts(), seed=42)


# --- answers and scores -----------------------------------------------------------------------------------------------


def test_scores_of_the_known_example() -> None:
    predictions = ["8090293 and 1234567", "none"]
    answers = [["8090293", "1234567", "1111111", "2222222"], ["3333333"]]
    assert string_match_all(predictions, answers) == 25.0
    assert string_match_part(predictions, answers) == 50.0


def test_scores_leave_case_and_control_characters_aside() -> None:
    assert string_match_all([" The\x00ANSWER is Kalo-Rime"], [["kalo-rime"]]) == 100.0
    assert string_match_all(["kalo\x07rime"], [["kalorime"]]) == 0.0
    assert string_match_part(["a", "b", "c"], [["a"], ["x"], ["y"]]) == 33.33


SHAPE = ModelShape(
    layers=1, width=16, heads=2, kv_heads=1, ffn_width=24, vocab_size=600, qk_conv_kernel=3, init_std=0.3
)


@pytest.mark.parametrize("convolved", [False, True])
def test_answers_are_what_the_likeliest_token_after_token_gives(convolved: bool) -> None:
    """A model with convolutions keeps no past, and is read anew for every token."""
    model = build_model(SHAPE, rope_base=1e4, max_positions=256, seed=1) if convolved else tiny_llama(600)
    text = "Rain fell on the roof."
    ids = [1, *tokenizer().encode(text, add_special_tokens=False).ids]
    n_prompt = len(ids)
    for _ in range(6):
        with torch.inference_mode():
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    found = answer(model, tokenizer(), text, max_tokens=6, beginning_id=1)
    assert found == tokenizer().decode(ids[n_prompt:])


def test_a_task_is_one_metric_and_several_have_a_mean() -> None:
    probe = Ruler(length=600, tasks=("niah_single_1", "fwe"), samples=2)
    metrics = run_ruler(tiny_llama(600), tokenizer(), probe, texts=texts(), seed=42)
    assert [(metric.name, metric.label, metric.count, metric.length) for metric in metrics] == [
        ("ruler_score", "niah_single_1", 2, 600),
        ("ruler_score", "fwe", 2, 600),
        ("ruler_mean", None, 4, 600),
    ]
    assert metrics[2].value == pytest.approx((metrics[0].value + metrics[1].value) / 2)


def test_the_model_is_given_prompt_and_answer_prefix() -> None:
    """Without the prefix a model would have to guess how an answer begins."""
    model, fed = tiny_llama(600), []
    model.register_forward_pre_hook(
        lambda module, args, inputs: fed.append(inputs["input_ids"][0].tolist()), with_kwargs=True
    )
    probe = Ruler(length=500, tasks=("niah_single_1",), samples=2)
    run_ruler(model, tokenizer(), probe, texts=texts(), seed=42, beginning_id=1)
    samples = make_samples("niah_single_1", probe, tokenizer(), texts=texts(), seed=42, beginning_id=1)
    prompts = [ids for ids in fed if len(ids) > 1]  # the rest are answer tokens, one at a time
    assert prompts == [[1, *tokenizer().encode(sample.text).ids] for sample in samples]
