"""Why a model is worse in evaluation than in training, and the line that fixes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.advice.findings import BATCHES, CAUSES, MEASURED, STATE, Diagnosis, Finding
from betternorm.advice.probe import CONFIDENCE, Averages, Examples, Probe, Scores, is_batch_norm
from betternorm.advice.state import (
    FREEZE,
    distance,
    lagging,
    mode_findings,
    ranks_that_disagree,
    uneven_updates,
    updates,
    window,
)
from betternorm.display.progress import Bar
from betternorm.weighing.batches import Forward, random_state_kept
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain, gain_between
from betternorm.weighing.folds import assign_folds
from betternorm.weighing.metrics import METRICS
from betternorm.weighing.temperature import at_inverse, best_inverse, is_at_the_end

LEAST_TOP1, LEAST_LOSS = 0.005, 0.02  # what a finding has to cost: half a point, or 2 % of the loss
SMALL_BATCH, TINY_BATCH = 8, 4  # examples per batch in training that are a finding: with a cost, and in any case
ALPHAS = (0.1, 0.2, 0.4, 0.05)
MOST_PASSES = 10
FAR = 0.1  # distance of a layer's averages from the statistics of the data worth naming
DEAD = 100  # variances on one side below eps, and on the other so many times larger

RECALIBRATE = "betternorm.calibrate(model, stats_loader)"
ADAPT = "betternorm.calibrate(model, loader)"


def diagnose(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    stats_loader: Iterable[Any] | None = None,
    train_batch_size: int | None = None,
    try_fixes: bool = False,
    max_examples: int = 2000,
    forward: Forward | None = None,
    seed: int = 0,
    progress: bool | None = None,
) -> Diagnosis:
    """Find out what is wrong with the norm layers of a model, what it costs, and the line that fixes it.

    The model is measured in evaluation mode, with batch statistics, with moving averages collected again, with alpha,
    and after temperature scaling, on a copy; model and random state do not change. It takes at most 10 forward passes
    over the examples, and 15 more with ``try_fixes``. The examples are kept in memory (2 GB at most).

    ====================== ============================================================================================
    cause                  what is wrong
    ====================== ============================================================================================
    ``non_finite``         outputs are NaN or infinite; nothing else is judged then
    ``train_mode``         norm layers normalize with the statistics of the batch in evaluation
    ``partly_frozen``      statistics, gamma, or beta are frozen in some layers and not in others
    ``rank_skew``          the processes of a distributed run have different moving averages (every rank must call this)
    ``sorted_batches``     batches have few classes each
    ``leftover_batch``     the last batch of an epoch has one example
    ``lagging_averages``   the averages reach back too far for the number of training steps
    ``mismatched_averages`` the averages do not fit the weights, or were collected on different data
    ``small_batches``      trained with so few examples per batch that statistics at inference are different
    ``shifted_data``       the averages fit the training data, but not this data
    ``dead_channels``      channels with zero variance, either in the averages or in this data
    ``overconfident``      a note: dividing the logits by a temperature reduces the loss
    ====================== ============================================================================================

    State comes first, then batches, then the others by cost. Those need a cost of at least 0.5 points of top-1 accuracy
    or 2 % of the loss, and a 99 % interval that excludes zero (several settings are
    compared). The loss is the cross-entropy after temperature scaling.

    Args:
        model: any model with batch norm layers that returns class logits.
        loader: labeled batches of validation data, as for `tune_alpha`.
        stats_loader: training data, labeled or not. Without it, averages that do not fit the training data and data
            that differs from it cannot be distinguished, and both are listed.
        train_batch_size: examples per process in training. Default: the batch size of ``stats_loader``.
        try_fixes: also apply each fix to a copy, and measure the gain on examples that the fix did not use.
        max_examples: use at most this many examples of each loader, the first ones.
        forward: ``forward(model, batch)`` returns output and targets, for other kinds of batches.
        seed: of the order of the examples.
        progress: show a bar; None shows it on a terminal.

    Examples::

        diagnosis = betternorm.diagnose(model, val_loader, stats_loader=train_loader)
        print(diagnosis)
        diagnosis.findings[0].cause
    """
    for name, value in (("max_examples", max_examples), ("train_batch_size", train_batch_size)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be 1 or more")
    if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
        model = model.module
    skewed = ranks_that_disagree(_batch_norms(model))
    with random_state_kept(loader, stats_loader), Bar("diagnosing", None, progress) as bar:
        examples = Examples(loader, max_examples)
        stats = None if stats_loader is None else Examples(stats_loader, max_examples, "stats_loader")
        size = train_batch_size or (stats.batch_size if stats else None)
        probe = Probe(model, examples, forward, seed, bar)
        return _Examination(model, probe, stats, size, skewed, try_fixes).run()


class _Examination:
    """One call of `diagnose`."""

    def __init__(
        self,
        model: nn.Module,
        probe: Probe,
        stats: Examples | None,
        train_batch_size: int | None,
        skewed: tuple[str, ...],
        try_fixes: bool,
    ) -> None:
        self.model, self.probe, self.stats, self.skewed, self.try_fixes = model, probe, stats, skewed, try_fixes
        self.train_batch_size = train_batch_size
        self.layers = _batch_norms(model)
        self.measured: dict[str, dict[str, float]] = {}
        self.distances: dict[str, float] = {}
        self.findings: list[Finding] = []

    def run(self) -> Diagnosis:
        probe, data = self.probe, self.probe.examples
        calls = dict.fromkeys(self.layers, 0.0)
        hooks = [
            layer.register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
            for name, layer in probe.model.named_modules()
            if name in calls
        ]
        before = self._measure("evaluation mode", probe.evaluate())
        for hook in hooks:
            hook.remove()
        self.findings += mode_findings(self.model, self.layers, data.batch_size)
        self._cost_of_train_mode(before)
        self._batches()
        broken = self._non_finite(before)
        if probe.layers and len(data.keys.unique()) >= ENOUGH_TO_JUDGE:
            size = max(2, self.train_batch_size or data.batch_size)
            self._measure(
                f"batch statistics, {size} per batch",
                probe.with_batch_statistics(data.shuffled(size, probe.seed)),
            )
            if not broken:
                self._averages(before, uneven_updates(self.layers, calls))
        if not broken and len(data.keys.unique()) >= ENOUGH_TO_JUDGE:
            self._temperature(before)
        groups = {cause: place for place, cause in enumerate((*STATE, *BATCHES))}
        self.findings.sort(key=lambda f: (f.is_note, groups.get(f.cause, len(CAUSES)), -_size(f.cost)))
        return Diagnosis(
            tuple(self.findings),
            self.measured,
            self.distances,
            data.count,
            round(probe.passes),
        )

    def _measure(self, name: str, scores: Scores) -> Scores:
        self.measured[name] = self.probe.summary(scores)
        return scores

    def _add(self, cause: str, why: str, layers: tuple[str, ...], fix: str, *cost_and_gain: dict[str, Gain]) -> None:
        self.findings.append(Finding(cause, why, layers, fix, *cost_and_gain))

    # -- state and batches --

    def _non_finite(self, before: Scores) -> bool:
        """Outputs that are NaN or infinite: they have no loss, so that no change could be shown to reduce it."""
        count = int((~before["loss"].isfinite()).flatten(1).any(1).sum())
        if not count:
            return False
        state = self.model.state_dict()
        bad = [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]
        averages = [name.rpartition(".")[0] for name in bad if name.endswith((".running_mean", ".running_var"))]
        layers = tuple(dict.fromkeys(name for name in averages if name in self.layers))
        why = f"the outputs for {count} of {self.probe.examples.count} examples are NaN or infinite, "
        if layers:
            why += f"and so are the moving averages of {len(layers)} of {len(self.layers)} norm layers"
            fix = RECALIBRATE if self.stats is not None else f"{RECALIBRATE}  # training data"
        elif bad:
            why += f"and so is {bad[0]!r} in the weights"
            fix = "[name for name, tensor in model.state_dict().items() if not tensor.isfinite().all()]"
        else:
            why += "and the weights are finite: check the inputs"
            fix = "[number for number, (x, _) in enumerate(loader) if not x.isfinite().all()]"
        self._add("non_finite", why, layers, fix)
        return True

    def _cost_of_train_mode(self, before: Scores) -> None:
        for place, finding in enumerate(self.findings):
            names = [name for name in finding.layers if name in self.probe.layers]
            if finding.cause == "train_mode" and names:
                try:
                    scores = self.probe.with_batch_statistics(self.probe.examples.natural(), names)
                except ValueError:  # one value per channel has no statistics
                    continue
                name = f"train mode, {self.probe.examples.batch_size} per batch"
                cost = self.probe.gain(self._measure(name, scores), before)
                self.findings[place] = replace(finding, cost=cost, gain=cost if self.try_fixes else {})

    def _batches(self) -> None:
        data, stats = self.probe.examples, self.stats
        by_batch = any(finding.cause == "train_mode" for finding in self.findings)
        for name, batches, in_training in (("stats_loader", stats, True), ("loader", data, by_batch)):
            if batches is None or (name == "loader" and not in_training and batches.complete):
                continue  # in evaluation mode neither order nor size of batches matters
            remade = f"{name} = torch.utils.data.DataLoader({name}.dataset, {name}.batch_size, "
            if batches.sorted_by_class():
                why = f"the batches of {name} have far fewer classes than random ones"
                if name == "loader" and not in_training:
                    why += f", and only its first {batches.count} examples were measured"
                self._add("sorted_batches", why, (), f"{remade}shuffle=True)")
            if batches.ends_with_one and in_training:
                why = f"the last batch of {name} has one example, whose statistics enter the averages like any other's"
                self._add("leftover_batch", why, (), f"{remade}shuffle=True, drop_last=True)")

    # -- moving averages --

    def _averages(self, before: Scores, uneven: tuple[str, ...]) -> None:
        """Collect the averages again, on training data if there is some, and on the data."""
        probe, data, stats, now = self.probe, self.probe.examples, self.stats, before
        adapted = probe.collect(data)
        on_data = self._measure("averages of loader", probe.evaluate(adapted))
        expected, after = adapted, on_data
        if stats is not None:
            expected = probe.collect(stats)
            after = self._measure("averages of stats_loader", probe.evaluate(expected))
        self.distances = {name: distance(probe.averages[name], expected[name]) for name in probe.layers}
        if (small := self._small_batches(before, after, expected)) is not None:
            self.findings.append(small)
            before = after if _is_finding(small.cost) else before
        shift = None if stats is None else probe.gain(after, on_data)
        if shift is not None and not (_is_finding(shift) and _is_finding(probe.gain(now, on_data))):
            shift = None  # a shift is better fitted by the averages of the data than by those of now, too
        cost = probe.gain(before, after)
        # Far from the training data, small differences between averages matter by chance.
        stale = _is_finding(cost) and (shift is None or _size(cost) > _size(shift) / 4)
        if stale or self.skewed or uneven:
            self._stale(before, after, expected, cost if stale else {}, uneven)
        if shift is not None:
            self._shifted(after, adapted, expected, shift)

    def _stale(
        self, before: Scores, after: Scores, expected: Averages, cost: dict[str, Gain], uneven: tuple[str, ...]
    ) -> None:
        """The averages do not fit: name the reason that the state of the layers gives."""
        far = tuple(sorted((n for n in self.distances if self.distances[n] > FAR), key=lambda n: -self.distances[n]))
        fix = RECALIBRATE if self.stats is not None else f"{RECALIBRATE}  # training data"
        gain: dict[str, Gain] = {}
        if self.try_fixes and (cost or self.skewed):
            gain = self._gain_on_halves(before) if self.stats is None else self.probe.gain(before, after)
        if self.skewed:
            why = "the ranks of the process group have different moving averages; a checkpoint keeps those of one"
            self._add("rank_skew", why, self.skewed, fix, cost, gain)
        elif uneven:
            why = f"the averages of {len(uneven)} of {len(self.layers)} norm layers were updated less often than others"
            self._add("partly_frozen", why, uneven, fix if cost else FREEZE, cost, gain)
        elif (dead := self._dead(expected)) and (of_dead := self._cost_of(dead, before, expected, cost)):
            channels = sum(int(mask.sum()) for mask in dead.values())
            why = f"{channels} channels have zero variance in the moving averages or in the data, but not in both"
            self._add("dead_channels", why, tuple(dead), fix, of_dead, gain)
        elif slow := lagging(self.layers):
            layer = self.layers[slow[0]]
            why = f"averages over {window(layer):.0f} batches, and training took {updates(layer)} steps"
            self._add("lagging_averages", why, slow, fix, cost, gain)
        elif self.stats is not None:
            why = "the moving averages do not fit the training data: collected on other data, or before weights changed"
            self._add("mismatched_averages", why, far, fix, cost, gain)
        else:
            why = "the moving averages do not fit this data: collected on different training data or other weights, or"
            why += " this data differs from the training data (shifted_data); stats_loader tells the two apart"
            self._add("mismatched_averages", why, far, fix, cost, gain)
            why = "the other possibility: the averages are right and this data differs from the training data"
            self._add("shifted_data", why, far, ADAPT, cost, gain)

    def _cost_of(
        self, dead: dict[str, Tensor], before: Scores, expected: Averages, whole: dict[str, Gain]
    ) -> dict[str, Gain]:
        """What dead channels cost, if that is most of the whole cost."""
        probe = self.probe
        repaired = {name: _merged(probe.averages[name], expected[name], mask) for name, mask in dead.items()}
        cost = probe.gain(before, probe.evaluate(repaired, note="dead channels"))
        return cost if _is_finding(cost) and _size(cost) > _size(whole) / 2 else {}

    def _shifted(self, before: Scores, adapted: Averages, expected: Averages, cost: dict[str, Gain]) -> None:
        apart = {name: distance(adapted[name], expected[name]) for name in adapted}
        far = tuple(sorted((name for name in apart if apart[name] > FAR), key=lambda name: -apart[name]))
        why = "the statistics of this data differ from those of the training data"
        gain = self._gain_on_halves(before) if self.try_fixes else {}
        self._add("shifted_data", why, far, ADAPT, cost, gain)

    def _dead(self, expected: Averages) -> dict[str, Tensor]:
        """Channels without variance on one side alone."""
        dead = {}
        for name, layer in self.probe.layers.items():
            variances = torch.stack([self.probe.averages[name][1], expected[name][1]])
            mask = (variances.amin(0) <= layer.eps) & (variances.amax(0) > DEAD * layer.eps)
            if bool(mask.any()):
                dead[name] = mask
        return dead

    def _small_batches(self, before: Scores, after: Scores, expected: Averages) -> Finding | None:
        """Averages of few examples, or a network that is used to the statistics of few: alpha mixes them in."""
        probe, stats = self.probe, self.stats
        is_small = self.train_batch_size is not None and self.train_batch_size <= SMALL_BATCH
        averages, base, name = probe.averages, before, "alpha {:g}"
        again = is_small and stats is not None and probe.summary(after)["loss"] < probe.summary(before)["loss"]
        if again:
            averages, base, name = expected, after, "averages of stats_loader, alpha {:g}"
        alphas = ALPHAS[: min(4 if is_small else 2, MOST_PASSES - 1 - round(probe.passes))]  # one is for dead channels
        tried = [self._measure(name.format(alpha), probe.evaluate(averages, alpha)) for alpha in alphas]
        if not is_small:
            return None
        best = min([base, *tried], key=lambda scores: probe.summary(scores)["loss"])
        cost = probe.gain(before, best)
        assert self.train_batch_size is not None
        if self.train_batch_size > TINY_BATCH and not _is_finding(cost):
            return None
        examples = self.train_batch_size * min(map(window, self.layers.values()))
        why = f"trained with {self.train_batch_size} examples per batch; the averages reach back {examples:.0f}"
        fix = f"betternorm.tune_alpha(model, loader{', stats_loader=stats_loader' if again else ''})"
        gain: dict[str, Gain] = {}
        if self.try_fixes:
            gain = probe.gain(before, self._best_of_other_half([base, *tried]))
        return Finding("small_batches", why, tuple(self.layers), fix, cost, gain)

    # -- gains of fixes --

    def _gain_on_halves(self, before: Scores) -> dict[str, Gain]:
        """Recalibrated on each half of the data, evaluated on the other."""
        probe, data = self.probe, self.probe.examples

        def recalibrated(rows: Tensor, others: Tensor) -> Scores:
            return probe.evaluate(probe.collect(data, rows), among=others)

        return probe.gain(before, self._crossed(recalibrated))

    def _best_of_other_half(self, tried: list[Scores]) -> Scores:
        """Each half with what has the lowest loss on the other."""
        summary = self.probe.summary
        return self._crossed(
            lambda rows, others: min(tried, key=lambda s: summary({name: s[name][rows] for name in s})["loss"])
        )

    def _crossed(self, scores_of: Callable[[Tensor, Tensor], Scores]) -> Scores:
        """The scores of each half of the data, by what was fitted on the other."""
        after: Scores = {}
        fold = assign_folds(self.probe.examples.keys, 2, self.probe.seed)
        for number in (0, 1):
            rows, others = (fold == number).nonzero()[:, 0], (fold != number).nonzero()[:, 0]
            for name, values in scores_of(rows, others).items():
                after.setdefault(name, torch.zeros_like(values))[others] = values[others]
        return after

    # -- notes --

    def _temperature(self, before: Scores) -> None:
        """Overconfidence is no fault of a norm layer, but it makes the loss in evaluation mode look bad."""
        curves, counts = before["loss"], torch.ones(len(before["loss"]), dtype=torch.float64)
        inverse = best_inverse(curves, counts)
        if inverse <= 0 or is_at_the_end(inverse):
            return
        plain = at_inverse(curves, 1.0)
        self.measured["evaluation mode, logits not scaled"] = self.measured["evaluation mode"] | {
            "loss": float(plain.mean())
        }

        def gain(after: Tensor) -> dict[str, Gain]:
            keys = self.probe.examples.keys
            loss = gain_between(METRICS["cross_entropy"], plain, after, counts, keys, confidence=CONFIDENCE)
            return self.probe.gain(before, before) | {"loss": loss}

        cost = gain(at_inverse(curves, inverse))
        if inverse < 1 and _is_finding(cost) and not any(finding.cause in MEASURED for finding in self.findings):
            fitted = self._crossed(
                lambda rows, others: {"": at_inverse(curves, best_inverse(curves[rows], counts[rows]))}
            )
            why = f"the logits are too large: the loss is lower with them divided by {1 / inverse:.2f}"
            fix = f"logits = model(images) / {1 / inverse:.3g}"
            self._add("overconfident", why, (), fix, cost, gain(fitted[""]) if self.try_fixes else {})


def _batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_batch_norm(module)}


def _is_finding(cost: dict[str, Gain]) -> bool:
    """Whether a cost is large enough and certain, by either metric."""
    top1, loss = cost["top1"], cost["loss"]
    return (top1.difference >= LEAST_TOP1 and top1.low > 0) or (
        -loss.difference >= LEAST_LOSS * loss.before and loss.high < 0
    )


def _size(cost: dict[str, Gain]) -> float:
    """To sort by: points of top-1, and a relative loss of the same weight as the threshold of a finding."""
    if not cost:
        return 0.0
    loss = cost["loss"]
    return cost["top1"].difference / LEAST_TOP1 - loss.difference / max(loss.before, 1e-12) / LEAST_LOSS


def _merged(own: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], where: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(where, other[0], own[0]), torch.where(where, other[1], own[1])
