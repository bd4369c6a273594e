"""The fused CPU kernel: compiles kernel.c once with the machine's C compiler and offers it as torch operators.

Where there is no compiler (or ``BETTERNORM_KERNEL=0``), nothing here is used and functional.py computes the same with
torch's own operators. The kernel serves float32 on the CPU, contiguous or channels last.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("kernel.c")
FLAGS = "-O3 -march=native -fopenmp -fno-math-errno -fno-trapping-math -fPIC"

# Units of work keep a few numbers a channel on the stack, and a unit is never narrower than a channel group.
MOST_CHANNELS_PER_GROUP = 4096


def serves(x: Tensor, channels_per_group: int = 1) -> bool:
    """Whether the kernel takes this tensor. Compiles the kernel at the first call that could use it."""
    return (
        x.dtype == torch.float32
        and x.device.type == "cpu"
        and (torch.compiler.is_compiling() or _has_memory(x))
        and channels_per_group <= MOST_CHANNELS_PER_GROUP
        and x.numel() > 0
        and (x.is_contiguous() or _is_channels_last(x))
        and available()
    )


def available() -> bool:
    """Whether the kernel could be compiled here; ``status()`` says why not."""
    return _library()[0] is not None


# What torch.compiler.assume_constant_result does, which would import the compiler and double the time to import this.
available._dynamo_marked_constant = True  # type: ignore[attr-defined]


def status() -> str:
    """One line on where the kernel is, or why there is none."""
    return _library()[1]


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels_per_group: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output (empty without ``write``), group mean, group 1 / std, batch mean and biased batch variance."""
    run = torch.ops.betternorm.forward if torch.compiler.is_compiling() else _forward
    result: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = run(x, weight, bias, groups, channels_per_group, eps, write)
    return result


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, groups: int, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x (empty without ``need_dx``), weight and bias."""
    run = torch.ops.betternorm.backward if torch.compiler.is_compiling() else _backward
    result: tuple[Tensor, Tensor, Tensor] = run(dy, x, weight, mean, rstd, groups, need_dx)
    return result


def infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    """Inference with weight ``alpha`` on the example's own statistics."""
    run = torch.ops.betternorm.infer if torch.compiler.is_compiling() else _infer
    result: Tensor = run(x, running_mean, running_var, weight, bias, alpha, channels_per_group, eps)
    return result


def example_moments(x: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance over space of every example and channel, (N, C).

    Fast where ``guess``, (C), is near the means; exact wherever it is.
    """
    result: tuple[Tensor, Tensor] = torch.ops.betternorm.example_moments(x, guess)
    return result


def move(running_mean: Tensor, running_var: Tensor, mean: Tensor, var: Tensor, momentum: float) -> bool:
    """`functional.update_moving_averages` in one call instead of six; False where the kernel does not take them."""
    averages = (running_mean, running_var)
    if torch.compiler.is_compiling() or not (serves(running_mean) and serves(running_var) and serves(mean)):
        return False
    library = _library()[0]
    assert library is not None
    library.move(mean.numel(), *map(_address, (*averages, mean, var)), momentum)
    torch.autograd.graph.increment_version(averages)
    return True


# ---- the library ----


class _Shape(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_long)
        for name in (
            "examples",
            "channels",
            "space",
            "groups",
            "channels_per_group",
            "channels_last",
            "threads",
        )
    ]


@functools.cache
def _library() -> tuple[ctypes.CDLL | None, str]:
    if os.environ.get("BETTERNORM_KERNEL", "1") == "0":
        return None, "switched off by BETTERNORM_KERNEL=0"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        return None, "no C compiler found (cc, gcc or clang); torch's own operators are used"
    runtime = _openmp_runtime()
    if runtime is None:
        return None, "torch's OpenMP runtime was not found; torch's own operators are used"
    try:
        path = _compiled(shlex.split(compiler), runtime)
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        return None, f"kernel.c could not be compiled ({str(detail).strip()}); torch's own operators are used"
    pointer, double = ctypes.c_void_p, ctypes.c_double
    library.forward.argtypes = [_Shape, *[pointer] * 3, double, *[pointer] * 6]
    library.backward.argtypes = [_Shape, *[pointer] * 9]
    library.infer.argtypes = [_Shape, *[pointer] * 5, double, double, pointer]
    library.example_moments.argtypes = [_Shape, *[pointer] * 4]
    library.move.argtypes = [ctypes.c_long, *[pointer] * 4, double]
    for function in (library.forward, library.backward, library.infer, library.example_moments, library.move):
        function.restype = None
    return library, str(path)


def _compiled(compiler: list[str], runtime: str) -> Path:
    """Compile into the user's cache, once for each source, compiler, processor and OpenMP runtime."""
    key = hashlib.sha256()
    for part in (SOURCE.read_text(), FLAGS, *compiler, runtime, _processor()):
        key.update(part.encode() + b"\0")
    try:
        folder = _cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        folder = Path(tempfile.mkdtemp(prefix="betternorm-"))
    target = folder / f"kernel-{key.hexdigest()[:16]}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            compiled, linked = Path(work, "kernel.o"), Path(work, "kernel.so")
            # Linked against the OpenMP runtime that torch has loaded, so that both share one pool of threads.
            for command in (
                [*compiler, *FLAGS.split(), "-c", str(SOURCE), "-o", str(compiled)],
                [*compiler, "-shared", str(compiled), runtime, "-lm", "-o", str(linked)],
            ):
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            linked.replace(target)  # atomic: another process sees the whole file or none
    return target


def _cache_folder() -> Path:
    if "BETTERNORM_CACHE" in os.environ:
        return Path(os.environ["BETTERNORM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "betternorm"


def _openmp_runtime() -> str | None:
    """The OpenMP library in this process, by its file."""
    if not sys.platform.startswith("linux"):
        return None
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[1] + line.partition("/")[2]
        if Path(path).name.startswith(("libgomp", "libiomp5", "libomp")):
            return path
    return None


def _processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by unlike machines."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in ("model name", "flags"))


def _has_memory(x: Tensor) -> bool:
    """Not so for the tensors of tracing tools and of torch.func, which stand for others."""
    return type(x) in (Tensor, torch.nn.Parameter) and not torch._C._are_functorch_transforms_active()


# ---- calls of the library; as torch operators too, so that torch.compile can put them into a graph ----


def _is_channels_last(x: Tensor) -> bool:
    if x.dim() == 4:
        return x.is_contiguous(memory_format=torch.channels_last)
    return x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d)


def _shape(x: Tensor, groups: int, channels_per_group: int) -> _Shape:
    examples, channels, *space = x.shape
    size = math.prod(space)
    # Without space both layouts are the same memory, and the channels-last loops run along the channels.
    channels_last = size == 1 or not x.is_contiguous()
    return _Shape(examples, channels, size, groups, channels_per_group, channels_last, torch.get_num_threads())


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _as_kernel_takes(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.float32).contiguous()


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels_per_group: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    weight, bias = _as_kernel_takes(weight), _as_kernel_takes(bias)
    y = torch.empty_like(x) if write else None
    table = (groups, channels // channels_per_group)
    mean, rstd = x.new_empty(table), x.new_empty(table)
    batch_mean, batch_var = x.new_empty(channels), x.new_empty(channels)
    scratch = x.new_empty(2 * groups * channels, dtype=torch.float64)
    library = _library()[0]
    assert library is not None
    library.forward(
        _shape(x, groups, channels_per_group),
        *map(_address, (x, weight, bias)),
        eps,
        *map(_address, (y, mean, rstd, batch_mean, batch_var, scratch)),
    )
    return x.new_empty(0) if y is None else y, mean, rstd, batch_mean, batch_var


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, groups: int, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if dy.stride() != x.stride():
        dy = torch.empty_like(x).copy_(dy)
    channels = x.shape[1]
    weight = _as_kernel_takes(weight)
    dx = torch.empty_like(x) if need_dx else None
    dweight, dbias = x.new_empty(channels), x.new_empty(channels)
    scratch = x.new_empty(2 * groups * channels, dtype=torch.float64)
    library = _library()[0]
    assert library is not None
    library.backward(
        _shape(x, groups, channels // mean.shape[1]),
        *map(_address, (dy, x, weight, mean, rstd, dx, dweight, dbias, scratch)),
    )
    return x.new_empty(0) if dx is None else dx, dweight, dbias


def _infer(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    y = torch.empty_like(x)
    parameters = [_as_kernel_takes(tensor) for tensor in (running_mean, running_var, weight, bias)]
    library = _library()[0]
    assert library is not None
    library.infer(
        _shape(x, x.shape[0], channels_per_group),
        *map(_address, (x, *parameters)),
        alpha.item(),
        eps,
        y.data_ptr(),
    )
    return y


def _example_moments(x: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    mean, var = _example_moments_fake(x, guess)
    library = _library()[0]
    assert library is not None
    tensors = (x, _as_kernel_takes(guess), mean, var)
    library.example_moments(_shape(x, x.shape[0], 1), *map(_address, tensors))
    return mean, var


def _example_moments_fake(x: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[:2]), x.new_empty(x.shape[:2])


_operators = torch.library.Library("betternorm", "DEF")
_operators.define(
    "forward(Tensor x, Tensor? weight, Tensor? bias, SymInt groups, int channels_per_group, float eps, bool write)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_operators.define(
    "backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, SymInt groups, bool need_dx)"
    " -> (Tensor, Tensor, Tensor)"
)
_operators.define(
    "infer(Tensor x, Tensor running_mean, Tensor running_var, Tensor? weight, Tensor? bias, Tensor alpha,"
    " int channels_per_group, float eps) -> Tensor"
)
_operators.define("example_moments(Tensor x, Tensor guess) -> (Tensor, Tensor)")
for _name, _function in (
    ("forward", _forward),
    ("backward", _backward),
    ("infer", _infer),
    ("example_moments", _example_moments),
):
    _operators.impl(_name, _function, "CPU")
torch.library.register_fake("betternorm::example_moments", _example_moments_fake, lib=_operators)


@torch.library.register_fake("betternorm::forward", lib=_operators)  # type: ignore[untyped-decorator]
def _forward_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    groups: int,
    channels_per_group: int,
    eps: float,
    write: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    y = torch.empty_like(x) if write else x.new_empty(0)
    table = (groups, channels // channels_per_group)
    return y, x.new_empty(table), x.new_empty(table), x.new_empty(channels), x.new_empty(channels)


@torch.library.register_fake("betternorm::backward", lib=_operators)  # type: ignore[untyped-decorator]
def _backward_fake(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, groups: int, need_dx: bool
) -> tuple[Tensor, Tensor, Tensor]:
    channels = x.shape[1]
    return torch.empty_like(x) if need_dx else x.new_empty(0), x.new_empty(channels), x.new_empty(channels)


@torch.library.register_fake("betternorm::infer", lib=_operators)  # type: ignore[untyped-decorator]
def _infer_fake(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    alpha: Tensor,
    channels_per_group: int,
    eps: float,
) -> Tensor:
    return torch.empty_like(x)
