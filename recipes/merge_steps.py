"""The steps of a merge: average, repair, align, and measure each."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from shared import UsageError
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics.classification import MulticlassAccuracy

import lightning_symmetry as ls
from lightning_symmetry.landscape import NothingToRepairError
from lightning_symmetry.landscape.batches import to_device
from lightning_symmetry.permutation.activations import first_of_batch

if TYPE_CHECKING:
    from merge import Setting

REPAIRED = {"keep": "", "recompute": "recomputed batch norm", "repair": "REPAIR"}


class Ensemble(nn.Module):
    """Logarithm of the mean of the networks' probabilities."""

    def __init__(self, *nets: nn.Module) -> None:
        super().__init__()
        self.nets = nn.ModuleList(nets)

    def forward(self, *inputs: Any) -> Tensor:
        """Map inputs to log-probabilities."""
        return torch.stack([net(*inputs).softmax(1) for net in self.nets]).mean(0).clamp_min(1e-38).log()


def call(net: nn.Module, batch: Any, split: str = "test") -> tuple[Tensor, Tensor]:
    """Return output and target of a batch."""
    return (ls.graph_step(f"{split}_mask") if hasattr(batch, "edge_index") else ls.supervised_step)(net, batch)


class Merge:
    """The merge of two networks and what each step of it gives.

    Args:
        setting: The setting.
        a: The network to come close to.
        b: The network to permute.
        train: Training batches.
        test: Test batches.
    """

    def __init__(self, setting: Setting, a: nn.Module, b: nn.Module, train: list[Any], test: Iterable[Any]) -> None:
        self.setting, self.a, self.b, self.train, self.test = setting, a, b, train, test
        self.notes: list[str] = []
        batch_norm = any(isinstance(m, _BatchNorm) and m.track_running_stats for m in a.modules())
        self.mode = setting.batch_norm or ("recompute" if batch_norm else "repair")
        try:
            self.spec = ls.trace_permutations(b, first_of_batch(train[0]))
            self.networks = self._average(b)
        except ValueError as error:
            raise UsageError(f"The networks cannot be merged: {error}") from error
        self.alignment = self._align()
        if self.alignment is not None:
            aligned = self._average(self.alignment.network)
            self.networks.update({f"aligned {name}": net for name, net in aligned.items()})
        *_, self.merged = self.networks.values()

    def _average(self, b: nn.Module) -> dict[str, nn.Module]:
        """Return the average of a and b, and the repaired one, by name."""
        net = ls.interpolate(self.a, b, self.setting.alpha)
        if self.mode == "keep":
            return {"average": net}
        try:
            ends = (self.a, b) if self.mode == "repair" else None
            repaired = ls.repair(copy.deepcopy(net), self.train, ends, self.setting.alpha, step=call)
        except NothingToRepairError as error:
            if self.setting.batch_norm:
                raise
            self.notes.append(f"Merged without REPAIR. {error}")
            self.mode = "keep"
            return {"average": net}
        return {"average": net, f"average + {REPAIRED[self.mode]}": repaired}

    def _align(self) -> ls.Alignment | None:
        """Align b, by the method that gives the lower training loss; None if there is nothing to permute."""
        if not self.spec.groups:
            self.notes.append(f"Merged without alignment. {self.spec.why_nothing()}")
            return None
        best: dict[float, ls.Alignment] = {}
        methods = ["weights", "activations"] if self.setting.method == "both" else [self.setting.method]
        for method in methods:
            found = ls.align(
                self.b,
                to=self.a,
                method=method,
                example_input=first_of_batch(self.train[0]),
                dataloader=self.train,
                restarts=self.setting.restarts,
                generator=torch.Generator().manual_seed(self.setting.seed),
                spec=self.spec,
                progress=True,
            )
            self.notes.append(f"b {found}")
            if len(methods) == 1:
                return found
            *_, merged = self._average(found.network).values()
            best[self.measure(merged, "train")[0]] = found
        text = ", ".join(f"{loss:.4f} ({found.method})" for loss, found in best.items())
        self.notes.append(f"training loss when merged: {text}; kept: {best[min(best)].method}")
        return best[min(best)]

    @torch.no_grad()
    def measure(self, net: nn.Module, split: str = "test") -> tuple[float, float]:
        """Return mean loss and accuracy in percent."""
        loss = correct = count = 0
        for batch in self.train if split == "train" else self.test:
            output, target = call(net, to_device(batch, self.device), split)
            loss += nn.functional.cross_entropy(output, target, reduction="sum").item()
            correct += (output.argmax(1) == target).sum().item()
            count += len(target)
        if not count:
            raise UsageError(f"The {split} loader gave no samples, or not a second time.")
        return loss / count, 100 * correct / count

    @property
    def device(self) -> torch.device:
        """Where the networks are."""
        return next(self.a.parameters()).device

    def rows(self) -> dict[str, tuple[float, float]]:
        """Return test loss and accuracy of the networks and of their ensemble."""
        nets = {"a": self.a, "b": self.b, **self.networks, "ensemble of a and b": Ensemble(self.a, self.b)}
        return {name: self.measure(net) for name, net in nets.items()}

    def paths(self) -> dict[str, ls.PathResult]:
        """Return the test loss on the way from a to b, as b is, aligned, and with each point repaired."""
        b = {"unaligned": (self.b, "keep")}
        if self.alignment is not None:
            b["aligned"] = (self.alignment.network, "keep")
        if self.mode != "keep":
            name, (net, _) = list(b.items())[-1]
            b[f"{name} + {REPAIRED[self.mode]}"] = (net, self.mode)
        accuracy = {"accuracy": MulticlassAccuracy(num_classes=None, average="micro")}
        return {
            name: ls.evaluate_path(
                self.a,
                net,
                self.test,
                self.setting.num_points,
                metrics=accuracy,
                batch_norm=mode,
                train_loader=self.train,
                step=call,
            )
            for name, (net, mode) in b.items()
        }


def draw(merge: Merge, rows: dict[str, tuple[float, float]], paths: dict[str, ls.PathResult], title: str) -> Figure:
    """Draw loss and accuracy along the paths, with the ensemble."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for name, path in paths.items():
        axes[0].plot(path.alphas, path.loss, label=name)
        axes[1].plot(path.alphas, 100 * path.metrics["accuracy"], label=name)
    best = list(rows.values())
    for index, (ax, what) in enumerate(zip(axes, ("test loss", "test accuracy %"), strict=True)):
        ax.axhline(best[-1][index], color="grey", linestyle=":", label="ensemble")
        ax.plot(merge.setting.alpha, best[-2][index], "k*", markersize=10, label="merged network")
        ax.set(xlabel=r"$\alpha$: from network a (0) to network b (1)", ylabel=what, title=title)
    axes[0].set_ylim(bottom=0)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(paths) + 2)
    return figure
