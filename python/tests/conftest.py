# SPDX-License-Identifier: Apache-2.0
"""Run by tests/python.sh, or by hand: ATTN_LIBRARY=build/release/libattn.so python3 -m pytest python/tests"""
import pathlib
import sys

import hypothesis
import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import attn # noqa: E402

hypothesis.settings.register_profile("attn", deadline=None, max_examples=40, database=None,
                                      print_blob=True)
hypothesis.settings.load_profile("attn")


def pytest_report_header():
    return f"attn {attn.version()}, {attn.library()}"


@pytest.fixture
def random():
    import numpy as np
    return np.random.default_rng(7)


def why_no_gpu():
    """Why the tests on a GPU cannot run here, or None."""
    try:
        import torch
    except ImportError:
        return "there is no PyTorch"
    try:
        attn._gpu_array.Memory(0, 1)
    except attn.Unsupported as error:
        return str(error)
    return None if torch.cuda.is_available() else "PyTorch sees no GPU"


def pytest_terminal_summary(terminalreporter):
    reason = why_no_gpu()
    if reason is not None:
        terminalreporter.write_line(f"GPU tests skipped: {reason}", yellow=True, bold=True)
