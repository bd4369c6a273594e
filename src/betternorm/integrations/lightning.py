"""A callback for Lightning's Trainer: normalization, weight decay and alpha, before and after training."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn, optim

from betternorm.advice import Diagnosis, diagnose, upgrade
from betternorm.conversion.convert import convert
from betternorm.decay import param_groups
from betternorm.integrations import torchvision as torchvision_support
from betternorm.weighing.alpha import get_alpha, set_alpha, weighed_layers
from betternorm.weighing.batches import Forward, evaluating
from betternorm.weighing.metrics import AnyMetric
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

torchvision_support.ready_if_installed()  # Lightning imports it

from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.utilities import rank_zero_info  # noqa: E402

# Attributes of torch's schedulers with one entry per parameter group.
_PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs")


class BetterNorm(Callback):
    """Convert the module before training, set the weight decay of norm layers, and tune alpha after training.

    The module is converted before ``configure_optimizers`` and before it is wrapped for several devices, also when
    resuming and testing, so that checkpoints of the run always fit. Outside of a Trainer, convert a module with
    ``convert(module, "weighed")`` before it loads a checkpoint that contains alphas.

    Args:
        batch_size: the number of examples per process; the module is converted to the norm layer that
            :func:`betternorm.advise` recommends.
        to: the norm layer to convert to, instead of ``batch_size``. With neither, layers are converted to "weighed",
            which does not change training.
        norm_decay: weight decay on gammas and betas: ``"auto"`` (where it has an effect), ``"all"``, ``"none"``, or
            None to leave the optimizers unchanged. Parameters that :func:`betternorm.param_groups` would not decay are
            moved into separate parameter groups, also in the schedulers. The module's ``example_input_array`` is used
            if set.
        diagnose: whether to run :func:`betternorm.diagnose` on the validation data first, and log the findings.
        tune: whether to tune alpha after training, on the first validation loader.
        objective, forward: as for :func:`betternorm.tune_alpha`. With several processes, the first one tunes alpha on
            its share of the data and broadcasts it.
        options: of :func:`betternorm.convert`, for ``to``.

    Attributes:
        found: the :class:`betternorm.AlphaSearch`, after training.
        diagnosis: the :class:`betternorm.Diagnosis`, if ``diagnose=True``.

    Examples::

        trainer = Trainer(callbacks=[BetterNorm(batch_size=128)])
        trainer.fit(module, train_loader, val_loader)
    """

    def __init__(
        self,
        batch_size: int | None = None,
        *,
        to: str | None = None,
        norm_decay: str | None = "auto",
        diagnose: bool = False,
        tune: bool = True,
        objective: AnyMetric | None = None,
        forward: Forward | None = None,
        **options: Any,
    ) -> None:
        if batch_size is not None and to is not None:
            raise ValueError(f"batch_size={batch_size} and to={to!r} exclude each other; pass one of them")
        if options and to is None:
            raise TypeError(f"{', '.join(options)}: options of a conversion need to=...")
        if norm_decay not in ("auto", "all", "none", None):
            raise ValueError(f'norm_decay is {norm_decay!r}; it must be "auto", "all", "none" or None')
        self.batch_size, self.to, self.options = batch_size, to, options
        self.diagnose = diagnose
        self.diagnosis: Diagnosis | None = None
        self.norm_decay, self.tune, self.objective, self.forward = norm_decay, tune, objective, forward
        self.found: AlphaSearch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if weighed_layers(pl_module):
            return  # converted in an earlier stage
        if self.batch_size is not None:
            upgrade(pl_module, self.batch_size, verbose=trainer.is_global_zero)
        else:
            convert(pl_module, self.to or "weighed", **self.options)  # type: ignore[call-overload]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.norm_decay is None:
            return
        example = pl_module.example_input_array
        if isinstance(example, torch.Tensor):
            example = example.to(pl_module.device)
        groups = param_groups(pl_module, 1.0, self.norm_decay, example_input=example)
        decayed = {parameter for group in groups if group["weight_decay"] for parameter in group["params"]}
        for optimizer in trainer.optimizers:
            added = regroup(optimizer, decayed)
            for config in trainer.lr_scheduler_configs:
                _extend(config.scheduler, optimizer, added)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not (self.tune or self.diagnose):
            return
        loader = trainer.val_dataloaders
        if isinstance(loader, (list, tuple)):
            loader = loader[0] if loader else None
        if loader is None:
            warnings.warn("alpha was not tuned: the Trainer has no validation data", stacklevel=2)
            return
        if self.diagnose:  # on every rank, because ranks are compared
            with torch.inference_mode(False), evaluating(pl_module):
                self.diagnosis = diagnose(pl_module, loader, forward=self.forward)
            rank_zero_info(str(self.diagnosis))
        if not self.tune:
            return
        if trainer.is_global_zero:
            with torch.inference_mode(False):
                self.found = tune_alpha(pl_module, loader, objective=self.objective, forward=self.forward)
            rank_zero_info(str(self.found))
        set_alpha(pl_module, trainer.strategy.broadcast(get_alpha(pl_module)))


def regroup(optimizer: optim.Optimizer, decayed: set[nn.Parameter]) -> list[int]:
    """Remove the weight decay of all other parameters, by moving them into new groups with otherwise equal options.

    Returns the index of the group that each new group was split from.
    """
    added = []
    for index, group in enumerate(list(optimizer.param_groups)):
        if not group.get("weight_decay"):
            continue
        stays = [parameter in decayed for parameter in group["params"]]
        if not any(stays):
            group["weight_decay"] = 0.0
        elif not all(stays):
            rest = {**group, "weight_decay": 0.0}
            for key in ("params", "param_names"):
                if key in group:
                    rest[key] = [item for item, stay in zip(group[key], stays, strict=True) if not stay]
                    group[key] = [item for item, stay in zip(group[key], stays, strict=True) if stay]
            if "param_names" in rest:  # the format of add_param_group
                rest["params"] = list(zip(rest.pop("param_names"), rest["params"], strict=True))
            optimizer.add_param_group(rest)
            added.append(index)
    return added


def _extend(scheduler: Any, optimizer: optim.Optimizer, added: list[int]) -> None:
    """Let a scheduler treat the new groups like those they were split from."""
    for inner in getattr(scheduler, "_schedulers", ()):
        _extend(inner, optimizer, added)
    if getattr(scheduler, "optimizer", None) is not optimizer:
        return
    for name in _PER_GROUP:
        values = getattr(scheduler, name, None)
        if isinstance(values, list):
            values.extend([values[index] for index in added])
