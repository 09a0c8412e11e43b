"""Measure the loss along the segment between two networks."""

from lightning_symmetry.landscape.measures import (
    chord,
    global_convexity,
    local_convexity,
    max_barrier,
    max_increase,
    midpoint_barrier,
)
from lightning_symmetry.landscape.path import evaluate_path, graph_step, supervised_step
from lightning_symmetry.landscape.result import PathResult
from lightning_symmetry.landscape.segment import Segment, interpolate, parameter_distance

__all__ = [
    "PathResult",
    "Segment",
    "chord",
    "evaluate_path",
    "global_convexity",
    "graph_step",
    "interpolate",
    "local_convexity",
    "max_barrier",
    "max_increase",
    "midpoint_barrier",
    "parameter_distance",
    "supervised_step",
]
