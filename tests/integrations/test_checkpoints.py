"""Checkpoints as people write them, and those that cannot be used."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import betternorm
from betternorm.conversion.convert import convert
from betternorm.errors import UserError
from betternorm.integrations.checkpoints import load_checkpoint, save_checkpoint
from betternorm.weighing.alpha import get_alpha, set_alpha


def network(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = network()
    model(torch.randn(8, 3, 8, 8))
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


WRITTEN: dict[str, Any] = {
    "plain": lambda w: w,
    "state_dict": lambda w: {"state_dict": w, "epoch": 3},
    "model_state_dict and module.": lambda w: {"model_state_dict": prefixed(w, "module."), "loss": 0.1},
    "model within state": lambda w: {"model": {"state_dict": w}},
    "compiled": lambda w: prefixed(w, "_orig_mod."),
    "compiled and distributed": lambda w: {"net": prefixed(w, "module._orig_mod.")},
    "Lightning": lambda w: {"state_dict": prefixed(w, "model."), "pytorch-lightning_version": "2.0", "epoch": 1},
    "before batches were counted": lambda w: {k: v for k, v in w.items() if "num_batches" not in k},
    "beside notes": lambda w: {**w, "epoch": 3},
}


def prefixed(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize("way", WRITTEN)
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
def test_weights_are_found(way: str, suffix: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(WRITTEN[way](weights), tmp_path / f"model{suffix}")
    model = load_checkpoint(network(), tmp_path / f"model{suffix}")
    for name, tensor in model.state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(tensor, weights[name])


def test_safetensors_are_read(weights: dict[str, Tensor], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(prefixed(weights, "module."), tmp_path / "model.safetensors")
    model = load_checkpoint(network(), tmp_path / "model.safetensors")
    assert torch.equal(model[1].running_mean, weights["1.running_mean"])


def test_averaged_weights_are_taken_when_asked(weights: dict[str, Tensor], tmp_path: Path) -> None:
    averaged = {name: tensor + 1 for name, tensor in weights.items()}
    torch.save({"state_dict": weights, "state_dict_ema": averaged}, tmp_path / "model.pt")
    assert torch.equal(load_checkpoint(network(), tmp_path / "model.pt")[0].weight, weights["0.weight"])
    model = load_checkpoint(network(), tmp_path / "model.pt", ema=True)
    assert torch.equal(model[0].weight, averaged["0.weight"])


def test_a_tuned_network_keeps_its_alpha(tmp_path: Path) -> None:
    tuned = convert(network(), "weighed")
    set_alpha(tuned, 0.07)
    torch.save(tuned.state_dict(), tmp_path / "tuned.pt")
    assert get_alpha(load_checkpoint(network(), tmp_path / "tuned.pt")) == 0.07


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_a_written_network_is_loaded_in_one_line(suffix: str, tmp_path: Path) -> None:
    tuned = convert(network(), "weighed").eval()
    set_alpha(tuned, 0.07)
    save_checkpoint(tuned, tmp_path / f"tuned{suffix}")
    again = betternorm.load(network(), tmp_path / f"tuned{suffix}").eval()
    x = torch.randn(2, 3, 8, 8)
    assert get_alpha(again) == 0.07
    assert torch.equal(again(x), tuned(x))


def test_the_file_says_how_it_is_to_be_loaded(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    tuned = convert(network(), "weighed")
    set_alpha(tuned, 0.07)
    save_checkpoint(tuned, tmp_path / "tuned.pt")
    save_checkpoint(tuned, tmp_path / "tuned.safetensors")
    assert "betternorm.load(model, path)" in torch.load(tmp_path / "tuned.pt")._metadata[""]["betternorm"]
    with safetensors.safe_open(tmp_path / "tuned.safetensors", "pt") as file:
        assert "betternorm.load(model, path)" in file.metadata()["betternorm"]


def test_the_file_is_a_plain_state_dict_too(tmp_path: Path) -> None:
    tuned = convert(network(), "weighed")
    set_alpha(tuned, 0.07)
    save_checkpoint(tuned, tmp_path / "tuned.pt")
    weights = torch.load(tmp_path / "tuned.pt")
    again = convert(network(), "weighed")
    again.load_state_dict(weights)
    assert get_alpha(again) == 0.07
    with pytest.raises(RuntimeError, match=r"1\.alpha"):
        network().load_state_dict(weights)


def test_an_untuned_checkpoint_leaves_the_layers_as_they_are(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(weights, tmp_path / "model.pt")
    model = betternorm.load(network(), tmp_path / "model.pt")
    assert type(model[1]) is nn.BatchNorm2d


def test_an_alpha_is_not_given_to_a_layer_with_other_groups(tmp_path: Path) -> None:
    tuned = convert(network(), "batch_group", num_groups=2)
    set_alpha(tuned, 0.07)
    save_checkpoint(tuned, tmp_path / "tuned.pt")
    with pytest.raises(UserError, match=r"groups of 2 channels in layer '1', and the model has groups of 1"):
        betternorm.load(network(), tmp_path / "tuned.pt")
    again = betternorm.load(convert(network(), "batch_group", num_groups=2), tmp_path / "tuned.pt")
    assert get_alpha(again) == 0.07


def test_an_alpha_for_a_layer_that_cannot_have_one_is_refused(weights: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save({**weights, "0.alpha": torch.tensor(0.1)}, tmp_path / "model.pt")
    with pytest.raises(UserError, match="an alpha for layer '0'"):
        betternorm.load(network(), tmp_path / "model.pt")


class Anything:
    pass


class Runs:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code in a pickle was run')",))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.write_bytes(b""), "is damaged or not a checkpoint"),
        (lambda path: path.write_bytes(b"not a checkpoint" * 99), "is damaged or not a checkpoint|more than tensors"),
        (lambda path: path.write_bytes(saved({"0.weight": torch.ones(999)})[:-300]), "is damaged"),
        (lambda path: path.write_bytes(pickle.dumps(Runs())), "could run code"),
        (lambda path: torch.save(Anything(), path), "could run code"),
        (lambda path: torch.save(network(), path), "could run code"),
        (lambda path: torch.save([torch.ones(2)], path), "contains a list; expected a dict of tensors"),
        (lambda path: torch.save({"epoch": 3}, path), "contains no weights: looked under state_dict.*it has epoch"),
        (lambda path: torch.save(network(8).state_dict(), path), r"another architecture: .*\(8, 3, 3, 3\) in the file"),
        (
            lambda path: torch.save(nn.Linear(2, 2).state_dict(), path),
            "another architecture: .* missing .* not in the model",
        ),
    ],
)
def test_what_cannot_be_used_is_told_in_a_line(made: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    made(path)
    with pytest.raises(UserError, match=message) as caught:
        load_checkpoint(network(), path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_safetensors_are_told_in_a_line(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00{}")
    with pytest.raises(UserError, match="is damaged"):
        load_checkpoint(network(), tmp_path / "model.safetensors")


def saved(values: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("depth", [8, 14, 20, 26, 32])
def test_published_checkpoints_are_read(depth: int, external_file: Callable[[str], Path]) -> None:
    from betternorm_lab.models.cifar_resnets import CifarResNet

    path = external_file(f"weights/cifar100_resnets/resnet{depth}_cifar100.pth")
    model = load_checkpoint(CifarResNet(depth), path)
    assert model.bn1.running_var.min() > 0
