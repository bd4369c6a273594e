"""Files with intermediate results, so that an interrupted search continues where it stopped."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

FORMAT = 2  # version 0.1 wrote files without a format
SAVE_EVERY = 20.0  # seconds between two writes
TOLERANCE = 1e-4  # relative; thread counts change the last bits
REFERENCE_VALUES = 1 << 16  # outputs stored to recognize the model when a search is resumed


class ResumeFile:
    """One file of intermediate results, valid for one signature. Without a path it stores nothing."""

    def __init__(self, path: str | os.PathLike[str] | None, signature: Callable[[], str]) -> None:
        self.path = None if path is None else Path(path)
        self._signature = "" if path is None else signature()
        self._saved = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The stored results; None if there is no file."""
        if self.path is None:
            return None
        try:
            state = torch.load(self.path, weights_only=True)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self.error(f"is not a file of intermediate results ({error})") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise self.error("was written by another version of betternorm")
        if state.pop("signature") != self._signature:
            raise self.error("belongs to another model, other metrics or other options")
        return state

    def save(self, state: Callable[[], dict[str, Any]], every: float = 0.0) -> None:
        """Write the results, at most once in ``every`` seconds. The file is replaced atomically."""
        if self.path is None or time.monotonic() - self._saved < every:
            return
        partial_file = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            torch.save({"format": FORMAT, "signature": self._signature, **state()}, partial_file)
            partial_file.replace(self.path)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            partial_file.unlink(missing_ok=True)
            folder = self.path.parent
            reason = getattr(error, "strerror", None)
            reason = reason or ("the disk may be full" if folder.is_dir() else f"there is no folder {folder}")
            raise OSError(getattr(error, "errno", None), f"cannot be written: {reason}", str(self.path)) from error
        self._saved = time.monotonic()

    def error(self, reason: str) -> ValueError:
        return ValueError(f"resume={str(self.path)!r} {reason}; remove the file or choose another name")


def signature(*parts: Any) -> str:
    """A digest of models (structure and weights), functions (code), tensors and plain values.

    Counts of batches and the values of alpha in the state_dict are left out, and so is what a function closes over.
    """
    digest = hashlib.sha256()
    for part in parts:
        _add(digest, part)
    return digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        digest.update(f"{data.dtype}{tuple(data.shape)}".encode())
        digest.update(ctypes.string_at(data.data_ptr(), data.numel() * data.element_size()) if data.numel() else b"")
    elif isinstance(value, nn.Module):
        _add(digest, repr(value))
        for name, module in value.named_modules():
            _add(digest, (name, type(module).__qualname__, module.forward))
        for name, tensor in sorted(value.state_dict().items()):
            if name.rpartition(".")[2] not in ("alpha", "num_batches_tracked"):
                _add(digest, (name, tensor))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            _add(digest, (key, value[key]))
    elif isinstance(value, frozenset):
        _add(digest, sorted(value, key=repr))
    elif isinstance(value, (list, tuple)):
        digest.update(f"{len(value)}[".encode())
        for item in value:
            _add(digest, item)
    elif isinstance(value, CodeType):
        _add(digest, (value.co_code.hex(), value.co_names, value.co_consts))
    elif isinstance(value, partial):
        _add(digest, (value.func, value.args, value.keywords))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        _add(digest, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    elif callable(value):
        function = getattr(value, "__func__", value)
        if not hasattr(function, "__code__") and not isinstance(value, type):
            function = type(value).__call__
        name = getattr(function, "__qualname__", type(value).__qualname__)
        _add(digest, (name, getattr(function, "__code__", None), getattr(function, "__defaults__", None)))
    else:
        digest.update(re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode() + b";")


def same_values(a: Tensor, b: Tensor, share: float) -> bool:
    """Whether this share of the rows agrees up to rounding (which may decide a tie either way)."""
    if a.shape != b.shape:
        return False
    precision = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
    a, b = (part.double().reshape(len(part), -1) for part in (a, b))
    largest = float(b.nan_to_num(0, 0, 0).abs().max())
    tolerance = max(TOLERANCE, 4 * precision) * largest
    close = torch.isclose(a, b, rtol=0.0, atol=tolerance, equal_nan=True).all(1)
    return math.ceil(share * len(close)) <= int(close.sum())
