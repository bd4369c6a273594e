"""Compiles the CPU kernels when the package is built: a hook of hatchling, and `python hatch_build.py` for a checkout.

Requires a C++ compiler and torch with its headers in the build environment (hence no build isolation). If either is
missing, or with ``BETTERNORM_BUILD=pure``, the package is built without kernels, and `backends.status` reports it.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent / "src/betternorm/backends/cpu"
LIBRARY = SOURCES / "libbetternorm.so.0"
FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-w"]
# Fused multiply-adds are allowed; reordering of sums, which -ffast-math includes, is not.
ARITHMETIC = ["-O3", "-fno-math-errno", "-fno-trapping-math"]
STABLE_ABI = "-DTORCH_TARGET_VERSION=0x020a000000000000"  # torch 2.10
# One table of kernels for each instruction set; the table is selected at run time.
X86_LEVELS = {"kernels_v2": "-march=x86-64-v2", "kernels_v3": "-march=x86-64-v3", "kernels_v4": "-march=x86-64-v4"}


def build() -> str | None:
    """Compile into the source tree. Returns the reason if that is not possible."""
    if os.environ.get("BETTERNORM_BUILD") == "pure":
        LIBRARY.unlink(missing_ok=True)
        return "BETTERNORM_BUILD=pure"
    made_of = (Path(__file__), *SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))
    if LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(path.stat().st_mtime for path in made_of):
        return None
    LIBRARY.unlink(missing_ok=True)
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler or sys.platform == "win32":
        return "no C++ compiler (c++, g++ or clang++) found"
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed where the package is built; install with --no-build-isolation"
    torch = Path(spec.origin).parent
    if not (torch / "include/torch/csrc/stable/library.h").exists():
        return "this torch has no stable ABI; 2.10 and later have"
    try:
        _compile(shlex.split(compiler), torch)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        return f"the kernels do not compile: {next((line for line in lines if 'error' in line), lines[-1])}"
    return None


def _compile(compiler: list[str], torch: Path) -> None:
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    levels = X86_LEVELS if x86 else {"kernels_v2": "-DBETTERNORM_ANY_PROCESSOR"}
    flags = [*compiler, *FLAGS, *(["-DBETTERNORM_X86_LEVELS"] if x86 else [])]
    with tempfile.TemporaryDirectory() as folder:
        objects = {str(Path(folder, f"{name}.o")): [*ARITHMETIC, march, f"-DBETTERNORM_TABLE={name}",
                   str(SOURCES / "kernels.cpp")] for name, march in levels.items()}  # fmt: skip
        objects[str(Path(folder, "operators.o"))] = [
            "-O3",
            STABLE_ABI,
            f"-I{torch / 'include'}",
            str(SOURCES / "operators.cpp"),
        ]
        running = [
            subprocess.Popen([*flags, "-c", *rest, "-o", target], stderr=subprocess.PIPE, text=True)
            for target, rest in objects.items()
        ]
        for process in running:
            _, message = process.communicate()
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, stderr=message)
        # torch is already loaded when the library is, so no path to it is stored.
        made = Path(folder, LIBRARY.name)
        library_of_torch = [f"-L{torch / 'lib'}", "-ltorch_cpu"]
        subprocess.run(
            [*compiler, "-shared", *objects, *library_of_torch, "-o", str(made)],
            check=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        shutil.move(made, LIBRARY)


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, in an environment without hatchling
    BuildHookInterface = object


class KernelsBuildHook(BuildHookInterface):  # type: ignore[misc,valid-type]
    """Adds the library to the wheel and tags the wheel with the platform."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        reason = build()
        if reason is not None:
            self.app.display_warning(f"betternorm is built without compiled kernels: {reason}")
            return
        build_data["artifacts"].append(str(LIBRARY.relative_to(Path(__file__).parent)))
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    if (problem := build()) is not None:
        sys.exit(f"not built: {problem}")
    print(LIBRARY)
