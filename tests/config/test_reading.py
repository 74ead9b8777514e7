"""Every key is read by the program, or refused at any other value than its default."""

from __future__ import annotations

import inspect
from pathlib import Path
from textwrap import dedent

import pytest

import gspo
from gspo.build import role_settings
from gspo.config import ConfigErrors, TrainerConfig, load
from gspo.config.loading import tree
from gspo.config.schema.fields import Section, key
from tests.config.program import Program, sources_of
from tests.config.reading import Reader

# Reading a key to check, describe or predict a run is not acting on it.
WITHOUT_EFFECT = ("gspo.config", "gspo.plan", "gspo.report", "gspo.checks", "gspo.commands")


@pytest.fixture(scope="module")
def unread() -> set[str]:
    sources, packages = sources_of(Path(gspo.__file__).parent)
    assert set(WITHOUT_EFFECT) <= packages
    read = Reader(Program(sources, packages), TrainerConfig, WITHOUT_EFFECT).read
    from_folders = {key for key in tree.leaves() if any(f'.setting("{key}")' in text for text in sources.values())}
    return set(tree.leaves()) - read - from_folders


def other_values(leaf: tree.Leaf) -> list[str]:
    """Values of a key beside its default, as they are written; none where there are too many to try."""
    if leaf.type is bool:
        return [str(not leaf.default).lower()]
    if leaf.type is int:
        return [str(leaf.default + i) for i in (-1, 1, 2, 7)]
    return [c for c in leaf.info.choices if c != leaf.default and not leaf.info.open]


def test_every_key_is_read_or_refused_or_said_to_have_no_effect(unread):
    for name in sorted(unread):
        values = other_values(tree.leaves()[name])
        assert values, f"{name} is read nowhere: let something act on it, or remove it from the schema"
        for value in values:
            try:
                problems = load(overrides=[f"{name}={value}"]).warnings
            except ConfigErrors as errors:
                assert name in str(errors)
            else:
                assert any(p.key == name and p.message.startswith("has no effect") for p in problems), name


def test_a_key_whose_read_is_removed_is_found():
    sources, packages = sources_of(Path(gspo.__file__).parent)
    small = {name: text for name, text in sources.items() if name.startswith("gspo.config")}
    text = inspect.getsource(role_settings)
    name = "actor_rollout_ref.actor.shuffle"
    for source, found in ((text, True), (text.replace(".shuffle", ".strategy"), False)):
        program = Program({**small, "gspo.build.role_settings": source}, packages)
        assert (name in Reader(program, TrainerConfig, WITHOUT_EFFECT).read) is found


class Optim(Section):
    lr: float = key(default=0.1, doc="")
    eps: float = key(default=0.1, doc="")


class Actor(Section):
    shuffle: bool = key(default=False, doc="")
    clip: float = key(default=0.1, doc="")
    optim: Optim = key(factory=Optim, doc="")


class Critic(Section):
    optim: Optim = key(factory=Optim, doc="")


class Config(Section):
    actor: Actor = key(factory=Actor, doc="")
    critic: Critic = key(factory=Critic, doc="")


LEAVES = {"actor.shuffle", "actor.clip", "actor.optim.lr", "actor.optim.eps"} | {"critic.optim.lr", "critic.optim.eps"}


def reads(source: str, **others: str) -> set[str]:
    """The keys of `Config` that a module reads, beside a module that makes its classes."""
    schema = "class Section: ...\n" + "".join(
        f"class {c.__name__}(Section):\n    ...\n" for c in (Optim, Actor, Critic, Config)
    )
    imports = f"from {__name__} import Actor, Config, Critic, Optim\n"
    modules = {"app": imports + dedent(source), **{n: imports + dedent(s) for n, s in others.items()}}
    return Reader(Program({__name__: schema, **modules}), Config, ["app_checks"]).read & LEAVES


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: Config): return config.actor.shuffle",
        "def f(config: 'Config | None' = None): return config.actor.shuffle",
        "def f(actor: Actor): return actor.shuffle",
        "def f(config: Config):\n    a = config.actor\n    if a: return [x for x in (1, 2) if a.shuffle]",
        "def f(config: Config):\n    a, c = config.actor, config.critic\n    return a.shuffle",
        "def f(config: Config): return getattr(config.actor, 'shuffle')",
        "def f(config: Config): return lambda: config.actor.shuffle",
        "def f(config: Config):\n    def g(): return config.actor.shuffle\n    return g",
        "def f(config: Config):\n    for part in (config.critic, config.actor): part.shuffle",
        "def f(config: Config):\n    with config.actor as a: a.shuffle",
        "def f(config: Config): return (a := config.actor) and a.shuffle",
        "def f(config: Config): return (config.actor or config.critic).shuffle",
        "def f() -> Config: ...\ndef g(): return f().actor.shuffle",
        "def f(config: Config): return config.actor\ndef g(config): return f(config).shuffle",
        "def f(config: Config): return g(config.actor)\ndef g(anything): return anything.shuffle",
        "def f(config: Config): return g(x=config.actor)\ndef g(y=None, *, x): return x.shuffle",
        "class T:\n    def __init__(self, config: Config): self.c = config.actor\n    def g(self): return self.c.shuffle",
        "class B:\n    config: Config\nclass T(B):\n    def g(self): return self.config.actor.shuffle",
        "class P:\n    part: object\ndef f(config: Config): return P(config.actor).part.shuffle",
        "class P:\n    part: object\ndef f(p: P, config: Config):\n    P(part=config.actor)\n    return p.part.shuffle",
        "class T:\n    @property\n    def c(self) -> Config: ...\ndef f(t: T): return t.c.actor.shuffle",
        "class T:\n    def m(self, a): return a.shuffle\ndef f(t: T, config: Config): t.m(config.actor)",
        "from functools import partial\ndef g(a, b): return a.shuffle\ndef f(c: Config): partial(g, c.actor)",
    ],
)
def test_a_read_is_followed_by_type(source):
    assert "actor.shuffle" in reads(source)


@pytest.mark.parametrize(
    "source",
    [
        "def f(config: Config, cards):\n    config.actor.clip\n    cards.shuffle()",
        "def f(config: Config): config.actor.shuffle = True",
        "def f(config: Config): return config.shuffle",
        "def f(config: Config): return 'actor.shuffle', dict(shuffle=1)",
        "def f(config): return config.actor.shuffle",
        "class Config:\n    actor: object\ndef f(config: Config): return config.actor.shuffle",
    ],
)
def test_a_name_that_is_the_same_is_no_read(source):
    assert "actor.shuffle" not in reads(source)


def test_a_shared_section_is_followed_from_where_it_is_passed():
    make = "def make(optim: Optim): return optim.lr\n"
    assert reads(make) == set()
    assert reads(make + "def f(config: Config): make(config.critic.optim)") == {"critic.optim.lr"}
    both = make + "def f(c: Config):\n    make(c.critic.optim)\n    make(c.actor.optim)"
    assert reads(both) == {"critic.optim.lr", "actor.optim.lr"}


def test_a_read_counts_where_it_has_an_effect_and_across_modules():
    source = "from other import part\ndef f(config: Config): return part(config).shuffle"
    other = "import sys\ndef part(config): return config.actor"
    assert reads(source, other=other) == {"actor.shuffle"}
    assert reads("", app_checks="def f(config: Config): return config.actor.shuffle") == set()
