"""The recipe merges networks of the user's own, in both formats, and says what is wrong where it cannot."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from recipe_scripts import refusal, run_recipe
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from lightning_symmetry import DigitsData

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))  # recipes are scripts and import each other by name

import merge as recipe  # noqa: E402 (found through the line above)
from merge_checkpoint import Checkpoint  # noqa: E402
from shared import UsageError  # noqa: E402

OWN_MODULE = """
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning_symmetry as ls

def mlp(width=96):
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )

def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, bias=False), nn.BatchNorm2d(12), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 10)
    )

def asymmetric(seed=0):
    return ls.asymmetrize(mlp(), kappa=1.0, n_fix=8, seed=seed)

class Dynamic(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        hidden = self.first(x.flatten(1))
        return self.second(hidden if hidden.sum() > 0 else -hidden)

class Own(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.model = mlp(width)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, index):
        self.seen += 1
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 3e-3)

def loaders(count):
    data = ls.DigitsData()
    data.setup()
    train, test = ([torch.cat(part) for part in zip(*data.eval_dataloader(split))] for split in ("train", "test"))
    return DataLoader(TensorDataset(*(part[:count] for part in train)), 100, shuffle=True), DataLoader(
        TensorDataset(*test), 100
    )

NUMBER = 3
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A folder with a user's module and checkpoints of two trained networks, as a Trainer saves them."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_networks.py").write_text(OWN_MODULE)
    sys.path.insert(0, str(folder))
    import own_networks

    for seed, name in enumerate("ab"):
        pl.seed_everything(seed, verbose=False)
        module = own_networks.Own(96)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = pl.Trainer(
            max_epochs=25, accelerator="cpu", enable_checkpointing=False, default_root_dir=folder, **quiet
        )
        trainer.fit(module, DigitsData(64))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        torch.save(module.model.state_dict(), folder / f"{name}.pt")
    yield SimpleNamespace(folder=folder, module=own_networks)
    sys.path.remove(str(folder))


def table_of(printed: str) -> dict[str, list[str]]:
    """Return the rows of all printed tables."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if "| " in line]
    return {row[0]: row[1:] for row in rows}


def test_loss_of(net: Callable[[Any], Any]) -> float:
    """Return the mean loss on the test images."""
    data = DigitsData()
    data.setup()
    images, labels = (torch.cat(part) for part in zip(*data.test_dataloader(), strict=True))
    with torch.no_grad():
        return F.cross_entropy(net(images), labels).item()


test_loss_of.__test__ = False


@pytest.fixture(scope="module")
def lightning_run(own: SimpleNamespace) -> SimpleNamespace:
    arguments = ["--net=own_networks:mlp", "--net_args={width: 96}", "--a=a.ckpt", "--b=b.ckpt"]
    done = run_recipe("merge", *arguments, cwd=own.folder)
    assert done.returncode == 0, done.stderr
    return SimpleNamespace(printed=done.stdout, table=table_of(done.stdout), out=own.folder / "runs" / "merge")


def test_merging_own_lightning_checkpoints_lowers_the_barrier_to_a_third(lightning_run: SimpleNamespace) -> None:
    unaligned, aligned = (float(lightning_run.table[name][0]) for name in ("unaligned", "aligned + REPAIR"))
    assert unaligned > 0.1
    assert aligned <= unaligned / 3
    accuracy = {
        name: float(row[1])
        for name, row in lightning_run.table.items()
        if "barrier" not in row[1] and "%" not in row[1]
    }
    assert min(accuracy["a"], accuracy["b"]) > 95
    assert accuracy["aligned average + REPAIR"] > 95
    names = ["a", "b", "average", "average + REPAIR", "aligned average", "aligned average + REPAIR"]
    assert [name for name in lightning_run.table if name in names] == names
    assert "ensemble of a and b" in lightning_run.table


def test_merged_checkpoint_loads_as_a_did_and_has_the_loss_of_the_table(
    own: SimpleNamespace, lightning_run: SimpleNamespace
) -> None:
    first = own.module.Own.load_from_checkpoint(own.folder / "a.ckpt").eval()
    merged = own.module.Own.load_from_checkpoint(lightning_run.out / "merged.ckpt").eval()
    for net, row in ((first, "a"), (merged, "aligned average + REPAIR")):
        assert test_loss_of(net.model) == pytest.approx(float(lightning_run.table[row][0]), abs=6e-5)
    assert merged.seen == first.seen  # what is not the network's is a's
    before, after = (
        torch.load(folder / name, weights_only=True)
        for folder, name in ((own.folder, "a.ckpt"), (lightning_run.out, "merged.ckpt"))
    )
    assert list(before["state_dict"]) == list(after["state_dict"])
    assert before.keys() - after.keys() == {"optimizer_states", "lr_schedulers", "callbacks"}


def test_reports_the_alignment_and_writes_figure_symmetries_and_logs(lightning_run: SimpleNamespace) -> None:
    assert re.search(r"b aligned by weights: objective \S+ -> \S+ in .* units of 2 groups moved", lightning_run.printed)
    assert "training loss when merged" in lightning_run.printed
    assert "2 permutation groups" in (lightning_run.out / "symmetries.txt").read_text()
    assert (lightning_run.out / "merge.png").stat().st_size > 10_000
    events = EventAccumulator(str(lightning_run.out / "summary")).Reload()
    assert "merge" in events.Tags()["images"]
    assert "table/text_summary" in events.Tags()["tensors"]
    saved = json.loads((lightning_run.out / "results.json").read_text())
    assert len(saved["paths"]["unaligned"]["loss"]) == 25
    assert saved["setting"]["net"] == "own_networks:mlp"


@pytest.fixture
def at_home(own: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return the recipe as a function, run in the user's folder."""
    monkeypatch.chdir(own.folder)
    small = {"a": "a.pt", "b": "b.pt", "net": "own_networks:mlp", "num_points": 3, "out_dir": str(tmp_path)}
    return lambda **values: recipe.main(recipe.Setting(**{**small, **values}))


def test_plain_state_dicts_and_own_loaders(
    own: SimpleNamespace, at_home: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    found = at_home(
        method="activations",
        data="own_networks:loaders",
        data_args={"count": 500},
        out=str(tmp_path / "here" / "m.pt"),
        alpha=0.4,
    )
    state = torch.load(tmp_path / "here" / "m.pt", weights_only=True)
    net = own.module.mlp()
    net.load_state_dict(state)
    assert test_loss_of(net) == pytest.approx(found["rows"]["aligned average + REPAIR"][0], rel=1e-5)
    assert found["rows"]["aligned average"] != found["rows"]["aligned average + REPAIR"]
    assert len(found["notes"]) == 1 and "aligned by activations" in found["notes"][0]


def test_keep_writes_the_aligned_average_as_it_is(
    at_home: Callable[..., dict[str, Any]], own: SimpleNamespace, tmp_path: Path
) -> None:
    found = at_home(method="weights", batch_norm="keep")
    assert list(found["rows"]) == ["a", "b", "average", "aligned average", "ensemble of a and b"]
    net = own.module.mlp()
    net.load_state_dict(torch.load(tmp_path / "merged.pt", weights_only=True))
    assert test_loss_of(net) == pytest.approx(found["rows"]["aligned average"][0], rel=1e-5)


def test_batch_norm_statistics_are_recomputed_by_default(
    own: SimpleNamespace, at_home: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    for seed, name in enumerate(("a", "b")):
        torch.manual_seed(seed)
        torch.save(own.module.cnn().state_dict(), tmp_path / f"{name}.pth")
    found = at_home(net="own_networks:cnn", a=str(tmp_path / "a.pth"), b=str(tmp_path / "b.pth"))
    assert "aligned average + recomputed batch norm" in found["rows"]
    state = torch.load(tmp_path / "merged.pth", weights_only=True)
    assert state["1.running_mean"].abs().max() > 0  # where untrained networks have 0
    assert state["1.num_batches_tracked"].dtype == torch.int64


def test_asymmetric_networks_are_merged_as_they_are(
    own: SimpleNamespace, at_home: Callable[..., dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate("abc"):
        torch.manual_seed(seed)
        torch.save(own.module.asymmetric(seed // 2).state_dict(), tmp_path / f"{name}.pt")
    a, b, other = (str(tmp_path / f"{name}.pt") for name in "abc")
    found = at_home(net="own_networks:asymmetric", a=a, b=b)
    assert "Merged without alignment. Nothing can be permuted" in capsys.readouterr().out
    assert list(found["rows"]) == ["a", "b", "average", "ensemble of a and b"]
    assert list(found["paths"]) == ["unaligned"]
    with pytest.raises(UsageError, match="cannot be merged: The networks have different masks"):
        at_home(net="own_networks:asymmetric", a=a, b=other)


ERRORS = {
    "no separator": ({"net": "own_networks"}, r"Expected `net` to be 'package.module:callable' but got 'own_networks'"),
    "no module": ({"net": "own_nets:mlp"}, r"There is no module 'own_nets' for `net`"),
    "no callable": ({"net": "own_networks:vgg"}, r"no callable 'vgg' for `net`; it has Data.*mlp"),
    "not callable": ({"net": "own_networks:NUMBER"}, r"no callable 'NUMBER'"),
    "no network": ({"net": "own_networks:loaders", "net_args": {"count": 10}}, r"to return a torch.nn.Module but got"),
    "arguments": ({"net_args": {"depth": 3}}, r"cannot be called with \{'depth': 3\}: .*depth"),
    "shapes": ({"net_args": {"width": 8}}, r"does not match a.pt: shapes differ: 1.weight \(\(8, 64\) in the network"),
    "other network": ({"net": "own_networks:cnn"}, r"does not match a.pt: the file lacks 0.weight, .*; the network"),
    "no file": ({"a": "c.pt"}, r"There is no file c.pt"),
    "no checkpoint": ({"a": "numbers.pt"}, r"neither a Lightning checkpoint .* nor a state dict"),
    "not of torch": ({"a": "own_networks.py"}, r"own_networks.py does not hold tensors"),
    "objects": ({"a": "objects.pt"}, r"objects.pt does not hold tensors .*--weights_only false.*Sequential"),
    "architectures": ({"b": "other.pt"}, r"does not match other.pt: shapes differ: .*The network does match a.pt"),
    "two networks": ({"a": "two.pt"}, r"holds several networks .* choose one by `--prefix`, from \['ema.', 'net.'\]"),
    "two arguments": ({"b": None}, r"Give all of `--net`, `--a` and `--b`"),
    "data": ({"data": "nist"}, r"There is no such data: .*nist"),
    "dynamic": ({"net": "own_networks:Dynamic", "a": "dynamic.pt", "b": "dynamic.pt"}, r"values that depend on its"),
    "no batch norm": ({"batch_norm": "recompute"}, r"cannot be merged: There is nothing to repair"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_is_wrong(case: str, at_home: Callable[..., Any], own: SimpleNamespace) -> None:
    state, own_networks = torch.load(own.folder / "a.pt", weights_only=True), own.module
    torch.save([1, 2], own.folder / "numbers.pt")
    torch.save({"state_dict": state, "net": own_networks.mlp()}, own.folder / "objects.pt")
    torch.save(own_networks.mlp(8).state_dict(), own.folder / "other.pt")
    torch.save({f"{p}.{n}": t for p in ("net", "ema") for n, t in state.items()}, own.folder / "two.pt")
    torch.save(own_networks.Dynamic().state_dict(), own.folder / "dynamic.pt")
    values, message = ERRORS[case]
    with pytest.raises(UsageError, match=message):
        at_home(**values)


def test_prefix_chooses_one_of_two_networks_and_objects_are_read_if_trusted(own: SimpleNamespace) -> None:
    state, path = own.module.mlp().state_dict(), own.folder / "chosen.pt"
    torch.save({f"{p}.{n}": t + (p == "ema") for p in ("net", "ema") for n, t in state.items()}, path)
    chosen = Checkpoint.load(str(path), own.module.mlp(), prefix="ema.").tensors()
    assert all(torch.equal(chosen[name], tensor + 1) for name, tensor in state.items())
    torch.save({"state_dict": state, "made_by": own.module.mlp}, path)
    assert Checkpoint.load(str(path), own.module.mlp(), weights_only=False).prefix == ""


def test_script_shows_errors_without_traceback(own: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own.folder)
    refused = refusal("merge", "--net=own_networks:vgg", "--a=a.ckpt", "--b=b.ckpt")
    assert refused.startswith("merge.py: own_networks has no callable 'vgg'")


@pytest.mark.slow
def test_demonstration_merges_mlps_and_batch_norm_networks(tmp_path: Path) -> None:
    done = run_recipe("merge", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "100/100" in done.stderr  # 2 networks of 40 epochs and 2 of 10
    for name, step in (("mlp", "REPAIR"), ("resnet", "recomputed batch norm")):
        found = json.loads((tmp_path / "runs" / "merge" / name / "results.json").read_text())
        paths = {name: path["midpoint_barrier"] for name, path in found["paths"].items()}
        assert paths[f"aligned + {step}"] <= paths["unaligned"] / 3
        assert min(found["rows"][row][1] for row in ("a", "b", f"aligned average + {step}")) > 95
        assert (tmp_path / "runs" / "merge" / name / "merged.ckpt").exists()
