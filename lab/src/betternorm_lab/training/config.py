"""The hyperparameters of a training run, and the data, network and learning rate that follow from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from betternorm.errors import UserError
from betternorm_lab import data as datasets
from betternorm_lab import models
from betternorm_lab.trials import Progress, Runtime, Trial

JUDGED_BY = ("top1", "top5", "cross_entropy")
SCHEDULES = ("cosine", "step", "constant")


def _field(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Config(Trial):
    """The hyperparameters of a training run.

    Examples::

        >>> config = Config(dataset="digits", norm="ghost", norm_options={"ghost_size": 16}, epochs=5)
        >>> trials.run_trial(config, "runs")["validation_top1"]
    """

    kind: ClassVar[str] = "training"

    dataset: str = _field("digits", "a known dataset, a folder with one folder per class, or a .npz file")
    image_size: int | None = _field(None, "input size (that of the dataset)")
    classes: int | None = _field(None, "use only the first N classes")
    train_examples: int | None = _field(None, "use only N training examples")
    augment: bool = _field(True, "random crops and flips")
    classes_per_batch: int | None = _field(None, "classes per batch, for batches that are not i.i.d.")

    network: str = _field("resnet18", "resnet18, a large one by name, timm:NAME, torchvision:NAME or file.py:function")
    width: int = _field(64, "filters of resnet18's first stage")
    blocks: tuple[int, ...] = _field((2, 2, 2, 2), "blocks in each stage of resnet18")
    stem_stride: int = _field(1, "stride of resnet18's first convolution")
    norm: str = _field("batch", f"one of {', '.join(models.NORMS)}, or package.module:function")
    norm_options: Mapping[str, Any] | tuple[tuple[str, Any], ...] = _field((), "its options, like ghost_size=16")
    averages_over: int | None = _field(
        None, "window of the moving averages in examples (default: each layer's momentum)"
    )
    finetune_from: str | None = _field(None, "initial weights: a file, or trial:KEY")

    batch_size: int = _field(128, "examples per batch, over all processes")
    accumulate: int = _field(1, "micro-batches per step; statistics are per micro-batch")
    epochs: int = _field(30, "passes over the training data")
    steps_per_epoch: int | None = _field(None, "steps per epoch (all batches)")
    learning_rate: float = _field(0.1, "peak learning rate of SGD")
    momentum: float = _field(0.9, "of SGD")
    nesterov: bool = _field(False, "Nesterov's momentum")
    schedule: str = _field("cosine", f"of the learning rate: {', '.join(SCHEDULES)}")
    milestones: tuple[float, ...] = _field(
        (0.5, 0.75), "where schedule=step reduces the learning rate, as fractions of training"
    )
    step_factor: float = _field(0.1, "factor of the learning rate there")
    warmup_epochs: float = _field(0.0, "epochs of linear warmup")
    weight_decay: float = _field(5e-4, "of the weights")
    norm_decay: str | float = _field("none", "on gamma and beta: none, all, auto (where it has an effect) or a number")
    gamma_target: int = _field(0, "what gamma decays toward: 0 or 1")
    label_smoothing: float = _field(0.0, "of the training loss")
    precision: str = _field("32-true", "as Lightning Fabric names it: 32-true, bf16-mixed, 16-mixed ...")

    validate_every: int = _field(1, "epochs between validations; 0: only at the end")
    tune_alpha: bool = _field(True, "tune alpha on the validation data after training")
    alpha_objective: str = _field("cross_entropy", f"what alpha is tuned for: {', '.join(JUDGED_BY)}")
    alpha_grid: tuple[float, ...] = _field((), "evaluate exactly these alphas instead of searching")
    test: bool = _field(True, "evaluate on the test data, once, at the end")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, holds, wanted in (
            ("epochs", self.epochs >= 1, "1 or more"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("accumulate", self.accumulate >= 1 and self.batch_size % self.accumulate == 0, "a divisor of batch_size"),
            ("steps_per_epoch", self.steps_per_epoch is None or self.steps_per_epoch >= 1, "1 or more"),
            ("averages_over", self.averages_over is None or self.averages_over >= 1, "1 or more"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("gamma_target", self.gamma_target in (0, 1), "0 or 1"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1"),
            ("validate_every", self.validate_every >= 0, "0 or more"),
            ("alpha_objective", self.alpha_objective in JUDGED_BY, f"one of {', '.join(JUDGED_BY)}"),
        ):
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)!r}; it must be {wanted}")

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        from betternorm_lab.training.session import train  # which needs this class

        return train(self, folder, runtime, progress)


def load_data(config: Config, runtime: Runtime) -> datasets.Data:
    return datasets.load(
        config.dataset,
        runtime.data_root,
        image_size=config.image_size,
        classes=config.classes,
        train_examples=config.train_examples,
        download=runtime.download,
    )


def build_model(config: Config, data: datasets.Data, weights: Path | None = None) -> nn.Module:
    """The model of a configuration, initialized by its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = models.build(
            config.network,
            data.num_classes,
            in_channels=data.facts.channels,
            width=config.width,
            blocks=config.blocks,
            stem_stride=config.stem_stride,
            norm=config.norm,
            norm_options=dict(config.norm_options),
            weights=weights,
        )
    if config.averages_over is not None:
        set_window(model, config.averages_over, config.batch_size // config.accumulate)
    return model


def set_window(model: nn.Module, examples: int, batch_size: int) -> None:
    """Set the window of all moving averages in examples, independently of the batch size.

    After that many ``examples`` the weight of the past is 1/e.
    """
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            layer.momentum = -math.expm1(-batch_size / examples)


def learning_rate(config: Config, step: int, steps_per_epoch: int) -> float:
    """At a step, counted from 0."""
    warmup = config.warmup_epochs * steps_per_epoch
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    part = (step - warmup) / max(1.0, config.epochs * steps_per_epoch - warmup)
    if config.schedule == "cosine":
        return config.learning_rate * (1 + math.cos(math.pi * part)) / 2
    if config.schedule == "step":
        return config.learning_rate * config.step_factor ** sum(part >= milestone for milestone in config.milestones)
    return config.learning_rate
