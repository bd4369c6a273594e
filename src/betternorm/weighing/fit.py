"""Fit alpha by gradient on corrupted, unlabeled images: one alpha per channel, layer or model.

All weights are frozen. The targets are the model's own predictions on the clean images, so that a corrupted image is
mapped to what the model predicts without the corruption. At inference each image is still processed independently.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.display.progress import Bar
from betternorm.errors import UncertainGainWarning
from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.alpha import alpha_as_trained, tuned_layers
from betternorm.weighing.batches import device_of, example_keys, iterate, output_and_target, output_of
from betternorm.weighing.calibration import calibrate, has_no_averages
from betternorm.weighing.fit_result import STRENGTHS, AlphaFit, judge
from betternorm.weighing.folds import assign_folds
from betternorm.weighing.objective import Shifts
from betternorm.weighing.resume import REFERENCE_VALUES, SAVE_EVERY, ResumeFile, same_values, signature
from betternorm.weighing.shifts import Corruption, Shift, functions_by_kind

PER = ("channel", "layer", "model")
STEPS = 120  # of Adam, per fit
FEWEST = 100  # images; with fewer the fit is noise and its evaluation has no power
RATE = 0.02  # of Adam; it decays to 0
START = 0.05  # distance of alpha from the baseline before the first step
REFERENCE_IMAGES = 16  # of which every shift is compared when a fit is resumed


def fit_alpha(
    model: nn.Module,
    images: Tensor | Iterable[Any],
    *,
    per: str = "channel",
    shifts: Shifts | None = None,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    targets: str = "own",
    max_clean_drop: float | None = None,
    temperature: float | None = None,
    steps: int = STEPS,
    batch_size: int = 100,
    folds: int = 3,
    confidence: float = 0.95,
    require_significant: bool = True,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    max_examples: int | None = 2000,
    resume: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> AlphaFit:
    """Make a pretrained model robust to corruptions: fit alpha on a few hundred unlabeled images, and set it.

    Alpha is the weight of an image's own statistics at inference. One alpha per channel is fitted by gradient descent,
    with all weights frozen. Half of each batch is clean, half is corrupted; the loss is the cross-entropy to the
    model's own predictions on the clean images. A ``strength`` between 0 and 1 scales the fitted alphas, from the
    baseline (alpha 0 for BatchNorm, 1 for GroupNorm) to the most robust model. The strength is chosen on held-out
    images and corruptions.

    Gains are cross-validated: images and kinds of corruption are divided into ``folds``, and each fold is evaluated
    with alphas that were fitted on the other images under the other corruptions. The final alphas start from the
    mean over the folds and are fitted on everything. Without labels, accuracy is estimated as the mean probability that
    the baseline, given the clean image, assigns to the class now predicted. The confidence interval of the mean gain is
    corrected for the number of strengths. If it includes zero, a warning is issued and alpha is left unchanged.

    A plain model is converted in place (``convert(model, "weighed")``) once everything has been fitted; nothing else in
    it changes. GroupNorm and InstanceNorm layers are calibrated on ``images``. Until the end all work is done on a
    copy, so an interruption leaves the model as it was.

    Args:
        images: a tensor (N, C, H, W), a list of batches or a loader, normalized as the model expects them. Labels are
            ignored unless ``targets="labels"``. At least 100 images.
        per: fit one alpha per "channel", per "layer" or for the whole "model".
        shifts: names of corruptions as in :func:`~betternorm.weighing.corruptions`, or a dict from names to functions
            of a batch of images. Names of the form "kind:level" are levels of one kind. None: all built-in corruptions
            at severities 1, 3 and 5.
        mean, std: what ``images`` were normalized with, for the built-in corruptions. None: what a timm or torchvision
            model declares.
        targets: "own" for the model's own predictions on the clean images, or "labels".
        max_clean_drop: how the strength is chosen. None: by the best mean accuracy over clean and corrupted images. A
            number: by the best mean over the corruptions, with clean accuracy at most this many points lower.
        temperature: what the baseline's logits are divided by to estimate accuracy without labels. None: the
            temperature at which the baseline is as confident in its predictions as it is in the same classes on
            slightly shifted copies of the images. 1 overestimates the clean drop of an overconfident model.
        steps, batch_size: number of Adam steps in each fit, and images per step.
        folds: number of folds for cross-validation.
        confidence: level of the intervals.
        require_significant: leave alpha unchanged if the gain is not significant.
        forward: ``forward(model, images)`` returns logits (N, classes, ...), for models with other inputs or outputs.
        max_examples: use at most this many images, the first ones; they are kept in memory.
        resume: a file for intermediate results, from which the same call continues after an interruption.
        seed: of the order of the images and the division into folds.
        progress: show a bar with the remaining time; None shows it on a terminal.

    Examples::

        fit = betternorm.fit_alpha(model, images)  # 300 images are enough
        print(fit)
        fit.set(0.5)  # another strength
        torch.save(model.state_dict(), "robust.pt")  # alpha is in the state_dict
    """
    if per not in PER:
        raise ValueError(f"per={per!r} must be one of {', '.join(PER)}")
    if targets not in ("own", "labels"):
        raise ValueError(f"targets={targets!r} must be 'own' (no labels needed) or 'labels'")
    for name, value, least in (("steps", steps, 1), ("batch_size", batch_size, 2), ("folds", folds, 2)):
        if value < least:
            raise ValueError(f"{name}={value} must be {least} or more")
    if temperature is not None and not temperature > 0:
        raise ValueError(f"temperature={temperature} must be above 0; 1 leaves the probabilities as they are")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, like 0.95")
    if max_clean_drop is not None and not max_clean_drop >= 0:
        raise ValueError(f"max_clean_drop={max_clean_drop} must be 0 or more points")
    kinds = functions_by_kind(shifts, model, mean, std)
    work = _working_copy(model)
    layers = tuned_layers(work)
    x, labels = _gather(images, max_examples, device_of(work), targets == "labels")
    for shift in (shift for levels in kinds.values() for shift in levels):
        if isinstance(shift, Corruption):
            shift.check_normalized(x)
    _check_size(model, x)
    baseline = alpha_as_trained(layers)
    for layer in layers.values():
        layer.alpha = baseline
    calibrated = any(has_no_averages(layer) for layer in layers.values())
    if calibrated:
        calibrate(work, x.split(batch_size), progress=progress)
    fit = _Fit(work, layers, per, x, labels, kinds, forward or _logits, temperature, steps, batch_size, seed)
    fit.open(resume, per, sorted(kinds), targets, temperature, steps, batch_size, folds, seed)
    parameters, values = fit.run(assign_folds(fit.keys, min(folds, max(2, len(kinds))), seed), progress)
    result = judge(values, fit.keys, fit.alphas(parameters), baseline, targets, max_clean_drop, confidence, seed)
    if not result.significant and require_significant:
        result = replace(result, strength=0.0)
    if not result.significant:
        warnings.warn(result.verdict(), UncertainGainWarning, stacklevel=2)
    convert(model, "weighed")
    if calibrated:
        for name, layer in tuned_layers(model).items():
            for buffer in ("running_mean", "running_var", "num_batches_tracked"):
                getattr(layer, buffer).copy_(getattr(layers[name], buffer))
    return result.set(result.strength, model) if result.strength else replace(result, _model=model)


def _working_copy(model: nn.Module) -> nn.Module:
    try:
        work = copy.deepcopy(model)
    except Exception as error:
        raise ValueError(f"fit_alpha works on a copy of the model, and it cannot be copied: {error}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model with nothing to convert; `tuned_layers` says it
        return convert(work, "weighed").eval().requires_grad_(False)


def _gather(images: Any, most: int | None, device: torch.device, labeled: bool) -> tuple[Tensor, Tensor | None]:
    """All images, and their labels where these are the targets."""
    batches = images.split(256) if isinstance(images, Tensor) else images
    parts, labels = [], []
    for batch in iterate(batches, most, device):
        parts.append(output_of(nn.Identity(), batch))
        if not parts[-1].is_floating_point() or parts[-1].dim() < 2:
            raise ValueError(
                f"images has batches of {parts[-1].dtype} {tuple(parts[-1].shape)}; expected images (N, C, H, W) in "
                "floating point, alone or as the first of a pair"
            )
        if labeled:
            labels.append(output_and_target(nn.Identity(), batch)[1])
    x = torch.cat(parts) if parts else torch.empty(0, 1)
    different = len(torch.unique(example_keys(x))) if len(x) else 0
    if different < FEWEST:
        raise ValueError(f"images holds {different} different images; fit_alpha needs at least {FEWEST}, better 300")
    if not bool(x.isfinite().all()):
        first = int((~x.isfinite()).flatten(1).any(1).nonzero()[0])
        raise ValueError(f"images contains NaN or infinite values, first in image {first}")
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, torch.cat(labels).long() if labeled else None


def _check_size(model: nn.Module, x: Tensor) -> None:
    """Convolutional models take any size, and are useless far from the one they were trained on."""
    declared = getattr(model, "pretrained_cfg", None)
    size = tuple((declared or {}).get("input_size") or ()) if isinstance(declared, dict) else ()
    if x.dim() == len(size) + 1 and not 0.5 < x.shape[-1] / size[-1] < 2:
        raise ValueError(f"images have the shape {tuple(x.shape[1:])} and the model declares {size}; resize them")


class _Fit:
    """The fits on the folds and on everything, and the evaluation of each fold along the strength curve."""

    def __init__(
        self,
        model: nn.Module,
        layers: dict[str, GroupedBatchNorm],
        per: str,
        x: Tensor,
        labels: Tensor | None,
        kinds: dict[str, list[Shift]],
        forward: Callable[[nn.Module, Any], Any],
        temperature: float | None,
        steps: int,
        batch_size: int,
        seed: int,
    ) -> None:
        self.model, self.layers, self.x, self.labels, self.kinds = model, layers, x, labels, kinds
        self.forward, self.steps, self.batch_size, self.seed = forward, steps, batch_size, seed
        self.baseline = alpha_as_trained(layers)
        self.keys = example_keys(x)
        # The entry of the parameter vector that every channel of every layer takes its alpha from.
        sizes = [layer.num_features for layer in layers.values()]
        entries = {
            "channel": torch.arange(sum(sizes)),
            "layer": torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)),
            "model": torch.zeros(sum(sizes), dtype=torch.long),
        }[per]
        self._entries = [part.to(x.device) for part in entries.split(sizes)]
        logits = self._logits_of(x)
        self._baseline_logits = _thinned(logits)
        self.own = logits.softmax(1)
        if temperature is None:
            temperature = self._temperature(logits)
        self._estimate = (logits / temperature).softmax(1)
        self._file = ResumeFile(None, str)
        # What an interrupted call continues from: finished fits, the fit under way, and values by fold.
        self.state: dict[str, Any] = {"fits": [], "descent": {}, "values": []}

    def _temperature(self, logits: Tensor) -> float:
        """Confidence on the images themselves is that of a fit; on copies shifted by 1/16 it is nearer to accuracy."""
        if self.x.dim() != 4 or logits.dim() != 2 or self.labels is not None:
            return 1.0
        rows, columns = (max(1, side // 16) for side in self.x.shape[2:])
        shifted = F.pad(self.x, (columns, 0, rows, 0), mode="replicate")[..., :-rows, :-columns]
        wanted = self._logits_of(shifted).softmax(1).gather(1, logits.argmax(1, keepdim=True)).mean()
        low, high = 1.0, 2.0  # no further: a model may depend on where things are
        for _ in range(20):
            middle = (low * high) ** 0.5
            confident = (logits / middle).softmax(1).amax(1).mean() > wanted
            low, high = (middle, high) if confident else (low, middle)
        return low

    def _logits_of(self, images: Tensor) -> Tensor:
        """Baseline logits, after checking that the model can process the images."""
        try:
            with torch.inference_mode():
                logits = torch.cat([self.forward(self.model, part) for part in images.split(self.batch_size)])
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ValueError(f"the model fails on images of shape {tuple(self.x.shape[1:])}: {reason}") from error
        if logits.dim() < 2 or logits.shape[1] < 2 or len(logits) != len(self.x):
            raise ValueError(
                f"the model returns {tuple(logits.shape)} for {len(self.x)} images; fit_alpha expects logits "
                "(N, classes, ...), from forward=function(model, images) if the model returns something else"
            )
        if not bool(logits.isfinite().all()):
            raise ValueError("the model returns NaN or infinite logits for the clean images; check how they are scaled")
        return logits.float().clone()

    def run(self, fold_of: Tensor, progress: bool | None) -> tuple[Tensor, dict[str, dict[float, Tensor]]]:
        """The final parameters, and for every set and strength a value per image, NaN where it was not evaluated."""
        count, kinds = int(fold_of.max()) + 1, list(self.kinds)
        values = {
            name: {s: torch.full((len(self.x),), torch.nan, dtype=torch.float64) for s in (0.0, *STRENGTHS)}
            for name in ("clean", *kinds)
        }
        polish = max(1, self.steps // 3)
        with Bar("fitting alpha", count * self.steps + polish, progress) as bar:
            for fold in range(count):
                inside = kinds[fold::count] or kinds
                others = [kind for kind in kinds if kind not in inside] or kinds
                parameters = self._fit(fold, torch.nonzero(fold_of != fold)[:, 0], others, None, self.steps, bar)
                rows = torch.nonzero(fold_of == fold)[:, 0]
                if len(self.state["values"]) == fold:
                    self.state["values"].append(self._evaluate(parameters, rows, inside))
                    self.save()
                for name, by_strength in self.state["values"][fold].items():
                    for strength, numbers in by_strength.items():
                        values[name][strength][rows] = numbers
            mean = torch.stack(self.state["fits"][:count]).mean(0)
            return self._fit(count, torch.arange(len(self.x)), kinds, mean, polish, bar), values

    def _fit(
        self, number: int, rows: Tensor, kinds: Sequence[str], start: Tensor | None, steps: int, bar: Bar
    ) -> Tensor:
        """Adam on these images and kinds of corruption, projected onto [0, 1]."""
        if number < len(self.state["fits"]):
            bar.advance(steps)
            return self.state["fits"][number]  # type: ignore[no-any-return]
        length = int(self._entries[-1].max()) + 1
        parameters = torch.full((length,), abs(self.baseline - START)) if start is None else start.clone()
        parameters = parameters.to(self.x.device).requires_grad_()
        optimizer = torch.optim.Adam([parameters], lr=RATE)
        done = 0
        if self.state["descent"].get("number") == number:
            done = self.state["descent"]["done"]
            parameters.data.copy_(self.state["descent"]["parameters"])
            optimizer.load_state_dict(self.state["descent"]["optimizer"])
            bar.advance(done)
        try:
            for step, batch in enumerate(self._schedule(rows, steps)):
                if step < done:
                    continue
                optimizer.param_groups[0]["lr"] = RATE * (1 - step / steps) * (1 if start is None else 0.5)
                parameters.grad = self._gradient(parameters, batch, kinds, step)
                optimizer.step()
                parameters.data.clamp_(0, 1)
                self.state["descent"] = {
                    "number": number,
                    "done": step + 1,
                    "parameters": parameters.detach(),
                    "optimizer": optimizer.state_dict(),
                }
                bar.advance()
                self.save(SAVE_EVERY)
        finally:
            self.save()
        self.state["fits"].append(parameters.detach().clone())
        return self.state["fits"][number]  # type: ignore[no-any-return]

    def _schedule(self, rows: Tensor, steps: int) -> Sequence[Tensor]:
        """Batches of images: one random order after another."""
        generator = torch.Generator().manual_seed(self.seed)
        size = min(self.batch_size, len(rows))
        orders = [torch.randperm(len(rows), generator=generator) for _ in range(-(-steps * size // len(rows)))]
        return list(rows[torch.cat(orders)[: steps * size]].split(size))

    def _gradient(self, parameters: Tensor, batch: Tensor, kinds: Sequence[str], step: int) -> Tensor:
        """Of the cross-entropy to the targets; the second half of the batch is corrupted, each kind a part of it."""
        clean, corrupted = batch.tensor_split(2)
        parts = [self.x[clean]]
        for place, rows in enumerate(corrupted.tensor_split(len(kinds))):
            levels = self.kinds[kinds[(place + step) % len(kinds)]]
            if len(rows):
                parts.append(levels[(place + step) % len(levels)](self.x[rows]))
        self._set(parameters)
        logits = self.forward(self.model, torch.cat(parts))
        loss = F.cross_entropy(logits, (self.own if self.labels is None else self.labels)[batch])
        return torch.autograd.grad(loss, parameters)[0]

    @torch.inference_mode()
    def _evaluate(self, parameters: Tensor, rows: Tensor, kinds: Sequence[str]) -> dict[str, dict[float, Tensor]]:
        """The value of every one of these images, clean and under these kinds, along the strength curve.

        Every image is evaluated at one level of each kind.
        """
        values: dict[str, dict[float, Tensor]] = {}
        for name in ("clean", *kinds):
            levels = self.kinds.get(name, [lambda images: images])
            level_of = (self.keys[rows] % len(levels)) if name != "clean" else torch.zeros(len(rows), dtype=torch.long)
            for level, function in enumerate(levels):
                for part in torch.nonzero(level_of == level)[:, 0].split(self.batch_size):
                    images = function(self.x[rows[part]])
                    for strength in (0.0, *STRENGTHS):
                        self._set(self.baseline + strength * (parameters - self.baseline))
                        predicted = self.forward(self.model, images).argmax(1)
                        numbers = values.setdefault(name, {}).setdefault(
                            strength, torch.empty(len(rows), dtype=torch.float64)
                        )
                        numbers[part] = self._score(predicted, rows[part])
        return values

    def _score(self, predicted: Tensor, rows: Tensor) -> Tensor:
        """Whether the prediction is right, or without labels the baseline's probability of it on the clean image."""
        if self.labels is not None:
            score = predicted == self.labels[rows]
        else:
            score = self._estimate[rows].gather(1, predicted[:, None])[:, 0]
        return score.double().flatten(1).mean(1).cpu() if score.dim() > 1 else score.double().cpu()

    def alphas(self, parameters: Tensor) -> dict[str, Tensor]:
        return {name: parameters[entries] for name, entries in zip(self.layers, self._entries, strict=True)}

    def _set(self, parameters: Tensor) -> None:
        for name, alpha in self.alphas(parameters).items():
            self.layers[name]._alpha = alpha

    # -- interruptions --

    def open(self, resume: str | os.PathLike[str] | None, *options: Any) -> None:
        self._file = ResumeFile(
            resume, lambda: signature(self.model, self.forward, self.kinds, options, self.keys, self.labels)
        )
        if resume is None:
            return
        reference, stored = self._reference(), self._file.load()
        if stored is None:
            self.state["reference"] = reference
            return
        if "reference" not in stored:
            raise self._file.error("was written by another version of betternorm")
        for name, values in stored["reference"].items():
            if name == "clean" or name in reference:
                what = "a model with other outputs" if name == "clean" else f"another shift {name!r}"
                if not same_values(reference[name], values, 1.0):
                    raise self._file.error(f"belongs to {what}")
        self.state = stored

    def _reference(self) -> dict[str, Tensor]:
        """What a signature does not cover: logits at the baseline, and images under each shift that is not random."""
        reference = {"clean": self._baseline_logits}
        images = self.x[:REFERENCE_IMAGES]
        with torch.random.fork_rng(), torch.inference_mode():
            for kind, levels in self.kinds.items():
                for level, function in enumerate(levels):
                    first, second = (_thinned(function(images)) for _ in range(2))
                    if same_values(first, second, 1.0):
                        reference[kind if len(levels) == 1 else f"{kind}, level {level + 1} of {len(levels)}"] = first
        return reference

    def save(self, every: float = 0.0) -> None:
        self._file.save(lambda: self.state, every)


def _thinned(values: Tensor) -> Tensor:
    flat = values.detach().reshape(len(values), -1).cpu()
    return flat[:, :: max(1, flat.numel() // REFERENCE_VALUES)].clone()


def _logits(model: nn.Module, images: Tensor) -> Any:
    return output_and_target(model, (images, images))[0]
