"""Effective ranks are logged when they are due, and spectra drawn."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from spectral_runs import Regression, Rows, fit, network
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_symmetry import asymmetrize, effective_rank
from lightning_symmetry.callbacks import EffectiveRankMonitor, SpectralFactorization
from lightning_symmetry.low_rank.projections import DenseProjection, LowRankProjection


def dense_effective_rank(weight: torch.Tensor) -> float:
    weight = weight.detach().double()
    return float(torch.linalg.matrix_norm(weight, "nuc") / torch.linalg.matrix_norm(weight, 2))


def test_effective_ranks_are_logged_by_step():
    module, logger, monitor = Regression(), Rows(), EffectiveRankMonitor(every_n_steps=4)
    callbacks = SpectralFactorization(at_step=7, rank=3), monitor
    fit(module, *callbacks, steps=12, logger=logger, accumulate_grad_batches=2)
    rows = {row["step"]: row for row in logger.rows if "effective_rank/mean" in row}
    assert list(rows) == [0, 4, 8, 12]
    start = network()
    for index in (0, 2, 4):
        name = f"effective_rank/net.{index}"
        assert rows[0][name] == pytest.approx(dense_effective_rank(start[index].weight), rel=1e-6)
        assert rows[12][name] == pytest.approx(dense_effective_rank(weight_of(module.net[index])), rel=1e-4)
    assert rows[8]["effective_rank/net.2"] < 3 < rows[4]["effective_rank/net.2"]
    values = [value for key, value in rows[12].items() if key.startswith("effective_rank/net.")]
    assert rows[12]["effective_rank/mean"] == pytest.approx(sum(values) / 3)


def weight_of(layer: nn.Module) -> torch.Tensor:
    return layer.canonical_weight() if hasattr(layer, "canonical_weight") else layer.weight


def test_histograms_and_one_figure(tmp_path):
    monitor = EffectiveRankMonitor(every_n_steps=5, layers=["net.[02]"])
    fit(Regression(), SpectralFactorization(at_step=6), monitor, steps=10, logger=TensorBoardLogger(tmp_path))
    (folder,) = tmp_path.glob("*/version_0")
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0}).Reload()
    tags = events.Tags()
    assert sorted(tags["histograms"]) == ["singular_values/net.0", "singular_values/net.2"]
    assert [event.step for event in events.Histograms("singular_values/net.0")] == [0, 5, 10]
    assert tags["images"] == ["singular_values"]
    assert len(events.Images("singular_values")) == 1
    assert "effective_rank/net.4" not in tags["scalars"]


def test_nothing_else_is_changed():
    modules = [Regression(nn.Sequential(*network(), nn.Dropout(0.5))) for _ in range(2)]
    for module, callbacks in zip(modules, ([], [EffectiveRankMonitor(1)]), strict=True):
        torch.manual_seed(1)
        fit(module, *callbacks, steps=5, logger=Rows())
    assert modules[0].losses == modules[1].losses


def test_other_kinds_of_layers():
    net = nn.Sequential(asymmetrize(network(), n_fix=2, kappa=1.0), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1))
    module, logger = Regression(nn.Sequential(net, nn.Flatten())), Rows()
    fit(module, EffectiveRankMonitor(), steps=1, logger=logger)
    assert sum(key.startswith("effective_rank/") for key in logger.rows[0]) == 5


class Attends(nn.Module):
    """A transformer layer, whose attention has one tensor for three projections, and attention that has four."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 1)
        self.cross = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(x[:, :8].unsqueeze(1))
        return self.head(tokens.squeeze(1) + self.cross(x[:, :8], x[:, :6], x[:, :4])[0])


ATTENTION = "net.encoder.layers.0.self_attn"


def attention_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the projections of a network that is dense, by the names that they have in it with factors."""
    fused, apart = module.net.encoder.layers[0].self_attn, module.net.cross
    weights = dict(zip("qkv", fused.in_proj_weight.chunk(3), strict=True))
    found = {f"{ATTENTION}.{key}_proj": weight for key, weight in weights.items()}
    found |= {f"net.cross.{key}_proj": getattr(apart, f"{key}_proj_weight") for key in "qkv"}
    return {**found, f"{ATTENTION}.out_proj": fused.out_proj.weight, "net.cross.out_proj": apart.out_proj.weight}


def test_attention_is_seen_by_its_projections_before_and_after_the_switch():
    torch.manual_seed(0)
    module, monitor, logger = Regression(Attends()), EffectiveRankMonitor(every_n_steps=2), Rows()
    start = {name: weight.detach().clone() for name, weight in attention_weights(module).items()}
    fit(module, SpectralFactorization(at_step=3, rank=3), monitor, steps=6, logger=logger)
    rows = [row for row in logger.rows if "effective_rank/mean" in row]
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert all(row.keys() == rows[0].keys() for row in rows)  # curves go on
    first = monitor.state_dict()["first"]
    for name, weight in start.items():
        torch.testing.assert_close(first[name], torch.linalg.svdvals(weight.double()))
        assert rows[0][f"effective_rank/{name}"] == pytest.approx(dense_effective_rank(weight))
        now = module.get_submodule(name)
        assert rows[-1][f"effective_rank/{name}"] == pytest.approx(dense_effective_rank(now.canonical_weight()))
    kinds = {name: type(module.get_submodule(name)) for name in start}
    assert kinds.pop("net.cross.v_proj") is DenseProjection  # factors of rank 3 would not save
    assert set(kinds.values()) == {LowRankProjection}


@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_kernels_are_matrices_of_the_scheme_before_and_after_the_switch(scheme):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(4, 3))
    monitor, logger = EffectiveRankMonitor(1, layers=["*1"], scheme=scheme), Rows()
    switch = SpectralFactorization(at_step=1, rank=1.0, min_saving=-1, scheme=scheme, skip=["net.3"])
    fit(Regression(net, "sgd"), switch, monitor, steps=3, logger=logger)
    before, *after = (row["effective_rank/net.1"] for row in logger.rows if "effective_rank/net.1" in row)
    assert len(after) == 3
    assert after == pytest.approx([before] * 3, rel=0.02)


@pytest.mark.parametrize("scheme", ["kxk-1x1", "1xk-kx1"])
def test_kernels_with_constants_are_the_matrices_of_plain_ones(scheme):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (2, 2, 3)), nn.Conv2d(2, 6, 2, groups=2), nn.Flatten(), nn.Linear(12, 3))
    asymmetrize(net, n_fix=1, kappa=1.0, skip=["3"])
    expected = effective_rank(net[1].to_layer(), scheme)
    monitor, logger = EffectiveRankMonitor(1, layers=["*1"], scheme=scheme), Rows()
    fit(Regression(net, "sgd"), monitor, steps=1, logger=logger)
    assert logger.rows[0]["effective_rank/net.1"] == pytest.approx(expected, rel=1e-5)


def test_a_weight_that_is_not_finite_is_left_out_and_warned_of():
    module, logger = Regression(), Rows()
    with torch.no_grad():
        module.net[2].weight[0, 0] = torch.nan
    with pytest.warns(UserWarning, match=r"leaves out net.2: their weights are not finite"):
        fit(module, EffectiveRankMonitor(), steps=1, logger=logger)
    assert "effective_rank/net.2" not in logger.rows[0]
    assert "effective_rank/net.0" in logger.rows[0]


def test_a_resumed_run_knows_the_spectra_of_the_start(tmp_path):
    saver = ModelCheckpoint(tmp_path, filename="end", every_n_train_steps=5)
    monitor = EffectiveRankMonitor(every_n_steps=5)
    fit(Regression(), monitor, saver, steps=5, enable_checkpointing=True)
    resumed = EffectiveRankMonitor(every_n_steps=5)
    fit(Regression(), resumed, steps=10, ckpt_path=tmp_path / "end.ckpt")
    first, again = monitor.state_dict()["first"], resumed.state_dict()["first"]
    assert all(torch.equal(values, again[name]) for name, values in first.items())


@pytest.mark.parametrize(
    ("arguments", "message"), [({"every_n_steps": 0}, "at least 1 but got 0"), ({"layers": ["head"]}, "'head'")]
)
def test_refusals(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(Regression(), EffectiveRankMonitor(**arguments), steps=1)
