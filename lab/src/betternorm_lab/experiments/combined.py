"""All four techniques combined, across batch sizes (Figure 5a, section 4.2), on test data.

The paper claims: all four together are better at every batch size than Group Norm and than an idealized batch norm,
which has the accuracy of B = 128 at every batch size; on Caltech-256 by 6.5 points over batch norm and 5.9 over Group
Norm at B = 2. From B = 4 on, they are ghosts, alpha and decay on gamma and beta; at B = 2 batch group norm with decay;
at B = 1 decay alone. Ghosts alone help while B > 2. Expect the gain over Group Norm to be largest at large batches.

At medium scale there are two settings. One batch per step: the learning rate of each norm is proportional to the power
of B that interpolates the rates chosen on validation data at B = 128 and B = 2; small batches are trained for fewer
epochs, of more steps. 128 examples per step with statistics over B of them, as with gradient accumulation: everything
else is the same at every B. From B = 8 on these are the models of B = 128.
"""

from __future__ import annotations

import math
from dataclasses import replace

from betternorm_lab.experiments import claims, decay, findings, ghost_size, protocol, small_batch
from betternorm_lab.experiments.alpha_groupnorm import with_group_norm
from betternorm_lab.experiments.arms import WHOLE_STEPS, Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import TASKS, at_batch_size, groups, with_norm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import Config
from betternorm_lab.trials import Trial

TITLE = "All four techniques, across batch sizes"
PLACE = "Figure 5a, section 4.2"

BATCHES = {
    "smoke": (2, 32),
    "small": (32, 8, 2, 1),
    "medium": (128, 16, 4, 2, 1),
    "paper": (1, 2, 4, 8, 16, 32, 64, 128),
}
GHOSTS = {"smoke": 4, "small": 8, "medium": 8, "paper": 16}  # at medium scale the best on validation data
TOGETHER = (128, 4, 2, 1)  # at medium scale, with 128 examples per step
EPOCHS = {16: 20, 4: 12, 2: small_batch.EPOCHS, 1: 5}  # at medium scale; 40 at B = 128
BATCH, GROUP, GHOST, OURS = "batch norm", "group norm", "ghost batch norm alone, by ghost size", "all four"


def arms(scale: str) -> dict[Arm, Trial]:
    result: dict[Arm, Trial] = {}
    for dataset, config in TASKS[scale].items():
        if dataset == "svhn":  # not in the paper's figure: models do not overfit it
            continue
        task = Arm(dataset)
        for size in BATCHES[scale]:
            trials = methods(at_batch_size(config, size), scale)
            if scale == protocol.SCALE:
                trials = {method: _settled(one, config) for method, one in trials.items()}
            result |= {task.with_method(method, size): trial for method, trial in trials.items()}
        ghosts = ghost_size.arms(scale)
        result |= {task.with_method(GHOST, arm.size): trial for arm, trial in ghosts.items() if arm.task == task}
        if scale == protocol.SCALE:
            result |= _in_whole_steps(Arm(dataset, WHOLE_STEPS), config)
    return result


def _in_whole_steps(task: Arm, config: Config) -> dict[Arm, Config]:
    """128 examples per step, normalized in parts: the arms of small_batch at two and one, and ghosts."""
    pairs = {arm.method: trial for arm, trial in small_batch.arms(protocol.SCALE).items() if arm.task == task}
    group = pairs[small_batch.GROUP]
    trials: dict[int, dict[str, Config]] = {
        size: {
            BATCH: config if size == config.batch_size else with_norm(config, "ghost", ghost_size=size),
            GROUP: group,
            OURS: all_four(config, protocol.SCALE, size),
        }
        for size in TOGETHER
        if size > small_batch.BATCH
    }
    trials[2] = {
        BATCH: pairs[small_batch.PLAIN],
        GROUP: group,
        OURS: pairs[small_batch.WITH_DECAY[small_batch.BOTH]],
    }
    trials[1] = {GROUP: group, OURS: pairs[small_batch.WITH_DECAY[small_batch.GROUP]]}
    return {task.with_method(method, size): trials[size][method] for size in TOGETHER for method in trials[size]}


def methods(config: Config, scale: str) -> dict[str, Config]:
    """Batch norm (above one example per batch), Group Norm, and the paper's recommendation for this batch size."""
    baselines = {BATCH: config} if config.batch_size > 1 else {}
    return baselines | {
        GROUP: with_norm(config, "group", num_groups=groups(config, scale)),
        OURS: all_four(config, scale),
    }


def all_four(config: Config, scale: str, size: int | None = None) -> Config:
    """The paper's recommendation for statistics over ``size`` examples; alpha is tuned after training."""
    size = size or config.batch_size
    decayed = replace(config, norm_decay=decay.DECAY[scale])
    if size == 1:
        return with_norm(decayed, "group", num_groups=groups(config, scale))
    if size == 2:
        return with_norm(decayed, "batch_group", num_groups=groups(config, scale))
    return with_norm(decayed, "ghost", ghost_size=min(GHOSTS[scale], size))


def _settled(config: Config, whole: Config) -> Config:
    """At medium scale: the learning rate and the groups of the protocol, interpolated between batch sizes.

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
    tasks = [task for task in runs.tasks() if task.setting != WHOLE_STEPS]
    verdicts = [verdict for task in tasks for verdict in _at_the_largest(runs, task)]
    return replace(shared, verdicts=[*shared.verdicts, *verdicts])


def _at_the_largest(runs: FinishedRuns, task: Arm) -> list[Verdict]:
    """What the other techniques add to ghost batch norm, and how the two baselines compare."""
    whole = max(runs.sizes(task, BATCH))
    ghosts = GHOSTS[runs.scale]

    def read(method: str, size: int) -> list[float]:
        return runs.numbers(task.with_method(method, size), _read(method))

    return [
        claims.compare(
            f"{task.title}, B = {whole}: {claim}",
            first,
            second,
            id=task.id(f"{whole}/{key}"),
            margin=runs.margin("top1"),
        )
        for claim, key, first, second in (
            (f"all four improve on ghosts of {ghosts} alone", "over-ghosts", read(OURS, whole), read(GHOST, ghosts)),
            ("batch norm is better than Group Norm", "baselines", read(BATCH, whole), read(GROUP, whole)),
        )
    ]


def across_batch_sizes(runs: FinishedRuns, title: str, group: str = GROUP) -> Findings:
    """Table, figure and verdicts for arms with a method and a batch size; shared with fine-tuning.

    ``group`` is the Group Norm arm to compare with, where it exists.
    """
    rows, figures, verdicts = [], [], []
    notes = (
        "Group Norm, batch norm and ghost batch norm alone are evaluated with alpha as trained; all four at the best "
        "alpha for top-1."
    )
    if runs.scale == protocol.SCALE:
        notes += (
            " With one batch per step, smaller batches are trained for fewer epochs than B = 128, and are not compared "
            "with batch norm at B = 128."
        )
    for task in runs.tasks():
        arms = runs.arms(task)
        whole = max(runs.sizes(task, BATCH))
        ideal = runs.numbers(task.with_method(BATCH, whole), "test_top1")
        rows += [
            [
                task.title,
                arm.method,
                arm.size,
                *(findings.cell(runs.numbers(arm, f"test_top1{tail}")) for tail in ("", "_own")),
            ]
            for arm in arms
        ]
        sizes = {method: sorted(runs.sizes(task, method)) for method in runs.methods(task)}
        series = [
            findings.curve(
                method, {size: runs.numbers(task.with_method(method, size), _read(method)) for size in of_method}
            )
            for method, of_method in sizes.items()
        ]
        notes += _better_elsewhere(runs, task, sizes[BATCH], whole)
        levels = {f"idealized batch norm ({whole})": findings.mean(ideal)} if ideal else {}
        figures.append(
            Figure(f"{task.title}: {title.lower()}", "batch size", "test top-1, %", series, log_x=True, levels=levels)
        )
        verdicts += _verdicts(runs, task, whole, sizes[OURS], group if group in sizes else GROUP)
    headers = ["data", "method", "batch size", "test top-1, %", "at its best alpha"]
    return Findings([Table("Test top-1 by batch size", headers, rows)], figures, verdicts, notes)


def _verdicts(runs: FinishedRuns, task: Arm, whole: int, sizes: list[int], baseline: str) -> list[Verdict]:
    """All four against both baselines at every batch size, and how the best alpha depends on it."""
    together = task.setting == WHOLE_STEPS  # its models at the largest batch are those of one batch per step
    shorter = runs.scale == protocol.SCALE and not together  # smaller batches are trained for fewer epochs
    ideal, margin = runs.numbers(task.with_method(BATCH, whole), "test_top1"), runs.margin("top1")
    result = []
    for size in sizes:
        if together and size == whole:
            continue
        ours = runs.numbers(task.with_method(OURS, size), _read(OURS))
        theirs = runs.numbers(task.with_method(baseline, size), _read(baseline))
        claim, id = f"{task.title}, B = {size}: all four improve on", task.id(f"{size}/over")
        here = [claims.compare(f"{claim} Group Norm", ours, theirs, id=f"{id}-group", margin=margin)]
        if not (shorter and size in EPOCHS):
            here.append(claims.compare(f"{claim} idealized batch norm", ours, ideal, id=f"{id}-batch", margin=margin))
        elif (batch := task.with_method(BATCH, size)) in runs and size > small_batch.BATCH:
            same = runs.numbers(batch, "test_top1")
            words = f"{claim} batch norm at the same batch size"
            here.append(claims.compare(words, ours, same, id=f"{id}-same-batch", margin=margin))
        undertrained = shorter and size <= small_batch.BATCH
        result += claims.not_tested(here, protocol.UNDERTRAINED) if undertrained else here
    if not together:
        small = min(runs.sizes(task, BATCH))
        largest, smallest = (runs.numbers(task.with_method(BATCH, size), "alpha_top1") for size in (whole, small))
        claim = f"{task.title}: the best alpha for batch norm is larger at B = {small} than at B = {whole} (for top-1)"
        larger = [claims.compare(claim, smallest, largest, id=task.id("alpha-by-batch"))]
        result += claims.not_tested(larger, protocol.UNDERTRAINED) if shorter else larger
    return result


def _better_elsewhere(runs: FinishedRuns, task: Arm, sizes: list[int], whole: int) -> str:
    """Idealized batch norm is that of the largest batch, as in the paper; another batch size may be better."""
    values = {size: runs.numbers(task.with_method(BATCH, size), "test_top1") for size in sizes}
    means = {size: findings.mean(numbers) for size, numbers in values.items() if numbers}
    best = max(means, key=lambda size: means[size], default=whole)
    if whole not in means or best == whole:
        return ""
    return (
        f" {task.title}: batch norm is better at B = {best} ({means[best]:.2f} %) than at B = {whole} "
        f"({means[whole]:.2f} %)."
    )


def _read(method: str) -> str:
    return "test_top1_own" if method == OURS else "test_top1"
