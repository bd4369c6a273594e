"""Inference example weighing on trained networks: set alpha, calibrate, and tune it with evidence (section 3.1).

At inference a layer normalises with moving averages and, with weight alpha, with the statistics of the example itself.
Alpha can be chosen long after training, on labelled data that the network was not trained on.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm.batches import Forward, device_of, evaluating, iterate, length_of, output_and_target, output_of
from betternorm.display.progress import Bar
from betternorm.display.tables import table
from betternorm.errors import UncertainGainWarning
from betternorm.evidence import Gain, mcnemar, paired_bootstrap
from betternorm.layers import GroupedBatchNorm, checked_alpha
from betternorm.metrics import SHARES, Metric, named_metrics
from betternorm.surgery import convert
from betternorm.tuning import Folds, Runs, alpha_grid, fit_per_layer, from_u, search, to_u

AnyMetric = str | Metric | Callable[[Any, Any], Any]


def set_alpha(model: nn.Module, alpha: float | Mapping[str, float]) -> None:
    """Set the weight of the example's own statistics at inference, in place.

    Args:
        alpha: one number between 0 and 1 for all layers, or a dict from the names of layers to numbers; layers that it
            does not name keep theirs.

    Examples::

        >>> model = convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), "weighed")
        >>> set_alpha(model, 0.1)
        >>> get_alpha(model)
        0.1
        >>> set_alpha(model, {"1": 0.05})
    """
    layers = weighed_layers(model)
    if isinstance(alpha, Mapping):
        unknown = [name for name in alpha if name not in layers]
        if unknown:
            raise ValueError(
                f"alpha names {', '.join(map(repr, unknown[:3]))}, which {'is' if len(unknown) == 1 else 'are'} not "
                f"among the layers that have an alpha: {_listed(list(layers))}"
            )
        wanted = {name: checked_alpha(value) for name, value in alpha.items()}
    else:
        if not layers:
            raise ValueError("the model has no layer with an alpha; call betternorm.convert(model, 'weighed') first")
        wanted = dict.fromkeys(layers, checked_alpha(alpha))
    for name, value in wanted.items():
        layers[name].alpha = value


def get_alpha(model: nn.Module) -> float | dict[str, float]:
    """The alpha of the model: one number where all layers have the same, otherwise a dict by layer name.

    A model without such layers is what alpha = 0 stands for.
    """
    alphas = {name: layer.alpha for name, layer in weighed_layers(model).items()}
    values = set(alphas.values()) or {0.0}
    return values.pop() if len(values) == 1 else alphas


def weighed_layers(model: nn.Module) -> dict[str, GroupedBatchNorm]:
    """The layers that have an alpha, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GroupedBatchNorm)}


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    limit: int | None = None,
    passes: int | None = None,
    tolerance: float = 1e-3,
    forward: Forward | None = None,
    progress: bool | None = None,
) -> int:
    r"""Set the moving averages to the mean and variance of the layers' inputs over the data, in place.

    A GroupNorm or InstanceNorm network has no averages until then; one pass over the data gives them exactly. A plain
    one is first converted (``convert(model, "weighed")``).

    With BatchNorm what enters a layer depends on the averages of the layers before it. Each pass takes the averages of
    the pass before, as at inference, so the result does not depend on how the data is cut into batches or in which
    order it comes; a layer is exact once all before it are. Passes are made until no average moves by more than
    ``tolerance`` (in standard deviations of its channel), at most as many as there are layers plus one: that is the end
    for any network, with the statistics that one batch of all the data would have. Examples are weighed equally.

    Args:
        loader: batches as for `tune_alpha`; labels are not looked at.
        limit: use at most so many examples.
        passes: make exactly so many passes instead; 1 is often near enough for a trained BatchNorm network.
        progress: show a bar; None shows it on a terminal.

    Returns:
        The number of passes that were made.
    """
    if passes is not None and passes < 1:
        raise ValueError(f"passes={passes} must be 1 or more")
    _check_limit(limit)
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not layers:
        convert(model, "weighed")
        layers = list(weighed_layers(model).values())
    if not layers:
        raise ValueError("the model has no layer with moving averages to calibrate")
    # The averages of a layer with alpha = 1 reach no other layer.
    alone = all(isinstance(layer, GroupedBatchNorm) and layer.alpha == 1 for layer in layers)
    most = passes or (1 if alone else len(layers) + 1)
    run = forward or output_of
    for done in range(1, most + 1):
        moments = {layer: _Moments() for layer in layers}
        hooks = [layer.register_forward_pre_hook(moments[layer].look) for layer in layers]
        batches = 0
        try:
            label, length = f"calibrating, pass {done}", length_of(loader, limit)
            with evaluating(model), torch.inference_mode(), Bar(label, length, progress) as bar:
                for batch in iterate(loader, limit, device_of(model)):
                    run(model, batch)
                    batches += 1
                    bar.advance()
        finally:
            for hook in hooks:
                hook.remove()
        if not batches:
            raise ValueError("the loader gave no batches: nothing to calibrate on")
        moved = max(moments[layer].settle(layer, batches) for layer in layers)
        if passes is None and moved <= tolerance:
            break
    return done


class _Moments:
    """Mean and variance of what enters a layer, over all batches, in float64."""

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.var: Tensor | None = None

    def look(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach()
        examples = x.shape[0]
        kind = torch.float32 if x.device.type == "mps" else torch.float64  # which has no float64
        var, mean = torch.var_mean(x.to(kind), (0, *range(2, x.dim())), correction=0)
        if self.mean is None or self.var is None:
            self.count, self.mean, self.var = examples, mean, var
            return
        share = examples / (self.count + examples)
        step = mean - self.mean
        self.var = self.var + share * (var - self.var) + share * (1 - share) * step.square()
        self.mean = self.mean + share * step
        self.count += examples

    def settle(self, layer: _BatchNorm, batches: int) -> float:
        """Write the averages into the layer; returns how far they moved, in standard deviations."""
        if self.mean is None or self.var is None:  # the layer was not reached
            return 0.0
        assert layer.running_mean is not None
        assert layer.running_var is not None
        deviation = (self.var + layer.eps).sqrt()
        moved = torch.maximum(
            (self.mean - layer.running_mean).abs() / deviation,
            ((layer.running_var.clamp(min=0) + layer.eps).sqrt() / deviation - 1).abs(),
        )
        with torch.no_grad():
            layer.running_mean.copy_(self.mean)
            layer.running_var.copy_(self.var)
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked.fill_(batches)
        return float(moved.max())


@dataclass
class AlphaSearch:
    """What `tune_alpha` found.

    Attributes:
        alpha: what is now set on the model: a number, or a dict by layer name.
        objective: the metric that chose it.
        baseline: the alpha of the network as it was trained: 0 with BatchNorm, 1 with GroupNorm.
        table: a row for every alpha tried, with the value of every metric on all the data.
        best: for every metric, the best alpha tried.
        gains: for every metric, the gain on held-out folds.
        significant: whether the interval of the objective's gain leaves out zero.
        per_layer: the result with one alpha a layer, where that was asked for.
        examples, passes, evaluations: the cost: examples, iterations of the loader, and alphas tried (an evaluation
            is a forward pass of all examples; a step of the search evaluates several alphas in one iteration).
    """

    alpha: float | dict[str, float]
    objective: str
    baseline: float
    table: list[dict[str, float]]
    best: dict[str, float]
    gains: dict[str, Gain]
    significant: bool
    higher_is_better: dict[str, bool]
    examples: int
    passes: int
    evaluations: int
    folds: int
    confidence: float
    per_layer: PerLayer | None = None

    def __str__(self) -> str:
        metrics = list(self.gains)
        chosen = {self.best[metric] for metric in metrics} | {self.baseline}
        tried = table(
            ["alpha", *metrics, ""],
            [
                [f"{row['alpha']:.4g}", *(_shown(metric, row[metric]) for metric in metrics), self._mark(row["alpha"])]
                for row in self.table
                if len(self.table) <= 40 or row["alpha"] in chosen
            ],
        )
        return "\n".join([tried, "", self._evidence(), "", self.verdict()])

    def _mark(self, alpha: float) -> str:
        words = ["as trained"] if alpha == self.baseline else []
        best = [metric for metric, value in self.best.items() if value == alpha]
        return ", ".join(words + ([f"best {' and '.join(best)}"] if best else []))

    def _evidence(self) -> str:
        settings: list[tuple[str, dict[str, Gain]]] = [("one alpha", self.gains)]
        if self.per_layer is not None:
            settings.append(("alpha a layer", self.per_layer.gains))
        percent = f"{self.confidence:.0%} interval"
        rows = [
            [
                name,
                metric,
                _shown(metric, gain.before),
                _shown(metric, gain.after),
                _shown(metric, gain.difference, sign=True),
                f"{_shown(metric, gain.low, sign=True)} to {_shown(metric, gain.high, sign=True)}",
                "" if gain.p_value is None else f"{gain.p_value:.2g}",
            ]
            for name, gains in settings
            for metric, gain in gains.items()
        ]
        return table(["held out", "metric", "as trained", "tuned", "change", percent, "McNemar p"], rows)

    def verdict(self) -> str:
        """One sentence: what was set and why."""
        cost = f"{self.examples} examples, {self.evaluations} alphas, {self.passes} passes"
        if isinstance(self.alpha, dict):
            low, high = min(self.alpha.values()), max(self.alpha.values())
            return f"set one alpha a layer, from {low:.4g} to {high:.4g}: better held out than one for all ({cost})"
        if not self.significant:
            kept = "alpha stays" if self.alpha == self.baseline else "alpha was set, as asked, to"
            return f"the gain in {self.objective} is not distinguishable from zero: {kept} {self.alpha:.4g} ({cost})"
        return f"set alpha = {self.alpha:.4g}, the best for {self.objective} ({cost})"

    def plot(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Draw every metric against alpha; returns the matplotlib figure, and writes it where ``path`` is given."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("AlphaSearch.plot needs matplotlib: pip install matplotlib") from error
        metrics = list(self.gains)
        figure = Figure(figsize=(4.2 * len(metrics), 3.4), layout="constrained")
        alphas = [row["alpha"] for row in self.table]
        for axes, metric in zip(figure.subplots(1, len(metrics), squeeze=False)[0], metrics, strict=True):
            scale = 100 if metric in SHARES else 1
            values = [row[metric] * scale for row in self.table]
            axes.plot(alphas, values, marker="o", markersize=3.5, linewidth=1.2, color="#33628d")
            axes.axhline(values[alphas.index(self.baseline)], color="#999999", linewidth=0.8, linestyle="--")
            axes.axvline(self.best[metric], color="#c1440e", linewidth=0.8)
            axes.set_xscale("function", functions=(to_u, from_u))
            axes.set_xticks([0, 0.05, 0.25, 0.5, 0.75, 0.95, 1])
            axes.set_title(f"{metric}: best at alpha {self.best[metric]:.3g}", fontsize=10)
            axes.set_xlabel("alpha")
            axes.set_ylabel(f"{metric} (%)" if metric in SHARES else metric)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists and dicts, as `save` writes them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> AlphaSearch:
        plain = dict(values)
        plain["gains"] = {metric: Gain(**gain) for metric, gain in plain["gains"].items()}
        if plain["per_layer"] is not None:
            layered = dict(plain["per_layer"])
            layered["gains"] = {metric: Gain(**gain) for metric, gain in layered["gains"].items()}
            layered["against_single"] = Gain(**layered["against_single"])
            plain["per_layer"] = PerLayer(**layered)
        return cls(**plain)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AlphaSearch:
        """Read what `save` wrote."""
        return cls.from_dict(json.loads(Path(path).read_text()))


@dataclass
class PerLayer:
    """One alpha a layer, fitted by gradient and judged on held-out folds.

    Attributes:
        alphas: by layer name, fitted on all the data.
        gains: for every metric, the gain over the network as trained, held out.
        against_single: the gain in the objective over the best single alpha, held out.
        kept: whether that gain's interval leaves out zero.
        passes: further iterations of the loader.
    """

    alphas: dict[str, float]
    gains: dict[str, Gain]
    against_single: Gain
    kept: bool
    passes: int


def tune_alpha(
    model: nn.Module,
    loader: Iterable[Any],
    metrics: Iterable[AnyMetric] = ("top1", "top5", "cross_entropy"),
    objective: AnyMetric = "cross_entropy",
    *,
    grid: int | Sequence[float] | None = None,
    per_layer: bool = False,
    epochs: int = 3,
    folds: int = 5,
    confidence: float = 0.95,
    insist: bool = False,
    forward: Forward | None = None,
    calibration: Iterable[Any] | None = None,
    limit: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> AlphaSearch:
    """Find the alpha that is best for a trained network, set it, and return the evidence.

    A plain model is converted in place (``convert(model, "weighed")``), which changes nothing about what it computes.
    GroupNorm and InstanceNorm layers that have no moving averages yet are calibrated, on ``calibration`` or else on
    ``loader`` without its labels. In a network with layers of both kinds alpha is tuned where statistics reach across
    examples, and stays 1 elsewhere.

    The search is adaptive: five alphas in the first iteration of the loader, then in each further one the neighbours of
    the best so far of every metric, halving the step, and at last the lowest point of a parabola through the objective:
    five iterations at most. Between them only a number for every image, alpha and metric is kept. The loader must give
    the same examples every time, in any order: no random augmentation.

    The evidence is honest about the choice: the data falls into ``folds``; for each, alpha is chosen on the others, and
    it is judged where it was not chosen. (Which alphas are candidates is decided with all the data.) Where the interval
    of the objective's gain includes zero there is a warning, and alpha stays as the network was trained.

    Args:
        loader: batches (x, y), or dicts with "image" and "label" (or similar names), to be iterated several times.
        metrics: names ("top1", "top5", "cross_entropy", "ece"), functions of output and target, or `Metric` objects.
        objective: the metric to optimise, one of ``metrics`` or another.
        grid: instead of searching, try so many alphas (denser near 0 and 1), or exactly these, in one iteration.
        per_layer: also fit one alpha a layer by gradient, and set those where they are better on held-out folds. It
            takes ``epochs`` iterations, each with ``folds + 1`` forward and backward passes.
        confidence: of the intervals.
        insist: set the best alpha even where the gain is not distinguishable from zero.
        forward: ``forward(model, batch)`` returns output and targets, for other kinds of batches and tasks.
        limit: use at most so many examples, the first.
        resume: a file that keeps what has been evaluated. Interrupted, the same call goes on where it stopped.
        progress: show a bar; None shows it on a terminal.

    Examples::

        found = betternorm.tune_alpha(model, val_loader)
        print(found)
        found.plot("alpha.png")
        torch.save(model.state_dict(), "tuned.pt")  # alpha is inside
    """
    judged = named_metrics(metrics)
    aim = next(iter(named_metrics((objective,))))
    judged |= {name: metric for name, metric in named_metrics((objective,)).items() if name not in judged}
    candidates = alpha_grid(grid)
    _check_limit(limit)
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must lie between 0 and 1, like 0.95")
    if folds < 2:
        raise ValueError(f"folds={folds} must be 2 or more")
    if not weighed_layers(model):
        convert(model, "weighed")
    layers = _tuned_layers(model)
    untuned = {name: layer.alpha for name, layer in layers.items()}
    baseline = _baseline(layers)
    try:
        calibrating = 0
        if calibration is not None or any(_is_fresh(layer) for layer in layers.values()):
            for layer in layers.values():
                layer.alpha = baseline
            averaged = loader if calibration is None else calibration
            calibrating = calibrate(model, averaged, limit=limit, forward=forward, progress=progress)
        runs = Runs(model, layers, loader, judged, forward or output_and_target, limit, resume, progress, baseline)
        search(runs, aim, candidates)
        split = Folds(runs, min(folds, runs.groups()), seed)
        result = _judge(runs, split, aim, confidence, seed)
        if per_layer:
            result.per_layer = _per_layer(runs, split, result, epochs, seed)
    except BaseException:
        for name, alpha in untuned.items():
            layers[name].alpha = alpha
        raise
    result.passes += calibrating
    result.alpha = result.best[aim] if result.significant or insist else baseline
    if result.per_layer is not None and result.per_layer.kept:
        result.alpha = result.per_layer.alphas
    elif not result.significant:
        warnings.warn(result.verdict(), UncertainGainWarning, stacklevel=2)
    for name, layer in layers.items():
        layer.alpha = result.alpha[name] if isinstance(result.alpha, dict) else result.alpha
    return result


def compare_alpha(
    model: nn.Module,
    loader: Iterable[Any],
    alpha: float | Mapping[str, float],
    against: float | Mapping[str, float] | None = None,
    metrics: Iterable[AnyMetric] = ("top1", "top5", "cross_entropy"),
    *,
    confidence: float = 0.95,
    forward: Forward | None = None,
    limit: int | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> dict[str, Gain]:
    """What one setting of alpha gains over another, by metric, with paired intervals, in one pass over the data.

    For data that neither was chosen on, such as a test set. The model, which has to be converted, is left as it is.

    Args:
        alpha: one number, or numbers by layer name; layers that are not named keep theirs.
        against: the same; None is the network as it was trained (alpha = 0 with BatchNorm, 1 with GroupNorm).
        metrics, forward, limit, confidence, progress: as in `tune_alpha`.
    """
    layers = _tuned_layers(model)
    current = {name: layer.alpha for name, layer in layers.items()}
    baseline = _baseline(layers)

    def setting(wanted: float | Mapping[str, float]) -> tuple[float, ...]:
        if not isinstance(wanted, Mapping):
            wanted = dict.fromkeys(layers, wanted)
        if unknown := [name for name in wanted if name not in layers]:
            raise ValueError(
                f"{unknown[0]!r} is not a layer with an alpha to choose; those are {_listed(list(layers))}"
            )
        return tuple(checked_alpha(wanted.get(name, current[name])) for name in layers)

    before, after = setting(baseline if against is None else against), setting(alpha)
    runs = Runs(
        model, layers, loader, named_metrics(metrics), forward or output_and_target, limit, None, progress, baseline
    )
    try:
        runs.evaluate([before, after])
    finally:
        for name, value in current.items():
            layers[name].alpha = value
    return {
        metric: _gain(runs, metric, values[before], values[after], confidence, seed)
        for metric, values in runs.values.items()
    }


def _tuned_layers(model: nn.Module) -> dict[str, GroupedBatchNorm]:
    layers = weighed_layers(model)
    if not layers:
        raise ValueError("the model has no BatchNorm, GroupNorm or InstanceNorm layer, so there is no alpha to tune")
    across = {name: layer for name, layer in layers.items() if _as_trained(layer) == 0}
    return across or layers


def _as_trained(layer: GroupedBatchNorm) -> float:
    """The alpha of a layer before anybody tuned it."""
    return layer.alpha if layer.alpha in (0, 1) else float(layer.examples_per_group == 1)


def _baseline(layers: Mapping[str, GroupedBatchNorm]) -> float:
    return _as_trained(next(iter(layers.values())))


def _is_fresh(layer: GroupedBatchNorm) -> bool:
    """Whether the layer was made from Group or Instance Norm and has no averages yet."""
    return layer.alpha == 1 and layer.num_batches_tracked is not None and int(layer.num_batches_tracked) == 0


def _judge(runs: Runs, split: Folds, objective: str, confidence: float, seed: int) -> AlphaSearch:
    gains = {
        metric: _gain(runs, metric, values[runs.baseline], split.single(objective, metric), confidence, seed)
        for metric, values in runs.values.items()
    }
    alphas = sorted(runs.tried())
    rows = [
        {"alpha": alpha} | {metric: runs.average(metric, runs.values[metric][alpha]) for metric in runs.metrics}
        for alpha in alphas
    ]
    return AlphaSearch(
        alpha=runs.baseline,
        objective=objective,
        baseline=runs.baseline,
        table=rows,
        best={metric: runs.best(metric) for metric in runs.metrics},
        gains=gains,
        significant=_leaves_out_zero(gains[objective], runs.metrics[objective]),
        higher_is_better={name: metric.higher_is_better for name, metric in runs.metrics.items()},
        examples=len(runs.keys),
        passes=runs.passes,
        evaluations=len(alphas),
        folds=split.count,
        confidence=confidence,
    )


def _per_layer(runs: Runs, split: Folds, single: AlphaSearch, epochs: int, seed: int) -> PerLayer:
    """Fit one alpha a layer and judge it on the folds that one alpha for all was judged on."""
    aim = single.objective
    alphas, held_out = fit_per_layer(runs, split, aim, single.best[aim], epochs)
    rival = split.single(aim, aim) if single.significant else runs.values[aim][runs.baseline]
    against = _gain(runs, aim, rival, held_out[aim], single.confidence, seed)
    return PerLayer(
        alphas=alphas,
        gains={
            metric: _gain(runs, metric, values[runs.baseline], held_out[metric], single.confidence, seed)
            for metric, values in runs.values.items()
        },
        against_single=against,
        kept=_leaves_out_zero(against, runs.metrics[aim]),
        passes=epochs + 1,
    )


def _gain(runs: Runs, metric: str, before: Tensor, after: Tensor, confidence: float, seed: int) -> Gain:
    counts, average = runs.counts[metric], runs.metrics[metric].average
    low, high = paired_bootstrap(before, after, counts, average, confidence, seed=seed)
    return Gain(
        before=runs.average(metric, before),
        after=runs.average(metric, after),
        low=low,
        high=high,
        p_value=mcnemar(before, after) if metric == "top1" else None,
    )


def _leaves_out_zero(gain: Gain, metric: Metric) -> bool:
    return gain.low > 0 if metric.higher_is_better else gain.high < 0


def _check_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be 1 or more examples, or None for all")


def _listed(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or "none") + more


def _shown(metric: str, value: float, sign: bool = False) -> str:
    """Shares in per cent, the rest as they are."""
    number = value * 100 if metric in SHARES else value
    places = 2 if metric in SHARES else 4
    return f"{number:{'+' if sign else ''}.{places}f}"
