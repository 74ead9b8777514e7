"""From words to settings: flags, overrides, names of other systems, and values as they are typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.config.loading import foreign, names, tree
from gspo.config.loading.coerce import WrongType, coerce
from gspo.config.loading.flags import is_switch, read_flags, split_arguments, take_hydra_config
from gspo.config.loading.settings import Layer, Origin, Setting
from gspo.config.loading.sources import parse_value, read_overrides, read_yaml, without_deleted
from gspo.config.problems import ConfigErrors, Problem
from gspo.config.schema.fields import KeyInfo

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
ARGS = f"{R}.engine_kwargs"


def setting(name: str, value: Any, layer: Layer = Layer.FILE) -> Setting:
    return Setting(name, value, Origin(layer, layer.name))


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--group_size", "4"], [("group_size", 4, "4")]),
        (["--group-size=4"], [("group_size", 4, "4")]),
        (["--lr", "-1e-3"], [("lr", -1e-3, "-1e-3")]),
        (["--experiment_name", "a=b"], [("experiment_name", "a=b", "a=b")]),
        (["--use_wandb"], [("use_wandb", True, None)]),
        (["--use_kl_loss", "off"], [("use_kl_loss", False, "off")]),
        (["--no-use-kl-loss"], [("use_kl_loss", False, None)]),
        (["--no_use_kl_loss", "--seed", "3"], [("use_kl_loss", False, None), ("seed", 3, "3")]),
        (["--no-such-thing"], [("no_such_thing", True, None)]),
        (["--such.thing", "x"], [("such.thing", "x", "x")]),
        (["--seed="], [("seed", None, "")]),
    ],
)
def test_flags_become_settings(words: list[str], found: list[tuple[str, Any, str | None]]) -> None:
    problems: list[Problem] = []
    assert [(s.name, s.value, s.text) for s in read_flags(words, problems)] == found and problems == []
    assert all(s.origin.layer == Layer.FLAG and s.origin.text.startswith("flag --") for s in read_flags(words, []))


def test_flags_that_cannot_be_used_are_named() -> None:
    problems: list[Problem] = []
    assert read_flags(["--group_size", "--lr", "[1"], problems) == []
    assert [(p.key, p.value, p.message.split(":")[0]) for p in problems] == [
        ("--group_size", None, "needs a value"),
        ("--lr", "[1", "cannot be read as YAML"),
    ]
    assert problems[0].remedy == "write --group_size VALUE"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["a.yaml", "x=1", "--seed", "3"], (["a.yaml"], ["x=1"], ["--seed", "3"])),
        (["--use_wandb", "word"], (["word"], [], ["--use_wandb"])),
        (["--use_wandb", "1", "word"], (["word"], [], ["--use_wandb", "1"])),
        (["--use_wandb", "OFF"], ([], [], ["--use_wandb", "OFF"])),
        (["--seed=3", "4"], (["4"], [], ["--seed=3"])),
        (["--no-use_kl_loss", "true"], (["true"], [], ["--no-use_kl_loss"])),
        (["--seed", "--lr", "1"], ([], [], ["--seed", "--lr", "1"])),
        (["~data.seed", "+a=1", "++b=2", "+++c=3"], ([], ["~data.seed", "+a=1", "++b=2", "+++c=3"], [])),
        (["x=a=b", "=1", "1x=2"], (["=1", "1x=2"], ["x=a=b"], [])),
        (["x=1\n2"], ([], ["x=1\n2"], [])),
        (["--seed"], ([], [], ["--seed"])),
    ],
)
def test_words_are_sorted(words: list[str], parts: tuple[list[str], list[str], list[str]]) -> None:
    assert split_arguments(words) == parts


def test_which_flags_need_no_value() -> None:
    switches = ("--use_wandb", "--use-kl-loss", "--trainer.val_before_train", "--data.shuffle=1")
    others = ("--seed", "--lr", "--nothing", "--beta", "--report_to", "--experiment_name", "--shuffle")  # of two keys
    assert all(map(is_switch, switches)) and not any(map(is_switch, others))


def test_the_file_that_hydra_names(tmp_path: Path) -> None:
    file = tmp_path / "ppo_trainer.yaml"
    assert take_hydra_config([f"--config-dir={tmp_path}", "--config-name", "ppo_trainer", "--a", "b"]) == (
        None,
        ["--a", "b"],
    )
    file.write_text("{}")
    assert take_hydra_config([f"--config-dir={tmp_path}", "--config-name", "ppo_trainer"]) == (file, [])
    assert take_hydra_config(["--config-name=mine"]) == (Path("mine.yaml"), [])
    assert take_hydra_config([f"--config-path={tmp_path}", "--x"]) == (None, ["--x"])
    assert take_hydra_config(["--config-name"]) == (None, [])
    both = take_hydra_config([f"--config-dir={tmp_path}", "--config-path=other", "--config-name=m"])
    assert both == (Path("other/m.yaml"), [])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("1e-3", 1e-3), ("x", "x"), ("[1, a]", [1, "a"]), ("{a: 1}", {"a": 1}), ("null", None), ("true", True),
        ("", None), ("a b", "a b"), ("'3'", "3"), ("${data.seed}", "${data.seed}"), ("a=b", "a=b"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_yaml(text: str, value: Any) -> None:
    assert parse_value(text) == value and type(parse_value(text)) is type(value)


def test_overrides_become_settings_and_others_are_named() -> None:
    problems: list[Problem] = []
    found = read_overrides(["a.b=1", "+c=x", "++d=[1,2]", "~gone", "~gone=1", "word", "e=[1"], problems)
    assert [(s.name, s.value, s.text) for s in found] == [("a.b", 1, "1"), ("c", "x", "x"), ("d", [1, 2], "[1,2]")]
    assert found[0].origin == Origin(Layer.OVERRIDE, "override a.b=1")
    assert [(p.level, p.key, p.value) for p in problems] == [("error", "word", None), ("error", "e", "[1")]


def test_hydras_deletions_remove_keys_and_sections_of_that_name_alone() -> None:
    written = [setting(name, 1) for name in ("a.b", "a.c", "ab.c", "a", "d")]
    assert [s.name for s in without_deleted(written, ["~a", "x=1"])] == ["ab.c", "d"]
    assert [s.name for s in without_deleted(written, ["~a.b=3", "~d"])] == ["a.c", "ab.c", "a"]
    assert without_deleted(written, ["a.b=1"]) == written


def prepared(*settings: Setting) -> tuple[list[tuple[str, Any]], list[str]]:
    problems: list[Problem] = []
    found = foreign.prepare(list(settings), problems)
    assert all(problem.level == "warning" for problem in problems)
    return [(s.name, s.value) for s in found], [problem.key for problem in problems]


MODE, FROM = "trainer.resume_mode", "trainer.resume_from_path"
LORA = ("actor.lora_rank", "actor.lora_alpha", "actor.target_modules")


@pytest.mark.parametrize(
    ("written", "left", "said"),
    [
        ([(FROM, "p")], [(FROM, "p")], []),
        ([(MODE, "resume_path"), (FROM, "p")], [(MODE, "resume_path"), (FROM, "p")], []),
        ([(MODE, "auto"), (FROM, "p")], [(MODE, "auto")], [FROM]),
        ([(MODE, "auto"), (FROM, None)], [(MODE, "auto")], []),
        ([(MODE, "auto"), (FROM, False)], [(MODE, "auto")], []),
        ([(MODE, "auto"), (FROM, ""), (FROM, "q")], [(MODE, "auto")], [FROM]),
        ([(MODE, "auto"), (FROM, "p"), (MODE, "resume_path")], [(MODE, "auto"), (FROM, "p"), (MODE, "resume_path")], []),
        ([("actor.use_lora", True), (LORA[0], 4)], [("actor.use_lora", True), (LORA[0], 4)], []),
        ([(LORA[0], 4)], [(LORA[0], 4)], []),
        ([("actor.use_lora", False), *((name, 4) for name in LORA), ("x", 1)], [("actor.use_lora", False), ("x", 1)], [*LORA]),
        ([("actor.use_lora", False), (LORA[0], 4), ("actor.use_lora", True)], [("actor.use_lora", False), (LORA[0], 4), ("actor.use_lora", True)], []),
        ([("actor.reward_norm.mean_leave1out", True), ("x", 1)], [("x", 1), ("actor.reward_norm.mean_leave1out", True)], []),
        ([(f"{ARGS}.vllm.seed", 1), (f"{ARGS}.vllm", {"a": 1})], [(f"{ARGS}.seed", 1), (ARGS, {"a": 1})], []),
        ([(f"{ARGS}.sglang.seed", 1), (f"{ARGS}.trtllm", {}), (f"{ARGS}.seed", 2)], [(f"{ARGS}.seed", 2)], [f"{ARGS}.sglang.seed", f"{ARGS}.trtllm"]),
        ([(ARGS, {"vllm": {"a": 1}, "sglang": {"b": 2}, "c": 3})], [(ARGS, {"a": 1, "c": 3})], [f"{ARGS}.sglang"]),
        ([(ARGS, {"vllm": None, "c": 3})], [(ARGS, {"c": 3})], []),
        ([(ARGS, 3)], [(ARGS, 3)], []),
    ],
)  # fmt: skip
def test_settings_of_other_systems_that_act_together(written: Any, left: Any, said: list[str]) -> None:
    assert prepared(*(setting(name, value) for name, value in written)) == (left, said)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (f"{A}.optim.lr", f"{A}.optim.lr"),
        ("optim.lr", f"{A}.optim.lr"),
        ("lr", f"{A}.optim.lr"),
        ("critic.optim.lr", "critic.optim.lr"),
        (f"{ARGS}.block_size", f"{ARGS}.block_size"),
        ("engine_kwargs.a.b", f"{ARGS}.a.b"),
        ("trainer.seed.x", None),
        ("enable", None),
        ("nothing", None),
        ("actor", None),
        ("repetition_penalty", None),
    ],
)
def test_the_full_key_of_a_name(name: str, key: str | None) -> None:
    assert names.canonical(name) == key


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("steps", "trainer.total_training_steps"),
        ("batch-size", "data.train_batch_size"),
        ("data.trian_batch_size", "data.train_batch_size"),
        ("trainer.optim.lr", f"{A}.optim.lr"),
        ("data.temperatur", None),
        ("qqqq", None),
    ],
)
def test_the_nearest_name(name: str, near: str | None) -> None:
    found = names.nearest(name)
    assert found == near if near else found is None or found in (*tree.leaves(), *tree.sections(), *names.aliases())


def test_suggestions_in_words() -> None:
    assert names.suggestion("a.b") == "did you mean a.b?" and "gspo config show" in names.suggestion(None)
    assert names.nearest_choice("grop", ["grpo", "gae"]) == "did you mean grpo?"
    assert names.nearest_choice("zzzz", ["grpo", 3]) == "" and names.nearest_choice(3, [3, 4]) == "did you mean 3?"


def translated(*settings: Setting) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]], list[tuple[str, str]]]:
    problems: list[Problem] = []
    main, deferred = names.translate(settings, problems)
    return (
        [(s.name, s.value) for s in main],
        [(s.name, s.value) for s in deferred],
        [(p.level, p.key) for p in problems],
    )


FILE, FLAG, OVERRIDE = Layer.FILE, Layer.FLAG, Layer.OVERRIDE


def test_names_are_translated_and_layers_keep_their_order() -> None:
    assert translated(setting("lr", 1, OVERRIDE), setting("group_size", 4, FILE)) == (
        [(f"{R}.n", 4), (f"{A}.optim.lr", 1)],
        [],
        [],
    )
    assert translated(setting("data", {}), setting("data", None), setting("group_size", None)) == ([], [], [])
    assert translated(setting("data", 3))[2] == [("error", "data")]
    assert translated(setting("trainer.seed", None)) == ([], [], [])  # a null that the key cannot be
    assert translated(setting("data.seed", None)) == ([("data.seed", None)], [], [])


def test_the_text_of_a_value_stays_where_the_value_does() -> None:
    def typed(name: str, value: Any) -> str | None:
        (found, *_), _ = names.translate([Setting(name, value, Origin(FLAG, "flag"), "as typed")], [])
        return found.text

    assert typed("group_size", 4) == typed("trainer.seed", 4) == typed(f"{ARGS}.vllm.seed", 4) == "as typed"
    assert typed("beta", 4) is typed(f"{A}.strategy", "fsdp") is None


def test_what_an_alias_sets_beside_its_key_gives_way_within_a_layer() -> None:
    beside, own = setting("max_head_offpolicyness", 2), setting(f"{R}.mode", "sync")
    for order in ((beside, own), (own, beside)):
        main, _, problems = translated(*order)
        assert dict(main) == {f"{R}.max_head_offpolicyness": 2, f"{R}.mode": "sync"} and problems == []
    later = setting("max_head_offpolicyness", 2, OVERRIDE)
    for order in ((later, own), (own, later)):
        assert dict(translated(*order)[0])[f"{R}.mode"] == "async"


def test_two_names_of_one_key_must_agree_within_a_layer() -> None:
    assert translated(setting("group_size", 4), setting("n_resp_per_prompt", 5))[2] == [("error", "n_resp_per_prompt")]
    assert translated(setting("group_size", 4), setting("n_resp_per_prompt", 4))[2] == []
    assert translated(setting("group_size", 4), setting("n_resp_per_prompt", 5, FLAG))[2] == []
    assert translated(setting("group_size", 4), setting("group_size", 5))[2] == []


def test_a_later_count_replaces_an_earlier_one_of_the_same_value() -> None:
    once = translated(setting("update_frequency", 2), setting("update_frequency", 4, FLAG))
    assert once[1] == [("update_frequency", 4)]
    rates = translated(setting("adam_beta1", 0.1), setting("adam_beta2", 0.2), setting("adam_beta1", 0.3, FLAG))
    assert rates[1] == [("adam_beta2", 0.2), ("adam_beta1", 0.3)]


def test_keys_of_other_systems_are_refused_or_said_to_do_nothing() -> None:
    assert translated(setting("unknown.key", 1))[2] == [("error", "unknown.key")]
    assert translated(setting("enable", True))[2] == [("error", "enable")]
    assert translated(setting("beta", "x"))[2] == [("error", "beta")]
    main, _, problems = translated(
        setting(f"{A}.strategy", "megatron"), setting("trainer.logger", ["console", "mlflow"])
    )
    assert main == [(f"{A}.strategy", "fsdp2"), ("trainer.logger", ["console"])]
    assert problems == [("warning", f"{A}.strategy"), ("warning", "trainer.logger")]
    assert translated(setting("trainer.resume_mode", "resume_path"))[0] == []


@pytest.mark.parametrize(
    ("value", "kind", "wanted"),
    [
        ("a, b ,c", list[str], ["a", "b", "c"]),
        ("a", list[str], ["a"]),
        ("TRUE", bool, True),
        ("NO", bool, False),
        ("~", type(None), None),
        ("None", type(None), None),
        (" 3 ", int, 3),
        ("-0.5", float, -0.5),
        (False, str | None, None),
        ("x", int | None | str, "x"),
        ("7", int | None, 7),
        (3.0, int | float, 3.0),
        ([], list[str], []),
        ([["a"]], list[list[str]], [["a"]]),
    ],
)
def test_more_values_of_one_meaning(value: Any, kind: Any, wanted: Any) -> None:
    assert coerce(value, kind) == wanted and type(coerce(value, kind)) is type(wanted)


@pytest.mark.parametrize(
    ("value", "kind"),
    [("", list[str]), ("a", list[int]), (3, list[str]), ({1}, int), ("t", bool), ([], dict[str, Any])],
)
def test_more_values_that_are_refused(value: Any, kind: Any) -> None:
    with pytest.raises(WrongType):
        coerce(value, kind)


@pytest.mark.parametrize(
    ("info", "value", "expected"),
    [
        (KeyInfo("", ge=1), 1, None),
        (KeyInfo("", ge=1), 0, "expected a number of at least 1"),
        (KeyInfo("", gt=1), 1, "expected a number greater than 1"),
        (KeyInfo("", gt=1), 1.001, None),
        (KeyInfo("", le=1), 1, None),
        (KeyInfo("", le=1), 1.5, "expected a number of at most 1"),
        (KeyInfo("", lt=1), 1, "expected a number less than 1"),
        (KeyInfo("", gt=0, lt=1), 1, "expected a number less than 1"),
        (KeyInfo("", ge=3, gt=3), 2, "expected a number of at least 3 and greater than 3"),
        (KeyInfo("", ge=1), None, None),
        (KeyInfo("", ge=1), False, None),
        (KeyInfo("", ge=1), "x", None),
        (KeyInfo(""), float("nan"), "expected a finite number"),
        (KeyInfo("", choices=("a", "b")), "c", "expected one of a, b"),
        (KeyInfo("", choices=("a", "b")), ["a", "c"], "expected only a, b"),
        (KeyInfo("", choices=("a", "b")), ["a", "b"], None),
        (KeyInfo("", choices=(1, 2), ge=2), 1, "expected a number of at least 2"),
    ],
)
def test_the_bounds_of_a_key(info: KeyInfo, value: Any, expected: str | None) -> None:
    assert info.violation(value) == expected


def test_types_as_a_user_reads_them() -> None:
    kinds = {int | None: "int or null", list[str]: "list of str", dict[str, int]: "mapping", float: "float"}
    assert {kind: tree.type_name(kind) for kind in kinds} == kinds
    assert tree.type_name(list[dict[str, Any]]) == "list of mappings"
    assert tree.leaf_of(f"{ARGS}.a.b") is tree.leaves()[ARGS] and tree.leaf_of("trainer.seed.x") is None
    assert tree.leaf_of("trainer") is None and tree.leaf_of("nothing") is None


def test_a_problem_and_all_of_them_as_text() -> None:
    full = Problem("error", "a.b", "x", "run.yaml:3", "is wrong", "write y")
    assert str(full) == "error: a.b = 'x' (run.yaml:3): is wrong\n    remedy: write y"
    bare = Problem("warning", "a.b", None, "", "is odd")
    assert str(bare) == "warning: a.b: is odd" and str(Problem("error", "k", 0, "", "m")) == "error: k = 0: m"
    errors = ConfigErrors([bare, full])
    assert errors.errors == (full,) and errors.problems == (bare, full) and str(errors) == f"{bare}\n{full}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("data:\n  seed: 3\n  shuffle: false\n", [("data.seed", 3, 2), ("data.shuffle", False, 3)]),
        ("a: {b: {c: 1}}\n", [("a.b.c", 1, 1)]),
        ("actor_rollout_ref:\n  rollout:\n    engine_kwargs: {x: {y: 1}}\n", [(ARGS, {"x": {"y": 1}}, 3)]),
        ("model_init_kwargs: {dtype: bfloat16}\n", [("model_init_kwargs", {"dtype": "bfloat16"}, 1)]),
        ("", []),
        ("data: {}\n", []),
    ],
)
def test_the_settings_of_a_file_with_their_lines(tmp_path: Path, text: str, found: list[tuple[str, Any, int]]) -> None:
    file, problems = tmp_path / "run.yaml", []
    file.write_text(text)
    settings = read_yaml(file, Layer.FILE, problems)
    assert [(s.name, s.value, s.origin.text) for s in settings] == [(n, v, f"{file}:{line}") for n, v, line in found]
    assert problems == [] and {s.origin.text for s in read_yaml(file, Layer.RECIPE, [], "mine")} <= {"mine"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("just words", "found a single value"),
        ("- 1\n- 2\n", "found a list"),
        ("a: [1\n", "cannot be read as YAML|flow"),
        ("a:\n\tb: 1\n", "token"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str, problem: str) -> None:
    file, problems = tmp_path / "run.yaml", []
    file.write_text(text)
    assert read_yaml(file, Layer.FILE, problems) == []
    (found,) = problems
    assert found.key == str(file) and any(word in found.message for word in problem.split("|")) and found.remedy
    missing: list[Problem] = []
    read_yaml(tmp_path / "rum.yaml", Layer.FILE, missing)
    assert missing[0].message == "no such file" and missing[0].remedy == f"did you mean {file}?"
