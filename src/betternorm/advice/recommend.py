"""The paper's guidance as functions: what to use at which batch size, and on what evidence (sections 3 and 4)."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import textwrap
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from betternorm import third_party
from betternorm.conversion.convert import EXAMPLES_PER_GROUP, GHOST_SIZE, GROUPS, convert
from betternorm.decay.norms import norm_layers
from betternorm.decay.report import NormReport
from betternorm.display.progress import Bar
from betternorm.display.tables import table

M = TypeVar("M", bound=nn.Module)

MOMENTUM, USUAL_BATCH = 0.1, 128  # torch's default, and the examples per batch that it is right for

_EVIDENCE = {
    "weighing": "up to 0.6% top-1 for ResNet-152 on ImageNet, without training again; more with small ghost sizes",
    "weighing group": "small gains on CIFAR-100, SVHN and Caltech-256 for models trained with Group Norm",
    "ghost": "+5.8% on Caltech-256 and +0.84% on CIFAR-100; no gain on SVHN, which is hardly overfitted",
    "decay": (
        "+0.3% on CIFAR-100 (10 runs, P = 0.002); on Caltech-256 +0.91% for ResNet-50 and -0.13% for Inception-v3 "
        "(3 runs), where only the last block has a path to the output; no change on SVHN"
    ),
    "batch_group": (
        "at B = 2, over a tuned Group Norm, 73.91% to 74.60% on CIFAR-100 (3 runs) and 48.2% to 53.2% on Caltech-256 "
        "(2 runs); 98.75% to 98.73% on SVHN"
    ),
    "not iid": "CIFAR-100, four classes per batch: 40.1% for Batch Norm, 72.2% with ghost size 16, 76.1% with this",
    "alone": "at B = 1 the gains over Group Norm come from decay on gamma and beta",
}


def advise(
    batch_size: int, *, overfits: bool | None = None, iid: bool = True, report: NormReport | None = None
) -> Advice:
    """What the paper would do at this batch size, line by line, each with its section and evidence.

    ==========  ===================================================================================================
    batch size  advice
    ==========  ===================================================================================================
    4 and more  ghost batch norm with a ghost size to tune, example weighing at inference, decay on gamma and beta
    2 and 3     batch group norm with the group count of Group Norm, example weighing, decay
    1           group norm, decay
    ==========  ===================================================================================================

    Args:
        batch_size: the examples that one process normalises together in training.
        overfits: whether training accuracy runs ahead of validation accuracy. Where it does not (SVHN in the paper),
            what regularises is not expected to help and is not advised. None: not known.
        iid: False where the examples of a batch depend on each other, as in metric learning.
        report: of the model in question, for what it says about decay.

    Examples::

        >>> advise(128).to, advise(128).options
        ('ghost', {'ghost_size': 16})
        >>> advise(2).to, advise(1).to, advise(128, overfits=False).to
        ('batch_group', 'group', 'weighed')
    """
    _check_batch_size(batch_size)
    lines: list[Line] = []
    advice = Advice(batch_size, lines)
    if not iid and batch_size > 1:
        advice.to, advice.options = "batch_group", {"examples_per_group": EXAMPLES_PER_GROUP}
        what = f"batch group norm with pairs of examples and {GROUPS} groups of channels: batches here are not random"
        lines.append(Line("batch group norm", what, "4.4", _EVIDENCE["not iid"]))
    elif batch_size >= 4:
        _advise_medium(advice, overfits)
    elif batch_size >= 2:
        _advise_small(advice, overfits)
    else:
        advice.to = "group"
        what = f"group norm ({GROUPS} groups): a batch of one has no statistics across examples"
        lines.append(Line("group norm", what, "4.2", _EVIDENCE["alone"]))
    lines.append(_weighing(advice.to))
    lines.append(_decay(report, overfits))
    return advice


def upgrade(
    model: M,
    batch_size: int,
    *,
    overfits: bool | None = None,
    iid: bool = True,
    ghost_size: int | None = None,
    num_groups: int | None = None,
    report: NormReport | None = None,
    verbose: bool = True,
) -> M:
    """Give a model, before training, the norm layers that :func:`advise` names; in place, undone by ``revert(model)``.

    Moving averages get a window in examples: at batch sizes below 128 torch's momentum of 0.1 becomes smaller, so that
    they reach back as many images as at 128. With two examples per batch they would be of twenty images otherwise.

    What was done and what is left to do (the optimizer's groups, the weight of the example) is printed.

    Args:
        model: any model with batch norm layers. Models with Group Norm alone get batch group norm at batch sizes 2 and
            3, and the ability to weigh the example otherwise.
        batch_size, overfits, iid, report: as for :func:`advise`.
        ghost_size: instead of the starting value that the advice has.
        num_groups: instead of 32, or the largest number below that suits all layers.
        verbose: False prints nothing.

    Examples::

        >>> model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        >>> upgrade(model, batch_size=128, verbose=False)[1]
        GhostBatchNorm(64, ghost_size=16, eps=1e-05, momentum=0.1, affine=True)
    """
    layers = norm_layers(model)
    if not layers:
        if any(third_party.is_frozen(module) for module in model.modules()):
            raise ValueError(
                f"the norm layers of {type(model).__name__} are frozen (FrozenBatchNorm2d), so training has no norm to "
                "choose; convert(model, 'weighed') gives them an alpha, and a model built with "
                "norm_layer=nn.BatchNorm2d can be upgraded"
            )
        raise ValueError(f"{type(model).__name__} has no norm layers, so there is nothing to upgrade")
    advice = advise(batch_size, overfits=overfits, iid=iid, report=report)
    to, options = advice.to, dict(advice.options)
    has_batch_norm = any(isinstance(layer, _BatchNorm) for layer in layers.values())
    if not has_batch_norm and to in ("ghost", "group"):
        to, options = "weighed", {}
    if to == "ghost" and ghost_size is not None:
        options["ghost_size"] = ghost_size
    if to in ("batch_group", "group"):
        chosen = num_groups or (_common_groups(layers) if has_batch_norm else None)
        options |= {"num_groups": chosen} if chosen else {}
    model = convert(model, to, **options)
    for layer in norm_layers(model).values():
        if isinstance(layer, _BatchNorm) and layer.momentum == MOMENTUM:  # another was somebody's choice
            layer.momentum = window_momentum(batch_size)
    if verbose:
        print(_account(layers, norm_layers(model), options, advice))
    return model


def window_momentum(batch_size: int) -> float:
    """The momentum with which moving averages reach back as many examples as torch's default does at 128 per batch.

    Examples::

        >>> [round(window_momentum(batch_size), 4) for batch_size in (256, 128, 16, 2)]
        [0.1, 0.1, 0.0131, 0.0016]
    """
    return MOMENTUM if batch_size >= USUAL_BATCH else 1 - (1 - MOMENTUM) ** (batch_size / USUAL_BATCH)


def tune_ghost_size(
    train: Callable[[int], float | Iterable[float]],
    batch_size: int,
    *,
    ghost_sizes: Iterable[int] | None = None,
    patience: int = 2,
    grace: int = 2,
    progress: bool | None = None,
) -> GhostSearch:
    """Find the ghost size with the best score, by a training function of yours.

    The paper found the score to rise and fall once over the ghost size (section 3.2). So the search begins at the
    usual size and goes outward, and gives up a direction after ``patience`` sizes in a row below the best.

    Args:
        train: called with a ghost size; trains a fresh model and returns its score on validation data, higher being
            better. Or yields a score after each epoch, the last one counting: then sizes that are hopeless, below the
            median of the sizes before at the same epoch, are stopped early.
        batch_size: the examples that one process normalises together. The batch size itself is among the sizes tried:
            it is plain batch norm.
        ghost_sizes: the sizes to try. Default: powers of two from 2 up, and the batch size.
        patience: sizes in a row that a direction may disappoint.
        grace: epochs that every size gets before it can be stopped.
        progress: show a bar; None shows it on a terminal.

    Examples::

        >>> def train(ghost_size):
        ...     for epoch in range(5):
        ...         yield 0.7 + 0.01 * epoch - 0.05 * abs(math.log2(ghost_size / 8))
        >>> tune_ghost_size(train, batch_size=64).ghost_size
        8
    """
    start, usual = usual_ghost_sizes(batch_size)
    sizes = sorted(set(usual if ghost_sizes is None else ghost_sizes))
    wrong = [size for size in sizes if not isinstance(size, int) or not 1 <= size <= batch_size]
    if wrong or not sizes:
        raise ValueError(f"ghost_sizes has {wrong or 'no size'}; sizes from 1 to batch_size={batch_size} can be tried")
    if patience < 1 or grace < 1:
        raise ValueError(f"patience is {patience} and grace is {grace}; both must be 1 or more")

    first = min(range(len(sizes)), key=lambda i: abs(math.log2(sizes[i] / start)))
    search = GhostSearch(batch_size)
    disappointed = {-1: 0, +1: 0}
    with Bar("ghost sizes", len(sizes), progress) as bar:
        for position in sorted(range(len(sizes)), key=lambda i: abs(i - first)):
            size, side = sizes[position], int(math.copysign(1, position - first))
            if position != first and disappointed[side] >= patience:
                search.trials.append(GhostSizeTrial(size, None, 0, "skipped"))
            else:
                before = search.score
                trial = _run(train, size, [t for t in search.trials if t.outcome == "finished"], grace)
                search.trials.append(trial)
                better = before is None or (trial.outcome == "finished" and _rank(trial.score) >= before)
                disappointed[side] = 0 if better else disappointed[side] + 1
            bar.advance(note=f"best so far {search.ghost_size}" if search.score is not None else "")
    if search.score is None:
        raise ValueError("train gave no finite score for any ghost size")
    search.trials.sort(key=lambda trial: trial.ghost_size)
    return search


def usual_ghost_sizes(batch_size: int) -> tuple[int, list[int]]:
    """Where to begin with the ghost size at this batch size, and the sizes worth trying."""
    _check_batch_size(batch_size)
    if batch_size < 4:
        raise ValueError(f"batch_size is {batch_size}; ghost batch norm is for batches of 4 and more")
    powers = [2**k for k in range(1, batch_size.bit_length()) if 2**k < batch_size]
    # The default is the best one in the paper's table of ghost sizes (section 4.4).
    start = min(GHOST_SIZE, max([4] + [size for size in powers if size <= batch_size // 2]))
    return start, [*powers, batch_size]


@dataclass(frozen=True)
class Line:
    """One piece of advice: what to do, and what in the paper says so."""

    method: str
    what: str
    section: str
    evidence: str


@dataclass
class Advice:
    """What :func:`advise` says. ``to`` and ``options`` are what ``convert`` takes; printing gives the lines."""

    batch_size: int
    lines: list[Line]
    to: str = "weighed"
    options: dict[str, Any] = field(default_factory=dict)
    ghost_sizes: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The advice as numbers and strings, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"Advice at batch size {self.batch_size}:"]
        for number, line in enumerate(self.lines, 1):
            words = f"{number}. {line.what} (section {line.section}: {line.evidence})"
            lines.append(textwrap.fill(words, width=100, initial_indent="  ", subsequent_indent="     "))
        return "\n".join(lines)


@dataclass(frozen=True)
class GhostSizeTrial:
    """One ghost size in a :class:`GhostSearch`: its score, and whether it was finished, stopped or skipped."""

    ghost_size: int
    score: float | None
    epochs: int
    outcome: str
    history: tuple[float, ...] = ()


@dataclass
class GhostSearch:
    """What :func:`tune_ghost_size` found: ``ghost_size``, ``score``, and a trial for every size."""

    batch_size: int
    trials: list[GhostSizeTrial] = field(default_factory=list)

    @property
    def best(self) -> GhostSizeTrial | None:
        finished = [trial for trial in self.trials if trial.outcome == "finished" and math.isfinite(_rank(trial.score))]
        return max(finished, key=lambda trial: _rank(trial.score), default=None)

    @property
    def ghost_size(self) -> int | None:
        return self.best.ghost_size if self.best else None

    @property
    def score(self) -> float | None:
        return self.best.score if self.best else None

    def __str__(self) -> str:
        rows = [(t.ghost_size, t.score, t.epochs, t.outcome + " (best)" * (t == self.best)) for t in self.trials]
        return table(["ghost size", "score", "scores seen", "outcome"], rows)


# --- lines of advice ------------------------------------------------------------------------------------------------


def _advise_medium(advice: Advice, overfits: bool | None) -> None:
    if overfits is False:
        what = "batch norm as it is: ghost batch norm regularises, which is not expected to help without overfitting"
        advice.lines.append(Line("batch norm", what, "3.2", _EVIDENCE["ghost"]))
        return
    start, advice.ghost_sizes = usual_ghost_sizes(advice.batch_size)
    advice.to, advice.options = "ghost", {"ghost_size": start}
    sizes = ", ".join(map(str, advice.ghost_sizes))
    what = f"ghost batch norm; begin with a ghost size of {start} and tune it over {sizes}"
    if overfits is None:
        what += ". It regularises: do not expect a gain where the model does not overfit"
    advice.lines.append(Line("ghost batch norm", what, "3.2", _EVIDENCE["ghost"]))


def _advise_small(advice: Advice, overfits: bool | None) -> None:
    if overfits is False:
        advice.to = "group"
        what = (
            "group norm: batch group norm regularises, which is not expected to help without overfitting; a larger "
            "model may"
        )
        advice.lines.append(Line("group norm", what, "3.4", _EVIDENCE["batch_group"]))
        return
    advice.to, advice.options = "batch_group", {"examples_per_group": advice.batch_size}
    what = f"batch group norm over the whole batch, with the group count of Group Norm ({GROUPS}, to tune as there)"
    if overfits is None:
        what += ". It regularises: do not expect a gain where the model does not overfit"
    evidence = _EVIDENCE["batch_group"] + ("; B = 3 was not tried" if advice.batch_size == 3 else "")
    advice.lines.append(Line("batch group norm", what, "3.4", evidence))


def _weighing(to: str) -> Line:
    what = "after training, weigh the example at inference: tune alpha on validation data with tune_alpha"
    return Line("inference example weighing", what, "3.1", _EVIDENCE["weighing group" if to == "group" else "weighing"])


def _decay(report: NormReport | None, overfits: bool | None) -> Line:
    if overfits is False:
        what = "no decay on gamma and beta is needed: it regularises, and the model does not overfit"
    elif report is None:
        what = "weight decay on gamma and beta where it can act: build the optimizer from param_groups"
    elif report.with_effect:
        what = (
            f"weight decay on gamma and beta of {len(report.with_effect)} of the {len(report)} norm layers, where it "
            "can act: build the optimizer from param_groups"
        )
    else:
        what = f"no decay on gamma and beta: it can act in none of the {len(report)} norm layers"
    return Line("decay on gamma and beta", what, "3.3", _EVIDENCE["decay"])


def _check_batch_size(batch_size: Any) -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}; it must be a whole number of 1 or more")


# --- upgrading ------------------------------------------------------------------------------------------------------


def _common_groups(layers: dict[str, nn.Module]) -> int | None:
    """The largest number of groups up to Group Norm's own that divides the channels of every batch norm.

    A layer with fewer channels than groups gets one channel per group and does not restrict the choice.
    """
    channels = {layer.num_features for layer in layers.values() if isinstance(layer, _BatchNorm)}
    return next(n for n in range(GROUPS, 0, -1) if all(c % n == 0 or c <= n for c in channels))


def _account(before: dict[str, nn.Module], after: dict[str, nn.Module], options: dict[str, Any], advice: Advice) -> str:
    changes = Counter(
        (type(before[name]).__name__, type(layer).__name__)
        for name, layer in after.items()
        if layer is not before[name]
    )
    told = ", ".join(f"{name}={value}" for name, value in options.items())
    done = [f"  {count} {was} -> {now}({told})" for (was, now), count in changes.items()]
    return "\n".join(
        [
            f"Upgraded for a batch size of {advice.batch_size} (undo with revert(model)):",
            *(done or ["  nothing"]),
            str(advice),
        ]
    )


# --- tuning the ghost size ------------------------------------------------------------------------------------------


def _run(
    train: Callable[[int], float | Iterable[float]], size: int, finished: list[GhostSizeTrial], grace: int
) -> GhostSizeTrial:
    scores: list[float] = []
    with contextlib.closing(_scores(train(size))) as running:
        for score in running:
            scores.append(score)
            epoch = len(scores)
            # Their last epoch is left out: nothing is saved by stopping there.
            others = [trial.history[epoch - 1] for trial in finished if len(trial.history) > epoch]
            if epoch >= grace and len(others) >= 2 and max(map(_rank, scores)) < statistics.median_low(others):
                return GhostSizeTrial(size, score, epoch, "stopped early", tuple(scores))
    if not scores:
        raise ValueError(f"train({size}) yielded no score")
    return GhostSizeTrial(size, scores[-1], len(scores), "finished", tuple(scores))


def _scores(result: float | Iterable[float]) -> Generator[float, None, None]:
    if isinstance(result, Generator):
        with contextlib.closing(result):  # ends the training function where it is, and runs what it has to clean up
            yield from map(float, result)
    elif isinstance(result, Iterable) and not hasattr(result, "item"):
        yield from map(float, result)
    else:
        yield float(result)  # type: ignore[arg-type]


def _rank(score: float | None) -> float:
    """A score to compare by: training that went wrong comes last."""
    return -math.inf if score is None or math.isnan(score) else score
