"""Numbers on the pages of Round 3, recomputed from the committed rows by other means than the code that wrote them."""

import csv
import json
import math
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from betternorm_lab.evidence import chosen, index
from betternorm_lab.evidence.runs import Places
from scipy import stats

ROOT = Path(__file__).parents[3]
EVIDENCE = ROOT / "docs" / "results" / "evidence"
KINDS = ("noise", "blur", "contrast", "brightness", "fog", "compression")
READINGS = ("as trained", "alpha", "calibrate", "calibrate and alpha", "augmented", "augmented and alpha")
ESTIMATE = re.compile(r"([+-][\d.]+) \[([-\d.]+), ([-\d.]+)\]")


def load(path):
    with np.load(path) as file:
        return json.loads(file["meta"].item()), {name: file[name] for name in file.files if name != "meta"}


def bits(packed, count):
    """Without NumPy's unpackbits."""
    return [(byte >> (7 - k)) & 1 for byte in packed.tolist() for k in range(8)][:count]


def interval(differences, pooled=None):
    """Two-way random model, seeds x images, by mean squares: the protocol's A + B - R."""
    d = np.asarray(differences, dtype=float)
    s, n = d.shape
    grand = d.sum() / (s * n)
    ms_seed = n * sum((row.sum() / n - grand) ** 2 for row in d) / (s - 1)
    ms_image = s * sum((column.sum() / s - grand) ** 2 for column in d.T) / (n - 1)
    total = ((d - grand) ** 2).sum()
    ms_rest = (total - (s - 1) * ms_seed - (n - 1) * ms_image) / ((s - 1) * (n - 1))
    a, degrees = pooled or (ms_seed / (s * n), s - 1)
    b, r = ms_image / (s * n), ms_rest / (s * n)
    variance = max(a + b - r, a, b)
    freedom = variance**2 / (a**2 / degrees + b**2 / (n - 1))
    half = stats.t.isf(0.025, freedom) * math.sqrt(variance)
    return grand, grand - half, grand + half


def two_way(table):
    """Variance of a difference of two arms' means from an arms x seeds table, and its degrees of freedom."""
    arms, seeds = len(table), len(table[0])
    grand = np.mean(table)
    squares = sum(
        (table[k][j] - np.mean(table[k]) - np.mean([row[j] for row in table]) + grand) ** 2
        for k in range(arms)
        for j in range(seeds)
    )
    degrees = (arms - 1) * (seeds - 1)
    return 2 * squares / degrees / seeds, degrees


def rows_of(name, key):
    found = {}
    for path in sorted((EVIDENCE / "rows" / name).glob("*.npz")):
        meta, arrays = load(path)
        found.setdefault(meta[key], []).append((meta["seed"], meta, arrays))
    if not (EVIDENCE / f"{name}.md").exists():
        pytest.skip(f"{name} has not been run")
    return found


def cells(page, *start):
    """The cells of the table row that begins with these."""
    for line in (EVIDENCE / page).read_text().splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if parts[: len(start)] == [str(one) for one in start]:
            return parts[len(start) :]
    raise AssertionError(f"{page} has no row {start}")


def assert_written(text, numbers):
    written = [float(part) for part in ESTIMATE.search(text).groups()]
    places = len(text.split()[0].partition(".")[2])
    assert written == pytest.approx(numbers, abs=0.51 * 10**-places)


def percent(rows, name, reading):
    count = "clean" if name == "clean" else "corrupted"
    return np.array([[100.0 * bit for bit in bits(a[f"{name}/{reading}"], m["images"][count])] for _, m, a in rows])


@pytest.fixture(scope="module")
def small_batches():
    """Correctness by size, images and reading."""
    result = {}
    for size, rows in rows_of("small-batches", "size").items():
        if len(rows) < 2:
            continue
        for reading in READINGS:
            result[size, "clean", reading] = percent(rows, "clean", reading)
            result[size, "corrupted", reading] = sum(percent(rows, kind, reading) for kind in KINDS) / len(KINDS)
    return result


def test_small_batches_gains_follow_from_the_bits(small_batches):
    for size in {key[0] for key in small_batches}:
        for first, second in (
            ("alpha", "as trained"),
            ("calibrate", "as trained"),
            ("calibrate and alpha", "calibrate"),
            ("calibrate and alpha", "alpha"),
            ("calibrate and alpha", "as trained"),
            ("augmented", "as trained"),
            ("augmented and alpha", "augmented"),
            ("augmented and alpha", "alpha"),
        ):
            _, clean, _, corrupted, _ = cells("small-batches.md", size, f"{first} - {second}")
            for text, name in ((clean, "clean"), (corrupted, "corrupted")):
                difference = small_batches[size, name, first] - small_batches[size, name, second]
                assert_written(text, interval(difference))


def test_small_batches_accuracies_follow_from_the_bits(small_batches):
    for size in {key[0] for key in small_batches}:
        for name in ("clean", "corrupted"):
            row = next(
                line.strip("|").split("|")
                for line in (EVIDENCE / "small-batches.md").read_text().splitlines()
                if re.match(rf"\| {size} \| \d+ \| {name} \|", line)
            )
            means = [small_batches[size, name, reading].mean() for reading in READINGS]
            assert [float(cell) for cell in row[3:]] == pytest.approx(means, abs=0.051)


def test_small_batches_primary_claims_on_the_index(small_batches):
    both, alone = "calibrate and alpha", "calibrate"

    def gain(size, name="clean"):
        return small_batches[size, name, both] - small_batches[size, name, alone]

    expected = {
        "P3": lambda: small_batches[2, "clean", "alpha"] - small_batches[2, "clean", "as trained"],
        "P4": lambda: gain(2),
        "P5": lambda: gain(8),
        "P6": lambda: gain(2) - gain(16),
        "P7": lambda: gain(2, "corrupted"),
    }
    for number, difference in expected.items():
        text = cells("index.md", number)[2]
        if text:
            assert_written(text, interval(difference()))


def test_all_four_differences_follow_from_the_bits():
    rows = rows_of("all-four", "arm")
    seeds = set.intersection(*({seed for seed, *_ in some} for some in rows.values()))
    rows = {arm: [row for row in some if row[0] in seeds] for arm, some in rows.items()}

    def correct(arm, reading):
        return np.array([[100.0 * bit for bit in bits(a[f"clean/{reading}"], m["images"])] for _, m, a in rows[arm]])

    plain = correct("batch norm", "as trained")
    ghosts, ours = correct("ghost batch norm", "as trained"), correct("all four", "alpha")
    pooled = two_way([one.mean(1).tolist() for one in (plain, ghosts, ours)])
    for label, one, other in (
        ("ghost batch norm - batch norm", ghosts, plain),
        ("all four - batch norm", ours, plain),
        ("all four - ghost batch norm", ours, ghosts),
    ):
        assert_written(cells("all-four.md", label)[1], interval(one - other, pooled))


def test_imagenet_gains_follow_from_bits_and_losses():
    path = EVIDENCE / "rows" / "imagenet-alpha.npz"
    if not path.exists():
        pytest.skip("imagenet-alpha has not been run")
    meta, arrays = load(path)
    count = meta["images"]
    alphas = sorted(alpha for mixing, alpha, *_ in meta["curve"] if mixing == "moments")
    scores = {
        "top-1": {a: np.array(bits(arrays[f"top-1/moments-{a:.4f}"], count)) * 100.0 for a in alphas},
        "top-5": {a: np.array(bits(arrays[f"top-5/moments-{a:.4f}"], count)) * 100.0 for a in alphas},
        "cross-entropy": {a: -arrays[f"loss/moments-{a:.4f}"].astype(float) for a in alphas},
    }
    label = f"alpha, chosen of {len(alphas)}"
    for metric, by_alpha in scores.items():
        gains = np.zeros((10, count))
        for split in range(10):
            order = np.random.RandomState(split).permutation(count)
            one, two = order[: count // 2], order[count // 2 :]
            for choose, judge in ((one, two), (two, one)):
                best = max(alphas, key=lambda a: by_alpha[a][choose].mean())
                gains[split, judge] = by_alpha[best][judge] - by_alpha[0.0][judge]
        each = gains.mean(0) * (-1 if metric == "cross-entropy" else 1)
        half = stats.norm.isf(0.025) * each.std(ddof=1) / math.sqrt(count)
        written = [float(part) for part in ESTIMATE.search(cells("imagenet-alpha.md", label, metric)[1]).groups()]
        # Losses are stored in half precision.
        tolerance = 0.0006 if metric == "cross-entropy" else 0.006
        assert written == pytest.approx([each.mean(), each.mean() - half, each.mean() + half], abs=tolerance)


def test_imagenet_changes_of_top1_by_alpha_follow_from_the_bits():
    path = EVIDENCE / "rows" / "imagenet-alpha.npz"
    if not path.exists():
        pytest.skip("imagenet-alpha has not been run")
    meta, arrays = load(path)
    zero = np.array(bits(arrays["top-1/moments-0.0000"], meta["images"]))
    for mixing, alpha, *_ in meta["curve"]:
        one = np.array(bits(arrays[f"top-1/{mixing}-{alpha:.4f}"], meta["images"]))
        gained, lost = int((one > zero).sum()), int((one < zero).sum())
        n = meta["images"]
        mean = (gained - lost) / n
        half = stats.norm.isf(0.025) * math.sqrt(((gained + lost) / n - mean**2) / (n - 1))
        top1, text = cells("imagenet-alpha.md", mixing, f"{alpha:.3g}")[:2]
        assert float(top1) == pytest.approx(100 * one.mean(), abs=0.0051)
        assert_written(text, (100 * mean, 100 * (mean - half), 100 * (mean + half)))


def test_imagenet_gains_after_a_temperature_have_the_interval_of_their_images():
    path = EVIDENCE / "rows" / "imagenet-alpha.npz"
    if not path.exists():
        pytest.skip("imagenet-alpha has not been run")
    _, arrays = load(path)
    gains = -arrays["gain/chosen/cross-entropy after temperature"].astype(float)
    half = stats.norm.isf(0.025) * gains.std(ddof=1) / math.sqrt(len(gains))
    text = cells("index.md", "P2")[2]
    if not text:
        pytest.skip("not every alpha has been evaluated")
    assert_written(text, (gains.mean(), gains.mean() - half, gains.mean() + half))


def test_holms_p_values_on_the_index_follow_from_the_intervals():
    """To the rounding of what is written there."""
    rows = {number: cells("index.md", number) for number in (f"P{k}" for k in range(1, 13))}
    terms = {row[-1].strip("*") for row in rows.values()}
    known = {"replicated", "opposite effect", "significant but negligible", "equivalent", "inconclusive", "not tested"}
    assert terms <= known
    for row in rows.values():
        if row[2]:
            mean, low, high = (float(part) for part in ESTIMATE.search(row[2]).groups())
            significant = row[-1].strip("*") in ("replicated", "opposite effect", "significant but negligible")
            assert not (significant and low < 0 < high)
            assert low <= mean <= high


def test_choices_are_the_best_candidates():
    for name, chosen_by, column in (
        ("small-batches", chosen.SMALL_BATCHES, "learning rate"),
        ("all-four", chosen.ALL_FOUR, "decay"),
    ):
        path = EVIDENCE / "selection" / f"{name}.csv"
        if not path.exists():
            continue
        with open(path, newline="") as file:
            table = list(csv.DictReader(file))
        scores = ("validation top-1 as trained", "validation top-1 after calibrate", "at its best alpha")
        for key, value in chosen_by.items():
            rows = [row for row in table if row.get("statistics over", str(key)) == str(key)]
            best = max(rows, key=lambda row: max(float(row[one]) for one in scores if one in row))
            assert float(best[column]) == value, (name, key)


def test_every_row_comes_from_a_commit_whose_protocol_had_been_settled():
    """What a row's commit says of the choice is what the code says now, and that commit has no later changes."""
    if subprocess.run(["git", "rev-parse", "--git-dir"], cwd=ROOT, capture_output=True).returncode:
        pytest.skip("not a checkout")
    commits = {}
    for path in (EVIDENCE / "rows").rglob("*.npz"):
        meta, _ = load(path)
        for commit in meta.get("commits", [meta.get("commit")]):
            commits.setdefault(commit, []).append(path.parent.name)
    for commit, names in commits.items():
        assert not commit.endswith("+")
        shown = subprocess.run(
            ["git", "show", f"{commit}:docs/results/protocol.md"], cwd=ROOT, capture_output=True, text=True
        )
        if shown.returncode:
            pytest.skip(f"the history does not contain {commit}")
        assert "## Round 3" in shown.stdout
        code = subprocess.run(
            ["git", "show", f"{commit}:lab/src/betternorm_lab/evidence/chosen.py"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        ).stdout
        for name in set(names) & {"small-batches", "all-four"}:
            variable = name.replace("-", "_").upper()
            line = re.search(rf"^{variable}.* = (.*)$", code, re.M)
            assert line is not None
            assert eval(line[1]).items() <= getattr(chosen, variable).items()
            assert eval(line[1])


def test_pages_are_what_the_rows_give(tmp_path):
    places = Places(tmp_path, tmp_path, tmp_path, tmp_path)
    (tmp_path / "rows").symlink_to(EVIDENCE / "rows")
    index.write_pages(places)
    for path in tmp_path.glob("*.md"):
        assert path.read_text() == (EVIDENCE / path.name).read_text(), path.name
