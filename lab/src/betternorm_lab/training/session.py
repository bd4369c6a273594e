"""Training and evaluation of a model (section 4): from a configuration to the numbers of a row.

A run can be killed and restarted at any time; on a CPU the result is bit-identical to that of an uninterrupted run:
the batches of an epoch depend only on the seed and the epoch, the learning rate only on the step, and everything else
is in a checkpoint that is replaced atomically after every epoch.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F

from betternorm.conversion.convert import convert
from betternorm.decay import decay_toward_one, param_groups
from betternorm.display.progress import Bar
from betternorm.errors import UserError
from betternorm.weighing.alpha import set_alpha
from betternorm.weighing.metrics import CALIBRATED
from betternorm_lab import data as datasets
from betternorm_lab.store import make_folder
from betternorm_lab.training.checkpoints import (
    deterministic,
    random_state,
    read_checkpoint,
    seed_everything,
    set_random_state,
    write_checkpoint,
)
from betternorm_lab.training.config import JUDGED_BY, Config, build_model, learning_rate, load_data
from betternorm_lab.training.evaluation import (
    METRICS_VERSION,
    best_alphas,
    calibrated_rows,
    evaluate,
    evaluations,
    tune_for_row,
    with_alpha,
)
from betternorm_lab.trials import Progress, Runtime

EVALUATION_BATCH = 250  # at least; it affects results by rounding only
NAMES = (*JUDGED_BY, CALIBRATED)


def train(
    config: Config,
    folder: str | os.PathLike[str],
    runtime: Runtime | None = None,
    progress: Progress = lambda part: None,
) -> dict[str, Any]:
    """Train, tune alpha on validation data, and evaluate on the test set once. Continues from the state in ``folder``.

    Returns the numbers of the row. For the validation and test sets: ``<split>_<metric>`` with alpha as trained,
    ``<split>_<metric>_tuned`` with the tuned ``alpha``, and ``<split>_<metric>_own`` with ``alpha_<metric>``, the best
    alpha for this metric on validation data. One metric is the cross-entropy after a temperature, which is fitted on
    validation data at the same alpha. ``alpha_table`` contains the validation metrics at every alpha, ``test_table``
    the test metrics at the alphas above. ``train_top1`` is that of the last training epoch, ``evaluated_train_top1``
    that of evaluation mode without augmentation; ``history`` is per epoch. The model is saved to ``model.pt``.
    """
    runtime = runtime or Runtime()
    folder = Path(folder)
    make_folder(folder)
    finished = read_checkpoint(folder / "model.pt", config)
    if finished is not None:
        return dict(finished["result"])
    with deterministic(runtime.deterministic):
        session = Session(config, folder, runtime)
        session.train(progress)
        result = session.judge()
        if session.fabric.is_global_zero:
            write_checkpoint(folder / "model.pt", config, {"model": session.model.state_dict(), "result": result})
            (folder / "checkpoint.pt").unlink(missing_ok=True)
        session.fabric.barrier()
    return result


def trained(config: Config, folder: str | os.PathLike[str], runtime: Runtime | None = None) -> nn.Module:
    """The network that :func:`train` left in ``folder``, in evaluation mode, with its tuned alpha."""
    saved = read_checkpoint(Path(folder) / "model.pt", config)
    if saved is None:
        raise UserError(f"there is no trained network in {folder}; run the trial first")
    data = load_data(config, runtime or Runtime())
    model = build_model(config, data)
    if saved["result"].get("alpha") is not None:
        convert(model, "weighed")  # as tuning did
    model.load_state_dict(saved["model"])
    return model.eval()


class Session:
    """A run in progress: the network, the optimizer, and how far they are."""

    def __init__(self, config: Config, folder: Path, runtime: Runtime) -> None:
        self.config, self.folder, self.runtime = config, folder, runtime
        from betternorm_lab.fabric import launch  # slow to import, and needed only here

        self.fabric = launch(config.precision, runtime)
        self.device = self.fabric.device
        self.data = load_data(config, runtime)
        self.train_loader = datasets.Loader(
            self.data,
            self.data.train,
            config.batch_size,
            seed=config.seed,
            device=self.device,
            rank=self.fabric.global_rank,
            world_size=self.fabric.world_size,
            workers=runtime.workers,
            train=True,
            augment=config.augment,
            classes_per_batch=config.classes_per_batch,
            parts=config.accumulate,
            steps=config.steps_per_epoch,
        )
        self.steps_per_epoch = len(self.train_loader)
        shares = self.fabric.world_size * config.accumulate
        if config.batch_size % shares:
            raise UserError(
                f"batch_size is {config.batch_size}; it must be a multiple of {shares}, the "
                f"{self.fabric.world_size} processes times accumulate={config.accumulate}"
            )
        seed_everything(config.seed + self.fabric.global_rank)
        self.model = build_model(config, self.data, _weights_of(config, folder))
        if runtime.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # in none of its types
        self.optimizer = self._optimizer()
        compiled: Any = torch.compile(self.model) if runtime.compile else self.model
        self.forward, self.stepper = self.fabric.setup(compiled, self.optimizer)
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self._resume()

    def train(self, progress: Progress) -> None:
        """Run the remaining epochs, with a checkpoint after each."""
        total = self.config.epochs * self.steps_per_epoch
        show = self.runtime.show if self.fabric.is_global_zero else False
        with Bar("training", total, show, self.epoch * self.steps_per_epoch) as bar, self._curves() as curves:
            while self.epoch < self.config.epochs:
                self._epoch(bar, progress)
                for name, value in self.history[-1].items():
                    curves.add_scalar(name, value, self.epoch)

    def judge(self) -> dict[str, Any]:
        """Evaluate on validation data, tune alpha, and then evaluate on the test set, for the first time."""
        result: dict[str, Any] = {
            "steps": self.config.epochs * self.steps_per_epoch,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "train_loss": self.history[-1]["loss"],
            "train_top1": self.history[-1]["top1"],
            "history": self.history,
            "metrics_version": METRICS_VERSION,
        }
        with self.fabric.autocast():
            (row,) = evaluate(self.model, self._whole(self.data.train))
            result |= {f"evaluated_train_{name}": value for name, value in row.items()}
            if self.config.tune_alpha:
                result |= self._tune()
                named = ("alpha_as_trained", "alpha", *(f"alpha_{name}" for name in NAMES))
                alphas = list(dict.fromkeys(result[name] for name in named))
            else:
                alphas = [None]
                measured = evaluations(self.model, self._whole(self.data.validation), alphas)
                (row,) = calibrated_rows(measured, alphas)
                result |= {f"validation_{name}": value for name, value in row.items()}
            if self.config.test and self.data.test is not None:
                result |= self._test(result, alphas)
        return result

    def _tune(self) -> dict[str, Any]:
        """Alpha, and the temperature at every alpha, on validation data. Every process does all of it."""
        config, result = self.config, {}
        validation = self._whole(self.data.validation)
        if config.alpha_grid:
            baseline = with_alpha(self.model)
            alphas = list(dict.fromkeys([baseline, *config.alpha_grid]))
        else:
            show = self.runtime.show if self.fabric.is_global_zero else False
            search = tune_for_row(self.model, validation, objective=config.alpha_objective, progress=show)
            baseline = search.baseline
            alphas = [row["alpha"] for row in search.table]
            result["alpha_significant"] = search.significant
        measured = evaluations(self.model, validation, alphas, baseline)
        at = dict(zip(alphas, calibrated_rows(measured, alphas), strict=True))
        best = best_alphas(measured, NAMES)
        alpha = best[config.alpha_objective]
        set_alpha(self.model, alpha)
        return result | {
            "alpha": alpha,
            "alpha_as_trained": baseline,
            "alpha_table": [{"alpha": one, **at[one]} for one in sorted(at)],
            **{f"alpha_{name}": one for name, one in best.items()},
            **{f"validation_{name}": at[baseline][name] for name in best},
            **{f"validation_{name}_tuned": at[alpha][name] for name in best},
            **{f"validation_{name}_own": at[one][name] for name, one in best.items()},
        }

    def _test(self, result: dict[str, Any], alphas: Sequence[float | None]) -> dict[str, Any]:
        """The test metrics, at the alphas and with the temperatures that were chosen on validation data."""
        assert self.data.test is not None
        if not self.config.tune_alpha:
            temperatures = [result["validation_temperature"]]
        else:
            at = {row["alpha"]: row["temperature"] for row in result["alpha_table"]}
            temperatures = [at[alpha] for alpha in alphas]
        measured = evaluations(self.model, self._whole(self.data.test), alphas)
        rows = dict(zip(alphas, calibrated_rows(measured, alphas, temperatures), strict=True))
        numbers: dict[str, Any] = {f"test_{name}": rows[alphas[0]][name] for name in NAMES}
        if self.config.tune_alpha:
            numbers["test_table"] = [{"alpha": alpha, **row} for alpha, row in rows.items()]
            numbers |= {f"test_{name}_tuned": rows[result["alpha"]][name] for name in NAMES}
            numbers |= {f"test_{name}_own": rows[result[f"alpha_{name}"]][name] for name in NAMES}
        return numbers

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
            (row,) = evaluate(self.model, self._whole(self.data.validation))
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
            "random": self._gathered(random_state()),
        }
        if self.fabric.is_global_zero:
            write_checkpoint(self.folder / "checkpoint.pt", self.config, state)
        self.fabric.barrier()

    def _resume(self) -> None:
        state = read_checkpoint(self.folder / "checkpoint.pt", self.config)
        if state is None:
            return
        self.epoch, self.history = state["epoch"], state["history"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        states = state["random"]
        set_random_state(states[self.fabric.global_rank % len(states)])

    def _gathered(self, value: Any) -> list[Any]:
        if self.fabric.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.fabric.world_size
        torch.distributed.all_gather_object(values, value)
        return values

    def _whole(self, split: datasets.Split) -> datasets.Loader:
        """All of a split in every process, for evaluation: all processes get the same numbers."""
        batch = max(self.config.batch_size, EVALUATION_BATCH)
        return datasets.Loader(self.data, split, batch, device=self.device, workers=self.runtime.workers)

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


class _Nowhere:
    def add_scalar(self, *_: Any) -> None:
        """Nobody asked for curves."""


def _weights_of(config: Config, folder: Path) -> Path | None:
    """The file to fine-tune from. ``trial:KEY`` is a trial of the same store, whose folder lies beside this one."""
    if config.finetune_from is None:
        return None
    key = config.finetune_from.removeprefix("trial:")
    return folder.parent / key / "model.pt" if key != config.finetune_from else Path(config.finetune_from)
