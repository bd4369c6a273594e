"""Intermediate results are used for the same model, data, metrics and options, and for nothing else."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from weighing_networks import batches, small_network

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.metrics import Metric
from betternorm.weighing.resume import ResumeFile, signature
from betternorm.weighing.search import tune_alpha

pytestmark = pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning")


def network(
    activation: type[nn.Module] = nn.Tanh, eps: float = 1e-5, pool: type[nn.Module] = nn.AvgPool2d, group: int = 0
) -> nn.Sequential:
    """The weights are the same whatever the options."""
    torch.manual_seed(1)
    norm = nn.GroupNorm(group, 8) if group else nn.BatchNorm2d(8, eps=eps)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, activation(), pool(3), nn.Flatten(), nn.Linear(32, 10))
    return convert(model.eval(), "weighed")


def error(scale: float) -> Metric:
    def squared(output: Tensor, target: Tensor) -> Tensor:
        return scale * (output.softmax(1) - nn.functional.one_hot(target, 10)).square().sum(1)

    return Metric("error", squared, higher_is_better=False)


def halved(model: nn.Module, batch: Any) -> tuple[Any, Any]:
    return model(batch[0]) / 2, batch[1]


def search(model: nn.Module, loader: Any, path: Path, **options: Any) -> Any:
    options = {"metrics": ("top1",), "objective": error(1.0), "grid": [0.1, 0.3]} | options
    return tune_alpha(model, loader, resume=path, **options)


def another_norm_converted() -> nn.Module:
    """Three layers, of which two have an alpha."""
    model = small_network()
    model[4] = convert(nn.Sequential(model[4]), "weighed")[0]
    model[1] = convert(nn.Sequential(model[1]), "weighed")[0]
    return model


@pytest.mark.parametrize(
    ("first", "second", "options"),
    [
        (network, functools.partial(network, nn.GELU), {}),
        (network, functools.partial(network, eps=1e-2), {}),
        (network, functools.partial(network, pool=nn.MaxPool2d), {}),
        (network, network, {"forward": halved}),
        (functools.partial(network, group=2), functools.partial(network, group=4), {}),
        (network, network, {"objective": Metric("error", lambda o, t: o.square().sum(1), False)}),
        (lambda: convert(small_network(), "weighed"), another_norm_converted, {}),
    ],
    ids=["activation", "eps", "pooling", "forward", "channels_per_group", "metric", "converted layers"],
)
def test_another_model_or_metric_is_an_error(
    first: Callable[[], nn.Module],
    second: Callable[[], nn.Module],
    options: dict[str, Any],
    images: Tensor,
    labels: Tensor,
    tmp_path: Path,
) -> None:
    loader = batches(images, labels)
    search(first(), loader, tmp_path / "search.pt")
    model = second()
    alpha = get_alpha(model)
    with pytest.raises(ValueError, match="belongs to another model, other metrics or other options"):
        search(model, loader, tmp_path / "search.pt", **options)
    assert get_alpha(model) == alpha


def test_a_forward_function_with_another_constant_is_recognized_by_its_outputs(
    images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    def scaled_by(factor: float) -> Any:
        return lambda model, batch: (model(batch[0]) * factor, batch[1])

    loader = batches(images, labels)
    search(network(), loader, tmp_path / "search.pt", forward=scaled_by(1.0))
    with pytest.raises(ValueError, match="belongs to a model with other outputs"):
        search(network(), loader, tmp_path / "search.pt", forward=scaled_by(1.001))
    search(network(), loader, tmp_path / "search.pt", forward=scaled_by(1.000001))  # rounding


def test_a_metric_with_another_constant_is_recognized_by_its_values(
    images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    loader = batches(images, labels)
    search(network(), loader, tmp_path / "search.pt")
    with pytest.raises(ValueError, match="or to another metric"):
        search(network(), loader, tmp_path / "search.pt", objective=error(2.0))


def test_another_shift_of_the_same_name_is_an_error(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    def brighter(by: float) -> dict[str, Any]:
        return {"brighter": lambda x: x + by}

    loader = batches(images, labels)
    search(network(), loader, tmp_path / "search.pt", shifts=brighter(0.1))
    with pytest.raises(ValueError, match="other outputs, or to another metric"):
        search(network(), loader, tmp_path / "search.pt", shifts=brighter(0.5))


def test_an_interrupted_first_pass_is_checked_too(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    def stops_after(calls: int, factor: float) -> Any:
        count = 0

        def forward(model: nn.Module, batch: Any) -> Any:
            nonlocal count
            count += 1
            if count > calls:
                raise KeyboardInterrupt
            return model(batch[0]) * factor, batch[1]

        return forward

    loader = batches(images, labels)
    with pytest.raises(KeyboardInterrupt):
        search(network(), loader, tmp_path / "search.pt", forward=stops_after(5, 1.0))
    with pytest.raises(ValueError, match="belongs to a model with other outputs"):
        search(network(), loader, tmp_path / "search.pt", forward=stops_after(1000, 2.0))


def test_a_shuffling_loader_resumes(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    calls = 0

    def counted(model: nn.Module, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        return model(batch[0]), batch[1]

    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    first = search(network(), loader, tmp_path / "search.pt", forward=counted)
    calls = 0
    assert search(network(), loader, tmp_path / "search.pt", forward=counted) == first
    assert calls == 1  # to recognize the model


def test_alphas_that_are_set_do_not_matter(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    loader = batches(images, labels)
    first = search(network(), loader, tmp_path / "search.pt", require_significant=False)
    tuned = network()
    tuned[1].alpha = 0.25
    assert search(tuned, loader, tmp_path / "search.pt", require_significant=False) == first


def test_a_file_of_version_0_1_is_an_error(images: Tensor, labels: Tensor, tmp_path: Path) -> None:
    torch.save({"signature": "0" * 64, "values": {}, "counts": {}, "passes": 1}, tmp_path / "search.pt")
    with pytest.raises(ValueError, match=r"search.pt' was written by another version .*remove the file") as caught:
        search(network(), batches(images, labels), tmp_path / "search.pt")
    assert "\n" not in str(caught.value)


def test_signatures_tell_functions_apart_by_their_code() -> None:
    def ones(scale: int) -> Any:
        return [lambda x: x + 1, lambda x: x + 2][scale]

    assert signature(ones(0)) != signature(ones(1))
    assert signature(ones(0)) == signature(ones(0))
    assert signature(functools.partial(ones, 1)) != signature(functools.partial(ones, 2))
    assert signature({"a": 1, "b": 2}) == signature({"b": 2, "a": 1})
    assert signature(["ab"]) != signature(["a", "b"])


def test_signatures_do_not_depend_on_objects_addresses() -> None:
    model = network()
    model.marker = object()
    assert signature(model) == signature(copy.deepcopy(model))


def test_a_disk_that_is_full_is_an_error_with_the_name_of_the_file(tmp_path: Path) -> None:
    file = ResumeFile(tmp_path / "missing" / "search.pt", lambda: "")
    with pytest.raises(OSError, match="cannot be written: there is no folder") as caught:
        file.save(lambda: {"values": torch.zeros(3)})
    assert caught.value.filename == str(tmp_path / "missing" / "search.pt")
