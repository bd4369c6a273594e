"""All kinds of loaders, options, and interrupted searches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from weighing_networks import (
    answer,
    batches,
    distance,
    known,
    noisy,
    small_network,
    squared_error,
    two_answers,
    two_layers,
    two_targets,
)

from betternorm.weighing.alpha import get_alpha
from betternorm.weighing.calibration import calibrate
from betternorm.weighing.result import AlphaSearch
from betternorm.weighing.search import tune_alpha

pytestmark = [
    pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning"),
    pytest.mark.filterwarnings("ignore:per_layer is deprecated:DeprecationWarning"),
]


def evaluated(loader: Any, **options: Any) -> AlphaSearch:
    return tune_alpha(small_network(), loader, grid=[0.1], require_significant=False, folds=2, **options)


def test_tuples_dicts_and_a_function_of_the_users_give_the_same(images: Tensor, labels: Tensor) -> None:
    pairs = batches(images, labels)
    found = [
        evaluated(pairs),
        evaluated([{"pixel_values": x, "labels": y} for x, y in pairs]),
        evaluated(
            [{"a": x, "b": [y]} for x, y in pairs], forward=lambda model, batch: (model(batch["a"]), *batch["b"])
        ),
        evaluated(DataLoader(TensorDataset(images, labels), batch_size=16)),
    ]
    assert all(one.table == found[0].table for one in found)


def test_batch_size_and_shuffling_change_nothing(images: Tensor, labels: Tensor) -> None:
    plain = evaluated(batches(images, labels))
    shuffled = evaluated(DataLoader(TensorDataset(images, labels), batch_size=7, shuffle=True))
    for one, other in zip(plain.table, shuffled.table, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    one, other = (
        (gain.before, gain.after, gain.low, gain.high)
        for gain in (plain.gains["cross_entropy"], shuffled.gains["cross_entropy"])
    )
    assert one == pytest.approx(other, rel=1e-4)


def test_a_shuffling_loader_is_matched_image_by_image_between_passes(images: Tensor, labels: Tensor) -> None:
    plain = tune_alpha(small_network(), batches(images, labels), require_significant=False)
    loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
    shuffled = tune_alpha(small_network(), loader, require_significant=False)
    assert shuffled.best == plain.best
    assert vars(shuffled.gains["top1"]) == pytest.approx(vars(plain.gains["top1"]))


def test_random_augmentation_is_noticed(images: Tensor, labels: Tensor) -> None:
    class Augmented:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(batches(images + 0.1 * torch.randn_like(images), labels))

    model = small_network()
    with pytest.raises(ValueError, match=r"other examples .*switch random augmentation off"):
        tune_alpha(model, Augmented())
    assert get_alpha(model) == 0.0


def test_a_limit_takes_the_first_examples(images: Tensor, labels: Tensor) -> None:
    limited = evaluated(batches(images, labels), max_examples=20)
    assert limited.examples == 20
    assert limited.table == evaluated(batches(images[:20], labels[:20])).table


@pytest.mark.parametrize(
    ("loader", "kind", "message"),
    [
        (iter([]), TypeError, "can be iterated only once"),
        ([], ValueError, "no batches"),
        ([torch.randn(4, 3, 8, 8)], TypeError, "pair .* forward=function"),
        ([{"image": torch.randn(4, 3, 8, 8)}], TypeError, "a dict with image"),
        ([(torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 10]))], ValueError, "labels run from 0 to 10.*10 outputs"),
        ([(torch.randn(4, 3, 8, 8), torch.tensor([0, -1, 2, 3]))], ValueError, "labels run from -1 to 3"),
        ([(torch.randn(4, 3, 8, 8), torch.rand(4, 10))], ValueError, "logits \\(N, classes\\) and labels"),
    ],
)
def test_what_cannot_be_evaluated_says_why(loader: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        tune_alpha(small_network(), loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"metrics": ("top2",)},
            "metric 'top2' is not known; known are top1, top5, cross_entropy, calibrated_cross_entropy, ece",
        ),
        ({"objective": "speed"}, "metric 'speed' is not known"),
        ({"grid": 1}, "grid=1 must be 2 or more"),
        ({"grid": [0.5, 1.2]}, "alpha=1.2 must lie between"),
        ({"folds": 1}, "folds=1 must be 2 or more"),
        ({"max_examples": 0}, "max_examples=0 must be 1 or more"),
        ({"confidence": 95}, "confidence=95 must lie between 0 and 1"),
    ],
)
def test_options_that_cannot_be_say_why(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tune_alpha(small_network(), [], **options)


def test_a_network_without_norm_layers_has_nothing_to_tune() -> None:
    with pytest.warns(UserWarning, match="nothing to convert"), pytest.raises(ValueError, match="no alpha to tune"):
        tune_alpha(nn.Sequential(nn.Linear(3, 3)), [])


def test_modes_are_restored_and_outputs_in_wrappers_understood(images: Tensor, labels: Tensor) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_network()

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            assert not torch.is_grad_enabled()
            return {"logits": self.inner(x)}

    model = Wrapped().train()
    model.inner[4].eval()
    found = tune_alpha(model, batches(images, labels), grid=[0.1], require_significant=False, folds=2)
    assert model.inner[1].training
    assert not model.inner[4].training
    assert found.table == evaluated(batches(images, labels)).table


class Interrupted:
    """Counts forward passes of batches, and is interrupted after so many."""

    def __init__(self, after: int | None = None) -> None:
        self.calls, self.after = 0, after

    def __call__(self, model: nn.Sequential, batch: Any) -> tuple[Tensor, Tensor]:
        if self.calls == self.after:
            raise KeyboardInterrupt
        self.calls += 1
        return two_answers(model, batch)


@pytest.mark.parametrize("after", [0, 3, 130, 300, 640])
def test_an_interrupted_search_goes_on_where_it_stopped(after: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"metrics": (), "objective": distance, "per_layer": True}
    whole = Interrupted()
    expected = tune_alpha(two_layers(), two_targets(0.1, 0.5), forward=whole, **options)

    model, first, second = two_layers(), Interrupted(after), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        tune_alpha(model, two_targets(0.1, 0.5), forward=first, resume=tmp_path / "kept.pt", **options)
    assert get_alpha(model) == 0.0
    found = tune_alpha(model, two_targets(0.1, 0.5), forward=second, resume=tmp_path / "kept.pt", **options)
    assert found == expected
    again = 100 if after == 640 else 6  # the last pass, which judges; or what was under way of one batch
    assert whole.calls <= first.calls + second.calls <= whole.calls + again


def test_what_was_kept_of_another_network_is_not_used(tmp_path: Path) -> None:
    tune_alpha(known(), noisy(0.3), (), squared_error, forward=answer, resume=tmp_path / "kept.pt")
    other = known()
    other[0].running_mean.fill_(1)
    with pytest.raises(ValueError, match="belongs to another model"):
        tune_alpha(other, noisy(0.3), (), squared_error, forward=answer, resume=tmp_path / "kept.pt")


@pytest.mark.parametrize("finished", [True, False])
def test_what_was_kept_for_other_labels_is_not_used(finished: bool, tmp_path: Path) -> None:
    data = noisy(0.3)
    options: dict[str, Any] = {"grid": [0.1, 0.3], "resume": tmp_path / "kept.pt"}
    tune_alpha(known(), data, (), squared_error, forward=answer, **options)
    corrected = [(x, y + 0.2) for x, y in data]
    if not finished:
        options["grid"] = [0.1, 0.3, 0.5]
    with pytest.raises(ValueError, match="belongs to other images or labels"):
        tune_alpha(known(), corrected, (), squared_error, forward=answer, **options)


def test_a_stream_without_a_length_will_do(images: Tensor, labels: Tensor) -> None:
    class Stream(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return iter(zip(images, labels, strict=True))

    loader = DataLoader(Stream(), batch_size=16)
    assert evaluated(loader).table == evaluated(batches(images, labels)).table
    assert evaluated(loader, max_examples=20).examples == 20
    assert calibrate(small_network(), loader, passes=1) == 1


def test_a_file_that_is_no_search_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "kept.pt").write_text("hello")
    with pytest.raises(ValueError, match="is not a file of intermediate results"):
        tune_alpha(known(), noisy(0.3), (), squared_error, forward=answer, resume=tmp_path / "kept.pt")
