"""The papers' reference networks."""

from lightning_symmetry.networks.autoencoder import Autoencoder
from lightning_symmetry.networks.convnet import ConvNet
from lightning_symmetry.networks.gnn import GNN
from lightning_symmetry.networks.mlp import MLP
from lightning_symmetry.networks.norm import ChannelNorm
from lightning_symmetry.networks.resnet import ResidualBlock, ResNet, ResNet20, ResNet110
from lightning_symmetry.networks.transformer import (
    CausalAttention,
    TransformerBlock,
    TransformerLM,
    token_cross_entropy,
)
from lightning_symmetry.networks.vgg import VGG
from lightning_symmetry.networks.wide_resnet import WideBlock, WideResNet

__all__ = [
    "GNN",
    "MLP",
    "VGG",
    "Autoencoder",
    "CausalAttention",
    "ChannelNorm",
    "ConvNet",
    "ResNet",
    "ResNet20",
    "ResNet110",
    "ResidualBlock",
    "TransformerBlock",
    "TransformerLM",
    "WideBlock",
    "WideResNet",
    "token_cross_entropy",
]
