"""What `betternorm.diagnose` returns: findings with their cost and their fix, printed as a table or saved as JSON."""

from __future__ import annotations

import json
import os
import textwrap
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from betternorm.display.tables import table
from betternorm.weighing.evidence import Gain

# Every cause that a finding can have, in the order in which findings are listed: state, batches, then by cost.
STATE = ("non_finite", "train_mode", "partly_frozen", "rank_skew")
BATCHES = ("sorted_batches", "leftover_batch", "small_batches")
MEASURED = ("lagging_averages", "mismatched_averages", "shifted_data", "dead_channels")
NOTES = ("overconfident",)
CAUSES = (*STATE, *BATCHES, *MEASURED, *NOTES)


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        cause: one of the fixed names in ``CAUSES``.
        why: what was observed, in a sentence.
        layers: the names of the norm layers concerned.
        cost: by "top1" and "loss" (the cross-entropy after temperature scaling), the metric now, without the fault, and
            a 99 % interval for the difference. Empty where the cost cannot be measured without training again.
        fix: the line to run. Its names are the arguments of `diagnose`.
        gain: with ``try_fixes``, what that line gained on a copy, on examples that it did not use, and 99 % intervals.
    """

    cause: str
    why: str
    layers: tuple[str, ...]
    fix: str
    cost: dict[str, Gain] = field(default_factory=dict)
    gain: dict[str, Gain] = field(default_factory=dict)

    @property
    def is_note(self) -> bool:
        """Whether this is a remark about the model rather than a fault of its norm layers."""
        return self.cause in NOTES


@dataclass(frozen=True)
class Diagnosis:
    """What `betternorm.diagnose` found.

    Attributes:
        findings: state first, then batches, then the others by cost; notes last.
        measured: by setting ("evaluation mode", "batch statistics, 32 per batch", ...), top-1 and loss.
        distances: by norm layer, how far its moving averages are from the statistics of the data, in standard
            deviations, as a mean over its channels.
        examples: how many examples of ``loader`` were used.
        passes: how many forward passes over them it took.
    """

    findings: tuple[Finding, ...]
    measured: dict[str, dict[str, float]]
    distances: dict[str, float]
    examples: int
    passes: int

    @property
    def is_healthy(self) -> bool:
        """Whether there is no finding, apart from notes."""
        return all(finding.is_note for finding in self.findings)

    def __str__(self) -> str:
        rows = [[name, f"{row['top1']:.1%}", f"{row['loss']:.3f}"] for name, row in self.measured.items()]
        parts = [table([f"{self.examples} examples", "top-1", "loss (scaled)"], rows)]
        if self.findings:
            tried = any(finding.gain for finding in self.findings)
            parts.append(
                table(
                    ["cause", "layers", "costs: top-1", "loss", *(["fix gains: top-1", "loss"] if tried else [])],
                    [
                        [f.cause, len(f.layers) or "", *_cells(f.cost), *(_cells(f.gain) if tried else [])]
                        for f in self.findings
                    ],
                )
            )
        for finding in self.findings:
            about = f"{finding.cause}{' (a note)' if finding.is_note else ''}: {finding.why}"
            parts.append(f"{textwrap.fill(about, 100)}\n    {finding.fix}")
        if self.is_healthy:
            parts.append("The norm layers are fine. If evaluation is worse than training, the cause is elsewhere.")
        return "\n\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, strings, lists, and dicts, as `save` writes them."""
        findings = [asdict(f) | {"cost": _numbers(f.cost), "gain": _numbers(f.gain)} for f in self.findings]
        return asdict(self) | {"findings": findings, "is_healthy": self.is_healthy}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")


def _numbers(gains: dict[str, Gain]) -> dict[str, dict[str, Any]]:
    return {name: asdict(gain) | {"difference": gain.difference} for name, gain in gains.items()}


def _cells(change: dict[str, Gain]) -> list[str]:
    """How much better each metric is after the change, with its interval."""
    if not change:
        return ["", ""]
    top1, loss = change["top1"], change["loss"]
    return [
        f"{100 * top1.difference:.1f} points [{100 * top1.low:.1f}, {100 * top1.high:.1f}]",
        f"{-loss.difference:.3f} [{-loss.high:.3f}, {-loss.low:.3f}]",
    ]
