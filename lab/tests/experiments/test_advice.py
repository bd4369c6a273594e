"""What the library recommends, against the committed rows at medium scale."""

from __future__ import annotations

from pathlib import Path

import pytest
from betternorm_lab import stats
from betternorm_lab.experiments.saved_rows import read_table, table_of

from betternorm.advice import advise
from betternorm.advice import evidence as ev
from betternorm.advice.evidence import MEASURED, Measured

ROWS = read_table(Path(__file__).parents[3] / "docs" / "results" / table_of("medium"))


def top1(keys: tuple[str, ...], alpha: bool = True) -> list[float]:
    return [100 * ROWS[key]["test_top1_own" if alpha else "test_top1"] for key in keys]


@pytest.mark.parametrize("name", MEASURED)
def test_every_number_of_the_advice_follows_from_the_rows(name: str) -> None:
    measured: Measured = MEASURED[name]
    first, second = measured.rows
    test = stats.paired if measured.paired else stats.welch
    result = test(top1(first), top1(second, alpha=not measured.paired))
    numbers = (measured.difference, measured.low, measured.high)
    assert numbers == pytest.approx((result.difference, *result.interval), abs=0.006)


# Every norm that was measured in a setting, by the name of its conversion.
SETTINGS = {
    (2, 2, True): {"batch_group": ev._TWO_BATCH_GROUP, "group": ev._TWO_GROUP, "weighed": ev._TWO_BATCH_NORM},
    (2, 128, True): {
        "batch_group": ev._TWO_OF_128_BATCH_GROUP,
        "group": ev._GROUP,
        "weighed": ev._TWO_OF_128_BATCH_NORM,
    },
    (4, 128, True): {"weighed": ev._FOUR_OF_128, "group": ev._GROUP},
    (16, 16, True): {"weighed": ev._16_BATCH_NORM, "ghost": ev._16_ALL_FOUR},
    (128, 128, True): {"weighed": ev._BATCH_NORM, "ghost": ev._GHOST_8, "group": ev._GROUP},
    (16, 16, False): {"weighed": ev._NOT_IID_BATCH_NORM, "batch_group": ev._NOT_IID_BATCH_GROUP},
    (1, 128, True): {"group": ev._GROUP},
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_no_norm_that_was_measured_is_better_than_the_recommended_one(setting: tuple[int, int, bool]) -> None:
    batch_size, step_size, iid = setting
    advice = advise(batch_size, step_size, iid=iid)
    recommended = SETTINGS[setting][advice.to]
    for other, keys in SETTINGS[setting].items():
        if other != advice.to:
            assert stats.welch(top1(recommended), top1(keys)).interval[1] > 0, other


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 8, 16, 128])
@pytest.mark.parametrize("step_size", [None, 128])
@pytest.mark.parametrize("iid", [True, False])
def test_what_the_rows_contradict_is_not_recommended(batch_size: int, step_size: int | None, iid: bool) -> None:
    advice = advise(batch_size, step_size, iid=iid)
    for line in advice.lines:
        if line.agreement == "disagrees" and line.method == "decay on gamma and beta":
            assert line.what.startswith("no decay")
        elif line.agreement == "disagrees":
            assert advice.to == "weighed"


def test_the_page_on_gradient_accumulation_quotes_the_rows() -> None:
    page = Path(__file__).parents[3] / "docs" / "how-to" / "small-batches-and-gradient-accumulation.md"
    rows = {"2 examples": ev._TWO_OF_128_BATCH_NORM, "4 examples": ev._FOUR_OF_128, "128 examples": ev._BATCH_NORM}
    lines = [line for line in page.read_text().splitlines() if line.startswith(tuple(f"| {name}" for name in rows))]
    assert len(lines) == 3
    for line, keys in zip(lines, rows.values(), strict=True):
        quoted = [float(cell.strip(" *")) for cell in line.split("|")[2:4]]
        means = [sum(top1(keys, alpha)) / 3 for alpha in (False, True)]
        assert quoted == pytest.approx(means, abs=0.051)
