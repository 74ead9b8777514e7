"""The configuration: typed schema, loading with origins, aliases of other systems' names, cross-field rules."""

from gspo.config.load import ResolvedConfig, load, resolve
from gspo.config.objective import Objective, objective_of
from gspo.config.problems import ConfigErrors, Problem
from gspo.config.schema import *  # noqa: F403
from gspo.config.schema import __all__ as _sections

__all__ = [
    "ConfigErrors",
    "Objective",
    "Problem",
    "ResolvedConfig",
    "load",
    "objective_of",
    "resolve",
    *_sections,
]
