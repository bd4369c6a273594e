"""The methods of the paper's related work side by side (section 2), at several batch sizes.

The paper makes no table of these. From what it says of each: batch norm needs a batch; Group, Layer and Instance Norm
do not, and Group Norm is the best of them; batch renorm helps at small batches; group sizes learned with Switchable
Norm made models overfit (appendix C), for which plain Switchable Norm stands in here;
EvalNorm's alphas, one per layer, resemble inference example weighing. Expect batch norm to lead at the largest batch
and Group Norm at 2, and one alpha per layer to do about as well as one for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from betternorm.weighing.alpha import weighed_layers
from betternorm_lab.data import Data, Loader
from betternorm_lab.experiments import claims, findings, trained_networks
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import TASKS, at_batch_size, groups, with_norm, with_renorm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import evaluate, tune_for_row
from betternorm_lab.trials import Progress, Trial

TITLE = "Batch, group, layer, instance, renorm, switchable"
PLACE = "Section 2"

BATCHES = {"smoke": (32,), "small": (32, 8, 2), "paper": (128, 16, 4, 2)}
BATCH, ONE, EACH = "batch norm", "batch norm, one alpha", "batch norm, one alpha per layer (as EvalNorm)"
GROUP, SWITCHABLE = "group norm", "switchable norm"


@dataclass(frozen=True, kw_only=True)
class AlphaALayer(trained_networks.OnTrainedNetwork):
    """A trained network with one alpha per layer, fitted by gradient on validation data; nothing is trained."""

    kind: ClassVar[str] = "alpha-a-layer"

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        validation = Loader(data, data.validation, 250)
        found = tune_for_row(network, validation, grid=self.alpha_grid or None, per_layer=True, progress=False)
        per_layer = found.per_layer
        assert per_layer is not None  # it was asked for
        for name, layer in weighed_layers(network).items():
            layer.alpha = per_layer.alphas[name]
        (row,) = evaluate(network, trained_networks.held_out(data))
        result = {f"test_{name}": value for name, value in row.items()}
        return result | {"alphas": per_layer.alphas, "kept": per_layer.kept}


def arms(scale: str) -> dict[Label, Trial]:
    task, config = next(iter(TASKS[scale].items()))
    found: dict[Label, Trial] = {}
    for size in BATCHES[scale]:
        here = at_batch_size(config, size)
        methods = {
            BATCH: here,
            EACH: AlphaALayer.of(here),
            GROUP: with_norm(here, "group", num_groups=groups(here, scale)),
            "layer norm": with_norm(here, "layer"),
            "instance norm": with_norm(here, "instance"),
            "batch renorm": with_renorm(here),
            # No alpha: its layers mix statistics by weights of their own.
            SWITCHABLE: replace(with_norm(here, "betternorm.lab.norms:switchable"), tune_alpha=False),
        }
        found |= {(task, method, size): trial for method, trial in methods.items()}
    return found


def conclude(runs: FinishedRuns) -> Findings:
    (task,) = runs.names()
    sizes, methods = runs.names(2), runs.names(1)
    read = {(method, size): runs.numbers((task, method, size), "test_top1") for method in methods for size in sizes}
    read |= {(ONE, size): runs.numbers((task, BATCH, size), "test_top1_own") for size in sizes}
    methods.insert(1, ONE)
    rows = [[method, *(findings.cell(read[method, size]) for size in sizes)] for method in methods]
    training = [
        [method, *(findings.cell(runs.numbers((task, method, size), "train_top1")) for size in sizes)]
        for method in methods
        if method not in (ONE, EACH)
    ]
    series = [findings.curve(method, {size: read[method, size] for size in sorted(sizes)}) for method in methods]
    large, small = sizes[0], sizes[-1]
    margin = runs.margin("top1")
    verdicts = [
        claims.compare(f"B = {large}: batch norm is better than Group Norm", read[BATCH, large], read[GROUP, large]),
        claims.compare(f"B = {small}: Group Norm is better than batch norm", read[GROUP, small], read[BATCH, small]),
        *(
            claims.compare(f"B = {small}: Group Norm is better than {other}", read[GROUP, small], read[other, small])
            for other in ("layer norm", "instance norm")
        ),
        claims.compare(
            f"B = {small}: batch renorm is better than batch norm", read["batch renorm", small], read[BATCH, small]
        ),
        claims.compare(
            f"B = {large}: switchable norm fits the training set more closely than Group Norm",
            runs.numbers((task, SWITCHABLE, large), "evaluated_train_top1"),
            runs.numbers((task, GROUP, large), "evaluated_train_top1"),
        ),
        claims.compare(
            f"B = {large}: switchable norm, in place of learned group sizes, is worse than Group Norm on test data",
            read[SWITCHABLE, large],
            read[GROUP, large],
            claims.LESS,
            margin=margin,
        ),
        *(_alpha_per_layer(runs, task, size) for size in sizes),
    ]
    headers = ["method", *(f"B = {size}" for size in sizes)]
    tables = [Table("Test top-1, %", headers, rows), Table("Training top-1, %", headers, training)]
    figure = Figure("Norms by batch size", "batch size", "test top-1, %", series, log_x=True)
    return Findings(tables, [figure], verdicts, "All as trained, but where alpha is named.")


def _alpha_per_layer(runs: FinishedRuns, task: str, size: int) -> Verdict:
    each, one = runs.by_seed(((task, EACH, size), "test_top1"), ((task, BATCH, size), "test_top1_own"))
    claim = f"B = {size}: one alpha per layer does as well as one for all, within 1 point"
    return claims.compare(claim, each, one, claims.within(1.0), paired=True)
