"""The Python tool in the `python` format: code in a fenced block runs, its output follows, and the model answers."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from gspo.environments.loading import EnvironmentSpec
from gspo.models.load import load_tokenizer
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.episodes.dialogue import DialogueSettings
from gspo.rollout.episodes.settings import EpisodeSettings, wrap_engine
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.types import Prompt
from tests.rollout.models import drain

TOKENIZER = load_tokenizer("embedded")
TURNS = ["I compute.\n```python\nx = 6 * 7\nprint(x)\n```", "Again:\n```python\nprint(x + 1)\n1 / 0\n```", "#### 43"]


class Reciter(ScriptedEngine):
    """Writes the turns, stopping where an engine with these stop tokens would."""

    def _recite(self, sequence: Any) -> None:
        begun = sequence.begun
        said = TOKENIZER.decode([t for t, m in zip(begun.token_ids, begun.loss_mask) if m])
        left = "".join(TURNS)[len(said) :]
        tokens = [*TOKENIZER(left)["input_ids"], TOKENIZER.eos_token_id]
        stops = (*sequence.group.request.params.stop_token_ids, TOKENIZER.eos_token_id)
        end = next(i + 1 for i, token in enumerate(tokens) if token in stops)
        sequence.finish(sequence.extended(tokens[:end], [-1.0] * end, 0), "", "stop")


def test_code_runs_with_its_earlier_values_and_errors_are_shown() -> None:
    settings = EpisodeSettings(
        EnvironmentSpec("gsm8k"), DialogueSettings(max_turns=4), tool_format="python", num_workers=1
    )
    with closing(settings.open_pool()) as pool:
        settings = settings.with_tools(pool)
        engine = wrap_engine(
            Reciter(lambda *_: ScriptedAnswer(())),
            settings,
            TOKENIZER,
            eos_token_ids=(TOKENIZER.eos_token_id,),
            max_length=600,
            pool=pool,
        )
        prompt = Prompt("p", ({"role": "user", "content": "?"},), tuple(TOKENIZER("?")["input_ids"]))
        engine.submit(GroupRequest(prompt, 0, 1, 0, SamplingParams(500), 0))
        (group,) = drain(engine)
    (rollout,) = group.rollouts
    assert TOKENIZER.decode(rollout.token_ids) == (
        f"{TURNS[0]}\n```output\n42\n```\n{TURNS[1]}\n```output\nerror: 43\nZeroDivisionError: division by zero\n```\n"
        f"{TURNS[2]}<eos>"
    )
    assert [(t.num_calls, t.num_errors) for t in rollout.turns] == [(1, 0), (1, 1), (0, 0)]
    assert rollout.finish_reason == "stop" and rollout.text == "#### 43" and rollout.failure is None
