"""All four together, across batch sizes (Figure 5a, section 4.2); on the test set.

The paper claims: against Group Norm and an idealised batch norm, which keeps at every batch size what it has at B =
128, all four together are better at every batch size; on Caltech-256 by 6.5 points over batch norm and 5.9 over Group
Norm at B = 2. From B = 4 on it is ghosts, alpha and decay on gamma and beta; at B = 2 batch group norm with decay; at
B = 1 decay alone. Ghosts alone help while B > 2. Expect the gain over Group Norm to be largest at large batches.

At medium scale there are two settings. One batch per step: the learning rate of each norm is in proportion to the power
of B that meets what validation data chose at B = 128 and at B = 2, and small batches are trained for fewer epochs, of
more steps. Steps of 128 examples, whose statistics are of B of them, as when memory holds B and gradients are
accumulated: everything else is the same at every B. From B = 8 on these are the networks of B = 128.
"""

from __future__ import annotations

import math
from dataclasses import replace

from betternorm_lab.experiments import claims, decay, findings, ghost_size, protocol, small_batch
from betternorm_lab.experiments.alpha_groupnorm import with_group_norm
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import TASKS, at_batch_size, groups, with_norm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config
from betternorm_lab.trials import Trial

TITLE = "All four together, across batch sizes"
PLACE = "Figure 5a, section 4.2"

BATCHES = {
    "smoke": (2, 32),
    "small": (32, 8, 2, 1),
    "medium": (128, 16, 4, 2, 1),
    "paper": (1, 2, 4, 8, 16, 32, 64, 128),
}
GHOSTS = {"smoke": 4, "small": 8, "medium": 8, "paper": 16}  # at medium scale the best on validation data
TOGETHER = (128, 4, 2, 1)  # at medium scale, in steps of 128
EPOCHS = {16: 20, 4: 12, 2: small_batch.EPOCHS, 1: 5}  # at medium scale; 40 at B = 128
BATCH, GROUP, GHOST, OURS = "batch norm", "group norm", "ghosts alone, by their size", "all four"


def arms(scale: str) -> dict[Label, Trial]:
    found: dict[Label, Trial] = {}
    for task, config in TASKS[scale].items():
        if task == "SVHN":  # not in the paper's figure: its networks do not overfit
            continue
        for size in BATCHES[scale]:
            here = methods(at_batch_size(config, size), scale)
            if scale == "medium":
                here = {method: _settled(one, config) for method, one in here.items()}
            found |= {(task, method, size): trial for method, trial in here.items()}
        ghosts = ghost_size.arms(scale)
        found |= {(task, GHOST, label[1]): trial for label, trial in ghosts.items() if label[0] == task}
        if scale == "medium":
            found |= {(_together(task), *label): trial for label, trial in _in_whole_steps(task, config).items()}
    return found


def _together(task: str) -> str:
    return f"{task}{small_batch.TOGETHER}"


def _in_whole_steps(task: str, config: Config) -> dict[Label, Config]:
    """Steps of a whole batch, normalised in parts: what small_batch has of them at two and one, and ghosts."""
    pairs = {label[1]: trial for label, trial in small_batch.arms("medium").items() if label[0] == _together(task)}
    group = pairs[small_batch.GROUP]
    found: dict[int, dict[str, Config]] = {
        size: {
            BATCH: config if size == config.batch_size else with_norm(config, "ghost", ghost_size=size),
            GROUP: group,
            OURS: all_four(config, "medium", size),
        }
        for size in TOGETHER
        if size > small_batch.BATCH
    }
    found[2] = {BATCH: pairs[small_batch.PLAIN], GROUP: group, OURS: pairs[small_batch.BOTH + small_batch.DECAYED]}
    found[1] = {GROUP: group, OURS: pairs[small_batch.GROUP + small_batch.DECAYED]}
    return {(method, size): found[size][method] for size in TOGETHER for method in found[size]}


def methods(config: Config, scale: str) -> dict[str, Config]:
    """Batch norm where there is a batch, Group Norm, and what the paper advises for this batch size."""
    baselines = {BATCH: config} if config.batch_size > 1 else {}
    return baselines | {
        GROUP: with_norm(config, "group", num_groups=groups(config, scale)),
        OURS: all_four(config, scale),
    }


def all_four(config: Config, scale: str, size: int | None = None) -> Config:
    """What the paper advises where ``size`` examples are seen at once; alpha is tuned after training."""
    size = size or config.batch_size
    decayed = replace(config, norm_decay=decay.DECAY[scale])
    if size == 1:
        return with_norm(decayed, "group", num_groups=groups(config, scale))
    if size == 2:
        return with_norm(decayed, "batch_group", num_groups=groups(config, scale))
    return with_norm(decayed, "ghost", ghost_size=min(GHOSTS[scale], size))


def _settled(config: Config, whole: Config) -> Config:
    """At medium scale: the learning rate and the groups that the protocol chose, and what follows from them in between.

    ``whole`` is the training at the largest batch size.
    """
    size = config.batch_size
    if config.norm == "group":
        whole = with_group_norm(whole, protocol.SCALE)
    if size == whole.batch_size:
        return whole if config.norm == "group" else config
    rate, groups = protocol.TWO_EXAMPLES[small_batch.METHODS.get(config.norm, small_batch.PLAIN)]
    power = math.log(whole.learning_rate / rate, whole.batch_size / small_batch.BATCH)
    rate = float(f"{whole.learning_rate * (size / whole.batch_size) ** power:.3g}")
    settled = replace(config, learning_rate=rate, epochs=EPOCHS[size])
    return with_norm(settled, config.norm, num_groups=groups) if groups else settled


def conclude(runs: FinishedRuns) -> Findings:
    shared = across_batch_sizes(runs, "All four, across batch sizes")
    tasks = [task for task in runs.names() if not task.endswith(small_batch.TOGETHER)]
    verdicts = [verdict for task in tasks for verdict in _at_the_largest(runs, task)]
    return replace(shared, verdicts=[*shared.verdicts, *verdicts])


def _at_the_largest(runs: FinishedRuns, task: str) -> list[Verdict]:
    """What the other techniques add to ghosts, and how the two baselines compare."""
    whole = max(size for one, method, size in runs if (one, method) == (task, BATCH))
    ghosts = GHOSTS[runs.scale]

    def read(method: str, size: int) -> list[float]:
        return runs.numbers((task, method, size), _read(method))

    return [
        claims.compare(f"{task}, B = {whole}: {claim}", first, second, margin=runs.margin("top1"))
        for claim, first, second in (
            (f"all four improve on ghosts of {ghosts} alone", read(OURS, whole), read(GHOST, ghosts)),
            ("batch norm is better than Group Norm", read(BATCH, whole), read(GROUP, whole)),
        )
    ]


def across_batch_sizes(runs: FinishedRuns, title: str, group: str = GROUP) -> Findings:
    """Table, figure and verdicts for arms labelled by data, method and batch size; shared with fine-tuning.

    ``group`` is the Group Norm that is compared with, where there is such an arm.
    """
    rows, figures, verdicts = [], [], []
    notes = (
        "Curves of Group Norm, batch norm and ghosts alone are as trained; of all four, at the best alpha for top-1."
    )
    if runs.scale == "medium":
        notes += (
            " With one batch per step smaller batches are trained for fewer epochs than batch norm at B = 128, and not "
            "judged against it."
        )
    for task in runs.names():
        labels = [label for label in runs if label[0] == task]
        whole = max(size for _, method, size in labels if method == BATCH)
        ideal = runs.numbers((task, BATCH, whole), "test_top1")
        rows += [
            [*label, *(findings.cell(runs.numbers(label, f"test_top1{tail}")) for tail in ("", "_own"))]
            for label in labels
        ]
        sizes = {
            method: sorted(size for _, one, size in labels if one == method) for method in runs.names(1, first=task)
        }
        series = [
            findings.curve(method, {size: runs.numbers((task, method, size), _read(method)) for size in of_method})
            for method, of_method in sizes.items()
        ]
        notes += _better_elsewhere(runs, task, sizes[BATCH], whole)
        levels = {f"idealised batch norm ({whole})": findings.mean(ideal)} if ideal else {}
        figures.append(
            Figure(f"{task}: {title.lower()}", "batch size", "test top-1, %", series, log_x=True, levels=levels)
        )
        verdicts += _verdicts(runs, task, whole, sizes[OURS], group if group in sizes else GROUP)
    headers = ["data", "method", "batch size", "test top-1, %", "at its best alpha"]
    return Findings([Table("Test top-1 by batch size", headers, rows)], figures, verdicts, notes)


def _verdicts(runs: FinishedRuns, task: str, whole: int, sizes: list[int], baseline: str) -> list[Verdict]:
    """All four against both baselines at every batch size, and how the best alpha depends on it."""
    together = task.endswith(small_batch.TOGETHER)  # its networks at the largest batch are those of one batch per step
    ideal, margin = runs.numbers((task, BATCH, whole), "test_top1"), runs.margin("top1")
    found = []
    for size in sizes:
        if together and size == whole:
            continue
        ours = runs.numbers((task, OURS, size), _read(OURS))
        theirs = runs.numbers((task, baseline, size), _read(baseline))
        claim = f"{task}, B = {size}: all four improve on"
        found.append(claims.compare(f"{claim} Group Norm", ours, theirs, margin=margin))
        if together or runs.scale != "medium" or size not in EPOCHS:
            found.append(claims.compare(f"{claim} idealised batch norm", ours, ideal, margin=margin))
    if not together:
        small = min(size for one, method, size in runs if (one, method) == (task, BATCH))
        found.append(
            claims.compare(
                f"{task}: the best alpha for batch norm is larger at B = {small} than at B = {whole} (for top-1)",
                runs.numbers((task, BATCH, small), "alpha_top1"),
                runs.numbers((task, BATCH, whole), "alpha_top1"),
            )
        )
    return found


def _better_elsewhere(runs: FinishedRuns, task: str, sizes: list[int], whole: int) -> str:
    """Idealised batch norm keeps what it has at the largest batch, as in the paper; it may be better at another."""
    means = {
        size: findings.mean(values) for size in sizes if (values := runs.numbers((task, BATCH, size), "test_top1"))
    }
    best = max(means, key=lambda size: means[size], default=whole)
    if whole not in means or best == whole:
        return ""
    return (
        f" {task}: batch norm is better at B = {best} ({means[best]:.2f} %) than at B = {whole} ({means[whole]:.2f} %)."
    )


def _read(method: str) -> str:
    return "test_top1_own" if method == OURS else "test_top1"
