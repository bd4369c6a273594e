"""Making torchvision importable beside a build of torch that it was not compiled for."""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch

# torchvision registers fake kernels for these operators while it is imported; a wheel whose binary part does
# not load (a CUDA build beside torch for the CPU) has not declared them, and the import fails.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a Library takes its schemas with it when it is collected


def ready() -> None:
    """Import torchvision, declaring what its binary part failed to declare. Call it before importing timm.

    Nothing is done where torchvision imports by itself. Where it does not, its models and transforms work
    afterwards and its detection operators (``nms``) stay without an implementation. Raises ``ImportError``
    where torchvision is not installed.
    """
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
        for half_imported in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[half_imported]
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name, schema in _SCHEMAS.items():
            if not hasattr(torch.ops.torchvision, name):
                library.define(schema)
        _declared.append(library)
        importlib.import_module("torchvision")


def ready_if_installed() -> None:
    """The same before importing a library that can do without torchvision."""
    with contextlib.suppress(ImportError):
        ready()
