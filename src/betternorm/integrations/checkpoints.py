"""Reading checkpoints (.pt, .pth and .safetensors, with common wrappers and prefixes), and writing them with alpha.

Files written by this package are plain state dicts with a note in their metadata: how to load them, and the channel
groups of the layers.
"""

from __future__ import annotations

import difflib
import json
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from betternorm.errors import UserError

M = TypeVar("M", bound=nn.Module)

# Keys under which trainers store the weights in a checkpoint, and prefixes that wrappers add to names.
WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params")
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "backbone.", "encoder.")


NOTE = "betternorm"  # the key of the note in a file's metadata


def load(model: M, path: str | Path, *, ema: bool = False) -> M:
    """Load a checkpoint into ``model``, in place, with its alphas if it has any.

    If the file has alphas, the model is converted with ``convert(model, "weighed")``. Weights under common keys
    (``state_dict``, ``model``) and names with common prefixes (``module.``) are supported. File and model must have the
    same parameters and buffers, in the same shapes.

    In contrast, ``model.load_state_dict(weights, strict=False)`` silently drops the alphas of a tuned file.

    Args:
        model: the model.
        path: .pt, .pth or .safetensors.
        ema: use the averaged weights of the checkpoint.

    Returns:
        ``model``.

    Raises:
        UserError: if the file cannot be read, or does not match the model. The message names an example.

    Examples::

        model = betternorm.load(torchvision.models.resnet50(), "resnet50-tuned.pt").eval()
    """
    return load_checkpoint(model, path, ema)


def save_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Write the weights of ``model``, including its alphas, and a note on how to load them with :func:`load`."""
    path = Path(path)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    note = json.dumps({"load": "betternorm.load(model, path)", "channels_per_group": _channel_groups(model)})
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        tensors = {name: tensor.clone() for name, tensor in weights.items()}  # safetensors rejects shared memory
        save_file(tensors, path, {"format": "pt", NOTE: note})
    else:
        noted = OrderedDict(weights)
        noted._metadata = {"": {NOTE: note}}  # type: ignore[attr-defined]  # where torch stores the versions of layers
        torch.save(noted, path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read a checkpoint file: only tensors and plain containers, so that no code runs."""
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """The contents of a file, and its note."""
    if not path.is_file():
        raise UserError(f"checkpoint {path}: there is no such file")
    if path.suffix == ".safetensors":
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise UserError(f"checkpoint {path} needs safetensors: pip install safetensors") from error
        try:
            with safe_open(path, "pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, (file.metadata() or {}).get(NOTE)  # noqa: SIM118
        except Exception as error:
            raise UserError(f"checkpoint {path} is damaged: {_first_line(error)}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about the pickle protocol
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            is_pickle = file.read(1) == b"\x80" or zipfile.is_zipfile(path)
        if is_pickle:
            raise UserError(
                f"checkpoint {path} is a pickle of more than tensors, which could run code when it is loaded; save "
                "model.state_dict() instead"
            ) from error
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint: {_first_line(error)}") from error
    except Exception as error:  # a damaged file can fail in any way
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint: {_first_line(error)}") from error
    if not isinstance(checkpoint, Mapping):
        raise UserError(f"checkpoint {path} contains a {type(checkpoint).__name__}; expected a dict of tensors")
    metadata = getattr(checkpoint, "_metadata", {})
    return dict(checkpoint), metadata.get("", {}).get(NOTE) if isinstance(metadata, Mapping) else None


def state_dict_of(checkpoint: Mapping[str, Any], ema: bool = False) -> dict[str, Tensor]:
    """The weights by name, under any of the common keys; with ``ema``, the averaged weights."""
    weights: Any = checkpoint
    for key in AVERAGED if ema else ():
        if isinstance(checkpoint.get(key), Mapping):
            return state_dict_of(checkpoint[key])
    if ema:
        raise UserError(f"the checkpoint has no averaged weights; it has {_listed(checkpoint)}")
    while isinstance(weights, Mapping):
        if weights and all(isinstance(value, Tensor) for value in weights.values()):
            return dict(weights)
        inner = next((weights[key] for key in WRAPPERS if isinstance(weights.get(key), Mapping)), None)
        if inner is None:
            tensors = {key: value for key, value in weights.items() if isinstance(value, Tensor)}
            if tensors:  # next to numbers and strings
                return tensors
            break
        weights = inner
    raise UserError(
        f"the checkpoint contains no weights: looked under {', '.join(WRAPPERS)}, and it has {_listed(checkpoint)}"
    )


def load_checkpoint(model: M, path: str | Path, ema: bool = False) -> M:
    """:func:`load` with ``ema`` as a positional argument."""
    weights, note = _weights_for(model, Path(path), ema)
    alphas = [name.removesuffix(".alpha") for name in weights if name.endswith(".alpha")]
    if alphas:
        from betternorm.conversion.convert import convert

        model = convert(model, "weighed")
        _check_alphas(model, alphas, note, Path(path))
    _load(model, weights, Path(path))
    return model


def _check_alphas(model: nn.Module, alphas: list[str], note: str | None, path: Path) -> None:
    """Raise an error if a layer has no alpha, or other channel groups than the one that was saved."""
    groups = _channel_groups(model)
    unknown = [name for name in alphas if name not in groups]
    if unknown:
        raise UserError(
            f"checkpoint {path} has an alpha for layer {unknown[0]!r}, and the model has no such norm layer"
        )
    written = json.loads(note)["channels_per_group"] if note else {}
    for name, size in written.items():
        if groups.get(name, size) != size:
            raise UserError(
                f"checkpoint {path} was saved with groups of {size} channels in layer {name!r}, and the model has "
                f"groups of {groups[name]}; convert the model in the same way before loading"
            )


def _channel_groups(model: nn.Module) -> dict[str, int]:
    from betternorm.weighing.alpha import weighed_layers

    return {name: layer.channels_per_group for name, layer in weighed_layers(model).items()}


def load_for_other_classes(model: nn.Module, path: str | Path) -> None:
    """Load pretrained weights for another task, in place, without alphas, which were tuned for the original task.

    The last linear layer may be missing or have other shapes. It then keeps its initialization.
    """
    weights, _ = _weights_for(model, Path(path))
    weights = {name: value for name, value in weights.items() if not name.endswith(".alpha")}
    own = model.state_dict()
    heads = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][-1:]
    head = {name for name in own if heads and name.startswith(f"{heads[0]}.")}
    if any(name in weights and weights[name].shape != own[name].shape for name in head):
        weights = {name: value for name, value in weights.items() if name not in head}
    _load(model, weights, Path(path), may_lack=head)


def _weights_for(model: nn.Module, path: Path, ema: bool = False) -> tuple[dict[str, Tensor], str | None]:
    """The weights of a file, with the names of the model, and its note."""
    try:
        checkpoint, note = _read(path)
        weights = state_dict_of(checkpoint, ema)
    except UserError as error:
        message = str(error)
        raise UserError(message if str(path) in message else f"checkpoint {path}: {message}") from error
    return _without_prefix(weights, set(model.state_dict())), note


def _load(model: nn.Module, weights: dict[str, Tensor], path: Path, may_lack: Collection[str] = ()) -> None:
    own = model.state_dict()
    # Files of torch before 0.4.1 have no num_batches_tracked.
    missing = [
        name
        for name in own
        if name not in weights and name not in may_lack and not name.endswith(("num_batches_tracked", ".alpha"))
    ]
    unknown = [name for name in weights if name not in own and not name.endswith((".alpha", "num_batches_tracked"))]
    wrong = [
        name
        for name in own
        # An alpha may be a number in the model and a vector in the file; the layer checks it when it is loaded.
        if name in weights and own[name].shape != weights[name].shape and not name.endswith(".alpha")
    ]
    if missing or unknown or wrong:
        raise UserError(
            f"checkpoint {path} is of another architecture: {_mismatch(own, weights, missing, unknown, wrong)}"
        )
    try:
        model.load_state_dict(weights, strict=False)
    except RuntimeError as error:
        raise UserError(f"checkpoint {path} does not fit the model: {_first_line(error)}") from error


def _without_prefix(weights: dict[str, Tensor], wanted: set[str]) -> dict[str, Tensor]:
    """Remove prefixes that all names share."""
    while True:
        prefix = next((p for p in PREFIXES if weights and all(name.startswith(p) for name in weights)), None)
        if prefix is None or sum(name in wanted for name in weights) == len(wanted):
            return weights
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}


def _mismatch(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], missing: list[str], unknown: list[str], wrong: list[str]
) -> str:
    parts = []
    if wrong:
        name = wrong[0]
        parts.append(
            f"{len(wrong)} with other shapes (e.g. {name}: {tuple(weights[name].shape)} in the file, "
            f"{tuple(own[name].shape)} in the model)"
        )
    if missing:
        near = difflib.get_close_matches(missing[0], unknown, n=1)
        parts.append(f"{len(missing)} missing (e.g. {missing[0]}{f'; the file has {near[0]}' if near else ''})")
    if unknown:
        parts.append(f"{len(unknown)} not in the model (e.g. {unknown[0]})")
    return ", ".join(parts)


def _listed(mapping: Mapping[str, Any], most: int = 6) -> str:
    names = [str(key) for key in mapping]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
