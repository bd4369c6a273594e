"""Results made by hand, with everything that a result can hold."""

from __future__ import annotations

import math

from betternorm_lab.results import Figure, Outcome, Result, Series, Table, Verdict
from betternorm_lab.store import Row

ALPHAS = (0.0, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3)


def results() -> list[Result]:
    return [alpha(), ghost_size(), decay()]


def alpha() -> Result:
    """Two metrics by alpha, and series that were measured at different alphas."""
    wide = [70.0 + 4 * math.exp(-((a - 0.05) ** 2) / 0.004) for a in ALPHAS]
    narrow = [66.0 + 2 * math.exp(-((a - 0.02) ** 2) / 0.002) for a in ALPHAS]
    return Result(
        name="alpha",
        title="A weight for the example at inference",
        place="Figure 1, section 3.1",
        scale="smoke",
        command="betternorm reproduce alpha --scale smoke",
        tables=[
            Table(
                "At the best alpha",
                ["network", "alpha", "top-1 %", "gain"],
                [["wide", 0.03, "73.6 ± 0.4 (n = 3)", 3.62], ["narrow <small>", 0.01, "67.9 ± 0.2 (n = 3)", None]],
            )
        ],
        figures=[
            Figure(
                "Accuracy by alpha",
                "alpha",
                "top-1 %",
                [
                    Series("wide", ALPHAS, wide, [y - 0.5 for y in wide], [y + 0.5 for y in wide]),
                    Series("narrow", ALPHAS[::2], narrow[::2]),
                ],
                log_x=True,
            ),
            Figure(
                "Loss by alpha",
                "alpha",
                "cross-entropy",
                [Series("wide", ALPHAS, [1.4 - y / 100 for y in wide])],
                levels={"as published": 0.68},
                log_x=True,
            ),
        ],
        verdicts=[
            Verdict("A small alpha above 0 is best.", Outcome.REPLICATED, "+3.6 [3.1, 4.1], P = 0.004, n = 3"),
            Verdict("The best alpha differs between metrics.", Outcome.INCONCLUSIVE, "0.03 and 0.03"),
        ],
        rows=rows("alpha", 3),
        notes="The network is as trained; only inference changes.\n\nA second paragraph, with <angles> & signs.",
    )


def ghost_size() -> Result:
    """Curves on a logarithmic axis with intervals, and a gap where nothing was measured."""
    sizes = (2, 4, 8, 16, 32, 64, 128)
    top1 = (38.0, 41.8, 44.8, 43.9, 42.0, 40.9, 39.6)
    tuned = (44.0, 45.7, 46.4, 45.0, math.nan, 41.2, 40.2)
    return Result(
        name="ghost-size",
        title="Accuracy against ghost size",
        place="Figure 3, section 3.2",
        scale="smoke",
        command="betternorm reproduce ghost-size --scale smoke",
        tables=[Table("By ghost size", ["ghost size", "top-1 %"], list(zip(sizes, top1, strict=True)))],
        figures=[
            Figure(
                "Validation accuracy by ghost size",
                "ghost size",
                "top-1 %",
                [
                    Series("as trained", sizes, top1, [y - 0.8 for y in top1], [y + 0.9 for y in top1]),
                    Series("alpha tuned", sizes, tuned),
                ],
                log_x=True,
                levels={"batch norm": 39.6},
            )
        ],
        verdicts=[Verdict("Accuracy has one peak in the ghost size.", Outcome.REPLICATED, "peak at 8, n = 2")],
        rows=rows("ghost", 2),
    )


def decay() -> Result:
    """Bars far from zero and bars from zero."""
    names = ("off", "gamma and beta toward 0", "gamma toward 1, beta toward 0")
    return Result(
        name="decay",
        title="Decay on gamma and beta",
        place="Section 3.3",
        scale="smoke",
        command="betternorm reproduce decay --scale smoke",
        tables=[],
        figures=[
            Figure(
                "Accuracy by decay",
                "decay",
                "top-1 %",
                [
                    Series("residual", names, (76.1, 76.4, 76.5), (75.8, 76.2, 76.3), (76.4, 76.6, 76.7)),
                    Series("inception", names[:2], (71.0, 70.9), (70.6, 70.5), (71.4, 71.3)),
                ],
                kind="bar",
            ),
            Figure("Gain by decay", "decay", "points", [Series("gain", names, (0.0, 0.3, -0.13))], kind="bar"),
        ],
        verdicts=[Verdict("Decay does not help Inception.", Outcome.OPPOSITE, "-0.1 [-0.5, 0.3], n = 10")],
        rows=[],
    )


def rows(kind: str, count: int) -> list[Row]:
    return [
        Row(
            key=f"{kind}{seed:04}",
            kind="training",
            status="done",
            config={"seed": seed, "norm": "ghost", "norm_options": [["ghost_size", 8]], "epochs": 60},
            result={"validation_top1": 0.9 + seed / 100, "history": [{"loss": 1.5}, {"loss": 0.5}]},
            provenance={
                "seed": seed,
                "versions": {"betternorm": "0.1.0", "torch": "2.13.0"},
                "commit": "0123456789abcdef0123456789abcdef01234567",
                "machine": {"processor": "a slow core", "cores": 2, "threads": 1, "gpus": []},
                "duration": 75.0 + seed,
                "command": ["/usr/bin/betternorm", "reproduce", kind],
            },
        )
        for seed in range(count)
    ]
