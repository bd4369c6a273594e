"""What a search returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from weighing_networks import answer, distance, known, noisy, squared_error, two_answers, two_layers, two_targets

from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

pytestmark = [
    pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning"),
    pytest.mark.filterwarnings("ignore:per_layer is deprecated:DeprecationWarning"),
]


def test_a_result_is_saved_and_loaded(tmp_path: Path) -> None:
    found = tune_alpha(two_layers(), two_targets(0.1, 0.5), (), distance, forward=two_answers, per_layer=True, epochs=1)
    found.save(tmp_path / "found.json")
    assert AlphaSearch.load(tmp_path / "found.json") == found


def test_a_result_reads_as_a_table() -> None:
    found = tune_alpha(known(), noisy(0.3), (), squared_error, grid=[0.1, 0.3], forward=answer)
    lines = str(found).splitlines()
    assert lines[0].split() == ["alpha", "squared_error"]
    assert "baseline" in lines[2]
    assert "best squared_error" in lines[4]
    assert lines[-1] == "set alpha = 0.3, the best for squared_error (400 examples, 3 alphas, 1 pass)"


def test_a_result_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = tune_alpha(known(), noisy(0.3), (), squared_error, grid=5, forward=answer)
    figure = found.plot(tmp_path / "found.png")
    assert (tmp_path / "found.png").read_bytes().startswith(b"\x89PNG")
    (curve, *_) = figure.axes[0].lines
    np.testing.assert_allclose(curve.get_xdata(), [row["alpha"] for row in found.table])
    np.testing.assert_allclose(curve.get_ydata(), [row["squared_error"] for row in found.table])
