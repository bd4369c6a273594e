"""``betternorm diagnose`` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from betternorm.cli import BAD_INPUT, FINDING, OK
from betternorm.cli.main import main
from betternorm.integrations.models import load_model

MODEL = """
from torch import nn

def build(num_classes=3):
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, num_classes))
"""
PIXELS = ["--mean", "0.5,0.5,0.5", "--std", "0.25,0.25,0.25"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trained model, the same with averages that do not fit, and its images."""
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(MODEL)
    random = np.random.default_rng(0)
    labels = np.arange(300) % 3
    patterns = random.integers(60, 190, (3, 8, 8, 3))
    images = (patterns[labels] + random.normal(0, 40, (300, 8, 8, 3))).clip(0, 255).astype(np.uint8)
    order = labels.argsort(kind="stable")  # as files in folders are
    for name in ("val", "train"):
        np.savez(f"{name}.npz", images=images[order], labels=labels[order])
    torch.manual_seed(0)
    model = load_model("net.py:build")
    x = (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(120):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), torch.from_numpy(labels)).backward()
        optimizer.step()
    torch.save(model.state_dict(), "good.pt")
    model[1].running_mean += 3  # type: ignore[index, operator]
    torch.save(model.state_dict(), "bad.pt")
    return tmp_path


def test_a_finding_is_printed_and_saved(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["diagnose", "net.py:build", "--checkpoint", "bad.pt", "--data", "val.npz", "--stats-data", "train.npz"]
    assert main([*words, *PIXELS, "--try-fixes", "--out", "found.json"]) == FINDING
    printed = capsys.readouterr().out
    assert "mismatched_averages" in printed
    assert "betternorm.calibrate(model, stats_loader)" in printed
    saved = json.loads(Path("found.json").read_text())
    assert [finding["cause"] for finding in saved["findings"]] == ["mismatched_averages"]
    assert saved["findings"][0]["gain"]["top1"]["low"] > 0
    assert main([*words, *PIXELS, "--out", "found.json"]) == BAD_INPUT
    assert "found.json" in capsys.readouterr().err


def test_healthy_norm_layers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files in the order of their classes are no fault in evaluation mode, nor of the training data."""
    words = ["diagnose", "net.py:build", "--checkpoint", "good.pt", "--data", "val.npz", "--stats-data", "train.npz"]
    assert main([*words, *PIXELS]) == OK
    assert "The norm layers are fine." in capsys.readouterr().out
    assert main([*words, *PIXELS, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["is_healthy"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-examples", "0"], "--max-examples is 0; it must be 1 or more"),
        (["--train-batch-size", "0"], "--train-batch-size is 0; it must be 1 or more"),
        (["--data", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(
    options: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["diagnose", "net.py:build", "--checkpoint", "good.pt", "--data", "val.npz"]
    assert main([*words, *PIXELS, *options]) == BAD_INPUT
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
