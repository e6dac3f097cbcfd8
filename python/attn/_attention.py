# SPDX-License-Identifier: Apache-2.0
"""attention() and attention_backward(): one call of the library each, on the caller's arrays in place."""
import ctypes
from typing import Any, Optional, Sequence, Tuple

from . import _arrays
from ._arrays import View
from ._errors import InvalidArgument
from ._library import call
from ._problem import Inputs, Window, same_dtype
from ._types import Dtype, Gradients, Options, Tensor


def options_of(threads: Optional[int], kernel: Optional[str], **more: Any) -> Options:
    if threads is not None and threads < 1:
        raise InvalidArgument(f"threads is {threads}; give at least 1, or None for as many as OpenMP gives")
    return Options(threads=threads or 0, kernel=kernel.encode() if kernel else None, **more)


def attention(q: Any,
              k: Any,
              v: Any,
              *,
              causal: bool = False,
              window: Window = None,
              scale: Optional[float] = None,
              return_lse: bool = False,
              out: Any = None,
              layout: str = "bhnd",
              cu_seqlens_q: Optional[Sequence[int]] = None,
              cu_seqlens_k: Optional[Sequence[int]] = None,
              threads: Optional[int] = None,
              kernel: Optional[str] = None) -> Any:
    """softmax(scale * q k^T + mask) v, exactly.

    q, k, v     NumPy arrays, or any that speak DLPack, in CPU memory: float32, float16 or bfloat16, with any
                strides; read in place. [batch, heads, tokens, dim], or without batch, or [tokens, dim]. k and
                v may have fewer heads, a divisor of q's, and v another dim.
    causal      key j is visible to query i when j <= i + tokens_k - tokens_q
    window      (left, right): keys visible on each side of the query's place, -1 for no bound; one number for
                both. With causal, none on the right.
    scale       default 1/sqrt(dim)
    return_lse  also return lse, float32 [batch, heads, tokens]: log sum exp of the scores of each row
    out         the array to write, and to return; it must not overlap q, k or v
    layout      "bhnd", or "bnhd" for [batch, tokens, heads, dim]
    cu_seqlens_q, cu_seqlens_k
                sequences of unequal length, one after another: sequence b is the tokens cu_seqlens[b] to
                cu_seqlens[b + 1]. Arrays are [tokens of all, heads, dim] then, lse [heads, tokens of all].
    threads     default: as many as OpenMP gives
    kernel      a row of attn.kernels() by name; default: the best that takes the problem

    Returns out, or (out, lse): tensors of PyTorch if q is one, else NumPy arrays. A row that sees no key is
    0, with lse = -inf.
    """
    inputs = Inputs(q, k, v, causal, window, scale, layout, cu_seqlens_q, cu_seqlens_k)
    out, lse, io = inputs.results(out, return_lse)
    options = options_of(threads, kernel)
    call("attn_forward", ctypes.byref(inputs.problem), ctypes.byref(io), ctypes.byref(options))
    return (out, lse) if return_lse else out


def _gradient(inputs: Inputs, name: str, like: View, given: Any, accumulate: bool) -> Tuple[Any, Tensor]:
    """The array that takes a gradient, and where it lies; None and nowhere if it is not wanted."""
    if given is False:
        return None, Tensor()
    dtype = Dtype(inputs.problem.dtype_out)
    if given is None:
        if accumulate:
            raise InvalidArgument(f"accumulate adds to what {name} holds: give {name}, or {name}=False")
        given = _arrays.empty(inputs.like, like.shape, dtype)
    seen = inputs.array(name, given, like.shape, out=True)
    same_dtype(seen, dtype, "out")
    return given, _arrays.tensor_of(seen, inputs.axes)


def attention_backward(dout: Any,
                       q: Any,
                       k: Any,
                       v: Any,
                       out: Any,
                       lse: Any,
                       *,
                       causal: bool = False,
                       window: Window = None,
                       scale: Optional[float] = None,
                       delta: Any = None,
                       dq: Any = None,
                       dk: Any = None,
                       dv: Any = None,
                       accumulate: bool = False,
                       layout: str = "bhnd",
                       cu_seqlens_q: Optional[Sequence[int]] = None,
                       cu_seqlens_k: Optional[Sequence[int]] = None,
                       threads: Optional[int] = None,
                       kernel: Optional[str] = None) -> Tuple[Any, Any, Any]:
    """The gradients (dq, dk, dv) of a scalar whose gradient by out is dout.

    dout        like out, in the dtype of q
    out, lse    what attention(..., return_lse=True) gave; out may be None where delta is given
    delta       sum of dout * out over each row, float32, shaped like lse; default: computed
    dq, dk, dv  the arrays to write, and to return; default: new ones; False: not wanted, None is returned
    accumulate  add to what dq, dk and dv hold

    The rest as in attention(). No array that is written may overlap another.
    """
    inputs = Inputs(q, k, v, causal, window, scale, layout, cu_seqlens_q, cu_seqlens_k)
    grads = Gradients(q=inputs.tensors[0],
                      k=inputs.tensors[1],
                      v=inputs.tensors[2],
                      accumulate=int(accumulate))
    seen = inputs.array("dout", dout, inputs.shape_o)
    same_dtype(seen, inputs.q.dtype, "q")
    grads.dout = _arrays.tensor_of(seen, inputs.axes)
    grads.lse = inputs.rows("lse", lse)
    if delta is not None:
        grads.delta = inputs.rows("delta", delta)
    if out is not None:
        seen = inputs.array("out", out, inputs.shape_o)
        inputs.problem.dtype_out = seen.dtype
        grads.o = _arrays.tensor_of(seen, inputs.axes)
    elif delta is None:
        raise InvalidArgument("give out, or delta")
    gradients = []
    for name, like, given in (("dq", inputs.q, dq), ("dk", inputs.k, dk), ("dv", inputs.v, dv)):
        array, tensor = _gradient(inputs, name, like, given, accumulate)
        gradients.append(array)
        setattr(grads, name, tensor)
    inputs.give_sequences(grads)
    options = options_of(threads, kernel)
    call("attn_backward", ctypes.byref(inputs.problem), ctypes.byref(grads), ctypes.byref(options))
    return gradients[0], gradients[1], gradients[2]
