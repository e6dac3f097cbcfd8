# SPDX-License-Identifier: Apache-2.0
"""Exact attention on NumPy arrays and anything that speaks DLPack, on CPU or GPU, by the C library attn.

    out = attn.attention(q, k, v, causal=True)

attention, attention_backward   one call each
run, plan                       cut by a cyclic quorum schedule into workers
kernels, version, library       what this machine and library have
attn.torch                      the same for PyTorch, with gradients
"""
from . import _library
from ._attention import attention, attention_backward
from ._engine import Event, Kernel, Plan, Rank, Result, kernels, plan, run
from ._errors import (Canceled, Error, InputOutput, InvalidArgument, MemoryLimit, OutOfMemory, SpoolMismatch,
                      Unsupported, WorkerLost)
from ._gpu_array import GpuArray
from ._types import VERSION, Status

__version__ = ".".join(map(str, VERSION))


def version() -> str:
    """Version of the library that is loaded."""
    return _library.LIBRARY.attn_version().decode()


def library() -> str:
    """The path or name by which the library was found."""
    return _library.PATH


__all__ = [
    "Canceled",
    "Error",
    "Event",
    "GpuArray",
    "InputOutput",
    "InvalidArgument",
    "Kernel",
    "MemoryLimit",
    "OutOfMemory",
    "Plan",
    "Rank",
    "Result",
    "SpoolMismatch",
    "Status",
    "Unsupported",
    "WorkerLost",
    "attention",
    "attention_backward",
    "kernels",
    "library",
    "plan",
    "run",
    "version",
]
