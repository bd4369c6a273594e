"""Twelve faults injected into three trained networks, and whether `betternorm.diagnose` names the right cause first.

    python -m betternorm_lab.studies.diagnose_faults --data FOLDER --weights cifar100_resnets --mobilenet FILE

FOLDER contains cifar10.npz, svhn.npz, cifar100.npz and imagenet.npz. Every fault is made as it happens in practice: by
training with it, by averaging weights, by passing other data through the network. The printed fix is then run, and its
gain on images that `diagnose` did not see is compared with the promised interval. For healthy networks no finding is
right. Finished cases are kept in --work, and the same command continues there. Writes diagnose.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from betternorm_lab.models.cifar_resnets import DEPTHS, MEAN, STD, CifarResNet
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import betternorm
from betternorm.advice import Diagnosis, Finding
from betternorm.integrations.checkpoints import load_checkpoint
from betternorm.integrations.models import load_model
from betternorm.weighing.metrics import CALIBRATED, METRICS
from betternorm.weighing.shifts import corruptions

BATCH, RATE = 64, 0.05
STEPS, MORE = 400, 100  # of training, and of what a fault needs on top
TRAINING, EXAMPLES, FRESH = 8000, 1500, 4000  # images
SIMULATED = 50
ROUNDING = 1e-9
CLASSES = 10

Data = TensorDataset


@dataclass
class Case:
    """A faulty network, and what the user has at hand: the arguments of `diagnose`."""

    model: nn.Module
    loader: Iterable[Any]
    stats_loader: Iterable[Any] | None = None
    train_batch_size: int | None = None
    fresh: Data | None = None  # images that the fix is judged on; None where the case's own validation images serve
    context: dict[str, Any] = field(default_factory=dict)  # further names that a printed fix uses


@dataclass
class Bench:
    """A healthy network with its data: what faults are injected into."""

    model: nn.Module
    train: Data
    validation: Data
    fresh: Data
    other: Tensor  # images of another kind
    shift: Callable[[Tensor], Tensor]
    more: int = MORE

    def loaders(self) -> dict[str, DataLoader[Any]]:
        return {
            "loader": DataLoader(self.validation, 100),
            "stats_loader": DataLoader(Subset(self.train, range(EXAMPLES)), BATCH, shuffle=True, drop_last=True),
        }


# ---- networks ----


class Residual(nn.Module):
    def __init__(self, channels: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels_out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class InvertedResidual(nn.Module):
    """MobileNetV2's block: expand, depthwise, project."""

    def __init__(self, channels: int, channels_out: int, stride: int, expansion: int = 3) -> None:
        super().__init__()
        inner = channels * expansion
        self.layers = nn.Sequential(
            *_conv(channels, inner, 1), nn.ReLU6(), *_conv(inner, inner, 3, stride, inner), nn.ReLU6(),
            *_conv(inner, channels_out, 1),
        )  # fmt: skip
        self.adds = stride == 1 and channels == channels_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return x + y if self.adds else y


def _conv(channels: int, channels_out: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(channels, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(channels_out)]


def _network(width: int, body: list[nn.Module], channels: int, classes: int) -> nn.Module:
    stem = [*_conv(3, width, 3), nn.ReLU()]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def residual(width: int = 8, classes: int = CLASSES) -> nn.Module:
    stages = [Residual(width, width, 1), Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)]
    return _network(width, list(stages), 4 * width, classes)


def plain(width: int = 8, classes: int = CLASSES) -> nn.Module:
    sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)]
    return _network(width, [m for a, b, s in sizes for m in (*_conv(a, b, 3, s), nn.ReLU())], 4 * width, classes)


def mobile(width: int = 8, classes: int = CLASSES) -> nn.Module:
    sizes = [(width, width, 1), (width, 2 * width, 2), (2 * width, 2 * width, 1), (2 * width, 4 * width, 2)]
    return _network(width, [InvertedResidual(a, b, s) for a, b, s in sizes], 4 * width, classes)


NETWORKS = {"residual": residual, "plain": plain, "mobile": mobile}


def train(
    model: nn.Module,
    data: Data,
    steps: int,
    batch_size: int = BATCH,
    rate: float = RATE,
    seed: int = 0,
    prepare: Callable[[nn.Module], object] = nn.Module.train,
    batches: Iterable[Any] | None = None,
    constant: bool = False,
) -> nn.Module:
    """SGD with momentum and a cosine schedule, or a constant rate; ``prepare`` sets the modes before each step."""
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, weight_decay=1e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for x, y in batches or DataLoader(data, batch_size, shuffle=True, drop_last=True, generator=random):
            prepare(model)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            if not constant:
                schedule.step()
            done += 1
            if done == steps:
                break
    return model.eval()


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


# ---- faults ----


def lagging(bench: Bench) -> Case:
    """Training resumed without the averages, with a momentum for longer runs."""
    model = copy.deepcopy(bench.model)
    for layer in norms(model):
        layer.reset_running_stats()
        layer.momentum = 0.003
    return Case(train(model, bench.train, bench.more, rate=RATE / 10), **bench.loaders())


def after_weight_averaging(bench: Bench) -> Case:
    """Stochastic weight averaging without `update_bn`."""
    averaged = torch.optim.swa_utils.AveragedModel(bench.model, use_buffers=False)
    model = copy.deepcopy(bench.model)
    for seed in range(4):
        train(model, bench.train, bench.more // 2, rate=4 * RATE, seed=seed)
        averaged.update_parameters(model)
    return Case(averaged.module.eval(), **bench.loaders())


def from_other_data(bench: Bench) -> Case:
    """Averages that adapted to images of another kind."""
    model = copy.deepcopy(bench.model).train()
    with torch.no_grad():
        for x in bench.other.split(BATCH):
            model(x)
    return Case(model.eval(), **bench.loaders())


def trained_with_two(bench: Bench) -> Case:
    """Two examples per batch, and torch's momentum: averages over twenty images."""
    model = train(copy.deepcopy(bench.model), bench.train, 4 * bench.more, 2, RATE / 10, constant=True)
    return Case(
        model, **bench.loaders() | {"stats_loader": DataLoader(Subset(bench.train, range(EXAMPLES)), 2, shuffle=True)}
    )


def partly_frozen(bench: Bench) -> Case:
    """Fine-tuning with the statistics of every other layer frozen."""
    model = copy.deepcopy(bench.model)

    def freeze_half(model: nn.Module) -> None:
        model.train()
        for layer in norms(model)[::2]:
            layer.eval()

    return Case(train(model, bench.train, 2 * bench.more, rate=2 * RATE, prepare=freeze_half), **bench.loaders())


def skewed_ranks(bench: Bench) -> Case:
    """Two processes whose shards come from different sources; `in_two_processes` starts them."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    model = copy.deepcopy(bench.model).train()
    with torch.no_grad():
        for x in (bench.train.tensors[0] if rank else bench.other)[: 30 * BATCH].split(BATCH):
            model(x)
    return Case(model.eval(), **bench.loaders())


def dead_channels(bench: Bench) -> Case:
    """Channels that were constant in training and are not on other data."""
    model = copy.deepcopy(bench.model)
    layer = norms(model)[1]
    assert layer.running_var is not None
    with torch.no_grad():
        layer.running_var[::8] = 1e-12
    return Case(model, **bench.loaders())


def train_mode(bench: Bench) -> Case:
    return Case(copy.deepcopy(bench.model).train(), DataLoader(bench.validation, 4))


def shifted(bench: Bench) -> Case:
    """Validation images with low contrast."""

    def of(data: Data) -> Data:
        return TensorDataset(bench.shift(data.tensors[0]), data.tensors[1])

    loaders = bench.loaders() | {"loader": DataLoader(of(bench.validation), 100)}
    return Case(copy.deepcopy(bench.model), **loaders, fresh=of(bench.fresh))


def sorted_batches(bench: Bench) -> Case:
    """Fine-tuned on images in the order of the folders that they lie in."""
    images, labels = bench.train.tensors
    order = labels.argsort(stable=True)
    data = TensorDataset(images[order], labels[order])
    inputs = DataLoader(data, BATCH)
    model = train(copy.deepcopy(bench.model), data, bench.more, rate=RATE / 10, batches=inputs)
    return Case(model, **bench.loaders() | {"stats_loader": inputs})


def overconfident(bench: Bench) -> Case:
    model = copy.deepcopy(bench.model)
    with torch.no_grad():
        for parameter in list(model.children())[-1].parameters():
            parameter.mul_(3)
    return Case(model, **bench.loaders())


def leftover(bench: Bench) -> Case:
    """An epoch that ends with a batch of one image."""
    count = (len(bench.train) - 1) // BATCH * BATCH + 1
    data = TensorDataset(*(part[:count] for part in bench.train.tensors))
    inputs = DataLoader(data, BATCH)
    model = train(copy.deepcopy(bench.model), data, len(inputs), rate=RATE / 10, batches=inputs)
    return Case(model, **bench.loaders() | {"stats_loader": inputs})


FAULTS: dict[str, tuple[str, Callable[[Bench], Case]]] = {
    "lagging averages": ("lagging_averages", lagging),
    "averages after SWA": ("mismatched_averages", after_weight_averaging),
    "averages from other data": ("mismatched_averages", from_other_data),
    "trained with 2 examples": ("small_batches", trained_with_two),
    "partly frozen": ("partly_frozen", partly_frozen),
    "ranks with different statistics": ("rank_skew", skewed_ranks),
    "dead channels": ("dead_channels", dead_channels),
    "train mode left on": ("train_mode", train_mode),
    "shifted data": ("shifted_data", shifted),
    "sorted batches": ("sorted_batches", sorted_batches),
    "overconfidence only": ("overconfident", overconfident),
    "a last batch of one": ("leftover_batch", leftover),
}


# ---- a case ----


def examine(case: Case, bench: Bench, try_fixes: bool = True) -> tuple[Diagnosis, dict[str, Any]]:
    """The diagnosis, and what the first finding's fix, run as printed, gains on fresh images."""
    diagnosis = betternorm.diagnose(
        case.model,
        case.loader,
        stats_loader=case.stats_loader,
        train_batch_size=case.train_batch_size,
        try_fixes=try_fixes,
        max_examples=EXAMPLES,
        progress=False,
    )
    result: dict[str, Any] = {
        "causes": [finding.cause for finding in diagnosis.findings],
        "passes": diagnosis.passes,
        "measured": diagnosis.measured,
    }
    if diagnosis.findings:
        first = diagnosis.findings[0]
        result |= {"fix": first.fix, "cost": _plain(first.cost), "gain": _plain(first.gain)}
        result["fresh"] = gain_on_fresh(first, case, case.fresh or bench.fresh)
    return diagnosis, result


def _plain(gains: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [gain.difference, gain.low, gain.high] for name, gain in gains.items()}


def gain_on_fresh(finding: Finding, case: Case, fresh: Data) -> dict[str, float]:
    """Run the fix as printed, and compare the network before and after on fresh images."""
    model = copy.deepcopy(case.model)
    images, labels = fresh.tensors
    names = {"torch": torch, "betternorm": betternorm, "model": model, "images": images}
    names |= {"loader": case.loader, "stats_loader": case.stats_loader}
    batch_size = 4 if finding.cause == "train_mode" else 100
    temperature = finding.cause == "overconfident"
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if finding.cause != "train_mode":
            model.eval()
        before = _metrics(torch.cat([model(x) for x in images.split(batch_size)]), labels, scaled=not temperature)
        with torch.enable_grad():
            exec(finding.fix, names)
        after = names.get("logits")
        if after is None:
            after = torch.cat([model(x) for x in images.split(100)])
    now = _metrics(after, labels, scaled=not temperature)
    return {name: now[name] - before[name] for name in before}


def _metrics(logits: Tensor, labels: Tensor, scaled: bool = True) -> dict[str, float]:
    result = {}
    for name, metric in (("top1", METRICS["top1"]), ("loss", METRICS[CALIBRATED if scaled else "cross_entropy"])):
        values, counts = metric.measure(logits, labels)
        result[name] = float(metric.numbers(values, counts).double().mean())
    return result


def is_kept(result: Mapping[str, Any], metric: str) -> bool:
    """Whether the gain on fresh images lies in the promised interval."""
    _, low, high = result["gain"][metric]
    return bool(low - ROUNDING <= result["fresh"][metric] <= high + ROUNDING)


def in_two_processes(make: Callable[[], Bench]) -> dict[str, Any]:
    """`skewed_ranks` in a group of two processes; the result of the first one."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    port = 20000 + torch.randint(20000, (1,), generator=torch.Generator().manual_seed(id(results) % 2**31)).item()
    ranks = [context.Process(target=_rank, args=(rank, port, make, results)) for rank in range(2)]
    for process in ranks:
        process.start()
    result: dict[str, Any] = results.get(timeout=1800)
    for process in ranks:
        process.join()
    return result


def _rank(rank: int, port: int, make: Callable[[], Bench], results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    bench = make()
    result = examine(skewed_ranks(bench), bench)[1]
    if rank == 0:
        results.put(result)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


# ---- data and the whole study ----


def cifar(folder: Path, seed: int) -> dict[str, Any]:
    """CIFAR-10 at 16x16 in parts, images of street numbers as the other kind, and low contrast as the shift.

    The seed selects the parts of the test set.
    """
    mean, std = (0.491, 0.482, 0.447), (0.247, 0.243, 0.262)

    def normalized(images: np.ndarray) -> Tensor:
        pixels = F.avg_pool2d(torch.from_numpy(images).permute(0, 3, 1, 2).float().div(255), 2)
        return pixels.sub(torch.tensor(mean)[:, None, None]).div(torch.tensor(std)[:, None, None])

    def part(split: str, start: int, stop: int) -> Data:
        with np.load(folder / "cifar10.npz") as file:
            labels = file[f"{split}_labels"]
            rows = np.random.default_rng(seed if split == "test" else 0).permutation(len(labels))[start:stop]
            return TensorDataset(normalized(file[f"{split}_images"][rows]), torch.from_numpy(labels[rows]))

    with np.load(folder / "svhn.npz") as file:
        other = normalized(file["test_images"][: 40 * BATCH])
    return {
        "train": part("train", 0, TRAINING),
        "validation": part("test", 0, EXAMPLES),
        "fresh": part("test", EXAMPLES, EXAMPLES + FRESH),
        "other": other,
        "shift": next(iter(corruptions(["contrast"], mean, std).values())),
    }


def bench_of(name: str, folder: Path, work: Path, case: str = "") -> Bench:
    """A trained network, kept in the working folder. Each case has validation images of its own."""
    data, saved = cifar(folder, zlib.crc32(f"{name} {case}".encode())), work / f"{name}.pt"
    torch.manual_seed(0)
    model = NETWORKS[name]()
    if saved.exists():
        model.load_state_dict(torch.load(saved, weights_only=True))
    else:
        train(model, data["train"], STEPS)
        torch.save(model.state_dict(), saved)
    return Bench(model.eval(), **data)


# ---- healthy networks ----


def simulated(seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A small network on patterns under noise; width, noise and batch size vary with the seed."""
    generator = torch.Generator().manual_seed(seed)
    classes, batch_size = 4 + seed % 7, (16, 32, 64)[seed % 3]
    patterns = torch.randn(classes, 3, 8, 8, generator=generator)

    def part(count: int) -> Data:
        labels = torch.randint(classes, (count,), generator=generator)
        noise = torch.randn(count, 3, 8, 8, generator=generator)
        return TensorDataset(patterns[labels] + (3 + seed % 4) * noise, labels)

    torch.manual_seed(seed)
    model = list(NETWORKS.values())[seed % 3](4 + seed % 5, classes)
    data = part(1500)
    train(model, data, 100, batch_size)
    loaders: dict[str, Any] = {"loader": DataLoader(part(600), 100)}
    return model, loaders | {"stats_loader": DataLoader(data, batch_size, shuffle=True, drop_last=True)}


def published(depth: int, weights: Path, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """A public CIFAR-100 ResNet."""
    model = load_checkpoint(CifarResNet(depth), weights / f"resnet{depth}_cifar100.pth")
    loaders: dict[str, Any] = {}
    with np.load(folder / "cifar100.npz") as file:
        for split, name in (("test", "loader"), ("train", "stats_loader")):
            rows = np.random.default_rng(0).permutation(len(file[f"{split}_labels"]))[:1000]
            pixels = torch.from_numpy(file[f"{split}_images"][rows]).permute(0, 3, 1, 2).float().div(255)
            x = pixels.sub(torch.tensor(MEAN)[:, None, None]).div(torch.tensor(STD)[:, None, None])
            loaders[name] = DataLoader(TensorDataset(x, torch.from_numpy(file[f"{split}_labels"][rows])), 100)
    return model, loaders


def mobilenet(file: Path, folder: Path) -> tuple[nn.Module, dict[str, Any]]:
    """MobileNetV2 with torchvision's weights, on ImageNet's validation images."""
    model = load_checkpoint(load_model("torchvision:mobilenet_v2"), file)
    with np.load(folder / "imagenet.npz") as images:
        rows = np.random.default_rng(0).permutation(len(images["val_labels"]))[:600]
        pixels, labels = images["val_images"][rows], torch.from_numpy(images["val_labels"][rows])
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[:, :, None, None]
    x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).sub(mean).div(std)
    return model, {"loader": DataLoader(TensorDataset(x, labels), 50)}


def healthy(arguments: argparse.Namespace) -> dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    """Networks without a fault, by name."""

    def trained(name: str) -> tuple[nn.Module, dict[str, Any]]:
        bench = bench_of(name, arguments.data, arguments.work)
        return bench.model, dict(bench.loaders())

    makers: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
        f"{name}, CIFAR-10": partial(trained, name) for name in NETWORKS
    }
    makers |= {f"simulated {seed}": partial(simulated, seed) for seed in range(SIMULATED)}
    makers |= {f"ResNet-{d}, CIFAR-100": partial(published, d, arguments.weights, arguments.data) for d in DEPTHS}
    return makers | {"MobileNetV2, ImageNet": partial(mobilenet, arguments.mobilenet, arguments.data)}


# ---- the study ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="the folder with the .npz files")
    parser.add_argument("--weights", type=Path, required=True, help="the folder with resnet8_cifar100.pth and so on")
    parser.add_argument("--mobilenet", type=Path, required=True, help="mobilenet_v2-b0353104.pth of torchvision")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/diagnose_faults"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)

    def kept(name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        saved = arguments.work / f"{name}.json"
        if not saved.exists():
            saved.write_text(json.dumps(measure()))
        print(name, json.loads(saved.read_text())["causes"], flush=True)
        result: dict[str, Any] = json.loads(saved.read_text())
        return result

    def injected(name: str, fault: str, inject: Callable[[Bench], Case]) -> dict[str, Any]:
        make = partial(bench_of, name, arguments.data, arguments.work, fault)
        if inject is skewed_ranks:
            return in_two_processes(make)
        bench = make()
        return examine(inject(bench), bench)[1]

    def unharmed(make: Callable[[], tuple[nn.Module, dict[str, Any]]]) -> dict[str, Any]:
        model, loaders = make()
        diagnosis = betternorm.diagnose(model.eval(), **loaders, max_examples=EXAMPLES, progress=False)
        causes = [finding.cause for finding in diagnosis.findings if not finding.is_note]
        return {"causes": causes, "passes": diagnosis.passes, "measured": diagnosis.measured}

    faults = {
        (name, fault): kept(f"{name} {fault}", partial(injected, name, fault, inject))
        for name in NETWORKS
        for fault, (_, inject) in FAULTS.items()
    }
    fine = {name: kept(name, partial(unharmed, make)) for name, make in healthy(arguments).items()}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "diagnose.md").write_text(page(faults, fine))


def page(faults: Mapping[tuple[str, str], Mapping[str, Any]], fine: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| fault | network | causes found | top-1 of the fix: promised | on fresh images | passes |"]
    lines.append("| --- | --- | --- | --- | --- | ---: |")
    right = promised = 0
    within = {"top1": 0, "loss": 0}
    for (name, fault), result in faults.items():
        right += result["causes"][:1] == [FAULTS[fault][0]]
        cells = ["", ""]
        if result.get("gain"):
            promised += 1
            for metric in within:
                within[metric] += is_kept(result, metric)
            _, low, high = result["gain"]["top1"]
            cells = [f"{100 * low:+.1f} to {100 * high:+.1f}", f"{100 * result['fresh']['top1']:+.1f}"]
        causes = ", ".join(result["causes"]) or "none"
        lines.append(f"| {fault} | {name} | {causes} | {' | '.join(cells)} | {result['passes']} |")
    found = [f"{name}: {', '.join(result['causes'])}" for name, result in fine.items() if result["causes"]]
    return PAGE.format(
        right=right,
        cases=len(faults),
        top1=within["top1"],
        loss=within["loss"],
        promised=promised,
        fine=len(fine) - len(found),
        healthy=len(fine),
        exceptions="; ".join(found) or "none",
        most=max(result["passes"] for result in fine.values()),
        table="\n".join(lines),
    )


PAGE = """\
# How often diagnose is right

Twelve faults in three networks, made as they happen in practice, and healthy networks.

    python -m betternorm_lab.studies.diagnose_faults --data FOLDER --weights cifar100_resnets --mobilenet FILE

| what | result |
| --- | --- |
| the right cause first | {right} of {cases} |
| the gain in top-1 of the printed fix on fresh images is in the promised interval | {top1} of {promised} |
| the same for the loss | {loss} of {promised} |
| no finding for healthy networks | {fine} of {healthy} (with a finding: {exceptions}) |
| forward passes for healthy networks | at most {most} |

The networks with faults are small ones for CIFAR-10 at 16x16; the fix is evaluated on 4,000 images that `diagnose` did
not see. No gain is promised for fixes that need training. The healthy ones are the same three, fifty simulated ones,
five public ResNets for CIFAR-100 (1,000 images), and MobileNetV2 on 600 images of ImageNet. Intervals are 99 %.

Training with two examples and partly frozen statistics are reported whether or not they cost anything. `overconfident`
is a note. The fix of three faults (sorted batches, a last batch of one, partly frozen) is for the next training.

{table}
"""


if __name__ == "__main__":
    main()
