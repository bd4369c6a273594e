"""Labels, preprocessing and files of `betternorm tune`: what would silently give wrong results is an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_tune import MODEL, built, folder, pictures, tune

import betternorm
from betternorm.cli import BAD_INPUT, FINDING, OK
from betternorm.cli.main import main
from betternorm.cli.tune import NO_VERDICT, WORSE
from betternorm.errors import UserError
from betternorm.integrations.images import class_names, open_image, read_class_map
from betternorm.integrations.models import load_model
from betternorm.weighing.result import AlphaSearch

__all__ = ["folder"]  # the fixture

Image = pytest.importorskip("PIL.Image")
DONE = (OK, FINDING, WORSE)


def error_of(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err.strip()
    assert "\n" not in error
    return error


def write_folders(names: list[str], root: str = "val", count: int = 240) -> None:
    """The validation images in one folder per class; ``names`` are those of labels 0, 1 and 2."""
    with np.load("val.npz") as file:
        for number in range(count):
            path = Path(root, names[file["labels"][number]], f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(file["images"][number]).save(path)


def top1(path: str) -> float:
    return next(row["top1"] for row in AlphaSearch.load(path).table if row["alpha"] == 0)


def test_numeric_class_folders_are_sorted_as_numbers(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / "numbers" / str(number)).mkdir(parents=True)
        (tmp_path / "names" / f"n{number}").mkdir(parents=True)
    assert class_names(tmp_path / "numbers") == [str(number) for number in range(12)]
    assert class_names(tmp_path / "names") == sorted(f"n{number}" for number in range(12))


def test_folders_named_by_numbers_have_the_labels_of_the_array(folder: Path) -> None:
    write_folders(["2", "10", "100"])
    assert tune("--grid", "2", "--out", "a.pt", data="val") in DONE
    assert tune("--grid", "2", "--out", "b.pt") in DONE
    assert top1("a.json") == pytest.approx(top1("b.json"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("map.txt", "zebra\nant\nmule\n"),
        ("map.json", json.dumps(["zebra", "ant", "mule"])),
        ("map.json", json.dumps({"zebra": 0, "ant": 1, "mule": 2})),
        ("map.json", json.dumps({"0": ["zebra", "a striped horse"], "1": ["ant", ""], "2": ["mule", ""]})),
    ],
)
def test_class_maps_are_lines_or_json(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert read_class_map(tmp_path / name) == ["zebra", "ant", "mule"]


def test_a_class_map_names_the_folder_of_every_output(folder: Path) -> None:
    Path("map.txt").write_text("zebra\nant\nmule\n")
    write_folders(["zebra", "ant", "mule"])
    assert tune("--grid", "2", "--out", "a.pt", "--class-map", "map.txt", data="val") in DONE
    assert tune("--grid", "2", "--out", "b.pt") in DONE
    assert top1("a.json") == pytest.approx(top1("b.json"))


def test_fewer_folders_than_outputs_need_a_class_map(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folders(["ant", "mule", "zebra"])
    for path in Path("val/mule").iterdir():
        path.unlink()
    Path("val/mule").rmdir()
    assert tune(data="val") == BAD_INPUT
    assert "2 class folders for a model with 3 outputs; name the class of every output with --class-map" in error_of(
        capsys
    )
    Path("map.txt").write_text("ant\nmule\nzebra\n")
    assert tune("--class-map", "map.txt", "--grid", "2", data="val") in DONE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "map.txt cannot be read: No such file"),
        ("ant\nmule\nant\n", "must contain every class name once"),
        ("", "must contain every class name once"),
        ("ant\nmule\nhorse\n", "the folder 'zebra' is not a class of --class-map"),
    ],
)
def test_a_class_map_that_does_not_fit_is_an_error(
    content: str | None, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_folders(["ant", "mule", "zebra"], count=30)
    if content is not None:
        Path("map.txt").write_text(content)
    assert tune("--class-map", "map.txt", data="val") == BAD_INPUT
    assert message in error_of(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mean", "123.7,116.3,103.5"], "--mean is 123.7,116.3,103.5; it applies to pixels between 0 and 1"),
        (["--std", "58,57,57"], "--std is 58,57,57; it applies to pixels between 0 and 1"),
    ],
)
def test_mean_and_std_of_bytes_are_errors(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(*words) == BAD_INPUT
    assert message in error_of(capsys)


def confident_checkpoint() -> None:
    weights = torch.load("net.pt", weights_only=True)["state_dict"]
    for name in ("5.weight", "5.bias"):
        weights[name] *= 20
    torch.save(weights, "net.pt")


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--max-examples", "150"]])
def test_confident_predictions_at_chance_level_are_an_error_with_likely_causes(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    confident_checkpoint()
    pixels, labels = pictures(240, seed=1)
    np.savez("wrong.npz", images=pixels, labels=np.random.RandomState(1).permutation(labels))
    assert tune(*words, data="wrong.npz") == BAD_INPUT
    error = error_of(capsys)
    assert "which is chance for 3 classes, although the mean confidence is" in error
    for cause in ("--class-map", "--mean or --std", "checkpoint"):
        assert cause in error
    assert not list(folder.glob("net-tuned*"))


def test_shifted_data_may_be_at_chance_level(folder: Path) -> None:
    confident_checkpoint()
    pixels, labels = pictures(240, seed=1)
    np.savez("clean.npz", images=pixels, labels=labels)
    np.savez("noise.npz", images=np.random.RandomState(1).randint(0, 255, pixels.shape, dtype=np.uint8), labels=labels)
    assert tune("--shifted-data", "noise.npz", "--grid", "2", data="clean.npz") in DONE


# ---- .pt files ----


@pytest.mark.parametrize("kind", ["dict", "pair", "channels first", "floats"])
def test_images_and_labels_from_a_pt_file(kind: str, folder: Path) -> None:
    with np.load("val.npz") as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    content: Any = {"images": images, "labels": labels}
    if kind == "pair":
        content = (images, labels)
    elif kind == "channels first":
        content = (images.permute(0, 3, 1, 2), labels)
    elif kind == "floats":
        content = {"x": images.permute(0, 3, 1, 2) / 255, "y": labels}
    torch.save(content, "val.pt")
    assert tune("--grid", "2", "--out", "a.pt", data="val.pt") in DONE
    assert tune("--grid", "2", "--out", "b.pt") in DONE
    for row, expected in zip(AlphaSearch.load("a.json").table, AlphaSearch.load("b.json").table, strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


class Anything:
    pass


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (torch.zeros(3), "expected a pair of tensors (images, labels), or a dict"),
        ({"images": torch.zeros(3)}, "expected a pair of tensors"),
        (Anything(), "bad.pt cannot be read"),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(4)), "labels are torch.float32 (4,); expected one integer"),
        ((torch.zeros(4, 3, 8, 8), torch.zeros(3).long()), "expected one integer for each of the 4 images"),
        ((torch.zeros(4, 5, 8, 8, dtype=torch.uint8), torch.zeros(4).long()), "images are uint8 (4, 5, 8, 8)"),
        ((torch.zeros(0, 3, 8, 8), torch.zeros(0).long()), "there are no images in it"),
        ((torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.zeros(4).long()), "images have shape (1, 8, 8)"),
    ],
)
def test_other_pt_files_are_errors(
    content: Any, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, "bad.pt")
    assert tune(data="bad.pt") == BAD_INPUT
    assert message in error_of(capsys)


# ---- image files ----


@pytest.mark.parametrize(("mode", "suffix"), [("I;16", "png"), ("I", "tiff"), ("F", "tiff"), ("I;16", "tiff")])
def test_pixels_that_would_be_clipped_are_an_error(mode: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"deep.{suffix}"
    Image.new(mode, (4, 4)).save(path)
    with pytest.raises(UserError, match=rf"deep\.{suffix} has 16-bit, 32-bit or floating-point pixels"):
        open_image(path)


def test_a_decompression_bomb_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("RGB", (100, 100)).save(tmp_path / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(UserError, match=r"large\.png is too large to be decoded safely"):
        open_image(tmp_path / "large.png")


# ---- models ----


def test_the_file_of_a_model_may_import_its_neighbors_and_define_dataclasses(tmp_path: Path) -> None:
    (tmp_path / "neighbor_of_a_model.py").write_text("WIDTH = 7\n")
    (tmp_path / "model_with_neighbor.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from torch import nn\n"
        "from neighbor_of_a_model import WIDTH\n"
        "@dataclass\nclass Sizes:\n    width: int = WIDTH\n"
        "def build():\n    import neighbor_of_a_model\n    return nn.Linear(Sizes().width, 1)\n"
    )
    model = load_model(f"{tmp_path}/model_with_neighbor.py:build")
    assert model.in_features == 7


# ---- results ----


def test_nan_has_its_own_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = torch.load("net.pt", weights_only=True)["state_dict"]
    weights["5.bias"][0] = torch.nan
    torch.save(weights, "net.pt")
    assert tune("--quiet") == NO_VERDICT
    assert "no verdict: 240 outputs of the model are NaN or infinite at the baseline" in capsys.readouterr().out
    assert not Path("net-tuned.pt").exists()


@pytest.mark.slow
def test_three_processes_may_write_the_same_output(folder: Path) -> None:
    words = ["tune", "net.py:build", "--checkpoint", "net.pt", "--data", "val.npz", "--mean", "0,0,0", "--std", "1,1,1"]
    command = [sys.executable, "-m", "betternorm.cli", *words, "--out", "same.pt", "--grid", "3", "--force", "--quiet"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    for process in processes:
        _, errors = process.communicate()
        assert process.returncode in DONE, errors
    betternorm.load(built(), "same.pt")
    AlphaSearch.load("same.json")
    assert not list(folder.glob(".unfinished*"))


def test_a_full_disk_is_one_line_and_leaves_no_partial_files(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 47872 vs 47792")

    monkeypatch.setattr(torch, "save", full)
    assert tune("--grid", "3") == BAD_INPUT
    error = error_of(capsys)
    assert "cannot be written: the disk may be full" in error
    assert "net-tuned.unfinished" in error
    assert not list(folder.glob("net-tuned*"))


def test_missing_data_is_reported_before_a_missing_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--mean", "0,0,0", "--std", "1,1,1"]
    assert main(["tune", "nowhere.py:build", "--checkpoint", "none.pt", "--data", "nope", *words]) == BAD_INPUT
    assert "--data nope: there is no such file or folder" in error_of(capsys)


def test_a_share_of_an_insignificant_gain_is_not_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.py").write_text(MODEL.replace("nn.ReLU(),", "nn.ReLU(), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6),"))
    torch.manual_seed(0)
    torch.save(built(Path("two.py").read_text()).state_dict(), "two.pt")
    words = ["--data", "val.npz", "--mean", "0,0,0", "--std", "1,1,1", "--layers", "1", "--objective", "top5"]
    assert main(["tune", "two.py:build", "--checkpoint", "two.pt", *words]) == FINDING
    rows = AlphaSearch.load("two-tuned.json").few_layers
    assert rows is not None
    assert {row.share for row in rows.rows} == {None}
    assert "%  " not in capsys.readouterr().out.partition("of the gain")[2].partition("not folded")[0]
