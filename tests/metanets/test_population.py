"""Populations against a plain loop with torch.optim, one network after the other."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from lightning_symmetry.metanets import zoo_classifier
from lightning_symmetry.metanets.population import (
    PopulationSettings,
    evaluate_population,
    suggested_chunk,
    train_population,
)
from lightning_symmetry.metanets.population_augment import PopulationAugmentation

TOLERANCE = 1e-8
EPOCHS = [5, 3, 6]  # of 5 batches each, the last of them partial


def digits(count=130, dtype=torch.float64):
    images, target = load_digits(return_X_y=True)
    return torch.tensor(images[:count], dtype=dtype).view(-1, 1, 8, 8) / 16, torch.tensor(target[:count])


def networks(make, count=3, dtype=torch.float64):
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(make().to(dtype))
    return made


def hyperparameters(optimizer="sgd", epochs=EPOCHS):
    rates = np.array([0.1, 0.03, 0.05]) / (1 if optimizer == "sgd" else 20)
    return {
        "learning_rate": rates,
        "weight_decay": [1e-2, 1e-4, 0.1],
        "label_smoothing": [0.0, 0.2, 0.1],
        "epochs": epochs,
        "seed": [3, 11, 7],
    }


def alone(network, inputs, target, settings, learning_rate, weight_decay, label_smoothing, epochs, seed):
    """Train one network as anyone would, and return its state and its losses."""
    network = copy.deepcopy(network).train()
    generator = torch.Generator().manual_seed(seed)
    options = {"lr": learning_rate, "weight_decay": weight_decay}
    if settings.optimizer == "sgd":
        options |= {"momentum": settings.momentum, "nesterov": settings.nesterov}
        optimizer = torch.optim.SGD(network.parameters(), **options)
    else:
        optimizer = torch.optim.AdamW(network.parameters(), betas=settings.betas, eps=settings.eps, **options)
    total = epochs * len(range(0, len(inputs), settings.batch_size))
    peak = settings.warmup * total
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / peak if step < peak else (total - step) / (total - peak)
    )
    history = []
    for _ in range(epochs):
        losses = 0.0
        for index in torch.randperm(len(inputs), generator=generator).split(settings.batch_size):
            x = inputs[index]
            if settings.augment is not None:
                x = settings.augment(x, generator)
            optimizer.zero_grad()
            loss = F.cross_entropy(network(x), target[index], label_smoothing=label_smoothing)
            loss.backward()
            optimizer.step()
            schedule.step()
            losses += loss.item() * len(index)
        history.append(losses / len(inputs))
    return network.state_dict(), history


def deviation(result, nets, inputs, target, values, settings, which=None):
    """Return the largest difference from the plain loop, relative to the largest entry of each tensor."""
    worst = 0.0
    for k in range(len(nets)) if which is None else which:
        own = {name: np.asarray(value)[k].item() for name, value in values.items()}
        state, history = alone(nets[k], inputs, target, settings, **own)
        for name, value in state.items():
            found = result.final[name][k]
            assert found.dtype == value.dtype and found.shape == value.shape
            if value.is_floating_point():
                worst = max(worst, float((found - value).abs().max() / value.abs().max()))
            else:
                assert torch.equal(found, value)
        np.testing.assert_allclose(result.history_loss[k, : len(history)], history, rtol=max(TOLERANCE, 10 * worst))
        np.testing.assert_allclose(result.train_loss[k], history[-1], rtol=max(TOLERANCE, 10 * worst))
        assert result.history_loss[k, len(history) :].isnan().all()
        assert result.epochs_done[k] == len(history)
    return worst


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("kind", ["standard", "w", "sigma"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_each_network_goes_the_way_it_goes_alone(kind, norm, optimizer):
    inputs, target = digits()
    nets = networks(lambda: zoo_classifier(kind, norm=norm))
    before = copy.deepcopy(nets[0].state_dict())
    settings, values = PopulationSettings(optimizer, batch_size=32), hyperparameters(optimizer)
    result = train_population(nets, inputs, target, values, settings)
    assert not result.diverged.any()
    assert deviation(result, nets, inputs, target, values, settings) <= TOLERANCE
    for name, value in before.items():  # the networks are left as they are
        assert torch.equal(nets[0].state_dict()[name], value)
        assert torch.equal(result.initial[name][0], value)
    assert not torch.equal(result.final["head.bias"], result.initial["head.bias"])


@pytest.mark.parametrize("kind", ["standard", "w"])
def test_float32_stays_within_its_rounding(kind):
    inputs, target = digits(dtype=torch.float32)
    nets = networks(lambda: zoo_classifier(kind), dtype=torch.float32)
    settings, values = PopulationSettings(batch_size=32), hyperparameters(epochs=[4, 4, 4])
    result = train_population(nets, inputs, target, values, settings)
    assert deviation(result, nets, inputs, target, values, settings) <= 1e-4


def residual():
    return zoo_classifier("sigma", "cifar10", norm="batch")


class Odd(nn.Module):
    """Everything that the fast layers leave to vmap, and a convolution that reads nothing at the border."""

    def __init__(self):
        super().__init__()
        self.grouped = nn.Conv2d(2, 4, 3, groups=2, padding="same")
        self.dilated = nn.Conv2d(4, 6, 3, dilation=2, padding=2, padding_mode="circular")
        self.norm = nn.GroupNorm(2, 6)
        self.strided = nn.Conv2d(6, 6, (3, 2), stride=(2, 3), padding=(0, 1))
        self.average = nn.BatchNorm2d(6, momentum=None)
        self.flat = nn.Linear(6, 6)
        self.plain = nn.LayerNorm(6)
        self.head = nn.Linear(6, 10)
        self.head.weight.requires_grad_(False)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.flat.weight

    def forward(self, x):
        x = self.norm(self.dilated(torch.cat([x, x.flip(2)], 1).contiguous() if x.shape[1] == 1 else x).tanh())
        x = self.average(self.strided(x)).mean((-2, -1))
        return self.head(self.tied(self.plain(self.flat(x))).relu())


class Odder(Odd):
    def forward(self, x):
        return super().forward(self.grouped(torch.cat([x, x.flip(2)], 1)))


@pytest.mark.parametrize("make", [residual, Odder, lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))])
def test_other_architectures(make):
    inputs, target = digits(40)
    if make is residual:
        inputs = inputs[:14].repeat_interleave(3, 1).repeat(1, 1, 2, 2)
        target = target[:14]
    settings, values = PopulationSettings(batch_size=12, nesterov=True, warmup=0.0), hyperparameters(epochs=[2, 1, 2])
    nets = networks(make)
    result = train_population(nets, inputs, target, values, settings)
    assert deviation(result, nets, inputs, target, values, settings) <= TOLERANCE


@pytest.mark.parametrize("augment", ["own", "drawn"])
def test_augmentation_has_random_numbers_of_each_network(augment):
    def own(images, generator):
        return images + 0.1 * torch.randn(images.shape, generator=generator, dtype=images.dtype)

    inputs, target = digits(70)
    augment = own if augment == "own" else PopulationAugmentation(cutout=3)
    settings, values = PopulationSettings(batch_size=32, augment=augment), hyperparameters(epochs=[3, 2, 3])
    nets = networks(zoo_classifier)
    result = train_population(nets, inputs, target, values, settings)
    assert deviation(result, nets, inputs, target, values, settings) <= TOLERANCE
    single = train_population(nets[1:2], inputs, target, {n: v[1:2] for n, v in values.items()}, settings)
    torch.testing.assert_close(single.final["head.weight"][0], result.final["head.weight"][1], rtol=1e-10, atol=1e-12)


def test_augmentation_by_name_and_same_bits_twice():
    inputs, target = digits(70)
    values, nets = hyperparameters(epochs=[2, 1, 2]), networks(zoo_classifier)
    settings = PopulationSettings(batch_size=32, augment="metanets.test_population:mirrored")
    torch.manual_seed(0)
    first = train_population(nets, inputs, target, values, settings)
    torch.manual_seed(1)
    second = train_population(nets, inputs, target, values, settings)
    assert all(torch.equal(value, second.final[name]) for name, value in first.final.items())
    plain = train_population(nets, inputs.flip(-1), target, values, PopulationSettings(batch_size=32))
    torch.testing.assert_close(plain.final, first.final, rtol=1e-8, atol=1e-10)


def test_how_many_stand_in_a_stack_does_not_matter():
    inputs, target = digits(70)
    nets, values, done = networks(zoo_classifier), hyperparameters(epochs=[3, 1, 2]), []
    settings = PopulationSettings(batch_size=32)
    whole = train_population(nets, inputs, target, values, settings)
    parts = train_population(nets, inputs, target, values, settings, networks_at_once=2, on_epoch=done.append)
    assert sum(done) == 6
    for name in ("initial", "final", "epochs_done", "history_loss", "history_accuracy", "train_accuracy"):
        left, right = getattr(whole, name), getattr(parts, name)
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12, equal_nan=True)


def mirrored(images, generator):
    return images.flip(-1)


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_one_that_diverges_spoils_no_other(norm, optimizer):
    inputs, target = digits()
    nets = networks(lambda: zoo_classifier(norm=norm))
    with torch.no_grad():
        nets[1].head.weight.fill_(1e200 if optimizer == "sgd" else float("nan"))
    values, done = hyperparameters(optimizer), []
    settings = PopulationSettings(optimizer, batch_size=32)
    result = train_population(nets, inputs, target, values, settings, on_epoch=done.append)
    assert result.diverged.tolist() == [False, True, False]
    assert result.epochs_done.tolist() == [EPOCHS[0], 0, EPOCHS[2]]
    assert sum(done) == sum(EPOCHS)
    assert result.train_loss.isnan().tolist() == [False, True, False]
    assert deviation(result, nets, inputs, target, values, settings, which=[0, 2]) <= TOLERANCE


def test_one_that_diverges_late_keeps_the_state_of_its_last_loss():
    inputs, target = digits(64)
    nets = networks(zoo_classifier)
    values = hyperparameters() | {"learning_rate": [0.1, 1e200, 0.05]}
    settings = PopulationSettings(batch_size=32, warmup=0.0)
    result = train_population(nets, inputs, target, values, settings)
    assert result.diverged.tolist() == [False, True, False]
    assert not torch.equal(result.final["head.bias"][1], result.initial["head.bias"][1])
    assert deviation(result, nets, inputs, target, values, settings, which=[0, 2]) <= TOLERANCE
    everybody = hyperparameters() | {"learning_rate": [1e200] * 3}
    assert train_population(nets, inputs, target, everybody, settings).diverged.all()


class Masked(nn.Linear):
    """Has infinities that stay, as attention masks do."""

    def __init__(self):
        super().__init__(64, 10)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x):
        return super().forward(x.flatten(1)) + self.mask.softmax(0)[1]


def test_infinities_from_the_start_are_no_divergence():
    inputs, target = digits(40)
    nets, values, settings = networks(Masked), hyperparameters(epochs=[2, 1, 2]), PopulationSettings(batch_size=32)
    result = train_population(nets, inputs, target, values, settings)
    assert not result.diverged.any()
    assert result.final["mask"].isinf().any()


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("kind", ["standard", "w", "sigma"])
def test_evaluation_is_that_of_each_network(kind, norm):
    inputs, target = digits(50)
    nets = networks(lambda: zoo_classifier(kind, norm=norm))
    settings = PopulationSettings(batch_size=32)
    states = train_population(nets, inputs, target, hyperparameters(epochs=[1, 2, 1]), settings).final
    smoothing = [0.0, 0.1, 0.2]
    found = evaluate_population(
        nets[0], states, inputs, target, label_smoothing=smoothing, batch_size=20, networks_at_once=2
    )
    for k, (net, share) in enumerate(zip(nets, smoothing, strict=True)):
        net.load_state_dict({name: value[k] for name, value in states.items()})
        with torch.no_grad():
            logits = net.eval()(inputs)
        loss = F.cross_entropy(logits, target, label_smoothing=share)
        torch.testing.assert_close(found[0][k], loss, rtol=1e-12, atol=0)
        assert found[1][k] == (logits.argmax(1) == target).double().mean()


def test_suggested_chunk_is_smaller_for_larger_networks_and_batches():
    small, large = zoo_classifier(), zoo_classifier(data="cifar10")
    images = torch.zeros(1, 1, 8, 8)
    assert suggested_chunk(small, images, 16) > suggested_chunk(small, images, 256) >= 1
    assert suggested_chunk(small, images, 64) > suggested_chunk(large, torch.zeros(1, 3, 32, 32), 64) >= 1
