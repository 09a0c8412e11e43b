"""Shared tools: the contract of a reparametrised layer, finding and replacing layers, reports."""

from lightning_symmetry.surgery.contract import (
    CONSTANT_BUFFERS,
    HasConstants,
    ReparametrizedLayer,
    check_constants,
    constants_of,
)
from lightning_symmetry.surgery.convertible import (
    OTHER_MAPS,
    has_hooks,
    is_graph_linear,
    is_plain_but_for_constants,
    why_not_convertible,
    why_not_decomposable,
)
from lightning_symmetry.surgery.replace import (
    match_patterns,
    module_names,
    plain_copy,
    replace_modules,
    settings_for,
    tied_parameters,
    uncompiled,
    why_not_callable,
)
from lightning_symmetry.surgery.report import ConversionReport, ReportRow
from lightning_symmetry.surgery.run import call, device_of, evaluating, example_of, without_attention_fast_path

__all__ = [
    "CONSTANT_BUFFERS",
    "OTHER_MAPS",
    "ConversionReport",
    "HasConstants",
    "ReparametrizedLayer",
    "ReportRow",
    "call",
    "check_constants",
    "constants_of",
    "device_of",
    "evaluating",
    "example_of",
    "has_hooks",
    "is_graph_linear",
    "is_plain_but_for_constants",
    "match_patterns",
    "module_names",
    "plain_copy",
    "replace_modules",
    "settings_for",
    "tied_parameters",
    "uncompiled",
    "why_not_callable",
    "why_not_convertible",
    "why_not_decomposable",
    "without_attention_fast_path",
]
