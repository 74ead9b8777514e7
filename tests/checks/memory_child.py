"""Trains with the config words in the first argument and prints the peak memory of this process and of a GPU."""

from __future__ import annotations

import json
import sys

import torch

from gspo.build.device import peak_memory
from gspo.config import load
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.support.small_run import even_first_byte

if __name__ == "__main__":
    words = json.loads(sys.argv[1])
    Trainer(load(None, words), reward_fn=even_first_byte, console=Console(enabled=False)).fit()
    print(json.dumps({"peak": peak_memory(), "reserved": torch.cuda.max_memory_reserved()}))
