"""Which norm layer to use at a given batch size, by the paper's results (sections 3 and 4) and this project's."""

from __future__ import annotations

import dataclasses
import textwrap
from dataclasses import dataclass, field
from typing import Any

from betternorm.advice.evidence import MEASURED, PAPER, Measured
from betternorm.advice.ghost_size import check_batch_size, usual_ghost_sizes
from betternorm.conversion.convert import EXAMPLES_PER_GROUP, GHOST_SIZE, GROUPS
from betternorm.decay.report import NormReport


def advise(
    batch_size: int,
    step_size: int | None = None,
    *,
    overfits: bool | None = None,
    iid: bool = True,
    report: NormReport | None = None,
) -> Advice:
    """Recommend a norm layer for a batch size. Each line gives the paper's numbers, ours, and whether they agree.

    Where the two disagree, ours decide: that is the case with gradient accumulation at 2 and 3 examples, with decay at
    these sizes, and with batches that are not i.i.d.

    =================== ===========================================================================================
    batch size          recommendation
    =================== ===========================================================================================
    5 and more          ghost batch norm with a ghost size to tune, decay on gamma and beta
    5 to 16 accumulated batch norm: each batch is a ghost batch already
    4                   batch norm: a ghost batch of 4 is the whole batch
    2 and 3             batch group norm with the number of groups of Group Norm, no decay
    2 and 3 accumulated batch norm with tuned alpha, no decay
    1                   Group Norm, decay
    =================== ===========================================================================================

    Tuning alpha after training is recommended in every case.

    Args:
        batch_size: the number of examples that one process normalizes together in training.
        step_size: the number of examples per optimizer step on this process, if gradients are accumulated over several
            batches. Default: ``batch_size``.
        overfits: whether training accuracy is well above validation accuracy. Where it is not (SVHN in the paper),
            regularization is not expected to help and is not recommended. None means unknown.
        iid: False if the examples of a batch depend on each other, as in metric learning.
        report: the `norm_report` of the model, for what it says about decay.

    Examples::

        >>> advise(128).to, advise(128).options
        ('ghost', {'ghost_size': 16})
        >>> advise(2).to, advise(2, step_size=128).to, advise(1).to
        ('batch_group', 'weighed', 'group')
    """
    check_batch_size(batch_size)
    step_size = batch_size if step_size is None else step_size
    check_batch_size(step_size, "step_size")
    if step_size < batch_size:
        raise ValueError(f"step_size is {step_size}; it must be at least batch_size={batch_size}")
    advice = Advice(batch_size, step_size)
    if batch_size == 1:
        what = f"Group Norm ({GROUPS} groups): a batch of one has no statistics across examples"
        advice.choose("group", "Group Norm", what, "4.2", PAPER["batch size 1"])
    elif not iid:
        what = (
            "batch norm: batches here are not random, and the batch group norm of the paper "
            f"(examples_per_group={EXAMPLES_PER_GROUP}) was worse here"
        )
        advice.choose("weighed", "batch norm", what, "4.4", PAPER["not iid"], "not iid")
    elif batch_size >= 4:
        _advise_medium(advice, overfits)
    else:
        _advise_small(advice, overfits)
    advice.lines.append(_weighing(advice))
    advice.lines.append(_decay(advice, report, overfits))
    return advice


@dataclass(frozen=True)
class Line:
    """One recommendation, what the paper found, and what was measured here."""

    method: str
    what: str
    section: str
    paper: str
    ours: tuple[Measured, ...] = ()

    @property
    def agreement(self) -> str:
        """Whether our measurements agree with the paper: the first one that is not inconclusive decides."""
        if not self.ours:
            return "not measured here"
        outcomes = [measured.outcome for measured in self.ours]
        return next((outcome for outcome in outcomes if outcome != "inconclusive"), "inconclusive")

    @property
    def evidence(self) -> str:
        """The numbers of both."""
        ours = "; ".join(map(str, self.ours))
        return f"paper: {self.paper}. " + (f"Ours, in points: {ours}" if ours else "Not measured here")


@dataclass
class Advice:
    """What :func:`advise` recommends. ``to`` and ``options`` are the arguments of ``convert``."""

    batch_size: int
    step_size: int
    lines: list[Line] = field(default_factory=list)
    to: str = "weighed"
    options: dict[str, Any] = field(default_factory=dict)
    ghost_sizes: list[int] = field(default_factory=list)

    @property
    def is_accumulated(self) -> bool:
        return self.step_size > self.batch_size

    def choose(self, to: str, method: str, what: str, section: str, paper: str, *ours: str, **options: Any) -> None:
        """Recommend a layer, with the names of its rows in ``MEASURED``."""
        self.to, self.options = to, options
        self.lines.append(Line(method, what, section, paper, tuple(MEASURED[name] for name in ours)))

    def to_dict(self) -> dict[str, Any]:
        """The advice as numbers and strings, for JSON."""
        lines = [
            dataclasses.asdict(line) | {"agreement": line.agreement, "evidence": line.evidence} for line in self.lines
        ]
        return dataclasses.asdict(self) | {"lines": lines}

    def __str__(self) -> str:
        steps = f", {self.step_size} examples per step" if self.is_accumulated else ""
        lines = [f"Advice at batch size {self.batch_size}{steps}:"]
        for number, line in enumerate(self.lines, 1):
            words = f"{number}. {line.what} (section {line.section}; {line.evidence})"
            lines.append(textwrap.fill(words, width=100, initial_indent="  ", subsequent_indent="     "))
        return "\n".join(lines)


def _advise_medium(advice: Advice, overfits: bool | None) -> None:
    size = advice.batch_size
    if overfits is False:
        what = "batch norm: ghost batch norm is a regularizer, which is not expected to help without overfitting"
        advice.choose("weighed", "batch norm", what, "3.2", PAPER["ghost"], "ghost")
    elif size == 4 or (advice.is_accumulated and size <= GHOST_SIZE):
        what = f"batch norm: with statistics over {size} examples, each batch is a ghost batch already"
        advice.choose("weighed", "batch norm", what, "3.2", PAPER["ghost"], "ghost, accumulated")
    else:
        start, advice.ghost_sizes = usual_ghost_sizes(size)
        sizes = ", ".join(map(str, advice.ghost_sizes))
        what = f"ghost batch norm; begin with a ghost size of {start} and tune it over {sizes}"
        if overfits is None:
            what += ". It is a regularizer: do not expect a gain where the model does not overfit"
        ours = ("ghost, 16", "ghost") if size <= 16 else ("ghost",)
        advice.choose("ghost", "ghost batch norm", what, "3.2", PAPER["ghost"], *ours, ghost_size=start)


def _advise_small(advice: Advice, overfits: bool | None) -> None:
    size, note = advice.batch_size, "; B = 3 was not tried" if advice.batch_size == 3 else ""
    paper = PAPER["batch_group"] + note
    if advice.is_accumulated:
        what = f"batch norm with statistics over {size} examples, and alpha tuned after training"
        advice.choose("weighed", "batch norm", what, "3.4", paper, "batch_group, accumulated")
    elif overfits is False:
        what = "Group Norm: batch group norm is a regularizer, which is not expected to help without overfitting"
        advice.choose("group", "Group Norm", what, "3.4", paper, "batch_group, group")
    else:
        what = f"batch group norm over the whole batch, with the groups of Group Norm ({GROUPS}, to be tuned as there)"
        if overfits is None:
            what += ". It is a regularizer: do not expect a gain where the model does not overfit"
        ours = ("batch_group", "batch_group, group")
        advice.choose("batch_group", "batch group norm", what, "3.4", paper, *ours, examples_per_group=size)
    what = "when fine-tuning a pretrained model, FrozenBatchNorm is an alternative: it has no batch statistics at all"
    advice.lines.append(Line("frozen batch norm", what, "none", PAPER["frozen"]))


def _weighing(advice: Advice) -> Line:
    what = "after training, tune alpha on validation data (inference example weighing): tune_alpha"
    paper = PAPER["weighing group" if advice.to == "group" else "weighing"]
    if advice.to == "group":
        name = "weighing group"
    elif advice.batch_size <= 3:
        name = "weighing, accumulated" if advice.is_accumulated else "weighing, two"
    else:
        name = "weighing"
    return Line("inference example weighing", what, "3.1", paper, (MEASURED[name],))


def _decay(advice: Advice, report: NormReport | None, overfits: bool | None) -> Line:
    names: tuple[str, ...]
    if advice.batch_size in (2, 3):
        names = ("decay, two",)
        if advice.is_accumulated:
            names = ("decay, two accumulated", "decay, two accumulated, batch_group")
        what = "no decay on gamma and beta at this batch size: param_groups(model, weight_decay, norm_decay='none')"
    else:
        names = (
            ("decay, group",) if advice.to == "group" else ("decay, four",) if advice.batch_size == 4 else ("decay",)
        )
        what = "weight decay on gamma and beta where it has an effect: build the optimizer from param_groups"
        if overfits is False:
            what = "no decay on gamma and beta is needed: it is a regularizer, and the model does not overfit"
        elif report is not None and report.with_effect:
            what = (
                f"weight decay on gamma and beta of {len(report.with_effect)} of the {len(report)} norm layers, where "
                "it has an effect: build the optimizer from param_groups"
            )
        elif report is not None:
            what = f"no decay on gamma and beta: it has no effect in any of the {len(report)} norm layers"
    return Line("decay on gamma and beta", what, "3.3", PAPER["decay"], tuple(MEASURED[name] for name in names))
