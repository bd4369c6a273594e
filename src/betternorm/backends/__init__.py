"""The implementations: a reference in plain PyTorch, compiled kernels for CPUs and GPUs, and the choice between them.

========================  ===================================================================================
`routing.py`              which of these serves a call
`plain.py`                the reference: readable, any order of derivative, any device and dtype
`graph.py`                inference for graphs that are compiled or exported
`cpu/`                    C++ on torch's stable ABI, built with the package
`triton.py`               kernels for CUDA and ROCm, compiled by the Triton that comes with torch
`operators.py`            the operators that `cpu/` and `triton.py` implement: schemas, shapes, gradients
`distributed.py`          statistics across processes
========================  ===================================================================================
"""

from __future__ import annotations

import torch

from betternorm.backends import cpu


def status() -> str:
    """One line on which compiled kernels are available, and the reason where they are not."""
    if not torch.cuda.is_available():
        gpu = "none found"
    else:
        from betternorm.backends.routing import has_triton

        gpu = "Triton" if has_triton(torch.device("cuda")) else "no Triton, torch's own operators are used"
    return f"CPU: {cpu.status}; GPU: {gpu}"
