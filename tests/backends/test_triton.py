"""The Triton kernels: right by the interpreter, and on a GPU where there is one; compiled for GPUs that are not here.

Only the GPU itself can show their speed. What they move through memory is counted from the code.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
CASES = Path(__file__).with_name("triton_cases.py")
PAGE = ROOT / "docs/gpu.md"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is missing: pip install -c constraints.txt triton (a gigabyte)",
)


def run_cases(**environment: str) -> None:
    """In a process of its own: triton asks for the interpreter when it is imported, and then for good."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@needs_triton
@pytest.mark.slow
def test_by_the_interpreter() -> None:
    run_cases(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_on_a_gpu() -> None:
    run_cases(TRITON_INTERPRET="0")


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_kernels_compile_and_stay_in_registers(target: str, dtype: torch.dtype) -> None:
    from benchmarks import gpu

    found = {
        (case, launch.kernel.__name__): gpu.compile_for(launch, target) for case, _, launch in gpu.compilations(dtype)
    }
    assert {kernel for _, kernel in found} == set(gpu.READ)
    assert max(compiled.spilled for compiled in found.values()) <= 32  # bytes of a thread, in the largest tiles


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_traffic_is_at_most_that_of_torch_and_below_the_peers(layout: str, dtype: torch.dtype) -> None:
    from benchmarks import gpu

    for shape in gpu.SHAPES:
        found = {
            variant: {way: sum(moved) for way, moved in ways.items()}
            for variant, ways in gpu.traffic(shape, layout, dtype).items()
        }
        for variant in (name for name in found if name.endswith("Norm") or "Norm(" in name):
            for way in ("forward", "backward"):  # a hundredth for tables of pieces
                assert found[variant][way] <= 1.01 * found["nn.BatchNorm2d"][way], (shape, variant, way)
        for size in gpu.GHOST_SIZES:
            mine = found[f"GhostBatchNorm({size})"]
            for way in ("forward", "backward"):
                case = (shape, size, way)
                assert mine[way] < found[f"chunk loop ({size})"][way], case
                assert mine[way] < found[f"5-D view ({size})"][way], case
                strided = found[f"strided view ({size})"][way]
                two_trips = mine[way] > 0.9 * found["nn.BatchNorm2d"][way]
                # The view is torch's layer. Where a run does not fit on the chip, so are we, in traffic.
                assert mine[way] < (1.01 if layout == "contiguous" and two_trips else 1) * strided, case


@needs_triton
@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks import gpu

    gpu.print_traffic()
    gpu.print_compiled()
    for printed in capsys.readouterr().out.strip().split("\n\n"):
        assert printed in PAGE.read_text()
