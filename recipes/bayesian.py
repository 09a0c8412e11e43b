"""Table 2 and figure 4 of The Empirical Impact of Neural Parameter Symmetries: Bayesian neural networks.

Gaussian posteriors of diagonal plus low-rank covariance over the weights of standard and of W-asymmetric networks, by
variational inference; beside them mean-field posteriors, posteriors over the last layer only, deterministic networks
and deep ensembles of as many parameters as a posterior of rank 4. All train with Adam, the same batches and epochs, and
all of a seed begin with the same weights. Finished trainings lie in the folder of the results and are not repeated.

Test images stand in for validation half way, and nothing is chosen by them. Out of distribution are the test images
with their pixels in a random order, one for each image and the same in all trainings.

Expected on the default (handwritten digits, width 128, seeds 0 to 2, 300 CPU seconds, half of that on 2 free cores):
standard perceptrons of depth 16 hardly train with a posterior of rank 4, to 20, 45 and 20 % test accuracy and a mean
training loss of 1.8; W-asymmetric ones do, to 88 to 96 % and 0.33. Deterministic, mean-field and last-layer networks of
depth 16 train in both kinds, to 92 to 95 %, and ensembles are best, 97 to 98 %. Of depth 8 the variational ones have
96 %, and a training loss of 0.18 standard and 0.10 W-asymmetric.

    python recipes/bayesian.py
    python recipes/bayesian.py --config recipes/configs/mnist_bayesian_mlp.yaml --data_dir DIR
    python recipes/bayesian.py --config recipes/configs/cifar10_bayesian_mlp.yaml --data_dir DIR
    python recipes/bayesian.py --config recipes/configs/cifar10_bayesian_resnet.yaml --data_dir DIR
    python recipes/bayesian.py --config recipes/configs/cifar100_bayesian_resnet.yaml --data_dir DIR
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

from bayesian_results import METHODS, report
from bayesian_training import Cell, Kind, Method, Network, check_cells, ensemble, make_data, run
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from shared import UsageError, check_batch_size, quiet, run_jobs, run_script, worker_count


@dataclass
class Setting:
    """Train each network in each kind with each method, and print and draw how they fit and how sure they are.

    Args:
        networks: Networks: perceptrons of 8 or 16 hidden layers with LayerNorm and ReLU, residual networks of 20 or
            110 layers.
        kinds: Standard networks, and W-asymmetric ones with the paper's constants; on CIFAR-100 without any in the last
            layer.
        methods: A posterior of diagonal plus low-rank covariance over all weights ("variational"); one of a learned
            diagonal over all ("mean_field"), which begins with the same variance; the first one over the last layer
            only ("last_layer"), the others being deterministic; no posterior ("deterministic"); and the averaged
            probabilities of several such networks ("ensemble").
        baseline_networks: Those of the networks that are trained with other methods than "variational" too; default:
            the last one.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation, order of the data and noise.
        asymmetry_seed: Seed of masks and constants, the same for all trainings.
        ensembles: Number of ensembles. Their members are deterministic trainings with the seeds from ``seed`` on, each
            in one ensemble; those of the method "deterministic" are taken where they are the same.
        members: Networks in an ensemble; 5 have as many parameters as a posterior of rank 4 with a constant diagonal.
        data: Data set.
        data_dir: Folder of data sets that are not embedded.
        mlp_width: Width of the perceptrons' hidden layers.
        resnet_width: Multiplier of the residual networks' channels.
        norm: Normalisation in the residual networks.
        epochs: Epochs of each training.
        batch_size: Batch size, of all devices together.
        learning_rate: Learning rate of Adam.
        rank: Rank of the covariance beside its diagonal.
        log_variance: Logarithm of the diagonal's variance; of a learned one at the beginning.
        prior: Variance of the prior: a number, or "fan_in", "fan_in:100", "optimal".
        mode: How outputs are sampled, see :class:`~lightning_symmetry.variational.VariationalLayer`.
        temperature: Weight of the divergence. Below 1 the posterior is colder than that of the training images; with
            augmentation that counts as m times the images it is 1/m.
        num_samples_predict: Samples that are averaged in a test.
        devices: Devices of each training; more than one runs the trainings one after the other.
        precision: Precision of the Trainer.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for TensorBoard logs, weights, results and the figure.
    """

    networks: list[Network] = field(default_factory=lambda: ["mlp8", "mlp16"])
    kinds: list[Kind] = field(default_factory=lambda: ["standard", "w"])
    methods: list[Method] = field(default_factory=lambda: list(METHODS))
    baseline_networks: list[Network] | None = None
    seeds: int = 3
    seed: int = 0
    asymmetry_seed: int = 0
    ensembles: int = 1
    members: int = 5
    data: Literal["digits", "mnist", "cifar10", "cifar100"] = "digits"
    data_dir: str = "data"
    mlp_width: int = 128
    resnet_width: int = 1
    norm: Literal["layer", "batch"] = "layer"
    epochs: int = 10
    batch_size: int = 50
    learning_rate: float = 5e-4
    rank: int = 4
    log_variance: float = -10.0
    prior: float | str = "fan_in:100"
    mode: Literal["local", "shared", "weight"] = "local"
    temperature: float = 1.0
    num_samples_predict: int = 25
    devices: int = 1
    precision: str = "32-true"
    workers: int | None = None
    out_dir: str = "runs/bayesian"


def cells(setting: Setting) -> list[Cell]:
    """Return the rows of the table."""
    baselines = setting.networks[-1:] if setting.baseline_networks is None else setting.baseline_networks
    found = dict.fromkeys(Cell(*each) for each in product(setting.networks, setting.kinds, setting.methods))
    return [cell for cell in found if cell.method == "variational" or cell.network in baselines]


def trainings(setting: Setting, rows: list[Cell]) -> list[tuple[Cell, int]]:
    """Return what is trained for the rows of the table, without repetitions: cells and seeds."""
    found = []
    for cell in rows:
        seeds = range(setting.seed, setting.seed + setting.seeds)
        if cell.method == "ensemble":
            seeds = range(setting.seed, setting.seed + setting.ensembles * setting.members)
            cell = Cell(cell.network, cell.kind, "deterministic")
        found += [(cell, seed) for seed in seeds]
    return list(dict.fromkeys(found))


def collect(setting: Setting, rows: list[Cell], trained: dict[tuple[Cell, int], dict[str, Any]]) -> list[Any]:
    """Return the results of the rows of the table: of each training, and of each ensemble."""
    results = []
    for cell in rows:
        if cell.method != "ensemble":
            results += [trained[cell, seed] for seed in range(setting.seed, setting.seed + setting.seeds)]
            continue
        member = Cell(cell.network, cell.kind, "deterministic")
        for first in range(setting.seed, setting.seed + setting.ensembles * setting.members, setting.members):
            seeds = range(first, first + setting.members)
            results.append(ensemble(setting, cell, seeds, [trained[member, seed] for seed in seeds]))
    return results


def check(setting: Setting, rows: list[Cell]) -> None:
    """Refuse settings of which nothing comes.

    Raises:
        UsageError: If there is nothing to train, or something that cannot be.
    """
    check_batch_size(setting)
    if not rows or min(setting.seeds, setting.epochs) < 1:
        raise UsageError("There is nothing to train: give at least one of networks, kinds, methods, seeds and epochs.")
    if "ensemble" in setting.methods and (setting.members < 2 or setting.ensembles < 1):
        got = f"{setting.ensembles} and {setting.members}"
        raise UsageError(f"There are at least 1 of `ensembles` and 2 of `members` each, but got {got}.")


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all rows."""
    quiet()
    rows = cells(setting)
    check(setting, rows)
    try:
        data = make_data(setting)
        data.prepare_data()
    except (ValueError, OSError, RuntimeError) as error:
        raise UsageError(str(error)) from None
    check_cells(setting, rows, data)
    todo = trainings(setting, rows)
    jobs = [{"setting": setting, "cell": cell, "seed": seed} for cell, seed in todo]
    workers = min(worker_count(setting.workers, setting.devices), len(jobs))
    label = f"{len(jobs)} networks on {setting.data}"
    found = run_jobs(run, jobs, len(jobs) * setting.epochs, workers, label)
    results = []
    if rank_zero_only.rank == 0:  # of several devices' processes
        results = collect(setting, rows, dict(zip(todo, found, strict=True)))
        report(setting, results)
    return results


if __name__ == "__main__":
    run_script(main, Setting)
