"""The index of Round 3: primary claims with their verdicts, and which experiments have been run."""

from __future__ import annotations

from types import ModuleType

from betternorm_lab.evidence import all_four, imagenet_alpha, small_batches
from betternorm_lab.evidence.analysis import Claim, verdicts
from betternorm_lab.evidence.pages import PLACES, RUN, table
from betternorm_lab.evidence.runs import Places

EXPERIMENTS: dict[str, ModuleType] = {module.NAME: module for module in (imagenet_alpha, small_batches, all_four)}
TITLES = {
    imagenet_alpha.NAME: "alpha on MobileNetV2 pretrained on ImageNet",
    small_batches.NAME: "alpha and `calibrate` for models trained with 2 to 16 examples per batch",
    all_four.NAME: "all four techniques, batch norm, and ghost batch norm alone",
}
NOT_IMPLEMENTED = (
    Claim("P11", "ghost batch norm is better than the best common regularizer", ""),
    Claim("P12", "ghost batch norm with the best common regularizer is better than that regularizer alone", ""),
)


def all_claims(places: Places) -> list[Claim]:
    return [*(claim for module in EXPERIMENTS.values() for claim in module.claims(places)), *NOT_IMPLEMENTED]


def write_pages(places: Places) -> None:
    """Every page from the committed rows; an experiment without enough rows has no page."""
    for name, module in EXPERIMENTS.items():
        if module.ready(places):
            (places.out / f"{name}.md").write_text(module.page(places))
    (places.out / "index.md").write_text(page(places))


def page(places: Places) -> str:
    claims = all_claims(places)
    terms = verdicts(claims)
    rows = []
    for claim in claims:
        e, (p, term) = claim.estimate, terms[claim.number]
        digits = 2 if claim.metric.startswith("top") else 4
        sample = "" if e is None else (f"{e.seeds} seeds x {e.images:,}" if e.seeds else f"{e.images:,} images")
        measured = ("", "", "") if e is None else (e.text(digits), f"{e.detectable:.{digits}f}", f"{p:.2g}")
        rows.append([claim.number, claim.text, claim.paper, measured[0], sample, *measured[1:], f"**{term}**"])
    runs = [
        [
            f"[{name}]({name}.md)" if module.ready(places) else name,
            TITLES[name],
            status(places, module),
            f"`{RUN} {name} {PLACES}`",
        ]
        for name, module in EXPERIMENTS.items()
    ]
    headers = ["", "claim", "paper", "ours [95 %]", "sample", "detectable", "P (Holm)", "verdict"]
    return PAGE.format(
        claims=table(headers, rows, 3), runs=table(["experiment", "question", "status", "command"], runs, 4), run=RUN
    )


def status(places: Places, module: ModuleType) -> str:
    runs = module.finished(places)
    if not module.ready(places):
        return "not run" if not runs else "incomplete"
    if module is imagenet_alpha:
        count = len(runs[0]["curve"])
        return (
            "complete"
            if count == len(imagenet_alpha.settings())
            else f"{count} of {len(imagenet_alpha.settings())} settings"
        )
    return ", ".join(f"{arm}: {len(rows)}" for arm, rows in sorted(runs.items())) + " seeds"


PAGE = """# Evidence: Round 3

Twelve primary claims, [declared](../protocol.md#round-3) before their data was evaluated, with Holm's correction over
all twelve.

{claims}
*Ours*: points of top-1 (P2: nats), with intervals for new seeds and new images. *Detectable*: the minimum detectable
effect at 80 % power. *Replicated*: significant in the claim's direction; *equivalent*: the interval lies within
±0.5 points or ±0.02 nats.

## Experiments

{runs}
Each command resumes where it stopped; `--plan` lists what is left, `--select` tries the candidates on validation data.
A run that reads a test set refuses to start from uncommitted code. `{run} pages` writes
these pages from the rows.
Not implemented and not run: ghost batches against common regularizers (P11, P12), and fine-tuning.
"""
