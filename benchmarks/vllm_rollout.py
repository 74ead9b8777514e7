"""Generate with vLLM's offline `LLM`: `python benchmarks/vllm_rollout.py WORK`, started by vs_vllm.py.

Imports nothing of gspo, since vLLM may live in another environment. WORK is a JSON file: `llm` and `sampling` are the
arguments of vLLM's classes, `batches` are lists of prompts as token ids, one list per run. Answers are not turned into
text. Writes WORK with `.out` appended: the versions, and the seconds and answers of every run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import vllm


def run(llm: Any, prompts: list[list[int]], params: Any) -> dict[str, Any]:
    """One batch: its seconds, and its answers in the order of the prompts as [tokens, finish reason]."""
    begin = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    answers = [[list(answer.token_ids), answer.finish_reason] for output in outputs for answer in output.outputs]
    return {"seconds": seconds, "answers": answers}


def main(path: str) -> None:
    work = json.loads(Path(path).read_text())
    llm = vllm.LLM(**work["llm"])
    params = vllm.SamplingParams(**work["sampling"])
    runs = [run(llm, prompts, params) for prompts in work["batches"]]
    found = {"version": vllm.__version__, "torch": torch.__version__, "runs": runs}
    Path(f"{path}.out").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
