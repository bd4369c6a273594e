"""The demo: a small residual network on few images, with batch norm and with the paper's four techniques.

Two hundred training images of scikit-learn's digits, without augmentation, are few enough to overfit, which is where
regularization helps. Batch size (40, 64 or 100) and ghost size (4 or 8) were chosen on validation data with four seeds:
40, which is also the best for batch norm, and 4. Reported numbers are for test data.

The batch norm models are also evaluated on low-contrast, foggy and noisy digits, with one alpha for all of them.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn

from betternorm.errors import UserError
from betternorm.weighing.shifts import corruptions
from betternorm_lab import engines, stats
from betternorm_lab.data import Data, Loader
from betternorm_lab.experiments import claims, findings
from betternorm_lab.experiments.trained_networks import OnTrainedNetwork, held_out
from betternorm_lab.results import Figure, Outcome, Result, Series, Table, Verdict
from betternorm_lab.store import DONE, Row, Store
from betternorm_lab.training import Config
from betternorm_lab.training.evaluation import evaluate
from betternorm_lab.trials import Progress, Runtime

SEEDS = 5
ENOUGH = 0.8  # the share of seeds that must improve

PLAIN = Config(
    dataset="digits",
    train_examples=200,
    augment=False,
    width=16,
    blocks=(1, 1, 1),
    batch_size=40,
    epochs=60,
    validate_every=0,
)
GHOST = replace(PLAIN, norm="ghost", norm_options={"ghost_size": 4})
DECAYED = replace(GHOST, norm_decay="all")

# Batches of two: a lower learning rate and more steps.
GROUP = replace(PLAIN, batch_size=2, epochs=12, learning_rate=0.01, norm="group", norm_options={"num_groups": 8})
BATCH_GROUP = replace(GROUP, norm="batch_group", norm_options={"num_groups": 8, "examples_per_group": 2})


@dataclass(frozen=True)
class Step:
    """A model of a comparison: its configuration, and whether it is evaluated with tuned alpha."""

    name: str
    config: Config
    tuned: bool = False


LADDER = (
    Step("batch norm", PLAIN),
    Step("+ ghost size 4", GHOST),
    Step("+ decay on gamma and beta", DECAYED),
    Step("+ alpha tuned", DECAYED, tuned=True),
)
SMALL_BATCH = (Step("Group Norm", GROUP, tuned=True), Step("batch group norm", BATCH_GROUP, tuned=True))


# The original digits, and shifted ones.
SHIFTS = {"original": "", "low-contrast": "contrast:4", "foggy": "fog:3", "noisy": "noise:5"}
ALPHAS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


@dataclass(frozen=True, kw_only=True)
class UnderShift(OnTrainedNetwork):
    """Evaluates a trained model on shifted digits.

    Alpha is chosen on validation data: the best mean over original and shifted digits.
    """

    kind: ClassVar[str] = "under-shift"

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        tried = [evaluate(network, _shifted(Loader(data, data.validation, 250), name), ALPHAS) for name in SHIFTS]
        means = [sum(row["top1"] for row in at_alpha) for at_alpha in zip(*tried, strict=True)]
        alpha = ALPHAS[means.index(max(means))]
        result: dict[str, Any] = {"alpha": alpha}
        for number, name in enumerate(SHIFTS):
            before, after = evaluate(network, _shifted(held_out(data), name), (0.0, alpha))
            result |= {f"test_top1_{number}": before["top1"], f"test_top1_{number}_tuned": after["top1"]}
            progress((number + 1) / len(SHIFTS))
        return result


SHIFTED = UnderShift.of(PLAIN)


def _shifted(loader: Loader, name: str) -> list[tuple[Tensor, Tensor]]:
    facts = loader.facts
    assert facts.mean is not None
    assert facts.std is not None
    shift = corruptions([SHIFTS[name]], facts.mean, facts.std)[SHIFTS[name]] if SHIFTS[name] else lambda images: images
    return [(shift(images), labels) for images, labels in loader]


@dataclass(frozen=True)
class Score:
    """A test metric: its name in a row, its label, its decimal places, and which direction is better."""

    name: str
    label: str
    places: str
    better: claims.Region

    def of(self, step: Step, rows: Rows) -> list[float]:
        name = f"test_{self.name}{'_tuned' if step.tuned else ''}"
        return [findings.scaled(name, row[name]) for row in rows[step.config]]

    def summary(self, step: Step, rows: Rows) -> str:
        return f"{stats.summary(self.of(step, rows)):{self.places}}"

    def gain(self, before: Step, after: Step, rows: Rows) -> str:
        """The change and its interval, paired by seed: the same initial weights and batches."""
        return f"{stats.paired(self.of(after, rows), self.of(before, rows)):{self.places}}"

    def won(self, before: Step, after: Step, rows: Rows) -> int:
        """The number of seeds for which ``after`` is better; ties do not count."""
        pairs = zip(self.of(before, rows), self.of(after, rows), strict=True)
        return sum(self.better.low < second - first < self.better.high for first, second in pairs)

    def compare(self, claim: str, before: Step, after: Step, rows: Rows) -> Verdict:
        found = stats.paired(self.of(after, rows), self.of(before, rows))
        evidence = f"{self.summary(after, rows)} against {self.summary(before, rows)}: difference {found:{self.places}}"
        return claims.judge(claim, found.interval, self.better, f"{evidence}, P = {found.p:.2g}, paired t-test")


Rows = Mapping[Config, Sequence[Row]]  # a row per seed, in order, for each configuration
ACCURACY = Score("top1", "accuracy, %", ".2f", claims.MORE)
LOSS = Score("cross_entropy", "cross-entropy", ".4f", claims.LESS)


def run_demo(
    folder: str | os.PathLike[str], seeds: int = SEEDS, workers: int | None = None, show: bool | None = None
) -> Result:
    """Run the missing trials of the demo in ``folder``, and return its result."""
    if seeds < 2:
        raise UserError(f"seeds is {seeds}; it must be 2 or more for an interval")
    trials: list[Config] = [replace(config, seed=seed) for seed in range(seeds) for config in _configs()]
    rows = engines.run_trials(
        trials,
        folder,
        engine="processes",
        runtime=Runtime(threads=1, accelerator="cpu"),
        workers=workers,
        retry=True,
        show=show,
    )
    failed = [row for row in rows if row.status != DONE]
    if failed:
        raise UserError(f"{len(failed)} of {len(rows)} trials failed; the first: {failed[0].reason}")
    return _result({config: rows[place :: len(_configs())] for place, config in enumerate(_configs())})


def results(folder: str | os.PathLike[str]) -> list[Result]:
    """The result of the demo from the rows in a store, if it was run there."""
    store, seeds = Store(folder), itertools.count()
    found = itertools.takewhile(all, (_done(store, seed) for seed in seeds))
    rows = dict(zip(_configs(), zip(*found, strict=True), strict=False))
    return [_result(rows)] if len(rows.get(PLAIN, ())) > 1 else []


def held(result: Result) -> bool:
    """Whether the model with all techniques was better for enough of the seeds."""
    return result.verdicts[0].outcome is Outcome.REPLICATED


def _configs() -> list[Config]:
    return list(dict.fromkeys((*(step.config for step in (*LADDER, *SMALL_BATCH)), SHIFTED)))


def _done(store: Store, seed: int) -> list[Row | None]:
    found = [store.get(replace(config, seed=seed).key) for config in _configs()]
    return [row if row is not None and row.status == DONE else None for row in found]


def _result(rows: Rows) -> Result:
    return Result(
        name="demo",
        title="Demo: four techniques on few images",
        place="Section 4, at small size",
        scale="demo",
        command=f"betternorm demo --seeds {len(rows[PLAIN])}",
        tables=[_whole(rows), _one_at_a_time(rows), _under_shift(rows)],
        figures=_figures(rows),
        verdicts=_verdicts(rows),
        rows=[row for of_config in rows.values() for row in of_config],
        notes=_notes(rows),
    )


def _notes(rows: Rows) -> str:
    row = rows[PLAIN][0]
    return (
        f"{PLAIN.train_examples} training images of scikit-learn's digits and a model with {row['parameters']:,} "
        f"parameters, which overfits them. At a batch size of {PLAIN.batch_size} three of the four techniques apply: "
        "ghost batch norm, decay on gamma and beta, and inference example weighing (alpha), tuned on validation data. "
        "The fourth, batch group norm, is for batches of two or three and is compared with Group Norm at a batch size "
        f"of {GROUP.batch_size}, with alpha tuned for both. The batch norm models are also evaluated on low-contrast, "
        "foggy and noisy digits, where alpha takes part of the statistics from each image itself.\n\n"
        "The setting was chosen to overfit: few images, no augmentation. With random crops, batch norm overfits less, "
        "and there is little or nothing to gain. Batch size and ghost size were chosen on validation data; all numbers "
        "below are for test data. Intervals are 95 % intervals of differences between models with the same seed."
    )


# Tables -------------------------------------------------------------------------------------------------------------


def _whole(rows: Rows) -> Table:
    return _against(
        "Batch norm compared with all applicable techniques", LADDER[0], replace(LADDER[-1], name="all three"), rows
    )


def _under_shift(rows: Rows) -> Table:
    lines = []
    for number, name in enumerate(SHIFTS):
        before, after = _under_shift_numbers(rows, number)
        lines.append(
            [
                name,
                f"{stats.summary(before):.2f}",
                f"{stats.summary(after):.2f}",
                f"{stats.paired(after, before):.2f}",
            ]
        )
    alphas = sorted({row["alpha"] for row in rows[SHIFTED]})
    return Table(
        "Batch norm models on shifted digits, without retraining: accuracy, %",
        ["test digits", "alpha 0", f"alpha {' or '.join(f'{alpha:g}' for alpha in alphas)}", "gain"],
        lines,
    )


def _under_shift_numbers(rows: Rows, number: int) -> tuple[list[float], list[float]]:
    names = (f"test_top1_{number}", f"test_top1_{number}_tuned")
    before, after = ([100 * row[name] for row in rows[SHIFTED]] for name in names)
    return before, after


def _against(title: str, before: Step, after: Step, rows: Rows) -> Table:
    metrics, seeds = (ACCURACY, LOSS), len(rows[before.config])
    return Table(
        title,
        ["test data", *(metric.label for metric in metrics)],
        [
            *([step.name, *(metric.summary(step, rows) for metric in metrics)] for step in (before, after)),
            ["gain", *(metric.gain(before, after, rows) for metric in metrics)],
            ["seeds improved", *(f"{metric.won(before, after, rows)} of {seeds}" for metric in metrics)],
        ],
    )


def _one_at_a_time(rows: Rows) -> Table:
    lines = []
    for before, step in zip((None, *LADDER), LADDER, strict=False):
        line = [step.name]
        for metric in (ACCURACY, LOSS):
            line += [f"{stats.summary(metric.of(step, rows)).mean:{metric.places}}"]
            line += [metric.gain(before, step, rows) if before else ""]
        lines.append(line)
    return Table(
        f"Added one at a time (means of {len(rows[PLAIN])} seeds)",
        ["test data", ACCURACY.label, "change", LOSS.label, "change"],
        lines,
    )


# Figures ------------------------------------------------------------------------------------------------------------


def _figures(rows: Rows) -> list[Figure]:
    alphas = findings.alpha_figures(
        "Validation metrics by alpha",
        {"batch norm": rows[PLAIN], "ghost size 4 and decay": rows[DECAYED]},
        within=0.3,
    )
    telling = [figure for figure in alphas if "top-5" not in figure.y_label]  # close to 100 % for ten classes
    return [*(_ladder(metric, rows) for metric in (ACCURACY, LOSS)), _by_seed(rows), *telling]


def _ladder(metric: Score, rows: Rows) -> Figure:
    points = findings.curve("mean and interval", {step.name: metric.of(step, rows) for step in LADDER})
    return Figure(f"Added one at a time: {metric.label}", "", metric.label, [points], kind="bar")


def _by_seed(rows: Rows) -> Figure:
    first, last = LADDER[0], LADDER[-1]
    seeds = [f"seed {row['seed']}" for row in rows[PLAIN]]
    series = [Series(name, seeds, LOSS.of(step, rows)) for name, step in (("batch norm", first), ("all three", last))]
    return Figure("Seed by seed", "", LOSS.label, series, kind="bar")


# Verdicts -----------------------------------------------------------------------------------------------------------


def _verdicts(rows: Rows) -> list[Verdict]:
    plain, ghost, decayed, tuned = LADDER
    return [
        _seeds_won(plain, tuned, rows),
        ACCURACY.compare("Ghost batch norm raises accuracy", plain, ghost, rows),
        LOSS.compare("Ghost batch norm lowers the loss", plain, ghost, rows),
        ACCURACY.compare("Decay on gamma and beta raises accuracy", ghost, decayed, rows),
        LOSS.compare("Tuned alpha lowers the loss of the same models", decayed, tuned, rows),
        *(_shift_held(number, name, rows) for number, name in enumerate(SHIFTS) if SHIFTS[name]),
        ACCURACY.compare("With batches of two, batch group norm is more accurate than Group Norm", *SMALL_BATCH, rows),
    ]


def _shift_held(number: int, name: str, rows: Rows) -> Verdict:
    before, after = _under_shift_numbers(rows, number)
    found = stats.paired(after, before)
    return claims.judge(
        f"Tuned alpha improves accuracy on {name} digits without retraining",
        found.interval,
        claims.MORE,
        f"difference {found:.2f}, P = {found.p:.2g}, paired t-test",
    )


def _seeds_won(before: Step, after: Step, rows: Rows) -> Verdict:
    seeds = len(rows[before.config])
    enough = math.ceil(ENOUGH * seeds)
    won = {metric.label: metric.won(before, after, rows) for metric in (ACCURACY, LOSS)}
    return Verdict(
        f"All three techniques together improve test accuracy and loss for at least {enough} of {seeds} seeds",
        Outcome.REPLICATED if min(won.values()) >= enough else Outcome.OPPOSITE,
        "; ".join(
            f"{metric.label}: {won[metric.label]} of {seeds} seeds, {metric.gain(before, after, rows)}"
            for metric in (ACCURACY, LOSS)
        ),
    )
