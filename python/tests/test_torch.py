# SPDX-License-Identifier: Apache-2.0
"""Tensors of PyTorch: in place in every dtype, and gradients that autograd agrees with."""
import numpy as np
import pytest
from cases import cases
from hypothesis import given, settings
from reference import ROUNDED_WEIGHTS, Reference, near, visible

import attn
from attn import _types

torch = pytest.importorskip("torch")
import attn.torch # noqa: E402


def tensors(shape, dtype=torch.float32, count=3, kv_heads=None, seed=3):
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        shape if part in (0, 3) or kv_heads is None else (shape[0], kv_heads, *shape[2:])
        for part in range(count)
    ]
    return [torch.randn(one, generator=generator).to(dtype) for one in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_forward(dtype):
    q, k, v = tensors((2, 4, 33, 24), dtype, kv_heads=2)
    rounding = ROUNDED_WEIGHTS if dtype == torch.bfloat16 else 0.0
    reference = Reference(*(x.double().numpy() for x in (q, k, v)), causal=True, rounding=rounding)
    out, lse = attn.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(out, torch.Tensor) and out.dtype == dtype and lse.dtype == torch.float32
    reference.check(out, lse)
    given_out = torch.full_like(out, float("nan")).transpose(1, 2).contiguous().transpose(1, 2)
    assert attn.attention(q, k, v, causal=True, out=given_out) is given_out
    assert torch.equal(given_out, out)
    with torch.no_grad():
        assert torch.equal(attn.torch.attention(q, k, v, causal=True), out)


def test_same_memory(monkeypatch):
    q, k, v = (x.transpose(1, 2)[..., ::2] for x in tensors((2, 9, 3, 8)))
    seen, execute = [], attn._calls.HostCall.execute

    def hook(call, space, io):
        seen.append(_types.Io.from_buffer_copy(io))
        return execute(call, space, io)

    monkeypatch.setattr(attn._calls.HostCall, "execute", hook)
    out = attn.attention(q, k, v)
    for tensor, array in ((seen[0].q, q), (seen[0].k, k), (seen[0].v, v), (seen[0].o, out)):
        assert tensor.data == array.data_ptr() and tuple(tensor.stride) == array.stride()
    Reference(*(x.double().numpy() for x in (q, k, v))).check(out)


@pytest.mark.parametrize("layout", ["dense", "transposed", "permuted", "broadcast", "one head"])
def test_results_are_dense(layout):
    """Whatever q's strides are, those of a new result are not told by them."""
    shape = (2, 1 if layout == "one head" else 3, 9, 8)
    q, k, v = tensors(shape)
    if layout == "transposed":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    elif layout == "permuted":
        q = q.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    elif layout == "broadcast":
        q = q[:, :1].expand(shape)
    out = attn.attention(q, k, v)
    assert out.is_contiguous() and type(out) is torch.Tensor
    Reference(*(x.double().numpy() for x in (q, k, v))).check(out)


def test_elements_at_half_a_float():
    q, k, v = (x.flatten()[1:].reshape(2, 3, 9, 8) for x in tensors((2 * 3 * 9 * 8 + 1, ), torch.bfloat16))
    assert q.data_ptr() % 4 == 2
    assert torch.equal(attn.attention(q, k, v), attn.attention(q.clone(), k.clone(), v.clone()))


def test_elements_at_an_odd_address():
    k = torch.frombuffer(bytearray(4 * 48 + 1), dtype=torch.float32, offset=1).reshape(6, 8)
    q = v = torch.zeros(6, 8)
    with pytest.raises(ValueError, match="^k begins at an odd address"):
        attn.attention(q, k, v)


def test_refused():
    q, k, v = tensors((2, 3, 9, 8))
    with pytest.raises(BufferError, match="^q requires a gradient"):
        attn.attention(q.requires_grad_(), k, v)
    negated = torch.randn((2, 3, 9, 8), dtype=torch.complex64).conj().imag
    with pytest.raises(BufferError, match="^k is a view that negates"):
        attn.attention(q.detach(), negated, v)
    with pytest.raises(BufferError, match="^k"):
        attn.attention(q.detach(), k.to_sparse(), v)
    with pytest.raises(TypeError, match="q is torch.float64"):
        attn.torch.attention(*(x.double() for x in (q, k, v)))
    with pytest.raises(TypeError, match="k is a ndarray; give a tensor"):
        attn.torch.attention(q, k.numpy(), v)
    with pytest.raises(Exception, match="meta"):
        attn.attention(*(torch.empty(2, 3, 9, 8, device="meta") for _ in range(3)))


def autograd(q, k, v, dout, causal, window, scale):
    """Output and gradients by PyTorch's autograd in fp64, [batch, heads, tokens, dim]."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
    mask = torch.from_numpy(visible(q.shape[2], k.shape[2], causal, window))
    scores = q @ keys.transpose(-1, -2) * (q.shape[-1]**-0.5 if scale is None else scale)
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), -1)
    out = weights.masked_fill(~mask.any(-1)[:, None], 0) @ values # a row that sees no key
    return out, torch.autograd.grad(out, (q, k, v), dout.double())


@settings(max_examples=25)
@given(cases(dtypes=("float32", )))
def test_gradients(case):
    q, k = tensors((case.batch, case.heads, case.tokens, case.dim), count=2, seed=case.seed)
    k = torch.randn(case.batch, case.kv_heads, case.kv_tokens, case.dim)
    v = torch.randn(case.batch, case.kv_heads, case.kv_tokens, case.dim_v)
    dout = torch.randn(*q.shape[:-1], case.dim_v)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    order = (0, 2, 1, 3) if case.layout == "bnhd" else (0, 1, 2, 3)
    out, lse = attn.torch.attention(*(x.permute(order) for x in leaves),
                                    layout=case.layout,
                                    return_lse=True,
                                    **case.mask)
    assert not lse.requires_grad
    out = out.permute(order)
    out.backward(dout)
    wanted_out, wanted = autograd(q, k, v, dout, **case.mask)
    reference = Reference(*(x.detach().numpy() for x in leaves), **case.mask)
    reference.check(out.detach(), lse)
    # autograd's own gradients use the exact out and lse: those rounded to fp32 add as much again
    dp = dout.double().numpy() @ reference.v.swapaxes(-1, -2)
    weights = np.exp(reference.scores - np.where(np.isneginf(reference.lse), 0, reference.lse)[..., None])
    tolerances = reference.slopes(dout.double().numpy(), reference.lse, weights, dp)
    for leaf, want, tolerance in zip(leaves, wanted, tolerances):
        near(leaf.grad.double().numpy(), want.numpy(), 2 * tolerance, "float32")


def test_scaled_dot_product_attention():
    """The same as what users of PyTorch call today."""
    sdpa = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    if sdpa is None:
        pytest.skip("this PyTorch has no scaled_dot_product_attention")
    q, k, v, dout = tensors((2, 3, 65, 32), count=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    peer = sdpa(*leaves, is_causal=True)
    peer_gradients = torch.autograd.grad(peer, leaves, dout)
    ours = attn.torch.attention(*leaves, causal=True)
    assert torch.allclose(ours, peer, atol=1e-5)
    for a, b in zip(torch.autograd.grad(ours, leaves, dout), peer_gradients):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_short_dtypes(dtype):
    """At most twice as far from fp64 as PyTorch's own in the same dtype."""
    sdpa = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    if sdpa is None:
        pytest.skip("this PyTorch has no scaled_dot_product_attention")
    q, k, v, dout = tensors((2, 3, 130, 48), dtype, count=4)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, wanted = autograd(q, k, v, dout, True, None, None)
    ours = torch.autograd.grad(attn.torch.attention(*leaves, causal=True), leaves, dout)
    peer = torch.autograd.grad(sdpa(*leaves, is_causal=True), leaves, dout)
    for a, b, want in zip(ours, peer, wanted):
        assert a.dtype == dtype
        assert (a.double() - want).norm() <= 2 * (b.double() - want).norm()


def test_broadcast_and_partial_gradients(monkeypatch):
    q, k, v = tensors((2, 3, 17, 8))
    k.requires_grad_()
    computed = []

    def hook(*arrays, **keywords):
        computed.append(attn.attention_backward(*arrays, **keywords))
        return computed[0]

    monkeypatch.setattr(attn.torch, "_backward", hook)
    attn.torch.attention(q, k, v).sum().backward() # dout is one element, broadcast
    assert [x is None for x in computed[0]] == [True, False, True]
    _, wanted = autograd(q, k, v, torch.ones_like(q), False, None, None)
    assert torch.allclose(k.grad.double(), wanted[1], atol=1e-5)


def test_no_second_derivative():
    q, k, v = (x.requires_grad_() for x in tensors((1, 1, 5, 4)))
    out = attn.torch.attention(q, k, v)
    (gradient, ) = torch.autograd.grad((out * out).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()
