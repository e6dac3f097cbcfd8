# SPDX-License-Identifier: Apache-2.0
"""The comparisons of bench/peers: their arithmetic, and one small run where there is PyTorch."""
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import attn
import numpy as np
import pytest
from reference import Reference

PEERS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"
sys.path.insert(0, str(PEERS))
import common # noqa: E402

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch")
CASE = {
    "pass": "forward", "dtype": "f32", "threads": 1, "batch": 2, "heads": 6, "kv_heads": 3, "queries": 50,
    "tokens": 50, "dim": 8
}


def test_numbers():
    assert common.numbers("512,2k,4Ki") == [512, 2000, 4096]


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_flops_are_those_of_the_library(mask):
    case = {**CASE, "mask": mask}
    plan = attn.plan(f"batch=2,heads=6,kv_heads=3,tokens=50,dim=8{',causal' if mask == 'causal' else ''}")
    assert common.flops(case) == plan.flops
    assert common.flops({**case, "pass": "backward"}) == 2.5 * plan.flops


def test_figures():
    got = common.figures({**CASE, "mask": "full"}, [(1.0, 2.0), (2.0, 2.0), (1.0, 4.0)])
    assert got["ratio"] == 2.0 and got["range"] == [1.0, 4.0] and got["quartiles"] == [1.5, 3.0
                                                                                       ] and got["pairs"] == 3
    assert got["ours_gflops"] == 2 * got["peer_gflops"]


def test_each_side_is_first_in_every_other_pair():
    calls = []

    class Options:
        seconds, pairs, sleep = 60, 4, 0

    taken = common.pairs_of(lambda: calls.append("ours"), lambda: calls.append("peer") or 0.25, Options)
    assert calls[2:] == ["ours", "peer", "peer", "ours"] * 2
    assert [theirs for _, theirs in taken] == [0.25] * 4


@pytest.mark.parametrize("causal", [False, True])
def test_reference(random, causal):
    q, k, v = (random.standard_normal((40, 8), np.float32) for _ in range(3))
    wanted = Reference(*(x[None, None] for x in (q, k, v)), causal=causal).o[0, 0]
    rows = common.sample_rows(40)
    assert rows[0] == 0 and rows[-1] == 39 and len(rows) == 16
    assert common.relative_error(common.reference_rows(q, k, v, rows, causal), wanted[rows]) < 1e-14


@needs_torch
@pytest.mark.parametrize("more", [["--queries", "3"], ["--kv-heads", "1"], ["--peer", "eager"]])
def test_torch_cpu(more):
    command = "--tokens 70 --dim 16 --heads 2 --pairs 2 --pass forward,backward --dtype f32,bf16"
    environment = {**os.environ, "ATTN_LIBRARY": attn.library()}
    program = [sys.executable, PEERS / "torch_cpu.py", "--format", "json"]
    answer = subprocess.run([*program, *command.split(), *more],
                            check=True, capture_output=True, text=True, env=environment)
    rows = json.loads(answer.stdout)["rows"]
    few = "--queries" in more
    assert len(rows) == (4 if few else 8) and rows[0]["queries"] == (3 if few else 70)
    for row in rows:
        if row["status"] == "ok":
            most = 2e-6 if row["dtype"] == "f32" else 2e-2
            assert row["ours_error"] < most and row["peer_error"] < most and row["ratio"] > 0
    assert rows[0]["status"] == "ok"
