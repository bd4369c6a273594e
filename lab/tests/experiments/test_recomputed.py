"""Every number on the pages of the experiments, recomputed from the tables of trials without the code of the lab.

Rows are grouped by their configuration without the seed. A measured cell ("mean ± std (n = ...)") must be that of one
of these groups, and a claim's difference, interval, P value and minimum detectable effect must follow from two of them.
The cells of the main tables are also recomputed from their labels.
"""

import csv
import gzip
import itertools
import json
import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from scipy import special

PAGES = Path(__file__).parents[3] / "docs" / "results"
FOLDERS = {"small": PAGES, "medium": PAGES / "medium"}
SPLITS = ("validation", "test")
METRICS = ("top1", "top5", "cross_entropy", "calibrated_cross_entropy")
NUMBER = r"[+-]?(?:\d+\.\d+(?:e[+-]?\d+)?|\d+(?:e[+-]?\d+)?|inf|nan)"
SUMMARY = rf"({NUMBER}) ± ({NUMBER}) \(n = (\d+)\)"
CLAIM = re.compile(
    rf"{SUMMARY} against {SUMMARY}: difference ({NUMBER})(?: \[({NUMBER}), ({NUMBER})\])?, P = ({NUMBER}), "
    rf"(Welch's t-test|paired t-test|exact test, because all runs agree); minimum detectable effect ({NUMBER}|infinite)"
)
FEW_SEEDS = 5
CONFIGURATION = (
    *("dataset", "image_size", "classes", "train_examples", "augment", "classes_per_batch", "split", "limit"),
    *("network", "weights", "source", "finetune_from", "width", "blocks", "stem_stride", "norm", "norm_options"),
    *("averages_over", "batch_size", "accumulate", "epochs", "steps_per_epoch", "learning_rate", "momentum"),
    *("weight_decay", "norm_decay", "gamma_target", "label_smoothing", "precision", "alpha_grid", "tune_alpha"),
    *("values", "attempts", "test"),
)


def parsed(text):
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return {"True": True, "False": False, "": None}.get(text, text)


def rows_of(scale):
    csv.field_size_limit(10**9)
    with gzip.open(PAGES / f"trials-{scale}.csv.gz", "rt", newline="") as file:
        return [{name: parsed(text) for name, text in line.items() if text != ""} for line in csv.DictReader(file)]


def readings_of(row):
    """Every number of a row, in percent where it is a proportion."""
    numbers = {name: value for name, value in row.items() if isinstance(value, (int, float)) and name != "seed"}
    for split, metric in itertools.product(SPLITS, METRICS):
        table = row.get("alpha_table" if split == "validation" else "test_table")
        if f"{split}_{metric}_own" not in numbers and table and f"alpha_{metric}" in row:
            own = [line[metric] for line in table if line["alpha"] == row[f"alpha_{metric}"] and metric in line]
            numbers |= {f"{split}_{metric}_own": own[0]} if own else {}
    for line in row.get("alpha_table") or ():
        numbers[f"alpha={line['alpha']}"] = line["top1"]
    for name in ("training", "inference", "weighed"):
        if f"{name}_minimum" in row:
            ends = (-row[f"{name}_minimum"], row[f"{name}_maximum"])
            numbers[f"{name}_reach"] = max(ends) / row["bound"]
    if "cross_entropy_test" in row:
        numbers["relative"] = 100 * (row["cross_entropy_test"] / row["cross_entropy_augmented"] - 1)
    share = re.compile(r"(?<!alpha_)top[15]|^alpha=")
    scaled = {name: 100 * value if share.search(name) else value for name, value in numbers.items()}
    for split, metric in itertools.product(SPLITS, METRICS):
        if {f"{split}_{metric}", f"{split}_{metric}_own"} <= {*scaled}:
            scaled[f"{split}_{metric}_gain"] = scaled[f"{split}_{metric}_own"] - scaled[f"{split}_{metric}"]
    if {"evaluated_train_top1", "test_top1"} <= {*scaled}:
        scaled["overfit"] = scaled["evaluated_train_top1"] - scaled["test_top1"]
    return scaled


class Rows:
    """The rows of a scale: groups of configurations, and all their readings by the text of mean, std and n."""

    def __init__(self, scale):
        self.rows = rows_of(scale)
        self.groups = defaultdict(list)
        for row in self.rows:
            self.groups[row["kind"], json.dumps([row.get(name) for name in CONFIGURATION])].append(row)
        self.readings = [reading for group in self.groups.values() for reading in self._of_group(group)]
        self.readings += (self._differences() if scale == "medium" else []) + self._constants()
        self.by_text = defaultdict(list)
        for values in self.readings:
            for places in (2, 3, 4):
                self.by_text[summary_text(values, places)].append(values)

    @staticmethod
    def _of_group(group):
        by_seed = [readings_of(row) for row in sorted(group, key=lambda row: row["seed"])]
        for name in dict.fromkeys(name for one in by_seed for name in one):
            values = [one[name] for one in by_seed if name in one]
            yield values
            if len(values) > FEW_SEEDS:  # experiments share trials, and some have more seeds
                yield values[:FEW_SEEDS]

    def _differences(self):
        """Between two trainings with the same seeds: decay or ghost batch norm against their baseline."""
        trained = [
            {row["seed"]: 100 * row["test_top1"] for row in group if "test_top1" in row}
            for (kind, _), group in self.groups.items()
            if kind == "training"
        ]
        return [
            [one[seed] - other[seed] for seed in sorted({*one} & {*other})]
            for one, other in itertools.permutations(trained, 2)
            if len({*one} & {*other}) > 1
        ]

    def _constants(self):
        """What is compared with: 1/B, a bound, no change, and half of an error."""
        runs = {len(group) for group in self.groups.values()}
        constants = [[value] * n for value in (0.0, 1.0, *(1 / 2**k for k in range(1, 8))) for n in runs]
        top1 = [values for values in self.readings if values and min(values) > 0 and np.max(values) < 100]
        errors = [[100 - value for value in values] for values in top1]
        return constants + errors + [[value / 2 for value in values] for values in errors]


def summary_text(values, places):
    array = np.asarray(values, dtype=float)
    spread = f" ± {array.std(ddof=1):.{places}f}" if len(array) > 1 else ""
    return f"{array.mean():.{places}f}{spread} (n = {len(array)})"


def student(statistic, degrees):
    """Two-sided P value by the incomplete beta function."""
    return special.betainc(degrees / 2, 0.5, degrees / (degrees + statistic**2))


def agrees(first, second, paired, shown):
    """Whether the difference of two groups is the one that is shown: interval, P and minimum detectable effect."""
    difference, low, high, p, detectable = shown
    places = len(difference.partition(".")[2])
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if f"{a.mean() - b.mean():+.{places}f}" != difference or (paired and len(a) != len(b)):
        return False
    n = min(len(a), len(b))
    if paired:
        power_error = error = (a - b).std(ddof=1) / math.sqrt(n)
        power_degrees = degrees = n - 1
    else:
        parts = [one.var(ddof=1) / len(one) for one in (a, b)]
        error = math.sqrt(sum(parts))
        pooled = sum(one.var(ddof=1) * (len(one) - 1) for one in (a, b)) / (len(a) + len(b) - 2)
        power_error, power_degrees = math.sqrt(2 * pooled / n), 2 * n - 2
        weights = [part**2 / (len(one) - 1) for part, one in zip(parts, (a, b), strict=True)]
        degrees = error**4 / sum(weights) if error else 1
    if error == 0:
        return False
    half = special.stdtrit(degrees, 0.975) * error
    bounds = [a.mean() - b.mean() - half, a.mean() - b.mean() + half]
    if [f"{bound:.{places}f}" for bound in bounds] != [low, high]:
        return False
    critical = special.stdtrit(power_degrees, 0.975)
    shifts = np.linspace(0, 4 * critical, 4_001)
    shift = shifts[np.searchsorted(1 - special.nctdtr(power_degrees, shifts, critical), 0.8)]
    return close(p, student((a.mean() - b.mean()) / error, degrees)) and close(detectable, shift * power_error)


def close(text, value):
    """Equal to the digits that are shown, give or take one in the last of them."""
    return float(text) == pytest.approx(value, rel=6e-2 if len(text.strip("+-0.").replace(".", "")) < 3 else 6e-3)


@pytest.fixture(scope="module")
def rows():
    return {scale: Rows(scale) for scale in FOLDERS}


def pages(scale):
    return sorted(
        page
        for page in FOLDERS[scale].glob("*.md")
        if (FOLDERS[scale] / page.stem).is_dir() and page.stem != "protocol"
    )


EVERY = [pytest.param(scale, page, id=f"{scale}-{page.stem}") for scale in FOLDERS for page in pages(scale)]


@pytest.mark.parametrize(("scale", "page"), EVERY)
def test_every_measured_cell_is_the_mean_of_a_group_of_rows(scale, page, rows):
    text = page.read_text()
    summaries = {match[0] for match in re.finditer(SUMMARY, text)}
    missing = [one for one in summaries if one not in rows[scale].by_text]
    assert not missing
    assert summaries or page.stem == "alpha-pretrained"


@pytest.mark.parametrize(("scale", "page"), EVERY)
def test_every_claim_follows_from_two_groups_of_rows(scale, page, rows):
    known = rows[scale].by_text
    p_values, holm = [], []
    for line in page.read_text().splitlines():
        for match in CLAIM.finditer(line):
            first, second = (f"{match[k]} ± {match[k + 1]} (n = {match[k + 2]})" for k in (1, 4))
            if match[11].startswith("exact"):
                n = int(match[3]) + int(match[6])
                arrangements = {math.comb(n, int(match[3])), 2 ** int(match[3])}
                assert any(close(match[10], 2 / count) for count in arrangements) or float(match[10]) == 1, line
                continue
            pairs = itertools.product(unique(known[first]), unique(known[second]))
            shown = (match[7], match[8], match[9], match[10], match[12])
            assert any(agrees(a, b, match[11].startswith("paired"), shown) for a, b in pairs), line
            if corrected := re.search(rf"Holm's P = ({NUMBER})", line):
                p_values.append(float(match[10]))
                holm.append(float(corrected[1]))
    if len(holm) and "exact test" not in page.read_text():
        order, worst = np.argsort(p_values, kind="stable"), 0.0
        for rank, k in enumerate(order):
            worst = max(worst, min(1.0, (len(order) - rank) * p_values[k]))
            assert holm[k] == pytest.approx(worst, rel=0.02), page


def unique(arrays, most=60):
    return list({tuple(values): values for values in arrays}.values())[:most]


def table(page, title):
    """The rows of a table of a page as dictionaries."""
    part = page.read_text().split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")
    ]
    return [lines[0], *lines[2:]]


DATA = {
    "Flowers-102, 20 classes": {"dataset": "flowers102", "classes": 20, "width": 16},
    "Caltech-101, 20 classes": {"dataset": "caltech101", "classes": 20},
    "Flowers-102": {"dataset": "flowers102", "classes": None},
    "CIFAR-100, 10 classes": {"dataset": "cifar100", "classes": 10, "classes_per_batch": 2},
    "CIFAR-100, 10,000 images": {"dataset": "cifar100", "train_examples": 10_000, "augment": True},
    "CIFAR-100, 40,000 images": {"dataset": "cifar100", "train_examples": None},
}
PLAIN_NETWORK = ("resnet18", "post_resnet")


def selected(rows, wanted, kind="training"):
    return sorted(
        (row for row in rows if row["kind"] == kind and all(row.get(name) == value for name, value in wanted.items())),
        key=lambda row: row["seed"],
    )


def assert_cell(cell, values):
    expected = summary_text(values, 2) if len(values) else "not run"
    assert cell == expected


@pytest.mark.parametrize("scale", FOLDERS)
def test_the_table_of_ghost_sizes_follows_from_its_labels(scale, rows):
    (_, *headers), *lines = table(FOLDERS[scale] / "ghost-size.md", "Top-1 by ghost size")
    assert headers[1:3] == ["validation top-1, %", "test top-1, %"]
    for data, size, validation, test, loss, *_ in lines:
        task, _, own_rates = data.partition(", each at")
        wanted = DATA[task] | {"norm_decay": "none", "classes_per_batch": None}
        whole = size.endswith("(batch norm)")
        number = int(size.split()[0])
        wanted |= {"norm": "batch", "batch_size": number} if whole else {"norm": "ghost"}
        wanted |= (
            {}
            if whole
            else {
                "norm_options": [["ghost_size", number]],
                "batch_size": 32 if task == "Flowers-102, 20 classes" else 128,
            }
        )
        if scale == "medium":
            wanted["learning_rate"] = {128: 0.1, 8: 0.3, 2: 0.3}[number] if own_rates else 0.1
        found = [
            row for row in selected(rows[scale].rows, wanted) if row["network"] in PLAIN_NETWORK and row["epochs"] != 15
        ]
        found = [row for row in found if not (scale == "small" and row["seed"] > 4)]
        assert_cell(validation, [100 * row["validation_top1"] for row in found])
        assert_cell(test, [100 * row["test_top1"] for row in found])
        assert_cell(loss, [row["test_cross_entropy"] for row in found])


def test_the_table_of_decay_follows_from_its_labels(rows):
    _, *lines = table(FOLDERS["medium"] / "decay.md", "Top-1 by decay on gamma and beta")
    networks = {"residual network": "post_resnet", "without shortcuts": "post_plain"}
    decays = {
        "off": {"norm_decay": "none"},
        "toward 0": {"norm_decay": "all", "gamma_target": 0},
        "toward 1": {"norm_decay": "all", "gamma_target": 1},
        "toward 0, tuned": {"norm_decay": 0.002},
    }
    for network, decay, _, test, *_ in lines:
        wanted = (
            decays[decay]
            | DATA["CIFAR-100, 10,000 images"]
            | {"norm": "batch", "batch_size": 128, "learning_rate": 0.1}
        )
        wanted |= {"network": networks[network]}
        assert_cell(test, [100 * row["test_top1"] for row in selected(rows["medium"].rows, wanted)])


def test_the_table_of_two_examples_follows_from_its_labels(rows):
    _, *lines = table(FOLDERS["medium"] / "small-batch.md", "Top-1 at B = 2")
    norms = {"group norm": "group", "batch group norm": "batch_group"}
    for data, method, groups, _, _, test, own, _ in lines:
        together = data.endswith("128 examples per step")
        norm, _, decayed = method.partition(", with decay")
        decayed = method.endswith("with decay")
        if norm == "batch norm":
            options = {"norm": "ghost", "norm_options": [["ghost_size", 2]]} if together else {"norm": "batch"}
            options |= {"learning_rate": 0.3} if together else {}
        else:
            options = {"norm": norms[norm], "norm_options": [["num_groups", int(groups)]]}
        wanted = DATA["CIFAR-100, 10,000 images"] | options | {"batch_size": 128 if together else 2}
        wanted |= {"norm_decay": "all" if decayed else "none", "classes_per_batch": None}
        found = selected(rows["medium"].rows, wanted)
        assert_cell(test, [100 * row["test_top1"] for row in found])
        assert_cell(own, [100 * row["test_top1_own"] for row in found])


def test_the_table_of_pretrained_models_has_the_numbers_of_its_rows(rows):
    _, *lines = table(PAGES / "alpha-pretrained.md", "Gain from alpha")
    metrics = {"top-1, %": "top1", "top-5, %": "top5", "cross-entropy": "cross_entropy"}
    metrics |= {"cross-entropy after temperature scaling": "calibrated_cross_entropy"}
    by_model = {row["network"]: row for row in rows["small"].rows if row["kind"] == "alpha-by-metric"}
    assert len(lines) == 4 * len(by_model) == 20
    for model, name, before, after, change, interval, alpha, images in lines:
        row = by_model[f"cifar100_resnet{model.removeprefix('ResNet-')}"]
        gain = row[f"gain_{metrics[name]}"]
        scale = 100 if name.startswith("top") else 1
        assert float(before) == pytest.approx(scale * gain["before"], rel=1e-3)
        assert float(after) == pytest.approx(scale * gain["after"], rel=1e-3)
        assert change == f"{scale * (gain['after'] - gain['before']):+.3f}"
        assert interval == f"{scale * gain['low']:+.3f} to {scale * gain['high']:+.3f}"
        assert float(alpha) == pytest.approx(row[f"alpha_{metrics[name]}"], rel=1e-3)
        assert int(images.replace(",", "")) == row["examples"]


def test_the_table_of_temperatures_has_the_numbers_of_its_rows(rows):
    _, *lines = table(PAGES / "alpha-pretrained.md", "Cross-entropy: alpha, temperature, and both")
    by_model = {row["network"]: row for row in rows["small"].rows if row["kind"] == "alpha-by-metric"}
    assert len(lines) == len(by_model)
    for model, *numbers, _ in lines:
        row = by_model[f"cifar100_resnet{model.removeprefix('ResNet-')}"]
        gains = (row["gain_cross_entropy"], row["gain_calibrated_cross_entropy"])
        assert numbers == [f"{gain[part]:.4f}" for gain in gains for part in ("before", "after")]


def test_every_difference_of_the_statements_is_on_the_page_of_an_experiment():
    quoted = re.findall(
        rf"\| ({NUMBER} \[{NUMBER}, {NUMBER}\]) \(n = \d+\), (\w+) \|", (PAGES / "statements.md").read_text()
    )
    assert len(quoted) >= 15
    texts = {scale: "".join(page.read_text() for page in pages(scale)) for scale in FOLDERS}
    for difference, scale in quoted:
        assert f"difference {difference}" in texts[scale]
