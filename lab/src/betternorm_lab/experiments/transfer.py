"""All four together when fine-tuning a network that others pre-trained with batch norm (Figure 5b, section 4.3).

The paper fine-tunes ResNet-152 from ImageNet: on Flowers-102 93.4 % against 91.0 for batch norm and 87.3 for Group
Norm; on CUB-2011 82.4 against 81.1 and 78.6. Pre-training favours batch norm, whose layers the network was trained
with; the worth of a Group Norm checkpoint, for Group Norm, it puts at about 5 points. Expect the order all four, batch
norm, Group Norm at large batches, and batch norm to fall behind at small ones. At small scale: from CIFAR-100 to the
first twenty classes of Flowers-102 and of Caltech-101, at 32x32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from betternorm_lab.experiments import claims, combined, trained_networks
from betternorm_lab.experiments.findings import Findings, FinishedRuns, Label
from betternorm_lab.experiments.scales import CALTECH101, CALTECH256, SMALL, SMOKE, at_batch_size, groups, with_norm
from betternorm_lab.training import Config
from betternorm_lab.trials import Progress, Runtime, Trial

TITLE = "All four together, fine-tuning a pre-trained network"
PLACE = "Figure 5b, section 4.3"
OWN_CHECKPOINT = "group norm, from a group norm checkpoint"

BATCHES = {"smoke": (2, 32), "small": (2, 8, 32), "paper": (2, 8, 32, 128)}

# What the network is pre-trained on; at paper scale others did that, and the file is in the folder of the datasets.
SOURCES = {
    "smoke": replace(SMOKE, tune_alpha=False, test=False),
    "small": replace(
        SMALL,
        dataset="cifar100",
        classes=None,
        batch_size=128,
        learning_rate=0.1,
        epochs=15,
        tune_alpha=False,
        test=False,
    ),
}
IMAGENET_WEIGHTS = "resnet152.safetensors"

_SHORT: dict[str, Any] = {"epochs": 40, "learning_rate": 0.06}
_RESNET152 = replace(
    CALTECH256, network="resnet152", image_size=224, learning_rate=0.01, finetune_from=IMAGENET_WEIGHTS
)
TASKS = {
    "smoke": {"digits": replace(SMOKE, epochs=2, learning_rate=0.02)},
    "small": {
        "Flowers-102, 20 classes": replace(SMALL, **_SHORT),
        "Caltech-101, 20 classes": replace(CALTECH101, **_SHORT),
    },
    "paper": {
        "Flowers-102": replace(_RESNET152, dataset="flowers102"),
        "CUB-2011": replace(_RESNET152, dataset="cub2011"),
    },
}


@dataclass(frozen=True, kw_only=True)
class FineTuned(Config):
    """A training that begins from the network of another trial, ``source``: its fields that are not at their default.

    Without one, ``finetune_from`` is a file in the folder of the datasets.
    """

    kind: ClassVar[str] = "fine-tuned"
    source: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        if self.source:
            weights = trained_networks.network_file(Config(**dict(self.source)), folder, runtime)
        else:
            weights = trained_networks.data_file(str(self.finetune_from), runtime)
        own = {item.name: getattr(self, item.name) for item in fields(Config)}
        return Config(**own | {"finetune_from": str(weights.resolve())}).run(folder, runtime, progress)


def arms(scale: str) -> dict[Label, Trial]:
    """Without ghosts alone, which are for networks trained from scratch."""
    source = SOURCES[scale].changed if scale in SOURCES else {}
    found: dict[Label, Trial] = {
        (task, method, size): FineTuned(**trial.config | {"source": source})
        for task, config in TASKS[scale].items()
        for size in BATCHES[scale]
        for method, trial in combined.methods(at_batch_size(config, size), scale).items()
    }
    if scale not in SOURCES:  # nobody has published the paper's Group Norm checkpoint
        return found
    for task, method, size in list(found):
        if method == combined.GROUP:
            trial = found[task, method, size]
            own = with_norm(SOURCES[scale], "group", num_groups=groups(SOURCES[scale], scale))
            found[task, OWN_CHECKPOINT, size] = FineTuned(**trial.config | {"source": own.changed})
    return found


def conclude(runs: FinishedRuns) -> Findings:
    """As the paper, Group Norm is judged from its own checkpoint where there is one."""
    shared = combined.across_batch_sizes(runs, "Fine-tuning, across batch sizes", group=OWN_CHECKPOINT)
    worth = [
        claims.compare(
            f"{task}, B = {size}: Group Norm gains by a checkpoint with Group Norm",
            runs.numbers((task, OWN_CHECKPOINT, size), "test_top1"),
            runs.numbers((task, combined.GROUP, size), "test_top1"),
            margin=runs.margin("top1"),
        )
        for task, method, size in runs
        if method == OWN_CHECKPOINT
    ]
    return replace(shared, verdicts=[*shared.verdicts, *worth])
