"""`reasoning_gym:<task>[,key=value…]`: the generators and scorers of the reasoning-gym package (extra `tasks`)."""

from __future__ import annotations

import difflib
import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.splits import num_rows
from gspo.processes import python_environment
from gspo.seeding import derive_seed

# Tasks that iterate over sets of text to make a problem: another hash seed gives another problem.
HASH_DEPENDENT = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
INSTRUCTION = "Think step by step, then write only the final answer between <answer> and </answer>."


def load_reasoning_gym(
    split: str = "train", *, limit: int | None = None, seed: int = 0, task: str = "", options: str = ""
) -> list[Row]:
    """`limit` problems of a task (2,048 to train on, 256 held out). `options` are its settings: `key=value,…`.

    A row's `extra` holds the recipe to make the same problem again, since scorers need the package's own record.
    """
    size = num_rows(split, limit, 2048, 256)
    # The package derives item i from seed + i: seeds half the range apart keep the items of the two splits apart.
    base = derive_seed(seed, "reasoning_gym") % (1 << 30)
    recipe = {
        "task": task,
        "options": json.dumps(_parse(options, task), sort_keys=True),
        "seed": base if split == "train" else base + (1 << 30),
        "size": size,
    }
    make = _make_in_subprocess if task in HASH_DEPENDENT and sys.flags.hash_randomization else _make
    return [_row(problem, {**recipe, "index": i}, split) for i, problem in enumerate(make(recipe))]


def score(text: str, extra: Mapping[str, Any]) -> float:
    """The package's own score, 0 to 1, of the text between the last `<answer>` tags, or of the whole text, stripped.

    Some of its scorers evaluate the answer: call this only through `gspo.rewards`, which makes them safe.
    """
    problems = _dataset(extra["task"], extra["options"], extra["seed"], extra["size"])
    return float(problems.score_answer(final_answer(text), problems[extra["index"]]))


def final_answer(text: str) -> str:
    """The final answer of a response: the text between the last `<answer>` and its `</answer>`, or all of it."""
    _, opened, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if opened else text.strip()


def _make(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The questions and answers of a recipe, made in this process."""
    problems = _dataset(**recipe)
    return [{key: problems[i][key] for key in ("question", "answer")} for i in range(recipe["size"])]


def _make_in_subprocess(recipe: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same, made in a process with hash seed 0, as reward workers have; this process may have another."""
    _dataset(**recipe)  # raises here for a missing package, an unknown task or refused options
    # Some tasks print while they work, so the rows are on the last line.
    code = (
        "import json, sys; from gspo.data.tasks import reasoning_gym as r; "
        "print('\\n' + json.dumps(r._make(json.load(sys.stdin))))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        input=json.dumps(recipe),
        env=python_environment(*sys.path, PYTHONHASHSEED="0"),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise DataError(f"reasoning_gym:{recipe['task']}", "could not be generated; the reason is printed above")
    return json.loads(done.stdout.splitlines()[-1])


def _row(problem: Mapping[str, Any], extra: dict[str, Any], split: str) -> Row:
    answer = problem["answer"]
    return Row(
        uid=f"reasoning_gym:{extra['task']}/{split}/{extra['index']}",
        messages=user_message(f"{problem['question']}\n{INSTRUCTION}"),
        data_source="reasoning_gym",
        ground_truth=answer,
        answer=None if answer is None else f"<answer>{answer}</answer>",
        extra=extra,
    )


@functools.lru_cache(maxsize=16)
def _dataset(task: str, options: str, seed: int, size: int) -> Any:
    where = f"reasoning_gym:{task}"
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError:
        raise DataError(where, "needs the reasoning-gym package; install gspo[tasks]") from None
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"it has {len(DATASETS)}, such as chain_sum"
        raise DataError(where, f"is not a task of reasoning-gym; {hint}")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(options))
    except (TypeError, ValueError, AssertionError) as error:
        raise DataError(where, f"refused its options {options} ({error})") from error


def _parse(options: str, task: str) -> dict[str, Any]:
    """`min_terms=2,max_terms=4` as a dictionary; values are JSON where they can be, else text."""
    parsed: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in options.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or key in ("seed", "size"):
            raise DataError(
                f"reasoning_gym:{task}", f"has the option {part!r}; expected key=value, other than seed and size"
            )
        try:
            parsed[key] = json.loads(value)
        except json.JSONDecodeError:
            parsed[key] = value
    return parsed
