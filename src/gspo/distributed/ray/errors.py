"""What goes wrong on a cluster, as errors that name the worker and the cause."""

from __future__ import annotations

import ray.exceptions

from gspo.distributed.backend import ClusterError
from gspo.processes import WorkerError
from gspo.rollout.workers.connection import WorkerDied

__all__ = ["ClusterError", "WorkerDied", "root_cause"]


def root_cause(error: BaseException, worker: str) -> BaseException:
    """The error to raise in the controller: the worker's own exception, or that the worker died.

    An exception of the worker keeps its type and message, so that exit codes hold; where it was raised is a note.
    """
    if isinstance(error, ray.exceptions.RayTaskError):
        cause = getattr(error, "cause", None)
        if isinstance(cause, ray.exceptions.RayError):
            return root_cause(cause, worker)
        if not isinstance(cause, Exception):
            return WorkerError(f"{worker}: {error}")
        if not getattr(cause, "__notes__", None):
            cause.add_note(f"raised in {worker}:\n{error}")
        return cause
    if isinstance(error, ray.exceptions.ActorDiedError):
        return WorkerDied(f"{worker} died: {_reason(error)}")
    if isinstance(error, ray.exceptions.RayError):
        return WorkerDied(f"{worker} cannot be reached ({type(error).__name__}): {_reason(error)}")
    return error


def _reason(error: BaseException) -> str:
    """Ray's account of a death in one line, without its list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    facts = [line for line in lines if line.split(":")[0] in ("pid", "ip", "node_ip")]
    format_stacks = [line for line in lines if "because" in line or "exit type" in line] or lines[:1]
    text = format_stacks[0].split(" Some common causes")[0] if format_stacks else type(error).__name__
    return f"{text} ({', '.join(facts)})" if facts else text
