"""Alpha and ghost size together (Figure 4, and the appendix for all of alpha).

The paper claims: the smaller the ghosts, the more is gained by weighing the example at inference, and the larger the
best alpha; the gain comes on top of that of the ghosts; the best alpha for accuracy and for cross-entropy may differ
wildly. Expect little gain for batch norm and several points for ghost sizes 2 to 4. The networks are those of
``ghost-size``.
"""

from __future__ import annotations

from betternorm.lab.experiments import claims, findings, ghost_size
from betternorm.lab.experiments.findings import Findings, FinishedRuns
from betternorm.lab.results import Table, Verdict

TITLE = "Alpha and ghost size together"
PLACE = "Figure 4, section 3.2; appendix D"

arms = ghost_size.arms
HEADERS = ["data", "ghost size", "metric", "as trained", "alpha tuned", "gain", "best alpha for it"]
METRICS = {"test_top1": "test top-1, %", "test_cross_entropy": "test cross-entropy"}


def conclude(runs: FinishedRuns) -> Findings:
    rows, figures, verdicts = [], [], []
    for task in runs.names():
        sizes = runs.names(1, first=task)
        for size in sizes:
            for metric, words in METRICS.items():
                label, tuned = (task, size), f"{metric}_tuned"
                before, after = runs.numbers(label, metric), runs.numbers(label, tuned)
                gains, alphas = runs.pairs(label, tuned, metric), runs.numbers(label, metric.replace("test", "alpha"))
                rows.append([task, size, words, *map(findings.cell, (before, after, gains, alphas))])
        curves = {f"ghost size {size}": runs[task, size] for size in sizes}
        figures += findings.alpha_figures(f"{task}, alpha by ghost size", curves)
        verdicts += _verdicts(runs, task, sizes)
    notes = "Alpha is tuned for cross-entropy on validation data; the table reads the test data, which nothing chose."
    return Findings([Table("What alpha adds", HEADERS, rows)], figures, verdicts, notes)


def _verdicts(runs: FinishedRuns, task: str, sizes: list[int]) -> list[Verdict]:
    whole, smallest = (task, sizes[0]), (task, sizes[-1])
    top1, top1_whole = (runs.pairs(label, "test_top1_tuned", "test_top1") for label in (smallest, whole))
    loss, loss_whole = (
        runs.pairs(label, "test_cross_entropy_tuned", "test_cross_entropy") for label in (smallest, whole)
    )
    alphas, alphas_whole = (runs.numbers(label, "alpha_cross_entropy") for label in (smallest, whole))
    named = f"with ghost size {sizes[-1]} than with batch norm"
    return [
        claims.gain(f"{task}: alpha raises test top-1 with ghost size {sizes[-1]}", runs, smallest, "test_top1"),
        claims.compare(f"{task}: alpha gains more test top-1 {named}", top1, top1_whole),
        claims.compare(f"{task}: alpha lowers test cross-entropy more {named}", loss, loss_whole, claims.LESS),
        claims.compare(f"{task}: the best alpha for cross-entropy is larger {named}", alphas, alphas_whole),
    ]
