# SPDX-License-Identifier: Apache-2.0
"""attn for PyTorch: attention() with gradients, on tensors of CPU or GPU in place. It needs PyTorch."""
from typing import Any, Optional, Sequence

import torch

from ._attention import attention as _forward
from ._attention import attention_backward as _backward


class _Attention(torch.autograd.Function):
    """Saves q, k, v, out and lse: nothing of the size of the score matrix."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict) -> Any:
        out, lse = _forward(q.detach(), k.detach(), v.detach(), return_lse=True, **keywords)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.keywords = keywords
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout: Optional[torch.Tensor], _dlse: Any) -> Any:
        if dout is None:
            return None, None, None, None
        # One element for all, as from out.sum(): the library needs strides. A GPU's kernels read dense rows.
        if not any(dout.stride()) or dout.is_cuda and (0 in dout.stride() or dout.stride(-1) != 1):
            dout = dout.contiguous()
        dq, dk, dv = (None if needed else False for needed in ctx.needs_input_grad[:3])
        tensors = (tensor.detach() for tensor in (dout, *ctx.saved_tensors))
        return (*_backward(*tensors, dq=dq, dk=dk, dv=dv, **ctx.keywords), None)


def attention(q: torch.Tensor,
              k: torch.Tensor,
              v: torch.Tensor,
              *,
              causal: bool = False,
              window: Any = None,
              scale: Optional[float] = None,
              return_lse: bool = False,
              layout: str = "bhnd",
              cu_seqlens_q: Optional[Sequence[int]] = None,
              cu_seqlens_k: Optional[Sequence[int]] = None,
              max_seqlen_q: Optional[int] = None,
              max_seqlen_k: Optional[int] = None,
              threads: Optional[int] = None,
              kernel: Optional[str] = None,
              deterministic: Optional[bool] = None) -> Any:
    """attn.attention() that autograd knows; lse, if asked for, takes no part in gradients.

    threads         default torch.get_num_threads()
    deterministic   default torch.are_deterministic_algorithms_enabled()

    The rest as in attn.attention().
    """
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; give a tensor of PyTorch")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    keywords = {
        "causal": causal, "window": window, "scale": scale, "layout": layout, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k,
        "threads": torch.get_num_threads() if threads is None else threads, "kernel": kernel, "deterministic": deterministic
    }
    if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return _forward(q.detach(), k.detach(), v.detach(), return_lse=return_lse, **keywords)
    out, lse = _Attention.apply(q, k, v, keywords)
    return (out, lse) if return_lse else out


__all__ = ["attention"]
