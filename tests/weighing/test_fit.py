"""fit_alpha on a small classifier whose accuracy drops with contrast and brightness, which alpha restores."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weighing_networks import group_norm

import betternorm
from betternorm import AlphaFit, fit_alpha
from betternorm.errors import UncertainGainWarning
from betternorm.weighing.alpha import weighed_layers

CLASSES = 4
SHIFTS = {
    "contrast:1": lambda images: 0.5 * images,
    "contrast:2": lambda images: 0.3 * images,
    "bright:1": lambda images: images + 1.0,
    "bright:2": lambda images: images - 1.0,
    "loud": lambda images: 3 * images,
}
QUICK: dict[str, Any] = {"shifts": SHIFTS, "steps": 25, "progress": False}


def labeled_images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """A pattern per class in noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return patterns[labels] + 1.6 * torch.randn(count, 3, 8, 8, generator=generator), labels


@cache
def _trained(norm: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), norm(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    images, labels = labeled_images(1024, 1)
    for _ in range(5):
        for x, y in zip(images.split(64), labels.split(64), strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


def trained(norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    return copy.deepcopy(_trained(norm))


def accuracy(model: nn.Module, shift: Any = lambda images: images) -> float:
    images, labels = labeled_images(600, 3)
    with torch.inference_mode():
        return float((model(shift(images)).argmax(1) == labels).float().mean())


@pytest.fixture
def images() -> Tensor:
    return labeled_images(150, 2)[0]


def test_corrupted_images_are_classified_better_and_nothing_but_alpha_changes(images: Tensor) -> None:
    model = trained()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clean, corrupted = accuracy(model), accuracy(model, SHIFTS["contrast:2"])
    fit = fit_alpha(model, images, **QUICK)
    assert fit.significant
    assert accuracy(model, SHIFTS["contrast:2"]) > corrupted + 0.05
    assert accuracy(model) > clean - 0.05
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert {name for name in after if name not in before} == {f"{name}.alpha" for name in weighed_layers(model)}
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_what_is_estimated_without_labels_is_near_what_labels_say() -> None:
    images, labels = labeled_images(400, 2)
    own = fit_alpha(trained(), images, temperature=1.0, **QUICK)
    known = fit_alpha(trained(), [(images, labels)], targets="labels", **QUICK)
    for name in ("clean", "corrupted"):
        assert own.gains[name].after == pytest.approx(known.gains[name].after, abs=0.08)


def test_labels_are_ignored_unless_they_are_the_targets(images: Tensor) -> None:
    plain = fit_alpha(trained(), images, **QUICK)
    wrong = fit_alpha(trained(), [(part, torch.zeros(len(part))) for part in images.split(64)], **QUICK)
    assert plain.to_dict() == wrong.to_dict()


def test_set_moves_along_the_curve_from_the_baseline(images: Tensor) -> None:
    plain, model = trained(), trained()
    fit = fit_alpha(model, images, **QUICK)
    assert fit.set(0).strength == 0
    assert torch.equal(model(images), plain(images))
    full = fit.set(1.0)
    for name, layer in weighed_layers(model).items():
        assert torch.equal(torch.as_tensor(layer._alpha), full.fitted[name])
    half = fit.set(0.5)
    for name, alpha in half.alpha.items():
        torch.testing.assert_close(alpha, fit.fitted[name] / 2)
    with pytest.raises(ValueError, match=r"strength=1\.5"):
        fit.set(1.5)


@pytest.mark.parametrize(("per", "different"), [("layer", 2), ("model", 1)])
def test_one_alpha_per_layer_or_model(per: str, different: int, images: Tensor) -> None:
    fit = fit_alpha(trained(), images, per=per, **QUICK)
    assert len({float(alpha) for tensor in fit.fitted.values() for alpha in tensor}) == different


@pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")
def test_group_norm_starts_from_alpha_1_and_is_calibrated_on_the_images(images: Tensor) -> None:
    plain, model = trained(group_norm), trained(group_norm)
    fit = fit_alpha(model, images, require_significant=False, **QUICK)
    assert fit.baseline == 1
    assert all(int(layer.num_batches_tracked) > 0 for layer in weighed_layers(model).values())
    fit.set(0)
    torch.testing.assert_close(model(images), plain(images), rtol=1e-4, atol=1e-4)


def test_alpha_is_unchanged_where_nothing_is_gained(images: Tensor) -> None:
    plain, model = trained(), trained()
    harmless = {name: (lambda images: images + 0.001) for name in ("a", "b", "c")}
    with pytest.warns(UncertainGainWarning, match="alpha unchanged"):
        fit = fit_alpha(model, images, shifts=harmless, steps=5, progress=False)
    assert fit.strength == 0
    assert torch.equal(model(images), plain(images))


def test_an_interrupted_fit_leaves_the_model_as_it_was_and_continues(images: Tensor, tmp_path: Any) -> None:
    calls = 0

    def interrupted(shift: Any) -> Any:
        def function(images: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == 150:
                raise KeyboardInterrupt
            return shift(images)

        return function

    model = trained()
    file = tmp_path / "unfinished"
    options = QUICK | {"shifts": {name: interrupted(shift) for name, shift in SHIFTS.items()}, "resume": file}
    with pytest.raises(KeyboardInterrupt):
        fit_alpha(model, images, **options)
    assert type(model[1]) is nn.BatchNorm2d
    assert torch.equal(model(images), trained()(images))
    resumed = fit_alpha(model, images, **options)
    whole = fit_alpha(trained(), images, **QUICK)
    assert calls < 300
    for name, alpha in whole.fitted.items():
        torch.testing.assert_close(resumed.fitted[name], alpha)
    with pytest.raises(ValueError, match="belongs to another model"):
        fit_alpha(trained(), images + 1, **options)


class Activation(nn.Module):
    """A setting that neither repr nor state_dict shows."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)  # type: ignore[no-any-return]


def with_activation(function: Any) -> nn.Sequential:
    model = trained()
    model[2] = Activation(function)
    return model


def scaled(factor: float) -> dict[str, Any]:
    return SHIFTS | {"loud": lambda images: factor * images}


@pytest.mark.parametrize("stopped", [True, False])
def test_a_fit_is_not_continued_with_another_model_or_shift(images: Tensor, tmp_path: Any, stopped: bool) -> None:
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if stopped and calls == 60:
            raise KeyboardInterrupt

    options = {"steps": 25, "progress": False, "resume": tmp_path / "unfinished"}
    model = with_activation(F.relu)
    model[0].register_forward_hook(count)
    with contextlib.suppress(KeyboardInterrupt):
        fit_alpha(model, images, shifts=scaled(3.0), **options)
    with pytest.raises(ValueError, match="belongs to a model with other outputs"):
        fit_alpha(with_activation(F.gelu), images, shifts=scaled(3.0), **options)
    with pytest.raises(ValueError, match="belongs to another shift 'loud'"):
        fit_alpha(with_activation(F.relu), images, shifts=scaled(0.2), **options)
    resumed = fit_alpha(with_activation(F.relu), images, shifts=scaled(3.0), **options)
    whole = fit_alpha(with_activation(F.relu), images, shifts=scaled(3.0), steps=25, progress=False)
    for name, alpha in whole.fitted.items():
        torch.testing.assert_close(resumed.fitted[name], alpha)


def test_a_fit_with_a_random_shift_is_continued(images: Tensor, tmp_path: Any) -> None:
    shifts = SHIFTS | {"random": lambda images: images + 0.5 * torch.randn_like(images)}
    options = QUICK | {"shifts": shifts, "resume": tmp_path / "unfinished"}
    torch.manual_seed(0)
    first = fit_alpha(trained(), images, **options)
    torch.manual_seed(1)
    again = fit_alpha(trained(), images, **options)
    assert first.to_dict() == again.to_dict()


def test_a_result_is_saved_read_and_set_on_a_model(images: Tensor, tmp_path: Any) -> None:
    model = trained()
    fit = fit_alpha(model, images, **QUICK)
    fit.save(tmp_path / "fit.json")
    read = AlphaFit.load(tmp_path / "fit.json")
    assert read.to_dict() == fit.to_dict()
    assert read.verdict() == fit.verdict()
    with pytest.raises(ValueError, match=r"pass set\(strength, model\)"):
        read.set(1.0)
    other = betternorm.convert(trained(), "weighed")
    read.set(fit.strength, other)
    torch.testing.assert_close(other(images), model(images), rtol=1e-4, atol=1e-4)
    torch.save(model.state_dict(), tmp_path / "fitted.pt")
    loaded = betternorm.load(trained(), tmp_path / "fitted.pt")
    assert torch.equal(loaded(images), model(images))


def test_the_report_names_what_was_estimated_and_set(images: Tensor) -> None:
    fit = fit_alpha(trained(), images, max_clean_drop=1.0, **QUICK)
    text = str(fit)
    assert "estimated accuracy" in text
    for name in ("clean", "contrast", "bright", "loud", "corrupted"):
        assert re.search(rf"^{name}\b", text, re.MULTILINE)
    assert len(fit.table) == 5
    assert [row["strength"] for row in fit.curve] == [0.0, 0.125, 0.25, 0.375, 0.5, 0.75, 1.0]


def test_a_higher_temperature_makes_changed_predictions_cheaper(images: Tensor) -> None:
    drops = [fit_alpha(trained(), images, temperature=t, **QUICK).curve[-1]["clean"] for t in (1.0, 1e6)]
    assert drops[0] != drops[1]
    assert drops[1] == pytest.approx(1 / CLASSES, abs=1e-3)  # every class is as probable


def test_the_temperature_of_an_overconfident_model_is_found_without_labels() -> None:
    """Logits that are four times as large, and the same estimates."""
    images, labels = labeled_images(300, 2)
    loud = trained()
    with torch.no_grad():
        for parameter in loud[-1].parameters():
            parameter.mul_(4)
    estimated = {}
    for temperature in (None, 1.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UncertainGainWarning)
            fit = fit_alpha(copy.deepcopy(loud), images, temperature=temperature, **QUICK)
        estimated[temperature] = fit.curve[0]["clean"]
    with torch.inference_mode():
        right = float((loud(images).argmax(1) == labels).float().mean())
    assert abs(estimated[None] - right) < abs(estimated[1.0] - right)


def test_the_curve_is_drawn(images: Tensor, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    fit_alpha(trained(), images, **QUICK).plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_other_models_are_fitted_through_forward(images: Tensor) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = trained()

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"answers": [self.inner(x)]}

    fit = fit_alpha(Wrapped(), images, forward=lambda model, x: model(x)["answers"][0], **QUICK)
    same = fit_alpha(trained(), images, **QUICK)
    torch.testing.assert_close(fit.fitted["inner.1"], same.fitted["1"])


def _declaring(size: tuple[int, ...]) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.pretrained_cfg = {"input_size": size}  # type: ignore[assignment]
    return model


NAN = torch.rand(150, 3, 8, 8)
NAN[7, 0, 0, 0] = torch.nan
BAD = [
    ({"images": torch.rand(40, 3, 8, 8)}, "holds 40 different images; fit_alpha needs at least 100"),
    ({"images": torch.rand(1, 3, 8, 8).expand(150, -1, -1, -1)}, "holds 1 different images"),
    ({"images": NAN}, "contains NaN or infinite values, first in image 7"),
    ({"images": torch.rand(150, 1, 8, 8)}, r"the model fails on images of shape \(1, 8, 8\)"),
    ({"images": [torch.zeros(64, dtype=torch.long)]}, r"torch.int64 \(64,\); expected images"),
    ({"images": iter([torch.rand(150, 3, 8, 8)])}, "only once"),
    ({"shifts": None}, "needs mean=... and std=..."),
    ({"shifts": None, "mean": 0.5, "std": 0.2, "images": 9 * torch.rand(150, 3, 8, 8)}, "pixels run from"),
    ({"shifts": None, "mean": 0.5, "std": 0.2, "images": torch.rand(150, 3, 8, 8)}, "look unnormalized"),
    ({"shifts": ["rain"], "mean": 0.0, "std": 1.0}, "shift 'rain' is not known"),
    ({"shifts": {"night": [1]}}, "needs functions of images"),
    ({"shifts": {"clean": torch.sqrt}}, "none 'clean'"),
    ({"model": _declaring((3, 224, 224))}, r"declares \(3, 224, 224\); resize"),
    ({"temperature": 0.0}, "temperature=0.0"),
    ({"per": "group"}, "per='group'"),
    ({"targets": "guess"}, "targets='guess'"),
    ({"steps": 0}, "steps=0"),
    ({"folds": 1}, "folds=1"),
    ({"max_clean_drop": -1.0}, "max_clean_drop=-1.0"),
    ({"model": nn.Sequential(nn.Conv2d(3, 4, 3))}, "no BatchNorm, GroupNorm or InstanceNorm"),
    ({"model": nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(0))}, "expects logits"),
]


@pytest.mark.parametrize(("changed", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_bad_input_is_refused_in_one_line_and_the_model_unchanged(
    changed: dict[str, Any], message: str, images: Tensor
) -> None:
    options: dict[str, Any] = {"model": trained(), "images": images} | QUICK | changed
    model = options.pop("model")
    kinds = [type(module) for module in model.modules()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UncertainGainWarning)
        with pytest.raises((ValueError, TypeError), match=message) as caught:
            fit_alpha(model, **options)
    assert "\n" not in str(caught.value)
    assert kinds == [type(module) for module in model.modules()]
