"""Training by the bound: its value, its noise, the number of samples, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from bayesian_modules import (
    FEATURES,
    SIZES,
    WIDE,
    Bayesian,
    Network,
    Record,
    assert_same_state,
    bayesian,
    fit,
    loader,
    mlp,
    samples,
    trainer,
)
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lightning_symmetry import GNN, DigitsGraph
from lightning_symmetry.modules import SupervisedModule, VariationalMixin
from lightning_symmetry.variational import kl_divergence, sample_network

pytestmark = pytest.mark.filterwarnings("ignore:.*number of training batches", "ignore:You defined a `validation_step`")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("num_data", [None, 1000])
def test_the_bound(count, num_data):
    pl.seed_everything(0)
    module = Bayesian(
        lr=0.1, num_data=num_data, num_samples_train=count, temperature=0.5, kl_warmup_steps=5, posterior=WIDE
    )
    run = fit(module, record := Record())
    assert len(record.losses) == 8 and len(module.losses) == 8 * count
    n = num_data or SIZES["train"]
    for step, (loss, kl) in enumerate(zip(record.losses, record.divergences, strict=True)):
        nll = sum(module.losses[count * step : count * (step + 1)]) / count
        weight = 0.5 * min(1, (step + 1) / 5)
        assert loss == pytest.approx(nll + weight * kl / n, rel=1e-6)
    sizes = torch.tensor([8.0, 8, 8, 2])
    nll = (torch.tensor(module.losses[-4 * count :]).view(4, count).mean(1) * sizes).sum() / 26
    kl = (torch.tensor(record.divergences[-4:]) * sizes).sum() / 26
    expected = {"vi/nll": nll, "vi/kl": kl, "vi/elbo": -(nll + kl / n)}
    for name, value in expected.items():
        assert float(run.callback_metrics[name]) == pytest.approx(float(value), rel=1e-5), name


def test_the_expected_loss_is_that_of_samples_of_the_posterior():
    """Over 400 steps at learning rate 0, against networks drawn weight by weight: |z| < 4."""
    pl.seed_everything(0)
    module = Bayesian(posterior=WIDE)
    x, y = samples("train").tensors
    fit(module, data=DataLoader(TensorDataset(x.repeat(400, 1), y.repeat(400)), 26), max_epochs=1)
    torch.manual_seed(1)
    with torch.no_grad():
        direct = torch.stack([F.cross_entropy(sample_network(module.net)(x), y) for _ in range(400)])
    found = torch.tensor(module.losses)
    error = (found.var() / 400 + direct.var() / 400).sqrt()
    assert abs(float((found.mean() - direct.mean()) / error)) < 4


def test_noise_differs_between_steps_samples_and_accumulated_batches():
    pl.seed_everything(0)
    module = Bayesian(num_samples_train=2, posterior=WIDE)
    x, y = samples("train").tensors
    same = DataLoader(TensorDataset(x[:8].repeat(4, 1), y[:8].repeat(4)), 8)
    fit(module, data=same, accumulate_grad_batches=2)
    assert len(module.outputs) == 2 * 4 * 2  # the learning rate is 0: only noise differs
    for i, output in enumerate(module.outputs):
        assert not any(torch.allclose(output, other, atol=1e-3) for other in module.outputs[:i])


def trained(seed: int, **kwargs: Any) -> nn.Module:
    net = mlp()
    net.insert(1, nn.Dropout(0.2))
    module = bayesian(net, **kwargs)
    pl.seed_everything(seed)
    run = fit(module, data=loader("train", shuffle=True))
    run.validate(module, loader("val"), verbose=False)
    module.after, module.metrics_found = torch.rand(3), dict(run.callback_metrics)
    return module


def test_runs_of_one_seed_are_equal_to_the_bit():
    first, again, other = trained(1), trained(1), trained(2)
    assert_same_state(first.state_dict(), again.state_dict())
    assert first.metrics_found == again.metrics_found
    assert not torch.equal(first.net[0].weight, other.net[0].weight)


def test_the_global_random_state_is_where_it_was():
    """Orders of data and whatever is drawn afterwards do not depend on the number of samples."""
    drawn = [trained(1, num_samples_train=s, num_samples_predict=p).after for s, p in ((1, 1), (3, 7))]
    assert torch.equal(*drawn)
    module = Bayesian(num_data=26, posterior=WIDE)
    before = torch.get_rng_state()
    module.training_step((torch.randn(4, FEATURES, generator=torch.Generator()), torch.zeros(4, dtype=torch.long)))
    assert torch.equal(torch.get_rng_state(), before)


class Steps(Network):
    """Returns what it is told to in place of the loss."""

    kind = "dict"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch)
        if self.kind == "skip" and len(self.losses) % 3 == 2:
            return None
        return {"loss": loss, "number": len(self.losses)} if self.kind == "dict" else loss


class BayesianSteps(VariationalMixin, Steps):
    pass


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(outputs)


def test_a_dictionary_keeps_its_other_entries():
    module = BayesianSteps(num_samples_train=2, posterior=WIDE)
    fit(module, outputs := Outputs(), max_epochs=1)
    assert [entry["number"] for entry in outputs.found] == [2, 4, 6, 8]
    expected = sum(module.losses[:2]) / 2 + float(kl_divergence(module).detach()) / 26
    assert float(outputs.found[0]["loss"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_is_skipped_whole(count):
    module = BayesianSteps(num_samples_train=count, posterior=WIDE)
    module.kind = "skip"
    fit(module, record := Record(), max_epochs=3)
    calls, expected = 0, 0
    for _ in range(12):
        for _ in range(count):
            calls += 1
            if calls % 3 == 2:
                break
        else:
            expected += 1
    assert len(module.losses) == calls and len(record.losses) == expected


class Items(IterableDataset):
    def __iter__(self) -> Any:
        return iter(samples("train"))


def own_batches() -> DataLoader:
    return DataLoader(samples("train"), batch_sampler=[[0, 1], [2, 3]])


KNOWN = {
    "shuffled": lambda: DataLoader(samples("train"), 8, shuffle=True, drop_last=True),
    "subset": lambda: DataLoader(samples("train"), 8, sampler=SubsetRandomSampler(range(11))),
    "graph": lambda: DigitsGraph().train_dataloader(),
}
UNKNOWN = {
    "iterable": (lambda: DataLoader(Items(), 8), "the data set Items is iterable"),
    "several": (lambda: [loader("train"), loader("train")], "in place of one DataLoader"),
    "batches": (own_batches, "batches are drawn by list"),
    "weights": (
        lambda: DataLoader(samples("train"), 8, sampler=WeightedRandomSampler([1.0] * 26, 8)),
        "samples are drawn by WeightedRandomSampler",
    ),
    "collated": (lambda: DataLoader([next(iter(loader("train")))], batch_size=None), "batches are drawn by list"),
}


@pytest.mark.parametrize(("kind", "expected"), [("shuffled", 26), ("subset", 11), ("graph", None)])
def test_the_number_of_samples(kind, expected):
    module = bayesian()
    if kind == "graph":
        expected = int(DigitsGraph().graph.train_mask.sum())
        module = bayesian(GNN(64, 10, 8, 1))
    run = fit(module, data=KNOWN[kind](), max_epochs=1)
    logged = {name: float(value) for name, value in run.callback_metrics.items()}
    assert logged["vi/elbo"] == pytest.approx(-logged["vi/nll"] - logged["vi/kl"] / expected, rel=1e-5)


@pytest.mark.parametrize("kind", UNKNOWN)
def test_a_number_that_cannot_be_told_must_be_given(kind):
    data, message = UNKNOWN[kind]
    with pytest.raises(MisconfigurationException, match=f"number of training samples, but .*{message}.*num_data="):
        fit(bayesian(), data=data())
    if kind != "several":
        fit(bayesian(num_data=26), data=data(), max_epochs=1)


def test_without_a_trainer_the_number_must_be_given():
    batch = next(iter(loader("train")))
    with pytest.raises(MisconfigurationException, match="Without a Trainer, VariationalMixin needs `num_data=`"):
        Bayesian(posterior=WIDE).training_step(batch)
    module = Bayesian(posterior=WIDE, num_data=10)
    losses = [float(module.training_step(batch).detach()) for _ in range(2)]
    assert losses[0] != losses[1]
    expected = [loss + float(kl_divergence(module).detach()) / 10 for loss in module.losses]
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_parameters_that_are_not_finite_are_named(value):
    module = bayesian()
    with torch.no_grad():
        module.net[2].weight_factors[0, 1, 2] = value
    with pytest.raises(ValueError, match=r"`net\.2\.weight_factors` is not finite"):
        fit(module)


def test_a_loss_that_is_not_finite_passes():
    module = Bayesian(num_data=26, posterior=WIDE)
    x, y = next(iter(loader("train")))
    assert module.training_step((x * float("nan"), y)).isnan()


@pytest.mark.parametrize("callback", [partial(StochasticWeightAveraging, 1e-2, 1), EMAWeightAveraging])
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_weights_can_be_averaged(callback):
    module = bayesian(optimizer=partial(torch.optim.SGD, lr=0.01))
    before = copy.deepcopy(module.state_dict())
    run = trainer(callback(), max_epochs=4)
    run.fit(module, loader("train"), loader("val"))
    assert not torch.equal(before["net.0.weight_factors"], module.net[0].weight_factors)
    assert run.callback_metrics["val/loss"].isfinite()


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_the_divergence_is_exact_in_other_precisions(precision):
    pl.seed_everything(0)
    module = Bayesian(lr=1e-3, posterior=WIDE)
    run = fit(module, record := Record(), max_epochs=1, precision=precision)
    kl = sum(k * s for k, s in zip(record.divergences, (8, 8, 8, 2), strict=True)) / 26
    assert float(run.callback_metrics["vi/kl"]) == pytest.approx(kl, rel=1e-6)
    assert module.outputs[0].dtype == {"bf16-mixed": torch.bfloat16, "64-true": torch.float64}[precision]


class Manual(Network):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class BayesianManual(VariationalMixin, Manual):
    pass


def test_manual_optimization_is_refused():
    with pytest.raises(MisconfigurationException, match="BayesianManual optimizes manually"):
        fit(BayesianManual())


@pytest.mark.parametrize("kind", [FSDPStrategy, ModelParallelStrategy])
def test_sharded_parameters_are_refused(kind):
    module = Bayesian()
    module._trainer = SimpleNamespace(strategy=kind())  # they need accelerators to train
    with pytest.raises(MisconfigurationException, match=f"VariationalMixin needs .* {kind.__name__} shards"):
        module.setup("fit")


class Contrastive(Network):
    def __init__(self, temperature: float = 0.1) -> None:
        super().__init__()
        self.temperature = temperature


class BayesianContrastive(VariationalMixin, Contrastive):
    pass


def test_an_argument_of_both_is_not_taken_silently():
    with pytest.raises(MisconfigurationException, match="`temperature` is an argument of VariationalMixin and of"):
        BayesianContrastive(temperature=0.5)
    module = BayesianContrastive(0.2, temperature=0.5)
    assert module.temperature == 0.2 and module.variational.temperature == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_data": 0}, "Expected `num_data` to be an int of at least 1 or None but got 0"),
        ({"num_samples_train": 0}, "Expected `num_samples_train` to be an int of at least 1 but got 0"),
        ({"num_samples_predict": 2.5}, "Expected `num_samples_predict` to be an int of at least 1"),
        ({"temperature": -1.0}, "of at least 0 but got"),
        ({"kl_warmup_steps": -1}, "of at least 0 but got"),
        ({"outputs": "scores"}, "Expected `outputs` to be"),
        ({"posterior": {"rank": -1}}, "Expected `rank` to be an int of at least 0"),
        ({"posterior": {"variance": 0.0}}, "Expected `variance` to be positive"),
        ({"posterior": {"skip": ["head"]}}, "`skip` has the pattern 'head', which matches no layer"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        bayesian(**arguments)


def test_behind_the_module_the_mixin_is_refused():
    with pytest.raises(TypeError, match="Wrong: VariationalMixin must be put before the LightningModule"):

        class Wrong(SupervisedModule, VariationalMixin):
            pass
