"""The metrics of a network over some batches, at one alpha or at several, and the best alpha for them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from betternorm.errors import UncertainGainWarning
from betternorm.lab.training.config import JUDGED_BY
from betternorm.weighing.alpha import get_alpha, set_alpha
from betternorm.weighing.metrics import METRICS
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha


def evaluate(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], alphas: Iterable[float | None] = (None,)
) -> list[dict[str, float]]:
    """The metrics over some batches, once through, for each alpha; None leaves the layers as they are."""
    alphas = list(alphas)
    sums = torch.zeros(len(alphas), len(JUDGED_BY), 2, dtype=torch.float64)
    before, was_training = get_alpha(model), model.training
    model.eval()
    with torch.inference_mode():
        for images, labels in batches:
            for number, alpha in enumerate(alphas):
                if alpha is not None:
                    set_alpha(model, alpha)
                logits = model(images)
                for column, name in enumerate(JUDGED_BY):
                    values, counts = METRICS[name].measure(logits, labels)
                    sums[number, column] += torch.stack([(values * counts).sum(), counts.sum()])
    if alphas != [None]:
        set_alpha(model, before)
    model.train(was_training)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        shared = sums.to(next(model.parameters()).device)  # where its processes can meet
        torch.distributed.all_reduce(shared)  # every process saw its own part of the split
        sums = shared.cpu()
    means = (sums[..., 0] / sums[..., 1]).tolist()
    return [dict(zip(JUDGED_BY, row, strict=True)) for row in means]


def tune_for_row(network: nn.Module, loader: Iterable[Any], **options: Any) -> AlphaSearch:
    """:func:`betternorm.tune_alpha` that sets the best alpha, and leaves it to the row to say that it may be chance."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)
        return tune_alpha(network, loader, JUDGED_BY, insist=True, **options)
