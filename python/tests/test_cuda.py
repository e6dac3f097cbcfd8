# SPDX-License-Identifier: Apache-2.0
"""On a GPU: right for every shape, dtype and layout, in place, on the caller's stream, in graphs."""
import attn
import numpy as np
import pytest
from attn import _calls
from conftest import why_no_gpu
from reference import HALF_UNIT, Reference, plain

torch = pytest.importorskip("torch")
import attn.torch # noqa: E402

pytestmark = pytest.mark.skipif(why_no_gpu() is not None, reason=f"no GPU: {why_no_gpu()}")

NAMES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FULL = {"causal": False, "window": None, "scale": None}
CAUSAL = {**FULL, "causal": True}


def rounding(dtype):
    """Kernels for the matrix units round the weights to the 16 bits of the inputs."""
    return 0.0 if dtype == torch.float32 else HALF_UNIT[str(dtype)[len("torch."):]]


def normal(shape, dtype, seed, layout="bhnd"):
    """[batch, heads, tokens, dim] standard normal numbers, in memory as `layout` says."""
    generator = torch.Generator("cuda").manual_seed(seed)
    b, h, n, d = shape
    if layout == "bhnd":
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)
    if layout == "bnhd":
        return torch.randn((b, n, h, d), generator=generator, device="cuda").to(dtype).transpose(1, 2)
    fused = torch.randn((b, n, h, 3, d), generator=generator, device="cuda").to(dtype) # of a fused projection
    return fused[:, :, :, 1].transpose(1, 2)


def poisoned(shape, dtype):
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


def problem(batch=2,
            heads=4,
            kv_heads=2,
            tokens=130,
            kv_tokens=130,
            dim=64,
            dtype=torch.bfloat16,
            seed=1,
            layout="bhnd"):
    """q, k, v, dout"""
    shapes = ((heads, tokens), (kv_heads, kv_tokens), (kv_heads, kv_tokens), (heads, tokens))
    return [normal((batch, h, n, dim), dtype, 4 * seed + i, layout) for i, (h, n) in enumerate(shapes)]


def draw(seed):
    """A random problem: its tensors and mask."""
    random = np.random.default_rng(seed)
    dtype = NAMES[("bf16", "f16", "f32")[seed % 3]]
    dim = int(random.choice([64, 128, 256, 8 * random.integers(1, 33)]))
    kv_heads = int(random.integers(1, 3))
    tokens, kv_tokens = (int(x) for x in random.integers(1, 400, 2))
    if seed % 4 == 0:
        kv_tokens = tokens
    window = [None, None, (int(random.integers(-1, 200)), int(random.integers(-1, 200)))][random.integers(3)]
    mask = {"causal": bool(random.integers(2)), "window": window, "scale": [None, 0.3][random.integers(2)]}
    tensors = problem(int(random.integers(1, 3)), kv_heads * int(random.integers(1, 5)), kv_heads, tokens,
                      kv_tokens, dim, dtype, seed, ("bhnd", "bnhd", "fused")[random.integers(3)])
    return tensors, mask


def reference(q, k, v, mask):
    return Reference(*(plain(x)[0] for x in (q, k, v)), **mask, rounding=rounding(q.dtype))


@pytest.mark.parametrize("seed", range(36))
def test_forward(seed):
    (q, k, v, _), mask = draw(seed)
    out = poisoned(q.shape, q.dtype)
    given, lse = attn.attention(q, k, v, out=out, return_lse=True, **mask)
    assert given is out and lse.is_cuda and lse.dtype == torch.float32
    reference(q, k, v, mask).check(out, lse)
    fresh = attn.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bnhd", **mask)
    assert fresh.dtype == q.dtype and torch.equal(fresh.transpose(1, 2), out)


@pytest.mark.parametrize("seed", range(36))
def test_backward(seed):
    (q, k, v, dout), mask = draw(seed)
    out, lse = attn.attention(q, k, v, return_lse=True, **mask)
    gradients = {name: poisoned(x.shape, q.dtype) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    got = attn.attention_backward(dout, q, k, v, out, lse, **gradients, **mask)
    assert all(one is gradients[name] for one, name in zip(got, ("dq", "dk", "dv")))
    reference(q, k, v, mask).check_gradients(dout, out, lse, got)


@pytest.mark.parametrize("dim", [72, 40, 1, 13, 333, 512])
def test_other_dims_of_fp32(dim):
    q, k, v, dout = problem(1, 2, 1, 70, 90, dim, torch.float32)
    out, lse = attn.attention(q, k, v, return_lse=True)
    reference(q, k, v, FULL).check(out, lse)
    try:
        got = attn.attention_backward(dout, q, k, v, out, lse)
    except attn.Unsupported as error:
        assert dim > 256 and "dim" in str(error)
    else:
        reference(q, k, v, FULL).check_gradients(dout, out, lse, got)


def test_fewer_axes_and_fp32_results():
    q, k, v, _ = problem(1, 2, 2)
    out = poisoned(q[0].shape, torch.float32)
    attn.attention(q[0], k[0], v[0], out=out, causal=True)
    reference(q, k, v, CAUSAL).check(out[None])
    alone = attn.attention(q[0, 1], k[0, 1], v[0, 1], causal=True)
    reference(q[:, 1:], k[:, 1:], v[:, 1:], CAUSAL).check(alone[None, None])


def test_rows_without_keys():
    q, k, v, dout = problem(tokens=100, kv_tokens=40)
    out, lse = attn.attention(q, k, v, causal=True, return_lse=True)
    assert torch.isneginf(lse[:, :, :60]).all() and not out[:, :, :60].any()
    dq, _, _ = attn.attention_backward(dout, q, k, v, out, lse, causal=True)
    assert not dq[:, :, :60].any()


# ---- sequences of unequal length ----


@pytest.mark.parametrize("dtype", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("mask", [FULL, CAUSAL, {**FULL, "window": (30, 5)}],
                         ids=["full", "causal", "window"])
def test_sequences(dtype, mask):
    random = np.random.default_rng(5)
    lengths = random.integers(0, 150, (2, 6)) + [[1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0]]
    lengths[0, 2] = lengths[1, 2] = lengths[0, 4] = lengths[1, 5] = 0
    starts = [np.concatenate([[0], np.cumsum(side)]) for side in lengths]
    q, dout = (
        normal((1, 4, int(starts[0][-1]), 64), dtype, seed, "bnhd")[0].transpose(0, 1) for seed in (1, 2))
    k, v = (normal((1, 2, int(starts[1][-1]), 64), dtype, seed, "bnhd")[0].transpose(0, 1) for seed in (3, 4))
    lists = {f"cu_seqlens_{side}": torch.tensor(one, device="cuda") for side, one in zip("qk", starts)}
    out = poisoned(q.shape, dtype)
    _, lse = attn.attention(q, k, v, out=out, return_lse=True, **lists, **mask)
    got = attn.attention_backward(dout, q, k, v, out, lse, deterministic=True, **lists, **mask)
    for b in range(6):
        rows, keys = (slice(int(side[b]), int(side[b + 1])) for side in starts)

        def part(x, where):
            return x[where].transpose(0, 1)[None]

        if lengths[0][b] == 0 or lengths[1][b] == 0:
            assert not out[rows].any() and torch.isneginf(lse[:, rows]).all()
            assert not any(x[where].any() for x, where in zip(got, (rows, keys, keys)))
            continue
        wanted = reference(part(q, rows), part(k, keys), part(v, keys), mask)
        wanted.check(part(out, rows), lse[None, :, rows])
        wanted.check_gradients(part(dout, rows), part(out, rows), lse[None, :, rows],
                               [part(x, where) for x, where in zip(got, (rows, keys, keys))])
    others = ({name: one.int() for name, one in lists.items()
              }, {name: one.tolist() for name, one in lists.items()},
              {**lists, **{f"max_seqlen_{side}": int(one.max()) for side, one in zip("qk", lengths)}})
    for other in others:
        assert torch.equal(attn.attention(q, k, v, **other, **mask), out)


# ---- streams and graphs ----


def test_current_stream():
    """What the call reads is written late, on the same stream."""
    late = problem(seed=2)
    q, k, v, _ = (torch.full_like(x, float("nan")) for x in late)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        for x, values in zip((q, k, v), late):
            x.copy_(values)
        out, lse = attn.attention(q, k, v, causal=True, return_lse=True)
        event = stream.record_event()
    assert not event.query() # it came back before the GPU was done
    stream.synchronize()
    reference(q, k, v, CAUSAL).check(out, lse)


@pytest.mark.parametrize("dtype", NAMES.values(), ids=NAMES)
def test_graph(dtype):
    q, k, v, dout = problem(dtype=dtype)

    def step():
        out, lse = attn.attention(q, k, v, causal=True, return_lse=True)
        return (out, lse, *attn.attention_backward(dout, q, k, v, out, lse, causal=True, deterministic=True))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in (7, 8):
        for x, values in zip((q, k, v, dout), problem(dtype=dtype, seed=seed)):
            x.copy_(values)
        for x in captured:
            x.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step()))
    reference(q, k, v, CAUSAL).check(*captured[:2])


def test_same_bits():
    q, k, v, dout = problem(tokens=300, kv_tokens=300, dim=128)
    out, lse = attn.attention(q, k, v, return_lse=True)
    first = attn.attention_backward(dout, q, k, v, out, lse, deterministic=True)
    for _ in range(20):
        assert torch.equal(attn.attention(q, k, v), out)
        again = attn.attention_backward(dout, q, k, v, out, lse, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again))


def test_other_thread():
    """A thread in which no CUDA context is current."""
    import threading
    q, k, v, _ = problem()
    results = []
    thread = threading.Thread(target=lambda: results.append(attn.attention(q, k, v)))
    thread.start()
    thread.join()
    assert torch.equal(results[0], attn.attention(q, k, v))


# ---- gradients: what may be given and left out; autograd ----


def test_accumulate_delta_and_some():
    q, k, v, dout = problem(dtype=torch.float32)
    out, lse = attn.attention(q, k, v, return_lse=True)
    before = [torch.randn_like(x) for x in (q, k, v)]
    dq, dk, dv = (x.clone() for x in before)
    attn.attention_backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv, accumulate=True)
    wanted = reference(q, k, v, FULL)
    wanted.check_gradients(dout, out, lse, (dq, dk, dv), before)
    delta = (dout * out).sum(-1)
    wanted.check_gradients(dout, out, lse, attn.attention_backward(dout, q, k, v, None, lse, delta=delta))
    some = attn.attention_backward(dout, q, k, v, out, lse, dq=False, dv=False)
    assert some[0] is None and some[2] is None
    wanted.check_gradients(dout, out, lse, some)


@pytest.mark.parametrize("dtype", NAMES.values(), ids=NAMES)
def test_autograd(dtype):
    """At most twice as far from fp64 as PyTorch's own in the same dtype."""
    q, k, v, dout = problem(kv_heads=4, dtype=dtype, tokens=257, kv_tokens=257)
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def gradients(function, *tensors):
        leaves = [x.detach().requires_grad_() for x in tensors[:3]]
        out = function(*leaves)
        return (out, *torch.autograd.grad(out, leaves, tensors[3]))

    wanted = gradients(lambda *x: sdpa(*x, is_causal=True), *(x.double() for x in (q, k, v, dout)))
    peer = gradients(lambda *x: sdpa(*x, is_causal=True), q, k, v, dout)
    ours = gradients(lambda *x: attn.torch.attention(*x, causal=True), q, k, v, dout)
    for a, b, want in zip(ours, peer, wanted):
        assert a.dtype == dtype
        assert (a.double() - want).norm() <= 2 * (b.double() - want).norm()


def test_autograd_of_a_sum():
    """dout is one element, broadcast; on another stream; only k wants a gradient."""
    q, k, v, _ = problem(dtype=torch.float32)
    k.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = attn.torch.attention(q, k, v)
        out.sum().backward()
    stream.synchronize()
    _, lse = attn.attention(q, k.detach(), v, return_lse=True)
    reference(q, k, v, FULL).check_gradients(torch.ones_like(q), out, lse, (None, k.grad, None))


# ---- arrays and memory ----


def test_in_place(monkeypatch):
    q, k, v, _ = problem(layout="fused")
    out = poisoned(q.shape, q.dtype)
    seen = []
    run = _calls.Prepared.run
    monkeypatch.setattr(_calls.Prepared, "run", lambda *arguments: (seen.append(arguments), run(*arguments)))
    attn.attention(q, k, v, out=out)
    assert seen[0][2][:4] == [x.data_ptr() for x in (q, k, v, out)]
    assert seen[0][2][-1] == torch.cuda.current_stream().cuda_stream


def test_plans_are_kept_and_memory_is_not():
    q, k, v, dout = problem(seed=9, tokens=77)
    out, lse = attn.attention(q, k, v, return_lse=True)
    attn.attention_backward(dout, q, k, v, out, lse)
    torch.cuda.synchronize()
    before, kept = torch.cuda.memory_allocated(), _calls.prepare_backward.cache_info()
    for _ in range(5):
        attn.attention_backward(dout, q, k, v, out, lse)
    assert torch.cuda.memory_allocated() == before
    after = _calls.prepare_backward.cache_info()
    assert (after.hits, after.misses) == (kept.hits + 5, kept.misses)


class Other:
    """A tensor behind an object that speaks DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **keywords):
        return self.tensor.__dlpack__(**keywords)


def test_dlpack():
    q, k, v, dout = problem()
    wanted, wanted_lse = attn.attention(q, k, v, causal=True, return_lse=True)
    out, lse = attn.attention(Other(q), Other(k), Other(v), causal=True, return_lse=True)
    assert isinstance(out, attn.GpuArray) and out.dtype == "bfloat16" and out.shape == tuple(q.shape)
    assert torch.equal(torch.from_dlpack(out), wanted) and torch.equal(torch.from_dlpack(lse), wanted_lse)
    gradients = attn.attention_backward(*map(Other, (dout, q, k, v)),
                                        out,
                                        lse,
                                        causal=True,
                                        deterministic=True)
    again = attn.attention_backward(dout, q, k, v, wanted, wanted_lse, causal=True, deterministic=True)
    assert all(torch.equal(torch.from_dlpack(a), b) for a, b in zip(gradients, again))
    given = poisoned(q.shape, q.dtype)
    attn.attention(Other(q), k, Other(v), causal=True, out=given)
    assert torch.equal(given, wanted)


def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.random.default_rng(i).standard_normal((150, 4, 64), dtype=cupy.float32) for i in range(3))
    starts = cupy.asarray([0, 60, 60, 150])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        late = q * 2 # inputs that the stream has not made yet
        out = cupy.from_dlpack(
            attn.attention(late, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, stream=stream.ptr))
        total = out * 1
    stream.synchronize()
    for part in (slice(0, 60), slice(60, 150)):
        parts = [cupy.asnumpy(x[part]).swapaxes(0, 1)[None] for x in (late, k, v, total)]
        Reference(*parts[:3]).check(parts[3])
    by_list = attn.attention(late, k, v, cu_seqlens_q=[0, 60, 60, 150], cu_seqlens_k=[0, 60, 60, 150])
    assert (cupy.from_dlpack(by_list) == out).all()


def test_odd_strides():
    """Right by a kernel that can read them, or refused by one that cannot."""
    q, k, v, _ = problem()
    wide = torch.full((2, 4, 130, 67), float("nan"), dtype=q.dtype, device="cuda")
    wide[..., 3:] = q
    try:
        out = attn.attention(wide[..., 3:], k, v)
    except attn.Error as error:
        assert "16 bytes" in str(error)
    else:
        reference(q, k, v, FULL).check(out)


def test_refused():
    q, k, v, dout = problem()
    out, lse = attn.attention(q, k, v, return_lse=True)
    starts = torch.tensor([0, 130], device="cuda")
    flat = q[0].transpose(0, 1)
    refused = (
        (ValueError, "k lies in the host's memory", lambda: attn.attention(q, k.cpu(), v)),
        (ValueError, "v lies in the memory of GPU 0", lambda: attn.attention(q.cpu(), k.cpu(), v)),
        (ValueError, "out lies in the host's", lambda: attn.attention(q, k, v, out=out.cpu())),
        (ValueError, "lse lies in the host's",
         lambda: attn.attention_backward(dout, q, k, v, out, lse.cpu())),
        (ValueError, "stream: tensors of PyTorch", lambda: attn.attention(q, k, v, stream=0)),
        (BufferError, "q requires a gradient", lambda: attn.attention(q.clone().requires_grad_(), k, v)),
        (TypeError, "q is torch.float64", lambda: attn.attention(q.double(), k.double(), v.double())),
        (ValueError, "there is no CUDA kernel 'x'", lambda: attn.attention(q, k, v, kernel="x")),
        (attn.Error, "stride|dense",
         lambda: attn.attention(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)),
        (ValueError, "cu_seqlens_q is torch.float32",
         lambda: attn.attention(flat, flat, flat, cu_seqlens_q=starts.float(), cu_seqlens_k=starts)),
        (ValueError, "cu_seqlens_k has shape",
         lambda: attn.attention(flat, flat, flat, cu_seqlens_q=starts, cu_seqlens_k=starts[:1])),
        (ValueError, "the same sequences",
         lambda: attn.attention(flat, flat, flat, cu_seqlens_q=starts, cu_seqlens_k=[0, 9, 130])),
        (NotImplementedError, "run.. takes arrays in the host's memory", lambda: attn.run(q, k, v)),
    )
    for kind, text, call in refused:
        with pytest.raises(kind, match=text):
            call()
    torch.cuda.synchronize()
    assert torch.equal(attn.attention(q, k, v), out) # nothing is broken after all that
