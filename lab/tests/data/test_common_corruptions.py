"""The corruptions of Hendrycks and Dietterich against SciPy, colorsys and closed forms."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch
from betternorm_lab.data.common_corruptions import CONSTANTS, FUNCTIONS, TEST, VALIDATION, corrupt
from scipy import ndimage
from torch import Tensor


@pytest.fixture
def pixels() -> Tensor:
    return torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_fifteen_are_for_evaluation_and_four_for_validation() -> None:
    assert len(TEST) == 15
    assert len(VALIDATION) == 4
    assert set(CONSTANTS) == set(TEST + VALIDATION)


@pytest.mark.parametrize("name", [name for name in TEST + VALIDATION if name != "frost"])
@pytest.mark.parametrize("side", [32, 96])
def test_images_keep_their_shape_and_range_and_are_the_same_for_a_seed(name: str, side: int) -> None:
    images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    for severity in (1, 5):
        corrupted = corrupt(images, name, severity)
        assert corrupted.shape == images.shape
        assert 0 <= float(corrupted.min()) <= float(corrupted.max()) <= 1
        assert not torch.equal(corrupted, images)
        assert torch.equal(corrupted, corrupt(images, name, severity))


def test_frost_overlays_a_photograph(pixels: Tensor, tmp_path: object) -> None:
    from pathlib import Path

    image = pytest.importorskip("PIL.Image")
    for name in ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg"):
        image.new("RGB", (300, 300), (255, 255, 255)).save(Path(str(tmp_path)) / name)
    expected = (0.75 * pixels + 0.45).clamp(0, 1)
    torch.testing.assert_close(corrupt(pixels, "frost", 5, frost=Path(str(tmp_path))), expected, rtol=0, atol=1 / 255)
    with pytest.raises(ValueError, match="photographs"):
        corrupt(pixels, "frost", 5)


def test_gaussian_blur_is_scipys(pixels: Tensor) -> None:
    expected = ndimage.gaussian_filter(pixels.double().numpy(), (0, 0, 1.0, 1.0), mode="nearest", truncate=4.0)
    blurred = FUNCTIONS["gaussian_blur"](pixels, 1.0, torch.Generator())
    np.testing.assert_allclose(blurred.numpy(), expected, atol=1e-5)


def test_color_changes_are_those_of_hue_saturation_and_value(pixels: Tensor) -> None:
    brighter = FUNCTIONS["brightness"](pixels, 0.3, torch.Generator())
    saturated = FUNCTIONS["saturate"](pixels, (2.5, 0.2), torch.Generator())
    for row, column in ((0, 0), (7, 9), (31, 31)):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixels[0, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.3, 1))
        assert brighter[0, :, row, column].tolist() == pytest.approx(expected, abs=1e-5)
        expected = colorsys.hsv_to_rgb(hue, min(2.5 * saturation + 0.2, 1), value)
        assert saturated[0, :, row, column].tolist() == pytest.approx(expected, abs=1e-5)


def test_noise_has_the_published_strength() -> None:
    gray = torch.full((4, 3, 32, 32), 0.5)
    assert float((corrupt(gray, "gaussian_noise", 5) - gray).std()) == pytest.approx(0.10, rel=0.05)
    assert float((corrupt(gray, "speckle_noise", 5) - gray).std()) == pytest.approx(0.5 * 0.2, rel=0.05)
    assert float((corrupt(gray, "shot_noise", 5) - gray).std()) == pytest.approx((0.5 / 50) ** 0.5, rel=0.05)
    changed = corrupt(gray, "impulse_noise", 5)
    assert float(((changed == 0) | (changed == 1)).float().mean()) == pytest.approx(0.07, rel=0.15)


def test_blurs_keep_the_mean_of_a_uniform_image() -> None:
    gray = torch.full((2, 3, 32, 32), 0.5)
    for name in ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "elastic_transform", "contrast"):
        torch.testing.assert_close(corrupt(gray, name, 5), gray, rtol=0, atol=0.01)
