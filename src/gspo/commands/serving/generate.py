"""`gspo generate`: answers to a file of prompts."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gspo.commands import refuse
from gspo.commands.serving.options import (
    Device,
    Dtype,
    EngineKind,
    MaxLength,
    MaxNumSeqs,
    Model,
    TrustRemoteCode,
    open_model,
)

if TYPE_CHECKING:
    from gspo.rollout.engine import GroupRequest
    from gspo.types import Group

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    model: Model,
    prompts: Annotated[
        str, typer.Argument(metavar="PROMPTS", help="jsonl, parquet or text file (a prompt per line), or a task.")
    ],
    out: Annotated[Path | None, typer.Option(help="jsonl file for the answers. Default: standard output.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Answers per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 = greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the probability that is drawn from.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    seed: Annotated[int, typer.Option(help="The same seed gives the same answers.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")] = None,
    prompt_key: Annotated[str, typer.Option(help="Column of the prompts: texts or lists of messages.")] = "prompt",
    engine: EngineKind = "native",
    max_num_seqs: MaxNumSeqs = None,
    max_model_len: MaxLength = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a model's answers to the prompts of a file, one JSON object per prompt, in their order.

    Each has uid, messages, ground_truth and responses with text, finish_reason and num_tokens.
    """
    from gspo.data.chat_template import encode_rows
    from gspo.data.rows import DataError
    from gspo.rollout.engine import GroupRequest, SamplingParams
    from gspo.runs.files import errors_name
    from gspo.serving.parameters import as_temperature

    try:
        rows = _rows(prompts, limit, prompt_key)
        options: dict[str, Any] = {"kind": engine, "num_slots": max_num_seqs, "max_length": max_model_len}
        source, opened = open_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, **options)
        template = source.settings.get("data.apply_chat_template_kwargs") or {}
        read = list(encode_rows(rows, opened.tokenizer, **template))
    except DataError as error:
        refuse(error)
    params = SamplingParams(max_tokens, as_temperature(temperature), top_p=top_p)
    requests = [GroupRequest(prompt, number, n, 0, params, seed) for number, prompt in enumerate(read)]
    longest = max(read, key=lambda prompt: len(prompt.token_ids))
    if len(longest.token_ids) + max_tokens > opened.max_length:
        refuse(
            f"{longest.uid}: {len(longest.token_ids)} tokens and --max-tokens {max_tokens} exceed the longest length "
            f"{opened.max_length}; lower --max-tokens or raise --max-model-len"
        )
    with ExitStack() as stack:
        stack.callback(opened.engine.close)
        stream = sys.stdout
        if out is not None:
            stack.enter_context(errors_name(out))
            stream = stack.enter_context(out.open("w", encoding="utf-8"))
        for group in _in_order(opened.engine, requests, most=4 * opened.num_slots):
            stream.write(json.dumps(_as_record(group), ensure_ascii=False) + "\n")
            stream.flush()


def _rows(prompts: str, limit: int | None, prompt_key: str) -> list[Any]:
    """The rows of a file or task; a text file has one prompt per line."""
    from gspo.data.datasets import DATASETS, load_rows
    from gspo.data.rows import DataError, Row, user_message
    from gspo.data.usual_columns import Columns

    path = Path(prompts)
    if path.suffix == ".txt":
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(prompts, f"cannot be read ({error})") from error
        rows = [
            Row(f"{path.name}:{number}", user_message(line)) for number, line in enumerate(lines, 1) if line.strip()
        ]
        rows = rows[:limit]
    else:
        is_task = prompts in DATASETS
        named = None if is_task else Columns(prompt_key=prompt_key, ground_truth_key=None)
        rows = load_rows(prompts, "val" if is_task else "train", limit=limit, columns=named)
    if not rows:
        raise DataError(prompts, "has no prompts")
    return rows


def _in_order(engine: Any, requests: list[GroupRequest], most: int) -> Any:
    """The finished groups in order of submission; at most about `most` are in the engine or wait for an earlier one."""
    waiting: dict[int, Group] = {}
    submitted = written = 0
    while written < len(requests):
        while submitted < len(requests) and submitted - written < most:
            engine.submit(requests[submitted])
            submitted += 1
        waiting |= {group.submission: group for group in engine.step()}
        while written in waiting:
            yield waiting.pop(written)
            written += 1


def _as_record(group: Group) -> dict[str, Any]:
    prompt = group.prompt
    responses = [
        {"text": r.text, "finish_reason": r.finish_reason, "num_tokens": len(r.token_ids)} for r in group.rollouts
    ]
    messages = [dict(message) for message in prompt.messages]
    return {"uid": prompt.uid, "messages": messages, "ground_truth": prompt.ground_truth, "responses": responses}
