"""The callback in a real Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import betternorm
from betternorm.integrations.lightning import BetterNorm, regroup

pl = pytest.importorskip("lightning.pytorch")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),  # few workers, no logger, few batches
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning beside the newest torch
    pytest.mark.filterwarnings("ignore::betternorm.errors.UncertainGainWarning"),
]


class Classifier(pl.LightningModule):
    """Two norm layers: the first is undone by the second, the second reaches the output."""

    def __init__(self, make_schedule: Any = None) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip
        self.make_schedule = make_schedule

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.network(images)
        return output

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", F.cross_entropy(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = optim.SGD(self.parameters(), lr=0.1, weight_decay=1e-3)
        return optimizer if self.make_schedule is None else ([optimizer], [self.make_schedule(optimizer)])


def loader() -> DataLoader[Any]:
    labels = torch.arange(32) % 4
    images = torch.randn(32, 3, 12, 12) + labels[:, None, None, None]
    return DataLoader(TensorDataset(images, labels), 16)


def fit(callback: BetterNorm, module: Classifier | None = None, **options: Any) -> tuple[Any, Classifier]:
    module = module or Classifier()
    trainer = pl.Trainer(
        max_epochs=2,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader(), loader(), **options)
    return trainer, module


def test_advice_is_followed_decay_goes_where_it_acts_and_alpha_is_tuned(capsys: pytest.CaptureFixture[str]) -> None:
    callback = BetterNorm(batch_size=16, diagnose=True)
    trainer, module = fit(callback)
    assert callback.diagnosis is not None
    assert callback.diagnosis.examples == 32
    assert "train_mode" not in [finding.cause for finding in callback.diagnosis.findings]
    assert isinstance(module.network[1], betternorm.GhostBatchNorm)
    assert callback.found is not None
    assert callback.found.examples == 32
    assert betternorm.get_alpha(module) == callback.found.alpha
    decayed, free = trainer.optimizers[0].param_groups
    names = {parameter: name for name, parameter in module.named_parameters()}
    assert [names[p] for p in decayed["params"]] == [
        "network.0.weight", "network.3.weight", "network.4.weight", "network.4.bias", "network.8.weight",
    ]  # fmt: skip
    assert (decayed["weight_decay"], free["weight_decay"]) == (1e-3, 0)
    assert {"network.1.weight", "network.1.bias", "network.0.bias"} <= {names[p] for p in free["params"]}
    assert "Upgraded for a batch size of 16" in capsys.readouterr().out


def test_weighed_without_tuning_trains_exactly_as_before() -> None:
    torch.manual_seed(1)
    plain = Classifier()
    state = {name: value.clone() for name, value in plain.state_dict().items()}
    data = loader()
    converted = Classifier()
    converted.load_state_dict(state)
    options: dict[str, Any] = {"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
    options |= {"enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(**options).fit(plain, data, data)
    pl.Trainer(**options, callbacks=[BetterNorm(norm_decay=None, tune=False)]).fit(converted, data, data)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(converted.named_parameters())[name], parameter, rtol=1e-4, atol=1e-5)
    assert betternorm.get_alpha(converted) == 0


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: optim.lr_scheduler.CosineAnnealingLR(o, 4),
        lambda o: optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
        lambda o: optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
        lambda o: optim.lr_scheduler.SequentialLR(
            o, [optim.lr_scheduler.ConstantLR(o, 0.1, 1), optim.lr_scheduler.ExponentialLR(o, 0.5)], [1]
        ),
    ],
)
def test_schedules_move_all_groups_alike(schedule: Any) -> None:
    trainer, _ = fit(BetterNorm(to="weighed", tune=False), Classifier(schedule))
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    assert len(rates) == 2
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0] != 0.1
    assert len(trainer.lr_scheduler_configs[0].scheduler.get_last_lr()) == 2


def test_checkpoints_fit_on_resuming_and_on_testing(tmp_path: Path) -> None:
    callback = BetterNorm(to="ghost", ghost_size=4)
    trainer, module = fit(callback)
    betternorm.set_alpha(module, 0.25)
    trainer.save_checkpoint(tmp_path / "run.ckpt")

    fresh = Classifier()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was configured|.*You're resuming from a checkpoint")
        tester = pl.Trainer(
            callbacks=[BetterNorm(to="ghost", ghost_size=4)],
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        tester.test(fresh, loader(), ckpt_path=tmp_path / "run.ckpt", verbose=False, weights_only=False)
    assert betternorm.get_alpha(fresh) == 0.25
    image = torch.randn(1, 3, 12, 12)
    torch.testing.assert_close(fresh.eval()(image), module.eval()(image))


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_without_validation_data_alpha_stays() -> None:
    callback = BetterNorm(norm_decay=None)
    trainer = pl.Trainer(
        max_epochs=1,
        limit_val_batches=0,
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.warns(UserWarning, match="alpha was not tuned: the Trainer has no validation data"):
        trainer.fit(Classifier(), loader())
    assert callback.found is None


def test_regroup_keeps_the_names_and_options_of_a_group() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = optim.AdamW(net.named_parameters(), lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    assert regroup(optimizer, {net[0].weight}) == [0]
    kept, moved = optimizer.param_groups
    assert kept["param_names"] == ["0.weight"]
    assert moved["param_names"] == ["0.bias", "1.weight", "1.bias"]
    assert (moved["betas"], moved["lr"], moved["weight_decay"]) == ((0.8, 0.9), 0.01, 0.0)
    net(torch.randn(3, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 8, "to": "ghost"}, ValueError, "pass one of them"),
        ({"ghost_size": 8}, TypeError, "ghost_size: options of a conversion need to=..."),
        ({"norm_decay": "some"}, ValueError, "norm_decay is 'some'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BetterNorm(**options)
