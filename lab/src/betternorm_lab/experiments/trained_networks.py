"""Trials that evaluate a model trained by another trial, or a pretrained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from betternorm.conversion.convert import convert
from betternorm.weighing.alpha import weighed_layers
from betternorm_lab.data import Data, Loader, data_folder
from betternorm_lab.store import Store
from betternorm_lab.training import Config, load_data, train, trained
from betternorm_lab.trials import Progress, Runtime


def network_file(config: Config, folder: Path, runtime: Runtime) -> Path:
    """The trained model of another trial of the store; ``folder`` is that of this trial.

    The model is trained if its file is missing, for example because rows were restored from a table.
    """
    place = folder.parent / config.key
    with Store(folder.parent.parent).claim(config.key):
        train(config, place, runtime)
    return place / "model.pt"


def data_file(name: str, runtime: Runtime) -> Path:
    """A file, given as a path or relative to the data folder."""
    place = data_folder(runtime.data_root) / name
    return place if place.is_file() else Path(name)


@dataclass(frozen=True, kw_only=True)
class OnTrainedNetwork(Config):
    """A trial that trains nothing: it evaluates the model of the training run with the same fields."""

    kind: ClassVar[str] = "on-trained"

    @classmethod
    def of(cls, config: Config) -> OnTrainedNetwork:
        return cls(**config.config)

    def run(self, folder: Path, runtime: Runtime, progress: Progress) -> dict[str, Any]:
        config = Config(**self.config)
        network = network_of(config, folder, runtime)
        if not weighed_layers(network):
            convert(network, "weighed")
        return self.measure(network, load_data(config, runtime), progress)

    def measure(self, network: nn.Module, data: Data, progress: Progress) -> dict[str, Any]:
        """The result for the row. The model is in evaluation mode, with its tuned alpha."""
        raise NotImplementedError(f"{type(self).__name__} must implement measure")


def held_out(data: Data) -> Loader:
    """The test data, or the validation data if there is none."""
    return Loader(data, data.validation if data.test is None else data.test, 250)


def network_of(config: Config, folder: Path, runtime: Runtime) -> nn.Module:
    """The model in evaluation mode, with its tuned alpha."""
    return trained(config, network_file(config, folder, runtime).parent, runtime)
