"""Find the permutation symmetries of networks, certify that there are none, and align networks with them."""

from lightning_symmetry.permutation.activations import match_activations
from lightning_symmetry.permutation.align import Alignment, align
from lightning_symmetry.permutation.effective import EffectiveAsymmetry, effective_asymmetry
from lightning_symmetry.permutation.equivalence import NotEquivalentError, check_equivalence
from lightning_symmetry.permutation.rescaling import Rescaling
from lightning_symmetry.permutation.spec import Group, PermutationSpec, Place, trace_permutations
from lightning_symmetry.permutation.symmetries import GroupSymmetry, SymmetryReport, symmetries
from lightning_symmetry.permutation.trace import DynamicNetworkError
from lightning_symmetry.permutation.weights import Match, match_weights

__all__ = [
    "Alignment",
    "DynamicNetworkError",
    "EffectiveAsymmetry",
    "Group",
    "GroupSymmetry",
    "Match",
    "NotEquivalentError",
    "PermutationSpec",
    "Place",
    "Rescaling",
    "SymmetryReport",
    "align",
    "check_equivalence",
    "effective_asymmetry",
    "match_activations",
    "match_weights",
    "symmetries",
    "trace_permutations",
]
