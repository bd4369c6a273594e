"""A search for the ghost size with the best validation score (section 3.2)."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from betternorm.conversion.convert import GHOST_SIZE
from betternorm.display.progress import Bar
from betternorm.display.tables import table


def tune_ghost_size(
    train: Callable[[int], float | Iterable[float]],
    batch_size: int,
    *,
    ghost_sizes: Iterable[int] | None = None,
    patience: int = 2,
    grace: int = 2,
    progress: bool | None = None,
) -> GhostSearch:
    """Find the ghost size with the best score, given a function that trains a model.

    In the paper the score has a single maximum over the ghost size (section 3.2). The search starts at the usual size,
    proceeds in both directions, and abandons a direction after ``patience`` sizes in a row below the best.

    Args:
        train: called with a ghost size; trains a new model and returns its score on validation data, higher is better.
            Or yields a score after each epoch, of which the last one counts; sizes whose score is below the median of
            earlier sizes at the same epoch are then stopped early.
        batch_size: the number of examples that one process normalizes together. It is among the sizes tried, as plain
            batch norm.
        ghost_sizes: the sizes to try. Default: powers of two from 2, and the batch size.
        patience: how many sizes in a row may be below the best before a direction is abandoned.
        grace: the number of epochs before a size can be stopped.
        progress: show a bar; None shows it on a terminal.

    Examples::

        >>> def train(ghost_size):
        ...     for epoch in range(5):
        ...         yield 0.7 + 0.01 * epoch - 0.05 * abs(math.log2(ghost_size / 8))
        >>> tune_ghost_size(train, batch_size=64).ghost_size
        8
    """
    start, usual = usual_ghost_sizes(batch_size)
    sizes = sorted(set(usual if ghost_sizes is None else ghost_sizes))
    invalid = [size for size in sizes if not isinstance(size, int) or not 1 <= size <= batch_size]
    if invalid or not sizes:
        raise ValueError(f"ghost_sizes has {invalid or 'no size'}; use sizes from 1 to batch_size={batch_size}")
    if patience < 1 or grace < 1:
        raise ValueError(f"patience is {patience} and grace is {grace}; both must be 1 or more")

    first = min(range(len(sizes)), key=lambda i: abs(math.log2(sizes[i] / start)))
    search = GhostSearch(batch_size)
    misses = {-1: 0, +1: 0}
    with Bar("ghost sizes", len(sizes), progress) as bar:
        for position in sorted(range(len(sizes)), key=lambda i: abs(i - first)):
            size, side = sizes[position], int(math.copysign(1, position - first))
            if position != first and misses[side] >= patience:
                search.trials.append(GhostSizeTrial(size, None, 0, "skipped"))
            else:
                before = search.score
                trial = _run(train, size, [t for t in search.trials if t.outcome == "finished"], grace)
                search.trials.append(trial)
                better = before is None or (trial.outcome == "finished" and _rank(trial.score) >= before)
                misses[side] = 0 if better else misses[side] + 1
            bar.advance(note=f"best so far {search.ghost_size}" if search.score is not None else "")
    if search.score is None:
        raise ValueError("train gave no finite score for any ghost size")
    search.trials.sort(key=lambda trial: trial.ghost_size)
    return search


def usual_ghost_sizes(batch_size: int) -> tuple[int, list[int]]:
    """The ghost size to begin with at this batch size, and the sizes worth trying."""
    check_batch_size(batch_size)
    if batch_size < 4:
        raise ValueError(f"batch_size is {batch_size}; ghost batch norm is for batches of 4 and more")
    powers = [2**k for k in range(1, batch_size.bit_length()) if 2**k < batch_size]
    # The default is the best one in the paper's table of ghost sizes (section 4.4).
    start = min(GHOST_SIZE, max([4] + [size for size in powers if size <= batch_size // 2]))
    return start, [*powers, batch_size]


def check_batch_size(batch_size: Any, name: str = "batch_size") -> None:
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"{name} is {batch_size!r}; it must be a whole number of 1 or more")


@dataclass(frozen=True)
class GhostSizeTrial:
    """One ghost size in a :class:`GhostSearch`: its score, and whether it was finished, stopped or skipped."""

    ghost_size: int
    score: float | None
    epochs: int
    outcome: str
    history: tuple[float, ...] = ()


@dataclass
class GhostSearch:
    """The result of :func:`tune_ghost_size`: ``ghost_size``, ``score``, and a trial for every size."""

    batch_size: int
    trials: list[GhostSizeTrial] = field(default_factory=list)

    @property
    def best(self) -> GhostSizeTrial | None:
        finished = [trial for trial in self.trials if trial.outcome == "finished" and math.isfinite(_rank(trial.score))]
        return max(finished, key=lambda trial: _rank(trial.score), default=None)

    @property
    def ghost_size(self) -> int | None:
        return self.best.ghost_size if self.best else None

    @property
    def score(self) -> float | None:
        return self.best.score if self.best else None

    def __str__(self) -> str:
        rows = [(t.ghost_size, t.score, t.epochs, t.outcome + " (best)" * (t == self.best)) for t in self.trials]
        return table(["ghost size", "score", "epochs", "outcome"], rows)


def _run(
    train: Callable[[int], float | Iterable[float]], size: int, finished: list[GhostSizeTrial], grace: int
) -> GhostSizeTrial:
    scores: list[float] = []
    with contextlib.closing(_scores(train(size))) as running:
        for score in running:
            scores.append(score)
            epoch = len(scores)
            # Their last epoch is excluded: stopping there saves nothing.
            others = [trial.history[epoch - 1] for trial in finished if len(trial.history) > epoch]
            if epoch >= grace and len(others) >= 2 and max(map(_rank, scores)) < statistics.median_low(others):
                return GhostSizeTrial(size, score, epoch, "stopped early", tuple(scores))
    if not scores:
        raise ValueError(f"train({size}) yielded no score")
    return GhostSizeTrial(size, scores[-1], len(scores), "finished", tuple(scores))


def _scores(result: float | Iterable[float]) -> Generator[float, None, None]:
    if isinstance(result, Generator):
        with contextlib.closing(result):  # stops the training function and runs its clean-up
            yield from map(float, result)
    elif isinstance(result, Iterable) and not hasattr(result, "item"):
        yield from map(float, result)
    else:
        yield float(result)  # type: ignore[arg-type]


def _rank(score: float | None) -> float:
    """A score for comparisons: diverged training ranks last."""
    return -math.inf if score is None or math.isnan(score) else score
