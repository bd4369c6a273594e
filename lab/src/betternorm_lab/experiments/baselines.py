"""The methods of the paper's related work at several batch sizes (section 2).

The paper has no table of these. What it says of each: batch norm needs a batch; Group, Layer and Instance Norm do not,
and Group Norm is the best of them; batch renorm helps at small batches; group sizes learned with Switchable Norm made
models overfit (appendix C; tested here with plain Switchable Norm); EvalNorm's alphas, one per layer, resemble
inference example weighing. Expect batch norm to be best at the largest batch and Group Norm at 2, and one alpha per
layer to do about as well as a single one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from betternorm.weighing.alpha import weighed_layers
from betternorm_lab.data import Data, Loader
from betternorm_lab.experiments import claims, findings, trained_networks
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import TASKS, at_batch_size, groups, with_norm, with_renorm
from betternorm_lab.results import Figure, Table, Verdict
from betternorm_lab.training import evaluate, tune_for_row
from betternorm_lab.trials import Progress, Trial

TITLE = "Comparison of normalization methods"
PLACE = "Section 2"

BATCHES = {"smoke": (32,), "small": (32, 8, 2), "paper": (128, 16, 4, 2)}
BATCH, ONE, EACH = "batch norm", "batch norm, one alpha", "batch norm, one alpha per layer (as EvalNorm)"
GROUP, SWITCHABLE = "group norm", "switchable norm"


@dataclass(frozen=True, kw_only=True)
class AlphaALayer(trained_networks.OnTrainedNetwork):
    """A trained model with one alpha per layer, fitted by gradient on validation data."""

    kind: ClassVar[str] = "alpha-a-layer"

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        validation = Loader(data, data.validation, 250)
        found = tune_for_row(network, validation, grid=self.alpha_grid or None, per_layer=True, progress=False)
        per_layer = found.per_layer
        assert per_layer is not None
        for name, layer in weighed_layers(network).items():
            layer.alpha = per_layer.alphas[name]
        (row,) = evaluate(network, trained_networks.held_out(data))
        result = {f"test_{name}": value for name, value in row.items()}
        return result | {"alphas": per_layer.alphas, "kept": per_layer.kept}


def arms(scale: str) -> dict[Arm, Trial]:
    dataset, config = next(iter(TASKS[scale].items()))
    result: dict[Arm, Trial] = {}
    for size in BATCHES[scale]:
        here = at_batch_size(config, size)
        methods = {
            BATCH: here,
            EACH: AlphaALayer.of(here),
            GROUP: with_norm(here, "group", num_groups=groups(here, scale)),
            "layer norm": with_norm(here, "layer"),
            "instance norm": with_norm(here, "instance"),
            "batch renorm": with_renorm(here),
            # No alpha: its layers learn how to mix statistics.
            SWITCHABLE: replace(with_norm(here, "betternorm.lab.norms:switchable"), tune_alpha=False),
        }
        result |= {Arm(dataset, method=method, size=size): trial for method, trial in methods.items()}
    return result


def conclude(runs: FinishedRuns) -> Findings:
    (task,) = runs.tasks()
    sizes, methods = runs.sizes(), runs.methods()

    def numbers(name: str) -> dict[tuple[str, int], list[float]]:
        return {
            (method, size): runs.numbers(task.with_method(method, size), name) for method in methods for size in sizes
        }

    top1, training, evaluated = map(numbers, ("test_top1", "train_top1", "evaluated_train_top1"))
    own = numbers("test_top1_own")
    top1 |= {(ONE, size): own[BATCH, size] for size in sizes}
    ordered = [methods[0], ONE, *methods[1:]]
    rows = [[method, *(findings.cell(top1[method, size]) for size in sizes)] for method in ordered]
    trained = [
        [method, *(findings.cell(training[method, size]) for size in sizes)] for method in methods if method != EACH
    ]
    series = [findings.curve(method, {size: top1[method, size] for size in sorted(sizes)}) for method in ordered]
    large, small = sizes[0], sizes[-1]
    best, worst = f"B = {large}", f"B = {small}"
    margin = runs.margin("top1")
    verdicts = [
        claims.compare(
            f"{best}: batch norm is better than Group Norm", top1[BATCH, large], top1[GROUP, large], id="large/batch"
        ),
        claims.compare(
            f"{worst}: Group Norm is better than batch norm", top1[GROUP, small], top1[BATCH, small], id="small/batch"
        ),
        *(
            claims.compare(
                f"{worst}: Group Norm is better than {other}",
                top1[GROUP, small],
                top1[other, small],
                id=f"small/{other}",
            )
            for other in ("layer norm", "instance norm")
        ),
        claims.compare(
            f"{worst}: batch renorm is better than batch norm",
            top1["batch renorm", small],
            top1[BATCH, small],
            id="small/renorm",
        ),
        claims.compare(
            f"{best}: Switchable Norm fits the training set more closely than Group Norm",
            evaluated[SWITCHABLE, large],
            evaluated[GROUP, large],
            id="large/switchable-training",
        ),
        claims.compare(
            f"{best}: Switchable Norm, in place of learned group sizes, is worse than Group Norm on test data",
            top1[SWITCHABLE, large],
            top1[GROUP, large],
            claims.LESS,
            id="large/switchable",
            margin=margin,
        ),
        *(_alpha_per_layer(runs, task, size) for size in sizes),
    ]
    headers = ["method", *(f"B = {size}" for size in sizes)]
    tables = [Table("Test top-1, %", headers, rows), Table("Training top-1, %", headers, trained)]
    figure = Figure("Normalization methods by batch size", "batch size", "test top-1, %", series, log_x=True)
    return Findings(tables, [figure], verdicts, "Alpha is as trained unless it is named.")


def _alpha_per_layer(runs: FinishedRuns, task: Arm, size: int) -> Verdict:
    each, one = runs.by_seed(
        (task.with_method(EACH, size), "test_top1"), (task.with_method(BATCH, size), "test_top1_own")
    )
    claim = f"B = {size}: one alpha per layer does as well as a single one, within 1 point"
    return claims.compare(claim, each, one, claims.within(1.0), id=f"{size}/alpha-per-layer", paired=True)
