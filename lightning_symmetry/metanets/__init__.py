"""Networks that read networks: zoos of trained networks, and metanetworks on their weights."""

from lightning_symmetry.metanets.classifiers import zoo_classifier
from lightning_symmetry.metanets.deep_sets import WeightDeepSets
from lightning_symmetry.metanets.dmc import DMC
from lightning_symmetry.metanets.flat_mlp import FlatMLP
from lightning_symmetry.metanets.graph_network import GraphMetanetwork
from lightning_symmetry.metanets.hyperparameters import sample_hyperparameters
from lightning_symmetry.metanets.metanetwork import Metanetwork
from lightning_symmetry.metanets.population import PopulationResult, evaluate_population, train_population
from lightning_symmetry.metanets.population_augment import PopulationAugmentation
from lightning_symmetry.metanets.population_settings import PopulationSettings
from lightning_symmetry.metanets.stat_nn import StatNN, weight_statistics
from lightning_symmetry.metanets.weight_graph import WeightGraph, network_graph, weight_graph
from lightning_symmetry.metanets.weight_layout import WeightLayout
from lightning_symmetry.metanets.zoo import Zoo
from lightning_symmetry.metanets.zoo_factory import seeded_network
from lightning_symmetry.metanets.zoo_features import zoo_statistics
from lightning_symmetry.metanets.zoo_files import ZooError
from lightning_symmetry.metanets.zoo_layout import ZooEntry, ZooLayout
from lightning_symmetry.metanets.zoo_merge import merge_zoos
from lightning_symmetry.metanets.zoo_shards import merge_shards
from lightning_symmetry.metanets.zoo_training import ZooTrainer, train_zoo
from lightning_symmetry.metanets.zoo_writer import ZooWriter

__all__ = [
    "DMC",
    "FlatMLP",
    "GraphMetanetwork",
    "Metanetwork",
    "PopulationAugmentation",
    "PopulationResult",
    "PopulationSettings",
    "StatNN",
    "WeightDeepSets",
    "WeightGraph",
    "WeightLayout",
    "Zoo",
    "ZooEntry",
    "ZooError",
    "ZooLayout",
    "ZooTrainer",
    "ZooWriter",
    "evaluate_population",
    "merge_shards",
    "merge_zoos",
    "network_graph",
    "sample_hyperparameters",
    "seeded_network",
    "train_population",
    "train_zoo",
    "weight_graph",
    "weight_statistics",
    "zoo_classifier",
    "zoo_statistics",
]
