"""Find the permutation symmetries of networks, certify that there are none, and align networks with them."""

from lightning_symmetry.permutation.activations import match_activations
from lightning_symmetry.permutation.align import Alignment, align
from lightning_symmetry.permutation.equivalence import NotEquivalentError, check_equivalence
from lightning_symmetry.permutation.spec import Group, PermutationSpec, Place, trace_permutations
from lightning_symmetry.permutation.trace import DynamicNetworkError
from lightning_symmetry.permutation.weights import Match, match_weights

__all__ = [
    "Alignment",
    "DynamicNetworkError",
    "Group",
    "Match",
    "NotEquivalentError",
    "PermutationSpec",
    "Place",
    "align",
    "check_equivalence",
    "match_activations",
    "match_weights",
    "trace_permutations",
]
