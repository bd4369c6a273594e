"""The notebooks in docs/tutorials run from top to bottom as they stand, and print results like the committed ones."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import betternorm
from betternorm.errors import UncertainGainWarning
from betternorm.integrations import torchvision

NOTEBOOKS = sorted((Path(__file__).parents[1] / "docs" / "tutorials").glob("*.ipynb"))


def code_cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def final_numbers(printed: str) -> list[float]:
    """The numbers around the arrow in the last line."""
    return [float(number) for number in re.findall(r"(\d+\.\d) -> (\d+\.\d)", printed.strip().splitlines()[-1])[0]]


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_runs(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "fit_alpha" in notebook.read_text(encoding="utf-8") and not hasattr(betternorm, "fit_alpha"):
        pytest.skip("fit_alpha is missing")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    torchvision.ready()  # timm imports it
    threads = torch.get_num_threads()
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells(notebook)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UncertainGainWarning)
                exec(compile("".join(cell["source"]), f"{notebook.name}, code cell {number}", "exec"), names)
    finally:
        torch.set_num_threads(threads)
        pyplot.close("all")
    before, after = final_numbers(capsys.readouterr().out)
    assert after > before + 2  # the gain that the tutorial shows, on any machine


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_starts_with_its_picture_and_ends_with_a_number(notebook: Path) -> None:
    text = json.loads(notebook.read_text(encoding="utf-8"))["cells"][0]["source"]
    assert f"]({notebook.stem}.png)" in "".join(text)  # tools/site.py takes it from the outputs
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output["output_type"] == "error"]
    before, after = final_numbers("".join(outputs[-1]["text"]))
    assert after > before
