"""The cost of an experiment before it is run: trials, hours, disk space, and commands for one machine and for many.

The rule for hours: a training step is timed here, on the CPU, on a few images of the right size, and the floating-point
work of a step is counted; both are printed. A GPU is taken to do the counted work at :data:`GPU_SPEED`.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from betternorm.display.progress import track
from betternorm.display.tables import table
from betternorm.integrations.models import load_model
from betternorm_lab import models, stats
from betternorm_lab.data import DATASETS
from betternorm_lab.experiments import protocol, registry
from betternorm_lab.experiments.alpha_pretrained import Curve
from betternorm_lab.experiments.scales import steps
from betternorm_lab.training import Config
from betternorm_lab.trials import Trial

GPU_SPEED = 20e12  # operations per second in training on one A100-class GPU with TF32, not its peak
IMAGES = 2  # per timed step; the cost is proportional to images
SMALL_SIDE = 64  # smaller images are timed in whole batches, which are faster per image
CLASSES = 100  # of the timed model
CHECKPOINT = 3  # times the size of the weights: weights, optimizer state, final model

# Download and unpacked size, in gigabytes.
SIZES = {
    "digits": (0, 0),
    "flowers102": (0.35, 0.4),
    "caltech101": (0.14, 0.2),
    "cifar100": (0.17, 0.2),
    "svhn": (2.3, 2.4),
    "caltech256": (1.2, 1.3),
    "cub2011": (1.2, 1.3),
    "imagenet": (6.7, 7.0),  # only the validation images are needed
}
VALIDATION_IMAGES = {"imagenet": 50_000}


@dataclass(frozen=True)
class Cost:
    """The cost of one trial: operations, seconds on this CPU, and bytes on disk."""

    operations: float
    seconds: float
    disk: float


def describe(
    names: Sequence[str],
    scale: str,
    seeds: int | None,
    words: Sequence[str],
    show: bool | None = None,
    done: Container[str] = (),
) -> str:
    """The plan as text. Large models are timed for a minute or two, with a progress bar if ``show``.

    ``done`` are the keys of trials that have been run; the cost is of what is left.
    """
    counted: set[str] = set()
    rows, total, still = [], Cost(0, 0, 0), 0
    data: set[str] = set()
    runs: set[int] = set()
    for name in track(names, "timing steps", show=show):
        arms = registry.trials_of(name, scale, seeds).values()
        own = [trial for arm in arms for trial in arm]
        runs |= {len(arm) for arm in arms}
        new = [trial for trial in dict.fromkeys(own) if trial.key not in counted]
        counted |= {trial.key for trial in own}
        left = [trial for trial in new if trial.key not in done]
        costs = [cost(trial) for trial in left]
        still += len(left)
        sums = Cost(*(sum(getattr(one, part) for one in costs) for part in ("operations", "seconds", "disk")))
        total = Cost(total.operations + sums.operations, total.seconds + sums.seconds, total.disk + sums.disk)
        data |= {trial.dataset for trial in own if hasattr(trial, "dataset")}
        rows.append([name, len(own), len(new), len(left), *_hours(sums)])
    rows.append(["all", "", len(counted), still, *_hours(total)])
    headers = ["experiment", "trials", "not shared", "left", "operations", "GPU hours", "hours on this CPU", "disk, GB"]
    fetched = [[DATASETS[one].title, *SIZES[one]] for one in sorted(data)]
    command = f"betternorm reproduce {' '.join(words)} --scale {scale}"
    return "\n\n".join(
        [
            table(headers, rows),
            f"Rule: a GPU does {GPU_SPEED / 1e12:g} T operations a second (one A100-class GPU in practice); this CPU "
            f"was timed on {IMAGES} images a step, or on a batch where they are small, with {torch.get_num_threads()} "
            "threads. Neither reading images nor tuning alpha is counted, and batches of one or two, which keep a GPU "
            "waiting, will take longer there.",
            *([_power(runs)] if scale == protocol.SCALE else []),
            table(["data", "to fetch, GB", "on disk, GB"], fetched),
            "one machine, one GPU:    " + f"{command} --data-root DATA --download",
            "one machine, 8 GPUs:     " + f"{command} --data-root DATA --engine ray",
            "one trial on many GPUs:  " + f"torchrun --nproc-per-node 8 -m betternorm.cli reproduce {' '.join(words)} "
            f"--scale {scale} --data-root DATA",
            "a Ray cluster:           " + f"{command} --data-root DATA --engine ray --address ray://HEAD:10001 "
            "--folder SHARED/reproduction",
        ]
    )


def _power(runs: Iterable[int]) -> str:
    """Minimum detectable effects for these numbers of seeds, from the spread assumed in the protocol."""
    between, within = protocol.SPREAD["top1"], protocol.SPREAD["top1, same network"]
    shown = [
        f"{n} seeds show {stats.detectable(between, n):.2g} points of top-1 between arms, and "
        f"{stats.detectable(within, n, paired=True):.2g} between two readings of the same networks"
        for n in sorted(runs)
        if n > 1
    ]
    return (
        f"Power: {'; '.join(shown) or 'one seed shows nothing'}, four times in five, if seeds spread by {between:g} "
        f"points and those differences by {within:g}, as was assumed before the first run. The pages say what could "
        "have been seen with the spread that was measured."
    )


def _hours(cost: Cost) -> list[str]:
    gpu = cost.operations / GPU_SPEED / 3600
    return [f"{cost.operations:.2g}", f"{gpu:,.2f}", f"{cost.seconds / 3600:,.1f}", f"{cost.disk / 1e9:,.2f}"]


_MEASURED: dict[tuple[object, ...], Cost] = {}


def cost(trial: Trial) -> Cost:
    """The steps of a training run; for an evaluation, its passes over the images, a third of a step each."""
    if isinstance(trial, Config):
        one = image_cost(
            trial.network,
            trial.dataset,
            trial.image_size,
            trial.width,
            trial.blocks,
            trial.stem_stride,
            batch_size=trial.batch_size,
            half=trial.precision == "bf16-mixed",
        )
        images = steps(trial) * trial.batch_size
        return Cost(one.operations * images, one.seconds * images, one.disk)
    if isinstance(trial, Curve) and trial.network:
        one = image_cost(trial.network, trial.dataset, trial.image_size)
        passes = (trial.limit or VALIDATION_IMAGES.get(trial.dataset, 10_000)) * len(trial.alphas) / 3
        return Cost(one.operations * passes, one.seconds * passes, 0)
    return Cost(0, 0, 0)


def image_cost(
    network: str,
    dataset: str,
    image_size: int | None,
    width: int = 64,
    blocks: Sequence[int] = (2, 2, 2, 2),
    stem_stride: int = 1,
    *,
    batch_size: int = IMAGES,
    half: bool = False,
) -> Cost:
    """The cost of one image in a step, forward and backward, measured once per model, size, batch size and precision.

    The head is taken to have :data:`CLASSES` classes, whatever the data: it is a small part.
    """
    facts = DATASETS[dataset]
    size = image_size or facts.size
    spec = models.NETWORKS.get(network, network).partition(".py:")
    name = network if spec[1] else spec[0].partition(".")[0]  # without the tag of timm's weights
    images_per_step = batch_size if size <= SMALL_SIDE else min(batch_size, IMAGES)
    known = (name, facts.channels, size, width, tuple(blocks), stem_stride, images_per_step, half)
    if known not in _MEASURED:

        def build() -> torch.nn.Module:
            if ".py:" in name:
                model: torch.nn.Module = load_model(name)
                return model
            return models.build(
                name, CLASSES, in_channels=facts.channels, width=width, blocks=blocks, stem_stride=stem_stride
            )

        shape = (images_per_step, facts.channels, size, size)
        with torch.device("meta"):  # count operations without executing them
            counter = FlopCounterMode(display=False)
            abstract = build()
            with counter:
                _loss(abstract, torch.empty(shape)).backward()
        model, images = build(), torch.randn(max(2, shape[0]), *shape[1:])  # norm layers need two
        for _ in range(2):  # the first step also allocates, and is not counted
            started = time.process_time()  # independent of other load
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = _loss(model, images)
            loss.backward()
        seconds = (time.process_time() - started) / torch.get_num_threads() / images_per_step
        weights = 4 * sum(parameter.numel() for parameter in model.parameters())
        _MEASURED[known] = Cost(counter.get_total_flops() / images_per_step, seconds, CHECKPOINT * weights)
    return _MEASURED[known]


def _loss(model: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    output = model(images)
    logits: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return logits.square().mean()
