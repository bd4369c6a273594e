"""All four techniques when fine-tuning a model that was pretrained with batch norm (Figure 5b, section 4.3).

The paper fine-tunes ResNet-152 from ImageNet: on Flowers-102 93.4 % against 91.0 for batch norm and 87.3 for Group
Norm; on CUB-2011 82.4 against 81.1 and 78.6. Pretraining favors batch norm, with which the model was trained; the paper
estimates that a Group Norm checkpoint would be worth about 5 points for Group Norm. Expect the order all four, batch
norm, Group Norm at large batches, and batch norm to fall behind at small ones. At small scale: from CIFAR-100 to the
first twenty classes of Flowers-102 and of Caltech-101, at 32x32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from betternorm_lab.experiments import claims, combined, trained_networks
from betternorm_lab.experiments.arms import Arm
from betternorm_lab.experiments.findings import Findings, FinishedRuns
from betternorm_lab.experiments.scales import CALTECH101, CALTECH256, SMALL, SMOKE, at_batch_size, groups, with_norm
from betternorm_lab.training import Config
from betternorm_lab.trials import Progress, Runtime, Trial

TITLE = "All four techniques, fine-tuning a pretrained model"
PLACE = "Figure 5b, section 4.3"
OWN_CHECKPOINT = "group norm, from a group norm checkpoint"

BATCHES = {"smoke": (2, 32), "small": (2, 8, 32), "paper": (2, 8, 32, 128)}

# Pretraining; at paper scale it is a published model, whose file is in the data folder.
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
        "flowers102-20": replace(SMALL, **_SHORT),
        "caltech101-20": replace(CALTECH101, **_SHORT),
    },
    "paper": {
        "flowers102": replace(_RESNET152, dataset="flowers102"),
        "cub2011": replace(_RESNET152, dataset="cub2011"),
    },
}


@dataclass(frozen=True, kw_only=True)
class FineTuned(Config):
    """Training that starts from the model of another trial; ``source`` has its fields that are not at their default.

    Without a source, ``finetune_from`` is a file in the data folder.
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


def arms(scale: str) -> dict[Arm, Trial]:
    """As in ``combined``, without ghost batch norm alone."""
    source = SOURCES[scale].changed if scale in SOURCES else {}
    result: dict[Arm, Trial] = {
        Arm(dataset, method=method, size=size): FineTuned(**trial.config | {"source": source})
        for dataset, config in TASKS[scale].items()
        for size in BATCHES[scale]
        for method, trial in combined.methods(at_batch_size(config, size), scale).items()
    }
    if scale not in SOURCES:  # the paper's Group Norm checkpoint has not been published
        return result
    own = with_norm(SOURCES[scale], "group", num_groups=groups(SOURCES[scale], scale)).changed
    return result | {
        replace(arm, method=OWN_CHECKPOINT): FineTuned(**trial.config | {"source": own})
        for arm, trial in result.items()
        if arm.method == combined.GROUP
    }


def conclude(runs: FinishedRuns) -> Findings:
    """As in the paper, Group Norm starts from its own checkpoint where there is one."""
    shared = combined.across_batch_sizes(runs, "Fine-tuning, across batch sizes", group=OWN_CHECKPOINT)
    worth = [
        claims.compare(
            f"{arm.title}, B = {arm.size}: Group Norm gains from a Group Norm checkpoint",
            runs.numbers(arm, "test_top1"),
            runs.numbers(replace(arm, method=combined.GROUP), "test_top1"),
            id=arm.id(f"{arm.size}/checkpoint"),
            margin=runs.margin("top1"),
        )
        for arm in runs.arms(method=OWN_CHECKPOINT)
    ]
    return replace(shared, verdicts=[*shared.verdicts, *worth])
