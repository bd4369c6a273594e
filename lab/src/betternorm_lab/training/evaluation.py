"""The metrics of a network over some batches, at one alpha or at several, and the best alpha for each of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.errors import UncertainGainWarning
from betternorm.weighing.alpha import alpha_as_trained, get_alpha, set_alpha, tuned_layers, weighed_layers
from betternorm.weighing.metrics import CALIBRATED, METRICS
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha
from betternorm_lab.training.config import JUDGED_BY

Batches = Iterable[tuple[Tensor, Tensor]]
Metrics = dict[str, float]
METRICS_VERSION = 2

# From a half to four. Between two of them the cross-entropy differs from its lowest by less than 1e-4.
TEMPERATURES = tuple(2 ** (k / 24) for k in range(-24, 49))


def evaluate(model: nn.Module, batches: Batches, alphas: Iterable[float | None] = (None,)) -> list[Metrics]:
    """The metrics over some batches, once through, for each alpha; None leaves the layers as they are."""
    return [dict(zip(JUDGED_BY, row, strict=True)) for row in _means(model, batches, list(alphas), _metrics).tolist()]


def evaluate_calibrated(
    model: nn.Module, batches: Batches, alphas: Sequence[float | None], temperatures: Sequence[float] | None = None
) -> list[Metrics]:
    """The same, with ``temperature`` and the cross-entropy after it, :data:`CALIBRATED`.

    ``temperatures`` has one for every alpha. Without them each is fitted on these batches.
    """
    means = _means(model, batches, list(alphas), _metrics_by_temperature).tolist()
    found = []
    for number, numbers in enumerate(means):
        losses = dict(zip(TEMPERATURES, numbers[len(JUDGED_BY) :], strict=True))
        temperature = temperatures[number] if temperatures else min(losses, key=lambda one: losses[one])
        row = dict(zip(JUDGED_BY, numbers[: len(JUDGED_BY)], strict=True))
        found.append(row | {"temperature": temperature, CALIBRATED: losses[temperature]})
    return found


def best_alphas(table: Sequence[Metrics], baseline: float) -> Metrics:
    """The best alpha of a table for every metric; of equals the one nearest to the alpha as trained."""

    def better(row: Metrics, name: str) -> tuple[float, float]:
        higher = name in METRICS and METRICS[name].higher_is_better
        return (-row[name] if higher else row[name], abs(row["alpha"] - baseline))

    return {name: min(table, key=lambda row: better(row, name))["alpha"] for name in (*JUDGED_BY, CALIBRATED)}


def with_alpha(model: nn.Module) -> float:
    """Give a trained network layers that have an alpha, and return the alpha that is as trained."""
    if not weighed_layers(model):
        convert(model, "weighed")
    return alpha_as_trained(tuned_layers(model))


def tune_for_row(network: nn.Module, loader: Iterable[Any], **options: Any) -> AlphaSearch:
    """:func:`betternorm.tune_alpha` that sets the best alpha, and leaves it to the row to say that it may be chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)
        wanted = {"objective": "cross_entropy"} | options
        return tune_alpha(network, loader, (*JUDGED_BY, CALIBRATED), require_significant=False, **wanted)


def _means(
    model: nn.Module, batches: Batches, alphas: Sequence[float | None], measure: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """The means of what ``measure`` says of logits and labels, a row for every alpha, over all processes."""
    sums: list[Tensor] = [torch.zeros((), dtype=torch.float64) for _ in alphas]
    count = torch.zeros((), dtype=torch.float64)
    before, was_training = get_alpha(model), model.training
    model.eval()
    with torch.inference_mode():
        for images, labels in batches:
            count += len(labels)
            for number, alpha in enumerate(alphas):
                if alpha is not None:
                    set_alpha(model, alpha)
                sums[number] = sums[number] + measure(model(images), labels).sum(0).cpu()
    if list(alphas) != [None]:
        set_alpha(model, before)
    model.train(was_training)
    shared = torch.cat([torch.stack(sums), count.expand(len(alphas), 1)], 1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        shared = shared.to(next(model.parameters()).device)  # where its processes can meet
        torch.distributed.all_reduce(shared)  # every process saw its own part of the split
        shared = shared.cpu()
    return shared[:, :-1] / shared[:, -1:]


def _metrics(logits: Tensor, labels: Tensor) -> Tensor:
    """(N, metrics), in float64."""
    return torch.stack([METRICS[name].measure(logits, labels)[0] for name in JUDGED_BY], 1)


def _metrics_by_temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """The same, and the cross-entropy at every one of :data:`TEMPERATURES`."""
    losses = [F.cross_entropy(logits.float() / one, labels, reduction="none").double().cpu() for one in TEMPERATURES]
    scaled = torch.stack(losses, 1).nan_to_num(torch.inf)
    return torch.cat([_metrics(logits, labels), scaled], 1)
