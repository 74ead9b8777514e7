"""Reward functions in five signatures, loaded by path and name. Every failure names the function and the row.

gspo        `(prompt, response) -> float | Reward | dict`: a Prompt, and a Response (a str with its tokens).
verl        `compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict`.
            Its reward manager `batch`: `(data_sources, solution_strs, ground_truths, extra_infos) -> list`, lists.
TRL         `(completions, **columns) -> list`: called once with all responses of a group.
AReaL       `(prompt, completions, prompt_ids, completion_ids, **data) -> float`: called once per response.

Each may be `async`. The names of the parameters tell which signature a function has.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.paths import user_path
from gspo.registry import import_file
from gspo.rewards.protocol import Graded, RewardError
from gspo.rewards.results import as_reward
from gspo.rewards.signatures import Response, Style, call, detect_style, is_async
from gspo.types import Prompt

_MAX_TRACE = 4000
# A traceback is shown from the first frame that is in none of these files.
_OWN_FILES = (
    str(Path(__file__).parent),
    inspect.getfile(import_file),
    str(Path(asyncio.__file__).parent),
    "<frozen importlib",
)


CUSTOM = "custom_reward_function.path"


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Where a reward function is: the name of a built-in, or a name in a Python file or importable module.

    `key` is the config key or argument that messages name.
    """

    name: str
    path: str | None = None
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    key: str = field(default="reward", compare=False)


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A loaded reward function. `grade` calls it and never raises."""

    fn: Callable[..., Any]
    style: Style
    name: str
    where: str = ""
    weight: float = 1.0

    @property
    def needs_whole_group(self) -> bool:
        """Whether all responses of a group belong in one call: the signature is batched, or awaiting can overlap."""
        return self.style in ("trl", "verl_batch") or is_async(self.fn)

    def grade(self, prompt: Prompt, responses: Sequence[Response]) -> list[Graded]:
        """A Reward, or the text of a failure, for each response, in order."""
        if self.style in ("trl", "verl_batch"):
            return self._grade_batch(prompt, responses)
        if is_async(self.fn):
            return asyncio.run(self._grade_concurrently(prompt, responses))
        return [self._grade_one(prompt, response) for response in responses]

    def _grade_one(self, prompt: Prompt, response: Response) -> Graded:
        try:
            return as_reward(_awaited(call(self.fn, self.style, prompt, [response])))
        except (Exception, SystemExit) as error:
            return self.failure(prompt, response.index, error)

    def _grade_batch(self, prompt: Prompt, responses: Sequence[Response]) -> list[Graded]:
        try:
            values = _awaited(call(self.fn, self.style, prompt, responses))
            values = values.tolist() if hasattr(values, "tolist") else values
            if not isinstance(values, (list, tuple)) or len(values) != len(responses):
                got = f"{len(values)} values" if isinstance(values, (list, tuple)) else type(values).__name__
                raise RewardError(f"it returned {got} for {len(responses)} completions, expected a list of that length")
        except (Exception, SystemExit) as error:
            return [self.failure(prompt, response.index, error) for response in responses]
        return [self._read(prompt, response, value) for response, value in zip(responses, values)]

    def _read(self, prompt: Prompt, response: Response, value: Any) -> Graded:
        try:
            return as_reward(value)
        except RewardError as error:
            return self.failure(prompt, response.index, error)

    async def _grade_concurrently(self, prompt: Prompt, responses: Sequence[Response]) -> list[Graded]:
        async def grade(response: Response) -> Graded:
            try:
                return as_reward(await call(self.fn, self.style, prompt, [response]))
            except (Exception, SystemExit) as error:
                return self.failure(prompt, response.index, error)

        return await asyncio.gather(*map(grade, responses))

    def failure(self, prompt: Prompt, index: int, error: BaseException) -> str:
        """The message of a failed reward: function, row, response, error and the user's part of the traceback."""
        head = f"reward function {self.name}{self.where} failed on row {prompt.uid!r}, response {index}"
        if isinstance(error, RewardError):
            return f"{head}: {error}"
        trace = _user_trace(error)
        return f"{head}: {type(error).__name__}: {_cut(str(error), 1000)}" + (f"\n{trace}" if trace else "")


def parse_spec(text: str) -> RewardSpec:
    """A spec from "math" (a built-in), "file.py:function" or "package.module:function"."""
    path, colon, name = text.rpartition(":")
    return RewardSpec(name=name, path=path if colon else None)


def load_function(spec: RewardSpec) -> RewardFunction:
    """Import the function that `spec` names; RewardError names the missing function and those that exist."""
    assert spec.path is not None
    module = load_module(spec.path, spec.key)
    fn: Any = module
    for part in spec.name.split("."):
        fn = getattr(fn, part, None)
    if not callable(fn):
        names = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise RewardError(
            f"{spec.key}={spec.path!r} has no function {spec.name!r}; it has {', '.join(names[:20])}. Choose one with "
            + ("custom_reward_function.name" if spec.key == CUSTOM else "`name`")
        )
    return wrap_function(fn, weight=spec.weight, kwargs=spec.kwargs)


def wrap_function(
    fn: Callable[..., Any], *, name: str | None = None, weight: float = 1.0, kwargs: Mapping[str, Any] | None = None
) -> RewardFunction:
    """A function with its signature recognised; RewardError names the function and the signatures.

    Of an object that scores by a function of its own, such as verl's reward managers, that function is used.
    """
    own = getattr(fn, "compute_score", None)
    if callable(own) and not isinstance(fn, type):
        if getattr(fn, "overlong_buffer_cfg", None):
            raise RewardError(
                f"{type(fn).__name__}.overlong_buffer_cfg has no effect on its compute_score; set "
                "reward_model.reward_manager=dapo and reward_model.reward_kwargs.overlong_buffer_cfg"
            )
        fn = own
    name = name or str(getattr(fn, "__qualname__", type(fn).__name__))
    bound = functools.partial(fn, **kwargs) if kwargs else fn
    return RewardFunction(bound, detect_style(fn, name, tuple(kwargs or ())), name, _where(fn), weight)


def _awaited(value: Any) -> Any:
    """The value itself; of an awaitable, its result. A function that is not declared `async` may return one too."""

    async def wait() -> Any:
        return await value

    return asyncio.run(wait()) if inspect.isawaitable(value) else value


def load_module(path: str, key: str = "reward") -> Any:
    """Import a Python file by its path, or a module by its name; RewardError names the key and says what went wrong."""
    if not path.endswith(".py") and not user_path(path).exists():
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            raise RewardError(f"{key}={path!r} is neither a file nor an importable module: {error}") from error
    if not user_path(path).is_file():
        raise RewardError(f"{key}={path!r}: there is no such file")
    try:
        return import_file(path)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"{key}={path!r} failed on import: {type(error).__name__}: {error}\n{_user_trace(error)}"
        ) from error


def _where(fn: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(fn), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def _user_trace(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    while frames and frames[0].filename.startswith(_OWN_FILES):
        frames.pop(0)
    return _cut("".join(traceback.format_list(frames[-12:])).rstrip(), _MAX_TRACE)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else "…" + text[-limit:]
