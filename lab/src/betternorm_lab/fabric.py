"""Lightning Fabric, configured from the runtime.

A module of its own because Lightning takes seconds to import: what does not train does not wait for it, and a pool of
processes imports it once.
"""

from __future__ import annotations

import inspect
import os
from importlib.util import find_spec
from typing import Any, cast

from torch.nn.parallel import DistributedDataParallel

from betternorm.errors import UserError
from betternorm.integrations.torchvision import ready
from betternorm_lab.team import launched_by_torchrun
from betternorm_lab.trials import Runtime

if find_spec("torchvision") is not None:
    ready()  # lightning imports it where it is there

from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy


def launch(precision: str, runtime: Runtime) -> Fabric:
    """Configured by ``runtime``, or by the environment variables of torchrun."""
    devices, nodes = runtime.devices, runtime.nodes
    if launched_by_torchrun():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        nodes = int(os.environ["WORLD_SIZE"]) // devices
    # Buffers are not broadcast at each step: that would discard the statistics of the other processes.
    known = inspect.signature(DistributedDataParallel).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    options: dict[str, Any] = {switch: False}
    alone = devices * nodes == 1
    try:
        fabric = Fabric(
            accelerator=runtime.accelerator,
            devices=devices,
            num_nodes=nodes,
            strategy="auto" if alone else DDPStrategy(**options),
            precision=cast(Any, precision),  # Fabric checks it
            plugins=LightningEnvironment() if alone else None,  # or Fabric would count the tasks of a Slurm job
        )
    except (ValueError, RuntimeError) as problem:
        raise UserError(f"Lightning Fabric raised an error: {' '.join(str(problem).split())}") from problem
    fabric.launch()
    return fabric
