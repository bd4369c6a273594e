"""The layer against recorded outputs of the layer that the paper's authors released."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from betternorm import GroupedBatchNorm

VECTORS = Path(__file__).parent / "golden"
NAMES = [
    "batchgroup4x2_alpha03",
    "batchnorm_alpha0",
    "batchnorm_alpha02",
    "ghost4_alpha01",
    "groupnorm3_alpha09",
    "groupnorm3_alpha1",
]
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.fixture(params=NAMES)
def golden(request: pytest.FixtureRequest) -> dict[str, np.ndarray]:
    return dict(np.load(VECTORS / f"{request.param}.npz"))


def test_every_golden_file_is_tested() -> None:
    assert sorted(path.stem for path in VECTORS.glob("*.npz")) == NAMES


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("way")
def test_golden(golden: dict[str, np.ndarray], layout: str) -> None:
    def recorded(name: str) -> torch.Tensor:
        tensor = torch.from_numpy(golden[name])
        return tensor.contiguous(memory_format=LAYOUTS[layout]) if tensor.dim() == 4 else tensor

    channels = len(golden["gamma"])
    layer = GroupedBatchNorm(
        channels,
        int(golden["channels_per_group"]) or channels // int(golden["channel_groups"]),
        int(golden["examples_per_group"]) or None,
        eps=float(golden["eps"]),
        momentum=1 - float(golden["decay"]),
        alpha=float(golden["alpha"]),
    )
    with torch.no_grad():
        layer.weight.copy_(recorded("gamma"))
        layer.bias.copy_(recorded("beta"))

    for x, y in zip(recorded("x_train"), recorded("y_train"), strict=True):
        x = x.contiguous(memory_format=LAYOUTS[layout]).requires_grad_()
        output = layer(x)
        close(output, y)
    output.backward(recorded("dy"))
    close(x.grad, recorded("dx"))
    close(layer.weight.grad, recorded("dgamma"))
    close(layer.bias.grad, recorded("dbeta"))
    state = layer.state_dict()
    close(state["running_mean"], recorded("moving_x"))
    close(state["running_var"] + state["running_mean"] ** 2, recorded("moving_x2"))

    layer.eval()
    for alpha in (layer.alpha, torch.full((channels,), float(golden["alpha"]))):
        layer.alpha = alpha
        close(layer(recorded("x_eval")), recorded("y_eval"))
        with torch.no_grad():
            close(layer(recorded("x_eval")), recorded("y_eval"))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.detach(), expected, rtol=1e-5, atol=1e-5)
