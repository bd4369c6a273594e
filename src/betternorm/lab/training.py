"""Training a network and judging it (section 4): one configuration in, one row out, whatever happens on the way.

A run can be killed at any moment and started again; on a CPU it ends bit for bit where an undisturbed one ends. That
rests on three things: an epoch's batches follow from the seed and the epoch alone, the learning rate from the step
alone, and the rest is in a checkpoint that is replaced in one stroke after every epoch.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from betternorm.decay import decay_toward_one, param_groups
from betternorm.display.progress import Bar
from betternorm.errors import UncertainGainWarning, UserError
from betternorm.lab import data as datasets
from betternorm.lab import models
from betternorm.lab.store import atomic, make_folder
from betternorm.lab.trials import Progress, Runtime, Trial
from betternorm.surgery import convert
from betternorm.weighing.alpha import get_alpha, set_alpha
from betternorm.weighing.metrics import METRICS
from betternorm.weighing.search import tune_alpha

JUDGED_BY = ("top1", "top5", "cross_entropy")
SCHEDULES = ("cosine", "step", "constant")


def _field(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Config(Trial):
    """What is trained, on what, and how: the hyperparameters of a run, each with its default, in one place.

    Examples::

        >>> config = Config(dataset="digits", norm="ghost", norm_options={"ghost_size": 16}, epochs=5)
        >>> trials.run(config, "runs")["validation_top1"]
    """

    kind: ClassVar[str] = "training"

    dataset: str = _field("digits", "a known dataset, a folder with a folder a class, or a .npz file")
    image_size: int | None = _field(None, "side the network sees (the dataset's own)")
    classes: int | None = _field(None, "keep the first so many classes")
    train_examples: int | None = _field(None, "keep so many training examples")
    augment: bool = _field(True, "random crops and flips")
    classes_per_batch: int | None = _field(None, "batches that are not i.i.d.: so many classes in each")

    network: str = _field("resnet18", "resnet18, a large one by name, timm:NAME, torchvision:NAME or file.py:function")
    width: int = _field(64, "filters of resnet18's first stage")
    blocks: tuple[int, ...] = _field((2, 2, 2, 2), "blocks in each stage of resnet18")
    stem_stride: int = _field(1, "stride of resnet18's first convolution")
    norm: str = _field("batch", f"one of {', '.join(models.NORMS)}, or package.module:function")
    norm_options: tuple[tuple[str, Any], ...] = _field((), "its options, like ghost_size=16")
    finetune_from: str | None = _field(None, "a file of weights to begin from, or trial:KEY")

    batch_size: int = _field(128, "examples in a step, over all processes")
    accumulate: int = _field(1, "parts that a batch is worked through in; statistics are of a part")
    epochs: int = _field(30, "passes over the training data")
    steps_per_epoch: int | None = _field(None, "end an epoch after so many steps")
    learning_rate: float = _field(0.1, "of SGD, at its highest")
    momentum: float = _field(0.9, "of SGD")
    nesterov: bool = _field(False, "Nesterov's momentum")
    schedule: str = _field("cosine", f"of the learning rate: {', '.join(SCHEDULES)}")
    milestones: tuple[float, ...] = _field((0.5, 0.75), "where schedule=step steps, as parts of the training")
    step_factor: float = _field(0.1, "what it multiplies the learning rate by there")
    warmup_epochs: float = _field(0.0, "epochs of linear warmup")
    weight_decay: float = _field(5e-4, "of the weights")
    norm_decay: str | float = _field("none", "of gamma and beta: none, all, auto (where it can act) or a number")
    gamma_target: int = _field(0, "what gamma decays toward: 0 or 1")
    label_smoothing: float = _field(0.0, "of the training loss")
    precision: str = _field("32-true", "as Lightning Fabric names it: 32-true, bf16-mixed, 16-mixed ...")

    validate_every: int = _field(1, "epochs between validations; 0 is only at the end")
    tune_alpha: bool = _field(True, "tune inference example weighing on the validation data at the end")
    alpha_objective: str = _field("cross_entropy", f"what alpha is tuned for: {', '.join(JUDGED_BY)}")
    alpha_grid: tuple[float, ...] = _field((), "try exactly these alphas instead of searching")
    test: bool = _field(True, "read the test data, once, at the very end")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, holds, wanted in (
            ("epochs", self.epochs >= 1, "1 or more"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("accumulate", self.accumulate >= 1 and self.batch_size % self.accumulate == 0, "a divisor of batch_size"),
            ("steps_per_epoch", self.steps_per_epoch is None or self.steps_per_epoch >= 1, "1 or more"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "above 0"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}"),
            ("gamma_target", self.gamma_target in (0, 1), "0 or 1"),
            ("label_smoothing", 0 <= self.label_smoothing < 1, "from 0 to below 1"),
            ("validate_every", self.validate_every >= 0, "0 or more"),
            ("alpha_objective", self.alpha_objective in JUDGED_BY, f"one of {', '.join(JUDGED_BY)}"),
        ):
            if not holds:
                raise UserError(f"{name} is {getattr(self, name)!r}; it has to be {wanted}")

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        return run(self, folder, runtime, progress)


def run(
    config: Config,
    folder: str | os.PathLike[str],
    runtime: Runtime | None = None,
    progress: Progress = lambda part: None,
) -> dict[str, Any]:
    """Train, tune alpha on validation data, read the test set once. Goes on from what is in ``folder``.

    Returns the numbers of the row: for each of validation and test ``<split>_<metric>`` as trained and
    ``<split>_<metric>_tuned`` with the tuned alpha; ``alpha``, the best for the objective on validation data, and
    ``alpha_<metric>``, the best for each; ``alpha_table`` with the validation metrics at every alpha tried and
    ``test_table`` at those just named; ``history`` by epoch. The network, with its alpha, is left in ``model.pt``.
    """
    runtime = runtime or Runtime()
    folder = Path(folder)
    make_folder(folder)
    finished = _read(folder / "model.pt", config)
    if finished is not None:
        return finished["result"]
    with deterministic(runtime.deterministic):
        session = Session(config, folder, runtime)
        session.train(progress)
        result = session.judge()
        if session.fabric.is_global_zero:
            _write(folder / "model.pt", config, {"model": session.model.state_dict(), "result": result})
            (folder / "checkpoint.pt").unlink(missing_ok=True)
        session.fabric.barrier()
    return result


def trained(config: Config, folder: str | os.PathLike[str], runtime: Runtime | None = None) -> nn.Module:
    """The network that :func:`run` left in ``folder``, in evaluation mode, with its tuned alpha."""
    saved = _read(Path(folder) / "model.pt", config)
    if saved is None:
        raise UserError(f"there is no trained network in {folder}; run the trial first")
    data = load_data(config, runtime or Runtime())
    model = build_model(config, data)
    if saved["result"].get("alpha") is not None:
        convert(model, "weighed")  # as tuning did
    model.load_state_dict(saved["model"])
    return model.eval()


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
    """The network of a configuration, initialised by its seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return models.build(
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


def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], alphas: Iterable[float | None] = (None,)
) -> list[dict[str, float]]:
    """The metrics over some batches, once through, for each alpha; None leaves the layers as they are."""
    alphas = list(alphas)
    sums = torch.zeros(len(alphas), len(JUDGED_BY), 2, dtype=torch.float64)
    before, was_training = get_alpha(model), model.training
    model.eval()
    with torch.inference_mode():
        for images, labels in batches:
            for number, alpha in enumerate(alphas):
                if alpha is not None:
                    set_alpha(model, alpha)
                logits = model(images)
                for column, name in enumerate(JUDGED_BY):
                    values, counts = METRICS[name].measure(logits, labels)
                    sums[number, column] += torch.stack([(values * counts).sum(), counts.sum()])
    if alphas != [None]:
        set_alpha(model, before)
    model.train(was_training)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        shared = sums.to(next(model.parameters()).device)  # where its processes can meet
        torch.distributed.all_reduce(shared)  # every process saw its own part of the split
        sums = shared.cpu()
    means = (sums[..., 0] / sums[..., 1]).tolist()
    return [dict(zip(JUDGED_BY, row, strict=True)) for row in means]


class Session:
    """A run in progress: the network, the optimizer, and how far they are."""

    def __init__(self, config: Config, folder: Path, runtime: Runtime) -> None:
        self.config, self.folder, self.runtime = config, folder, runtime
        from betternorm.lab.fabric import launch  # slow to import, and needed only here

        self.fabric = launch(config.precision, runtime)
        self.device = self.fabric.device
        self.data = load_data(config, runtime)
        self.train_loader = self._loader(
            self.data.train,
            config.batch_size,
            train=True,
            augment=config.augment,
            classes_per_batch=config.classes_per_batch,
            steps=config.steps_per_epoch,
        )
        self.steps_per_epoch = len(self.train_loader)
        shares = self.fabric.world_size * config.accumulate
        if config.batch_size % shares:
            raise UserError(
                f"batch_size is {config.batch_size}; it has to be a multiple of {shares}, the "
                f"{self.fabric.world_size} processes times accumulate={config.accumulate}"
            )
        _seed(config.seed + self.fabric.global_rank)
        self.model = build_model(config, self.data, _weights_of(config, folder))
        if runtime.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        self.optimizer = self._optimizer()
        compiled = torch.compile(self.model) if runtime.compile else self.model
        self.forward, self.stepper = self.fabric.setup(compiled, self.optimizer)
        self.epoch, self.history = 0, []
        self._resume()

    def train(self, progress: Progress) -> None:
        """All epochs that are left, with a checkpoint after each."""
        total = self.config.epochs * self.steps_per_epoch
        show = self.runtime.show if self.fabric.is_global_zero else False
        with Bar("training", total, show, self.epoch * self.steps_per_epoch) as bar, self._curves() as curves:
            while self.epoch < self.config.epochs:
                self._epoch(bar, progress)
                for name, value in self.history[-1].items():
                    curves.add_scalar(name, value, self.epoch)

    def judge(self) -> dict[str, Any]:
        """Validation, alpha, and then the test set, which nothing before this has read."""
        result: dict[str, Any] = {
            "steps": self.config.epochs * self.steps_per_epoch,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "train_loss": self.history[-1]["loss"],
            "train_top1": self.history[-1]["top1"],
            "history": self.history,
        }
        if self.config.tune_alpha:
            result |= self._tune()
            alphas = [result["alpha_as_trained"], result["alpha"], *(result[f"alpha_{name}"] for name in JUDGED_BY)]
        else:
            (row,) = evaluate(self.model, self._loader(self.data.validation))
            result |= {f"validation_{name}": value for name, value in row.items()}
            alphas = [None]
        if self.config.test and self.data.test is not None:
            alphas = list(dict.fromkeys(alphas))
            rows = evaluate(self.model, self._loader(self.data.test), alphas)
            result |= {f"test_{name}": value for name, value in rows[0].items()}
            if self.config.tune_alpha:
                result["test_table"] = [{"alpha": a, **row} for a, row in zip(alphas, rows, strict=True)]
                tuned = rows[alphas.index(result["alpha"])]
                result |= {f"test_{name}_tuned": value for name, value in tuned.items()}
        return result

    def _tune(self) -> dict[str, Any]:
        """Alpha on validation data. Every process does all of it, so that all agree."""
        loader = datasets.Loader(
            self.data,
            self.data.validation,
            self._evaluation_batch,
            device=self.device,
            workers=self.runtime.workers,
        )
        with warnings.catch_warnings():
            # That a gain may be chance is said in the row.
            warnings.simplefilter("ignore", UncertainGainWarning)
            found = tune_alpha(
                self.model,
                loader,
                JUDGED_BY,
                self.config.alpha_objective,
                grid=self.config.alpha_grid or None,
                insist=True,
                progress=self.runtime.show if self.fabric.is_global_zero else False,
            )
        at = {row["alpha"]: row for row in found.table}
        return {
            "alpha": found.alpha,
            "alpha_as_trained": found.baseline,
            "alpha_significant": found.significant,
            "alpha_table": found.table,
            **{f"alpha_{name}": found.best[name] for name in JUDGED_BY},
            **{f"validation_{name}": at[found.baseline][name] for name in JUDGED_BY},
            **{f"validation_{name}_tuned": at[found.alpha][name] for name in JUDGED_BY},
        }

    def _optimizer(self) -> torch.optim.Optimizer:
        config = self.config
        try:
            groups = param_groups(
                self.model, config.weight_decay, config.norm_decay, config.gamma_target, example_input=self._example()
            )
            optimizer = torch.optim.SGD(
                groups, lr=config.learning_rate, momentum=config.momentum, nesterov=config.nesterov
            )
            if config.gamma_target == 1:
                decay_toward_one(optimizer, self.model)
        except ValueError as problem:
            raise UserError(str(problem)) from problem
        return optimizer

    def _epoch(self, bar: Bar, progress: Progress) -> None:
        config, started = self.config, time.perf_counter()
        self.train_loader.set_epoch(self.epoch)
        self.model.train()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)  # loss, right answers, examples
        for number, (images, labels) in enumerate(self.train_loader):
            step = self.epoch * self.steps_per_epoch + number
            rate = learning_rate(config, step, self.steps_per_epoch)
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            loss, right = self._step(images, labels)
            if not math.isfinite(loss):
                raise UserError(
                    f"the loss is {loss} at step {step} (epoch {self.epoch}) with learning rate {rate:g}; "
                    f"try a lower learning_rate than {config.learning_rate:g}, or warmup_epochs"
                )
            totals += torch.tensor([loss * len(labels), right, len(labels)], dtype=torch.float64, device=self.device)
            if bar.show:
                seen = totals[2].item() * self.fabric.world_size
                speed = seen / (time.perf_counter() - started)
                mean, share = (totals[:2] / totals[2]).tolist()
                bar.advance(
                    note="  ".join(
                        (
                            f"epoch {self.epoch + 1}/{config.epochs}",
                            f"loss {mean:.3f}",
                            f"top-1 {share:.1%}",
                            f"{speed:,.0f} images/s",
                        )
                    )
                )
            progress((step + 1) / (config.epochs * self.steps_per_epoch))
        self._agree(totals)
        self.epoch += 1
        line = {"loss": (totals[0] / totals[2]).item(), "top1": (totals[1] / totals[2]).item(), "learning_rate": rate}
        every = config.validate_every
        if every and (self.epoch % every == 0 or self.epoch == config.epochs):
            (row,) = evaluate(self.model, self._loader(self.data.validation))
            line |= {f"validation_{name}": value for name, value in row.items()}
        self.history.append(line)
        self._save()

    def _step(self, images: Tensor, labels: Tensor) -> tuple[float, int]:
        """One step of the optimizer; the loss and how many answers were right."""
        parts = self.config.accumulate
        loss = right = torch.zeros((), device=self.device)
        self.stepper.zero_grad(set_to_none=True)
        if self.runtime.channels_last:
            images = images.to(memory_format=torch.channels_last)
        for part, (some, their) in enumerate(zip(images.chunk(parts), labels.chunk(parts), strict=True), 1):
            with self._without_sync(part < parts):
                logits = self.forward(some)
                if logits.shape != (len(their), self.data.num_classes):
                    raise UserError(
                        f"the network gives {tuple(logits.shape)} for {len(their)} images; "
                        f"the labels of {self.data.name} need ({len(their)}, {self.data.num_classes})"
                    )
                partial = F.cross_entropy(logits, their, label_smoothing=self.config.label_smoothing) / parts
                self.fabric.backward(partial)
            loss = loss + partial.detach()
            right = right + (logits.detach().argmax(1) == their).sum()
        self.stepper.step()
        return loss.item(), int(right.item())

    def _without_sync(self, wanted: bool) -> Any:
        """Gradients meet across processes once, with the last part of the batch."""
        alone = self.fabric.world_size == 1
        return contextlib.nullcontext() if alone else self.fabric.no_backward_sync(self.forward, enabled=wanted)

    def _agree(self, totals: Tensor) -> None:
        """Sum the counts over processes, and make their moving averages one.

        Each process keeps the averages of its own examples. Those of x and of x² are linear, so their mean over
        processes is what one process would have found in the whole batches.
        """
        if self.fabric.world_size == 1:
            return
        torch.distributed.all_reduce(totals)
        for layer in self.model.modules():
            mean, var = getattr(layer, "running_mean", None), getattr(layer, "running_var", None)
            if isinstance(mean, Tensor) and isinstance(var, Tensor):
                moments = torch.stack([mean, var + mean.square()])
                torch.distributed.all_reduce(moments)
                moments /= self.fabric.world_size
                mean.copy_(moments[0])
                var.copy_(moments[1] - moments[0].square())

    def _save(self) -> None:
        state = {
            "epoch": self.epoch,
            "history": self.history,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": self._gathered(_random_state()),
        }
        if self.fabric.is_global_zero:
            _write(self.folder / "checkpoint.pt", self.config, state)
        self.fabric.barrier()

    def _resume(self) -> None:
        state = _read(self.folder / "checkpoint.pt", self.config)
        if state is None:
            return
        self.epoch, self.history = state["epoch"], state["history"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        states = state["random"]
        _set_random_state(states[self.fabric.global_rank % len(states)])

    def _gathered(self, value: Any) -> list[Any]:
        if self.fabric.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def _loader(self, split: datasets.Split, batch_size: int | None = None, **options: Any) -> datasets.Loader:
        return datasets.Loader(
            self.data,
            split,
            batch_size or self._evaluation_batch,
            seed=self.config.seed,
            device=self.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            workers=self.runtime.workers,
            **options,
        )

    @property
    def _evaluation_batch(self) -> int:
        return max(self.config.batch_size, EVALUATION_BATCH)

    def _example(self) -> Tensor:
        """A few images' worth of noise, on which to see what a layer does to the output."""
        shape = (4, self.data.facts.channels, self.data.facts.size, self.data.facts.size)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    @contextlib.contextmanager
    def _curves(self) -> Iterator[Any]:
        if not (self.runtime.tensorboard and self.fabric.is_global_zero):
            yield _Nowhere()
            return
        from torch.utils.tensorboard import SummaryWriter

        # What a killed run wrote after its last checkpoint is written again.
        with SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.epoch + 1) as writer:
            yield writer


EVALUATION_BATCH = 250  # examples at least; no result depends on it beyond rounding


class _Nowhere:
    def add_scalar(self, *_: Any) -> None:
        """Nobody asked for curves."""


def _weights_of(config: Config, folder: Path) -> Path | None:
    """The file to fine-tune from. ``trial:KEY`` is a trial of the same store, whose folder lies beside this one."""
    if config.finetune_from is None:
        return None
    key = config.finetune_from.removeprefix("trial:")
    return folder.parent / key / "model.pt" if key != config.finetune_from else Path(config.finetune_from)


@contextlib.contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Only algorithms that give the same bits each time, inside; as before, outside."""
    before, filling = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = (
        False  # finds mistakes in kernels, at a price; ours are tested
    )
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def _write(path: Path, config: Config, state: dict[str, Any]) -> None:
    with atomic(path) as draft:
        try:
            torch.save({"key": config.key, "config": str(config), **state}, draft)
        except RuntimeError as problem:  # what torch makes of a disk that is full
            raise OSError(28, str(problem).splitlines()[0]) from problem


def _read(path: Path, config: Config) -> dict[str, Any] | None:
    """What :func:`_write` wrote, or None where there is nothing yet."""
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        key, described = state["key"], state["config"]
    except Exception as problem:  # not one of ours; ours are never half-written
        raise UserError(
            f"{path} is not a checkpoint of this program; move it away or choose another folder"
        ) from problem
    if key != config.key:
        raise UserError(f"{path} belongs to another configuration ({described}); this is {config}")
    return state


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    random.seed(seed)


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(tuple(state["numpy"]))
    random.setstate(state["python"])
