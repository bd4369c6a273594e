"""Importing torchvision with a build of torch that it was not compiled for."""

from __future__ import annotations

import contextlib
import importlib
import sys

import torch

# torchvision registers fake kernels for these operators when it is imported. If its binary part does not load (a CUDA
# build with torch for CPUs), they have no schema, and the import fails.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_declared: list[torch.library.Library] = []  # a Library removes its schemas when it is garbage-collected


def ready() -> None:
    """Import torchvision, and declare its operators if its binary part does not load. Call this before importing timm.

    If torchvision imports normally, nothing else happens. Otherwise its models and transforms work afterwards, and its
    detection operators (``nms``) have no implementation.

    Raises:
        ImportError: if torchvision is not installed.
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
    """Call :func:`ready` before importing a library that uses torchvision if it is installed."""
    with contextlib.suppress(ImportError):
        ready()
