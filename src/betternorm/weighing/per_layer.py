"""One alpha per layer, fitted by gradient and judged on held-out folds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from betternorm.display.progress import Bar
from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.batches import device_of, evaluating, example_keys, select
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.evidence import Gain
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import METRICS, SHARES, Metric
from betternorm.weighing.result import AlphaSearch, PerLayer
from betternorm.weighing.scale import alpha_of, to_u

PER_LAYER_RATE = 0.02  # of Adam, in u


def tune_per_layer(evaluations: Evaluations, split: Folds, single: AlphaSearch, epochs: int, seed: int) -> PerLayer:
    """Fit one alpha per layer and judge it on the folds that one alpha for all was judged on."""
    aim = single.objective
    alphas, held_out = _fit(evaluations, split, aim, single.best[aim], epochs)

    def gain(metric: str, before: Tensor) -> Gain:
        return evaluations.gain(metric, before, held_out[metric], single.confidence, seed)

    baseline = evaluations.baseline
    against = gain(aim, split.single(aim, aim) if single.significant else evaluations.values[aim][baseline])
    return PerLayer(
        alphas=alphas,
        gains={metric: gain(metric, values[baseline]) for metric, values in evaluations.values.items()},
        against_single=against,
        kept=against.is_certain(evaluations.metrics[aim]),
        passes=epochs + 1,
    )


def _fit(
    evaluations: Evaluations, split: Folds, objective: str, start: float, epochs: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Fit a row of alphas for every fold, on the other folds, and one on all the data.

    Returns:
        The latter, by layer name; and the numbers of every metric, each at the alphas that were fitted without it.
    """
    # At the ends the derivative of alpha by u is zero, and nothing would move.
    u = float(to_u(min(max(start, 0.005), 0.995)))
    rows = torch.full(
        (split.count + 1, len(evaluations.layers)), u, device=device_of(evaluations.model), requires_grad=True
    )
    _descend(evaluations, split, rows, _loss(evaluations.metrics[objective]), epochs)
    fitted = alpha_of(rows.detach())
    alphas = {name: float(f"{alpha:.6g}") for name, alpha in zip(evaluations.layers, fitted[-1].tolist(), strict=True)}
    return alphas, _evaluate_rows(evaluations, split, fitted)


def _descend(
    evaluations: Evaluations, split: Folds, rows: Tensor, loss: Callable[[Any, Any], Tensor], epochs: int
) -> None:
    """Adam on all rows at once, row k on examples outside fold k; the last row is outside no fold."""
    optimizer = torch.optim.Adam([rows], lr=PER_LAYER_RATE)
    begun: dict[str, Any] = {"from": rows.detach().clone(), "epochs": epochs}
    done = 0
    if evaluations.fit and evaluations.fit["epochs"] == epochs and torch.equal(evaluations.fit["from"], begun["from"]):
        done = evaluations.fit["steps"]
        rows.data.copy_(evaluations.fit["rows"])
        optimizer.load_state_dict(evaluations.fit["optimizer"])
    length = evaluations.length()
    label = f"fitting one alpha per layer, {len(rows)} times"
    steps = 0
    try:
        with evaluating(evaluations.model), Bar(label, length and length * epochs, evaluations.progress) as bar:
            for epoch in range(epochs):
                optimizer.param_groups[0]["lr"] = PER_LAYER_RATE / 2**epoch
                for batch in evaluations.batches():
                    steps += 1
                    if steps > done:
                        rows.grad = _gradient(evaluations, split, rows, loss, batch)
                        optimizer.step()
                        now = {"steps": steps, "rows": rows.detach().clone(), "optimizer": optimizer.state_dict()}
                        evaluations.fit = begun | now
                        evaluations.save_now_and_then()
                    bar.advance()
    finally:
        evaluations.save()


def _gradient(
    evaluations: Evaluations, split: Folds, rows: Tensor, loss: Callable[[Any, Any], Tensor], batch: Any
) -> Tensor:
    fold = split.of_rows(example_keys(batch))
    gradient = torch.zeros_like(rows)
    for row in range(len(rows)):
        part = select(batch, fold != row)
        if part is not None:
            with _replaced(evaluations.layers, alpha_of(rows[row])):
                value = loss(*evaluations.forward(evaluations.model, part))
            gradient += torch.autograd.grad(value, rows)[0]
    return gradient


def _evaluate_rows(evaluations: Evaluations, split: Folds, fitted: Tensor) -> dict[str, Tensor]:
    """The numbers of every metric for every row of ``fitted``, on the fold it was fitted without."""
    keys: list[Tensor] = []
    values: dict[str, list[Tensor]] = {name: [] for name in evaluations.metrics}
    per_batch = {name: len(counts) != len(evaluations.keys) for name, counts in evaluations.counts.items()}
    with (
        evaluating(evaluations.model),
        torch.inference_mode(),
        Bar("judging one alpha per layer", evaluations.length(), evaluations.progress) as bar,
    ):
        for batch in evaluations.batches():
            batch_keys = example_keys(batch)
            fold = split.of_rows(batch_keys)
            for row in range(split.count):
                part = select(batch, fold == row)
                if part is not None:
                    with _replaced(evaluations.layers, fitted[row]):
                        output, target = evaluations.forward(evaluations.model, part)
                    keys.append(batch_keys[fold == row])
                    for name, metric in evaluations.metrics.items():
                        values[name].append(metric.measure(output, target)[0])
            bar.advance()
    by_example = torch.cat(keys).argsort(stable=True)
    by_batch = torch.stack([part.sum() for part in keys]).argsort(stable=True)
    return {name: torch.cat(parts)[by_batch if per_batch[name] else by_example] for name, parts in values.items()}


def _loss(metric: Metric) -> Callable[[Any, Any], Tensor]:
    if metric.name in SHARES:
        metric = METRICS["cross_entropy"]  # these have no gradient

    def loss(output: Any, target: Any) -> Tensor:
        found = metric.function(output, target)
        value = found[0] if isinstance(found, tuple) else found
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise ValueError(
                f"per_layer=True follows the gradient of the objective, and {metric.name!r} has none; "
                "let it return a tensor made by differentiable operations, or choose objective='cross_entropy'"
            )
        return -value.mean() if metric.higher_is_better else value.mean()

    return loss


@contextmanager
def _replaced(layers: Mapping[str, GroupedBatchNorm], alphas: Tensor) -> Iterator[None]:
    """The layers with these alphas, as tensors that gradients flow to."""
    before = [layer._alpha for layer in layers.values()]
    try:
        for layer, alpha in zip(layers.values(), alphas.unbind(), strict=True):
            layer._alpha = alpha
        yield
    finally:
        for layer, earlier in zip(layers.values(), before, strict=True):
            layer._alpha = earlier
