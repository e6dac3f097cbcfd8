# SPDX-License-Identifier: Apache-2.0
"""attention() on NumPy arrays: right for any shape and strides, in place, and clear when it refuses."""
import tracemalloc

import attn
import numpy as np
import pytest
from attn import _types
from cases import cases, inputs, odd_strides, swap
from hypothesis import given
from reference import ROUNDED_WEIGHTS, Reference


@given(cases())
def test_forward(case):
    q, k, v = inputs(case)
    reference = Reference(*(swap(x, case.layout) for x in (q, k, v)), **case.mask)
    out = odd_strides(np.random.default_rng(1), q.shape[:-1] + (case.dim_v, ), case.dtype)
    out[...] = np.nan
    given_back, lse = attn.attention(q, k, v, out=out, return_lse=True, layout=case.layout, **case.mask)
    assert given_back is out
    reference.check(swap(out, case.layout), lse)
    fresh = attn.attention(q, k, v, layout=case.layout, **case.mask)
    assert fresh.dtype == q.dtype and np.array_equal(fresh, out)


@given(cases())
def test_fewer_axes(case):
    q, k, v = (swap(x, case.layout)[0] for x in inputs(case))
    reference = Reference(q[None], k[None], v[None], **case.mask)
    out, lse = attn.attention(q, k, v, return_lse=True, **case.mask)
    reference.check(out[None], lse[None])
    tokens_first = [x.swapaxes(0, 1) for x in (q, k, v)]
    assert np.array_equal(attn.attention(*tokens_first, layout="bnhd", **case.mask).swapaxes(0, 1), out)
    alone = attn.attention(q[0], k[0], v[0], return_lse=True, **case.mask)
    first = Reference(q[None, :1], k[None, :1], v[None, :1], **case.mask)
    first.check(alone[0][None, None], alone[1][None, None])


def test_result_of_another_dtype(random):
    q, k, v = (random.standard_normal((2, 3, 9, 16)).astype(np.float16) for _ in range(3))
    out = np.full((2, 3, 9, 16), np.nan, np.float32)
    Reference(q, k, v).check(attn.attention(q, k, v, out=out))


@pytest.mark.parametrize("tokens", (1, 7, 300))
def test_results_begin_cache_lines(random, tokens):
    q, k, v = (random.standard_normal((2, tokens, 16), np.float32) for _ in range(3))
    out, lse = attn.attention(q, k, v, return_lse=True)
    for result in (out, lse, *attn.attention_backward(q, q, k, v, out, lse)):
        assert result.ctypes.data % 64 == 0 and result.flags.c_contiguous


def test_bfloat16_of_ml_dtypes(random):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    q, k, v = (random.standard_normal((2, 3, 9, 16)).astype(ml_dtypes.bfloat16) for _ in range(3))
    out = attn.attention(q, k, v)
    assert out.dtype == ml_dtypes.bfloat16
    Reference(q, k, v, rounding=ROUNDED_WEIGHTS).check(out)


def test_threads_and_kernels_agree(random):
    q, k, v = (random.standard_normal((2, 3, 130, 40), np.float32) for _ in range(3))
    reference = Reference(q, k, v, causal=True)
    one = attn.attention(q, k, v, causal=True, threads=1)
    assert np.array_equal(one, attn.attention(q, k, v, causal=True, threads=2))
    for kernel in attn.plan("tokens=130,dim=40,causal").kernels():
        if kernel.reason is None:
            reference.check(attn.attention(q, k, v, causal=True, kernel=kernel.name))


def test_memory_map(tmp_path, random):
    q, k, v = (random.standard_normal((3, 50, 16), np.float32) for _ in range(3))
    for name, array in (("q", q), ("k", k), ("v", v)):
        np.save(tmp_path / name, array)
    q, k, v = (np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "qkv")
    Reference(q[None], k[None], v[None]).check(attn.attention(q, k, v)[None])


# ---- nothing is copied ----


@pytest.fixture
def seen_io(monkeypatch):
    """The structs that the library was called with."""
    seen, execute = [], attn._calls.HostCall.execute

    def hook(call, space, io):
        seen.append(_types.Io.from_buffer_copy(io))
        return execute(call, space, io)

    monkeypatch.setattr(attn._calls.HostCall, "execute", hook)
    return seen


def test_same_memory(seen_io, random):
    memory = random.standard_normal((2, 50, 3, 4, 16), np.float32) # [batch, tokens, 3, heads, dim]
    q, k, v = (memory[:, :, part] for part in range(3))
    out = attn.attention(q, k, v, layout="bnhd")
    io = seen_io[0]
    for tensor, array in ((io.q, q), (io.k, k), (io.v, v), (io.o, out)):
        assert tensor.data == array.ctypes.data
        strides = [stride // 4 for stride in array.strides]
        assert list(tensor.stride) == [strides[0], strides[2], strides[1], strides[3]]
    Reference(*(x.swapaxes(1, 2) for x in (q, k, v))).check(out.swapaxes(1, 2))


def test_no_copy_of_a_large_input(random):
    base = random.standard_normal((2000, 2, 64), np.float32)
    # strides that anything but reading in place would make contiguous
    q = k = v = base.swapaxes(0, 1)[:, ::-1]
    out = np.empty((2, 4, 64), np.float32)
    tracemalloc.start()
    attn.attention(q[:, :4], k, v, out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < base.nbytes / 20


# ---- sequences of unequal length ----


@pytest.mark.parametrize("starts", [[0, 3, 10], [0, 7, 10], [0, 3, 10]])
def test_lists_are_read_in_every_call(random, starts):
    """Lists that are alike in count, longest and total share what is kept of a call, not their numbers."""
    q, k, v = (random.standard_normal((10, 2, 8), np.float32) for _ in range(3))
    out = attn.attention(q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts)
    for begin, end in zip(starts, starts[1:]):
        parts = [x[None, begin:end].swapaxes(1, 2) for x in (q, k, v)]
        Reference(*parts).check(out[None, begin:end].swapaxes(1, 2))


@given(cases(window=False))
def test_sequences(case):
    random = np.random.default_rng(case.seed)
    lengths = random.integers(0, 30, (2, 4)) + [[1, 0, 0, 0], [1, 0, 0, 0]]
    starts = [np.concatenate([[0], np.cumsum(side)]) for side in lengths]
    q = odd_strides(random, (starts[0][-1], case.heads, case.dim), case.dtype)
    k = odd_strides(random, (starts[1][-1], case.kv_heads, case.dim), case.dtype)
    v = odd_strides(random, (starts[1][-1], case.kv_heads, case.dim_v), case.dtype)
    out = np.full((len(q), case.heads, case.dim_v), np.nan, case.dtype)
    _, lse = attn.attention(q,
                            k,
                            v,
                            cu_seqlens_q=starts[0].astype(np.int32),
                            cu_seqlens_k=starts[1].tolist(),
                            out=out,
                            return_lse=True,
                            **case.mask)
    for b in range(4):
        rows, keys = (slice(side[b], side[b + 1]) for side in starts)
        parts = [x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        if lengths[0][b] == 0:
            continue
        if lengths[1][b] == 0:
            assert not out[rows].any() and np.isneginf(lse[:, rows]).all()
            continue
        Reference(*parts, **case.mask).check(out[rows].swapaxes(0, 1)[None], lse[None, :, rows])


# ---- refusals ----


def arrays(shape=(2, 4, 9, 8), dtype=np.float32):
    return [np.random.default_rng(part).standard_normal(shape).astype(dtype) for part in range(3)]


Q, K, V = arrays()
REFUSED = [
    (TypeError, "q is float64", lambda: attn.attention(Q.astype(float), K, V)),
    (TypeError, "q is >f4", lambda: attn.attention(Q.astype(">f4"), K, V)),
    (TypeError, "k is a list", lambda: attn.attention(Q, [1.0], V)),
    (TypeError, "v is a masked array", lambda: attn.attention(Q, K, np.ma.array(V))),
    (ValueError, "k is f16, q is f32", lambda: attn.attention(Q, K.astype(np.float16), V)),
    (ValueError, "same number of axes", lambda: attn.attention(Q, K[0], V)),
    (ValueError, r"it must have 4 axes", lambda: attn.attention(Q[None], K[None], V[None])),
    (ValueError, r"k has batch 1 \(shape \[1, 4, 9, 8\]\); q has 2", lambda: attn.attention(Q, K[:1], V)),
    (ValueError, "k has 3 heads, which does not divide the 4", lambda: attn.attention(Q, K[:, :3], V[:, :3])),
    (ValueError, "v has heads 2", lambda: attn.attention(Q, K, V[:, :2])),
    (ValueError, "v has tokens 8", lambda: attn.attention(Q, K, V[:, :, :8])),
    (ValueError, "k has dim 7", lambda: attn.attention(Q, K[..., :7], V)),
    (ValueError, "no axis may be empty", lambda: attn.attention(Q[:, :, :0], K, V)),
    (ValueError, "dim is 600", lambda: attn.attention(*arrays((2, 600)))),
    (ValueError, "layout is 'nhd'", lambda: attn.attention(Q, K, V, layout="nhd")),
    (ValueError, "o begins where q does", lambda: attn.attention(Q, K, V, out=Q)),
    (ValueError, r"layout is '\[1\]'", lambda: attn.attention(Q, K, V, layout=[1])),
    (ValueError, "window is -2", lambda: attn.attention(Q, K, V, window=-2)),
    (ValueError, "window is 'a'", lambda: attn.attention(Q, K, V, window="a")),
    (ValueError, r"window is \[1, \[2\]\]", lambda: attn.attention(Q, K, V, window=[1, [2]])),
    (ValueError, r"window is array\(\[1, 2\]\)", lambda: attn.attention(Q, K, V, window=np.array([1, 2]))),
    (ValueError, r"window is \(1.0, 2\)", lambda: attn.attention(Q, K, V, window=(1.0, 2))),
    (TypeError, "scale is 'x'", lambda: attn.attention(Q, K, V, scale="x")),
    (TypeError, "scale is '0.5'", lambda: attn.attention(Q, K, V, scale="0.5")),
    (ValueError, "scale is inf", lambda: attn.attention(Q, K, V, scale=10**400)),
    (TypeError, r"threads is \[1\]", lambda: attn.attention(Q, K, V, threads=[1])),
    (ValueError, "rank is 18446744073709551617", lambda: attn.plan("tokens=9,dim=8", workers=3).rank(2**64 + 1)),
    (TypeError, "threads is '2'", lambda: attn.attention(Q, K, V, threads="2")),
    (ValueError, "threads is 4294967297", lambda: attn.attention(Q, K, V, threads=2**32 + 1)),
    (TypeError, "rank is 1.5", lambda: attn.plan("tokens=9,dim=8", workers=3).rank(1.5)),
    (ValueError, "scale is 0", lambda: attn.attention(Q, K, V, scale=0)),
    (ValueError, "scale is nan", lambda: attn.attention(Q, K, V, scale=float("nan"))),
    (ValueError, "threads is 0", lambda: attn.attention(Q, K, V, threads=0)),
    (ValueError, "there is no kernel 'x'", lambda: attn.attention(Q, K, V, kernel="x")),
    (ValueError, r"out has shape \[4\]; it must be \[2, 4, 9, 8\]",
     lambda: attn.attention(Q, K, V, out=Q[0, 0, :4, 0])),
    (ValueError, "out is read-only", lambda: attn.attention(Q, K, V, out=np.broadcast_to(Q[:1], Q.shape))),
    (ValueError, "out is broadcast",
     lambda: attn.attention(Q, K, V, out=np.lib.stride_tricks.as_strided(Q.copy(), Q.shape, (0, 0, 0, 4)))),
    (ValueError, "q is one element, broadcast",
     lambda: attn.attention(np.broadcast_to(Q[0, 0, 0, 0], Q.shape), K, V)),
    (ValueError, "begins at an odd address",
     lambda: attn.attention(np.zeros(65, np.uint8)[1:].view(np.float32).reshape(2, 8), K, V)),
    (ValueError, "both cu_seqlens_q and cu_seqlens_k", lambda: attn.attention(Q, K, V, cu_seqlens_q=[0, 9])),
    (ValueError, "with cu_seqlens_q it must be",
     lambda: attn.attention(Q, K, V, cu_seqlens_q=[0, 9], cu_seqlens_k=[0, 9])),
    (ValueError, "cu_seqlens_q ends at 3, but q has 4",
     lambda: attn.attention(Q[0], K[0], V[0], cu_seqlens_q=[0, 3], cu_seqlens_k=[0, 4])),
    (ValueError, "cu_seqlens_k must begin at 0",
     lambda: attn.attention(Q[0], K[0], V[0], cu_seqlens_q=[0, 4], cu_seqlens_k=[1, 4])),
    (ValueError, "the same sequences",
     lambda: attn.attention(Q[0], K[0], V[0], cu_seqlens_q=[0, 4], cu_seqlens_k=[0, 2, 4])),
]


@pytest.mark.parametrize("kind, text, function", REFUSED, ids=[text for _, text, _ in REFUSED])
def test_refused(kind, text, function):
    with pytest.raises(kind, match=text) as caught:
        function()
    if kind is ValueError:
        assert isinstance(caught.value, attn.Error) and caught.value.status == attn.Status.EINVAL


@pytest.mark.parametrize("window, same", [((2**64 + 3, 0), (9, 0)), ((3, 2**64), (3, 9)), (2**63, None),
                                          ((np.int64(3), np.uint8(1)), (3, 1)),
                                          ((np.array(3), np.array(1)), (3, 1))])
def test_windows_beyond_any_key(window, same):
    assert np.array_equal(attn.attention(Q, K, V, window=window), attn.attention(Q, K, V, window=same))


def test_broadcast_input_is_read_in_place(random):
    q, k, v = arrays()
    shared = np.broadcast_to(k[:, :1], k.shape) # one key head for all, without a copy
    Reference(q, shared, v).check(attn.attention(q, shared, v))
    point = np.broadcast_to(np.float32(0.25), (1, 4, 9, 8))
    Reference(point, k[:1], v[:1]).check(attn.attention(point, k[:1], v[:1]))
