"""Planning: what a step would take on a cluster, predicted from a model's shape and measured constants; no torch."""

from gspo.models.shape import SHAPES, ModelShape, ShapeError, shape_of
from gspo.plan.constants import DEVICES, Device
from gspo.plan.predict import Prediction, predict
from gspo.plan.search import Plan, search
from gspo.plan.split import Split
from gspo.plan.workload import Workload, workload_of

__all__ = [
    "DEVICES",
    "SHAPES",
    "Device",
    "ModelShape",
    "Plan",
    "Prediction",
    "ShapeError",
    "Split",
    "Workload",
    "predict",
    "search",
    "shape_of",
    "workload_of",
]
