"""The examples run, at a size that takes seconds."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning"),
]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.set_num_threads(1)
    digits = importlib.import_module("digits")
    monkeypatch.setattr(digits.loaders, "__defaults__", (100, 100, 50))


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "digits"))
def test_example_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module(name)
    folder = [str(tmp_path)] if name == "transformers_trainer" else []
    assert module.main(*folder, epochs=1) is not None
    assert re.search("alpha unchanged|set alpha", capsys.readouterr().out)
