"""The GPU backend without a GPU: a model of its traffic, and what it compiles to. python -m benchmarks.gpu --help.

Nothing is run on a device. The traffic is counted from the code, on tensors without memory (device "meta"): of the
Triton kernels, from the arguments of every launch; of torch's own layers and of the peers, from the operators that they
dispatch. Registers, spills and shared memory are those of ahead-of-time compilation.
"""

from __future__ import annotations

import argparse
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.peers import FORMS
from benchmarks.sections import GROUPS, LAYOUTS, SHAPES
from betternorm.backends import triton as backend

BANDWIDTH = {"A100": 2039e9, "H100": 3350e9}  # bytes a second, as published: 80 GB SXM, SXM5
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GHOST_SIZES = (16, 2)

# What each kernel reads. All else it writes; what is in BOTH it reads and writes.
READ = {
    "_forward_kernel": {"x", "weight", "bias", "alpha"},
    "_normalize_kernel": {"x", "weight", "bias", "mean", "rstd"},
    "_backward_kernel": {"dy", "x", "weight", "mean", "rstd"},
    "_gradient_kernel": {"dy", "x", "weight", "mean", "rstd", "mean_dxhat", "mean_dxhat_xhat"},
}
BOTH = {"piece_rows", "run_rows", "piece_arrivals", "run_arrivals", "running_mean", "running_var"}

# Torch's kernels that, in training, read tensors twice: for statistics or sums, and again for the pass that writes.
TWICE = {"native_batch_norm", "native_batch_norm_backward"}
FREE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}


class Traffic(NamedTuple):
    """Bytes read and written."""

    read: int
    written: int


class Launch(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]


# ---- traffic ----


def ours(x: Tensor, groups: int, channels_per_group: int = 1) -> dict[str, Traffic]:
    """Of the Triton kernels, forward, backward and inference, from the arguments of every launch."""
    found = {}
    for name, calls in launches(x, groups, channels_per_group).items():
        read = written = 0
        for kernel, arguments, _ in calls:
            for argument, value in arguments.items():
                if not isinstance(value, Tensor) or (not arguments.get("WHOLE", True) and argument in ("y", "dx")):
                    continue  # y and dx of a run that does not fit are left to the second kernel
                reads = argument in READ[kernel.__name__]
                read += _bytes(value) * (reads or argument in BOTH)
                written += _bytes(value) * (not reads)
        found[name] = Traffic(read, written)
    return found


def theirs(module: nn.Module, x: Tensor) -> dict[str, Traffic]:
    """Of torch operators, forward and backward: each reads its inputs from memory and writes its outputs there."""
    module = module.to(x.device, x.dtype).train()
    x = x.detach().requires_grad_()
    dy = torch.empty_like(x)
    with _Counting() as forward:
        y = module(x)
    with _Counting() as backward:
        torch.autograd.grad(y, (x, *module.parameters()), dy)
    module.eval()
    with _Counting(training=False) as inference, torch.no_grad():
        module(x)
    return {"forward": forward.traffic, "backward": backward.traffic, "inference": inference.traffic}


class _Counting(TorchDispatchMode):
    def __init__(self, training: bool = True) -> None:
        super().__init__()
        self.training, self.traffic = training, Traffic(0, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, aliases = func.overloadpacket.__name__, [value.alias_info for value in func._schema.returns]
        is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
        if is_view or name in FREE:
            return result
        read, written = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), result)
        )
        times = 2 if name in TWICE and self.training else 1
        self.traffic = Traffic(
            self.traffic.read + sum(_bytes(tensor) * (times if tensor.dim() > 1 else 1) for tensor in read),
            self.traffic.written + sum(_bytes(tensor) for tensor in written),
        )
        return result


def _bytes(tensor: Tensor) -> int:
    """An expanded tensor has less behind it than its shape says."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def traffic(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> dict[str, dict[str, Traffic]]:
    """By variant, and by forward, backward and inference. Torch's layer first, then the peers, then ours."""
    x = torch.empty(shape, dtype=dtype, device="meta").contiguous(memory_format=LAYOUTS[layout])
    examples, channels = shape[:2]
    found = {"nn.BatchNorm2d": theirs(nn.BatchNorm2d(channels), x)}
    for size in GHOST_SIZES:
        found |= {f"{name} ({size})": theirs(form(channels, size), x) for name, form in FORMS.items()}
    found |= {f"GhostBatchNorm({size})": ours(x, examples // size) for size in GHOST_SIZES}
    found[f"BatchGroupNorm({GROUPS})"] = ours(x, examples // 2, channels // GROUPS)
    found["GroupedBatchNorm"] = ours(x, 1)
    return found


# ---- launches ----


def launches(x: Tensor, groups: int, channels_per_group: int = 1) -> dict[str, list[Launch]]:
    """Every launch of forward, backward and inference on tensors like x, none of which runs."""
    channels = torch.empty(x.shape[1], device=x.device)
    statistics = torch.empty(groups, x.shape[1] // channels_per_group, device=x.device)
    alpha = torch.empty((), device=x.device)
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: backend.forward(
            x, channels, channels, groups, channels_per_group, 1e-5, channels, channels, 0.1
        ),
        "backward": lambda: backend.backward(x, x, channels, statistics, statistics, groups, channels_per_group),
        "inference": lambda: backend.infer(x, channels, channels, channels, channels, alpha, channels_per_group, 1e-5),
    }
    found = {}
    for name, call in calls.items():
        with _recorded() as found[name]:
            call()
    return found


@contextmanager
def _recorded() -> Iterator[list[Launch]]:
    found: list[Launch] = []
    kernels = {name: getattr(backend, name) for name in READ}
    for name, kernel in kernels.items():
        setattr(backend, name, _Recorder(kernel, found))
    try:
        yield found
    finally:
        for name, kernel in kernels.items():
            setattr(backend, name, kernel)


class _Recorder:
    def __init__(self, kernel: Any, found: list[Launch]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int, enable_fp_fusion: bool, **kwargs: Any) -> None:
            arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            self.found.append(Launch(self.kernel, arguments, options))

        return launch


# ---- compilation ----


class Compiled(NamedTuple):
    """A thread's registers, what it spills (bytes of its stack), and shared memory of the program in bytes."""

    registers: int
    spilled: int
    shared: int


def compile_for(launch: Launch, target: str) -> Compiled:
    """Ahead of time, specialised as the launch would be."""
    kernel, arguments, options = launch
    names = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = names[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (signature[parameter.name] == "i32" and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    if TARGETS[target].backend == "cuda":
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        patterns = (r"REG:(\d+)", r"STACK:(\d+)")
    else:
        text, patterns = compiled.asm["amdgcn"], (r"\.vgpr_count:\s*(\d+)", r"\.private_segment_fixed_size:\s*(\d+)")
    registers, spilled = (int(re.search(pattern, text)[1]) for pattern in patterns)  # type: ignore[index]
    return Compiled(registers, spilled, compiled.metadata.shared)


# Shape, layout, examples per group, channels per group: a run that fits and one that does not in both layouts, the
# largest tile, small maps, groups of channels, a number of them that is no power of two, and no space at all.
CASES = [
    ((128, 64, 32, 32), "contiguous", 16, 1),
    ((32, 64, 32, 32), "contiguous", 32, 1),
    ((32, 64, 56, 56), "contiguous", 16, 1),
    ((128, 64, 32, 32), "channels_last", 2, 1),
    ((128, 64, 32, 32), "channels_last", 16, 1),
    ((128, 512, 4, 4), "channels_last", 2, 16),
    ((128, 96, 7, 7), "contiguous", 2, 3),
    ((256, 512), "contiguous", 16, 1),
]


def compilations(dtype: torch.dtype) -> Iterator[tuple[str, str, Launch]]:
    """Case, way and launch, without those that an earlier case has."""
    seen = set()
    for shape, layout, size, channels_per_group in CASES:
        x = torch.empty(shape, dtype=dtype, device="meta")
        x = x.contiguous(memory_format=LAYOUTS[layout]) if x.dim() == 4 else x
        case = f"{'x'.join(map(str, shape))} {layout}, {size} x {channels_per_group}"
        for way, found in launches(x, shape[0] // size, channels_per_group).items():
            for launch in found:
                tile = tuple(value for name, value in launch.arguments.items() if name.isupper() and len(name) > 1)
                if (launch.kernel.__name__, way, tile) not in seen:
                    seen.add((launch.kernel.__name__, way, tile))
                    yield case, way, launch


# ---- tables ----


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="A model of the GPU backend's traffic, and what it compiles to."
    )
    parser.add_argument("--only", choices=("traffic", "compile"), nargs="+", default=["traffic", "compile"])
    arguments = parser.parse_args()
    if "traffic" in arguments.only:
        print_traffic()
    if "compile" in arguments.only:
        print_compiled()


def print_traffic() -> None:
    for layout in LAYOUTS:
        by_type = {kind: {shape: traffic(shape, layout, dtype) for shape in SHAPES} for kind, dtype in TYPES.items()}
        for way in ("forward", "backward", "inference"):
            print_table(f"Bytes read + written per element, {way}, {layout}, bfloat16", by_type["bfloat16"], way)
        for kind, by_shape in by_type.items():
            print_table(f"Microseconds on an A100 / H100, forward and backward, {layout}, {kind}", by_shape, None)


def print_table(title: str, by_shape: dict[tuple[int, ...], dict[str, dict[str, Traffic]]], way: str | None) -> None:
    """Bytes of one way per element, or without a way the time of a training step."""
    rows = []
    for variant in next(iter(by_shape.values())):
        if way == "inference" and variant.endswith(")") and not variant.startswith("BatchGroupNorm"):
            continue  # the peers have no inference of their own, and ghosts that of the whole batch
        cells = []
        for shape, found in by_shape.items():
            if way is None:
                total = sum(found[variant]["forward"] + found[variant]["backward"])
                cells.append(" / ".join(f"{total / rate * 1e6:.0f}" for rate in BANDWIDTH.values()))
            else:
                cells.append(" + ".join(f"{size / math.prod(shape):.1f}" for size in found[variant][way]))
        rows.append([variant, *cells])
    headers = ["variant", *("x".join(map(str, shape)) for shape in by_shape)]
    print(f"**{title}**\n\n{markdown(headers, rows)}\n")


def print_compiled() -> None:
    for kind, dtype in TYPES.items():
        rows = []
        for case, way, launch in compilations(dtype):
            kernel = launch.kernel.__name__.strip("_").removesuffix("_kernel")
            tile = "x".join(str(launch.arguments[f"BLOCK_{axis}"]) for axis in "NGKS")
            found = ("/".join(map(str, compile_for(launch, target))) for target in TARGETS)
            rows.append([case, way, kernel, tile, launch.options["num_warps"], *found])
        headers = ["case", "way", "kernel", "tile", "warps", *TARGETS]
        print(f"**Registers / bytes spilled / bytes of shared memory, {kind}**\n\n{markdown(headers, rows)}\n")


def markdown(headers: list[str], rows: list[list[Any]]) -> str:
    """A table of docs/gpu.md."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


if __name__ == "__main__":
    main()
