"""When a run evaluates, saves, publishes weights and stops: by its keys, at the steps that they name."""

from __future__ import annotations

import signal

import pytest

from gspo.distributed.rank_group import RankFailed
from gspo.loop import ending, recovery
from gspo.loop.callbacks import Callback
from gspo.loop.counters import Counters
from gspo.loop.guards.bad_numbers import BadNumbers
from gspo.loop.guards.stop_request import StopRequest
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder, step_of
from gspo.runs.group_log import read_groups
from gspo.seeding import derive_seed
from gspo.types import LossOutput
from tests.loop.runs import rows, token_lags, train, trainer
from tests.support.small_run import config, even_first_byte, make_model

NO_EVALUATION = ("trainer.val_before_train=false", "trainer.val_after_train=false", "trainer.test_freq=-1")
FRESH = "algorithm.filter_groups.max_staleness=0"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def steps_in(folder) -> set[int]:
    return {step_of(path.name) for path in folder.glob("step-*")}


@pytest.mark.parametrize(
    ("before", "every", "after", "evaluated"),
    [
        ("true", 2, "true", {0, 2, 3}),
        ("true", -1, "true", {0, 3}),
        ("false", 2, "false", {2}),
        ("false", 3, "false", set()),  # the last step belongs to val_after_train
        ("false", 1, "true", {1, 2, 3}),
    ],
)
def test_evaluations(tmp_path, model, before, every, after, evaluated):
    keys = (f"trainer.val_before_train={before}", f"trainer.test_freq={every}", f"trainer.val_after_train={after}")
    train(tmp_path, model, "trainer.total_training_steps=3", "trainer.save_freq=-1", *keys)
    assert steps_in(tmp_path / "run" / "evals") == evaluated
    with_accuracy = {
        row["step"] for row in RunFolder(tmp_path / "run").rows() if "val-core/arithmetic/acc/mean@1" in row
    }
    assert with_accuracy == evaluated


@pytest.mark.parametrize(("freq", "saved"), [("2", {2, 3}), ("-1", {3}), ("1", {1, 2, 3})])
def test_checkpoints_and_groups(tmp_path, model, freq, saved):
    keys = ("trainer.total_training_steps=3", f"trainer.save_freq={freq}", "trainer.max_actor_ckpt_to_keep=null")
    train(tmp_path, model, *keys, *NO_EVALUATION, f"trainer.save_groups={str(freq == '2').lower()}")
    run = tmp_path / "run"
    assert steps_in(run / "checkpoints") == saved
    assert steps_in(run / "groups") == ({1, 2, 3} if freq == "2" else set())
    if freq == "2":
        groups = [g for step in (1, 2, 3) for g in read_groups(run / "groups" / f"step-{step:06d}.jsonl.gz")]
        fates = [g["fate"] for g in groups]
        assert fates.count("kept") == 12 and len(fates) > 12  # dropped groups are recorded as well
        dropped = sum(row["train/groups_generated"] - row["train/groups_kept"] for row in rows(tmp_path))
        assert len(fates) - 12 == dropped


def test_every_step_generates_with_the_weights_of_the_step_before(tmp_path, model):
    train(tmp_path, model, "trainer.total_training_steps=3", FRESH, *NO_EVALUATION)
    assert set(token_lags(tmp_path / "run")) == {0}
    for row in rows(tmp_path):
        assert abs(row["actor/rollout_kl"]) < 1e-4
        assert row["train/staleness/max"] == 0


def test_bad_steps_in_a_row_stop_the_run_at_their_limit_and_a_good_one_forgets_them(tmp_path, model):
    t = trainer(tmp_path, model, "trainer.max_skipped_steps=2", "trainer.total_training_steps=9", *NO_EVALUATION)
    real = t.parts.objective.loss
    bad_steps = {1, 3, 4}

    def loss():
        if t.step + 1 not in bad_steps:
            return real()
        return lambda x: LossOutput(x.log_probs.sum() * float("nan"), {})

    t.parts.objective.loss = loss
    with pytest.raises(BadNumbers, match="in 2 steps in a row"):
        t.fit()
    assert [row["actor/skipped_updates"] for row in rows(tmp_path)] == [2, 0, 2, 2]
    assert 4 in steps_in(tmp_path / "run" / "checkpoints")  # saved before it ends


def test_failures_of_ranks_count_until_a_whole_step(tmp_path, model, monkeypatch):
    t = trainer(tmp_path, model, "trainer.total_training_steps=2", *NO_EVALUATION)
    step, calls, seen = t.train_step, [], []

    def failing():
        calls.append(None)
        if len(calls) in (1, 2, 4):
            raise RankFailed("rank 1 is gone")
        step()

    def replace(trainer, failure):
        trainer.num_rank_failures += 1
        seen.append(trainer.num_rank_failures)

    monkeypatch.setattr(recovery, "replace_ranks", replace)
    t.train_step = failing
    assert t.fit()["steps"] == 2
    assert seen == [1, 2, 1]


def test_the_first_signal_asks_and_the_second_stops_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert (stop.signal, stop.exit_code) == (None, 0)
        signal.raise_signal(signal.SIGTERM)
        assert (stop.signal, stop.exit_code) == (signal.SIGTERM, 143)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_ends_the_run_after_its_step(tmp_path, model):
    result = train(tmp_path, model, *NO_EVALUATION, stop_after=1)
    assert (result["steps"], result["stopped"]) == (1, 143)
    assert len(rows(tmp_path)) == 1 and steps_in(tmp_path / "run" / "checkpoints") == {1}


class Heard(Console):
    """A console that keeps what is said."""

    def __init__(self) -> None:
        super().__init__(enabled=False)
        self.lines: list[str] = []
        self.tables: list[list[list[str]]] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def side_by_side(self, title, head, rows) -> None:
        self.tables.append(rows)


def held_out(low: float, value: float, high: float) -> dict[str, float]:
    ends = {"val-aux/a/acc/ci_low": low, "val-aux/a/acc/ci_high": high}
    return {"val-core/a/acc/mean@1": value, **ends}


def test_the_result_is_read_from_the_first_and_the_last_evaluation(tmp_path):
    run = RunFolder(tmp_path / "run").open()
    for step, values in enumerate([held_out(0.1, 0.2, 0.3), {"x": 1.0}, held_out(0.4, 0.5, 0.6), {"x": 2.0}]):
        run.append_metrics(step, values)
    run.close()
    got = ending.result(run, 3, Counters(generated_tokens=77, seconds=1.26))
    assert got == {
        "start_acc": 0.2,
        "final_acc": 0.5,
        "steps": 3,
        "seconds": 1.3,
        "generated_tokens": 77,
        "run": str(run.path),
        "start_ci": [0.1, 0.3],
        "final_ci": [0.4, 0.6],
    }


def test_the_change_is_counted_by_question(tmp_path, monkeypatch):
    run = RunFolder(tmp_path / "run").open()
    run.close()
    for step in (0, 10):
        (run.evals / f"step-{step:06d}.jsonl.gz").touch()

    def record(uid: str, acc: float | None, size: int) -> dict:
        response = {"acc": acc, "text": f"{uid} {acc}", "num_tokens": size}
        return {"uid": uid, "ground_truth": 1, "messages": [{"content": f"{uid}?"}], "responses": [response]}

    before = [record("a", 0.0, 2), record("b", 1.0, 2), record("c", 1.0, 4), record("d", None, 4), record("e", 0.0, 9)]
    after = [record("a", 1.0, 6), record("b", 1.0, 6), record("c", 0.0, 4), record("d", 1.0, 4), record("f", 1.0, 9)]
    found = {"step-000000.jsonl.gz": before, "step-000010.jsonl.gz": after}
    monkeypatch.setattr(ending, "read_groups", lambda file: found[file.name])
    console = Heard()
    ending.show_change(console, run, {"start_acc": 0.4, "final_acc": 0.8, "steps": 10, "seconds": 5.0}, 1)
    assert "of 4 questions, 2 became right and 1 wrong; answers went from 3.0 to 5.0 tokens" in console.lines[0]
    assert console.tables == [[["a?", "1", "a 0.0", "a 1.0"]]]


def test_a_run_that_is_finished_early_ends_as_if_its_last_step_were_planned(tmp_path, model):
    class Early(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 2:
                trainer.finish_early("enough")

    t = Trainer(
        config(tmp_path, model, "trainer.save_freq=-1", "trainer.val_before_train=false", "trainer.test_freq=-1"),
        reward_fn=even_first_byte,
        callbacks=[Early()],
        console=Console(enabled=False),
    )
    assert t.fit()["steps"] == 2
    run = tmp_path / "run"
    assert steps_in(run / "checkpoints") == steps_in(run / "evals") == {2}
    assert run.joinpath("result.json").is_file() and len(rows(tmp_path)) == 2


def test_a_run_that_ended_before_its_first_checkpoint_starts_its_records_anew(tmp_path, model):
    def killed():
        raise KeyboardInterrupt

    t = trainer(tmp_path, model, "trainer.total_training_steps=1")
    t.parts.sampler.next_batch = killed
    with pytest.raises(KeyboardInterrupt):
        t.fit()
    run = RunFolder(tmp_path / "run")
    assert [row["step"] for row in run.rows()] == [0]
    train(tmp_path, model, "trainer.total_training_steps=1")
    assert [row["step"] for row in run.rows()] == [0, 1]
    assert steps_in(run.evals) == {0, 1}


def test_every_checkpoint_is_written_once(tmp_path, model):
    class Saves(Callback):
        steps: list[int] = []

        def on_save(self, trainer, step):
            self.steps.append(step)

    t = Trainer(
        config(tmp_path, model, "trainer.total_training_steps=2", *NO_EVALUATION),
        reward_fn=even_first_byte,
        callbacks=[saves := Saves()],
        console=Console(enabled=False),
    )
    t.fit()
    assert saves.steps == [1, 2] and t.saver.saved == 2


def test_every_step_draws_its_own_mini_batches(tmp_path, model):
    t = trainer(tmp_path, model, "actor_rollout_ref.actor.shuffle=true", "trainer.seed=4", *NO_EVALUATION)
    seeds, score = [], t.parts.roles.policy.score

    def scoring(batch):
        seeds.append(batch.order_seed)
        return score(batch)

    t.parts.roles.policy.score = scoring
    for _ in range(2):
        t.train_step()
    t.close()
    assert seeds == [derive_seed(4, "mini_batches", step) for step in range(2)]
