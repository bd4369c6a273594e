"""Paired differences with intervals that hold for new seeds and new images (protocol.md, Round 3)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from betternorm_lab.evidence.rows import Array
from betternorm_lab.stats import CONFIDENCE, POWER, holm

MARGIN = {"top-1": 0.5, "top-5": 0.5, "cross-entropy": 0.02, "cross-entropy after temperature": 0.02}


@dataclass(frozen=True)
class Estimate:
    """A mean difference with its standard error; the interval, P value and detectable effect follow from them."""

    mean: float
    error: float
    degrees: float
    seeds: int
    images: int

    @property
    def interval(self) -> tuple[float, float]:
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, self.degrees)) * self.error
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float:
        return 2 * float(stats.t.sf(abs(self.mean) / self.error, self.degrees)) if self.error else float(self.mean == 0)

    @property
    def detectable(self) -> float:
        t = stats.t(self.degrees)
        return float(t.ppf((1 + CONFIDENCE) / 2) + t.ppf(POWER)) * self.error

    def text(self, places: int = 2) -> str:
        low, high = self.interval
        return f"{self.mean:+.{places}f} [{low:.{places}f}, {high:.{places}f}]"


def over_images(gains: Array) -> Estimate:
    """Of one model: the mean over images."""
    values = np.asarray(gains, dtype=np.float64)
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(len(values)), math.inf, 0, len(values))


def over_seeds_and_images(differences: Array, pooled: tuple[float, float] | None = None) -> Estimate:
    """Of several models: ``differences`` is (seeds, images).

    ``pooled`` replaces the variance between seeds (of the mean) and its degrees of freedom by those of a larger table.
    """
    d = np.asarray(differences, dtype=np.float64)
    seeds, images = d.shape
    by_seed, by_image, mean = d.mean(1), d.mean(0), float(d.mean())
    between_images = float(by_image.var(ddof=1)) / images
    if seeds < 2:
        return Estimate(mean, math.sqrt(between_images), math.inf, seeds, images)
    between_seeds, degrees = pooled or (float(by_seed.var(ddof=1)) / seeds, seeds - 1.0)
    residuals = d - by_seed[:, None] - by_image + mean
    residual = float((residuals**2).sum()) / ((seeds - 1) * (images - 1)) / (seeds * images)
    variance = max(between_seeds + between_images - residual, between_seeds, between_images)
    if not variance:
        return Estimate(mean, 0.0, degrees, seeds, images)
    freedom = variance**2 / (between_seeds**2 / degrees + between_images**2 / (images - 1))
    return Estimate(mean, math.sqrt(variance), freedom, seeds, images)


def pooled_variance(arms: Mapping[str, Sequence[float]]) -> tuple[float, float]:
    """Variance of the difference of two arms' means from a two-way table (arms x seeds), and its degrees of freedom."""
    table = np.asarray(list(arms.values()), dtype=np.float64)
    count, seeds = table.shape
    residuals = table - table.mean(1, keepdims=True) - table.mean(0) + table.mean()
    degrees = (count - 1) * (seeds - 1)
    return 2 * float((residuals**2).sum()) / degrees / seeds, float(degrees)


@dataclass(frozen=True)
class Claim:
    """A primary claim of protocol.md; ``estimate`` is None where its experiment has not been run."""

    number: str
    text: str
    paper: str
    estimate: Estimate | None = None
    metric: str = "top-1"
    direction: int = 1  # the sign of the claimed difference


def verdicts(claims: Sequence[Claim]) -> dict[str, tuple[float, str]]:
    """Holm's P value over all claims, and the protocol's term. A claim that was not tested counts as P = 1."""
    corrected = holm([1.0 if claim.estimate is None else claim.estimate.p for claim in claims])
    return {
        claim.number: (p, "not tested")
        if claim.estimate is None
        else (p, term(claim.estimate, p, claim.direction, MARGIN[claim.metric]))
        for claim, p in zip(claims, corrected, strict=True)
    }


def term(estimate: Estimate, p: float, direction: int, margin: float) -> str:
    """``p`` is corrected."""
    low, high = estimate.interval
    inside = -margin < low and high < margin
    if p < 1 - CONFIDENCE:
        if inside:
            return "significant but negligible"
        return "replicated" if estimate.mean * direction > 0 else "opposite effect"
    return "equivalent" if inside else "inconclusive"
