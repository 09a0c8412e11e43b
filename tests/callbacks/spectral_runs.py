"""A small regression, its trainer and optimizers for tests of a switch to low-rank factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import Logger
from tiny_modules import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_symmetry.modules import LowRankLayoutMixin

INPUTS, OUTPUTS = 12, 3
BATCHES = 5  # in an epoch

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, weight_decay=0.01, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "foreach": lambda p: torch.optim.NAdam(p, lr=3e-3, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.03, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))


class Mixed(nn.Module):
    """Convolutions of both kinds, attention, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, groups=2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encode, self.decode = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.decode.weight = self.encode.weight
        self.head = nn.Linear(8, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.conv(x.view(-1, 1, 3, 4)).relu()).flatten(2).mT
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(self.decode(self.encode(x).tanh()).mean(1))


def loader(dtype: torch.dtype = torch.float32, batch_size: int = 8) -> DataLoader:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(8 * BATCHES, INPUTS, generator=generator)
    targets = torch.tanh(inputs @ torch.randn(INPUTS, OUTPUTS, generator=generator))
    return DataLoader(TensorDataset(inputs.to(dtype), targets.to(dtype)), batch_size=batch_size)


class Regression(pl.LightningModule):
    """Keeps the loss and the learning rate of each training step."""

    def __init__(
        self,
        net: nn.Module | None = None,
        optimizer: str = "adamw",
        scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    ) -> None:
        super().__init__()
        self.net = network() if net is None else net
        self.build, self.scheduler = OPTIMIZERS[optimizer], scheduler
        self.losses: list[float] = []
        self.rates: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.rates.append(float(self.trainer.optimizers[0].param_groups[0]["lr"]))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test", F.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.build(self.parameters())
        if self.scheduler is None:
            return optimizer
        config = {"scheduler": self.scheduler(optimizer), "interval": "step", "monitor": "loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": config}


def step_by_hand(module: pl.LightningModule, loss: Tensor) -> None:
    """Take a step with each optimizer of a module that optimizes manually."""
    for optimizer in module.optimizers():
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in module.optimizers():
        optimizer.step()


class WithLayout(LowRankLayoutMixin, Regression):
    pass


class Rows(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    name = version = "rows"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append({**metrics, "step": step})

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def fit(
    module: pl.LightningModule, *callbacks: pl.Callback, steps: int = 15, data: Any = None, **kwargs: Any
) -> pl.Trainer:
    ckpt_path = kwargs.pop("ckpt_path", None)
    run = trainer(*callbacks, **{"max_epochs": -1, "max_steps": steps, **kwargs})
    run.fit(module, loader() if data is None else data, ckpt_path=ckpt_path)
    return run


def assert_in_order(run: pl.Trainer, module: nn.Module) -> None:
    """The optimizer has the module's parameters, the same objects in the same order, with states of their own."""
    (optimizer,) = run.optimizers
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, ours)) == list(map(id, module.parameters()))
    assert set(optimizer.state) <= set(ours)
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    assert len({tensor.data_ptr() for tensor in tensors}) == len(tensors)
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.ndim:  # Adafactor's are of one axis each
                assert torch.broadcast_shapes(value.shape, parameter.shape) == parameter.shape


def whole_batches() -> DataLoader:
    """Ten batches of 16."""
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(160, INPUTS, generator=generator)
    targets = torch.tanh(inputs[:, :OUTPUTS])
    return DataLoader(list(zip(inputs.split(16), targets.split(16), strict=True)), batch_size=None)


class Share(DataLoader):
    """A loader of batches as they are, of which a part can be taken."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__(items, batch_size=None)

    def __getitem__(self, part: slice) -> Share:
        return Share(self.dataset[part])


def shares(rank: int) -> Share:
    """The share of one of two ranks of these batches."""
    return Share([tuple(t[rank * 8 : rank * 8 + 8] for t in batch) for batch in whole_batches()])


class Vanish(pl.Callback):
    """Makes weights zero, or something else, before the fourth batch, which nobody can know before."""

    def __init__(self, layers: Sequence[int] = (0, 2, 4), value: float = 0.0) -> None:
        self.layers, self.value = layers, value

    def on_train_batch_end(self, run: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            with torch.no_grad():
                for index in self.layers:
                    module.net[index].weight.fill_(self.value)
