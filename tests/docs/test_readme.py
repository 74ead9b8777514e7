"""Both READMEs: the same commands, each one that exists with settings that gspo accepts, and links that lead somewhere."""

from __future__ import annotations

import io
import re
import shlex
import tokenize
from pathlib import Path

import pytest
from typer.main import get_command

from gspo.cli import COMMANDS, app
from gspo.config import load
from gspo.config.loading.flags import split_arguments

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands(page: Path) -> list[str]:
    """The lines of the shell blocks without comments."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    return [" ".join(line.split(" #")[0].split()) for line in text.splitlines() if line.strip()]


def python(page: Path) -> list[tuple[int, str]]:
    """The tokens of the Python example without comments."""
    (example,) = blocks(page, "python")
    left_out = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE)
    tokens = tokenize.generate_tokens(io.StringIO(example).readline)
    return [(token.type, token.string) for token in tokens if token.type not in left_out]


def test_the_chinese_readme_has_the_same_commands_and_the_same_example() -> None:
    assert commands(CHINESE) == commands(ENGLISH), "README.zh-CN.md must follow README.md"
    assert python(CHINESE) == python(ENGLISH), "README.zh-CN.md must follow README.md"


@pytest.mark.parametrize("page", [ENGLISH, CHINESE], ids=["en", "zh"])
def test_links_and_pictures_exist(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert len(targets) > 20 and not [target for target in targets if not (ROOT / target).exists()]


def test_every_command_exists_and_its_settings_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in (("my.yaml", "{}\n"), ("train.jsonl", "{}\n"), ("my_reward.py", "")):
        Path(name).write_text(text)
    lines = [shlex.split(line) for line in commands(ENGLISH)]
    ours = [words[words.index("gspo") + 1 :] for words in lines if "gspo" in words and words[0] != "pip"]
    assert {"train", "sft", "doctor", "dashboard", "eval", "sweep", "serve"} <= {words[0] for words in ours}
    known = get_command(app)
    for words in ours:
        assert words[0] in COMMANDS
        command = known.get_command(None, words[0])  # pyright: ignore
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, words
        if words[0] == "train":
            _, overrides, _ = split_arguments([word for word in words[1:] if not word.startswith("--")])
            load(None, overrides)


def test_the_readme_mentions_what_a_newcomer_looks_for() -> None:
    text = ENGLISH.read_text(encoding="utf-8")
    for word in ("pip install gspo", "gspo sft", "gspo doctor", "gspo dashboard", "LoRA", "wandb", "tensorboard"):
        assert word in text
