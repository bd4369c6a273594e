"""Loads the C++ kernels that were built with the package.

`operators.cpp` registers them with torch's dispatcher. Without the library (no compiler at installation, an unsupported
platform, torch before 2.10), the reference implementation is used.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from betternorm.backends import operators  # noqa: F401  (defines the schemas)

LIBRARY = Path(__file__).with_name("libbetternorm.so.0")


def _load() -> tuple[bool, str]:
    if os.environ.get("BETTERNORM_KERNELS", "1") == "0":
        return False, "switched off by BETTERNORM_KERNELS=0"
    if not LIBRARY.exists():
        return False, "installed without compiled kernels; torch's own operators are used"
    try:
        torch.ops.load_library(LIBRARY)
    except (OSError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        return False, f"compiled kernels do not load ({reason}); torch's own operators are used"
    return True, "compiled kernels"


loaded, status = _load()
