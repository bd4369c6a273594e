"""What timm's training script and torchvision's models expect of a norm layer and of groups."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import betternorm
from betternorm.integrations import torchvision as torchvision_support
from betternorm.integrations.checkpoints import load_checkpoint

torchvision_support.ready_if_installed()
timm = pytest.importorskip("timm")
timm_optim = pytest.importorskip("timm.optim")
timm_scheduler = pytest.importorskip("timm.scheduler")
timm_utils = pytest.importorskip("timm.utils")
torchvision = pytest.importorskip("torchvision")

EXAMPLE = torch.zeros(2, 3, 32, 32)


@pytest.mark.parametrize("opt", ["sgd", "adamw", "lamb"])
def test_timms_optimizers_take_our_groups_as_they_are(opt: str) -> None:
    model = timm.create_model("resnet10t", num_classes=4)
    groups = partial(betternorm.param_groups, weight_decay=0.03, example_input=torch.randn(4, 3, 32, 32))
    optimizer = timm_optim.create_optimizer_v2(model, opt=opt, lr=0.1, param_group_fn=groups)
    got = {frozenset(map(id, group["params"])): group["weight_decay"] for group in optimizer.param_groups}
    wanted = {frozenset(map(id, group["params"])): group["weight_decay"] for group in groups(model)}
    assert got == wanted


def test_timms_schedules_move_our_groups() -> None:
    model = timm.create_model("resnet10t", num_classes=4)
    groups = betternorm.param_groups(model, 0.03, example_input=torch.randn(4, 3, 32, 32))
    optimizer = torch.optim.SGD(groups, lr=0.1)
    scheduler, _ = timm_scheduler.create_scheduler_v2(optimizer, sched="cosine", num_epochs=4)
    scheduler.step(2)
    rates = {group["lr"] for group in optimizer.param_groups}
    assert len(rates) == 1
    assert rates.pop() < 0.1


def test_averaged_weights_and_timms_checkpoints_keep_alpha(tmp_path: Path) -> None:
    model = betternorm.convert(timm.create_model("resnet10t", num_classes=4), "ghost", ghost_size=4)
    averaged = timm_utils.ModelEmaV3(model, decay=0.5)
    averaged.update(model)
    assert isinstance(averaged.module.bn1, betternorm.GhostBatchNorm)
    betternorm.set_alpha(averaged.module, 0.125)
    torch.save(
        {"arch": "resnet10t", "state_dict": model.state_dict(), "state_dict_ema": averaged.module.state_dict()},
        tmp_path / "last.pth.tar",
    )
    fresh = timm.create_model("resnet10t", num_classes=4)
    again = load_checkpoint(fresh, tmp_path / "last.pth.tar", ema=True)
    assert betternorm.get_alpha(again) == 0.125


@pytest.mark.parametrize(
    "layer",
    [partial(betternorm.GhostBatchNorm, ghost_size=2), partial(betternorm.BatchGroupNorm, 8), betternorm.BatchRenorm],
    ids=["ghost", "batch group", "renorm"],
)
def test_torchvision_builds_its_models_from_our_layers(layer: Any) -> None:
    model = torchvision.models.resnet18(num_classes=4, norm_layer=layer)
    assert isinstance(model.layer4[1].bn2, betternorm.GroupedBatchNorm)
    assert model(torch.randn(4, 3, 32, 32)).shape == (4, 4)
    plain = torchvision.models.resnet18(num_classes=4)
    model.load_state_dict(plain.state_dict())
    plain.load_state_dict(model.state_dict())


def test_torchvisions_detection_backbone_with_frozen_statistics_can_be_weighed() -> None:
    frozen = torchvision.ops.misc.FrozenBatchNorm2d
    model = torchvision.models.resnet18(num_classes=4, norm_layer=frozen).eval()
    before = model(EXAMPLE)
    betternorm.convert(model, "weighed")
    torch.testing.assert_close(model(EXAMPLE), before)
    betternorm.set_alpha(model, 0.1)
    assert model(torch.randn(2, 3, 32, 32)).isfinite().all()
