"""The paper's asymmetry settings, by name.

Each preset is a set of arguments of :func:`~lightning_symmetry.asymmetry.asymmetrize`; arguments given beside a
preset go before it, and ``overrides`` are applied after its own. The layer names are those of
:mod:`lightning_symmetry.networks`.
"""

from __future__ import annotations

from typing import Any


def _resnet(times: int, kappa: float, stem: int) -> dict[str, Any]:
    overrides: dict[str, dict[str, Any]] = {"stem": {"n_fix": stem}}
    for stage, (convolution, skip) in enumerate(((36, 4), (54, 6), (72, 8)), start=1):
        overrides[f"stage{stage}.*.conv?"] = {"n_fix": convolution * times}
        if stage > 1:  # ResNet20's first stage keeps its shape and has no convolution on its skips
            overrides[f"stage{stage}.*.skip.*"] = {"n_fix": skip * times}
    overrides["head"] = {"n_fix": 8 * times}
    return {"method": "w", "kappa": kappa, "layout": "entries", "overrides": overrides}


def _mlp(n_fix: tuple[int, ...], kappa: tuple[float, ...]) -> dict[str, Any]:
    overrides = {
        f"linears.{layer}": {"n_fix": n, "kappa": k} for layer, (n, k) in enumerate(zip(n_fix, kappa, strict=True))
    }
    return {"method": "w", "overrides": overrides}


PRESETS: dict[str, dict[str, Any]] = {
    # Table 5: MLP of depth 4 and width 512 on MNIST.
    "mlp": _mlp((64, 64, 64, 256), (1.0, 1.0, 0.5, 0.25)),
    # Not from the paper: Table 5 carried over to the 64 inputs and width 256 of the digits' MLP.
    "mlp-digits": _mlp((16, 64, 64, 64), (1.0, 1.0, 0.5, 0.25)),
    # Table 6: ResNet20 of width 1 on CIFAR-10.
    "resnet20": _resnet(1, 2.0, 12),
    # Table 7: ResNet20 of width 8. As printed it fixes all 27 inputs of a 3-channel stem, which is refused; give
    # the stem a number of its own: overrides={"stem": {"n_fix": 12}}.
    "resnet20-w8": _resnet(3, 2.0, 27),
    # App. E.1.2: GNN on ogbn-arxiv.
    "gnn": {"method": "w", "n_fix": 6, "kappa": 0.5},
    # App. E.1.2: FiGLU of the GNN, almost linear at this scale.
    "gnn-sigma": {"method": "sigma", "scale": 0.01},
    # App. E.2: Bayesian MLP and ResNet20.
    "bayesian-mlp": {"method": "w", "n_fix": 8, "kappa": 0.5},
    "bayesian-resnet20": _resnet(1, 0.5, 12),
}
"""Name -> arguments of :func:`~lightning_symmetry.asymmetrize`.

Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), tables 5 to 7, App. E.1.2 and E.2.
"""
