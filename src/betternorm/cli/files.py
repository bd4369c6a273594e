"""The files that a command writes: all of them or none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from betternorm.errors import UserError

SUFFIXES = (".pt", ".pth", ".safetensors")


def check_outputs(outputs: Sequence[Path], force: bool) -> None:
    """Check the names before a long computation. The first is the checkpoint."""
    out = outputs[0]
    if out.suffix not in SUFFIXES:
        raise UserError(f"--out is {out}; its name has to end in .pt, .pth or .safetensors")
    if not out.parent.is_dir():
        raise UserError(f"--out is {out}, and there is no folder {out.parent}")
    existing = [str(path) for path in outputs if path.exists()]
    if existing and not force:
        raise UserError(f"{existing[0]} exists; pass --force to overwrite it, or another --out")


def write_all(writers: Mapping[Path, Callable[[Path], object]]) -> None:
    """Write all files under temporary names first, which are unique to this process."""
    written: list[tuple[Path, Path]] = []
    target = Path()
    try:
        for target, write in writers.items():
            temporary = target.with_name(f".unfinished-{os.getpid()}-{target.name}")
            written.append((temporary, target))
            write(temporary)
        for temporary, target in written:
            temporary.replace(target)
    except (OSError, RuntimeError) as error:
        if (
            not isinstance(error, OSError)
            and "PytorchStreamWriter" not in str(error)
            and "unexpected pos" not in str(error)
        ):
            raise
        reason = getattr(error, "strerror", None) or "the disk may be full"  # torch.save raises a RuntimeError
        raise UserError(f"{target} cannot be written: {reason}") from error
    finally:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
