"""One alpha per layer, fitted by gradient and judged on held-out folds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from betternorm.display.progress import Bar
from betternorm.layers import GroupedBatchNorm
from betternorm.weighing.batches import device_of, evaluating, example_keys, select, with_input_changed
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.evidence import ENOUGH_TO_JUDGE, Gain
from betternorm.weighing.folds import Folds
from betternorm.weighing.metrics import CALIBRATED, METRICS, SHARES, Metric
from betternorm.weighing.result import AlphaSearch, PerLayer
from betternorm.weighing.scale import alpha_of, to_u
from betternorm.weighing.shifted import ShiftedSets
from betternorm.weighing.shifts import Shift
from betternorm.weighing.temperature import at_inverse, best_inverse

PER_LAYER_RATE = 0.02  # of Adam, in u


def tune_per_layer(
    evaluations: Evaluations,
    split: Folds,
    single: AlphaSearch,
    epochs: int,
    seed: int,
    sets: ShiftedSets | None = None,
) -> PerLayer:
    """Fit one alpha per layer and judge it on the folds that one alpha for all was judged on."""
    aim = single.objective
    alphas, temperature, held_out = _fit(
        evaluations, split, aim, single.best[aim] if sets is None else sets.chosen, epochs
    )

    def gain(metric: str, before: Tensor) -> Gain:
        return evaluations.gain(metric, before, held_out[metric], single.confidence, seed)

    gains = {metric: gain(metric, split.as_trained(metric)) for metric in single.gains}
    if sets is None:
        against = gain(aim, split.single(aim, aim) if single.significant else split.as_trained(aim))
        allowed = True
    else:
        against = sets.against_single(single, held_out, seed)
        allowed = sets.allows(gains[aim])
    return PerLayer(
        alphas=alphas,
        gains=gains,
        against_single=against,
        kept=against.is_certain(evaluations.metrics[aim]) and allowed and single.judged_on >= ENOUGH_TO_JUDGE,
        passes=epochs + 1,
        temperature=temperature,
    )


def _fit(
    evaluations: Evaluations, split: Folds, objective: str, start: float, epochs: int
) -> tuple[dict[str, float], float | None, dict[str, Tensor]]:
    """Fit a row of alphas for every fold, on the other folds, and one on all the data; a temperature goes along.

    Returns:
        The last row, by layer name, its temperature, and the numbers of every metric, each at the alphas (and the
        temperature) that were fitted without it.
    """
    # At the ends the derivative of alpha by u is zero, and nothing would move.
    u = float(to_u(min(max(start, 0.005), 0.995)))
    rows = torch.full((split.count + 1, len(evaluations.layers) + 1), u, device=device_of(evaluations.model))
    if CALIBRATED in evaluations.values:
        curves, counts, folds = (
            evaluations.values[CALIBRATED][start],
            evaluations.counts[CALIBRATED],
            split.of(CALIBRATED),
        )
        for row in range(len(rows)):  # the last one is outside no fold
            inverse = best_inverse(curves[folds != row], counts[folds != row])
            rows[row, -1] = math.log(max(inverse, 0.01))
    else:
        rows[:, -1] = 0
    rows.requires_grad_()
    _descend(evaluations, split, rows, _loss(evaluations.metrics[objective]), epochs)
    fitted, inverses = alpha_of(rows.detach()[:, :-1]), rows.detach()[:, -1].exp().tolist()
    alphas = {name: float(f"{alpha:.6g}") for name, alpha in zip(evaluations.layers, fitted[-1].tolist(), strict=True)}
    temperature = 1 / inverses[-1] if CALIBRATED in evaluations.values else None
    return alphas, temperature, _evaluate_rows(evaluations, split, fitted, inverses)


def _descend(
    evaluations: Evaluations, split: Folds, rows: Tensor, loss: Callable[[Any, Any, Tensor], Tensor], epochs: int
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
    shifts = list(evaluations.shifts.values())
    steps = 0
    try:
        with evaluating(evaluations.model), Bar(label, length and length * epochs, evaluations.progress) as bar:
            for epoch in range(epochs):
                optimizer.param_groups[0]["lr"] = PER_LAYER_RATE / 2**epoch
                for batch in evaluations.batches():
                    steps += 1
                    if steps > done:
                        # Under shifts the clean batch and the shifted ones in turn: that is the mean over all of them.
                        turn = steps % (len(shifts) + 1)
                        shift = shifts[turn - 1] if turn else None
                        rows.grad = _gradient(evaluations, split, rows, loss, batch, shift)
                        optimizer.step()
                        now = {"steps": steps, "rows": rows.detach().clone(), "optimizer": optimizer.state_dict()}
                        evaluations.fit = begun | now
                        evaluations.save_now_and_then()
                    bar.advance()
    finally:
        evaluations.save()


def _gradient(
    evaluations: Evaluations,
    split: Folds,
    rows: Tensor,
    loss: Callable[[Any, Any, Tensor], Tensor],
    batch: Any,
    shift: Shift | None,
) -> Tensor:
    fold = split.of_rows(example_keys(batch))
    gradient = torch.zeros_like(rows)
    shown = batch if shift is None else with_input_changed(batch, shift)
    for row in range(len(rows)):
        part = select(shown, fold != row)
        if part is not None:
            with _replaced(evaluations.layers, alpha_of(rows[row, :-1])):
                value = loss(*evaluations.forward(evaluations.model, part), rows[row, -1].exp())
            gradient += torch.autograd.grad(value, rows)[0]
    return gradient


def _evaluate_rows(
    evaluations: Evaluations, split: Folds, fitted: Tensor, inverses: Sequence[float]
) -> dict[str, Tensor]:
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
                        measured = evaluations.measured(evaluations.parts(part))
                    keys.append(batch_keys[fold == row])
                    for name, (found, _) in measured.items():
                        fits = evaluations.metrics[name].fitted is not None
                        values[name].append(at_inverse(found, inverses[row]) if fits else found)
            bar.advance()
    by_example = torch.cat(keys).argsort(stable=True)
    by_batch = torch.stack([part.sum() for part in keys]).argsort(stable=True)
    return {name: torch.cat(parts)[by_batch if per_batch[name] else by_example] for name, parts in values.items()}


def _loss(metric: Metric) -> Callable[[Any, Any, Tensor], Tensor]:
    """Of output, targets and an inverse temperature."""
    if metric.name in (*SHARES, CALIBRATED):  # accuracies have no gradient, and after a temperature they have one

        def softened(output: Any, target: Any, inverse: Tensor) -> Tensor:
            return METRICS["cross_entropy"].function(output * inverse, target).mean()  # type: ignore[no-any-return]

        return softened

    def loss(output: Any, target: Any, inverse: Tensor) -> Tensor:
        found = metric.function(output, target)
        value = found[0] if isinstance(found, tuple) else found
        if not isinstance(value, Tensor) or not value.requires_grad:
            raise ValueError(
                f"per_layer=True follows the gradient of the objective, and {metric.name!r} has none; "
                "let it return a tensor made by differentiable operations, or choose objective='cross_entropy'"
            )
        return (-value.mean() if metric.higher_is_better else value.mean()) + 0 * inverse

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
