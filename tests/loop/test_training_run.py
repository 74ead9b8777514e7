"""The loop around the steps: what is evaluated, recorded, saved and resumed, against rules that are written out here."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import CheckpointError
from gspo.checkpoint.resume import ResumeRefused
from gspo.config import load
from gspo.distributed.rank_group import RankFailed
from gspo.exit_codes import EXIT_PAUSED
from gspo.loop import recovery
from gspo.loop.callbacks import Callback
from gspo.loop.guards.bad_numbers import BadNumbers
from gspo.registry import PluginError
from gspo.runs.folder import RunFolder, RunLocked, step_of
from gspo.sampling.errors import DataExhausted, StarvedSampling
from gspo.sampling.step_counts import SamplingCounts
from gspo.untrusted import Unreadable
from tests.loop.scripted_run import ACCURACY, RATE, ScriptedRun, kept_rows, settings

COUNTS = SamplingCounts(0, 1, 1)
QUIET = ("trainer.val_before_train=false", "trainer.val_after_train=false", "trainer.test_freq=-1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the run; nothing waits for its disk or for a collection of garbage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr("gc.collect", lambda: None)
    monkeypatch.setattr("gspo.loop.training_run.describe", lambda: {"machine": "test"})
    return tmp_path


def saved_steps(folder: str = "run") -> list[int]:
    return [step_of(path.name) for path in checkpoint.all_steps(Path(folder) / "checkpoints")]


def weight_after(step: int, start: int = 0, rate: float = RATE) -> float:
    return 1.0 + RATE * sum(range(1, start + 1)) + rate * sum(range(start + 1, step + 1))


def test_what_is_evaluated_saved_and_kept_follows_from_the_keys():
    choose = random.Random(3)
    for number in range(6):
        total = choose.choice((1, 5, 6))
        before, after = choose.random() < 0.5, choose.random() < 0.5
        test, save = choose.choice((-1, 0, 1, 2, 3)), choose.choice((-1, 0, 1, 2, 3))
        keep, best = choose.choice((None, 1, 2)), choose.choice((0, 0, 1, 2))
        figures = [choose.randrange(5) / 10 for _ in range(total + 1)]
        words = {
            "total_training_steps": total,
            "val_before_train": str(before).lower(),
            "val_after_train": str(after).lower(),
            "test_freq": test,
            "save_freq": save,
            "max_actor_ckpt_to_keep": "null" if keep is None else keep,
            "keep_best": best,
            "experiment_name": f"run{number}",
        }
        run = ScriptedRun(*(f"trainer.{key}={value}" for key, value in words.items()), accuracy=figures.__getitem__)
        assert run.fit() == {"steps": total, "weight": weight_after(total)}

        evaluated = [step for step in range(1, total) if test > 0 and step % test == 0]
        evaluated = [0] * before + evaluated + [total] * after
        assert run.evaluated == evaluated, words

        def best_of(steps, among, figures=figures, count=best):
            known = sorted((s for s in steps if s in among), key=lambda s: (-figures[s], s))
            return known[:count]

        saves, on_disk = [], []
        for step in range(1, total + 1):
            until_now = [s for s in evaluated if s <= step]
            due = (save > 0 and step % save == 0) or step == total or step in best_of(until_now, until_now)
            if due:
                saves.append(step)
                on_disk.append(step)
                last = on_disk if keep is None else on_disk[-keep:]
                on_disk = [s for s in on_disk if s in last or s in best_of(until_now, on_disk)]
        assert run.events.of("save") == saves, words
        assert saved_steps(f"run{number}") == on_disk, words
        rows = kept_rows(run.run)
        assert [row["step"] for row in rows] == [0] * before + list(range(1, total + 1))
        assert {row["step"]: row[ACCURACY] for row in rows if ACCURACY in row} == {s: figures[s] for s in evaluated}


def test_the_best_checkpoint_is_the_best_of_those_on_disk():
    """The weights before training were better, but they have no checkpoint."""
    words = ("trainer.test_freq=1", "trainer.keep_best=1", "trainer.max_actor_ckpt_to_keep=1")
    ScriptedRun(*words, accuracy=[0.9, 0.5, 0.3, 0.4, 0.2].__getitem__).fit()
    assert saved_steps() == [1, 4]


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_stopped_run_saves_stops_and_goes_on_as_if_it_had_not(stop_after):
    words = ("trainer.test_freq=2", "trainer.save_freq=-1")
    whole = ScriptedRun(*words, "trainer.experiment_name=whole")
    whole.fit()
    first = ScriptedRun(*words, stop_after=stop_after)
    assert first.fit() == {"steps": stop_after, "weight": weight_after(stop_after), "stopped": 143}
    assert saved_steps() == [stop_after] and not RunFolder("run").result_file.exists()
    assert first.events.log[-2:] == [("save", stop_after), ("end", stop_after)]
    assert f"stopped at step {stop_after} of 4" in first.heard.lines[-1]
    second = ScriptedRun(*words)
    assert second.log == [
        ("built", f"step-{stop_after:06d}"),
        ("reset", False),
        ("published", stop_after),
        ("rate", 1.0),
    ]
    assert second.step == stop_after and second.events.seen == stop_after
    assert {"a note of the models", "a note of the fingerprint"} <= set(second.heard.lines)
    assert second.fit() == {"steps": 4, "weight": weight_after(4)}
    assert 0 not in second.evaluated and second.events.of("step") == list(range(stop_after + 1, 5))
    assert kept_rows() == kept_rows(whole.run) and second.events.seen == 4
    states = [checkpoint.load(Path(name) / "checkpoints" / "step-000004") for name in ("run", "whole")]
    assert states[0].tensors == states[1].tensors and states[0].state["examples"] == {"drawn": 12}
    again = ScriptedRun(*words)
    assert again.fit() == second.result() and again.events.of("step") == again.events.of("save") == []


def test_the_first_step_of_every_process_is_said_to_compile():
    ScriptedRun(*QUIET, stop_after=2).fit()
    run, said = ScriptedRun(*QUIET), []
    run.heard.doing = said.append
    for step, stage in ((2, "gen"), (2, "adv"), (3, "gen"), (3, "testing"), (3, None)):
        run.step = step
        run._show_stage(stage)
    run.close()
    assert said == [
        "step 3/4: generating (the first time may compile)",
        "step 3/4: computing advantages",
        "step 4/4: generating",
        "step 3/4: evaluating",
        None,
    ]


def test_an_older_checkpoint_of_another_computation_is_refused(tmp_path):
    """The newest one cannot be restored; the one before it was saved under another seed."""
    older = SimpleNamespace(path=tmp_path / "step-000001", state={"config": settings("trainer.seed=9").to_dict()})
    newest = SimpleNamespace(path=tmp_path / "step-000002")
    built: list[object] = []

    def assemble(loaded: object) -> None:
        built.append(loaded)
        raise CheckpointError(f"{newest.path}: is damaged")

    trainer = SimpleNamespace(assemble=assemble, resolved=settings("trainer.seed=3"), drop_parts=lambda: None)
    resume = SimpleNamespace(checkpoint=newest, older=lambda loaded, error: older)
    with pytest.raises(ResumeRefused, match=r"step-000001 .*\n.*trainer\.seed: 9 in the checkpoint, 3 now"):
        recovery.assemble_newest(trainer, resume)  # pyright: ignore[reportArgumentType]
    assert built == [newest]


def test_a_stop_in_the_last_step_is_the_end():
    run = ScriptedRun("trainer.test_freq=-1", "trainer.save_freq=-1", stop_after=4)
    assert run.fit() == {"steps": 4, "weight": weight_after(4)}
    assert json.loads(run.run.result_file.read_text()) == run.result() and run.evaluated == [0, 4]


def test_seconds_add_up_over_interruptions(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("gspo.loop.training_run.time.monotonic", lambda: now[0])

    def slow(step: int) -> dict[str, float]:
        now[0] += 10.0
        return {}

    def seconds(step: int) -> float:
        return checkpoint.load(Path(f"run/checkpoints/step-{step:06d}")).state["counters"]["seconds"]

    ScriptedRun(*QUIET, script=slow, stop_after=2).fit()
    assert seconds(2) == 20.0
    now[0] += 500.0  # nobody runs it
    run = ScriptedRun(*QUIET, script=slow)
    now[0] += 7.0  # between its start and its first step
    run.fit()
    assert seconds(4) == 40.0


def skip_at(*steps: int):
    return lambda step: {"actor/skipped_updates": float(step in steps)}


def test_bad_steps_in_a_row_are_counted_across_an_interruption():
    words = (*QUIET, "trainer.max_skipped_steps=3", "trainer.total_training_steps=9")
    ScriptedRun(*words, script=skip_at(1, 3, 4), stop_after=4).fit()
    run = ScriptedRun(*words, script=skip_at(5))
    with pytest.raises(BadNumbers, match="in 3 steps in a row"):
        run.fit()
    assert run.step == 5 and saved_steps()[-1] == 5
    state = checkpoint.load(Path("run/checkpoints/step-000005")).state
    assert state["counters"]["bad_steps_in_row"] == 3
    assert any("step 5: non-finite" in line for line in run.heard.lines)


def test_a_step_whose_evaluation_fails_is_recorded_counted_and_saved():
    def broken(step: int) -> float:
        if step == 2:
            raise ValueError("no answers")
        return 0.5

    words = ("trainer.test_freq=2", "trainer.save_freq=-1", "trainer.val_before_train=false")
    run = ScriptedRun(*words, accuracy=broken, script=skip_at(2))
    with pytest.raises(ValueError, match="no answers"):
        run.fit()
    assert saved_steps() == [2] and [row["step"] for row in kept_rows()] == [1, 2]
    state = checkpoint.load(Path("run/checkpoints/step-000002")).state
    assert state["counters"]["bad_steps_in_row"] == 1 and run.events.of("step") == [1]


def test_training_data_that_ends_ends_the_run_and_other_errors_of_sampling_save_it():
    def ends(step: int) -> dict[str, float]:
        if step == 3:
            raise DataExhausted("all epochs are done", COUNTS, 0)
        return {}

    words = ("trainer.save_freq=-1", "trainer.test_freq=-1")
    run = ScriptedRun(*words, script=ends)
    assert run.fit() == {"steps": 2, "weight": weight_after(2)}
    assert "all epochs are done" in run.heard.lines
    assert saved_steps() == [2] and run.evaluated == [0, 2] and run.run.result_file.exists()
    assert ACCURACY in kept_rows()[-1]

    def starved(step: int) -> dict[str, float]:
        if step == 3:
            raise StarvedSampling("nothing is kept", COUNTS, "all right")
        return {}

    run = ScriptedRun(*words, "trainer.experiment_name=starved", script=starved)
    with pytest.raises(StarvedSampling, match="nothing is kept"):
        run.fit()
    assert saved_steps("starved") == [2] and run.evaluated == [0] and not run.run.result_file.exists()


def test_an_error_within_a_step_saves_nothing():
    def broken(step: int) -> dict[str, float]:
        return {} if step < 3 else {}["x"]

    run = ScriptedRun(*QUIET, "trainer.save_freq=-1", script=broken)
    with pytest.raises(KeyError):
        run.fit()
    assert saved_steps() == [] and run.log[-1] == "closed" and not run.run.locked()


def test_a_run_without_a_checkpoint_starts_its_records_anew():
    def broken(step: int) -> dict[str, float]:
        return {} if step < 3 else {}["x"]

    words = ("trainer.save_freq=-1", "trainer.test_freq=-1")
    with pytest.raises(KeyError):
        ScriptedRun(*words, script=broken).fit()
    assert [row["step"] for row in kept_rows()] == [0, 1, 2]
    run = ScriptedRun(*words)
    assert "run has no checkpoint yet: starting from step 0" in run.heard.lines
    run.fit()
    assert [row["step"] for row in kept_rows()] == [0, 1, 2, 3, 4] and run.evaluated == [0, 4]


def test_a_run_that_no_longer_improves_ends_early_also_after_an_interruption():
    figures = [0.1, 0.2, 0.3, 0.3, 0.3, 0.9, 0.9]
    words = ("trainer.test_freq=1", "trainer.total_training_steps=6", "trainer.early_stop.patience=2")
    run = ScriptedRun(*words, accuracy=figures.__getitem__)
    assert run.fit()["steps"] == 4 and run.evaluated == [0, 1, 2, 3, 4]
    assert any("since step 2 (0.300): the run ends early" in line for line in run.heard.lines)
    again = ScriptedRun(*words, accuracy=figures.__getitem__)
    assert again.fit()["steps"] == 4 and again.evaluated == [] and again.events.of("step") == []
    last = ScriptedRun(*words[::2], "trainer.total_training_steps=2", "trainer.experiment_name=last")
    assert last.fit()["steps"] == 2 and last.evaluated == [0, 1, 2]
    assert not any("ends early" in line for line in last.heard.lines)
    longer = ScriptedRun(*words[:2], "trainer.early_stop.patience=4", accuracy=figures.__getitem__)
    assert longer.fit()["steps"] == 6
    never = ScriptedRun(*words, "trainer.experiment_name=never", accuracy=lambda step: 0.0)  # 0 is a figure too
    assert never.fit()["steps"] == 2


def test_an_alarm_warns_pauses_or_rolls_back():
    rules = {"made": lambda rows: "made to go off" if rows[-1]["step"] == 3 else None}
    warned = ScriptedRun(*QUIET, "trainer.experiment_name=warned", rules=rules)
    assert warned.fit()["weight"] == weight_after(4)
    paused = ScriptedRun(*QUIET, "trainer.experiment_name=paused", "trainer.on_alarm=pause", rules=rules)
    assert paused.fit() == {"steps": 3, "weight": weight_after(3), "stopped": EXIT_PAUSED}
    assert "an alarm paused the run at step 3 (trainer.on_alarm=pause)" in paused.heard.lines[-1]
    assert saved_steps("paused")[-1] == 3 and paused.events.of("step") == [1, 2]
    back = ScriptedRun(*QUIET, "trainer.on_alarm=rollback", rules=dict(rules))
    back.alarm_rules["made"] = lambda rows: "x" if rows[-1]["step"] == 3 and back.counters.rollbacks == 0 else None
    assert back.fit() == {"steps": 4, "weight": weight_after(4, start=2, rate=RATE / 2)}
    assert back.log[:2] == [("built", None), ("rate", 1.0)]
    assert back.log[2:7] == ["closed", ("built", "step-000002"), ("reset", False), ("published", 2), ("rate", 0.5)]
    assert [row["step"] for row in kept_rows()] == [1, 2, 3, 4] and back.events.seen == 4
    assert checkpoint.load(Path("run/checkpoints/step-000004")).state["counters"]["rollbacks"] == 1
    words = ("trainer.experiment_name=elsewhere", "trainer.resume_mode=run/checkpoints/step-000004")
    other = ScriptedRun(*QUIET, *words, rules={})  # a folder without the alarm: the checkpoint remembers the rollback
    assert other.log[-1] == ("rate", 0.5)
    other.close()


def test_alarms_look_at_the_rows_before_training_and_before_an_interruption():
    seen: list[list[int]] = []
    rules = {"made": lambda rows: seen.append([int(row["step"]) for row in rows])}
    words = ("trainer.test_freq=-1", "trainer.total_training_steps=3")
    ScriptedRun(*words, rules=rules, stop_after=2).fit()
    assert seen[-2:] == [[0, 1], [0, 1, 2]]
    ScriptedRun(*words, rules=rules).fit()
    assert seen[-1] == [0, 1, 2, 3]


class Ranks:
    """A backend that only counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


def test_lost_ranks_are_replaced_from_the_last_checkpoint_up_to_three_times_in_a_row():
    lost = []

    def losing(step: int) -> dict[str, float]:
        if step == 3 and len(lost) < 3:
            lost.append(step)
            raise RankFailed(f"rank 1 is gone ({len(lost)})")
        return {}

    backend = Ranks()
    run = ScriptedRun(*QUIET, "trainer.save_freq=2", script=losing, backend=backend)
    assert run.fit() == {"steps": 4, "weight": weight_after(4)} and run.num_rank_failures == 0
    assert [entry for entry in run.log if entry[0] == "built"] == [("built", None), *[("built", "step-000002")] * 3]
    assert backend.num_closed == 1 and run.events.of("step") == [1, 2, 3, 4]

    def gone(step: int) -> dict[str, float]:
        if step == 2:
            raise RankFailed("rank 1 is gone")
        return {}

    run = ScriptedRun(*QUIET, "trainer.experiment_name=gone", script=gone, backend=Ranks())
    with pytest.raises(RankFailed):
        run.fit()
    assert run.num_rank_failures == recovery.RANK_RESTARTS + 1 == 4 and saved_steps("gone") == [1]
    for name, words, backend in (("none", ("trainer.save_freq=-1",), Ranks()), ("here", (), None)):
        run = ScriptedRun(*QUIET, f"trainer.experiment_name={name}", *words, script=gone, backend=backend)
        with pytest.raises(RankFailed):
            run.fit()
        assert run.num_rank_failures == 1, "there is no checkpoint, or no backend to start ranks"


def test_callbacks_see_the_run_in_order_and_the_last_word_is_the_result():
    run = ScriptedRun("trainer.total_training_steps=2", "trainer.save_freq=2", "trainer.test_freq=1")
    run.fit()
    assert run.events.log == [("begin", 0), ("step", 1), ("step", 2), ("save", 2), ("end", 2)]
    assert checkpoint.load(Path("run/checkpoints/step-000002")).state["callbacks"] == {"Events": {"seen": 2}}


def test_a_callback_that_raises_after_a_step_leaves_it_saved():
    class Raises(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 2:
                raise ValueError("no")

    run = ScriptedRun(*QUIET, "trainer.save_freq=-1", callbacks=[Raises()])
    with pytest.raises(PluginError, match=r"callback .*Raises: on_step_end raised ValueError"):
        run.fit()
    assert saved_steps() == [2] and run.log[-1] == "closed"


def test_a_checkpoint_that_cannot_be_restored_gives_way_to_an_older_one(monkeypatch):
    ScriptedRun(*QUIET, stop_after=3).fit()
    load_state = "tests.loop.scripted_run.Parts.load_state_dict"

    def only_two(self, state):
        if state["examples"]["drawn"] != 6:
            raise KeyError("drawn")
        self.drawn = 6

    monkeypatch.setattr(load_state, only_two)
    run = ScriptedRun(*QUIET)
    assert run.step == 2 and [row["step"] for row in kept_rows()] == [1, 2]
    assert [entry for entry in run.log if entry != "closed"][-1] == ("rate", 1.0)
    said = "\n".join(run.heard.lines)
    assert "step-000003: training/state.json cannot be restored (KeyError: 'drawn'); it is not used" in said
    assert "going on from run/checkpoints/step-000002" in said
    run.close()

    def other(self, state):
        raise RuntimeError("a defect")

    monkeypatch.setattr(load_state, other)
    with pytest.raises(RuntimeError, match="a defect"):
        ScriptedRun(*QUIET)

    def foreign(self, loaded, *, reset=False):
        raise Unreadable("/elsewhere/words.json", "is not JSON")

    with monkeypatch.context() as patch:
        patch.setattr("tests.loop.scripted_run.Roles.load", foreign)
        with pytest.raises(Unreadable, match="elsewhere"):  # an older checkpoint would not help
            ScriptedRun(*QUIET)
    monkeypatch.setattr(load_state, lambda self, state: {}["x"])
    with pytest.raises(checkpoint.CheckpointError, match="step-000002"):
        ScriptedRun(*QUIET)
    assert not RunFolder("run").locked()


def test_the_folder_says_how_the_run_was_made_and_reset_reaches_the_models():
    ScriptedRun(*QUIET, "trainer.resume_missing=reset", stop_after=1).fit()
    run = ScriptedRun(*QUIET, "trainer.resume_missing=reset")
    assert ("reset", True) in run.log
    with pytest.raises(RunLocked):
        ScriptedRun(*QUIET)
    run.close()
    assert run.run.config_file.read_text() == run.resolved.to_yaml(with_origins=True)
    assert json.loads(run.run.settings_file.read_text()) == json.loads(json.dumps(run.resolved.records()))
    assert json.loads(run.run.environment_file.read_text()) == {"machine": "test"}
    assert load(run.run.config_file).config.trainer.total_training_steps == 4


def test_a_start_that_fails_closes_its_parts_and_leaves_no_folder(monkeypatch):
    monkeypatch.setattr("gspo.loop.training_run.open_sinks", lambda *_: {}["x"])
    backend = Ranks()
    with pytest.raises(KeyError):
        ScriptedRun(*QUIET, backend=backend)
    assert backend.num_closed == 1 and not Path("run").exists()
