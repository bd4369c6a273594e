"""What tells the arms of an experiment apart, and how datasets and settings are called on the pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

DATASETS = {
    "digits": "digits",
    "flowers102-20": "Flowers-102, 20 classes",
    "flowers102": "Flowers-102",
    "caltech101-20": "Caltech-101, 20 classes",
    "caltech256": "Caltech-256",
    "cifar100-10": "CIFAR-100, 10 classes",
    "cifar100-10k": "CIFAR-100, 10,000 images",
    "cifar100-40k": "CIFAR-100, 40,000 images",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "cub2011": "CUB-2011",
}
OWN_RATES, WHOLE_STEPS, NOT_AUGMENTED = "own-rates", "steps-of-128", "not-augmented"
SETTINGS = {
    OWN_RATES: "each at its own learning rate",
    WHOLE_STEPS: "128 examples per step",
    NOT_AUGMENTED: "not augmented",
}


@dataclass(frozen=True)
class Arm:
    """One arm of an experiment, which is repeated with several seeds.

    Args:
        dataset: a key of :data:`DATASETS`.
        setting: how the arm is trained, where an experiment has several settings; a key of :data:`SETTINGS`, or a name.
        method: the norm, the network, or whatever else is compared.
        size: examples or channel groups that statistics are computed over, or the batch size.
        variant: for hyperparameter candidates, what is tried.
    """

    dataset: str = ""
    setting: str = ""
    method: str = ""
    size: int | None = None
    variant: str = ""

    @property
    def task(self) -> Arm:
        """The dataset and the setting alone: what is compared with each other."""
        return Arm(self.dataset, self.setting)

    def with_method(self, method: str = "", size: int | None = None) -> Arm:
        return replace(self, method=method, size=size)

    def id(self, claim: str) -> str:
        """The id of a claim about this task."""
        return "/".join(part for part in (self.dataset, self.setting, claim) if part)

    @property
    def title(self) -> str:
        """The task in words."""
        names = (DATASETS.get(self.dataset, self.dataset), SETTINGS.get(self.setting, self.setting))
        return ", ".join(name for name in names if name)

    @property
    def labels(self) -> tuple[str, ...]:
        """Every field that is set, as text."""
        return tuple(str(part) for part in (self.dataset, self.setting, self.method, self.size, self.variant) if part)
