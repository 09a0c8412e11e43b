"""The modules learn, log what they say, and their checkpoints give the same network back."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from lightning_symmetry import (
    GNN,
    MLP,
    AsymmetricModule,
    Autoencoder,
    DigitsData,
    DigitsGraph,
    ReconstructionModule,
    SupervisedModule,
    warmup,
)
from lightning_symmetry.asymmetry import AsymmetricLayer

pytestmark = pytest.mark.filterwarnings("ignore:.*number of training batches", "ignore:You defined a `validation_step`")


def trainer(folder, **arguments):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    arguments = {"enable_checkpointing": False, **quiet, **arguments}
    return pl.Trainer(accelerator="cpu", devices=1, default_root_dir=folder, **arguments)


@pytest.fixture
def deterministic():
    """The Trainer's argument, which it does not take back."""
    yield True
    torch.use_deterministic_algorithms(False)


def small_mlp(seed=0):
    torch.manual_seed(seed)
    return MLP(64, (48, 48), 10)


def asymmetric(seed=0, **arguments):
    arguments = {"n_fix": 12, "kappa": 0.5, "asymmetry_seed": 3, **arguments}
    return AsymmetricModule(small_mlp(seed), **arguments)


SETTINGS = {
    "plain": lambda: SupervisedModule(small_mlp()),
    "w": lambda: asymmetric(optimizer=partial(torch.optim.AdamW, lr=3e-3)),
    "sigma": lambda: AsymmetricModule(small_mlp(), "sigma"),
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_digits(kind, tmp_path):
    pl.seed_everything(0)
    module, data = SETTINGS[kind](), DigitsData(flatten=True)
    run = trainer(tmp_path, max_epochs=12)
    run.fit(module, data)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    assert set(logged) == {f"{split}/{what}" for split in ("train", "val") for what in ("loss", "accuracy")}
    assert logged["val/accuracy"] > 0.95
    (tested,) = run.test(module, data, verbose=False)
    assert set(tested) == {"test/loss", "test/accuracy"}
    # What is logged is the mean over samples, not over batches.
    module.eval()
    batches = [(module(x).detach(), y) for x, y in DigitsData(flatten=True, eval_batch_size=50).test_dataloader()]
    output, target = torch.cat([o for o, _ in batches]), torch.cat([t for _, t in batches])
    assert tested["test/loss"] == pytest.approx(F.cross_entropy(output, target).item(), rel=1e-5)
    assert tested["test/accuracy"] == pytest.approx((output.argmax(1) == target).double().mean().item(), rel=1e-6)


@pytest.mark.parametrize("preset", [None, "gnn", "gnn-sigma"])
def test_graph(preset, tmp_path):
    pl.seed_everything(0)
    net = GNN(64, 10, hidden=32, num_layers=2)
    optimizer = partial(torch.optim.Adam, lr=1e-2)
    module = SupervisedModule(net, optimizer=optimizer)
    if preset:
        module = AsymmetricModule(net, preset=preset, optimizer=optimizer, scheduler=partial(warmup, steps=5))
    data = DigitsGraph()
    run = trainer(tmp_path, max_epochs=40, check_val_every_n_epoch=10)
    run.fit(module, data)
    assert run.callback_metrics["val/accuracy"] > 0.9
    (tested,) = run.test(module, data, verbose=False)
    graph = data.graph
    module.eval()
    output, target = module(graph.x, graph.edge_index)[graph.test_mask], graph.y[graph.test_mask]
    assert tested["test/loss"] == pytest.approx(F.cross_entropy(output, target).item(), rel=1e-5)
    assert tested["test/accuracy"] == pytest.approx((output.argmax(1) == target).double().mean().item(), rel=1e-6)


def regression_loaders():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, 8), DataLoader(data, 7)


def test_other_losses_and_metrics(tmp_path):
    torch.manual_seed(0)
    module = SupervisedModule(
        nn.Linear(4, 1),
        loss=nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        metrics={"mse": MeanSquaredError()},
    )
    train, val = regression_loaders()
    run = trainer(tmp_path, max_epochs=20)
    run.fit(module, train, val)
    assert set(run.callback_metrics) == {"train/loss", "train/mse", "val/loss", "val/mse"}
    assert run.callback_metrics["val/loss"] < 1e-2
    assert run.callback_metrics["val/loss"] == pytest.approx(run.callback_metrics["val/mse"].item(), rel=1e-5)
    assert not SupervisedModule(nn.Linear(4, 1), loss=nn.MSELoss()).metrics["val_metrics"]


def test_predict(tmp_path):
    module, x = SupervisedModule(nn.Linear(4, 2)), torch.randn(6, 4)
    run, expected = trainer(tmp_path), module(x).detach()
    for data in (TensorDataset(x, torch.zeros(6)), TensorDataset(x), x):
        assert torch.equal(torch.cat(run.predict(module, DataLoader(data, 3))), expected)
    graphs = DigitsGraph()
    net = SupervisedModule(GNN(64, 10, 8, 1)).eval()
    (output,) = run.predict(net, graphs.test_dataloader())
    graph = graphs.graph
    torch.testing.assert_close(output, net(graph.x, graph.edge_index)[graph.test_mask].detach())


@pytest.mark.parametrize(("interval", "expected"), [("epoch", 3), ("step", 12)])
def test_scheduler_interval(interval, expected, tmp_path):
    module = SupervisedModule(
        nn.Linear(4, 1), loss=nn.MSELoss(), scheduler=partial(warmup, steps=100), interval=interval
    )
    run = trainer(tmp_path, max_epochs=3)
    run.fit(module, regression_loaders()[0])
    (config,) = run.lr_scheduler_configs
    assert config.scheduler.last_epoch == expected


def ordered_digits():
    data = DigitsData(flatten=True).eval_dataloader("train").dataset
    x, y = (
        torch.stack(part) if part[0].ndim else torch.tensor(part)
        for part in zip(*[data[i] for i in range(96)], strict=True)
    )
    return DataLoader(TensorDataset(x, y), 16)


def with_schedule(seed, **arguments):
    return asymmetric(
        seed,
        optimizer=partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        scheduler=partial(warmup, steps=10, start=0.1, shape="exponential"),
        interval="step",
        **arguments,
    )


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("other_seed", [3, 99])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(precision, other_seed, deterministic, tmp_path):
    arguments = {"precision": precision, "gradient_clip_val": 0.5, "deterministic": deterministic}
    loader = ordered_digits()
    whole = with_schedule(0)
    trainer(tmp_path, max_epochs=4, **arguments).fit(whole, loader)

    first = with_schedule(0)
    run = trainer(tmp_path, max_epochs=2, **arguments)
    run.fit(first, loader)
    run.save_checkpoint(tmp_path / "half.ckpt")
    second = with_schedule(5, asymmetry_seed=other_seed)  # the checkpoint brings the masks and constants
    trainer(tmp_path, max_epochs=4, **arguments).fit(second, loader, ckpt_path=tmp_path / "half.ckpt")
    assert second.trainer.global_step == 24
    for (name, value), found in zip(whole.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(value, found), name
    assert not torch.equal(first.net.linears[0].bias, whole.net.linears[0].bias)


SCRIPT = """
import sys, torch
from lightning_symmetry import MLP, AsymmetricModule
checkpoint, out = sys.argv[1:]
torch.manual_seed(123)
same = AsymmetricModule.load_from_checkpoint(checkpoint, net=MLP(64, (48, 48), 10))
other = AsymmetricModule.load_from_checkpoint(checkpoint, net=MLP(64, (48, 48), 10), asymmetry_seed=99)
x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
hparams = {k: v for k, v in same.hparams.items()}
torch.save([same.state_dict(), other.state_dict(), same(x), other(x), hparams], out)
"""


def test_checkpoint_in_another_process(tmp_path):
    module = with_schedule(0, overrides={"linears.2": {"kappa": 0.25}})
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, ordered_digits())
    run.save_checkpoint(tmp_path / "a.ckpt")
    command = [sys.executable, "-c", SCRIPT, tmp_path / "a.ckpt", tmp_path / "out.pt"]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    *states, same, other, hparams = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = module.state_dict()
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
    assert torch.equal(same, module(x))
    assert torch.equal(other, module(x))
    assert hparams["asymmetry_seed"] == 3
    assert hparams["overrides"] == {"linears.2": {"kappa": 0.25}}
    assert not {"net", "loss", "optimizer", "scheduler", "metrics"} & set(hparams)


def test_checkpoint_holds_plain_weights_and_exact_constants(tmp_path):
    module = with_schedule(0)
    constants = {n: m.fixed.clone() for n, m in module.net.named_modules() if isinstance(m, AsymmetricLayer)}
    run = trainer(tmp_path, max_epochs=2)
    run.fit(module, ordered_digits())
    run.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["state_dict"]
    for name, fixed in constants.items():
        mask = state[f"net.{name}.mask"]
        assert torch.equal(state[f"net.{name}.fixed"], fixed)
        assert torch.equal(state[f"net.{name}.weight"][~mask].view_as(fixed), fixed)
    assert not [key for key in state if "_index" in key or "metrics" in key]
    plain = small_mlp(1)
    plain.load_state_dict({key: state[f"net.{key}"] for key in plain.state_dict()})
    x = torch.randn(4, 64)
    torch.testing.assert_close(plain(x), module(x))


def test_settings_reach_the_network():
    module = AsymmetricModule(
        small_mlp(), n_fix=9, layout="filters", skip=["linears.2"], overrides={"linears.0": {"n_fix": 5}}
    )
    layers = [m for m in module.net.modules() if isinstance(m, AsymmetricLayer)]
    assert [m.n_fix for m in layers] == [5, 9]
    assert {m.layout for m in layers} == {"filters"}
    with pytest.raises(ValueError, match="n_fix=64 of 64 inputs"):
        AsymmetricModule(small_mlp(), n_fix=64)
    with pytest.raises(ValueError, match="give `example_input`"):
        AsymmetricModule(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), "sigma")
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    AsymmetricModule(net, "sigma", scale=0.1, example_input=torch.zeros(1, 4))
    assert net[1].scale == 0.1


def test_modules_can_be_copied():
    module = asymmetric()
    clone, x = copy.deepcopy(module), torch.randn(3, 64)
    assert torch.equal(clone(x), module(x))
    assert str(clone.net.asymmetry_report) == str(module.net.asymmetry_report)
    assert dict(clone.hparams) == dict(module.hparams)


def test_building_under_another_precision_draws_the_same_constants(tmp_path):
    expected = asymmetric()
    with trainer(tmp_path, precision="64-true").init_module():
        module = asymmetric()
    for ours, theirs in zip(module.net.linears, expected.net.linears, strict=True):
        assert ours.weight.dtype == ours.fixed.dtype == torch.float64
        assert torch.equal(ours.fixed, theirs.fixed.double())
        assert torch.equal(ours.mask, theirs.mask)


def test_an_autoencoder_learns_its_input_and_logs_half_the_squared_error(tmp_path):
    torch.manual_seed(0)
    module = ReconstructionModule(Autoencoder(64, (32, 16)), optimizer=partial(torch.optim.AdamW, lr=1e-2))
    data = DigitsData()
    data.setup("fit")
    images = torch.cat([x for x, _ in data.eval_dataloader("train")]).flatten(1)

    def loss():
        with torch.no_grad():
            return 0.5 * (module.net(images) - images).square().sum(1).mean().item()

    before = loss()
    runner = trainer(tmp_path, max_epochs=5)
    runner.fit(module, datamodule=data)
    assert loss() < 0.7 * before
    assert abs(runner.validate(module, data.eval_dataloader("train"), verbose=False)[0]["val/loss"] / loss() - 1) < 1e-5
