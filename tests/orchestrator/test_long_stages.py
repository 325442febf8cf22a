"""What a long stage may begin with, run through and lead on to, trained and measured for real by the scheduler."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from database.engine import create_engine
from database.models import CellEvaluation, Checkpoint, Evaluation, Metric, Observation, Segment
from database.specs import segment_from_json
from orchestrator.executor import RayExecutor
from orchestrator.scheduler import Scheduler
from orchestrator.scheduler_settings import SchedulerSettings
from tests.conftest import MakeDatabase
from tests.orchestrator.tiny_grid import LONG_STEP_TOKENS, submit_tiny, tiny_document
from tests.workers.tiny_training import SHAPE, tiny_answers
from workers.corpus import find_corpus
from workers.folder_model import add_model
from workers.mixture import open_training_data
from workers.model import built_rope_base
from workers.spec import LongStage

SETTINGS = SchedulerSettings(recovery_steps=50, backoff_s=0.1, poll_s=0.05, tend_s=0.2, stop_grace_s=2.0)
DEADLINE_S = 240.0
#: Not probes, which are evaluations without losses.
MEASURED = Evaluation.all_count > 0
#: Up to step 4 two sequences of 32, then one of 64 with a higher base.
STAGES = [
    {"until": 4 * LONG_STEP_TOKENS, "seq_len": 32, "rope_base": 50_000},
    {"rope": {"method": "yarn", "original_length": 32, "base": 50_000}},
]
LONGER = {"tokens": 2 * 128, "seq_len": 128, "batch_sequences": 1, "rope_base": 1e6, "final_rate_ratio": 0.01}


def model_folder(folder: Path) -> Path:
    """A tiny Llama as somebody else would have published it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SHAPE.vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def document(corpus: str, answers: str, model: dict[str, Any]) -> dict[str, Any]:
    made = tiny_document(corpus, name="long stages", widths=(16,), short_steps=(27,), long_steps=(4, 8))
    del made["recipe"]["long"]["rope_base"]
    made["recipe"]["long"] |= {"stages": STAGES, "start_rate": 0.002}
    made["scales"]["released"] = {"model": model, "short_tokens_seen": "unknown"}
    merged = {"name": "last_m", "m": 2, "spacing": 2 * LONG_STEP_TOKENS}
    made["follow_ups"] = [
        LONGER | {"name": "from raw", "from": {"name": "raw"}},
        LONGER | {"name": "from merged", "from": merged, "scales": ["released"], "corpus": answers},
    ]
    made["evaluation"]["diagnose_zero"] = True
    made["evaluation"]["probes"] = {
        "run": [{"kind": "position_loss"}, {"kind": "needle_loss", "lengths": [256], "depths": [0.5], "samples": 2}]
    }
    return made


@pytest.fixture(scope="module")
def done(
    migrated_database: MakeDatabase, ray_workers: RayExecutor, corpus: str, store: Path, tmp_path_factory: Any
) -> Iterator[Engine]:
    """The grid above, run to its end."""
    shape = add_model(model_folder(tmp_path_factory.mktemp("released")), store)
    with migrated_database() as url:
        engine = create_engine(url, application_name="longlaw-test")
        submit_tiny(engine, document(corpus, tiny_answers(store, corpus), dataclasses.asdict(shape)))
        scheduler = Scheduler(engine, ray_workers, store=store, settings=SETTINGS)
        deadline_s = time.monotonic() + DEADLINE_S
        while _open(engine):
            scheduler.turn()
            assert time.monotonic() < deadline_s, "the grid did not end"
        scheduler.close()
        yield engine
        engine.dispose()


def _open(engine: Engine) -> int:
    with Session(engine) as session:
        return sum(
            session.scalars(select(func.count()).where(table.state.in_(("PENDING", "READY", "RUNNING")))).one()
            for table in (Segment, Evaluation)
        )


def test_everything_is_trained_and_measured(done: Engine) -> None:
    """w16: trunk, decay, two phases, one follow-up; released: two phases, two follow-ups."""
    with Session(done) as session:
        assert sorted(session.scalars(select(Segment.kind))) == sorted(
            ["short_trunk", "short_decay", *["long_constant"] * 4, *["follow_up"] * 3]
        )
        assert set(session.scalars(select(Segment.state))) == {"SUCCEEDED"}
        assert set(session.scalars(select(Evaluation.state))) == {"SUCCEEDED"}
        values = session.scalars(select(Evaluation.log_longppl).where(MEASURED)).all()
        assert all(value is not None and math.isfinite(value) for value in values)


def test_tokens_of_phases_add_up_and_those_of_follow_ups_are_their_own(done: Engine) -> None:
    with Session(done) as session:
        rows = session.execute(
            select(Segment.kind, Segment.spec, Checkpoint.step, Checkpoint.stage_tokens)
            .join(Checkpoint, Checkpoint.segment_key == Segment.key)
            .where(Segment.scale == "released", Checkpoint.scheduled)
        ).all()
    found = sorted((kind, spec.get("stage_offset_steps", 0), step, tokens) for kind, spec, step, tokens in rows)
    assert found == [
        ("follow_up", 0, 2, 256),
        ("follow_up", 0, 2, 256),
        ("long_constant", 0, 4, 256),
        ("long_constant", 4, 2, 384),
        ("long_constant", 4, 4, 512),
    ]


def test_checkpoints_of_every_stage_load_without_our_code_and_rotate_as_asked(done: Engine, store: Path) -> None:
    with Session(done) as session:
        rows = session.execute(
            select(Segment.spec, Checkpoint.path)
            .join(Checkpoint, Checkpoint.segment_key == Segment.key)
            .where(Segment.scale == "released", Checkpoint.scheduled)
        ).all()
    assert len(rows) == 5
    for spec, path in rows:
        stage = segment_from_json(spec).stage
        assert isinstance(stage, LongStage)
        model = AutoModelForCausalLM.from_pretrained(store / path)
        if stage.yarn is None:
            assert built_rope_base(model) == pytest.approx(stage.rope_base, rel=1e-5)
        else:
            assert model.config.rope_parameters["rope_type"] == "yarn"
            assert model.model.rotary_emb.attention_scaling == pytest.approx(0.1 * math.log(2) + 1)
        assert model.config.max_position_embeddings >= stage.seq_len


def test_follow_ups_are_marked_and_never_fitted(done: Engine) -> None:
    with Session(done) as session:
        marked = session.execute(
            select(Evaluation.scale, Evaluation.follow_up, Evaluation.long_tokens).where(
                Evaluation.follow_up.is_not(None), MEASURED
            )
        ).all()
        fitted = session.execute(
            select(Observation.scale, Observation.short_tokens, Observation.long_tokens).order_by(
                Observation.scale, Observation.long_tokens
            )
        ).all()
    assert sorted(map(tuple, marked)) == [
        ("released", "from merged", 512),
        ("released", "from raw", 512),
        ("w16", "from raw", 512),
    ]
    assert [tuple(row) for row in fitted] == [
        ("released", None, 256),
        ("released", None, 512),
        ("w16", 27 * 64, 256),
        ("w16", 27 * 64, 512),
    ]


def test_a_follow_up_learns_the_answers_of_a_corpus_that_marks_them(done: Engine, store: Path) -> None:
    """Its tokens are inputs, of which fewer were counted; the grid's own documents measure it."""
    answers = find_corpus(store, "answers")
    with Session(done) as session:
        rows = session.execute(
            select(Segment.spec, Checkpoint.stage_tokens, Checkpoint.mean_loss)
            .join(Checkpoint, Checkpoint.segment_key == Segment.key)
            .where(Segment.kind == "follow_up", Checkpoint.scheduled)
        ).all()
    tuned = [row for row in rows if row.spec["stage"]["data"]["corpus"] == answers]
    assert [row.stage_tokens for row in tuned] == [256]
    segment = segment_from_json(tuned[0].spec)
    data = open_training_data(store, segment.stage.data, seq_len=128)
    assert 0 < data.counted_targets(seed=0, first=0, count=2) < 256
    assert 0 < tuned[0].mean_loss < 2 * math.log(SHAPE.vocab_size)


def test_raw_and_merged_starts_end_apart_and_the_folder_itself_is_measured(done: Engine) -> None:
    with Session(done) as session:
        ends = dict(
            session.execute(
                select(Evaluation.follow_up, Evaluation.log_ppl).where(
                    Evaluation.scale == "released", Evaluation.follow_up.is_not(None), MEASURED
                )
            ).all()
        )
        zero = session.scalars(
            select(Evaluation.log_ppl).where(Evaluation.scale == "released", Evaluation.long_tokens == 0)
        ).one()
        longest = session.scalars(
            select(Evaluation.log_ppl).where(
                Evaluation.scale == "released",
                Evaluation.long_tokens == 512,
                Evaluation.follow_up.is_(None),
                MEASURED,
            )
        ).one()
    assert ends["from raw"] != ends["from merged"]
    assert zero is not None
    assert longest is not None
    assert longest < zero


def test_probes_of_every_last_model_are_metrics_of_it(done: Engine) -> None:
    with Session(done) as session:
        rows = session.execute(
            select(Evaluation.scale, Evaluation.follow_up, Metric.name, Metric.value, Metric.count)
            .join(Metric, Metric.evaluation_id == Evaluation.id)
            .where(Evaluation.long_tokens == 512)
        ).all()
        cells = session.scalars(select(CellEvaluation.evaluation_key)).all()
        probes = session.scalars(select(Evaluation.key).where(~MEASURED)).all()
    found = {(scale, follow_up) for scale, follow_up, *_ in rows}
    assert found == {("w16", None), ("released", None), ("w16", "from raw"), ("released", "from raw")} | {
        ("released", "from merged")
    }
    assert {name for _, _, name, _, _ in rows} == {"position_loss", "needle_nll", "needle_rank"}
    assert all(math.isfinite(value) and count > 0 for *_, value, count in rows)
    assert set(cells).isdisjoint(probes)
