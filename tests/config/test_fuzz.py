"""Whatever a file, an override or a flag holds: a checked config, or errors that name a key. Never another exception."""

from __future__ import annotations

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gspo.config import ConfigErrors, load
from gspo.config.loading import tree

KEYS = sorted(tree.leaves())
SECTIONS = sorted({key.rpartition(".")[0] for key in KEYS if "." in key})
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["${a.b}", "${", "off", "1e400", "-0", "0x1F", "!!python/object:os.system x", "2026-01-01", "~"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def resolves_or_says_why(*, file=None, overrides=(), flags=(), base=None):
    """The config, which loads again to the same values; or None after errors that name keys."""
    try:
        got = load(file, list(overrides), list(flags), base=base)
    except ConfigErrors as errors:
        assert errors.problems and all(p.message and p.remedy for p in errors.problems)
        return None
    return got


@settings(max_examples=60)
@given(st.sampled_from(KEYS), values)
@example("trainer.seed", 10**400)
@example("actor_rollout_ref.actor.optim.lr", 10**400)
@example("trainer.seed", float("inf"))
@example("data.max_response_length", float("nan"))
def test_any_value_of_any_key(key: str, value: object):
    got = resolves_or_says_why(base={key: value})
    if got is not None:
        again = load(base=yaml.safe_load(got.to_yaml(with_origins=False)))
        assert again.to_dict() == got.to_dict() or value != value  # NaN differs from itself


@settings(max_examples=60)
@given(
    st.text(max_size=30)
    | st.builds(lambda k, v: f"{k}={v}", st.sampled_from([*KEYS, *SECTIONS, "lr", "a.b"]), st.text(max_size=20))
)
@example("trainer.seed=" + "9" * 400)
@example("trainer.seed=[" * 50)
def test_any_override(text: str):
    resolves_or_says_why(overrides=[text])


@settings(max_examples=50)
@given(
    st.lists(
        st.text(max_size=12) | st.sampled_from(["--lr", "--no-shuffle", "--seed=x", "--", "---", "--a.b=1"]), max_size=4
    )
)
def test_any_flags(words: list[str]):
    resolves_or_says_why(flags=words)


@settings(max_examples=60)
@given(
    text=st.text(max_size=60)
    | values.map(lambda v: yaml.dump(v))
    | st.dictionaries(st.sampled_from([*KEYS, *SECTIONS]), values, max_size=4).map(lambda v: yaml.dump(v))
)
@example(text="801695")
@example(text="word")
@example(text="? [1, 2]\n: 3")
@example(text="trainer: {seed: 1, seed: 2}")
@example(text="1: 2\ntrue: 3\nnull: 4")
@example(text="trainer: {1: 2}")
@example(text="\x00")
@example(text="trainer:\n\tseed: 1")
def test_any_yaml(text: str, tmp_path_factory):
    file = tmp_path_factory.mktemp("yaml") / "config.yaml"
    file.write_text(text, encoding="utf-8", errors="replace")
    resolves_or_says_why(file=file)


@settings(max_examples=60)
@given(data=st.binary(max_size=60))
def test_any_bytes(data: bytes, tmp_path_factory):
    file = tmp_path_factory.mktemp("bytes") / "config.yaml"
    file.write_bytes(data)
    resolves_or_says_why(file=file)
