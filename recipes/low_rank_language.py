"""Tables 1, 4, 7 and figures 1, 3 to 5 of Exploring Low Rank Training of Deep Neural Networks: a language model.

Transformers of which each layer is a product of two factors, ``W = U V^T``, against the dense network. At the first
width and rank: how the factors are initialised, whether weight decay shrinks each factor or their product, whether
there was some dense training before, and what half the step size does. At the other widths and ranks: spectral
initialisation with Frobenius decay, from scratch and after dense training. All of a seed begin with the same dense
weights and see the same batches. Finished trainings lie in the folder of the results and are not repeated.

Expected on the default (source text of Python 3.11's standard library, seed 0, 290 CPU seconds on a busy machine, half
of that on 2 free cores): test perplexity after 300 updates 8.8 for the dense network of width 64, 9.5 to 11.2 with
factors of rank ratio 0.25, the lower for a pre-training; effective rank 12 against 6 to 7; a barrier of 0.25 on the way
from the dense network, of 0.04 after pre-training. So few updates show little of the decay: recipes/README.md has
longer runs.

    python recipes/low_rank_language.py
    python recipes/low_rank_language.py --config recipes/configs/lm1b.yaml --text DIR
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from low_rank_results import Quality, report
from low_rank_training import (
    Cell,
    Decay,
    Init,
    Start,
    Task,
    compare,
    half_step_cells,
    warmup_then_cosine,
)
from shared import check_batch_size, quiet, run_script
from torch import nn
from torchmetrics.text import Perplexity

import lightning_symmetry as ls

QUALITY = Quality("test_perplexity", "test perplexity", 1.0, 3)


@dataclass
class Setting:
    """Train the language model with each initialisation, decay and start, and with each width and rank.

    Args:
        inits: Initialisations of the factors.
        decays: Decay of each factor ("l2", AdamW's) or of their product ("frobenius").
        starts: Factors from the beginning ("scratch"), or after dense training ("pretrained").
        ranks: Shares of the full rank; the comparison of initialisations is made at the first one.
        widths: Widths of the Transformer; the comparison of initialisations is made at the first one.
        half_steps: Whether to train with half the step size as well, with spectral initialisation.
        seeds: Number of seeds, from ``seed`` on.
        seed: First seed, of initialisation and order of the data.
        text: "stdlib" for the source of Python's standard library, a text file, or a folder of them; LM1B's, too.
        tokens: What a token is.
        vocab_size: Most frequent words that are tokens; ignored for bytes.
        context: Tokens of a sample.
        max_tokens: Most tokens of the training split; default: all.
        test_fraction: Share of the text that is held out for testing, where it has no such split.
        cache_dir: Folder for the tokens of a text that is too large for memory.
        num_workers: Processes that load batches.
        depth: Blocks of the Transformer.
        heads: Heads of each attention.
        dropout: Probability of dropout.
        factorize_embedding: Whether the embedding, and the head that is tied to it, gets factors.
        min_saving: Layers that would save a smaller share of their parameters stay dense; -1 for none.
        pretrain: Share of the updates with dense layers, where there is a pre-training.
        steps: Updates of each training, the dense ones among them.
        batch_size: Batch size, of all devices together.
        learning_rate: Peak learning rate of AdamW; it falls to zero along a cosine.
        warmup: Updates until the peak.
        weight_decay: Decay of matrices, or of the products.
        clip: Norm of the gradient at which it is clipped.
        every_n_steps: Updates between two measurements of the effective ranks.
        devices: Devices of each training; more than one runs the trainings one after the other.
        precision: Precision of the Trainer.
        workers: Processes of one thread each, 0 for none; default: one a core, none on an accelerator.
        out_dir: Folder for results and figures.
    """

    inits: list[Init] = field(default_factory=lambda: ["random", "spectral", "spectral_ones"])
    decays: list[Decay] = field(default_factory=lambda: ["l2", "frobenius"])
    starts: list[Start] = field(default_factory=lambda: ["scratch", "pretrained"])
    ranks: list[float] = field(default_factory=lambda: [0.25, 0.125])
    widths: list[int] = field(default_factory=lambda: [64, 32])
    half_steps: bool = True
    seeds: int = 1
    seed: int = 0
    text: str = "stdlib"
    tokens: Literal["byte", "word"] = "byte"
    vocab_size: int = 10_000
    context: int = 64
    max_tokens: int | None = None
    test_fraction: float = 0.01
    cache_dir: str | None = None
    num_workers: int = 0
    depth: int = 2
    heads: int = 4
    dropout: float = 0.0
    factorize_embedding: bool = False
    min_saving: float = 0.0
    pretrain: float = 1 / 6
    steps: int = 300
    batch_size: int = 32
    learning_rate: float = 3e-3
    warmup: int = 30
    weight_decay: float = 0.1
    clip: float = 1.0
    every_n_steps: int = 30
    devices: int = 1
    precision: str = "32-true"
    workers: int | None = None
    out_dir: str = "runs/low_rank_language"


def make_data(setting: Setting) -> ls.TextData:
    """Return the data module."""
    return ls.TextData(
        setting.text,
        tokens=setting.tokens,
        vocab_size=setting.vocab_size if setting.tokens == "word" else None,
        context=setting.context,
        batch_size=setting.batch_size // setting.devices,
        val_fraction=0.0,
        test_fraction=setting.test_fraction,
        max_tokens=setting.max_tokens,
        num_workers=setting.num_workers,
        cache_dir=setting.cache_dir,
    )


def make_network(setting: Setting, data: ls.TextData, width: int) -> nn.Module:
    """Return the dense network."""
    return ls.TransformerLM(
        data.vocab_size, setting.context, width, setting.depth, setting.heads, dropout=setting.dropout
    )


def make_task(setting: Setting) -> Task:
    """Return what the trainings share."""
    embedding = [] if setting.factorize_embedding else ["net.embedding", "net.head"]
    return Task(
        make_data=partial(make_data, setting),
        make_network=partial(make_network, setting),
        optimizer=partial(torch.optim.AdamW, lr=setting.learning_rate),
        weight_decay=setting.weight_decay,
        decoupled=True,
        limits={
            "max_steps": setting.steps,
            "gradient_clip_val": setting.clip,
            "devices": setting.devices,
            "precision": setting.precision,
        },
        schedule=partial(warmup_then_cosine, warmup=setting.warmup),
        pretrain=setting.pretrain,
        skip=["net.positions", *embedding],
        loss=ls.token_cross_entropy,
        metrics={"perplexity": Perplexity()},
        min_saving=setting.min_saving,
        every_n_steps=setting.every_n_steps,
    )


def cells(setting: Setting) -> list[Cell]:
    """Return what is trained beside the dense networks."""
    rank, width = setting.ranks[0], setting.widths[0]
    found = [
        Cell(init, decay, start, rank, width)
        for decay, start, init in product(setting.decays, setting.starts, setting.inits)
    ]
    if "spectral" in setting.inits and "frobenius" in setting.decays:
        found += [
            Cell("spectral", "frobenius", start, other, size)
            for size, other, start in product(setting.widths, setting.ranks, setting.starts)
            if (size, other) != (width, rank)
        ]
    return [*found, *half_step_cells(setting)]


def main(setting: Setting) -> list[dict[str, Any]]:
    """Run the recipe and return the results of all trainings."""
    quiet()
    check_batch_size(setting)
    make_data(setting).prepare_data()
    title = f"Transformer on {Path(setting.text).name}"
    results = compare(make_task, setting, cells(setting), setting.steps, title)
    if rank_zero_only.rank == 0:  # of several devices' processes
        report(setting, results, QUALITY, title, "low_rank_language")
    return results


if __name__ == "__main__":
    run_script(main, Setting)
