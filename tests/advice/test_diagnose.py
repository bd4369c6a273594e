"""`diagnose` names an injected fault first, with its cost, and the printed fix removes it."""

from __future__ import annotations

import copy
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import betternorm
from betternorm.advice.findings import CAUSES, Diagnosis, Finding

CLASSES, SIDE = 6, 8
EXAMPLES = 600


def images(count: int, seed: int, noise: float = 3.5) -> TensorDataset:
    """One pattern per class, under noise."""
    patterns = torch.randn(CLASSES, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return TensorDataset(patterns[labels] + noise * torch.randn(count, 3, SIDE, SIDE, generator=generator), labels)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(),
        nn.Conv2d(12, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * (SIDE // 2) ** 2, CLASSES),
    )  # fmt: skip


def train(
    model: nn.Module,
    data: TensorDataset,
    steps: int,
    batch_size: int = 32,
    rate: float = 0.02,
    prepare: Callable[[nn.Module], object] = nn.Module.train,
) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=5e-3)
    for step in range(steps):
        rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(step))[:batch_size]
        x, y = data[rows]
        prepare(model)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    return train(train(network(), images(2000, 1), 120), images(2000, 1), 40, rate=0.001)


@pytest.fixture
def model(trained: nn.Module) -> nn.Module:
    return copy.deepcopy(trained)


@pytest.fixture(scope="module")
def loader() -> DataLoader[Any]:
    return DataLoader(images(EXAMPLES, 2), 50)


@pytest.fixture(scope="module")
def stats_loader() -> DataLoader[Any]:
    return DataLoader(images(EXAMPLES, 1), 32, shuffle=True, drop_last=True)


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def accuracy(model: nn.Module, loader: Any) -> float:
    with torch.no_grad():
        return float(torch.cat([model(x).argmax(1) == y for x, y in loader]).float().mean())


def faults(diagnosis: Diagnosis) -> list[str]:
    return [finding.cause for finding in diagnosis.findings if not finding.is_note]


# ---- faults ----


def wrong_averages(model: nn.Module) -> None:
    for layer in norms(model):
        assert layer.running_mean is not None
        assert layer.running_var is not None
        layer.running_mean.add_(layer.running_var.sqrt())
        layer.running_var.mul_(3)


def never_updated_enough(model: nn.Module) -> None:
    """A momentum for longer runs: most of the averages is still the 0 and 1 that they begin with."""
    for layer in norms(model):
        layer.reset_running_stats()
        layer.momentum = 0.003
    model[0].weight.data.mul_(3)  # type: ignore[index]
    train(model, images(2000, 1), 30, rate=1e-4)


def half_frozen(model: nn.Module) -> None:
    """Fine-tuning with the statistics of one layer frozen."""

    def prepare(model: nn.Module) -> None:
        model.train()
        model[4].eval()  # type: ignore[index]

    train(model, images(2000, 1), 30, rate=1e-4, prepare=prepare)


def dead_in_training(model: nn.Module) -> None:
    variance = norms(model)[1].running_var
    assert variance is not None
    variance[::3] = 0


def too_large_logits(model: nn.Module) -> None:
    for parameter in model[-1].parameters():  # type: ignore[index]
        parameter.data.mul_(5)


def in_train_mode(model: nn.Module) -> None:
    model.train()


def one_layer_in_train_mode(model: nn.Module) -> None:
    norms(model)[1].train()


def frozen_while_training(model: nn.Module) -> None:
    model.train()
    norms(model)[0].eval()


def gamma_frozen(model: nn.Module) -> None:
    norms(model)[0].weight.requires_grad_(False)


INJECTED: dict[str, Callable[[nn.Module], None]] = {
    "mismatched_averages": wrong_averages,
    "lagging_averages": never_updated_enough,
    "partly_frozen": half_frozen,
    "partly_frozen, modes": frozen_while_training,
    "partly_frozen, gamma": gamma_frozen,
    "dead_channels": dead_in_training,
    "overconfident": too_large_logits,
    "train_mode": in_train_mode,
    "train_mode, one layer": one_layer_in_train_mode,
}


@pytest.mark.parametrize("fault", INJECTED)
def test_an_injected_fault_is_named_first_and_its_fix_runs(
    fault: str, model: nn.Module, loader: Any, stats_loader: Any
) -> None:
    INJECTED[fault](model)
    diagnosis = betternorm.diagnose(model, loader, stats_loader=stats_loader, try_fixes=True)
    first = diagnosis.findings[0]
    assert first.cause == fault.partition(",")[0], str(diagnosis)
    before = accuracy(copy.deepcopy(model), loader)
    names = {"torch": torch, "betternorm": betternorm, "model": model, "images": torch.randn(4, 3, SIDE, SIDE)}
    exec(first.fix, names | {"loader": loader, "stats_loader": stats_loader})
    if first.gain and fault not in ("overconfident", "train_mode", "train_mode, one layer"):
        gain = accuracy(model, loader) - before
        assert first.gain["top1"].low <= gain <= first.gain["top1"].high
    if fault not in ("overconfident", "partly_frozen"):  # the counts of updates stay
        assert betternorm.diagnose(model.eval(), loader, stats_loader=stats_loader).is_healthy


def test_a_healthy_model_is_fine(model: nn.Module, loader: Any, stats_loader: Any) -> None:
    for options in ({}, {"stats_loader": stats_loader}, {"train_batch_size": 32}, {"try_fixes": True}):
        diagnosis = betternorm.diagnose(model, loader, **options)
        assert diagnosis.is_healthy
        assert faults(diagnosis) == []
        assert "The norm layers are fine." in str(diagnosis)


def test_the_cost_is_the_difference_of_two_accuracies(model: nn.Module, loader: Any, stats_loader: Any) -> None:
    """Train mode: batches as the loader gives them against evaluation mode."""
    model.train()
    finding = betternorm.diagnose(model, DataLoader(loader.dataset, 3)).findings[0]
    by_batch = accuracy(copy.deepcopy(model), DataLoader(loader.dataset, 3))
    top1 = finding.cost["top1"]
    assert top1.before == pytest.approx(by_batch)
    assert top1.after == pytest.approx(accuracy(model.eval(), loader))
    assert top1.low < top1.difference < top1.high
    assert finding.layers == ("1", "4")


def test_without_training_data_averages_and_shift_cannot_be_told_apart(model: nn.Module, loader: Any) -> None:
    wrong_averages(model)
    diagnosis = betternorm.diagnose(model, loader)
    assert faults(diagnosis) == ["mismatched_averages", "shifted_data"]
    assert diagnosis.findings[0].cost == diagnosis.findings[1].cost
    assert "stats_loader tells the two apart" in diagnosis.findings[0].why


def test_shifted_data_is_told_from_wrong_averages_by_training_data(model: nn.Module, stats_loader: Any) -> None:
    x, y = images(EXAMPLES, 2).tensors
    shifted = DataLoader(TensorDataset(0.3 * x + 1, y), 50)
    diagnosis = betternorm.diagnose(model, shifted, stats_loader=stats_loader, try_fixes=True)
    assert faults(diagnosis) == ["shifted_data"]
    assert diagnosis.findings[0].gain["top1"].low > 0
    assert diagnosis.findings[0].fix == "betternorm.calibrate(model, loader)"


def test_statistics_over_two_examples(model: nn.Module, loader: Any) -> None:
    train(model, images(2000, 1), 200, batch_size=2)
    two = DataLoader(images(EXAMPLES, 1), 2, shuffle=True)
    diagnosis = betternorm.diagnose(model, loader, stats_loader=two, try_fixes=True)
    finding = diagnosis.findings[0]
    assert finding.cause == "small_batches"
    assert "2 examples per batch; the averages reach back 20" in finding.why
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", betternorm.errors.UncertainGainWarning)
        exec(finding.fix, {"betternorm": betternorm, "model": model, "loader": loader, "stats_loader": two})
    same = betternorm.diagnose(model, loader, train_batch_size=32)
    assert same.is_healthy


@pytest.mark.parametrize(
    ("order", "count", "cause"), [("sorted", EXAMPLES, "sorted_batches"), ("random", 577, "leftover_batch")]
)
def test_batches_of_the_training_data(order: str, count: int, cause: str, model: nn.Module, loader: Any) -> None:
    x, y = images(count, 1).tensors
    rows = y.argsort() if order == "sorted" else torch.arange(count)
    inputs: Any = DataLoader(TensorDataset(x[rows], y[rows]), 32)
    diagnosis = betternorm.diagnose(model, loader, stats_loader=inputs)
    assert faults(diagnosis) == [cause]
    names = {"torch": torch, "stats_loader": inputs}
    exec(diagnosis.findings[0].fix, names)
    assert betternorm.diagnose(model, loader, stats_loader=names["stats_loader"]).is_healthy


def test_sorted_validation_data_is_fine_in_evaluation_mode_and_not_with_batch_statistics(model: nn.Module) -> None:
    x, y = images(EXAMPLES, 2).tensors
    rows = y.argsort()
    inputs = DataLoader(TensorDataset(x[rows], y[rows]), 50)
    assert betternorm.diagnose(model, inputs).is_healthy
    assert faults(betternorm.diagnose(model.train(), inputs)) == ["train_mode", "sorted_batches"]
    few = betternorm.diagnose(model.eval(), inputs, max_examples=200)
    assert faults(few)[0] == "sorted_batches"  # the first 200 are not a sample of all
    assert "only its first 200 examples were measured" in few.findings[0].why


def test_layers_without_moving_averages(loader: Any) -> None:
    model = network()
    model[1] = nn.BatchNorm2d(12, track_running_stats=False)
    finding = betternorm.diagnose(model.eval(), loader).findings[0]
    assert (finding.cause, finding.layers) == ("train_mode", ("1",))
    assert "track_running_stats=False" in finding.why


class FrozenBatchNorm2d(nn.Module):
    """torchvision's."""

    eps = 1e-5

    def __init__(self, other: nn.BatchNorm2d) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, getattr(other, name).detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)


def test_frozen_layers_are_measured_too(model: nn.Module, loader: Any, stats_loader: Any) -> None:
    wrong_averages(model)
    for place in (1, 4):
        model[place] = FrozenBatchNorm2d(model[place])  # type: ignore[index, operator]
    diagnosis = betternorm.diagnose(model, loader, stats_loader=stats_loader)
    assert faults(diagnosis) == ["mismatched_averages"]
    assert diagnosis.findings[0].cost["top1"].before == pytest.approx(accuracy(model, loader))


def test_a_model_without_batch_norm_has_nothing_to_diagnose(loader: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 36, CLASSES))
    assert faults(betternorm.diagnose(model, loader)) == []


def test_few_examples_are_not_judged(model: nn.Module) -> None:
    wrong_averages(model)
    assert betternorm.diagnose(model, DataLoader(images(40, 2), 10)).is_healthy


# ---- what it leaves alone, and what it costs ----


def test_model_and_random_state_are_untouched(model: nn.Module, stats_loader: Any) -> None:
    wrong_averages(model)
    norms(model)[1].train()
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(images(EXAMPLES, 2), 50, shuffle=True, generator=generator)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    kinds = [type(module) for module in model.modules()]
    before = (torch.get_rng_state(), random.getstate(), generator.get_state())
    of_numpy = np.random.get_state()[1].copy()  # type: ignore[union-attr]
    betternorm.diagnose(model, loader, stats_loader=stats_loader, train_batch_size=2, try_fixes=True)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert [type(module) for module in model.modules()] == kinds
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert torch.equal(generator.get_state(), before[2])
    assert np.array_equal(np.random.get_state()[1], of_numpy)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, *INJECTED])
@pytest.mark.parametrize(("try_fixes", "most"), [(False, 10), (True, 25)])
@pytest.mark.parametrize("train_batch_size", [2, 32])
def test_the_number_of_forward_passes_is_bounded(
    fault: str | None, try_fixes: bool, most: int, train_batch_size: int, model: nn.Module, stats_loader: Any
) -> None:
    """Counted by the function that runs them."""
    if fault is not None:
        INJECTED[fault](model)
    seen = 0

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        nonlocal seen
        seen += len(batch[0])
        return model(batch[0]), batch[1]

    diagnosis = betternorm.diagnose(
        model,
        DataLoader(images(EXAMPLES, 2), 50),
        stats_loader=stats_loader,
        train_batch_size=train_batch_size,
        try_fixes=try_fixes,
        max_examples=200,
        forward=forward,
    )
    assert diagnosis.examples == 200
    assert seen <= most * 200
    assert diagnosis.passes == round(seen / 200)


def test_the_result_prints_and_is_saved(model: nn.Module, loader: Any, tmp_path: Path) -> None:
    wrong_averages(model)
    diagnosis = betternorm.diagnose(model, loader, try_fixes=True)
    printed = str(diagnosis)
    assert max(map(len, printed.splitlines())) <= 140
    for finding in diagnosis.findings:
        assert finding.cause in printed
        assert finding.fix in printed
        assert " ".join(finding.why.split()) in " ".join(printed.split())
    diagnosis.save(tmp_path / "diagnosis.json")
    saved = json.loads((tmp_path / "diagnosis.json").read_text())
    assert saved["findings"][0]["cause"] == "mismatched_averages"
    assert saved["findings"][0]["cost"]["top1"]["difference"] == diagnosis.findings[0].cost["top1"].difference
    assert saved["measured"]["evaluation mode"]["top1"] == pytest.approx(accuracy(model, loader))
    with pytest.raises(AttributeError):
        diagnosis.findings[0].cause = "another"  # type: ignore[misc]


def test_every_cause_is_described_in_the_docstring() -> None:
    assert all(f"``{cause}``" in (betternorm.diagnose.__doc__ or "") for cause in CAUSES)
    assert Finding("train_mode", "", (), "").is_note is False


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_examples": 0}, ValueError, "max_examples=0 must be 1 or more"),
        ({"train_batch_size": 0}, ValueError, "train_batch_size=0 must be 1 or more"),
        ({"stats_loader": iter([])}, TypeError, "a DataLoader or a list of batches"),
        ({"stats_loader": []}, ValueError, "stats_loader gave no batches"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str, loader: Any) -> None:
    with pytest.raises(error, match=message):
        betternorm.diagnose(network(), loader, **options)


# ---- two processes ----


def _rank(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = train(network(), images(300, 1), 10)
    for name in ("alike", "skewed"):
        diagnosis = betternorm.diagnose(model, DataLoader(images(100, 2), 50), progress=False)
        diagnosis.save(Path(folder) / f"{name}-{rank}.json")
        if rank:
            wrong_averages(model)
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_ranks_that_disagree(tmp_path: Path) -> None:
    port = 20000 + random.Random(str(tmp_path)).randrange(20000)
    multiprocessing.spawn(_rank, (port, str(tmp_path)), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        alike, skewed = (
            json.loads((tmp_path / f"{name}-{rank}.json").read_text())["findings"] for name in ("alike", "skewed")
        )
        assert "rank_skew" not in [finding["cause"] for finding in alike]
        assert skewed[0]["cause"] == "rank_skew"
        assert skewed[0]["layers"] == ["1", "4"]


# ---- outputs that are not finite ----


def nan_averages(model: nn.Module) -> str:
    layer = norms(model)[0]
    assert layer.running_var is not None
    layer.running_var[3] = torch.nan
    return "moving averages of 1 of 2 norm layers"


def infinite_weight(model: nn.Module) -> str:
    with torch.no_grad():
        norms(model)[1].weight[2] = torch.inf
    return "'4.weight' in the weights"


@pytest.mark.parametrize("damage", [nan_averages, infinite_weight])
@pytest.mark.parametrize("with_stats", [False, True])
def test_a_damaged_model_is_not_healthy(
    model: nn.Module, loader: Any, stats_loader: Any, damage: Callable[[nn.Module], str], with_stats: bool
) -> None:
    why = damage(model)
    diagnosis = betternorm.diagnose(model, loader, stats_loader=stats_loader if with_stats else None, progress=False)
    assert faults(diagnosis) == ["non_finite"]
    assert why in diagnosis.findings[0].why
    assert not diagnosis.is_healthy
    assert "norm layers are fine" not in str(diagnosis)


def test_one_image_of_nan_is_not_judged_and_the_input_is_named(model: nn.Module) -> None:
    x, y = images(EXAMPLES, 2)[:]
    x[7] = torch.nan
    diagnosis = betternorm.diagnose(model, DataLoader(TensorDataset(x, y), 50), progress=False)
    assert faults(diagnosis) == ["non_finite"]
    assert f"outputs for 1 of {EXAMPLES} examples" in diagnosis.findings[0].why
    assert "check the inputs" in diagnosis.findings[0].why


def test_the_line_for_averages_of_nan_repairs_them(model: nn.Module, loader: Any, stats_loader: Any) -> None:
    expected = accuracy(model, loader)
    nan_averages(model)
    finding = betternorm.diagnose(model, loader, stats_loader=stats_loader, progress=False).findings[0]
    exec(finding.fix, {"betternorm": betternorm, "model": model, "stats_loader": stats_loader})
    assert accuracy(model, loader) > expected - 0.05
