# SPDX-License-Identifier: Apache-2.0
"""The comparisons of bench/peers: their arithmetic, and one small run where there is PyTorch."""
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import types

import attn
import numpy as np
import pytest
from reference import Reference

PEERS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "peers"
sys.path.insert(0, str(PEERS))
import common # noqa: E402

torch = None if importlib.util.find_spec("torch") is None else importlib.import_module("torch")
needs_torch = pytest.mark.skipif(torch is None, reason="no PyTorch")
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


def torch_cpu(options):
    """The rows that torch_cpu.py prints."""
    answer = subprocess.run([sys.executable, PEERS / "torch_cpu.py", "--format", "json", "--pairs", "2", *options],
                            check=True, capture_output=True, text=True,
                            env={**os.environ, "ATTN_LIBRARY": attn.library()})
    return json.loads(answer.stdout)["rows"]


@needs_torch
@pytest.mark.parametrize("more", [["--queries", "3"], ["--kv-heads", "1"], ["--peer", "eager"]])
def test_torch_cpu(more):
    command = "--tokens 70 --dim 16 --heads 2 --pass forward,backward --dtype f32,bf16"
    rows = torch_cpu([*command.split(), *more])
    few = "--queries" in more
    assert len(rows) == (4 if few else 8) and rows[0]["queries"] == (3 if few else 70)
    for row in rows:
        if row["status"] == "ok":
            most = 2e-6 if row["dtype"] == "f32" else 2e-2
            assert row["ours_error"] < most and row["peer_error"] < most and row["ratio"] > 0
    assert rows[0]["status"] == "ok"


@needs_torch
def test_torch_cpu_goes_on():
    """A case that cannot be computed is a row, and the others are measured."""
    rows = torch_cpu("--tokens 20 --mask full --dim 8,513,16".split())
    assert [row["dim"] for row in rows] == [8, 513, 16]
    assert [row["status"] == "ok" for row in rows] == [True, False, True] and "513" in rows[1]["status"]


# ---- torch_cuda.py, as far as no GPU is needed ----


@pytest.fixture
def torch_cuda():
    pytest.importorskip("torch")
    return importlib.import_module("torch_cuda")


def test_cuda_cases(monkeypatch):
    """What the table has needs no PyTorch: something of its name does."""
    stand_in = types.ModuleType("torch")
    stand_in.__getattr__ = lambda name: name
    for name in ("torch", "attn.torch"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(attn, "torch", stand_in, raising=False)
    monkeypatch.delitem(sys.modules, "torch_cuda", raising=False)
    torch_cuda = importlib.import_module("torch_cuda")
    del sys.modules["torch_cuda"] # for good: the next test wants it with PyTorch
    options = torch_cuda.arguments().parse_args([])
    cases = list(torch_cuda.cases(options))
    assert len(cases) == 2 * (3 * 2 * 6 + 2 + 3 * 2) + 2 * 4 # the grid, grouped heads, fp32, few queries
    assert all(case["queries"] <= case["tokens"] for case in cases)
    grid = [case for case in cases if case["dtype"] == "bf16" and case["heads"] == case["kv_heads"]]
    assert {case["batch"] * case["tokens"] for case in grid} == {16384}
    assert {case["heads"] * case["dim"] for case in grid} == {2048}
    case = {**CASE, "mask": "causal"}
    assert torch_cuda.flops(case) == 4 * 2 * 6 * 50 * 50 * 8 / 2
    assert torch_cuda.flops({**case, "pass": "backward"}) == 2.5 * torch_cuda.flops(case)
    assert torch_cuda.flops({**CASE, "mask": "full", "queries": 5}) == 4 * 2 * 6 * 5 * 50 * 8


@needs_torch
@pytest.mark.parametrize("mask, queries", [("full", 60), ("causal", 60), ("full", 7)])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_cuda_reference(torch_cuda, kind, kv_heads, mask, queries):
    case = {
        "pass": kind, "mask": mask, "heads": 4, "kv_heads": kv_heads, "queries": queries, "tokens": 60, "dim": 8
    }
    shapes = ((4, queries), (kv_heads, 60), (kv_heads, 60), (4, queries))
    tensors = [torch.randn(2, *shape, 8, dtype=torch.float64) for shape in shapes]
    leaves = [x.clone().requires_grad_() for x in tensors[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(*leaves,
                                                           is_causal=mask == "causal",
                                                           enable_gqa=kv_heads < 4)
    got = (out.detach(), ) if kind == "forward" else torch.autograd.grad(out, leaves, tensors[3])
    wanted = torch_cuda.reference(case, tensors)
    assert torch_cuda.error(got, wanted, 4 // kv_heads) < 1e-14
    assert torch_cuda.error([1.01 * x for x in got], wanted, 4 // kv_heads) > 9e-3
    assert np.isnan(torch_cuda.error([x * np.nan for x in got], wanted, 4 // kv_heads))


@needs_torch
def test_cuda_summary(torch_cuda, capsys):
    report = torch_cuda.Report("table", {}, torch_cuda.COLUMNS)
    row = {**CASE, "kv_heads": 6, "mask": "full", "against": "cudnn", "errors": {"ours": 1e-3}}
    report.add({**row, "ratio": 2.0})
    report.add({**row, "ratio": 0.5, "dim": 64})
    report.add({**row, "ratio": 9.0, "kv_heads": 3})
    assert report.finish() == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert told == ("forward: geometric mean of 2 ratios to cuDNN 1.000, the worst 0.500 "
                    "(d=64, full, 50 tokens)")


@needs_torch
def test_cuda_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    environment = {**os.environ, "ATTN_LIBRARY": attn.library()}
    answer = subprocess.run([sys.executable, PEERS / "torch_cuda.py"],
                            check=False, capture_output=True, text=True, env=environment)
    assert answer.returncode == 3 and "PyTorch sees no GPU here" in answer.stderr
