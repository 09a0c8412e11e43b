"""Validation, test and prediction see averages over samples, the same ones each time."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from bayesian_modules import CLASSES, FEATURES, WIDE, Bayesian, Network, bayesian, fit, loader, mlp, samples, trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError
from torchvision.models import resnet18

from lightning_symmetry import GNN, DigitsGraph
from lightning_symmetry.asymmetry import asymmetrize
from lightning_symmetry.low_rank import factorize
from lightning_symmetry.modules import VariationalMixin, VariationalModule
from lightning_symmetry.modules.variational_noise import seeded
from lightning_symmetry.variational import Predictive, sample_network, sampling_mode, to_mean, variational_layers

pytestmark = pytest.mark.filterwarnings("ignore:.*number of training batches", "ignore:You defined a `validation_step`")


def images_net(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "resnet18":
        return resnet18(num_classes=CLASSES)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(6, CLASSES))
    return asymmetrize(net, n_fix=2, kappa=0.5, seed=1) if kind == "asymmetric" else factorize(net, 2, min_saving=-1)


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.rand(12, 3, 32, 32, generator=generator), torch.arange(12) % CLASSES)


CASES = {
    "mlp": (mlp, lambda: samples("val")),
    "resnet18": (lambda: images_net("resnet18"), images),
    "asymmetric": (lambda: images_net("asymmetric"), images),
    "factorised": (lambda: images_net("factorised"), images),
}


@pytest.mark.parametrize("kind", CASES)
def test_test_step_and_prediction_are_those_of_mean_probabilities(kind):
    net, data = (make() for make in CASES[kind])
    pl.seed_everything(7)
    posterior = WIDE if kind != "resnet18" else {"rank": 1}
    module = bayesian(net, lr=1e-3, posterior=posterior, num_samples_predict=4)
    batches = DataLoader(data, 5)
    run = trainer(max_epochs=1)
    run.fit(module, batches, batches)
    (tested,) = run.test(module, batches, verbose=False)
    predicted = run.predict(module, batches)
    module.eval()

    nll, hits = 0.0, 0.0
    for index, (x, y) in enumerate(batches):
        means = {}
        for split in ("test", "predict"):
            with torch.no_grad(), seeded(module.device, 7, 0, split, 0, index):
                p = torch.stack([module.net(x).double().softmax(1) for _ in range(4)])
            means[split] = p.mean(0)
        nll -= means["test"].log()[torch.arange(len(y)), y].sum()
        hits += (means["test"].argmax(1) == y).sum()
        found = predicted[index]
        torch.testing.assert_close(found["probabilities"].double(), means["predict"], rtol=1e-4, atol=1e-6)
        entropy = torch.special.entr(means["predict"]).sum(1)
        torch.testing.assert_close(found["entropy"].double(), entropy, rtol=1e-4, atol=1e-6)
        information = entropy - torch.special.entr(p).sum(2).mean(0)
        torch.testing.assert_close(found["mutual_information"].double(), information, rtol=1e-3, atol=1e-6)
    assert tested["test/loss"] == pytest.approx(float(nll / len(data)), rel=1e-5)
    assert tested["test/accuracy"] == pytest.approx(float(hits / len(data)), rel=1e-6)
    assert not module.net._forward_hooks


def test_many_samples_are_the_posterior_predictive():
    """With 2,000 samples, against networks drawn weight by weight: within 5 standard errors."""
    module = bayesian(num_samples_predict=2000)
    x = samples("val").tensors[0]
    (found,) = trainer().predict(module, DataLoader(x, 14))
    torch.manual_seed(1)
    with torch.no_grad():
        p = torch.stack([sample_network(module.net)(x).softmax(1) for _ in range(500)])
    error = p.std(0) * (1 / 500 + 1 / 2000) ** 0.5
    assert float(((found["probabilities"] - p.mean(0)) / error).abs().max()) < 5
    assert float(p.std(0).mean()) > 0.05  # the noise counts


def test_every_validation_has_the_same_noise():
    pl.seed_everything(0)
    module = bayesian(lr=0.0)
    run, batches = trainer(max_epochs=3), DataLoader(samples("val"), 8, generator=torch.Generator())
    found: list[float] = []

    class Keep(pl.Callback):
        def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            found.append(float(trainer.callback_metrics["val/loss"]))

    run.callbacks.append(Keep())
    run.fit(module, loader("train"), batches)
    state = torch.get_rng_state()
    found.append(run.validate(module, batches, verbose=False)[0]["val/loss"])
    found.append(run.test(module, batches, verbose=False)[0]["test/loss"])
    assert len({round(value, 6) for value in found[1:-1]}) == 1  # the first is of the sanity check, a part
    assert found[-1] != found[-2]
    assert torch.equal(state, torch.get_rng_state())


class Regressor(pl.LightningModule):
    """Predicts with ``self(x)``, from two parts, and has no ``predict_step`` nor ``validation_step``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(FEATURES, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("mse", F.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class BayesianRegressor(VariationalMixin, Regressor):
    pass


def regression() -> DataLoader:
    x = samples("train").tensors[0]
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 26)


def test_a_regression():
    module = BayesianRegressor(outputs="values", num_samples_predict=6, posterior=WIDE)
    pl.seed_everything(3)
    run = fit(module, data=regression())
    assert module.predictor_module() is module
    (found,) = run.predict(module, regression())
    (tested,) = run.test(module, regression(), verbose=False)
    x, y = regression().dataset.tensors
    with torch.no_grad(), seeded(module.device, 3, 0, "predict", 0, 0):
        values = torch.stack([module(x) for _ in range(6)])
    torch.testing.assert_close(found["mean"], values.mean(0))
    torch.testing.assert_close(found["variance"], values.var(0))
    with torch.no_grad(), seeded(module.device, 3, 0, "test", 0, 0):
        mean = torch.stack([module(x) for _ in range(6)]).mean(0)
    assert tested["mse"] == pytest.approx(float(F.mse_loss(mean, y)), rel=1e-5)


def test_a_step_that_is_not_defined_stays_so():
    with pytest.warns(UserWarning, match="have no `validation_step`"):
        trainer(max_epochs=1).fit(BayesianRegressor(outputs="values"), regression(), regression())


def test_supervised_regression_and_binary_classification():
    x, y = regression().dataset.tensors
    net = nn.Sequential(nn.Linear(FEATURES, 1))
    module = bayesian(net, loss=nn.MSELoss(), outputs="values", lr=0.3, metrics={"mse": MeanSquaredError()})
    (tested,) = fit(module, data=regression(), max_epochs=60).test(module, regression(), verbose=False)
    assert tested["test/loss"] == pytest.approx(tested["test/mse"], rel=1e-5)

    y = (y > 0).float()
    labels = DataLoader(TensorDataset(x, y), 26)
    binary = bayesian(nn.Sequential(nn.Linear(FEATURES, 1)), loss=nn.BCEWithLogitsLoss(), lr=0.3)
    pl.seed_everything(3)
    run = fit(binary, data=labels, max_epochs=30)
    (tested,) = run.test(binary, labels, verbose=False)
    (found,) = run.predict(binary, labels)
    assert found["probabilities"].shape == (26, 1) and found["entropy"].shape == (26,)
    assert float(((found["probabilities"] > 0.5) == y).float().mean()) > 0.8
    with torch.no_grad(), seeded(binary.device, 3, 0, "test", 0, 0):
        p = torch.stack([binary(x).sigmoid() for _ in range(5)]).mean(0)
    assert tested["test/loss"] == pytest.approx(float(F.binary_cross_entropy(p, y)), rel=1e-5)


def test_prediction_of_a_graph_is_of_its_test_nodes():
    data, module = DigitsGraph(), bayesian(GNN(64, 10, 8, 1), num_samples_predict=3)
    module.eval()
    run = trainer()
    (found,) = run.predict(module, data.test_dataloader())
    count = int(data.graph.test_mask.sum())
    assert found["probabilities"].shape == (count, 10) and found["entropy"].shape == (count,)
    with torch.no_grad(), seeded(module.device, torch.initial_seed(), 0, "predict", 0, 0):
        p = torch.stack([module(data.graph.x, data.graph.edge_index).softmax(1) for _ in range(3)]).mean(0)
    torch.testing.assert_close(found["probabilities"], p[data.graph.test_mask])
    (tested,) = run.test(module, data, verbose=False)
    assert 0 <= tested["test/accuracy"] <= 1


def test_hooks_from_before_see_the_average():
    module, seen = bayesian(), []
    module.eval().net.register_forward_hook(lambda net, inputs, output: seen.append(output))
    batch = next(iter(loader("val")))
    module.validation_step(batch, 0)
    (output,) = seen
    with torch.no_grad(), seeded(module.device, torch.initial_seed(), 0, "val", 0, 0):
        seen.clear()
        expected = Predictive.of([module.net(batch[0]) for _ in range(5)]).log_probabilities
    torch.testing.assert_close(output, expected)


class Nested(Network):
    """Its steps call each other."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.validation_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.outputs.append(self(batch[0]))
        return F.cross_entropy(self.outputs[-1], batch[1])

    def test_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.validation_step(batch, batch_idx)


class BayesianNested(VariationalMixin, Nested):
    pass


def test_a_step_that_calls_another_one_is_one_step():
    module = BayesianNested(posterior=WIDE, num_data=26, num_samples_predict=3)
    batch = next(iter(loader("val")))
    module.training_step(batch, 0)
    assert not torch.allclose(module.outputs[-1].logsumexp(1), torch.zeros(8))  # one sample, as it is
    module.test_step(batch, 0)
    assert torch.allclose(module.outputs[-1].logsumexp(1), torch.zeros(8), atol=1e-6)
    assert len(module.outputs) == 2


def test_a_step_without_the_index_of_its_batch():
    """Takes it from the loop: batches have noise of their own, the same each time."""

    class Indexless(VariationalMixin, Network):
        def validation_step(self, batch: Any) -> None:
            self.outputs.append(self.net(batch[0]))

    x, y = samples("train").tensors
    same = DataLoader(TensorDataset(x[:4].repeat(3, 1), y[:4].repeat(3)), 4)
    module = Indexless(posterior=WIDE, num_samples_predict=2)
    run = trainer()
    for _ in range(2):
        run.validate(module, same, verbose=False)
    first, second, third, *again = module.outputs
    assert not torch.equal(first, second) and not torch.equal(second, third)
    for output, expected in zip(again, (first, second, third), strict=True):
        assert torch.equal(output, expected)


def test_the_mean_is_evaluated_without_samples():
    module = bayesian()
    with torch.no_grad(), sampling_mode(module.net, "mean"):
        expected = module.net(samples("val").tensors[0])
    to_mean(module)
    run = trainer()
    (tested,) = run.test(module, loader("val"), verbose=False)
    target = samples("val").tensors[1]
    assert tested["test/loss"] == pytest.approx(float(F.cross_entropy(expected, target)), rel=1e-5)
    found = torch.cat([batch["probabilities"] for batch in run.predict(module, loader("val"))])
    torch.testing.assert_close(found, expected.softmax(1))
    with pytest.raises(ValueError, match="has no variational layer"):
        run.fit(module, loader("train"))


class Parts(Network):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self.net[2](self.net[1](self.net[0](batch[0]))), batch[1]))


class BayesianParts(VariationalMixin, Parts):
    pass


def test_what_the_steps_do_not_call_is_named():
    batch = next(iter(loader("val")))
    with pytest.raises(MisconfigurationException, match=r"averages what self\.net returns, but the step of BayesianPa"):
        BayesianParts().validation_step(batch, 0)
    with pytest.raises(MisconfigurationException, match=r"'net\.0' is not in it"):
        BayesianParts(predictor="net.2").validation_step(batch, 0)
    BayesianParts(predictor="net.2", posterior={"skip": ["net.0"]}).validation_step(batch, 0)
    pattern = r"submodule of BayesianParts, such as one of \['net'.*got 'head'"
    with pytest.raises(MisconfigurationException, match=pattern):
        BayesianParts(predictor="head").predictor_module()
    module = Bayesian(predictor="")
    assert module.predictor_module() is module


def test_outputs_that_are_no_tensor_are_refused():
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x), x

    module = VariationalModule(Pair())
    with pytest.raises(TypeError, match="Expected the network to return a tensor of real numbers but got a tuple"):
        module.predict_step(next(iter(loader("val"))), 0)
    assert not module.net._forward_hooks
    assert list(variational_layers(module)) == ["net.linear"]
