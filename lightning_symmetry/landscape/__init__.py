"""Measure the loss along the segment between two networks."""

from lightning_symmetry.landscape.measures import (
    chord,
    global_convexity,
    local_convexity,
    max_barrier,
    max_increase,
    midpoint_barrier,
)
from lightning_symmetry.landscape.path import evaluate_path
from lightning_symmetry.landscape.population import evaluate_paths
from lightning_symmetry.landscape.repair import NothingToRepairError, repair
from lightning_symmetry.landscape.result import PathResult
from lightning_symmetry.landscape.segment import Segment, interpolate, parameter_distance
from lightning_symmetry.landscape.statistics import KindStatistics, PathStatistics, path_statistics
from lightning_symmetry.landscape.steps import graph_step, supervised_step

__all__ = [
    "KindStatistics",
    "NothingToRepairError",
    "PathResult",
    "PathStatistics",
    "Segment",
    "chord",
    "evaluate_path",
    "evaluate_paths",
    "global_convexity",
    "graph_step",
    "interpolate",
    "local_convexity",
    "max_barrier",
    "max_increase",
    "midpoint_barrier",
    "parameter_distance",
    "path_statistics",
    "repair",
    "supervised_step",
]
