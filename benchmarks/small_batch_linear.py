"""gspo's linear kernel for few rows beside torch's, on a CPU: `python benchmarks/small_batch_linear.py [--threads 1]`.

The weights are larger than the caches, as those of a model are in a decode step. The two take turns, and the best of
three turns counts. `alone` says whether every row has the bits that it has without the others.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from gspo.kernels.cpu_library import library
from gspo.kernels.small_batch_linear import linear

NUM_LAYERS, COLUMNS, DEPTH = 60, 1536, 576  # 212 MB
ROWS = (2, 8, 16, 32, 48)


def milliseconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    start = time.perf_counter()
    for weight in weights:
        product(x, weight)
    return (time.perf_counter() - start) / len(weights) * 1e3


def is_the_same_alone(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weight: Tensor) -> bool:
    """Whether the first two rows have the same bits in a batch of their own."""
    return torch.equal(product(x, weight)[:2], product(x[:2].clone(), weight))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    threads = parser.parse_args().threads
    torch.set_num_threads(threads)
    if library() is None:
        raise SystemExit("the kernels cannot be compiled here")
    torch.manual_seed(0)
    weights = [torch.randn(COLUMNS, DEPTH) for _ in range(NUM_LAYERS)]
    products = {"gspo": linear, "torch": torch_linear}
    for rows in ROWS:
        x = torch.randn(rows, DEPTH)
        turns = [{name: milliseconds(product, x, weights) for name, product in products.items()} for _ in range(3)]
        best = {name: min(turn[name] for turn in turns) for name in products}
        alone = {name: is_the_same_alone(product, x, weights[0]) for name, product in products.items()}
        found = {f"{name}_ms": round(value, 3) for name, value in best.items()}
        ratio = round(best["torch"] / best["gspo"], 2)
        print(json.dumps({"rows": rows, "threads": threads, **found, "ratio": ratio, "alone": alone}), flush=True)


if __name__ == "__main__":
    main()
