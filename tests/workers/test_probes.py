"""Probes: prompts of exact length, losses and ranks of what is hidden in them, heads that look back at it."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from tests.workers.tiny_evaluation import byte_tokenizer, named_values, tiny_llama
from workers.documents import Window
from workers.errors import ProbeError
from workers.model import build_model
from workers.probe_spec import (
    NeedleLoss,
    Passkey,
    PositionLoss,
    Probe,
    ProbeSet,
    QuestionFile,
    RetrievalHeads,
    Ruler,
)
from workers.probes import position_bins, run_probes
from workers.probes_heads import head_scores, most_attended
from workers.probes_needles import Haystack, Needle
from workers.results import Metric
from workers.spec import EvaluationDocuments, ModelShape

TEXTS = [named_values(seed, names=4, lines=30) for seed in range(3)]
TOKENIZER = byte_tokenizer(
    [*TEXTS, "The pass key of this text is. The number of the is. The sign above the gate reads:"], 400
)
DOCUMENTS = EvaluationDocuments(corpus="0" * 32, count=3, length=128)
MODEL = tiny_llama(400)


def window_of(text: str) -> Window:
    encoding = TOKENIZER.encode(text)
    return Window(
        document="a",
        tokens=np.array(encoding.ids, dtype=np.int64),
        spans=np.array(encoding.offsets, dtype=np.int32),
        text=text,
    )


WINDOWS = [window_of(text) for text in TEXTS]


def set_of(*probes: Probe, seed: int = 42) -> ProbeSet:
    return ProbeSet(documents=DOCUMENTS, probes=probes, seed=seed)


def found(*probes: Probe, model: nn.Module = MODEL, seed: int = 42) -> tuple[Metric, ...]:
    return run_probes(model, TOKENIZER, set_of(*probes, seed=seed), windows=WINDOWS, beginning_id=1)


# --- the specification ------------------------------------------------------------------------------------------------


def test_planning_a_probe_set_needs_no_torch() -> None:
    command = "import sys; import workers.probe_spec; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0


def test_a_probe_set_is_named_by_everything_that_decides_its_numbers() -> None:
    base = set_of(Passkey(lengths=(64,)))
    others = [
        set_of(Passkey(lengths=(64,)), seed=43),
        set_of(Passkey(lengths=(65,))),
        set_of(NeedleLoss(lengths=(64,))),
        set_of(Passkey(lengths=(64,)), PositionLoss()),
        replace(base, documents=replace(DOCUMENTS, count=2)),
    ]
    assert set_of(Passkey(lengths=(64,))).id == base.id
    assert len({item.id for item in [base, *others]}) == 6


def test_probes_of_the_same_fields_have_different_names() -> None:
    assert set_of(Passkey(lengths=(64,), samples=4)).id != set_of(NeedleLoss(lengths=(64,), samples=4)).id


@pytest.mark.parametrize(
    ("probe", "problem"),
    [
        (Passkey(lengths=()), "probes[0].lengths: at least one, each at least 1"),
        (Passkey(lengths=(8,), depths=(1.5,)), "probes[0].depths: 1.5 is no share of the context (0 to 1)"),
        (NeedleLoss(lengths=(8,), distractors=0), "probes[0].distractors: a rank needs at least one"),
        (NeedleLoss(lengths=(8,), samples=0), "probes[0].samples: must be at least 1"),
        (PositionLoss(bins_per_doubling=0), "probes[0].bins_per_doubling: must be at least 1"),
        (RetrievalHeads(length=64, tracked=("3",)), 'probes[0].tracked: "3" is no "layer.head"'),
        (
            Ruler(length=128, tasks=("niah_single_1",)),
            "probes[0].length: 128 tokens leave niah_single_1 no prompt beside its 128 of answer",
        ),
        (
            Ruler(length=4096, tasks=("qa_1",)),
            "probes[0].qa_1: needs a file of questions (leave the task out, or take qa_cloze, which needs none)",
        ),
    ],
)
def test_what_cannot_be_is_said_without_a_model(probe: Probe, problem: str) -> None:
    assert set_of(probe).problems() == (problem,)
    with pytest.raises(ProbeError, match=r"probes\[0\]"):
        found(probe)


def test_a_sound_probe_set_has_no_problems_and_a_price() -> None:
    file = QuestionFile(path="q.jsonl", digest="0" * 64)
    probes = (
        PositionLoss(),
        Passkey(lengths=(64, 96), depths=(0.0, 1.0), samples=3),
        NeedleLoss(lengths=(64,), depths=(0.5,), samples=2, distractors=3),
        RetrievalHeads(length=80, depths=(0.5,), samples=2),
        Ruler(length=4096, samples=5, qa_1=file, qa_2=file),
    )
    assert set_of(*probes).problems() == ()
    assert set_of(*probes).forward_tokens == 3 * 128 + 160 * 2 * 3 + 64 * 2 * 4 + 80 * 2 + 4096 * 13 * 5


# --- loss against position --------------------------------------------------------------------------------------------


def test_bins_double_and_cover_every_predicted_position_once() -> None:
    assert position_bins(20, 1) == ((1, 2), (2, 4), (4, 8), (8, 16), (16, 20))
    for n_tokens, per_doubling in ((1000, 4), (32768, 1), (3, 8), (1, 1)):
        bins = position_bins(n_tokens, per_doubling)
        covered = [position for first, end in bins for position in range(first, end)]
        assert covered == list(range(1, n_tokens))


def test_loss_against_position_is_the_mean_over_the_same_documents_in_every_bin() -> None:
    reach = min(len(window.tokens) for window in WINDOWS)
    assert len({len(window.tokens) for window in WINDOWS}) > 1
    with torch.inference_mode():
        ids = torch.from_numpy(np.stack([window.tokens[:reach] for window in WINDOWS]))
        logits = MODEL(input_ids=ids).logits[:, :-1].double()
    losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").numpy()
    metrics = found(PositionLoss(bins_per_doubling=2))
    assert sum(metric.count for metric in metrics) == 3 * (reach - 1)
    for metric in metrics:
        first, last = map(int, str(metric.label).split("-"))
        assert metric.length == last + 1
        assert metric.value == pytest.approx(losses[:, first - 1 : last].mean(), abs=1e-5)


# --- needles ----------------------------------------------------------------------------------------------------------


def test_prompts_have_the_length_asked_for_and_the_needle_at_its_depth() -> None:
    haystack = Haystack(WINDOWS, TOKENIZER, beginning_id=1)
    needle = Needle(before="The pass key of this text is", value=" 53412")
    sentence = TOKENIZER.decode([*haystack.tokens(needle.before), *haystack.tokens(needle.value)])
    for length in (80, 200, 333):
        places = []
        for depth in (0.0, 0.3, 1.0):
            prompt = haystack.prompt(needle, length=length, depth=depth, draw=Random(1))
            assert len(prompt.ids) == length
            assert prompt.ids[0] == 1
            text = TOKENIZER.decode(prompt.ids.tolist())
            assert text.count(sentence) == 2
            assert text.endswith(sentence)
            start, end = prompt.reference
            assert TOKENIZER.decode(prompt.ids[start:end].tolist()) == sentence + ".\n"
            assert TOKENIZER.decode(prompt.ids[prompt.answer :].tolist()) == " 53412"
            before = TOKENIZER.decode(prompt.ids[1:start].tolist())
            assert before == "" or before.endswith("\n") or depth * length < 40
            places.append(start / length)
        assert places == sorted(places)
        assert places[0] < 0.2
        assert length < 200 or places[2] > 0.55


def test_the_samples_of_a_length_are_the_same_at_every_depth() -> None:
    haystack = Haystack(WINDOWS, TOKENIZER)
    needle = Needle(before="The pass key of this text is", value=" 53412")
    hay = []
    for depth in (0.0, 0.9):
        prompt = haystack.prompt(needle, length=150, depth=depth, draw=Random("same"))
        start, end = prompt.reference
        hay.append([*prompt.ids[:start], *prompt.ids[end : prompt.answer]])
    assert hay[0] == hay[1]


def test_a_length_without_room_for_the_needle_is_refused_with_one_that_has() -> None:
    with pytest.raises(ProbeError, match=r"a prompt of 20 tokens has no room.*lengths of at least (\d+)") as raised:
        found(Passkey(lengths=(20,), samples=1))
    least = int(str(raised.value).rsplit(" ", 1)[1])
    assert len(found(Passkey(lengths=(least,), samples=1))) == 5


def test_a_model_that_copies_finds_every_pass_key() -> None:
    """An induction model: it continues with what followed the last two tokens the first time they came."""
    metrics = found(Passkey(lengths=(100, 180), depths=(0.0, 0.5, 1.0), samples=3), model=Induction())
    assert [(metric.length, metric.depth) for metric in metrics] == [
        (length, depth) for length in (100, 180) for depth in (0.0, 0.5, 1.0)
    ]
    assert {metric.value for metric in metrics} == {1.0}
    assert {metric.count for metric in metrics} == {3}
    (random,) = found(Passkey(lengths=(100,), depths=(0.5,), samples=3))
    assert random.value == 0.0


def test_needle_loss_and_rank_tell_who_finds_the_value() -> None:
    probe = NeedleLoss(lengths=(220,), depths=(0.2, 0.8), samples=4, distractors=3)
    nll = [metric for metric in found(probe, model=Induction()) if metric.name == "needle_nll"]
    rank = [metric for metric in found(probe, model=Induction()) if metric.name == "needle_rank"]
    assert all(metric.value < 0.01 for metric in nll)
    assert [metric.value for metric in rank] == [1.0, 1.0]
    untrained = found(probe)
    assert all(metric.value > 2.0 for metric in untrained if metric.name == "needle_nll")
    assert all(1.0 < metric.value <= 4.0 for metric in untrained if metric.name == "needle_rank")


def test_needle_loss_is_the_model_s_own() -> None:
    (nll, _) = found(NeedleLoss(lengths=(150,), depths=(0.5,), samples=1, distractors=1))
    fed: list[list[int]] = []
    handle = MODEL.model.register_forward_pre_hook(
        lambda module, args, inputs: fed.extend(inputs["input_ids"].tolist()), with_kwargs=True
    )
    found(NeedleLoss(lengths=(150,), depths=(0.5,), samples=1, distractors=1))
    handle.remove()
    total, count = 0.0, 0
    for ids in fed[:1]:
        text = TOKENIZER.decode(ids)
        assert text.count("The number of the") == 3
        count = nll.count
        with torch.inference_mode():
            logits = MODEL(input_ids=torch.tensor([ids])).logits[0].double()
        value = text[text.index(text.rsplit("The number of the", 1)[1]) :].split(" is", 1)[1].split(".")[0]
        target = TOKENIZER.encode(value).ids
        assert len(target) == count
        for offset, token in enumerate(target):
            row = len(ids) - len(target) + offset
            total -= float(logits.log_softmax(-1)[row, token])
    assert nll.value == pytest.approx(total / count, abs=1e-5)


class Induction(nn.Module):
    """A causal model in which the token that followed the longest earlier occurrence of the last tokens is certain."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(400, 400, bias=False)
        self.head.weight = nn.Parameter(torch.eye(400))

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def base_model(self, *, input_ids: Tensor, use_cache: bool) -> object:
        hidden = torch.zeros((*input_ids.shape, 400))
        for row, ids in enumerate(input_ids.tolist()):
            for at in range(1, len(ids)):
                best, token = 0, None
                for earlier in range(at):
                    same = 0
                    while same <= earlier and ids[earlier - same] == ids[at - same]:
                        same += 1
                    if same > best:
                        best, token = same, ids[earlier + 1]
                if token is not None:
                    hidden[row, at, token] = 20.0
        return type("Output", (), {"last_hidden_state": hidden})


# --- retrieval heads --------------------------------------------------------------------------------------------------


def eager_rows(model: LlamaForCausalLM, ids: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Tensor]:
    """Attention of every layer as a whole, from the plain implementation."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(input_ids=torch.from_numpy(ids)[None], output_attentions=True).attentions
    model.set_attn_implementation("sdpa")
    return [attention[0] for attention in attentions]


@pytest.mark.parametrize("convolved", [False, True])
def test_most_attended_positions_are_those_of_the_whole_attention_matrix(convolved: bool) -> None:
    shape = ModelShape(
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        ffn_width=24,
        vocab_size=400,
        init_std=0.5,
        qk_conv_kernel=3 if convolved else 0,
    )
    model = build_model(shape, rope_base=1e4, max_positions=256, seed=2)
    ids = np.random.default_rng(0).integers(0, 400, 60)
    rows = np.array([20, 41, 58])
    attended = most_attended(model, ids, rows=rows)
    assert sorted(attended) == [0, 1]
    for layer, whole in enumerate(eager_rows(model, ids)):
        assert attended[layer].shape == (4, 3)
        np.testing.assert_array_equal(attended[layer], whole[:, rows].argmax(-1).numpy())


def test_the_model_attends_afterwards_as_it_did_before() -> None:
    ids = np.arange(40)
    with torch.inference_mode():
        before = MODEL(input_ids=torch.from_numpy(ids)[None]).logits
        most_attended(MODEL, ids, rows=np.array([30]))
        after = MODEL(input_ids=torch.from_numpy(ids)[None]).logits
    assert MODEL.config._attn_implementation == "sdpa"
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_a_sliding_window_bounds_what_a_head_can_look_at() -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=400,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.5,
        sliding_window=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    rows = np.array([30, 39])
    (places,) = most_attended(MistralForCausalLM(config), np.arange(40), rows=rows).values()
    assert (places <= rows).all()
    assert (places > rows - 8).all()


def test_a_hit_needs_the_place_and_the_token() -> None:
    """With queries of zero every position is attended to alike, and the first is taken for the largest."""
    haystack = Haystack(WINDOWS, TOKENIZER)
    prompt = haystack.prompt(Needle(before="x", value=" aab"), length=60, depth=0.0, draw=Random(0))
    model = tiny_llama(400)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
    first = int(prompt.ids[0])
    repeated = replace(prompt, ids=np.concatenate([prompt.ids[: prompt.answer], [first, first, first + 1]]))
    assert head_scores(model, [replace(repeated, reference=(0, 5))]) == {
        "0.0": pytest.approx(2 / 3),
        "0.1": pytest.approx(2 / 3),
    }
    assert set(head_scores(model, [replace(repeated, reference=(1, 5))]).values()) == {0.0}


def test_retrieval_heads_are_counted_afresh_and_tracked_ones_scored_whatever_they_do() -> None:
    probe = RetrievalHeads(length=150, depths=(0.2, 0.8), samples=2, threshold=-1.0)
    count, *scores = found(probe)
    assert (count.name, count.value) == ("retrieval_heads", 2.0)
    assert [score.label for score in scores] == ["0.0", "0.1"]
    strict = replace(probe, threshold=1.0, tracked=("0.1",))
    count, *tracked = found(strict)
    assert count.value == 0.0
    assert [(score.label, score.value) for score in tracked] == [("0.1", scores[1].value)]
    assert count.count == scores[0].count > 8
    assert all(math.isfinite(score.value) for score in scores)


def test_a_tracked_head_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(ProbeError, match=r"the model has no head 7\.0"):
        found(RetrievalHeads(length=150, samples=1, tracked=("7.0",)))


# --- all together -----------------------------------------------------------------------------------------------------


def test_the_same_set_finds_the_same_numbers_and_another_seed_others() -> None:
    probes = (NeedleLoss(lengths=(180,), samples=2), RetrievalHeads(length=150, samples=1, threshold=-1.0))
    assert found(*probes) == found(*probes)
    assert found(*probes) != found(*probes, seed=7)
