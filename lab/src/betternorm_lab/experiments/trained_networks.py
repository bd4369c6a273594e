"""Trials on a network that another trial has trained, or that others have."""

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
    """The trained network of another trial of the same store, whose own folder is ``folder``; trained if it must be.

    A row says that a trial is done, but its network may be gone, where rows came from a file.
    """
    place = folder.parent / config.key
    with Store(folder.parent.parent).claim(config.key):
        train(config, place, runtime)
    return place / "model.pt"


def data_file(name: str, runtime: Runtime) -> Path:
    """A file as it is named, or in the folder of the datasets."""
    place = data_folder(runtime.data_root) / name
    return place if place.is_file() else Path(name)


@dataclass(frozen=True, kw_only=True)
class OnTrainedNetwork(Config):
    """A trial that trains nothing: it measures the network of the training with the same fields."""

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
        """What goes into the row. The network is in evaluation mode, with its tuned alpha."""
        raise NotImplementedError(f"{type(self).__name__} has to say what it measures")


def held_out(data: Data) -> Loader:
    """The test data, or the validation data where there is none."""
    return Loader(data, data.validation if data.test is None else data.test, 250)


def network_of(config: Config, folder: Path, runtime: Runtime) -> nn.Module:
    """The network itself, in evaluation mode, with its tuned alpha."""
    return trained(config, network_file(config, folder, runtime).parent, runtime)
