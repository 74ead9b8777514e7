"""Ray's errors as errors that name the worker and the cause."""

from __future__ import annotations

import ray.exceptions

from gspo.processes import WorkerError
from gspo.rollout.workers.connection import WorkerDied


def root_cause(error: BaseException, worker: str) -> BaseException:
    """The error to raise in the controller: the worker's own exception, or WorkerDied.

    The worker's exception keeps its type and message, which decide the exit code. A note says where it was raised.
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
    """Ray's description of a death in one line, without its list of common causes."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    facts = [line for line in lines if line.split(":")[0] in ("pid", "ip", "node_ip")]
    reasons = [line for line in lines if "because" in line or "exit type" in line] or lines[:1]
    text = reasons[0].split(" Some common causes")[0] if reasons else type(error).__name__
    return f"{text} ({', '.join(facts)})" if facts else text
