"""A model by its name: ``timm:resnet50``, ``torchvision:resnet50``, ``path/to/file.py:function``."""

from __future__ import annotations

import difflib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from betternorm.errors import UserError
from betternorm.integrations import torchvision as torchvision_support

FORMS = "timm:NAME, torchvision:NAME or path/to/file.py:function"


def load_model(spec: str, **keywords: Any) -> nn.Module:
    """Build the model that ``spec`` names, with ``keywords`` for its constructor. Nothing is downloaded.

    Examples::

        load_model("timm:resnet50", num_classes=10)
        load_model("torchvision:inception_v3", init_weights=False)
        load_model("nets/mine.py:build", width=64)
    """
    source, _, name = spec.rpartition(":")
    if not (source and name):
        raise UserError(f"model {spec!r}: write it as {FORMS}")
    if source == "timm":
        build = _from_timm(name)
    elif source == "torchvision":
        build = _from_torchvision(name)
    else:
        build = _from_file(Path(source), name)
    try:
        model = build(**keywords)
    except TypeError as error:
        raise UserError(f"model {spec!r} could not be built with {keywords or 'no arguments'}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UserError(f"model {spec!r} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def _from_timm(name: str) -> Callable[..., nn.Module]:
    _require_torchvision(f"timm:{name}")
    try:
        import timm
    except ImportError as error:
        raise UserError(f"model 'timm:{name}' needs timm: pip install timm ({error})") from error
    if not timm.is_model(name):
        raise UserError(f"timm has no model {name!r}{_nearest(name, timm.list_models())}")
    return lambda **keywords: timm.create_model(name, pretrained=False, **keywords)


def _from_torchvision(name: str) -> Callable[..., nn.Module]:
    _require_torchvision(f"torchvision:{name}")
    from torchvision import models

    if name not in models.list_models():
        raise UserError(f"torchvision has no model {name!r}{_nearest(name, models.list_models())}")
    return lambda **keywords: models.get_model(name, weights=None, **keywords)


def _from_file(path: Path, function: str) -> Callable[..., nn.Module]:
    if path.suffix != ".py":
        raise UserError(f"model '{path}:{function}': write it as {FORMS}")
    if not path.is_file():
        raise UserError(f"model '{path}:{function}': there is no file {path}")
    description = importlib.util.spec_from_file_location(path.stem, path)
    assert description is not None  # the suffix is .py
    assert description.loader is not None
    module = importlib.util.module_from_spec(description)
    # As when the file is run: it may import its neighbors, and dataclasses find their module.
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    sys.modules.setdefault(path.stem, module)
    try:
        description.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    build = getattr(module, function, None)
    if not callable(build):
        public = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        raise UserError(f"{path} has no function {function!r}; it has {', '.join(public) or 'none'}")
    return build  # type: ignore[no-any-return]


def _require_torchvision(spec: str) -> None:
    try:
        torchvision_support.ready()
    except ImportError as error:
        raise UserError(f"model {spec!r} needs torchvision: pip install torchvision ({error})") from error


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3)
    return f"; did you mean {', '.join(near)}?" if near else ""
