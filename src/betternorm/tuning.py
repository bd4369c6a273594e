"""The work behind `betternorm.tune_alpha`: running the network, the search, folds, one alpha a layer (section 3.1)."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.batches import Forward, device_of, evaluating, example_keys, iterate, length_of, select
from betternorm.display.progress import Bar
from betternorm.evidence import assign_folds
from betternorm.layers import GroupedBatchNorm, checked_alpha
from betternorm.metrics import METRICS, SHARES, Metric, weighted_mean

Setting = float | tuple[float, ...]  # one alpha for all layers, or one for each

# The search moves in u, with alpha = sin²(pi u / 2): dense near 0, where the best of a BatchNorm network lies, and near
# 1, where that of a GroupNorm network does.
COARSEST, FINEST = 1 / 4, 1 / 32
WORTH_A_PASS = 0.05  # how far the lowest point must be from the best one tried, as a part of the bracket
SAVE_EVERY = 20.0  # seconds between writes of what has been evaluated
PER_LAYER_RATE = 0.02  # of Adam, in u


def search(runs: Runs, objective: str, grid: list[float] | None) -> None:
    """Try alphas: those of the grid, or five and then ever closer neighbours of the best."""
    if grid is not None:
        runs.evaluate([runs.baseline, *grid])
        return
    # A calibration error has no single valley: a network that knows nothing, and says so, is well calibrated.
    followed = [name for name, metric in runs.metrics.items() if metric.average is weighted_mean or name == objective]
    steps = round(1 / COARSEST)
    position = {alpha_at(k / steps): k / steps for k in range(steps + 1)}
    runs.evaluate(list(position))
    step = COARSEST
    while step > FINEST:
        step /= 2
        best = {position[runs.best(metric, among=position)] for metric in followed}
        position |= {alpha_at(v): v for u in sorted(best) for v in (u - step, u + step) if 0 <= v <= 1}
        runs.evaluate(list(position))
    u = position[runs.best(objective, among=position)]
    if step <= u <= 1 - step:
        around = [alpha_at(v) for v in (u - step, u, u + step)]
        lowest = _vertex(around, [runs.average(objective, runs.values[objective][alpha]) for alpha in around])
        if abs(lowest - around[1]) > WORTH_A_PASS * (around[2] - around[0]):
            runs.evaluate([float(f"{lowest:.6g}")])


def _vertex(x: Sequence[float], y: Sequence[float]) -> float:
    """Where the parabola through three points is flat; between the outer two, the middle one being the best."""
    before, after = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    if before == after or not math.isfinite(before - after):
        return x[1]
    return (x[0] + x[1]) / 2 - before * (x[2] - x[0]) / (after - before) / 2


def alpha_grid(grid: int | Sequence[float] | None) -> list[float] | None:
    """The alphas that ``grid`` asks for: equally spaced in u where it is a number."""
    if grid is None:
        return None
    if isinstance(grid, int):
        if grid < 2:
            raise ValueError(f"grid={grid} must be 2 or more points, or a list of alphas")
        return [alpha_at(k / (grid - 1)) for k in range(grid)]
    return [checked_alpha(alpha) for alpha in grid]


def alpha_at(u: float) -> float:
    return float(f"{math.sin(math.pi * min(max(u, 0.0), 1.0) / 2) ** 2:.6g}")


def to_u(alpha: Any) -> Any:
    """u of alpha = sin²(pi u / 2), for numbers and arrays, as an array."""
    return torch.as_tensor(alpha, dtype=torch.float64).clamp(0, 1).sqrt().asin().mul(2 / math.pi).numpy()


def from_u(u: Any) -> Any:
    return torch.as_tensor(u, dtype=torch.float64).clamp(0, 1).mul(math.pi / 2).sin().square().numpy()


# ---- running the network ----


@dataclass
class _Pass:
    """An iteration of the loader under way."""

    alphas: list[Setting]
    keys: list[Tensor] = field(default_factory=list)  # of every batch seen
    values: dict[str, dict[Setting, list[Tensor]]] = field(default_factory=dict)
    counts: dict[str, list[Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        for part in (self.keys, self.values, self.counts):
            part.clear()


class Runs:
    """The numbers of every example for every alpha tried, in an order that does not depend on the loader's."""

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[str, GroupedBatchNorm],
        loader: Iterable[Any],
        metrics: dict[str, Metric],
        forward: Forward,
        limit: int | None,
        resume: str | os.PathLike[str] | None,
        progress: bool | None,
        baseline: float,
    ) -> None:
        self.baseline = baseline
        self.model, self.layers, self.loader, self.metrics = model, layers, loader, metrics
        self.forward, self.limit, self.progress = forward, limit, progress
        self.values: dict[str, dict[Setting, Tensor]] = {name: {} for name in metrics}
        self.counts: dict[str, Tensor] = {}
        self.keys = torch.empty(0, dtype=torch.int64)  # of every example, in order
        self.batch_keys = torch.empty(0, dtype=torch.int64)
        self.batch_of_example = torch.empty(0, dtype=torch.int64)  # the key of its batch
        self.passes = 0
        self.fit: dict[str, Any] = {}  # the state of fitting one alpha a layer
        self._unfinished: _Pass | None = None
        self._file = None if resume is None else Path(resume)
        self._saved = time.monotonic()
        if self._file is not None:
            self._signature = _signature(model, metrics, limit)
            self._restore()

    def evaluate(self, alphas: Sequence[Setting]) -> None:
        """One iteration of the loader for all of these that have not been tried."""
        tried = next(iter(self.values.values()))
        new: list[Setting] = [alpha for alpha in dict.fromkeys(alphas) if alpha not in tried]
        if not new:
            return
        current = self._unfinished
        if current is None or current.alphas != new:
            current = _Pass(new)
        self._unfinished = current
        label = f"pass {self.passes + 1}: {len(new)} alphas"
        try:
            self._iterate(current, label)
        except BaseException:
            self.save()
            raise
        self._close(current)
        self._unfinished = None
        self.passes += 1
        self.save()

    def batches(self) -> Iterator[Any]:
        return iterate(self.loader, self.limit, device_of(self.model))

    def _iterate(self, current: _Pass, label: str) -> None:
        done = len(current.keys)
        with evaluating(self.model), torch.inference_mode(), Bar(label, self.length(), self.progress) as bar:
            for number, batch in enumerate(self.batches()):
                keys = example_keys(batch)
                if number < done:  # evaluated before an interruption
                    if torch.equal(keys, current.keys[number]):
                        bar.advance()
                        continue
                    current.clear()  # cut into other batches now
                    return self._iterate(current, label)
                measured = [self._measure(alpha, batch) for alpha in current.alphas]
                for name in self.metrics:
                    for alpha, found in zip(current.alphas, measured, strict=True):
                        current.values.setdefault(name, {}).setdefault(alpha, []).append(found[name][0])
                    current.counts.setdefault(name, []).append(measured[0][name][1])
                current.keys.append(keys)  # last: a batch counts once all of it is there
                bar.advance()
                self.save_now_and_then()
        if not current.keys:
            raise ValueError("the loader gave no batches: nothing to evaluate")

    def _measure(self, alpha: Setting, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        alphas = alpha if isinstance(alpha, tuple) else (alpha,) * len(self.layers)
        for layer, value in zip(self.layers.values(), alphas, strict=True):
            layer.alpha = value
        output, target = self.forward(self.model, batch)
        return {name: metric.measure(output, target) for name, metric in self.metrics.items()}

    def length(self) -> int | None:
        return length_of(self.loader, self.limit)

    def _close(self, current: _Pass) -> None:
        """Bring a finished pass into order and check that it saw what the others saw."""
        keys = torch.cat(current.keys)
        batch_keys = torch.stack([part.sum() for part in current.keys])
        of_example = torch.repeat_interleave(batch_keys, torch.tensor([len(part) for part in current.keys]))
        by_example, by_batch = keys.argsort(stable=True), batch_keys.argsort(stable=True)
        if len(self.keys) and not torch.equal(keys[by_example], self.keys):
            raise _other_examples("than in the one before")
        for name in self.metrics:
            counts = torch.cat(current.counts[name])
            if len(counts) == len(keys) and len(keys) > len(batch_keys):
                order = by_example
            elif len(counts) == len(batch_keys):
                order = by_batch
                if len(self.batch_keys) and not torch.equal(batch_keys[order], self.batch_keys):
                    raise _other_examples(f"a batch, and {name!r} is one number a batch, than in the one before")
            else:
                raise ValueError(
                    f"metric {name!r} gave {len(counts)} numbers for {len(keys)} examples in {len(batch_keys)} "
                    "batches; it must give one an example or one a batch"
                )
            self.counts[name] = counts[order]
            for alpha, parts in current.values[name].items():
                self.values[name][alpha] = torch.cat(parts)[order]
        self.keys, self.batch_keys, self.batch_of_example = (
            keys[by_example],
            batch_keys[by_batch],
            of_example[by_example],
        )

    # -- what was found --

    def by_batch(self) -> bool:
        """Whether a metric has only one number a batch, so that batches cannot be split between folds."""
        return any(len(counts) != len(self.keys) for counts in self.counts.values())

    def groups(self) -> int:
        """How many parts could go into different folds."""
        return len(torch.unique(self.batch_keys if self.by_batch() else self.keys))

    def average(self, metric: str, values: Tensor, where: Tensor | None = None) -> float:
        chosen = slice(None) if where is None else where
        return float(self.metrics[metric].average(values[chosen], self.counts[metric][chosen]))

    def tried(self) -> list[float]:
        """The single alphas, from the one nearest to the network as it was trained."""
        settings = next(iter(self.values.values()))
        return sorted((s for s in settings if not isinstance(s, tuple)), key=lambda alpha: abs(alpha - self.baseline))

    def best(self, metric: str, where: Tensor | None = None, among: Container[float] | None = None) -> float:
        """The best alpha tried; of equals the one nearest to the network as it was trained."""
        alphas = [alpha for alpha in self.tried() if among is None or alpha in among]
        found = alphas[0]
        best = self.average(metric, self.values[metric][found], where)
        for alpha in alphas[1:]:
            value = self.average(metric, self.values[metric][alpha], where)
            if math.isnan(best) or self.metrics[metric].is_better(value, best):
                found, best = alpha, value
        return found

    # -- interruptions --

    def save_now_and_then(self) -> None:
        if time.monotonic() - self._saved > SAVE_EVERY:
            self.save()

    def save(self) -> None:
        self._saved = time.monotonic()
        if self._file is None:
            return
        state = {name: getattr(self, name) for name in self._STATE}
        state["unfinished"] = None if self._unfinished is None else asdict(self._unfinished)
        partial = self._file.with_name(self._file.name + ".partial")
        torch.save({"signature": self._signature, **state}, partial)
        partial.replace(self._file)  # atomic: an interruption here leaves the file before

    _STATE = ("values", "counts", "keys", "batch_keys", "batch_of_example", "passes", "fit")

    def _restore(self) -> None:
        assert self._file is not None
        try:
            state = torch.load(self._file, weights_only=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise ValueError(f"resume={str(self._file)!r} is not a file of a search; remove it ({error})") from error
        if not isinstance(state, dict) or state.get("signature") != self._signature:
            raise ValueError(
                f"resume={str(self._file)!r} belongs to another network, limit or list of metrics; remove the file "
                "or name another one"
            )
        for name in self._STATE:
            setattr(self, name, state[name])
        if state["unfinished"] is not None:
            self._unfinished = _Pass(**state["unfinished"])


def _signature(model: nn.Module, metrics: Iterable[str], limit: int | None) -> str:
    """What the numbers of a file depend on, apart from the data, which has its keys."""
    digest = hashlib.sha256(repr((sorted(metrics), limit)).encode())
    for name, tensor in sorted(model.state_dict().items()):
        if name.rpartition(".")[2] not in ("alpha", "num_batches_tracked"):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _other_examples(than: str) -> ValueError:
    return ValueError(
        f"the loader gave other examples {than}; alphas are compared on the same examples, so switch random "
        "augmentation off, and shuffling where limit is used"
    )


class Folds:
    """Which fold every example is in. Where a metric has only one number a batch, a batch is in one fold."""

    def __init__(self, runs: Runs, count: int, seed: int) -> None:
        self.count, self._runs = count, runs
        self._of_example = assign_folds(runs.batch_of_example if runs.by_batch() else runs.keys, count, seed)
        self._of_batch = assign_folds(runs.batch_keys, count, seed) if runs.by_batch() else self._of_example

    def of(self, metric: str) -> Tensor:
        """The fold of every number of a metric."""
        per_example = len(self._runs.counts[metric]) == len(self._runs.keys)
        return self._of_example if per_example else self._of_batch

    def of_rows(self, keys: Tensor) -> Tensor:
        """The fold of every row of a batch, given the keys of its rows."""
        if self._runs.by_batch():
            return self._of_batch[torch.searchsorted(self._runs.batch_keys, keys.sum())].expand(len(keys))
        return self._of_example[torch.searchsorted(self._runs.keys, keys)]

    def single(self, objective: str, metric: str) -> Tensor:
        """The numbers of a metric, each at the one alpha that is best for the objective on the other folds."""
        runs = self._runs
        held_out = runs.values[metric][runs.baseline].clone()
        for fold in range(self.count):
            alpha = runs.best(objective, self.of(objective) != fold)
            mine = self.of(metric) == fold
            held_out[mine] = runs.values[metric][alpha][mine]
        return held_out


# ---- one alpha a layer ----


def fit_per_layer(
    runs: Runs, split: Folds, objective: str, start: float, epochs: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Fit a row of alphas for every fold, on the other folds, and one on all the data.

    Returns:
        The latter, by layer name; and the numbers of every metric, each at the alphas that were fitted without it.
    """
    # At the ends the derivative of alpha by u is zero, and nothing would move.
    u = float(to_u(min(max(start, 0.005), 0.995)))
    rows = torch.full((split.count + 1, len(runs.layers)), u, device=device_of(runs.model), requires_grad=True)
    _descend(runs, split, rows, _loss(runs.metrics[objective]), epochs)
    fitted = _alphas(rows.detach())
    alphas = {name: float(f"{alpha:.6g}") for name, alpha in zip(runs.layers, fitted[-1].tolist(), strict=True)}
    return alphas, _evaluate_rows(runs, split, fitted)


def _alphas(u: Tensor) -> Tensor:
    return (u * (math.pi / 2)).sin().square()


def _descend(runs: Runs, split: Folds, rows: Tensor, loss: Callable[[Any, Any], Tensor], epochs: int) -> None:
    """Adam on all rows at once, row k on examples outside fold k; the last row is outside no fold."""
    optimizer = torch.optim.Adam([rows], lr=PER_LAYER_RATE)
    begun: dict[str, Any] = {"from": rows.detach().clone(), "epochs": epochs}
    done = 0
    if runs.fit and runs.fit["epochs"] == epochs and torch.equal(runs.fit["from"], begun["from"]):
        done = runs.fit["steps"]
        rows.data.copy_(runs.fit["rows"])
        optimizer.load_state_dict(runs.fit["optimizer"])
    length = runs.length()
    label = f"fitting one alpha a layer, {len(rows)} times"
    steps = 0
    try:
        with evaluating(runs.model), Bar(label, length and length * epochs, runs.progress) as bar:
            for epoch in range(epochs):
                optimizer.param_groups[0]["lr"] = PER_LAYER_RATE / 2**epoch
                for batch in runs.batches():
                    steps += 1
                    if steps > done:
                        rows.grad = _gradient(runs, split, rows, loss, batch)
                        optimizer.step()
                        now = {"steps": steps, "rows": rows.detach().clone(), "optimizer": optimizer.state_dict()}
                        runs.fit = begun | now
                        runs.save_now_and_then()
                    bar.advance()
    finally:
        runs.save()


def _gradient(runs: Runs, split: Folds, rows: Tensor, loss: Callable[[Any, Any], Tensor], batch: Any) -> Tensor:
    fold = split.of_rows(example_keys(batch))
    gradient = torch.zeros_like(rows)
    for row in range(len(rows)):
        part = select(batch, fold != row)
        if part is not None:
            with _replaced(runs.layers, _alphas(rows[row])):
                value = loss(*runs.forward(runs.model, part))
            gradient += torch.autograd.grad(value, rows)[0]
    return gradient


def _evaluate_rows(runs: Runs, split: Folds, fitted: Tensor) -> dict[str, Tensor]:
    """The numbers of every metric for every row of ``fitted``, on the fold it was fitted without."""
    keys: list[Tensor] = []
    values: dict[str, list[Tensor]] = {name: [] for name in runs.metrics}
    per_batch = {name: len(counts) != len(runs.keys) for name, counts in runs.counts.items()}
    with (
        evaluating(runs.model),
        torch.inference_mode(),
        Bar("judging one alpha a layer", runs.length(), runs.progress) as bar,
    ):
        for batch in runs.batches():
            batch_keys = example_keys(batch)
            fold = split.of_rows(batch_keys)
            for row in range(split.count):
                part = select(batch, fold == row)
                if part is not None:
                    with _replaced(runs.layers, fitted[row]):
                        output, target = runs.forward(runs.model, part)
                    keys.append(batch_keys[fold == row])
                    for name, metric in runs.metrics.items():
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
