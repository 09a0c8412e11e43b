"""Condition numbers and extreme eigenvalues of Fisher matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh
from torch import Tensor, nn
from tqdm.auto import tqdm

from lightning_symmetry.landscape.steps import Step
from lightning_symmetry.whitening.fisher_operator import Coefficients, FisherOperator, fisher_model
from lightning_symmetry.whitening.likelihoods import LikelihoodName

_SMALL = 64  # up to this size the matrix is formed: Lanczos needs room
_LANCZOS_VECTORS = 256  # kept at a time; with scipy's 20 the small eigenvalues, which lie close, do not converge
_LANCZOS_ENTRIES = 2**26  # in all, 512 MiB


class Spectrum(NamedTuple):
    """Extreme eigenvalues of a symmetric positive semi-definite matrix, without damping.

    Attributes:
        smallest: The smallest; where eigenvalues near 0 do not count, of those that do.
        largest: The largest.
        rank: Number of eigenvalues that are not near 0; None where the matrix was not formed.
    """

    smallest: float
    largest: float
    rank: int | None

    @classmethod
    def of(cls, values: Tensor, damped: bool, rank_tolerance: float) -> Spectrum:
        r"""Return what counts of all eigenvalues.

        Args:
            values: All eigenvalues, in ascending order. The largest must be positive, unless ``damped``.
            damped: Whether the condition number is to be damped. Then all count, those below 0 by rounding as 0.
            rank_tolerance: :math:`\tau`; eigenvalues up to :math:`\tau \lambda_{\max}` are near 0.
        """
        counted = values[values > rank_tolerance * values[-1]]
        smallest = max(values[0].item(), 0.0) if damped else counted[0].item()
        return cls(smallest, max(values[-1].item(), 0.0), len(counted))

    def condition(self, damping: float) -> float:
        """Return the condition number at a damping."""
        return (self.largest + damping) / (self.smallest + damping)


def condition_number(matrix: Tensor, damping: float = 0.0, rank_tolerance: float | None = None) -> float:
    r"""Return the condition number of a symmetric positive semi-definite matrix.

    .. math::
        \kappa = \frac{\lambda_{\max}}{\min\{\lambda_i : \lambda_i > \tau \lambda_{\max}\}}, \qquad
        \kappa_\delta = \frac{\lambda_{\max} + \delta}{\lambda_{\min} + \delta}

    Fisher matrices are singular: shifting all logits of a softmax changes nothing, and N samples of C classes give a
    rank of N (C - 1) at most. Without damping, eigenvalues up to :math:`\tau \lambda_{\max}` therefore count as 0 and
    are left out: the condition number is that of the matrix on its range. It hangs on the smallest eigenvalue that is
    kept; where the spectrum reaches down to :math:`\tau` without a gap, compare at a damping instead. With damping
    all eigenvalues count, those below 0 by rounding as 0, and :math:`\tau` is not used.

    Args:
        matrix: The matrix, of shape ``(D, D)``. Eigenvalues are computed in float64 on the CPU.
        damping: :math:`\delta`, added to all eigenvalues.
        rank_tolerance: :math:`\tau`. Default: D times the machine epsilon of the matrix's type.

    Returns:
        At least 1.

    Raises:
        ValueError: If the matrix is not square, finite, symmetric and positive semi-definite up to the square root of
            its type's machine epsilon, if it is 0 and there is no damping, or if an argument is out of range.

    Source: Natural Neural Networks (2015), section 4.1, figure 2c.
    """
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) == 0:
        raise ValueError(f"Expected a square matrix but got shape {tuple(matrix.shape)}.")
    _check_damping(damping)
    eps = torch.finfo(matrix.dtype).eps if matrix.is_floating_point() else torch.finfo(torch.float64).eps
    tolerance = len(matrix) * eps if rank_tolerance is None else rank_tolerance
    if not 0 <= tolerance < 1:
        raise ValueError(f"Expected `rank_tolerance` to be in [0, 1) but got {tolerance}.")
    matrix = matrix.detach().to("cpu", torch.float64)
    if not bool(torch.isfinite(matrix).all()):
        raise ValueError("The matrix has values that are not finite.")
    if (matrix - matrix.mT).abs().max() > math.sqrt(eps) * matrix.abs().max():
        raise ValueError("The matrix is not symmetric.")
    values = torch.linalg.eigvalsh((matrix + matrix.mT) / 2)
    smallest, largest = values[0].item(), values[-1].item()
    if smallest < -math.sqrt(eps) * values.abs().max():
        raise ValueError(f"The matrix is not positive semi-definite: its eigenvalues go from {smallest} to {largest}.")
    if largest <= 0 and damping == 0:
        raise ValueError("The matrix is 0: without damping it has no condition number.")
    return Spectrum.of(values, damping > 0, tolerance).condition(damping)


def extreme_eigenvalues(
    net: nn.Module,
    batch: Any,
    layers: Iterable[str] | None = None,
    *,
    damping: float = 0.0,
    likelihood: LikelihoodName = "categorical",
    samples: int | None = None,
    generator: torch.Generator | None = None,
    whitening: Mapping[str, Coefficients] | None = None,
    step: Step | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-4,
    max_products: int = 10_000,
) -> tuple[float, float]:
    r"""Return the smallest and the largest eigenvalue of :math:`F + \delta I` without forming the matrix.

    Lanczos iterations (scipy's ``eigsh``) on products of F with vectors (curvlinops). Both eigenvalues are exact to
    about ``tolerance`` times the largest, so their ratio is the condition number if the damping is well above that.
    Where the batch has too few predictions to give F full rank, the smallest is :math:`\delta` and is not computed.

    Args:
        net: The network. It is left as it is.
        batch: As for :func:`~lightning_symmetry.whitening.fisher.fisher_matrix`, like the other arguments.
        layers: Names or shell patterns of the layers. Default: all that hold parameters.
        damping: :math:`\delta`.
        likelihood: What the outputs mean.
        samples: Number of labels to sample for each prediction; None: the exact expectation.
        generator: Where the seed of the samples comes from.
        whitening: U and c by layer name.
        step: ``step(net, batch) -> (output, anything)``.
        dtype: Type to compute in.
        tolerance: Accuracy, relative to the largest eigenvalue.
        max_products: About how many products of F with a vector to take at most for each eigenvalue.

    Returns:
        The smallest and the largest eigenvalue, damping included.

    Raises:
        ValueError: As :func:`~lightning_symmetry.whitening.fisher.fisher_matrix`, or if the damping is negative.
        RuntimeError: If the iteration does not converge.
    """
    _check_damping(damping)
    with fisher_model(
        net,
        batch,
        layers,
        dtype,
        likelihood=likelihood,
        samples=samples,
        generator=generator,
        whitening=whitening,
        step=step,
    ) as model:
        operator = model.operator(model.parameters)
        if operator.size <= _SMALL:
            values = torch.linalg.eigvalsh(operator.dense(_SMALL, tqdm(disable=True)).double().cpu())
            return max(values[0].item(), 0.0) + damping, max(values[-1].item(), 0.0) + damping
        largest = _largest(operator, 1.0, 0.0, tolerance, max_products)
        smallest = 0.0
        if operator.rank_bound == operator.size and largest > 0:
            # The largest of largest - F: so the tolerance is relative to the largest eigenvalue, not to one near 0.
            smallest = largest - _largest(operator, -1.0, largest, tolerance, max_products)
    return max(smallest, 0.0) + damping, largest + damping


def _largest(operator: FisherOperator, sign: float, shift: float, tolerance: float, max_products: int) -> float:
    """Return the largest eigenvalue of ``sign * F + shift``."""

    def product(vector: np.ndarray) -> np.ndarray:
        column = torch.as_tensor(vector, dtype=operator.dtype, device=operator.device).reshape(-1, 1)
        image = (operator @ column).flatten().double().cpu().numpy()
        if not np.isfinite(image).all():
            raise ValueError("The Fisher matrix is not finite: derivatives of the network on the batch are not.")
        return sign * image + shift * vector.reshape(-1)

    start = np.random.default_rng(0).standard_normal(operator.size)
    if not product(start).any():
        return 0.0
    kept = min(_LANCZOS_VECTORS, _LANCZOS_ENTRIES // operator.size, max_products)
    vectors = min(operator.size, max(20, kept))
    restarts = max(1, max_products // vectors)
    linear = LinearOperator((operator.size, operator.size), matvec=product, dtype=np.float64)
    try:
        values = eigsh(
            linear, 1, which="LA", v0=start, ncv=vectors, maxiter=restarts, tol=tolerance, return_eigenvectors=False
        )
    except ArpackNoConvergence as error:
        raise RuntimeError(
            f"The eigenvalues did not converge in {max_products} products: raise `max_products` or `tolerance`, "
            f"which is {tolerance:g}."
        ) from error
    return float(values[0])


def _check_damping(damping: float) -> None:
    if not damping >= 0 or not math.isfinite(damping):
        raise ValueError(f"Expected `damping` to be finite and not negative but got {damping}.")
