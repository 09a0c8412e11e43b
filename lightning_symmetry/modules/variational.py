"""Make a LightningModule Bayesian: a Gaussian posterior, trained by the evidence lower bound in the same Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_symmetry.modules.supervised import SupervisedModule
from lightning_symmetry.modules.variational_averaging import averaged, measures
from lightning_symmetry.modules.variational_checkpoints import load_layout, save_layout
from lightning_symmetry.modules.variational_conversion import (
    averaged_predictor,
    convert,
    is_variational,
    makes_layers_later,
)
from lightning_symmetry.modules.variational_data import batch_size, num_training_samples, warn_of_several_targets
from lightning_symmetry.modules.variational_noise import evaluation_place, finished_batches, seeded
from lightning_symmetry.modules.variational_settings import VariationalSettings, check_names
from lightning_symmetry.modules.variational_steps import wrap_steps
from lightning_symmetry.modules.whole_parameters import check_whole_parameters
from lightning_symmetry.variational.elbo import kl_warmup, negative_elbo
from lightning_symmetry.variational.posterior import check_finite, kl_divergence
from lightning_symmetry.variational.predictive import Outputs

Step = Callable[..., Any]


class VariationalMixin:
    r"""Make a LightningModule Bayesian; put it before the LightningModule in the bases.

    .. math:: -\frac{\mathrm{ELBO}}{N} = \frac1S \sum_{s=1}^S \mathrm{loss}(w_s) + \frac{\lambda}{N}
        \mathrm{KL}(q \,\|\, \text{prior}), \quad w_s \sim q

    Weights get a Gaussian posterior (:func:`~lightning_symmetry.variational.to_variational`): at the end of this
    constructor, or, where layers may come later, in ``configure_model``, which the Trainer and ``load_from_checkpoint``
    call: if there are none yet, if a class in front of this one has a constructor, or if one has a ``configure_model``.
    Layers of metrics and losses get none.

    **Training.** ``training_step`` returns the mean negative log-likelihood of a batch in nats, as a tensor or as
    ``"loss"`` of a dictionary; it is called S times, and the bound takes its place. Where the loss is a mean over
    tokens or pixels, N is the number of all of these: give ``num_data``. Logged by epoch are ``vi/nll``, the mean loss;
    ``vi/kl``, the whole divergence in nats; and ``vi/elbo``, the bound for one sample at temperature 1,
    :math:`-\mathrm{nll} - \mathrm{KL} / N`. Batch-norm statistics and metrics see all S calls.

    **Evaluation.** In ``validation_step`` and ``test_step`` what the predictor returns is the logarithm of mean
    probabilities over samples, which are logits of these, so that losses and metrics are those of the average.
    ``predict_step`` returns ``{"probabilities", "entropy", "mutual_information"}``, of values ``{"mean", "variance"}``;
    see :class:`~lightning_symmetry.variational.Predictive`.

    **Noise** of a step comes from a seed of its own, of the random seed when fitting starts, which is in the
    checkpoint, the process, the number of batches before (of evaluation: the batch's place) and the sample: it differs
    between processes and accumulated batches, is the same in every validation and after resuming, and leaves the global
    random states as they were. Dropout and whatever else a step draws comes from that seed too.

    **Checkpoints** have the layout of the posterior, whose constants are not in the state dict; a module gets it before
    the weights are loaded, whatever it was built with. Weights of a deterministic checkpoint become the means; its
    optimizer is not resumed. After ``to_mean(module.net)`` the state dict is the deterministic one.

    Args:
        *args: Arguments of the base class.
        num_data: Number N of training samples in all processes. None: that of the training loader's data set, or the
            true entries of the ``train_mask`` of graphs.
        num_samples_train: S.
        num_samples_predict: Number of samples that evaluation averages.
        temperature: :math:`\lambda`; below 1 a cold posterior. An augmentation that counts as m times the data is 1/m.
        kl_warmup_steps: Number of optimizer steps in which :math:`\lambda` rises linearly.
        posterior: Arguments of :func:`~lightning_symmetry.variational.to_variational`, such as ``{"rank": 4, "skip":
            ["net.head"]}``; names of layers are those in this module. None: its defaults, or what the network has.
        outputs: What the predictor returns: ``"logits"``, ``"probabilities"``, or ``"values"`` of a regression.
        class_dim: Axis of the classes; None: each output is one of two classes. One logit is binary.
        predictor: Name of the submodule whose outputs are averaged, which each step must call; ``""`` is the module
            itself. None: the only child with parameters, or else the module itself.
        **kwargs: Named arguments of the base class.

    Raises:
        ValueError: If an argument is out of range.
        MisconfigurationException: If there is nothing to convert; under manual optimization; if the strategy shards
            parameters; if N cannot be told; if a step does not call the predictor; or if an argument is one of the base
            class too, which was not given it.

    Source: The Empirical Impact of Neural Parameter Symmetries, or Lack Thereof (2024), section 5.2, App. E.2.

    Example::

        >>> import lightning.pytorch as pl
        >>> from torch import nn
        >>> from lightning_symmetry.modules import SupervisedModule, VariationalMixin
        >>> class Bayesian(VariationalMixin, SupervisedModule):
        ...     pass
        >>> module = Bayesian(nn.Sequential(nn.Linear(2, 3)), posterior={"rank": 2})
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Put training by the bound and averaging around the steps of a class."""
        super().__init_subclass__(**kwargs)
        wrap_steps(cls, VariationalMixin, _around)

    def __init__(
        self,
        *args: Any,
        num_data: int | None = None,
        num_samples_train: int = 1,
        num_samples_predict: int = 25,
        temperature: float = 1.0,
        kl_warmup_steps: int = 0,
        posterior: Mapping[str, Any] | None = None,
        outputs: Outputs = "logits",
        class_dim: int | None = -1,
        predictor: str | None = None,
        **kwargs: Any,
    ) -> None:
        settings = VariationalSettings(
            num_data,
            num_samples_train,
            num_samples_predict,
            temperature,
            kl_warmup_steps,
            posterior,
            outputs,
            class_dim,
            predictor,
        )
        check_names(settings, super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)
        self.variational = settings
        self._vi_converted, self._vi_in_step = False, False
        self._vi_seed: int | None = None
        self._vi_num_data = num_data
        self._vi_calls = 0
        if not makes_layers_later(type(self), VariationalMixin):
            self._vi_convert()

    def _vi_convert(self) -> None:
        """Convert the layers, once."""
        if self._vi_converted:
            return
        self._vi_converted = is_variational(self)
        if self._vi_converted and self.variational.posterior is not None:
            raise MisconfigurationException(
                f"The network of {type(self).__name__} is variational already: leave `posterior` out, or call "
                "to_mean(net) first."
            )
        self._vi_converted = self._vi_converted or convert(self, self.variational.posterior or {})

    def configure_model(self) -> None:
        """Convert the layers, if that was not done by the constructor."""
        super().configure_model()
        self._vi_convert()
        if not self._vi_converted:
            raise MisconfigurationException(
                f"VariationalMixin found nothing to convert in {type(self).__name__}: it has no linear layer, "
                "convolution or embedding that can have a posterior."
            )

    def setup(self, stage: str) -> None:
        """Check the trainer and note the random seed."""
        super().setup(stage)
        if stage == "fit":
            check_whole_parameters(self.trainer, "VariationalMixin")
            if not self.automatic_optimization:
                raise MisconfigurationException(
                    f"VariationalMixin replaces the loss that a training step returns, but {type(self).__name__} "
                    "optimizes manually: set `automatic_optimization = True`, or use kl_divergence and negative_elbo."
                )
        if stage == "fit" or self._vi_seed is None:
            self._vi_seed = self.trainer.strategy.broadcast(torch.initial_seed())
        self._vi_num_data = self.variational.num_data

    def predictor_module(self) -> nn.Module:
        """Return the submodule whose outputs are averaged.

        Raises:
            MisconfigurationException: If there is none of its name, or it does not hold all variational layers.
        """
        return averaged_predictor(self, self.variational.predictor)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the layout of the posterior and the seed of the noise."""
        super().on_save_checkpoint(checkpoint)
        save_layout(self, checkpoint, self._vi_seed)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the posterior of a checkpoint, before its weights are loaded."""
        self._vi_convert()
        seed = load_layout(self, checkpoint)
        self._vi_seed = self._vi_seed if seed is None else seed
        super().on_load_checkpoint(checkpoint)

    def _vi_seeded(self, *place: Any) -> Any:
        if self._vi_seed is None:
            self._vi_seed = torch.initial_seed()
        return seeded(self.device, self._vi_seed, self.global_rank, *place)

    def _vi_train(self, step: Step, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return the bound in the place of the loss, or in a dictionary of the last sample."""
        losses, result = [], None
        trainer, self._vi_calls = self._trainer, self._vi_calls + 1
        if trainer is not None and not trainer.training and not is_variational(self):  # a callback evaluates the mean
            return step(*args, **named)
        place = self._vi_calls if trainer is None else finished_batches(trainer)
        batch = args[0] if args else next(iter(named.values()))
        num_data = self._vi_count(batch)
        for sample in range(self.variational.num_samples_train):
            with self._vi_seeded("train", place, sample):
                result = step(*args, **named)
            loss = result.get("loss") if isinstance(result, Mapping) else result
            if not isinstance(loss, Tensor):  # a batch to skip, or what Lightning refuses
                return result
            losses.append(loss)
        nll, kl = sum(losses[1:], losses[0]) / len(losses), kl_divergence(self)
        if not bool(kl.isfinite()):
            check_finite(self)
            raise ValueError(f"The divergence is {float(kl.detach())}, though all parameters are finite.")
        weight = kl_warmup(self.global_step, self.variational.kl_warmup_steps, self.variational.temperature)
        bound = negative_elbo(nll, kl, num_data, weight)
        if trainer is not None:
            nll, kl = nll.detach().float(), kl.detach().float()
            logged = {"vi/nll": nll, "vi/kl": kl, "vi/elbo": -negative_elbo(nll, kl, num_data)}
            self.log_dict(logged, on_step=False, on_epoch=True, sync_dist=True, batch_size=batch_size(batch))
        return {**result, "loss": bound} if isinstance(result, Mapping) else bound

    def _vi_count(self, batch: Any) -> int:
        """Return N, found once a fit."""
        if self._vi_num_data is None:
            if self._trainer is None:
                raise MisconfigurationException("Without a Trainer, VariationalMixin needs `num_data=`.")
            self._vi_num_data = num_training_samples(self.trainer, batch)
            warn_of_several_targets(batch, self._vi_num_data)
        return self._vi_num_data

    def _vi_evaluate(self, split: str, step: Step, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Return what a step returns if its predictor returns averages; of prediction the averages."""
        settings, bayesian = self.variational, is_variational(self)
        if not bayesian and split != "predict":  # turned to its mean
            return step(*args, **named)
        count = settings.num_samples_predict if bayesian else 1
        place = evaluation_place(self._trainer, split, args, named)
        batch = args[0] if args else named.get("batch")
        if split == "predict" and _is_default(type(self).predict_step) and isinstance(batch, tuple | list):
            args = (batch[0], *args[1:])
        predictor = self.predictor_module()
        with self._vi_seeded(split, *place), averaged(predictor, count, settings.outputs, settings.class_dim) as found:
            result = step(*args, **named)
        if not found:
            name = next(name for name, module in self.named_modules() if module is predictor)
            raise MisconfigurationException(
                f"`{split}` averages what {f'self.{name}' if name else 'the module'} returns, but the step of "
                f"{type(self).__name__} did not call it: set `predictor` to the name of the submodule that it calls, "
                "with all variational layers in it, or let the step call self(...)."
            )
        return result if split != "predict" else measures(found, result, batch)


def _around(module: VariationalMixin, split: str, step: Step, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
    """Do what belongs around a step, but for one that another step calls."""
    if module._vi_in_step:
        return step(*args, **named)
    module._vi_in_step = True
    try:
        return (
            module._vi_train(step, args, named) if split == "train" else module._vi_evaluate(split, step, args, named)
        )
    finally:
        module._vi_in_step = False


def _is_default(step: Step) -> bool:
    return getattr(step, "__wrapped__", None) is pl.LightningModule.predict_step


class VariationalModule(VariationalMixin, SupervisedModule):
    """:class:`SupervisedModule` made Bayesian by :class:`VariationalMixin`; it has the arguments of both."""
