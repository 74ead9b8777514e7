"""The same prompts through vLLM and through the native engine, one after the other on one device.

    python benchmarks/vs_vllm.py MODEL --data gsm8k:PATH --prompts 64 --group 16 --new 512

Both get the token ids that `gspo train` would send: the questions in the model's chat template, `--group` answers each,
at most `--new` tokens, ended by the model's end-of-sequence tokens. The native engine is built from the config, as for
training, and also gives log-probs and texts; vLLM gives token ids only (`--logprobs` asks it for log-probs too), with
its default settings except for those in `--vllm-args`. vLLM runs first, in a process of its own under `--vllm-python`.
Each run has prompts of its own; the first one warms up and is not counted. Prints one JSON line. For both engines:

- `tok_per_s`: generated tokens per second, the median of the runs; `ratio`: native / vLLM
- `answer_tokens`: mean length of the answers, and `ended`: the share of them that ended before `--new` tokens
- `equal`, with `--temperature 0` (one answer per prompt): the share of answers that are the same in both
"""

from __future__ import annotations

from gspo.openmp import choose_spin_count

choose_spin_count()  # as the program does, before torch is imported

# isort: split

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gspo.build.data.training_data import load_prompts
from gspo.build.device import choose_device, default_threads
from gspo.build.engines import build_engine, engine_spec
from gspo.build.models import load_weights
from gspo.config import TrainerConfig, load
from gspo.models import resolve
from gspo.models.load import load_tokenizer
from gspo.rollout.engine import GroupRequest, RolloutEngine, SamplingParams
from gspo.types import Prompt

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Run:
    """One batch of prompts: its seconds, and its answers in the order of the prompts."""

    seconds: float
    answers: list[tuple[int, ...]]
    num_ended: int  # by an end-of-sequence token


@dataclass(frozen=True)
class Work:
    """What both engines do."""

    config: TrainerConfig
    device: torch.device
    tokenizer: Any
    batches: list[list[Prompt]]  # one per run; the first warms up
    group: int
    params: SamplingParams


def make_work(args: argparse.Namespace) -> Work:
    """The prompts and settings of a `gspo train`."""
    settings = {
        "actor_rollout_ref.model.path": args.model,
        "actor_rollout_ref.rollout.max_num_seqs": args.slots or args.prompts * args.group,
        "data.train_files": args.data,
        "data.max_prompt_length": args.plen,
        "data.max_response_length": args.new,
        "data.filter_overlong_prompts": "true",
    }
    config = load(None, [*(f"{key}={value}" for key, value in settings.items()), *args.settings]).config
    torch.set_num_threads(config.trainer.num_threads or default_threads())
    c = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(c.tokenizer_path or c.path, trust_remote_code=c.trust_remote_code)
    prompts = itertools.cycle(load_prompts(config, tokenizer, "train"))
    batches = [list(itertools.islice(prompts, args.prompts)) for _ in range(args.runs + 1)]
    params = SamplingParams(args.new, temperature=args.temperature)
    return Work(config, choose_device(config.trainer.device), tokenizer, batches, args.group, params)


def vllm_work(work: Work, args: argparse.Namespace) -> dict[str, Any]:
    """The same work as arguments of vLLM's classes."""
    spec = engine_spec(work.config, work.tokenizer, work.device)
    llm = {
        "model": resolve(spec.model),
        "dtype": spec.dtype,
        "max_model_len": spec.max_length,
        "max_num_seqs": spec.num_slots,
        "trust_remote_code": spec.trust_remote_code,
        "skip_tokenizer_init": True,
        "seed": 0,
    }
    sampling = {
        "n": work.group,
        "temperature": work.params.temperature,
        "max_tokens": work.params.max_tokens,
        "stop_token_ids": list(spec.eos_token_ids),
        "ignore_eos": True,  # these stop tokens are all of them, whatever vLLM finds in the folder
        "logprobs": 0 if args.logprobs else None,
        "detokenize": False,
    }
    batches = [[prompt.token_ids for prompt in batch] for batch in work.batches]
    return {"llm": llm | args.vllm_args, "sampling": sampling, "batches": batches}


def run_vllm(work: Work, args: argparse.Namespace) -> tuple[list[Run], dict[str, Any]]:
    """Every batch through vLLM, in its own process, and facts about that vLLM."""
    environment = dict(os.environ)
    if work.device.type == "cpu":
        environment.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # bound threads need cores of their own
    if args.vllm_path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (args.vllm_path, environment.get("PYTHONPATH"))))
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "work.json"
        path.write_text(json.dumps(vllm_work(work, args)))
        words = [args.vllm_python, str(HERE / "vllm_rollout.py"), str(path)]
        done = subprocess.run(words, env=environment, stdout=sys.stderr)  # its log; the last line of stdout is ours
        if done.returncode:
            sys.exit(f"vllm_rollout.py ended with code {done.returncode}; its log is above")
        found = json.loads(Path(f"{path}.out").read_text())
    runs = []
    for run in found.pop("runs"):
        tokens, reasons = zip(*run["answers"])
        runs.append(Run(run["seconds"], [tuple(ids) for ids in tokens], reasons.count("stop")))
    return runs, found


def run_native(work: Work) -> tuple[list[Run], dict[str, Any]]:
    """Every batch through the engine that `gspo train` would build."""
    model = load_weights(work.config, work.device, work.config.actor_rollout_ref.model.path).eval()
    engine = build_engine(work.config, model, work.tokenizer, work.device)
    runs = [_run_batch(engine, work, seed) for seed in range(len(work.batches))]
    return runs, {"torch": torch.__version__, "engine": getattr(engine, "description", "")}


def _run_batch(engine: RolloutEngine, work: Work, number: int) -> Run:
    begin = time.perf_counter()
    for i, prompt in enumerate(work.batches[number]):
        request = GroupRequest(prompt, submission=i, n=work.group, version=0, params=work.params, seed=number)
        engine.submit(request)
    groups = []
    while engine.num_in_flight:
        groups += engine.step()
    seconds = time.perf_counter() - begin
    rollouts = [rollout for group in sorted(groups, key=lambda g: g.submission) for rollout in group.rollouts]
    ended = sum(rollout.finish_reason == "stop" for rollout in rollouts)
    return Run(seconds, [rollout.token_ids for rollout in rollouts], ended)


def summarise(runs: list[Run]) -> dict[str, Any]:
    """The figures of the runs after the first."""
    counted = runs[1:]
    rates = [sum(map(len, run.answers)) / run.seconds for run in counted]
    lengths = [len(answer) for run in counted for answer in run.answers]
    return {
        "tok_per_s": round(statistics.median(rates), 1),
        "answer_tokens": round(statistics.fmean(lengths), 1),
        "ended": round(sum(run.num_ended for run in counted) / len(lengths), 4),
        "runs_s": [round(run.seconds, 4) for run in counted],
        "warm_up_s": round(runs[0].seconds, 4),
    }


def equal_share(first: list[Run], second: list[Run]) -> float:
    """The share of answers that are the same tokens in both."""
    pairs = [pair for a, b in zip(first, second) for pair in zip(a.answers, b.answers)]
    return round(sum(a == b for a, b in pairs) / len(pairs), 4)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    work = make_work(args)
    vllm_runs, vllm_facts = run_vllm(work, args)
    native_runs, native_facts = run_native(work)
    vllm, native = summarise(vllm_runs), summarise(native_runs)
    lengths = [len(prompt.token_ids) for batch in work.batches[1:] for prompt in batch]
    equal = {} if args.temperature else {"equal": equal_share(vllm_runs, native_runs)}
    return {
        "model": args.model,
        "ratio": round(native["tok_per_s"] / vllm["tok_per_s"], 3),
        **equal,
        "native": native | native_facts,
        "vllm": vllm | vllm_facts | {"logprobs": args.logprobs, "args": args.vllm_args},
        "prompts": args.prompts,
        "group": args.group,
        "new": args.new,
        "temperature": args.temperature,
        "slots": work.config.actor_rollout_ref.rollout.max_num_seqs,
        "prompt_tokens": round(statistics.fmean(lengths), 1),
        "dtype": engine_spec(work.config, work.tokenizer, work.device).dtype,
        "device": torch.cuda.get_device_name() if work.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or hub name")
    parser.add_argument("--data", default="gsm8k", help="as data.train_files, such as gsm8k:PATH")
    parser.add_argument("--prompts", type=int, default=64, help="prompts per run")
    parser.add_argument("--group", type=int, default=16, help="answers per prompt")
    parser.add_argument("--plen", type=int, default=512, help="tokens of the longest prompt; longer ones are left out")
    parser.add_argument("--new", type=int, default=512, help="tokens of the longest answer")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: greedy, one answer per prompt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--slots", type=int, default=0, help="answers at once (default: all)")
    parser.add_argument("--vllm-python", default=str(HERE.parent / ".venv-vllm/bin/python"), help="has vLLM installed")
    parser.add_argument("--vllm-path", help="PYTHONPATH of vLLM's process, for one in a folder of its own")
    parser.add_argument("--vllm-args", type=json.loads, default={}, metavar="JSON", help="more arguments of vLLM's LLM")
    parser.add_argument("--logprobs", action="store_true", help="ask vLLM for log-probs, as training needs them")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for gspo train, for the native engine")
    args = parser.parse_intermixed_args()
    if args.temperature == 0:
        args.group = 1
    print(json.dumps(compare(args)))


if __name__ == "__main__":
    main()
