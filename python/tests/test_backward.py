# SPDX-License-Identifier: Apache-2.0
"""attention_backward(): gradients against fp64, in place, added to what is there; clear when it refuses."""
import re

import attn
import numpy as np
import pytest
from cases import cases, inputs, odd_strides, swap
from hypothesis import given
from reference import Reference


@given(cases())
def test_gradients(case):
    q, k, v, dout = inputs(case, 4)
    reference = Reference(*(swap(x, case.layout) for x in (q, k, v)), **case.mask)
    out, lse = attn.attention(q, k, v, return_lse=True, layout=case.layout, **case.mask)
    random = np.random.default_rng(case.seed)
    memory = [odd_strides(random, x.shape, case.dtype) for x in (q, k, v)]
    for array in memory:
        array[...] = np.nan
    gradients = dict(zip(("dq", "dk", "dv"), memory))
    got = attn.attention_backward(dout, q, k, v, out, lse, layout=case.layout, **gradients, **case.mask)
    assert all(a is b for a, b in zip(got, memory))
    standard = [swap(x, case.layout) for x in (dout, out)]
    reference.check_gradients(*standard, lse, [swap(x, case.layout) for x in got])
    fresh = attn.attention_backward(dout, q, k, v, out, lse, layout=case.layout, **case.mask)
    assert all(np.array_equal(a, b) and a.dtype == q.dtype for a, b in zip(fresh, got))


def problem(random):
    q, k, v, dout = (random.standard_normal((2, heads, 21, 16), np.float32) for heads in (4, 2, 2, 4))
    out, lse = attn.attention(q, k, v, causal=True, return_lse=True)
    return q, k, v, dout, out, lse


def test_delta_and_some_gradients(random):
    q, k, v, dout, out, lse = problem(random)
    dq, dk, dv = attn.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert attn.attention_backward(dout, q, k, v, out, lse, causal=True, dq=False,
                                   dv=False)[::2] == (None, None)
    only = attn.attention_backward(dout, q, k, v, out, lse, causal=True, dq=False, dv=False)[1]
    assert np.array_equal(only, dk)
    delta = np.sum(dout * out, axis=-1)
    by_delta = attn.attention_backward(dout, q, k, v, None, lse, delta=delta, causal=True)
    Reference(q, k, v, causal=True).check_gradients(dout, out, lse, by_delta)


def test_accumulate(random):
    q, k, v, dout, out, lse = problem(random)
    before = [random.standard_normal(x.shape, np.float32) for x in (q, k, v)]
    dq, dk, dv = (x.copy() for x in before)
    attn.attention_backward(dout, q, k, v, out, lse, causal=True, dq=dq, dk=dk, dv=dv, accumulate=True)
    Reference(q, k, v, causal=True).check_gradients(dout, out, lse, (dq, dk, dv), before)


def test_memory_limit(random):
    q, k, v, dout = (random.standard_normal((4, 500, 64)).astype(np.float16) for _ in range(4))
    out, lse = attn.attention(q, k, v, return_lse=True)
    free = attn.attention_backward(dout, q, k, v, out, lse)
    with pytest.raises(attn.MemoryLimit) as caught:
        attn.attention_backward(dout, q, k, v, out, lse, memory_limit=1)
    least = int(re.search(r"need (\d+) bytes of workspace", str(caught.value)).group(1))
    tight = attn.attention_backward(dout, q, k, v, out, lse, memory_limit=least)
    assert all(np.array_equal(a, b) for a, b in zip(tight, free))
    with pytest.raises(attn.MemoryLimit):
        attn.attention_backward(dout, q, k, v, out, lse, memory_limit=least - 1)


@given(cases(window=False))
def test_sequences(case):
    random = np.random.default_rng(case.seed)
    starts = [np.cumsum([0, *random.integers(1, 30, 3)]) for _ in range(2)]
    q, dout = (odd_strides(random, (starts[0][-1], case.heads, dim), case.dtype)
               for dim in (case.dim, case.dim_v))
    k, v = (odd_strides(random, (starts[1][-1], case.kv_heads, dim), case.dtype)
            for dim in (case.dim, case.dim_v))
    lists = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], **case.mask}
    out, lse = attn.attention(q, k, v, return_lse=True, **lists)
    gradients = attn.attention_backward(dout, q, k, v, out, lse, **lists)
    for b in range(3):
        rows, keys = (slice(side[b], side[b + 1]) for side in starts)

        def part(x, where):
            return x[where].swapaxes(0, 1)[None]

        reference = Reference(part(q, rows), part(k, keys), part(v, keys), **case.mask)
        reference.check_gradients(part(dout, rows), part(out, rows), lse[None, :, rows],
                                  [part(x, where) for x, where in zip(gradients, (rows, keys, keys))])


def test_refused(random):
    q, k, v, dout, out, lse = problem(random)
    usual = (dout, q, k, v, out, lse)
    refused = (
        (r"dout has shape \[2, 4, 20, 16\]; it must be", (dout[:, :, 1:], q, k, v, out, lse), {}),
        ("dout is f16, q is f32", (dout.astype(np.float16), q, k, v, out, lse), {}),
        (r"lse has shape \[4, 21\]; it must be \[2, 4, 21\]", (dout, q, k, v, out, lse[0]), {}),
        ("give out, or delta", (dout, q, k, v, None, lse), {}),
        ("accumulate adds to what dq holds", usual, {"accumulate": True}),
        (r"dk has shape \[2, 4, 21, 16\]; it must be", usual, {"dk": np.zeros_like(q)}),
        ("dv is f16, out is f32", usual, {"dv": np.zeros_like(v, np.float16)}),
        ("memory_limit is 0; give at least 1", usual, {"memory_limit": 0}),
    )
    for text, arguments, keywords in refused:
        with pytest.raises(ValueError, match=text):
            attn.attention_backward(*arguments, **keywords)
    with pytest.raises(TypeError, match="lse is f16; it must be float32"):
        attn.attention_backward(dout, q, k, v, out, lse.astype(np.float16))
