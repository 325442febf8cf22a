"""`longlaw measure` as a person types it: LongPPL of one folder, key tokens by another of another tokenizer."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner, Result

from longlaw.cli import app
from tests.workers.tiny_evaluation import byte_tokenizer, model_folder, named_values, repeating_corpus
from workers.errors import CorpusError, MeasurementError, ReferenceModelError

TEXTS = [named_values(seed, names=4, lines=24) for seed in range(6)]
REFERENCE_TOKENIZER = byte_tokenizer(TEXTS, 320)
MODEL_TOKENIZER = byte_tokenizer(TEXTS, 290)
LENGTH, CHUNK, STRIDE = 120, 16, 8
GAIN, CEILING = 0.5, 5.5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("models")
    model_folder(home / "reference", REFERENCE_TOKENIZER, seed=1, beginning="<s>")
    model_folder(home / "model", MODEL_TOKENIZER, seed=2)
    model_folder(home / "same", REFERENCE_TOKENIZER, seed=3)
    lines = [{"text": text} for text in TEXTS] + [{"text": "set short = 1\n"}]
    (home / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return home


def longlaw(home: Path, *arguments: object, model: str = "model", documents: object = None) -> Result:
    command = ["measure", home / model, "--documents", documents or home / "texts.jsonl", "--length", LENGTH]
    command += ["--chunk-length", CHUNK, "--stride", STRIDE, "--gain", GAIN, "--ceiling", CEILING, *arguments]
    return CliRunner().invoke(app, [str(item) for item in command])


def losses(folder: Path, ids: list[int]) -> list[float]:
    """NLL of ids[1:], one whole sequence at a time, from the model's own logits."""
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    return functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()


def by_definition(home: Path) -> tuple[list[float], list[float]]:
    """NLL of the model's key tokens and of all its tokens, worked out character by character, window by window."""
    key: list[float] = []
    every: list[float] = []
    for text in TEXTS:
        encoding = REFERENCE_TOKENIZER.encode(text)
        ids, spans = encoding.ids[:LENGTH], encoding.offsets[:LENGTH]
        text = text[: spans[-1][1]]
        full = losses(home / "reference", [1, *ids])
        chosen: set[int] = set()
        for start in range(0, len(ids) - CHUNK, STRIDE):
            end = min(start + CHUNK + STRIDE, len(ids))
            local = losses(home / "reference", [1, *ids[start:end]])
            for position in range(start + CHUNK, end):
                gain = local[position - start] - full[position]
                if start and gain > GAIN and full[position] < CEILING:
                    chosen.update(range(*spans[position]))
        own = MODEL_TOKENIZER.encode(text)
        nll = losses(home / "model", own.ids)
        every += nll
        for place, (start, end) in enumerate(own.offsets):
            if (
                place
                and all(at in chosen for at in range(start, end) if not text[at].isspace())
                and text[start:end].strip()
            ):
                key.append(nll[place - 1])
    return key, every


def test_the_model_is_measured_as_the_definition_says(folders: Path, tmp_path: Path) -> None:
    saved = tmp_path / "found.json"
    outcome = longlaw(
        folders, "--reference", folders / "reference", "--mode", "pku", "--store", tmp_path, "--json", "--save", saved
    )
    assert outcome.exit_code == 0, outcome.output
    told: dict[str, Any] = json.loads(outcome.stdout)
    key, every = by_definition(folders)
    assert told["n_documents"] == 6
    assert told["key_count"] == len(key) > 20
    assert told["all_count"] == len(every)
    assert told["log_longppl"] == pytest.approx(np.mean(key), abs=1e-5)
    assert told["longppl"] == pytest.approx(math.exp(np.mean(key)), rel=1e-5)
    assert told["log_ppl"] == pytest.approx(np.mean(every), abs=1e-5)
    assert told["log_longppl_se"] > 0
    assert told["evaluator"]["documents"]["min_length"] == LENGTH // 2
    written = json.loads(saved.read_text())
    assert sum(document["key_count"] for document in written["documents"]) == len(key)
    assert {name: value for name, value in written.items() if name != "documents"} == told


def test_exact_windows_score_more_tokens_than_the_public_ones(folders: Path, tmp_path: Path) -> None:
    counts = []
    for mode in ("exact", "pku"):
        options = ["--reference", folders / "reference", "--store", tmp_path, "--json", "--mode", mode]
        told = json.loads(longlaw(folders, *options, model="same").stdout)
        counts.append(told["short_count"] + told["key_count"])
    assert counts[0] > counts[1]


def test_each_tokenizer_has_its_own_key_set_and_the_reference_runs_once(folders: Path, tmp_path: Path) -> None:
    options = ["--reference", folders / "reference", "--store", tmp_path, "--json", "--first", 3]
    found = [json.loads(longlaw(folders, *options, model=model).stdout) for model in ("model", "same", "model")]
    assert found[0] == found[2]
    assert found[0]["evaluator_id"] == found[1]["evaluator_id"]
    assert found[0]["key_count"] != found[1]["key_count"]
    assert [item["n_documents"] for item in found] == [3, 3, 3]
    (home,) = (tmp_path / "references").iterdir()
    assert (home / "scores.npz").is_file()
    assert len(list((home / "key_tokens").iterdir())) == 2


def test_documents_can_be_a_corpus_and_the_reference_its_counts(folders: Path, tmp_path: Path) -> None:
    corpus = repeating_corpus(tmp_path)
    long_enough = sum(len(document.tokens) >= 60 for document in corpus.held_out)
    outcome = longlaw(folders, "--reference", "copy", "--store", tmp_path, documents="repeating")
    assert outcome.exit_code == 0, outcome.output
    assert f"{long_enough} documents" in outcome.stdout
    assert "LongPPL" in outcome.stdout


@pytest.mark.parametrize(
    ("arguments", "documents", "error", "message"),
    [
        (["--reference", "copy"], None, CorpusError, "name of a corpus"),
        (["--reference", "reference"], "nothing", CorpusError, "neither a file or folder nor a corpus"),
        (["--reference", "reference", "--min-tokens", 100, "--first", 7], None, CorpusError, "held-out documents"),
        (["--reference", "texts.jsonl"], None, ReferenceModelError, "holds no .safetensors weights"),
    ],
)
def test_what_cannot_be_measured_is_said(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[object],
    documents: str | None,
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.chdir(folders)
    outcome = longlaw(folders, *arguments, "--store", tmp_path, documents=documents)
    assert isinstance(outcome.exception, error)
    assert message in str(outcome.exception)


def test_a_folder_without_a_tokenizer_takes_one_from_elsewhere(folders: Path, tmp_path: Path) -> None:
    bare = model_folder(tmp_path / "bare", MODEL_TOKENIZER, seed=2)
    (bare / "tokenizer.json").unlink()
    options = ["--reference", folders / "reference", "--store", tmp_path, "--json", "--first", 2]
    outcome = longlaw(tmp_path, *options, model="bare", documents=folders / "texts.jsonl")
    assert isinstance(outcome.exception, ReferenceModelError)
    given = longlaw(
        tmp_path,
        *options,
        "--tokenizer",
        folders / "model" / "tokenizer.json",
        model="bare",
        documents=folders / "texts.jsonl",
    )
    whole = longlaw(folders, *options)
    assert json.loads(given.stdout)["log_longppl"] == json.loads(whole.stdout)["log_longppl"]


def test_a_table_of_positions_that_ends_too_early_is_named(folders: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=290, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    MODEL_TOKENIZER.save(str(tmp_path / "gpt2" / "tokenizer.json"))
    options = ["--reference", folders / "reference", "--store", tmp_path]
    outcome = longlaw(tmp_path, *options, model="gpt2", documents=folders / "texts.jsonl")
    assert isinstance(outcome.exception, MeasurementError)
    assert "has 64 positions" in str(outcome.exception)


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = longlaw(folders, "--reference", "nowhere", "--save", tmp_path / "file" / "told.json")
    assert isinstance(outcome.exception, OSError)
    assert longlaw(folders, "--reference", "nowhere", "--save", tmp_path / "told.json").exit_code == 1
    assert not (tmp_path / "told.json").exists()


def test_a_model_without_tokenizer_takes_that_of_a_corpus_by_name(folders: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(folders / "model", bare, ignore=shutil.ignore_patterns("tokenizer*"))
    arguments = ["--reference", folders / "same", "--store", tmp_path / "store"]
    outcome = longlaw(folders, *arguments, model=str(bare))
    assert isinstance(outcome.exception, ReferenceModelError)
    assert "--tokenizer" in str(outcome.exception)
    command = ["data", "build", "none", "--name", "mine", "--store", tmp_path / "store", "--end-of-text", "<s>"]
    command += ["--tokenizer", folders / "model" / "tokenizer.json", "--held-out", folders / "texts.jsonl"]
    built = CliRunner().invoke(app, [str(item) for item in command])
    assert built.exit_code == 0, built.output
    told = [
        json.loads(longlaw(folders, *arguments, "--json", *more, model=model).stdout)
        for model, more in (("model", ()), (str(bare), ("--tokenizer", "mine")))
    ]
    assert told[0]["log_ppl"] == told[1]["log_ppl"]
