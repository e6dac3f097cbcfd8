# SPDX-License-Identifier: Apache-2.0
"""attention() and attention_backward(): one call of the library each, on the caller's arrays in place."""
from typing import Any, Optional, Sequence, Tuple

from . import _calls
from ._problem import Window
from ._spaces import space_of


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
              max_seqlen_q: Optional[int] = None,
              max_seqlen_k: Optional[int] = None,
              threads: Optional[int] = None,
              kernel: Optional[str] = None,
              deterministic: bool = False,
              stream: Optional[int] = None) -> Any:
    """softmax(scale * q k^T + mask) v, exactly. On the CPU, or on the GPU in whose memory the arrays lie.

    q, k, v     NumPy arrays, or any that speak DLPack: float32, float16 or bfloat16, with any strides (on a
                GPU those that its kernels can read); read in place. [batch, heads, tokens, dim], or without
                batch, or [tokens, dim]. k and v may have fewer heads, a divisor of q's, and v another dim.
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
                On a GPU arrays of int64 in its memory are read there, by its kernels alone.
    max_seqlen_q, max_seqlen_k
                the longest sequence, where cu_seqlens lies on a GPU: less work is wasted if it is known
    threads     on the CPU; default: as many as OpenMP gives
    kernel      a row of attn.kernels() by name; default: the best that takes the problem
    deterministic
                on a GPU, for gradients: the same bits every time, at a price. Elsewhere it is always so.
    stream      on a GPU, the CUDA stream (its handle, an int) to compute on; default: CUDA's default stream.
                For tensors of PyTorch it is always torch.cuda.current_stream().

    Returns out, or (out, lse): tensors of PyTorch if q is one, else NumPy arrays, or on a GPU arrays that
    speak DLPack. A row that sees no key is 0, with lse = -inf. On a GPU this only enqueues kernels: results
    are there when the stream has come so far.
    """
    settings = _calls.settings_of(causal, window, scale, layout, threads, kernel, deterministic)
    out, lse = _calls.forward(space_of(q, stream), q, k, v, out, return_lse, (cu_seqlens_q, cu_seqlens_k),
                              (max_seqlen_q, max_seqlen_k), settings)
    return (out, lse) if return_lse else out


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
                       max_seqlen_q: Optional[int] = None,
                       max_seqlen_k: Optional[int] = None,
                       threads: Optional[int] = None,
                       kernel: Optional[str] = None,
                       deterministic: bool = False,
                       memory_limit: Optional[int] = None,
                       stream: Optional[int] = None) -> Tuple[Any, Any, Any]:
    """The gradients (dq, dk, dv) of a scalar whose gradient by out is dout.

    dout        like out, in the dtype of q
    out, lse    what attention(..., return_lse=True) gave; out may be None where delta is given
    delta       sum of dout * out over each row, float32, shaped like lse; default: computed
    dq, dk, dv  the arrays to write, and to return; default: new ones; False: not wanted, None is returned
    accumulate  add to what dq, dk and dv hold
    memory_limit  bytes that the workspace may take; where 16-bit gradients have no room for sums of dq in
                float32 in it, dq is made in a pass of its own, in the same bits: 7 products for 5

    The rest as in attention(). No array that is written may overlap another.
    """
    settings = _calls.settings_of(causal, window, scale, layout, threads, kernel, deterministic,
                                   memory_limit)
    gradients = _calls.backward(space_of(q, stream), (dout, q, k, v, out, lse, delta), (dq, dk, dv), accumulate,
                                (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), settings)
    return gradients[0], gradients[1], gradients[2]
