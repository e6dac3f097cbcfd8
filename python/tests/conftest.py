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
