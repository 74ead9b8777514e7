"""Functions that run inside Ray actors."""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.actor import ActorClass

from gspo.distributed.rank_stacks import StackAnswers
from gspo.distributed.ray.tensors import send_as_arrays
from gspo.processes import free_port, num_cores, portable_error

THREADS = "OMP_NUM_THREADS"


def plain_class(worker_class: Any) -> type:
    """The Python class of a worker class, `ray.remote` or not."""
    if isinstance(worker_class, ActorClass):
        made = worker_class.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]
        return getattr(made, "__ray_actor_class__", made)  # each call of `ray.remote` makes a new subclass of it
    return worker_class


def run(worker: Any, method: str, args: tuple[Any, ...]) -> Any:
    """In an actor: call a method of its worker. An error that cannot be pickled is replaced by one that can."""
    try:
        return worker.run(method, args)
    except Exception as error:
        raise portable_error(error) from None


def free_address(worker: Any) -> tuple[str, int]:
    """In an actor: its machine's address and a port that is free there now."""
    return ray.util.get_node_ip_address(), free_port("")


def answer_stacks(worker: Any, address: str, port: int, rank: int) -> None:
    """In an actor that has joined: answer requests for its stacks from now on, also during calls."""
    worker._stack_answers = StackAnswers(address, port, rank)


def enter_folder(folder: str) -> None:
    """Resolve relative paths as in the controller, where this machine has its working folder."""
    if os.path.isdir(folder):
        os.chdir(folder)


def prepare_rank(worker: Any, folder: str, num_threads: str | None, num_local: int) -> None:
    """In the actor of a trainer rank, before it joins: set working folder, tensor format and number of threads.

    Without `num_threads` each of the `num_local` ranks of a machine uses its share of the cores; Ray would set 1.
    """
    enter_folder(folder)
    send_as_arrays()
    os.environ[THREADS] = num_threads or str(max(1, num_cores() // num_local))
