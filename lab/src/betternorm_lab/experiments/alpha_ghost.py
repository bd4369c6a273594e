"""Alpha and ghost size together (Figure 4, and the appendix for all of alpha).

The paper claims: the smaller the ghosts, the more is gained by weighing the example at inference, and the larger the
best alpha; the gain comes on top of that of the ghosts; the best alpha for accuracy and for cross-entropy may differ
wildly. Expect little gain for batch norm and several points for ghost sizes 2 to 4. The networks are those of
``ghost-size``.
"""

from __future__ import annotations

from betternorm_lab.experiments import claims, findings, ghost_size
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.results import Table, Verdict

TITLE = "Alpha and ghost size together"
PLACE = "Figure 4, section 3.2; appendix D"

arms = ghost_size.arms
HEADERS = ["data", "ghost size", "metric", "as trained", "at its best alpha", "gain", "best alpha for it"]
METRICS = {
    "test_top1": "test top-1, %",
    "test_cross_entropy": "test cross-entropy",
    "test_calibrated_cross_entropy": "test cross-entropy, after temperature",
}


def conclude(runs: FinishedRuns) -> Findings:
    rows, figures, verdicts = [], [], []
    for task in runs.names():
        sizes = runs.names(1, first=task)
        for size in sizes:
            for metric, words in METRICS.items():
                label, own = (task, size), f"{metric}_own"
                before, after = runs.numbers(label, metric), runs.numbers(label, own)
                gains, alphas = runs.pairs(label, own, metric), runs.numbers(label, metric.replace("test", "alpha"))
                rows.append([task, size, words, *map(findings.cell, (before, after, gains, alphas))])
        curves = {f"ghost size {size}": runs[task, size] for size in sizes}
        figures += findings.alpha_figures(f"{task}, alpha by ghost size", curves)
        verdicts += _verdicts(runs, task, sizes)
    notes = (
        "Each metric is read at the alpha that is best for it on validation data; the table is of the test data, which "
        "nothing chose. A temperature is fitted on validation data at every alpha."
    )
    return Findings([Table("What alpha adds", HEADERS, rows)], figures, verdicts, notes)


def _verdicts(runs: FinishedRuns, task: str, sizes: list[int]) -> list[Verdict]:
    whole, smallest = (task, sizes[0]), (task, sizes[-1])
    found = []
    for label, named in ((whole, "batch norm"), (smallest, f"ghost size {sizes[-1]}")):
        found += [
            claims.gain(f"{task}: alpha raises test top-1 with {named}", runs, label, "test_top1"),
            claims.gain(
                f"{task}: alpha lowers test cross-entropy with {named}", runs, label, "test_cross_entropy", claims.LESS
            ),
            claims.gain(
                f"{task}: alpha lowers it also after a temperature with {named}",
                runs,
                label,
                "test_calibrated_cross_entropy",
                claims.LESS,
            ),
        ]
    ghosts = {size: runs.numbers((task, size), "validation_top1") for size in sizes[1:]}
    best = findings.best(ghosts) or sizes[-1]
    claim = f"{task}: alpha adds to ghost size {best}, the best on validation data (test top-1)"
    found.append(claims.gain(claim, runs, (task, best), "test_top1"))
    found.append(claims.gain(f"{task}: alpha raises test top-5 with batch norm", runs, whole, "test_top5"))
    than = f"with ghost size {sizes[-1]} than with batch norm"
    for metric, words, claimed in (
        ("test_top1", "gains more test top-1", claims.MORE),
        ("test_cross_entropy", "lowers test cross-entropy more", claims.LESS),
        ("test_calibrated_cross_entropy", "lowers test cross-entropy after a temperature more", claims.LESS),
    ):
        ours, theirs = (runs.pairs(label, f"{metric}_own", metric) for label in (smallest, whole))
        claim = f"{task}: alpha {words} {than}"
        found.append(claims.compare(claim, ours, theirs, claimed, margin=runs.margin(metric)))
    for metric, words in (("top1", "top-1"), ("cross_entropy", "cross-entropy")):
        ours, theirs = (runs.numbers(label, f"alpha_{metric}") for label in (smallest, whole))
        found.append(claims.compare(f"{task}: the best alpha for {words} is larger {than}", ours, theirs))
    for label, named in ((whole, "batch norm"), (smallest, f"ghost size {sizes[-1]}")):
        top1, loss = runs.by_seed((label, "alpha_top1"), (label, "alpha_cross_entropy"))
        intuitive = [1 / label[1]] * len(loss)
        found += [
            claims.differ(
                f"{task}: the best alpha for cross-entropy is not 1/B with {named}", loss, intuitive, paired=True
            ),
            claims.differ(
                f"{task}: the best alphas for top-1 and for cross-entropy differ with {named}", top1, loss, paired=True
            ),
        ]
    return found
