"""Networks whose weights metanetworks read in tests, and the metanetworks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_symmetry import MLP, ResNet, asymmetrize, trace_permutations
from lightning_symmetry.metanets import DMC, FlatMLP, GraphMetanetwork, StatNN, WeightDeepSets, WeightLayout


class SmallCNN(nn.Module):
    """Convolutions with batch normalisation, a depthwise one, and an image that is flattened."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.depthwise = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        self.conv = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.hidden = nn.Linear(6 * 9, 5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.depthwise(self.norm(self.stem(x)).relu())).relu()
        return self.head(self.hidden(x.flatten(1)).tanh())


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 2))


NETWORKS = {
    "mlp": lambda: (MLP(5, (4, 3), 2), torch.zeros(2, 5)),
    "cnn with batch norm": lambda: (SmallCNN(), torch.zeros(2, 1, 6, 6)),
    "resnet with layer norm": lambda: (ResNet(1, "layer", num_classes=3), torch.zeros(1, 3, 8, 8)),
    "resnet with batch norm": lambda: (ResNet(1, "batch", num_classes=3), torch.zeros(1, 3, 8, 8)),
    "attention": lambda: (attention(), torch.zeros(2, 4, 3)),
}

INVARIANT = {
    "deep sets": lambda layout, spec: WeightDeepSets(layout, 8, (8,)),
    "deep sets of one set": lambda layout, spec: WeightDeepSets(layout, 8, (8,), per_tensor=False),
    "statistics": lambda layout, spec: StatNN(layout, (8,)),
    "graph": lambda layout, spec: GraphMetanetwork(layout, spec, hidden=8, layers=2),
}

METANETS = {
    "flat": lambda layout, spec: FlatMLP(layout, (8,)),
    "convolutions": lambda layout, spec: DMC(layout, (2, 4), hidden=8),
    **INVARIANT,
}


def asymmetric() -> tuple[nn.Module, Tensor]:
    return asymmetrize(MLP(5, (4, 4), 2), "w", n_fix=2, kappa=1.0), torch.zeros(2, 5)


def randomise(net: nn.Module, seed: int) -> nn.Module:
    """Give all parameters and statistics values of their own; the network is only read, never run."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    return net


def setting(name: str):
    """Return network, permutation symmetries and layout."""
    net, x = asymmetric() if name == "asymmetric" else NETWORKS[name]()
    return net, trace_permutations(net, x), WeightLayout.of(net)
