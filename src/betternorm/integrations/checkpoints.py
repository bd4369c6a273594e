"""Checkpoints: read as people write them (.pt, .pth and .safetensors, wrapped and prefixed), and written with alpha.

A file that this package writes is a plain state dict with a note in its metadata: how it is to be loaded, and what the
tensors do not say about the layers.
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

# Where trainers put the weights within a checkpoint, and what wrappers put before the names.
WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "module", "weights", "params")
AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema")
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "network.", "backbone.", "encoder.")


NOTE = "betternorm"  # the key of the note in a file's metadata


def load(model: M, path: str | Path, *, ema: bool = False) -> M:
    """Load a checkpoint, tuned or not, into ``model``, in place, and return it.

    Where the file has alphas the model is converted (``convert(model, "weighed")``) and gets them. Wrappers around the
    weights and prefixes of their names are understood. Everything that the model has must be in the file, in the right
    shape, and the other way round.

    Plain ``model.load_state_dict(weights, strict=False)`` drops the alphas of a tuned file without a word.

    Args:
        path: .pt, .pth or .safetensors.
        ema: take the averaged weights of the checkpoint.

    Examples::

        model = betternorm.load(torchvision.models.resnet50(), "resnet50-tuned.pt").eval()
    """
    return load_checkpoint(model, path, ema)


def save_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Write the weights of ``model``, with its alphas and a note on how to load them, for :func:`load`."""
    path = Path(path)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    note = json.dumps({"load": "betternorm.load(model, path)", "channels_per_group": _channel_groups(model)})
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        tensors = {name: tensor.clone() for name, tensor in weights.items()}  # it refuses shared memory
        save_file(tensors, path, {"format": "pt", NOTE: note})
    else:
        noted = OrderedDict(weights)
        noted._metadata = {"": {NOTE: note}}  # type: ignore[attr-defined]  # where torch keeps the versions of layers
        torch.save(noted, path)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """What a file holds. Pickles that would run code are refused: only tensors and plain containers are read."""
    return _read(Path(path))[0]


def _read(path: Path) -> tuple[dict[str, Any], str | None]:
    """What a file holds, and the note in it."""
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
            warnings.simplefilter("ignore")  # of torch about how the file was pickled
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        with path.open("rb") as file:
            is_pickle = file.read(1) == b"\x80" or zipfile.is_zipfile(path)
        if is_pickle:
            raise UserError(
                f"checkpoint {path} is a pickle of more than tensors, which could run code while it is read; save "
                "model.state_dict() and give that"
            ) from error
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint: {_first_line(error)}") from error
    except Exception as error:  # a damaged file can fail in any way
        raise UserError(f"checkpoint {path} is damaged or not a checkpoint: {_first_line(error)}") from error
    if not isinstance(found, Mapping):
        raise UserError(f"checkpoint {path} holds a {type(found).__name__}; a dict of tensors is wanted")
    metadata = getattr(found, "_metadata", {})
    return dict(found), metadata.get("", {}).get(NOTE) if isinstance(metadata, Mapping) else None


def state_dict_of(checkpoint: Mapping[str, Any], ema: bool = False) -> dict[str, Tensor]:
    """The tensors by name, from under the usual wrapper keys; with ``ema`` from the averaged weights."""
    found: Any = checkpoint
    for key in AVERAGED if ema else ():
        if isinstance(checkpoint.get(key), Mapping):
            return state_dict_of(checkpoint[key])
    if ema:
        raise UserError(f"the checkpoint has no averaged weights; it has {_listed(checkpoint)}")
    while isinstance(found, Mapping):
        if found and all(isinstance(value, Tensor) for value in found.values()):
            return dict(found)
        inner = next((found[key] for key in WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            tensors = {key: value for key, value in found.items() if isinstance(value, Tensor)}
            if tensors:  # beside numbers and notes
                return tensors
            break
        found = inner
    raise UserError(
        f"the checkpoint holds no weights: looked under {', '.join(WRAPPERS)}, and it has {_listed(checkpoint)}"
    )


def load_checkpoint(model: M, path: str | Path, ema: bool = False) -> M:
    """:func:`load`, for a caller that passes ``ema`` on."""
    weights, note = _weights_for(model, Path(path), ema)
    alphas = [name.removesuffix(".alpha") for name in weights if name.endswith(".alpha")]
    if alphas:
        from betternorm.conversion.convert import convert

        model = convert(model, "weighed")
        _check_alphas(model, alphas, note, Path(path))
    _load(model, weights, Path(path))
    return model


def _check_alphas(model: nn.Module, alphas: list[str], note: str | None, path: Path) -> None:
    """Refuse layers that cannot take an alpha, or that would do something else with it."""
    groups = _channel_groups(model)
    unknown = [name for name in alphas if name not in groups]
    if unknown:
        raise UserError(
            f"checkpoint {path} has an alpha for layer {unknown[0]!r}, and the model's layer of that name takes none"
        )
    written = json.loads(note)["channels_per_group"] if note else {}
    for name, size in written.items():
        if groups.get(name, size) != size:
            raise UserError(
                f"checkpoint {path} is of a network whose layer {name!r} has groups of {size} channels, and here it "
                f"has {groups[name]}; convert the model as that one was, and load then"
            )


def _channel_groups(model: nn.Module) -> dict[str, int]:
    from betternorm.weighing.alpha import weighed_layers

    return {name: layer.channels_per_group for name, layer in weighed_layers(model).items()}


def load_for_other_classes(model: nn.Module, path: str | Path) -> None:
    """Load weights as a start for another task, in place: without alphas, which belong to the task they were tuned for.

    The last linear layer may be missing, or have other shapes; it is then left as it was initialised.
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
    """The tensors of a file under the names that the model has for them, and the note in the file."""
    try:
        checkpoint, note = _read(path)
        weights = state_dict_of(checkpoint, ema)
    except UserError as error:
        message = str(error)
        raise UserError(message if str(path) in message else f"checkpoint {path}: {message}") from error
    return _without_prefix(weights, set(model.state_dict())), note


def _load(model: nn.Module, weights: dict[str, Tensor], path: Path, may_lack: Collection[str] = ()) -> None:
    own = model.state_dict()
    # Files from before torch 0.4.1 do not count batches.
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
    """Names without the prefixes that all of them share, as long as that makes more of them known."""
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
            f"{len(wrong)} of other shapes (e.g. {name}: {tuple(weights[name].shape)} in the file, "
            f"{tuple(own[name].shape)} in the model)"
        )
    if missing:
        near = difflib.get_close_matches(missing[0], unknown, n=1)
        parts.append(f"{len(missing)} missing (e.g. {missing[0]}{f'; the file has {near[0]}' if near else ''})")
    if unknown:
        parts.append(f"{len(unknown)} unknown to the model (e.g. {unknown[0]})")
    return ", ".join(parts)


def _listed(mapping: Mapping[str, Any], most: int = 6) -> str:
    names = [str(key) for key in mapping]
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "nothing"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
