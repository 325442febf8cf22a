"""`longlaw data`, called as a person calls it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from longlaw.data_commands import data_app
from workers.corpus import find_corpus, open_corpus

RUNNER = CliRunner()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for number in range(12):
        draw = random.Random(number)
        file = tmp_path / "my-texts" / f"part{number % 4}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(draw.choice("abcdef \n") for _ in range(500)))
    return tmp_path / "my-texts"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGLAW_STORE", str(tmp_path / "store"))
    return tmp_path / "store"


def test_build_puts_a_folder_into_the_store_of_the_environment(texts: Path, store: Path) -> None:
    result = RUNNER.invoke(data_app, ["build", str(texts), "--vocab-size", "300", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    corpus = open_corpus(store, find_corpus(store, "my-texts"), verify_digests=True)
    assert told["name"] == "my-texts"
    assert told["hash"] == corpus.hash
    assert told["tokens"]["short"] == len(corpus.tokens("short"))
    assert told["tokens"]["long"] == len(corpus.tokens("long"))
    assert sum(told["documents"].values()) == 12


def test_build_takes_the_store_and_directories_as_documents(texts: Path, store: Path, tmp_path: Path) -> None:
    arguments = [str(texts), "--name", "dirs", "--documents", "directory", "--vocab-size", "300"]
    result = RUNNER.invoke(data_app, ["build", *arguments, "--store", str(tmp_path / "elsewhere"), "--json"])
    assert result.exit_code == 0, result.output
    assert sum(json.loads(result.stdout)["documents"].values()) == 4
    assert find_corpus(tmp_path / "elsewhere", "dirs")
    assert not store.exists()


def test_list_and_show_tell_what_was_built(texts: Path, store: Path) -> None:
    assert "No corpora" in RUNNER.invoke(data_app, ["list"]).stdout
    assert json.loads(RUNNER.invoke(data_app, ["list", "--json"]).stdout) == []
    RUNNER.invoke(data_app, ["build", str(texts), "--name", "one", "--vocab-size", "300"])
    (listed,) = json.loads(RUNNER.invoke(data_app, ["list", "--json"]).stdout)
    assert (listed["name"], listed["vocab_size"]) == ("one", 300)
    shown = json.loads(RUNNER.invoke(data_app, ["show", "one", "--json"]).stdout)
    assert shown["hash"] == listed["hash"]
    assert {document["id"] for document in shown["document_list"]} == {f"part{n % 4}/{n}.txt" for n in range(12)}
    lines = RUNNER.invoke(data_app, ["list"]).stdout.splitlines()
    assert lines[0] == f"one  {listed['hash']}"  # whole: grids and REST want it
    table = RUNNER.invoke(data_app, ["show", "one"])
    assert table.exit_code == 0
    assert "part0/0.txt" in table.stdout


def test_build_takes_rows_their_fields_and_held_out_documents_of_their_own(store: Path, tmp_path: Path) -> None:
    draw = random.Random(0)
    rows = [{"code": "".join(draw.choice("abcd \n") for _ in range(90)), "repo": f"r{n % 6}"} for n in range(30)]
    (tmp_path / "code.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reports.jsonl").write_text("".join(json.dumps({"text": "ab " * n}) + "\n" for n in (3, 80, 90, 70)))
    fields = ["--text-field", "code", "--group-by", "repo", "--vocab-size", "300"]
    chosen = ["--held-out", str(tmp_path / "reports.jsonl"), "--min-tokens", "40", "--first", "2"]
    result = RUNNER.invoke(data_app, ["build", str(tmp_path / "code.jsonl"), *fields, *chosen, "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["name"] == "code"
    assert told["documents"]["short"] + told["documents"]["long"] == 6
    corpus = open_corpus(store, told["hash"])
    assert [document.id for document in corpus.held_out] == ["reports.jsonl:2", "reports.jsonl:3"]

    alone = ["build", "none", "--tokenizer", "code", "--name", "reports", *chosen, "--json"]
    result = RUNNER.invoke(data_app, alone)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["tokens"]["short"] == told["tokens"]["long"] == 0
    assert open_corpus(store, told["hash"]).manifest.tokenizer == corpus.manifest.tokenizer
    assert RUNNER.invoke(data_app, ["list"]).exit_code == 0


def test_build_takes_prompts_with_answers_and_tells_what_is_learned(store: Path, tmp_path: Path) -> None:
    rows = [{"q": f"What is {n}?\n", "a": f"A number, {n}." if n else " "} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = ["--prompt-field", "q", "--answer-field", "a", "--vocab-size", "300"]
    result = RUNNER.invoke(data_app, ["build", str(tmp_path / "pairs.jsonl"), *fields, "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    corpus = open_corpus(store, told["hash"])
    marks = corpus.answers("short")
    assert marks is not None
    counted = int(marks.of(0, told["tokens"]["short"]).sum())
    assert (told["answers"]["chat"], told["answers"]["left_out"]) == ("joined", 1)
    assert told["answers"]["short_tokens"] == counted < told["tokens"]["short"]
    listed = RUNNER.invoke(data_app, ["list"]).stdout
    assert f"learned: the answers, {counted} tokens short" in listed
    assert "rows of prompt and answer; 1 without an answer left out" in listed


def test_build_writes_messages_by_a_template_or_plainly(store: Path, tmp_path: Path) -> None:
    rows = [
        {"chat": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"{n}!"}]}
        for n in range(20)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "chat.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    arguments = ["build", str(tmp_path / "chats.jsonl"), "--messages-field", "chat", "--vocab-size", "300"]
    for more, begins, said in (
        ([], "user:\nSay ", "rows of messages, written plainly"),
        (["--chat-template", str(tmp_path / "chat.jinja")], "[user]Say ", "rows of messages, by the chat template"),
    ):
        result = RUNNER.invoke(data_app, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert said in result.stdout
        corpus = open_corpus(store, find_corpus(store, "chats"))
        assert corpus.held_out[0].text.startswith(begins)


def test_describe_tells_what_sequences_of_a_length_hold(texts: Path, store: Path) -> None:
    draw = random.Random(99)
    (texts / "long.txt").write_text("".join(draw.choice("abcdef \n") for _ in range(4000)))
    RUNNER.invoke(data_app, ["build", str(texts), "--vocab-size", "300", "--held-out-share", "0.05"])
    corpus = open_corpus(store, find_corpus(store, "my-texts"))
    (split,) = {document.split for document in corpus.manifest.documents if document.id == "long.txt"}
    lengths = [document.tokens for document in corpus.manifest.of(split)]
    arguments = ["describe", "my-texts", "--split", split, "--seq-len", "512", "--old-length", "128"]
    told = json.loads(RUNNER.invoke(data_app, [*arguments, "--json"]).stdout)
    assert (told["documents"], told["tokens"]) == (len(lengths), sum(lengths))
    assert told["full_length_documents"] == sum(length >= 512 for length in lengths) == 1
    assert told["full_length_sequences"] == max(lengths) // 512
    assert told["largest_position"] == 511
    assert 0 < told["share_past_old_length"] < 1
    shown = RUNNER.invoke(data_app, arguments).stdout
    assert "positions reach 511" in shown
    assert f"{told['share_past_old_length']:.2%} of the tokens lie at position 128 or beyond" in shown
    result = RUNNER.invoke(data_app, ["describe", "my-texts", "--seq-len", "100000", "--full-length-share", "0.75"])
    assert result.exit_code == 1
    assert "0.75 cannot be met" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "nowhere"], "nowhere is not a folder"),
        (["build", "none"], "needs --held-out"),
        (["build", "torch", "--messages-field", "m"], "torch has no rows"),
        (["build", "--first", "3"], "give it"),
        (["build", "--tokenizer", "nothing"], '"nothing" is no tokenizer.json, and no corpus'),
        (["show", "nothing"], 'no corpus "nothing"'),
        (["list", "--store", "nosuch://bucket/store"], "cannot be opened"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(store: Path, arguments: list[str], message: str) -> None:
    result = RUNNER.invoke(data_app, arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.strip().splitlines()[-1].startswith("error: ")


def test_show_finds_damage(texts: Path, store: Path) -> None:
    RUNNER.invoke(data_app, ["build", str(texts), "--name", "one", "--vocab-size", "300"])
    file = store / "corpora" / find_corpus(store, "one") / "long.bin"
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    result = RUNNER.invoke(data_app, ["show", "one"])
    assert result.exit_code == 1
    assert "long.bin has the wrong digest" in result.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--name", ""], 'corpus name ""'),
        (["--name", "x" * 300], "300 characters"),
        (["--end-of-text", "<eos>"], "--tokenizer"),
        (["--held-out-ids-field", "input_ids"], "give it"),
        (["--held-out-field", "body"], "give it"),
        (["--prompt-field", "q"], "give both"),
        (["--chat-template", "x"], "give --messages-field"),
        (["--messages-field", "m"], "is no .jsonl or .parquet file"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(texts: Path, store: Path, options: list[str], said: str) -> None:
    result = RUNNER.invoke(data_app, ["build", str(texts), "--vocab-size", "300", *options])
    assert result.exit_code == 1
    assert said in result.stderr
    assert not (store / "corpora").exists()


def test_an_empty_source_is_not_the_current_folder(store: Path) -> None:
    result = RUNNER.invoke(data_app, ["build", "", "--name", "x"])
    assert result.exit_code == 1
    assert "the source is empty" in result.stderr


def test_huge_sizes_are_refused_by_the_name_of_their_option(texts: Path, store: Path) -> None:
    huge = str(1 << 70)
    for arguments in (["build", str(texts), "--vocab-size", huge], ["describe", "my-texts", "--seq-len", huge]):
        result = RUNNER.invoke(data_app, arguments)
        assert result.exit_code == 2
        assert arguments[2] in result.stderr


def test_a_name_that_moves_to_another_corpus_is_said(texts: Path, store: Path) -> None:
    first = RUNNER.invoke(data_app, ["build", str(texts), "--vocab-size", "300", "--json"])
    again = RUNNER.invoke(data_app, ["build", str(texts), "--vocab-size", "300", "--json"])
    other = RUNNER.invoke(data_app, ["build", str(texts), "--vocab-size", "290", "--json"])
    assert "until now" not in again.stderr
    assert f"my-texts was the name of {json.loads(first.stdout)['hash']} until now" in other.stderr


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "\\ud800"}', "half a surrogate pair"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"9" * 5_000 + b"}", "not JSON"),
    ],
)
def test_a_row_that_json_allows_and_text_does_not_is_named(tmp_path: Path, store: Path, line: bytes, said: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    result = RUNNER.invoke(data_app, ["build", str(tmp_path / "rows.jsonl")])
    assert result.exit_code == 1
    assert "line 2" in result.stderr
    assert said in result.stderr


def test_a_file_name_that_is_not_utf8_is_named(texts: Path, store: Path) -> None:
    (texts / "\udcff.txt").write_text("hello")
    result = RUNNER.invoke(data_app, ["build", str(texts)])
    assert result.exit_code == 1
    assert "is not UTF-8: rename it" in result.stderr
