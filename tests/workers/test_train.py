"""Training segments: what is resumed, shared, extended or stopped gives the numbers of one unbroken run."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from tests.workers.child_processes import fork_server, train_run
from tests.workers.tiny_training import SHAPE, long_stage, segment_of, short_stage, somewhere, tiny_corpus
from workers import checkpoint, health
from workers.corpus import open_corpus
from workers.errors import (
    CheckpointCorruptError,
    CheckpointMissingError,
    CorpusError,
    DivergedError,
    SegmentRunError,
)
from workers.mixture import open_training_data
from workers.model import build_model, load_weights
from workers.results import Checkpoint, TrainProgress
from workers.spec import (
    CheckpointRef,
    Execution,
    ModelShape,
    Muon,
    ObservationRule,
    OptimizerState,
    Segment,
    SegmentRun,
    StoredCheckpoint,
    steps_for,
)
from workers.train import train
from workers.weight_files import CONFIG, WEIGHTS


@pytest.fixture(scope="module")
def corpus_store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    store = tmp_path_factory.mktemp("store")
    return store, tiny_corpus(store)


@pytest.fixture
def store(corpus_store: tuple[Path, str], tmp_path: Path) -> Path:
    """A store of its own for each test, with the corpus of all."""
    (tmp_path / "corpora").symlink_to(corpus_store[0] / "corpora")
    return tmp_path


@pytest.fixture
def corpus(corpus_store: tuple[Path, str]) -> str:
    return corpus_store[1]


def run_to(
    store: Path,
    segment: Segment,
    *save_steps: int,
    start: Checkpoint | None = None,
    recovery_every_steps: int | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_progress: Callable[[TrainProgress], None] | None = None,
    start_sources: tuple[Checkpoint, ...] = (),
    execution: Execution | None = None,
) -> list[Checkpoint]:
    run = SegmentRun(
        segment=segment,
        start=None if start is None else stored(start),
        save_steps=save_steps,
        recovery_every_steps=recovery_every_steps,
        start_sources=tuple(stored(source) for source in start_sources),
        execution=execution or Execution(),
    )
    return list(train(run, store=store, should_stop=should_stop, on_progress=on_progress))


def stored(found: Checkpoint) -> StoredCheckpoint:
    return StoredCheckpoint(ref=found.ref, path=found.path, digest=found.digest)


def digests(checkpoints: list[Checkpoint]) -> dict[int, str]:
    return {found.ref.step: found.digest for found in checkpoints}


def elsewhere(store: Path, name: str) -> Path:
    other = store / name
    other.mkdir()
    (other / "corpora").symlink_to((store / "corpora").resolve())
    return other


def trunk_of(corpus: str) -> Segment:
    return segment_of("short_trunk", short_stage(corpus))


@pytest.mark.parametrize("cuts", [(20,), (1, 39)])
def test_resumed_segment_yields_identical_checkpoints(store: Path, corpus: str, cuts: tuple[int, ...]) -> None:
    """B07: 40 steps, resumed at 1, at 20 and at 39, equal the unbroken run to the last bit."""
    trunk = trunk_of(corpus)
    unbroken = run_to(elsewhere(store, "unbroken"), trunk, 1, 20, 39, 40)
    chained: list[Checkpoint] = []
    for end in (*cuts, 40):
        chained += run_to(store, trunk, end, start=chained[-1] if chained else None)
    assert digests(chained).items() <= digests(unbroken).items()
    assert 40 in digests(chained)


def test_run_that_was_killed_in_the_middle_resumes_to_identical_weights(store: Path, corpus: str) -> None:
    """B07, B25: SIGKILL in a process of its own; the last whole checkpoint leads to the unbroken run's end."""
    trunk = trunk_of(corpus)
    endless = SegmentRun(segment=trunk, start=None, save_steps=tuple(range(3, 1_000_000, 3)))
    child = fork_server().Process(target=train_run, args=(endless, store))
    child.start()
    while len(checkpoint.list_checkpoints(store, trunk.id)) < 3:
        assert child.is_alive()
        time.sleep(0.002)
    child.kill()
    child.join()
    start = checkpoint.find(store, checkpoint.list_checkpoints(store, trunk.id)[-1])
    last = start.ref.step
    unbroken = digests(run_to(elsewhere(store, "unbroken"), trunk, last, last + 4, last + 9))
    assert unbroken.pop(last) == start.digest
    resumed = train(SegmentRun(segment=trunk, start=start, save_steps=(last + 4, last + 9)), store=store)
    assert digests(list(resumed)) == unbroken


def test_how_often_one_saves_changes_nothing(store: Path, corpus: str) -> None:
    """B40: the trajectory is that of the raw weights, whatever is saved, and read by others, on the way."""
    trunk = trunk_of(corpus)
    (rarely,) = run_to(elsewhere(store, "rarely"), trunk, 30)
    often = run_to(store, trunk, 30, recovery_every_steps=3)
    assert often[-1].digest == rarely.digest
    assert [(found.ref.step, found.scheduled) for found in often] == [(s, s == 30) for s in range(3, 31, 3)]


def test_process_random_state_is_neither_read_nor_changed(store: Path, corpus: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    (first,) = run_to(elsewhere(store, "first"), trunk_of(corpus), 3)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    assert run_to(store, trunk_of(corpus), 3)[0].digest == first.digest


def test_decays_of_different_length_share_one_trunk(store: Path, corpus: str) -> None:
    trunk = trunk_of(corpus)
    at_16, at_32 = run_to(store, trunk, 16, 32)
    ends = []
    for begin, horizon in ((at_16, 2), (at_32, 4)):
        decay = segment_of("short_decay", short_stage(corpus), parent=begin.ref, horizon_steps=horizon)
        (end,) = run_to(store, decay, horizon, start=begin)
        assert end.stage_tokens == (begin.ref.step + horizon) * 64
        ends.append(end)
    assert ends[0].digest != ends[1].digest
    (alone,) = run_to(elsewhere(store, "alone"), trunk, 32)
    assert alone.digest == at_32.digest


def test_decay_goes_on_with_the_data_and_moments_of_its_trunk(store: Path, corpus: str) -> None:
    """A decay to the peak itself is the trunk's own continuation."""
    stage = dataclasses.replace(short_stage(corpus), final_rate_ratio=1.0)
    trunk = segment_of("short_trunk", stage)
    begin, same = run_to(store, trunk, 10, 14)
    decay = segment_of("short_decay", stage, parent=begin.ref, horizon_steps=4)
    (end,) = run_to(store, decay, 4, start=begin)
    assert tensors(store, end, WEIGHTS) == tensors(store, same, WEIGHTS)
    assert tensors(store, end, checkpoint.OPTIMIZER) == tensors(store, same, checkpoint.OPTIMIZER)


def tensors(store: Path, found: Checkpoint, file: str) -> bytes:
    return (store / found.path / file).read_bytes()


def long_run(store: Path, corpus: str, *, optimizer_state: OptimizerState = "fresh") -> tuple[Segment, Checkpoint]:
    (begin,) = run_to(store, trunk_of(corpus), 10)
    stage = long_stage(corpus, optimizer_state=optimizer_state)
    return segment_of("long_constant", stage, parent=begin.ref, seed=5), begin


def test_constant_run_extended_in_pieces_equals_one_run(store: Path, corpus: str) -> None:
    segment, begin = long_run(store, corpus)
    pieces = run_to(store, segment, 2, 4, start=begin)
    pieces += run_to(store, segment, 6, start=pieces[-1])
    pieces += run_to(store, segment, 8, 20, start=pieces[-1])
    other = elsewhere(store, "other")
    segment_again, begin_again = long_run(other, corpus)
    assert segment_again == segment
    assert digests(run_to(other, segment, 2, 4, 6, 8, 20, start=begin_again)) == digests(pieces)


@pytest.mark.parametrize(("optimizer_state", "updates"), [("fresh", 3), ("carry", 13)])
def test_long_stage_begins_with_the_moments_it_asks_for(
    store: Path, corpus: str, optimizer_state: OptimizerState, updates: int
) -> None:
    segment, begin = long_run(store, corpus, optimizer_state=optimizer_state)
    found = run_to(store, segment, 1, 3, start=begin)
    with safe_open(store / found[-1].path / checkpoint.OPTIMIZER, framework="pt") as file:
        assert file.get_tensor("step").item() == updates
    (resumed,) = run_to(elsewhere_with(store, found[0]), segment, 3, start=found[0])
    assert resumed.digest == found[-1].digest


def elsewhere_with(store: Path, found: Checkpoint) -> Path:
    """Another store that holds one checkpoint of `store`."""
    other = elsewhere(store, "resumed")
    (other / found.path).parent.mkdir(parents=True)
    (other / found.path).symlink_to(store / found.path)
    return other


def test_long_stage_rotates_with_its_own_base_and_sees_its_own_split(store: Path, corpus: str) -> None:
    segment, begin = long_run(store, corpus)
    (found,) = run_to(store, segment, 1, start=begin)
    config = json.loads((store / found.path / CONFIG).read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e5}
    assert found.stage_tokens == 64
    batch = open_training_data(store, segment.stage.data, seq_len=64).batch(seed=5, first=0, count=1)
    model = build_model(SHAPE, rope_base=1e5, max_positions=64, seed=0)
    load_weights(model, checkpoint.read_weights(store / begin.path))
    logits = model(input_ids=torch.from_numpy(batch.inputs)).logits
    expected = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
    assert found.mean_loss == pytest.approx(expected.item(), rel=1e-5)


def test_linear_decay_of_the_long_stage_ends_at_its_horizon(store: Path, corpus: str) -> None:
    (begin,) = run_to(store, trunk_of(corpus), 4)
    stage = long_stage(corpus, final_rate_ratio=0.1)
    segment = segment_of("long_linear_decay", stage, parent=begin.ref, horizon_steps=6)
    assert digests(run_to(store, segment, 3, 6, start=begin)).keys() == {3, 6}
    with pytest.raises(SegmentRunError, match="past the decay's end, step 6"):
        run_to(store, segment, 7, start=begin)


def test_training_learns_and_reports_the_mean_loss_since_the_last_checkpoint(
    store: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "PROGRESS_EVERY_S", 0.0)
    seen: list[TrainProgress] = []
    first, second = run_to(store, trunk_of(corpus), 20, 60, on_progress=seen.append)
    losses = [progress.loss for progress in seen]
    assert first.mean_loss == pytest.approx(math.fsum(losses[:20]) / 20)
    assert second.mean_loss == pytest.approx(math.fsum(losses[20:]) / 40)
    assert losses[0] == pytest.approx(math.log(SHAPE.vocab_size), rel=0.1)
    assert losses[-1] < 4
    assert all(progress.gradient_norm for progress in seen)


def test_checkpoints_carry_few_evenly_spaced_points_of_health(store: Path, corpus: str) -> None:
    first, second = run_to(store, trunk_of(corpus), 10, 138)
    assert [point.step for point in first.health] == list(range(1, 11))
    steps = [point.step for point in second.health]
    assert steps == list(range(12, 139, 2))
    for point in (*first.health, *second.health):
        assert point.loss > 0
        assert point.gradient_norm > 0
        assert point.tokens_per_s > 0
        assert point.mfu is None
    assert first.health[0].learning_rate == pytest.approx(0.0025)


def test_progress_reports_tokens_of_the_stage(store: Path, corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "PROGRESS_EVERY_S", 0.0)
    (begin,) = run_to(store, trunk_of(corpus), 10)
    decay = segment_of("short_decay", short_stage(corpus), parent=begin.ref, horizon_steps=2)
    seen: list[TrainProgress] = []
    (end,) = run_to(store, decay, 2, start=begin, on_progress=seen.append)
    assert [(progress.step, progress.stage_tokens) for progress in seen] == [(1, 11 * 64), (2, 12 * 64)]
    assert seen[-1].learning_rate == pytest.approx(0.0025)
    assert end.mean_loss == pytest.approx((seen[0].loss + seen[1].loss) / 2)
    assert all(progress.tokens_per_s > 0 for progress in seen)


def test_stop_request_acts_at_the_next_checkpoint(store: Path, corpus: str) -> None:
    asked: list[int] = []

    def should_stop() -> bool:
        asked.append(1)
        return len(asked) == 2

    found = run_to(store, trunk_of(corpus), 4, 20, recovery_every_steps=5, should_stop=should_stop)
    assert [(one.ref.step, one.scheduled) for one in found] == [(4, True), (5, False)]
    (end,) = run_to(store, trunk_of(corpus), 20, start=found[-1])
    assert end.digest == run_to(elsewhere(store, "unbroken"), trunk_of(corpus), 20)[0].digest


def test_loss_that_is_no_number_ends_training_with_its_step_and_no_checkpoint(store: Path, corpus: str) -> None:
    wild = dataclasses.replace(short_stage(corpus), peak_rate=1e30, warmup_steps=0)
    segment = segment_of("short_trunk", wild)
    with pytest.raises(DivergedError, match=r"at step \d+: lower the learning rate") as caught:
        run_to(store, segment, 1, 50)
    refs = checkpoint.list_checkpoints(store, segment.id)
    assert caught.value.step > 1
    assert caught.value.good_step == 1
    assert [ref.step for ref in refs] == [1]


def test_loss_that_rises_too_far_ends_training_and_names_the_last_good_checkpoint(
    store: Path, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "WINDOW_STEPS", 4)
    monkeypatch.setattr(health, "EXCESS_NATS", 0.3)
    wild = segment_of("short_trunk", dataclasses.replace(short_stage(corpus), peak_rate=2.0, warmup_steps=40))
    found: list[int] = []
    run = SegmentRun(segment=wild, start=None, save_steps=tuple(range(2, 400, 2)))
    with pytest.raises(DivergedError, match="mean loss is") as caught:
        found.extend(one.ref.step for one in train(run, store=store))
    assert caught.value.best_mean is not None
    assert caught.value.loss > caught.value.best_mean + 0.3
    assert caught.value.good_step in found
    assert found == list(range(2, caught.value.step, 2))


PLAIN = dataclasses.replace(SHAPE, layers=2, qk_conv_kernel=0)


def losses_of(found: list[Checkpoint]) -> list[float]:
    return [point.loss for one in found for point in one.health]


@pytest.mark.parametrize(
    ("shape", "execution"),
    [
        (SHAPE, Execution(micro_batch_tokens=32)),
        (SHAPE, Execution(micro_batch_tokens=96)),
        (PLAIN, Execution(recompute_activations=True)),
        (PLAIN, Execution(micro_batch_tokens=64, recompute_activations=True)),
    ],
)
def test_how_a_batch_is_cut_and_computed_does_not_change_what_is_learned(
    store: Path, corpus: str, shape: ModelShape, execution: Execution
) -> None:
    """B13, B17: micro-batches are no updates; tokens are those of the global batch."""
    stage = dataclasses.replace(short_stage(corpus), batch_sequences=4)
    trunk = segment_of("short_trunk", stage, shape=shape)
    whole = run_to(elsewhere(store, "whole"), trunk, 12)
    cut = run_to(store, trunk, 12, execution=execution)
    assert losses_of(cut) == pytest.approx(losses_of(whole), rel=1e-5)
    assert cut[0].stage_tokens == whole[0].stage_tokens == 12 * 128


def test_muon_resumes_to_identical_checkpoints(store: Path, corpus: str) -> None:
    stage = dataclasses.replace(short_stage(corpus), optimizer=Muon(rate_ratio=2.0))
    trunk = segment_of("short_trunk", stage)
    unbroken = run_to(elsewhere(store, "unbroken"), trunk, 6, 12)
    (half,) = run_to(store, trunk, 6)
    (end,) = run_to(store, trunk, 12, start=half)
    assert digests([half, end]) == digests(unbroken)
    assert losses_of([end])[-1] < losses_of([half])[0]


def test_moments_of_another_optimizer_are_not_carried_on(store: Path, corpus: str) -> None:
    (begin,) = run_to(store, trunk_of(corpus), 2)
    stage = dataclasses.replace(long_stage(corpus, optimizer_state="carry"), optimizer=Muon(rate_ratio=2.0))
    with pytest.raises(SegmentRunError, match="trained by another optimizer"):
        run_to(store, segment_of("long_constant", stage, parent=begin.ref), 1, start=begin)
    fresh = dataclasses.replace(stage, optimizer_state="fresh")
    (muon,) = run_to(store, segment_of("long_constant", fresh, parent=begin.ref), 1, start=begin)
    back = segment_of("follow_up", long_stage(corpus, optimizer_state="carry"), parent=muon.ref)
    with pytest.raises(SegmentRunError, match="trained by another optimizer"):
        run_to(store, back, 1, start=muon)


def test_training_in_bf16_follows_that_in_fp32_and_keeps_fp32_weights(store: Path, corpus: str) -> None:
    stage = dataclasses.replace(short_stage(corpus), precision="bf16")
    (low,) = run_to(store, segment_of("short_trunk", stage), 8)
    (full,) = run_to(store, trunk_of(corpus), 8)
    assert losses_of([low]) == pytest.approx(losses_of([full]), rel=0.01)
    assert losses_of([low]) != losses_of([full])
    assert {tensor.dtype for _, tensor in checkpoint.read_weights(store / low.path)} == {torch.float32}


def test_z_loss_shrinks_the_partition_and_is_not_part_of_the_loss_that_is_told(store: Path, corpus: str) -> None:
    heavy = segment_of("short_trunk", dataclasses.replace(short_stage(corpus), z_loss=1.0))
    (plain,), (held,) = (run_to(store, segment, 20) for segment in (trunk_of(corpus), heavy))
    assert held.health[0].loss == plain.health[0].loss
    assert log_partition(store, corpus, held) < 0.5 * log_partition(store, corpus, plain)


def log_partition(store: Path, corpus: str, found: Checkpoint) -> float:
    """Mean of log(Z)^2 over a few sequences of the training text."""
    model = build_model(SHAPE, rope_base=1e4, max_positions=32, seed=0)
    load_weights(model, checkpoint.read_weights(store / found.path))
    ids = torch.from_numpy(open_corpus(store, corpus).tokens("short")[:256].astype("int64")).view(8, 32)
    with torch.no_grad():
        return float(model(input_ids=ids).logits.logsumexp(-1).square().mean())


def test_later_sub_phase_goes_on_with_the_moments_of_the_one_before(store: Path, corpus: str) -> None:
    """A border that changes nothing is the same training: rate, moments and data run on."""
    (begin,) = run_to(store, trunk_of(corpus), 4)
    stage = dataclasses.replace(long_stage(corpus, final_rate_ratio=0.1), warmup_steps=6)
    whole = segment_of("long_linear_decay", stage, parent=begin.ref, horizon_steps=8)
    at_4, at_8 = run_to(store, whole, 4, 8, start=begin)
    later = dataclasses.replace(whole, parent=at_4.ref, stage_offset_steps=4)
    (end,) = run_to(store, later, 4, start=at_4)
    assert end.stage_tokens == at_8.stage_tokens == 8 * 64
    assert tensors(store, end, WEIGHTS) == tensors(store, at_8, WEIGHTS)
    with pytest.raises(SegmentRunError, match="past the decay's end, step 4"):
        run_to(store, later, 5, start=at_4)


def test_follow_up_starts_from_the_model_that_a_rule_yields(store: Path, corpus: str) -> None:
    found = run_to(store, trunk_of(corpus), 4, 6, 8)
    rule = ObservationRule(name="last_m", m=2, spacing_steps=2)
    stage = dataclasses.replace(long_stage(corpus), start_rate=0.0)
    follow_up = dataclasses.replace(
        segment_of("follow_up", stage, parent=found[-1].ref, horizon_steps=3), parent_rule=rule
    )
    (end,) = run_to(store, follow_up, 3, start_sources=(found[1], found[2]))
    halves = [dict(checkpoint.read_weights(store / one.path)) for one in found[1:]]
    for name, tensor in checkpoint.read_weights(store / end.path):
        torch.testing.assert_close(tensor, (halves[0][name] + halves[1][name]) / 2)
    with pytest.raises(SegmentRunError, match="start_sources must be its checkpoints, oldest first, 6, 8"):
        run_to(store, follow_up, 3, start_sources=(found[0], found[2]))


def test_training_works_in_threads_of_one_long_lived_process(store: Path, corpus: str) -> None:
    stores = [elsewhere(store, f"thread-{number}") for number in range(4)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: run_to(one, trunk_of(corpus), 5), stores))
    assert {end.digest for (end,) in found} == {run_to(store, trunk_of(corpus), 5)[0].digest}


def test_runs_that_contradict_themselves_are_refused(store: Path, corpus: str) -> None:
    trunk = trunk_of(corpus)
    (begin,) = run_to(store, trunk, 4)
    decay = segment_of("short_decay", short_stage(corpus), parent=begin.ref, horizon_steps=2)
    foreign = somewhere(CheckpointRef(segment="f" * 32, step=4))
    own_but_later = somewhere(CheckpointRef(segment=trunk.id, step=9))
    old = dataclasses.replace(trunk, numerics_version=0)
    mixed_up = dataclasses.replace(trunk, kind="long_constant")
    for segment, start, steps, recovery, message in (
        (trunk, None, (), None, "save_steps"),
        (trunk, None, (4, 4), None, "save_steps"),
        (trunk, None, (8, 4), None, "save_steps"),
        (trunk, None, (0, 4), None, "after the start"),
        (trunk, own_but_later, (9, 12), None, "after the start"),
        (trunk, foreign, (4,), None, "cannot start"),
        (trunk, None, (4,), 0, "recovery_every_steps"),
        (decay, None, (2,), None, "no start"),
        (decay, own_but_later, (2,), None, "cannot start"),
        (decay, stored(begin), (3,), None, "past the decay's end"),
        (old, None, (4,), None, "numerics version 0"),
        (mixed_up, None, (4,), None, "cannot have"),
    ):
        run = SegmentRun(segment=segment, start=start, save_steps=steps, recovery_every_steps=recovery)
        with pytest.raises(SegmentRunError, match=message):
            next(train(run, store=store))


def test_executions_that_cannot_be_are_refused(store: Path, corpus: str) -> None:
    for execution, message in (
        (Execution(processes=2), "for 2 processes, 1 have joined"),
        (Execution(micro_batch_tokens=31), "less than one sequence of 32"),
    ):
        with pytest.raises(SegmentRunError, match=message):
            run_to(store, trunk_of(corpus), 1, execution=execution)


def test_missing_or_damaged_start_is_named(store: Path, corpus: str) -> None:
    trunk = trunk_of(corpus)
    (begin,) = run_to(store, trunk, 4)
    gone = somewhere(CheckpointRef(segment=trunk.id, step=3))
    with pytest.raises(CheckpointMissingError):
        next(train(SegmentRun(segment=trunk, start=gone, save_steps=(5,)), store=store))
    (store / begin.path / WEIGHTS).write_bytes(b"")
    with pytest.raises(CheckpointCorruptError):
        run_to(store, trunk, 5, start=begin)


def test_corpus_with_more_tokens_than_the_model_is_refused(store: Path, corpus: str) -> None:
    small = dataclasses.replace(SHAPE, vocab_size=100)
    with pytest.raises(CorpusError, match="vocab_size is 100"):
        run_to(store, segment_of("short_trunk", short_stage(corpus), shape=small), 1)


def test_token_counts_are_exact_beyond_any_fixed_width() -> None:
    """B17, B19, B22: global batches, totals above 2^31, products above 2^63."""
    stage = dataclasses.replace(short_stage("corpus"), seq_len=4096, batch_sequences=2 * 4 * 8)
    trunk = segment_of("short_trunk", stage)
    assert trunk.stage_tokens(100) == 26_214_400
    assert trunk.stage_tokens(10**15) == 262_144 * 10**15
    assert steps_for(10_251_184_259, stage.tokens_per_step) == 39_105
    decay = segment_of("short_decay", stage, parent=CheckpointRef(segment=trunk.id, step=10_000), horizon_steps=1_250)
    assert decay.stage_tokens(1_250) == 11_250 * 262_144 == 2_949_120_000
