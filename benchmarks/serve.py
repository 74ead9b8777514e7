"""What a server costs: tokens per second of 64 clients over HTTP, and of the engine alone with the same prompts.

    python benchmarks/serve.py --model embedded --device cpu
    python benchmarks/serve.py --model Qwen/Qwen2.5-0.5B-Instruct --device cuda --max-tokens 512
    python benchmarks/serve.py --url http://127.0.0.1:8001/v1 --served-model NAME    # another server, such as vllm serve

Clients are a process of their own with a plain HTTP/1.1 client over asyncio: it needs no package. Each client sends its
next request when it has the answer to the last one. The share is the median of `--rounds` pairs, each engine then
server. `cpu_share` is the same by processor time: what the engine alone spends per token, by what the server's process
spends. It also holds on a machine that does other work.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
import argparse
import asyncio
import json
import multiprocessing
import statistics
import time
from typing import Any
from urllib.parse import urlsplit


async def post(reader: Any, writer: Any, host: str, path: str, body: bytes, key: str) -> dict[str, Any]:
    """One request on a kept connection."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    top = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    if " 200" not in top.split("\r\n", 1)[0]:
        raise RuntimeError(top)
    length = int(top.split("content-length:")[1].split("\r\n")[0])
    return json.loads(await reader.readexactly(length))


async def client(url: str, bodies: list[bytes], key: str) -> int:
    """Send these requests one after another; returns the tokens written."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
    tokens = 0
    for body in bodies:
        answer = await post(reader, writer, parts.netloc, f"{parts.path}/completions", body, key)
        tokens += answer["usage"]["completion_tokens"]
    writer.close()
    return tokens


def load(url: str, model: str, prompts: list[list[int]], a: argparse.Namespace, answers: Any) -> None:
    """The clients' process."""
    options = {"model": model, "max_tokens": a.max_tokens, "temperature": 1.0, "ignore_eos": True}
    bodies = [json.dumps({**options, "prompt": prompt}).encode() for prompt in prompts]

    async def run() -> int:
        return sum(await asyncio.gather(*(client(url, bodies[i :: a.clients], a.key) for i in range(a.clients))))

    start = time.perf_counter()
    tokens = asyncio.run(run())
    answers.put((tokens, time.perf_counter() - start))


def serve(url: str, model: str, prompts: list[list[int]], a: argparse.Namespace) -> float:
    """Tokens per second over HTTP."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    process = context.Process(target=load, args=(url, model, prompts, a, answers))
    process.start()
    tokens, seconds = answers.get()
    process.join()
    return tokens / seconds


def engine_alone(engine: Any, prompts: list[list[int]], a: argparse.Namespace) -> float:
    """Tokens per second of the engine, with as many requests at once as there are clients."""
    from gspo.rollout.engine import GroupRequest, SamplingParams
    from gspo.types import Prompt

    params = SamplingParams(a.max_tokens, ignore_eos=True)
    requests = [GroupRequest(Prompt(str(i), (), tuple(p)), i, 1, 0, params, 0) for i, p in enumerate(prompts)]
    start, tokens = time.perf_counter(), 0
    waiting = iter(requests)
    for request in list(requests[: a.clients]):
        engine.submit(next(waiting, request))
    while engine.num_in_flight:
        for group in engine.step():
            tokens += group.num_tokens
            if (request := next(waiting, None)) is not None:
                engine.submit(request)
    return tokens / (time.perf_counter() - start)


def make_prompts(a: argparse.Namespace, vocabulary: int) -> list[list[int]]:
    return [[(7 * i + 13 * j) % (vocabulary - 20) + 10 for j in range(a.prompt_tokens)] for i in range(a.requests)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="measure this server only")
    parser.add_argument("--served-model", help="with --url: the name of its model")
    parser.add_argument("--vocabulary", type=int, default=32000, help="with --url: size of its vocabulary")
    parser.add_argument("--key", default="none")
    a = parser.parse_args()
    if a.url:
        prompts = make_prompts(a, a.vocabulary)
        serve(a.url, a.served_model, prompts[: 2 * a.clients], a)
        rates = [serve(a.url, a.served_model, prompts, a) for _ in range(a.rounds)]
        print(json.dumps({"url": a.url, "tokens_per_s": round(statistics.median(rates))}))
        return
    from gspo.build.served.engine import open_engine
    from gspo.build.served.source import find_source
    from gspo.serving.app import Served, build_app
    from gspo.serving.backend import SharedBackend
    from gspo.serving.batcher import Batcher
    from gspo.serving.server import serving

    length = a.prompt_tokens + a.max_tokens
    source = find_source(a.model)
    options = {"num_slots": a.clients, "max_length": length, "device": a.device}
    alone, opened = open_engine(source, **options), open_engine(source, **options)
    prompts = make_prompts(a, opened.reader.vocabulary_size)
    batcher = Batcher(opened.engine, opened.decode)
    served = Served(
        source.name, SharedBackend(opened.reader, batcher), opened.token_text, opened.max_length, opened.num_slots
    )
    rounds = []
    with serving(build_app(served)) as url:
        for round_ in range(a.rounds + 1):
            times = [time.process_time()]
            own = engine_alone(alone.engine, prompts, a)
            times.append(time.process_time())
            rate = serve(f"{url}/v1", source.name, prompts, a)
            times.append(time.process_time())
            if round_:  # the first one warms up
                rounds.append((own, rate, (times[1] - times[0]) / (times[2] - times[1])))
    batcher.close()
    shares = [rate / own for own, rate, _ in rounds]
    own, rate, cpu_share = (statistics.median(values) for values in zip(*rounds))
    result = {
        "model": a.model,
        "clients": a.clients,
        "engine_tokens_per_s": round(own),
        "server_tokens_per_s": round(rate),
        "cpu_share": round(cpu_share, 3),
    }
    print(json.dumps({**result, "share": round(statistics.median(shares), 3), "shares": [round(s, 3) for s in shares]}))


if __name__ == "__main__":
    main()
