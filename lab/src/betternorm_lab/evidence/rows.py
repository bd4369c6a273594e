"""One compressed file per run: a JSON record and arrays, of which per-image correctness is packed into bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from betternorm_lab.store import atomic, make_folder

Array = np.ndarray[Any, Any]


def write_arrays(path: Path, meta: dict[str, Any], **arrays: Array) -> None:
    make_folder(path.parent)
    with atomic(path) as draft, open(draft, "wb") as file:
        contents: dict[str, Any] = {"meta": np.array(json.dumps(meta)), **arrays}
        np.savez_compressed(file, **contents)


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, Array]]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    return json.loads(str(arrays.pop("meta"))), arrays


def pack(correct: Array) -> Array:
    return np.packbits(np.asarray(correct, dtype=bool))


def unpack(packed: Array, count: int) -> Array:
    return np.unpackbits(packed, count=count).astype(bool)
