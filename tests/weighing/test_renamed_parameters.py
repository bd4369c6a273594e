"""Parameters that version 0.1 called differently."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from weighing_networks import batches, small_network

from betternorm.conversion.convert import convert
from betternorm.weighing.calibration import calibrate
from betternorm.weighing.comparison import compare_alpha
from betternorm.weighing.search import tune_alpha

pytestmark = pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")


def test_old_names_work_with_a_warning(images: Tensor, labels: Tensor) -> None:
    loader = batches(images, labels)
    options = {"grid": [0.1], "folds": 2}
    new = tune_alpha(small_network(), loader, require_significant=False, max_examples=40, **options)
    with (
        pytest.warns(DeprecationWarning, match="'insist' is deprecated; use 'require_significant'"),
        pytest.warns(DeprecationWarning, match="'limit' is deprecated; use 'max_examples'"),
    ):
        old = tune_alpha(small_network(), loader, insist=True, limit=40, **options)
    assert old == new

    shifts = {"darker": lambda x: x * 0.5}
    new = tune_alpha(
        small_network(), loader, shifts=shifts, max_clean_drop=5, stats_loader=loader, require_significant=False
    )
    with (
        pytest.warns(DeprecationWarning, match="'max_clean_drop'"),
        pytest.warns(DeprecationWarning, match="'stats_loader'"),
    ):
        old = tune_alpha(
            small_network(), loader, shifts=shifts, max_clean_loss=5, calibration=loader, require_significant=False
        )
    assert old == new


def test_old_names_of_the_other_functions(images: Tensor, labels: Tensor) -> None:
    first, second = (convert(small_network(), "weighed") for _ in range(2))
    calibrate(first, images.split(16), max_examples=20, passes=1)
    with pytest.warns(DeprecationWarning, match="'limit' is deprecated"):
        calibrate(second, images.split(16), limit=20, passes=1)
    assert torch.equal(first[4].running_var, second[4].running_var)
    with pytest.warns(DeprecationWarning, match="'limit' is deprecated"):
        gains = compare_alpha(first, batches(images, labels), 0.1, limit=20)
    assert gains == compare_alpha(first, batches(images, labels), 0.1, max_examples=20)


def test_both_names_at_once_are_an_error(images: Tensor) -> None:
    with pytest.raises(TypeError, match="both 'max_examples' and its old name 'limit'"):
        calibrate(small_network(), images.split(16), limit=20, max_examples=20)
