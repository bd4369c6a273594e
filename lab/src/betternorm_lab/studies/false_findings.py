"""False positives of `tune_alpha`: simulated data without any gain, for each objective and kind of data.

    python -m betternorm_lab.studies.false_findings --out docs/results

A stand-in network gives, for every example and alpha, an answer that is no better at any alpha than at alpha = 0 in
truth, and differs by chance. Only gains count as findings, so 2.5 % is nominal. Writes false-findings.md.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from betternorm.conversion.convert import convert
from betternorm.weighing.metrics import METRICS, Metric
from betternorm.weighing.search import tune_alpha

RUNS = 1000
MOST = 0.05
CLASSES = 8

Answer = Callable[[float], Tensor]  # of alpha, for all examples
loss = Metric("loss", lambda output, target: output, higher_is_better=False)


def linear(count: int, random: torch.Generator) -> Answer:
    """The effect on an example grows with alpha."""
    slope = torch.randn(count, generator=random)
    return lambda alpha: slope * alpha


def smooth(count: int, random: torch.Generator) -> Answer:
    """The effect on an example is a smooth random function of alpha."""
    waves = torch.randn(6, count, generator=random)
    return lambda alpha: sum(waves[k] * math.sin((k + 1) * math.pi / 2 * alpha) / (k + 1) for k in range(6))  # type: ignore[return-value]


def independent(count: int, random: torch.Generator) -> Answer:
    """The effect is independent for each alpha."""
    seed = int(torch.randint(2**31, (1,), generator=random))

    def answer(alpha: float) -> Tensor:
        if alpha == 0:
            return torch.zeros(count)
        return torch.randn(count, generator=torch.Generator().manual_seed(seed + round(alpha * 1e6)))

    return answer


def skewed(side: int) -> Callable[[int, torch.Generator], Answer]:
    """A few examples lose (or gain) much, and most gain (or lose) a little."""

    def make(count: int, random: torch.Generator) -> Answer:
        slope = side * (torch.randn(count, generator=random).exp() - math.exp(0.5))
        return lambda alpha: slope * alpha

    return make


def copies(times: int) -> Callable[[int, torch.Generator], Answer]:
    def make(count: int, random: torch.Generator) -> Answer:
        alone = linear(count // times, random)
        return lambda alpha: alone(alpha).repeat(times)

    return make


def labels_of(count: int) -> Tensor:
    return torch.arange(count) % CLASSES


def logits(turns: float) -> Callable[[int, torch.Generator], Answer]:
    """A classifier whose logits contain the label and noise that rotates with alpha, of one distribution."""

    def make(count: int, random: torch.Generator) -> Answer:
        first, second = torch.randn(2, count, CLASSES, generator=random)
        label = 1.5 * nn.functional.one_hot(labels_of(count), CLASSES)
        return lambda alpha: 2 * (label + first * math.cos(turns * alpha) + second * math.sin(turns * alpha))

    return make


# Objective, what varies, examples, and how they are made.
CASES: list[tuple[Metric | str, str, int, Callable[[int, torch.Generator], Answer]]] = [
    *((loss, "linear in alpha", n, linear) for n in (2, 10, 50, 200)),
    (loss, "smooth in alpha", 1000, smooth),
    (loss, "independent noise for each alpha", 50, independent),
    (loss, "independent noise for each alpha", 1000, independent),
    (loss, "every example twice", 200, copies(2)),
    (loss, "every example 5 times", 500, copies(5)),
    (loss, "every example 20 times", 1000, copies(20)),
    (loss, "skewed: few lose much", 50, skewed(1)),
    (loss, "skewed: few lose much", 200, skewed(1)),
    (loss, "skewed: few gain much", 50, skewed(-1)),
    *(
        (name, "logits whose noise turns with alpha", n, logits(turns))
        for name in METRICS
        for n, turns in ((100, 3.0), (500, 0.3))
    ),
]


def run(objective: Metric | str, examples: int, make: Callable[[int, torch.Generator], Answer], seed: int) -> bool:
    """Whether one search on data without any gain reports a significant one."""
    answer = make(examples, torch.Generator().manual_seed(seed))
    model = convert(nn.Sequential(nn.BatchNorm1d(1)), "weighed").eval()
    different = len(torch.unique(answer(0.7), dim=0))
    rows = torch.arange(examples)[:, None] % different  # copies look the same
    labels = labels_of(examples) if isinstance(objective, str) else torch.zeros(examples, dtype=torch.long)

    def forward(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
        return answer(model[0].alpha), batch[1]

    data = [(rows.float(), labels)]
    found = tune_alpha(
        model, data, (), objective, forward=forward, seed=seed, progress=False, require_significant=False
    )
    return found.significant


def interval(hits: int, runs: int) -> tuple[float, float]:
    """Wilson's 95 % interval."""
    z, share = 1.96, hits / runs
    middle = (share + z * z / (2 * runs)) / (1 + z * z / runs)
    half = z * math.sqrt(share * (1 - share) / runs + z * z / (4 * runs * runs)) / (1 + z * z / runs)
    return middle - half, middle + half


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--runs", type=int, default=RUNS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for objective, what, examples, make in CASES:
        name = objective if isinstance(objective, str) else objective.name
        hits = sum(run(objective, examples, make, seed) for seed in range(arguments.runs))
        low, high = interval(hits, arguments.runs)
        rows.append(f"| {name} | {what} | {examples} | {hits / arguments.runs:.1%} | {low:.1%} to {high:.1%} |")
        print(rows[-1], flush=True)
    (arguments.out / "false-findings.md").write_text(page(rows, arguments.runs))


def page(rows: list[str], runs: int) -> str:
    return PAGE.format(runs=runs, rows="\n".join(rows))


PAGE = """\
# False positives of `tune_alpha`

{runs} simulated data sets of each kind, on none of which any alpha is better than 0. Only gains count as positive, so
the nominal rate is 2.5 %; the limit is 5 %.

    python -m betternorm_lab.studies.false_findings

| objective | effect of alpha | examples | false positives | 95 % interval |
| --- | --- | ---: | ---: | --- |
{rows}

How the rates are controlled:

- With fewer than 50 distinct examples no gain is significant.
- Copies of an example are resampled together.
- The interval is corrected for the number of alphas tried. That makes it wide if the effects of alphas are independent;
  for a real model, whose outputs change smoothly with alpha, it is hardly wider than for a single comparison.
- It is the wider of two intervals: random sign flips are exact if few predictions change, and the bootstrap of
  Student's t handles skewed losses.
"""


if __name__ == "__main__":
    main()
