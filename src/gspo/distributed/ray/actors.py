"""Small things about Ray actors that teams and connections share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.actor import ActorClass

from gspo import processes
from gspo.distributed.rank_stacks import StackAnswers
from gspo.distributed.ray.tensors import send_as_arrays
from gspo.processes import portable_error

THREADS = "OMP_NUM_THREADS"


def as_actor_class(worker_class: Any) -> Any:
    """A worker class as an actor class; one that is already `ray.remote(…)` is taken as it is."""
    return worker_class if isinstance(worker_class, ActorClass) else ray.remote(worker_class)


def plain_class(worker_class: Any) -> type:
    """The Python class behind a worker class, `ray.remote` or not."""
    if isinstance(worker_class, ActorClass):
        return worker_class.__ray_metadata__.modified_class  # pyright: ignore[reportAttributeAccessIssue]
    return worker_class


def run(worker: Any, method: str, args: tuple[Any, ...]) -> Any:
    """Run in an actor: a call of its worker, whose error can travel."""
    try:
        return worker.run(method, args)
    except Exception as error:
        raise portable_error(error) from None


def free_port(worker: Any) -> tuple[str, int]:
    """Run in an actor: its machine's address and a port that is free there now."""
    return ray.util.get_node_ip_address(), processes.free_port("")


def answer_stacks(worker: Any, address: str, port: int, rank: int) -> None:
    """Run in an actor that has joined the others: from now on it says what it does, beside what it is format_stacks to do."""
    worker._stack_answers = StackAnswers(address, port, rank)


def go_to(folder: str) -> None:
    """Make relative paths mean what they mean to the controller, where this machine has its folder."""
    if os.path.isdir(folder):
        os.chdir(folder)


def settle(worker: Any, folder: str, named: str | None, num_local: int) -> None:
    """Run in an actor that is to be a trainer rank, before it joins the others."""
    go_to(folder)
    send_as_arrays()
    share_cores(named, num_local)


def share_cores(named: str | None, num_local: int) -> None:
    """Use as many threads as the controller was format_stacks to, else a share of the machine; Ray would allow one."""
    os.environ[THREADS] = named or str(max(1, len(os.sched_getaffinity(0)) // num_local))


def local_numbers(process_on_nodes: Sequence[int]) -> list[int]:
    """Each process's number on its own machine, by rank."""
    return [i for count in process_on_nodes for i in range(count)]
