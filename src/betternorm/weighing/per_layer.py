"""One alpha per layer, fitted by gradient and cross-validated. Deprecated in favor of `fit_alpha(..., per="layer")`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from betternorm.display.progress import Bar
from betternorm.weighing.batches import device_of, evaluating, example_keys, select, with_input_changed
from betternorm.weighing.evaluation import Evaluations
from betternorm.weighing.evidence import Gain, gain_between
from betternorm.weighing.folds import Folds
from betternorm.weighing.gradients import Loss, differentiable_loss, with_alphas
from betternorm.weighing.judging import Judge, SingleAlpha
from betternorm.weighing.metrics import CALIBRATED
from betternorm.weighing.objective import Sets
from betternorm.weighing.result import PerLayer
from betternorm.weighing.resume import SAVE_EVERY
from betternorm.weighing.scale import alpha_of, u_of
from betternorm.weighing.shifts import Shift
from betternorm.weighing.temperature import at_inverse, best_inverse

PER_LAYER_RATE = 0.02  # of Adam, in u


def tune_per_layer(sets: Sets, split: Folds, judge: Judge, single: SingleAlpha, epochs: int) -> PerLayer:
    """Fit one alpha per layer, and judge it on the same folds as one alpha for all layers."""
    evaluations, objective = sets.clean, sets.objective.metric
    alphas, temperature, held_out = _fit(evaluations, split, objective.name, single.alpha, epochs)
    gains = {name: _gain(judge, name, held_out[name]) for name in judge.metrics}
    before = judge.at_baseline()
    if single.significant:
        before = {name: column.held_out(single.by_fold) for name, column in judge.columns.items()}
    after = {name: held_out[objective.name if name == "clean" else (objective.name, name)] for name in judge.columns}
    against = judge.gain_of_numbers(before, after)
    drop = (-1 if objective.higher_is_better else 1) * gains[objective.name].difference
    most = math.inf if judge.rule.max_clean_drop is None else judge.rule.max_clean_drop
    return PerLayer(
        alphas=alphas,
        gains=gains,
        against_single=against,
        kept=judge.is_significant(against) and drop <= most,
        passes=epochs + 1,
        temperature=temperature,
    )


def _gain(judge: Judge, name: str, after: Tensor) -> Gain:
    column = judge.metrics[name]
    before = column.held_out([judge.baseline] * judge.folds)
    return gain_between(column.metric, before, after, column.counts, column.units, (), judge.confidence, judge.seed)


def _fit(
    evaluations: Evaluations, split: Folds, objective: str, start: float, epochs: int
) -> tuple[dict[str, float], float | None, dict[Any, Tensor]]:
    """Fit one row of alphas and a temperature for every fold, on the other folds, and one on all the data.

    Returns:
        The last row by layer name, its temperature, and the numbers of every metric on held-out folds.
    """
    # At 0 and 1 the derivative of alpha with respect to u is zero.
    u = float(u_of(torch.tensor(min(max(start, 0.005), 0.995), dtype=torch.float64)))
    rows = torch.full((split.count + 1, len(evaluations.layers) + 1), u, device=device_of(evaluations.model))
    rows[:, -1] = 0
    if CALIBRATED in evaluations.values:
        column = evaluations.column(CALIBRATED, split.of(CALIBRATED))
        for row in range(len(rows)):  # the last one is outside no fold
            chosen = column.folds != row
            inverse = best_inverse(column.values[start][chosen], column.counts[chosen])
            rows[row, -1] = math.log(max(inverse, 0.01))
    rows.requires_grad_()
    _descend(evaluations, split, rows, differentiable_loss(evaluations.metrics[objective]), epochs)
    fitted, inverses = alpha_of(rows.detach()[:, :-1]), rows.detach()[:, -1].exp().tolist()
    alphas = {name: float(f"{alpha:.6g}") for name, alpha in zip(evaluations.layers, fitted[-1].tolist(), strict=True)}
    temperature = 1 / inverses[-1] if CALIBRATED in evaluations.values else None
    return alphas, temperature, _evaluate_rows(evaluations, split, fitted, inverses)


def _descend(evaluations: Evaluations, split: Folds, rows: Tensor, loss: Loss, epochs: int) -> None:
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
                        # The clean batch and the shifted ones take turns, which optimizes the mean over all of them.
                        turn = steps % (len(shifts) + 1)
                        shift = shifts[turn - 1] if turn else None
                        rows.grad = _gradient(evaluations, split, rows, loss, batch, shift)
                        optimizer.step()
                        now = {"steps": steps, "rows": rows.detach().clone(), "optimizer": optimizer.state_dict()}
                        evaluations.fit = begun | now
                        evaluations.save(SAVE_EVERY)
                    bar.advance()
    finally:
        evaluations.save()


def _gradient(
    evaluations: Evaluations, split: Folds, rows: Tensor, loss: Loss, batch: Any, shift: Shift | None
) -> Tensor:
    fold = split.of_rows(example_keys(batch))
    gradient = torch.zeros_like(rows)
    shifted = batch if shift is None else with_input_changed(batch, shift)
    for row in range(len(rows)):
        part = select(shifted, fold != row)
        if part is not None:
            with with_alphas(evaluations.layers, alpha_of(rows[row, :-1])):
                value = loss(*evaluations.forward(evaluations.model, part), rows[row, -1].exp())
            gradient += torch.autograd.grad(value, rows)[0]
    return gradient


def _evaluate_rows(
    evaluations: Evaluations, split: Folds, fitted: Tensor, inverses: Sequence[float]
) -> dict[Any, Tensor]:
    """The numbers of every metric for every row of ``fitted``, on the fold it was fitted without."""
    keys: list[Tensor] = []
    values: dict[Any, list[Tensor]] = {key: [] for key in evaluations.metrics}
    per_batch = {key: len(counts) != len(evaluations.keys) for key, counts in evaluations.counts.items()}
    with (
        evaluating(evaluations.model),
        torch.inference_mode(),
        Bar("evaluating one alpha per layer", evaluations.length(), evaluations.progress) as bar,
    ):
        for batch in evaluations.batches():
            batch_keys = example_keys(batch)
            fold = split.of_rows(batch_keys)
            for row in range(split.count):
                part = select(batch, fold == row)
                if part is not None:
                    with with_alphas(evaluations.layers, fitted[row]):
                        measured, _, _ = evaluations.measure(evaluations.with_shifts(part))
                    keys.append(batch_keys[fold == row])
                    for key, (numbers, _) in measured.items():
                        fits = evaluations.metrics[key].fitted is not None
                        values[key].append(at_inverse(numbers, inverses[row]) if fits else numbers)
            bar.advance()
    by_example = torch.cat(keys).argsort(stable=True)
    by_batch = torch.stack([part.sum() for part in keys]).argsort(stable=True)
    return {key: torch.cat(parts)[by_batch if per_batch[key] else by_example] for key, parts in values.items()}
