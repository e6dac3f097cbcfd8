# SPDX-License-Identifier: Apache-2.0
"""Attention and its gradients in fp64 by NumPy, and how far results may be from it: the formulas of check.h.

Arrays here are [batch, heads, tokens, dim] and exact in fp64.
"""
import numpy as np

UNIT = 2.0**-24
HALF_UNIT = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8} # relative, of rounding to it
# Kernels may round the weights to the dtype of bf16 inputs before they meet v: r of check.h. On a GPU they
# do so with fp16 inputs too.
ROUNDED_WEIGHTS = HALF_UNIT["bfloat16"]
SMALLEST = {"float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0} # half the smallest subnormal


def visible(tokens_q, tokens_k, causal=False, window=None):
    shift = tokens_k - tokens_q
    offset = np.arange(tokens_k)[None, :] - np.arange(tokens_q)[:, None] - shift # key - the query's own place
    left, right = (-1, -1) if window is None else (window, window) if isinstance(window, int) else window
    right = 0 if causal else right
    return ((left < 0) | (offset >= -left)) & ((right < 0) | (offset <= right))


def exact(array):
    return np.asarray(array).astype(np.float64)


def plain(array):
    """In fp64, and the name of its own dtype; tensors of PyTorch too, wherever they lie."""
    if hasattr(array, "to"):
        return array.detach().double().cpu().numpy(), str(array.dtype)[len("torch."):]
    return exact(array), np.asarray(array).dtype.name


class Reference:
    """o and lse of a problem, with what the tolerances need."""

    def __init__(self, q, k, v, causal=False, window=None, scale=None, rounding=0.0):
        self.rounding = rounding
        self.group = q.shape[1] // k.shape[1]
        self.q = exact(q)
        self.k, self.v = (np.repeat(exact(x), self.group, axis=1) for x in (k, v))
        self.scale = q.shape[-1]**-0.5 if scale is None else scale
        scores = self.scale * self.q @ self.k.swapaxes(-1, -2)
        self.size_score = max(np.abs(scores).max(), self.size(self.q, self.k) * abs(self.scale))
        self.scores = np.where(visible(q.shape[2], k.shape[2], causal, window), scores, -np.inf)
        most = self.scores.max(axis=-1, keepdims=True)
        weights = np.exp(self.scores - np.where(np.isfinite(most), most, 0.0))
        total = weights.sum(axis=-1, keepdims=True)
        self.o = weights / np.where(total > 0, total, 1.0) @ self.v
        with np.errstate(divide="ignore"):
            self.lse = (most + np.log(total))[..., 0]

    @staticmethod
    def size(a, b):
        """The size of a partial sum of random signs of a.b"""
        norms = [np.linalg.norm(x, axis=-1).max() for x in (a, b)]
        return norms[0] * norms[1] / np.sqrt(a.shape[-1])

    def error(self):
        """The relative error of numerator and denominator."""
        return UNIT * ((np.sqrt(self.q.shape[-1]) + 2) * self.size_score + np.sqrt(self.k.shape[2]) + 4)

    def check(self, o, lse=None):
        got, dtype = plain(o)
        near(got, self.o, (2 * self.error() + self.rounding) * np.abs(self.v).max(), dtype)
        empty = np.isneginf(self.lse)
        assert not got[empty].any()
        if lse is not None:
            lse, _ = plain(lse)
            assert np.array_equal(np.isneginf(lse), empty)
            near(lse[~empty], self.lse[~empty], self.error(), "float32")

    def check_gradients(self, dout, out, lse, gradients, before=(0, 0, 0)):
        """dq, dk, dv (None: not looked at) that were made from these dout, out and lse."""
        (dout, _), (out, _), (lse, _) = map(plain, (dout, out, lse))
        p = np.exp(self.scores - np.where(np.isneginf(lse), 0.0, lse)[..., None])
        dp = dout @ self.v.swapaxes(-1, -2)
        ds = p * (dp - np.sum(dout * out, axis=-1, keepdims=True))
        wanted = [
            self.scale * ds @ self.k,
            self.sum(self.scale * ds.swapaxes(-1, -2) @ self.q),
            self.sum(p.swapaxes(-1, -2) @ dout)
        ]
        for got, want, tolerance, old in zip(gradients, wanted, self.slopes(dout, lse, p, dp), before):
            if got is not None:
                values, dtype = plain(got)
                near(values, want + plain(old)[0], tolerance, dtype)

    def sum(self, x):
        """Over the query heads that share a kv head."""
        shape = x.shape
        return x.reshape(shape[0], shape[1] // self.group, self.group, *shape[2:]).sum(axis=2)

    def slopes(self, dout, lse, p, dp):
        """Tolerances of dq, dk and dv."""
        rows, keys = self.q.shape[2] * self.group, self.k.shape[2]
        finite = np.abs(lse[np.isfinite(lse)])
        error = UNIT * ((np.sqrt(self.q.shape[-1]) + 2) * self.size_score + 3 * finite.max(initial=0) + 4)
        slope = max(np.abs(dp).max(), self.size(dout, self.v))
        column = self.sum(p.sum(axis=2)[..., None]).max()
        g = slope * (2 * error + UNIT * (np.sqrt(self.v.shape[-1]) + 6) + 2 * self.rounding)
        scale = abs(self.scale)
        return (scale * np.abs(self.k).max() * (g + 2 * slope * UNIT * (np.sqrt(keys) + 3)),
                scale * np.abs(self.q).max() * column * (g + 2 * slope * UNIT * (np.sqrt(rows) + 3)),
                np.abs(dout).max() * column * (error + self.rounding + UNIT * (np.sqrt(rows) + 3)))


def near(got, want, tolerance, dtype):
    assert got.shape == want.shape
    excess = np.abs(got - want) - (tolerance + HALF_UNIT[dtype] * np.abs(want) + SMALLEST[dtype])
    worst = np.unravel_index(np.argmax(np.where(np.isnan(excess), np.inf, excess)), excess.shape)
    above = excess[worst]
    assert above <= 0, f"{worst}: {got[worst]} for {want[worst]}, {above:.3g} above the tolerance"
