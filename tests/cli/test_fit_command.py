"""``betternorm fit`` from the shell's side: what goes in, what is written, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_tune import built, folder, pictures

import betternorm
from betternorm import AlphaFit
from betternorm.cli import BAD_INPUT, FINDING, OK
from betternorm.cli.main import main
from betternorm.weighing.alpha import weighed_layers

__all__ = ["folder"]  # the fixture

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("matplotlib")


def fit(*words: str) -> int:
    return main(
        ["fit", "net.py:build", "--checkpoint", "net.pt", "--images", "photos.npz", "--mean", "0,0,0", "--std", "1,1,1",
         "--shift", "contrast,brightness,fog", "--steps", "30", "--quiet", *words]
    )  # fmt: skip


@pytest.fixture
def photos(request: pytest.FixtureRequest) -> Path:
    """Unlabeled images like those in training."""
    folder: Path = request.getfixturevalue("folder")
    np.savez("photos.npz", images=pictures(160, seed=2)[0])
    return folder


def test_a_checkpoint_with_alphas_is_written_and_loads_as_the_message_says(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit() == OK
    printed = capsys.readouterr().out
    assert 'betternorm.load(model, "net-fitted.pt")' in printed
    model = betternorm.load(built(), "net-fitted.pt")
    result = AlphaFit.load("net-fitted.json")
    for name, layer in weighed_layers(model).items():
        torch.testing.assert_close(layer._alpha, result.alpha[name], rtol=1e-5, atol=1e-6)
    assert Path("net-fitted.png").stat().st_size > 1000
    assert not Path("net-fitted.unfinished").exists()
    assert fit() == BAD_INPUT  # the outputs exist
    assert fit("--force") == OK


def test_a_folder_of_image_files_needs_no_classes(photos: Path) -> None:
    Path("images/some").mkdir(parents=True)
    for number, picture in enumerate(pictures(120, seed=2)[0]):
        Image.fromarray(picture).save(f"images/some/{number}.png")
    assert fit("--images", "images") in (OK, FINDING)


def test_without_a_gain_there_is_no_checkpoint(photos: Path) -> None:
    assert fit("--shift", "brightness:1", "--steps", "1", "--max-clean-drop", "0") == FINDING
    assert Path("net-fitted.json").exists()
    assert not Path("net-fitted.pt").exists()


def test_json_holds_the_result(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--json") == OK
    assert json.loads(capsys.readouterr().out)["targets"] == "own"


def test_a_dry_run_writes_nothing(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fit("--dry-run") == OK
    printed = capsys.readouterr().out
    assert "160 from photos.npz" in printed
    assert "would write: net-fitted.pt, net-fitted.json, net-fitted.png" in printed
    assert not list(Path().glob("net-fitted*"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-examples", "50"], "fit_alpha needs at least 100"),
        (["--images", "nowhere"], "images nowhere"),
        (["--shift", "rain"], "shift 'rain' is not known"),
        (["--steps", "0"], "--steps is 0"),
        (["--max-clean-drop", "-1"], "max_clean_drop=-1.0"),
        (["--out", "net.txt"], "--out is net.txt"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit(*words) == BAD_INPUT
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
    assert not list(Path().glob("net-fitted*"))
