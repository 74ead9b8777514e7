"""Checkpoints that lie although their manifest fits: each is named, an older one is used, and nothing is lost silently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import CheckpointError, Stored, check_sets, compare_set
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.faults.hostile_checkpoints import LYING, OPTIMIZER, SEALED, STATE, UNSEALED, make_lie, seal
from tests.support.small_run import config, even_first_byte, final_state, make_model

# Found when the run is assembled; the others are found in the folder alone.
FOUND_LATER = {
    *("no_moments", "one_moment_missing", "second_moments_missing", "steps_missing", "moments_unexpected"),
    *("moments_renamed", "moments_other_shape", "moments_int8", "moments_nan", "moments_negative", "extra_set"),
    *("all_said_to_be_without", "sampler_empty", "sampler_prompts_text", "sampler_prompts_number"),
    *("weights_int8", "weights_nan", "weights_missing", "weights_other_shape", "hidden_size_huge", "layers_huge"),
    *("vocab_negative", "heads_text", "model_type_unknown", "model_shape_other"),
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A finished run of three steps with its two last checkpoints, and the model it began with."""
    folder = tmp_path_factory.mktemp("contents")
    model = make_model(folder / "model")
    resolved = config(folder, model, "trainer.total_training_steps=3")
    Trainer(resolved, reward_fn=even_first_byte, console=Console(enabled=False)).fit()
    return folder


def _copy(world: Path, tmp_path: Path) -> Path:
    run = tmp_path / "run"
    shutil.copytree(world / "run", run)
    return run


def _resume(world: Path, tmp_path: Path, *overrides: str) -> tuple[Trainer, list[str]]:
    said: list[str] = []

    class Ears(Console):
        def say(self, text: str) -> None:
            said.append(text)

        warn = say

    resolved = config(tmp_path, world / "model", "trainer.total_training_steps=3", *overrides)
    return Trainer(resolved, reward_fn=even_first_byte, console=Ears(enabled=False)), said


@pytest.mark.parametrize("name", sorted(LYING.keys() - FOUND_LATER))
def test_a_lie_is_found_in_the_folder_and_the_older_one_is_used(world: Path, tmp_path: Path, name: str) -> None:
    run = _copy(world, tmp_path)
    older, newest = checkpoint.all_steps(run / "checkpoints")
    make_lie(newest, name)
    path, damaged = checkpoint.latest(run / "checkpoints")
    assert path == older and [d.path for d in damaged] == [newest] and LYING[name][1] in damaged[0].reason


@pytest.mark.parametrize(
    "name",
    ["no_moments", "moments_int8", "moments_nan", "sampler_empty", "weights_int8", "hidden_size_huge", "extra_set"],
)
def test_a_lie_is_found_by_its_content_and_the_older_one_is_used(world: Path, tmp_path: Path, name: str) -> None:
    run = _copy(world, tmp_path)
    older, newest = checkpoint.all_steps(run / "checkpoints")
    make_lie(newest, name)
    trainer, said = _resume(world, tmp_path)
    try:
        assert trainer.step == 2 and any("DAMAGED" in s and LYING[name][1] in s for s in said), said
        assert f"going on from {older}" in said[-1]
        trainer.fit()
    finally:
        trainer.close()
    assert final_state(run)["weights"] == final_state(world / "run")["weights"]


@pytest.mark.parametrize("name", ["no_moments", "moments_unexpected", "weights_missing"])
def test_without_an_older_one_it_is_refused_by_name(world: Path, tmp_path: Path, name: str) -> None:
    run = _copy(world, tmp_path)
    older, newest = checkpoint.all_steps(run / "checkpoints")
    shutil.rmtree(older)
    make_lie(newest, name)
    with pytest.raises(CheckpointError, match=LYING[name][1]):
        _resume(world, tmp_path)


@pytest.mark.parametrize("name", ["no_moments", "second_moments_missing", "moments_unexpected"])
def test_reset_starts_missing_state_at_0_and_says_so(world: Path, tmp_path: Path, name: str) -> None:
    run = _copy(world, tmp_path)
    make_lie(checkpoint.all_steps(run / "checkpoints")[-1], name)
    trainer, said = _resume(world, tmp_path, "trainer.resume_missing=reset")
    try:
        moments = trainer.parts.policy.optimizer.state_tensors()
    finally:
        trainer.close()
    assert trainer.step == 3 and any("trainer.resume_missing=reset: training/optimizer" in s for s in said)
    assert bool(moments) == (name == "moments_unexpected")


def test_a_parameter_that_no_update_reached_may_lack_moments_where_the_checkpoint_says_so(
    world: Path, tmp_path: Path
) -> None:
    run = _copy(world, tmp_path)
    newest = checkpoint.all_steps(run / "checkpoints")[-1]
    tensors = load_file(newest / OPTIMIZER)
    name = sorted(tensors)[0].partition("/")[2]
    from safetensors.torch import save_file

    save_file({k: v for k, v in tensors.items() if k.partition("/")[2] != name}, newest / OPTIMIZER)
    state = json.loads((newest / STATE).read_text())
    (newest / STATE).write_text(json.dumps({**state, "without_state": {"optimizer": [name]}}))
    seal(newest)
    trainer, said = _resume(world, tmp_path)
    trainer.close()
    assert trainer.step == 3 and not any("DAMAGED" in s for s in said)


def test_a_checkpoint_from_before_the_record_still_resumes(world: Path, tmp_path: Path) -> None:
    run = _copy(world, tmp_path)
    newest = checkpoint.all_steps(run / "checkpoints")[-1]
    state = json.loads((newest / STATE).read_text())
    assert state.pop("without_state") == {}
    (newest / STATE).write_text(json.dumps(state))
    seal(newest)
    trainer, said = _resume(world, tmp_path)
    trainer.close()
    assert trainer.step == 3 and not any("DAMAGED" in s for s in said)


def test_differences_are_told_apart() -> None:
    expected = {"a": (2,), "b": (3,), "c": (4,), "d": (5,)}
    stored = {"b": Stored((9,), "F32"), "c": Stored((4,), "I8"), "d": Stored((5,), "BF16"), "e": Stored((1,), "F32")}
    found = compare_set(expected, stored)
    assert (found.missing, found.unexpected, set(found.other)) == (["a"], ["e"], {"b", "c"})
    assert found.unusable() == {"a", "b", "c"}
    extra = {name: Stored((1,), "F32") for name in ("master/w", "exp_avg/w", "step/w")}
    assert compare_set({}, extra).unexpected == list(extra)


@pytest.mark.parametrize(
    ("step", "bad", "named", "is_refused"),
    [
        (4, 0, None, False),  # the warm-up of the critic ends with this step: no update of the policy yet
        (5, 0, None, True),
        (5, 1, None, False),  # the update after it was skipped
        (5, 0, ["w", "v"], True),  # that no parameter has state is not believed after an update
        (4, 0, ["w", "v"], False),
        (5, 0, ["w"], True),
    ],
)
def test_that_nothing_has_state_is_believed_until_the_first_update(step, bad, named, is_refused) -> None:
    config = {"trainer": {"critic_warmup": 4}}
    state = {"step": step, "config": config, "counters": {"bad_steps_in_row": bad}}
    state |= {} if named is None else {"without_state": {"optimizer": named}}
    expected = {"optimizer": {f"{kind}/{name}": (2,) for kind in ("step", "exp_avg") for name in ("w", "v")}}
    try:
        check_sets(Path("run"), state, expected, {"optimizer": {}}, reset=False)
    except CheckpointError as error:
        assert is_refused and "training/optimizer: missing" in str(error)
    else:
        assert not is_refused


def of_all(*names: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, (2,))


def stored(*names: str) -> dict[str, Stored]:
    return {name: Stored((2,), "F32") for name in names}


AFTER_UPDATES = {"step": 9, "config": {}, "counters": {}, "without_state": {}}


def refusal(expected, given, *, reset: bool = False, state=AFTER_UPDATES) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_sets(Path("here"), state, expected, given, reset=reset)
    return str(caught.value)


def test_every_difference_of_every_set_is_named_in_one_message() -> None:
    expected = {"optimizer": of_all("step/a", "step/b", "x1", "x2", "x3"), "critic/model": of_all("w")}
    given = {
        "optimizer": stored("step/a", "y"),
        "critic/model": {"w": Stored((2, 1), "F32")},
        "more": stored("z"),
        "empty": {},
    }
    message = refusal(expected, given)
    assert message.splitlines()[:-1] == [
        "here does not hold the state of this run:",
        "  training/optimizer: missing: step/b, x1, x2 and 1 more",
        "  training/optimizer: unexpected: y",
        "  training/critic/model: w has shape [2, 1], expected [2]",
        "  training/more: unexpected: z",
        "  training/empty: a tensor set that this run does not have",
    ]
    assert check_sets(
        Path("here"), AFTER_UPDATES, expected, {n: stored(*e) for n, e in expected.items()}, reset=False
    ) == ({}, [])
    assert "unexpected: a, b, c\n" in refusal({}, {"set": stored("a", "b", "c")})


def test_reset_leaves_out_optimisers_and_unknown_sets_but_no_weights() -> None:
    expected = {"optimizer": of_all("a", "b"), "critic/optimizer": of_all("c"), "critic/model": of_all("w")}
    given = {"optimizer": {**stored("b"), "a": Stored((3,), "F32")}, "critic/model": stored("w"), "more": stored("z")}
    unusable, notes = check_sets(Path("here"), AFTER_UPDATES, expected, given, reset=True)
    assert unusable == {"optimizer": {"a"}, "critic/optimizer": {"c"}, "more": set()}
    assert [note.partition(" starts")[0].rpartition("/")[2] for note in notes] == ["optimizer", "optimizer", "more"]
    assert notes[1].endswith("training/critic/optimizer starts at 0 where it does not fit: missing: c")
    message = refusal(expected, {**given, "critic/model": {}}, reset=True)
    assert "training/critic/model: missing: w" in message and "training/optimizer" not in message


def test_parameters_without_state_are_those_that_the_checkpoint_names_for_their_set() -> None:
    expected = {
        name: of_all("step/a", "exp_avg/a", "step/b", "exp_avg/b") for name in ("optimizer", "critic/optimizer")
    }
    whole = stored("step/a", "exp_avg/a", "step/b", "exp_avg/b")
    half = stored("step/b", "exp_avg/b")
    named = {**AFTER_UPDATES, "without_state": {"critic/optimizer": ["a"]}}
    assert check_sets(Path("x"), named, expected, {"optimizer": whole, "critic/optimizer": half}, reset=False) == (
        {},
        [],
    )
    message = refusal(expected, {"optimizer": half, "critic/optimizer": half}, state=named)
    assert "training/optimizer: missing: step/a, exp_avg/a" in message and "critic" not in message
    text = {**AFTER_UPDATES, "without_state": {"critic/optimizer": "a"}}  # not a list
    assert "training/critic/optimizer" in refusal(expected, {"optimizer": whole, "critic/optimizer": half}, state=text)


def test_the_warmup_of_the_critic_excuses_the_policy_alone() -> None:
    state = {"step": 3, "config": {"trainer": {"critic_warmup": 3}}, "counters": {}}
    expected = {name: of_all("step/a", "exp_avg/a") for name in ("optimizer", "critic/optimizer")}
    message = refusal(expected, {}, state=state)
    assert "training/critic/optimizer" in message and "training/optimizer" not in message
    assert check_sets(Path("x"), {**state, "step": 0}, expected, {}, reset=False) == ({}, [])
    for broken in ({"step": 1, "config": 5, "counters": {}}, {"step": 1, "config": {"trainer": None}, "counters": {}}):
        assert "training/optimizer" in refusal(expected, {}, state=broken)


@pytest.mark.parametrize(
    ("dtype", "is_float"), [("F64", 1), ("F32", 1), ("F16", 1), ("BF16", 1), ("I64", 0), ("BOOL", 0)]
)
def test_tensors_of_a_run_are_floating_point(dtype: str, is_float: int) -> None:
    found = compare_set({"a": (2,)}, {"a": Stored((2,), dtype)})
    assert bool(found.other) != bool(is_float) and not found.missing and not found.unexpected


def test_the_corpus_is_large_and_its_manifests_fit(world: Path, tmp_path: Path) -> None:
    assert len(LYING) >= 40
    newest = checkpoint.all_steps(_copy(world, tmp_path) / "checkpoints")[-1]
    assert torch.is_tensor(next(iter(load_file(newest / OPTIMIZER).values())))
    for name in ("no_moments", "step_negative"):
        make_lie(newest, name)
        manifest = json.loads((newest / "MANIFEST.json").read_text())["files"]
        assert all((newest / n).stat().st_size == entry["size"] for n, entry in manifest.items())
    assert not SEALED.keys() & UNSEALED.keys()
