"""Corruptions against scipy, Pillow and closed forms, and the rule of choice."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from betternorm.weighing.shifts import KINDS, Rule, corruptions

MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)


@pytest.fixture
def pictures() -> Tensor:
    """Smooth colours with an edge, between 0 and 1."""
    across = torch.linspace(0, 1, 40)
    waves = 0.5 + 0.4 * torch.sin(across[None, None, :, None] * 6 + torch.arange(15.0).view(5, 3, 1, 1)) * across
    waves[..., 20:] *= 0.6
    return waves


def named(name: str, **options: Any) -> Any:
    return corruptions(name, **options)[name]


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_corrupted_the_same_way_in_any_batch(kind: str, pictures: Tensor) -> None:
    shift = named(f"{kind}:4")
    together = shift(pictures)
    assert not torch.allclose(together, pictures, atol=0.01)
    for rows in ([3], [4, 0, 2]):
        torch.testing.assert_close(shift(pictures[rows]), together[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_normalized_images_are_corrupted_as_their_pixels(kind: str, pictures: Tensor) -> None:
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in (MEAN, STD))
    found = named(f"{kind}:2", mean=MEAN, std=STD)((pictures - mean) / std) * std + mean
    assert float(found.min()) >= -1e-6
    assert float(found.max()) <= 1 + 1e-6
    if kind not in ("noise", "fog"):  # whose noise follows from the numbers that a network sees
        torch.testing.assert_close(found, named(f"{kind}:2")(pictures), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_more_strength_is_more_corruption(kind: str, pictures: Tensor) -> None:
    far = [float((named(f"{kind}:{k}")(pictures) - pictures).abs().mean()) for k in range(1, 6)]
    assert far == sorted(far)
    assert far[0] > 0


def test_noise_has_its_standard_deviation() -> None:
    grey = torch.full((4, 3, 64, 64), 0.5) + torch.arange(4.0).view(4, 1, 1, 1) / 1000
    assert float((named("noise:3")(grey) - grey).std()) == pytest.approx(0.08, rel=0.02)


def test_blur_is_scipys_gaussian_filter(pictures: Tensor) -> None:
    ndimage = pytest.importorskip("scipy.ndimage")
    sigma = 0.8 * (40 / 32) ** 0.5
    expected = ndimage.gaussian_filter(pictures.numpy(), (0, 0, sigma, sigma), mode="mirror", truncate=3.0)
    np.testing.assert_allclose(named("blur:3")(pictures).numpy(), expected, atol=2e-3)


def test_contrast_and_brightness_are_what_they_say(pictures: Tensor) -> None:
    middle = pictures.mean((1, 2, 3), keepdim=True)
    torch.testing.assert_close(named("contrast:3")(pictures), middle + 0.4 * (pictures - middle))
    torch.testing.assert_close(named("brightness:2")(pictures), (pictures + 0.1).clamp(max=1))


def test_compression_is_pillows(pictures: Tensor) -> None:
    image = pytest.importorskip("PIL.Image")
    bytes_of = (pictures * 255).round().byte()
    found = named("compression:3")(bytes_of / 255)
    for picture, ours in zip(bytes_of, found, strict=True):
        file = io.BytesIO()
        image.fromarray(picture.permute(1, 2, 0).numpy()).save(file, "JPEG", quality=30, subsampling=0)
        theirs = np.asarray(image.open(file)) / 255
        assert np.abs(ours.permute(1, 2, 0).numpy() - theirs).mean() < 0.01


def test_names_and_strengths() -> None:
    assert list(corruptions(["fog", "noise:2"])) == ["fog:1", "fog:3", "fog:5", "noise:2"]
    assert len(corruptions()) == 18


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rain", "shift 'rain' is not known; known are noise, blur"),
        ("blur:0", "shift 'blur:0' is not known"),
        ("blur:strong", "a strength from 1 to 5"),
    ],
)
def test_corruptions_that_are_not_there_say_which_are(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        corruptions(name)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(2, 3, 8, 8), r"pixels run from -.* instead of 0 to 1: pass the mean and std"),
        (torch.rand(2, 8), r"images \(N, C, H, W\) in floating point, got torch.float32 \(2, 8\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "got torch.uint8"),
    ],
)
def test_what_is_no_image_is_refused(images: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named("noise:1")(images)


@pytest.mark.parametrize(
    ("most", "expected"),
    [(None, 0.2), (0.0, 0.0), (0.01, 0.1), (0.021, 0.1), (0.05, 0.2), (1.0, 0.3)],
)
def test_the_rule(most: float | None, expected: float) -> None:
    clean = {0.0: 0.90, 0.1: 0.89, 0.2: 0.86, 0.3: 0.70}
    shifted = [{0.0: 0.2, 0.1: 0.3, 0.2: 0.5, 0.3: 0.6}, {0.0: 0.5, 0.1: 0.6, 0.2: 0.6, 0.3: 0.6}]
    assert Rule(True, most).choose(clean, shifted, 0.0) == expected
    turned = [{alpha: -score for alpha, score in part.items()} for part in (clean, *shifted)]
    assert Rule(False, most).choose(turned[0], turned[1:], 0.0) == expected


def test_of_equals_the_rule_takes_the_network_as_trained() -> None:
    same = {0.0: 0.5, 0.9: 0.5, 1.0: 0.5}
    assert Rule(True).choose(same, [same], 1.0) == 1.0
