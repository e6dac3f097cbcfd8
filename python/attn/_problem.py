# SPDX-License-Identifier: Apache-2.0
"""From arrays and keywords to attn_problem: which axis is which, do the shapes fit, what are the results."""
import math
import operator
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import _arrays
from ._arrays import Starts, View
from ._errors import InvalidArgument
from ._types import Dtype, Gradients, Io, Mask, Options, Problem, Tensor

Window = Union[None, int, Tuple[int, int]]
Axes = Tuple[Optional[int], ...]
Maker = Callable[[str, Tuple[int, ...], Dtype], Any] # of a new array, by its name, shape and dtype


FAR = 2**40 # further than any key


def index_of(name: str, value: Any) -> int:
    """A whole number, of Python or NumPy."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number") from None
    if not -2**63 <= number < 2**63:
        raise InvalidArgument(f"{name} is {value!r}; no such number can be meant")
    return number


def real_of(name: str, value: Any) -> float:
    """A number, of Python or NumPy; infinite where it is too large."""
    try:
        if not isinstance(value, (str, bytes)):
            return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        pass
    raise TypeError(f"{name} is {value!r}; give a number")


def band(causal: bool, window: Window) -> Tuple[Mask, int, int]:
    """The mask, and the keys visible to the left and to the right of a query's own place; -1: no bound."""
    if window is None:
        return (Mask.MASK_CAUSAL if causal else Mask.MASK_FULL), 0, 0
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    try:
        left, right = (operator.index(side) for side in sides)
    except (TypeError, ValueError):
        left = right = -2
    if left < -1 or right < -1:
        raise InvalidArgument(
            f"window is {window!r}; give (left, right), numbers of keys or -1 for no bound, or one "
            "number for both")
    return Mask.MASK_WINDOW, min(left, FAR), 0 if causal else min(right, FAR)


def count_of(name: str, value: Any) -> int:
    if value is None:
        return 0 # to the library: its default
    number = index_of(name, value)
    if number < 1:
        raise InvalidArgument(f"{name} is {number}; give at least 1, or None for the default")
    return number


def options_of(threads: Optional[int], kernel: Optional[str], **more: Any) -> Options:
    if threads is not None:
        threads = index_of("threads", threads)
        if not 1 <= threads < 2**31:
            raise InvalidArgument(f"threads is {threads}; give at least 1, or None for as many as OpenMP gives")
    return Options(threads=threads or 0, kernel=kernel.encode() if kernel else None, **more)


def scale_of(scale: Optional[float]) -> float:
    if scale is None:
        return 0.0 # to the library: 1/sqrt(dim)
    if scale == 0 or not math.isfinite(scale):
        raise InvalidArgument(f"scale is {scale}; give a finite number other than 0, or None for 1/sqrt(dim)")
    return float(scale)


def axes_of(seen: View, layout: str, varlen: bool) -> Axes:
    """Which axis of an array is batch, head, token and dim."""
    rank = len(seen.shape)
    if layout not in ("bhnd", "bnhd"):
        raise InvalidArgument(
            f"layout is {layout!r}; give 'bhnd' for [batch, heads, tokens, dim] or 'bnhd' for "
            "[batch, tokens, heads, dim]")
    if varlen:
        if rank != 3:
            raise InvalidArgument(f"{seen.name} has shape {list(seen.shape)}; with cu_seqlens_q it must be "
                                  "[tokens of all sequences, heads, dim]")
        return _arrays.SCHEMES["bnhd", 3]
    if (layout, rank) not in _arrays.SCHEMES:
        raise InvalidArgument(f"{seen.name} has shape {list(seen.shape)}; it must have 4 axes (layout "
                              f"{layout!r}), 3 without batch, or 2: [tokens, dim]")
    return _arrays.SCHEMES[layout, rank]


class Sizes(NamedTuple):
    batch: int
    heads: int
    tokens: int
    dim: int


def sizes_of(seen: View, axes: Axes) -> Sizes:
    return Sizes(*(1 if axis is None else seen.shape[axis] for axis in axes))


def expect(seen: View, what: str, value: int, wanted: int, of: str) -> None:
    if value != wanted:
        raise InvalidArgument(f"{seen.name} has {what} {value} (shape {list(seen.shape)}); {of} has {wanted}")


def same_dtype(seen: View, dtype: Dtype, of: str) -> None:
    if seen.dtype != dtype:
        raise InvalidArgument(
            f"{seen.name} is {seen.dtype.name.lower()}, {of} is {dtype.name.lower()}: they must be "
            "the same")


def memory_of(seen: View) -> str:
    return "the host's memory" if seen.gpu is None else f"the memory of GPU {seen.gpu}"


def same_memory(seen: View, q: View) -> None:
    if seen.gpu != q.gpu:
        raise InvalidArgument(
            f"{seen.name} lies in {memory_of(seen)}, {q.name} in {memory_of(q)}: copy it to the same place")


class Inputs:
    """q, k and v, seen and checked, and the problem they make.

    Holds the views of all arrays of a call, and so their memory: keep it until the library has returned.
    An array may be given as the View of one, also of one that is not there yet.
    """

    def __init__(self,
                 q: Any,
                 k: Any,
                 v: Any,
                 causal: bool,
                 window: Window,
                 scale: Optional[float],
                 layout: str,
                 cu_seqlens_q: Optional[Starts] = None,
                 cu_seqlens_k: Optional[Starts] = None) -> None:
        self.layout = layout
        self.varlen = cu_seqlens_q is not None
        if self.varlen != (cu_seqlens_k is not None):
            raise InvalidArgument("give both cu_seqlens_q and cu_seqlens_k, or neither")
        self.views = [_arrays.view(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
        self.q, self.k, self.v = self.views[:3]
        self.gpu = self.q.gpu
        self.axes = axes_of(self.q, layout, self.varlen)
        self.tensors = [self.tensor(seen) for seen in self.views]
        sizes = [sizes_of(seen, self.axes) for seen in self.views]
        self.check(*sizes)
        lengths = [sizes[0].tokens, sizes[1].tokens]
        batch = sizes[0].batch
        totals = 0, 0
        if cu_seqlens_q is not None and cu_seqlens_k is not None:
            batch, lengths = self.sequences(cu_seqlens_q, cu_seqlens_k)
            totals = max(sizes[0].tokens, 1), max(sizes[1].tokens, 1)
        mask, left, right = band(causal, window)
        self.problem = Problem(batch=batch,
                               heads_q=sizes[0].heads,
                               heads_kv=sizes[1].heads,
                               tokens_q=lengths[0],
                               tokens_kv=lengths[1],
                               dim_qk=sizes[0].dim,
                               dim_v=sizes[2].dim,
                               dtype=self.q.dtype,
                               dtype_out=self.q.dtype,
                               mask=mask,
                               window_left=left,
                               window_right=right,
                               scale=scale_of(scale),
                               total_q=totals[0],
                               total_kv=totals[1])
        self.shape_o = self.q.shape[:-1] + (sizes[2].dim, )
        # lse is [batch, heads, tokens] in every layout, without the axes that q lacks
        self.shape_lse = tuple(size for size, axis in zip(sizes[0][:3], self.axes) if axis is not None)
        self.axes_lse = (None, ) * (3 - len(self.shape_lse)) + tuple(range(len(self.shape_lse))) + (None, )

    def tensor(self, seen: View) -> Tensor:
        if len(seen.shape) != len(self.q.shape):
            raise InvalidArgument(
                f"{seen.name} has shape {list(seen.shape)}, q has {list(self.q.shape)}: they must "
                "have the same number of axes")
        return _arrays.tensor_of(seen, self.axes)

    def check(self, q: Sizes, k: Sizes, v: Sizes) -> None:
        for seen, sizes in ((self.k, k), (self.v, v)):
            same_memory(seen, self.q)
            same_dtype(seen, self.q.dtype, "q")
            expect(seen, "batch", sizes.batch, q.batch, "q")
        expect(self.k, "dim", k.dim, q.dim, "q")
        expect(self.v, "heads", v.heads, k.heads, "k")
        expect(self.v, "tokens", v.tokens, k.tokens, "k")
        if q.heads % k.heads != 0:
            raise InvalidArgument(f"k has {k.heads} heads, which does not divide the {q.heads} heads of q")

    def sequences(self, starts_q: Starts, starts_k: Starts) -> Tuple[int, List[int]]:
        """Number of sequences, and the longest on each side."""
        lengths = []
        for name, starts, seen in (("cu_seqlens_q", starts_q, self.q), ("cu_seqlens_k", starts_k, self.k)):
            if starts.total is not None and starts.total != seen.shape[0]:
                raise InvalidArgument(
                    f"{name} ends at {starts.total}, but {seen.name} has {seen.shape[0]} tokens")
            lengths.append(seen.shape[0] if starts.longest is None else starts.longest)
        if starts_q.count != starts_k.count:
            raise InvalidArgument(f"cu_seqlens_q has {starts_q.count} entries, cu_seqlens_k has "
                                  f"{starts_k.count}: they must name the same sequences")
        return starts_q.count - 1, lengths

    def array(self, name: str, array: Any, shape: Tuple[int, ...], out: bool = False) -> View:
        """One more array, which must have this shape; kept until the call is over."""
        seen = _arrays.view(name, array, out)
        self.views.append(seen)
        same_memory(seen, self.q)
        if seen.shape != shape:
            raise InvalidArgument(f"{name} has shape {list(seen.shape)}; it must be {list(shape)}")
        return seen

    def rows(self, name: str, array: Any, out: bool = False) -> Tensor:
        """lse and what is shaped like it: one fp32 number a row."""
        seen = self.array(name, array, self.shape_lse, out)
        if seen.dtype != Dtype.F32:
            raise TypeError(f"{name} is {seen.dtype.name.lower()}; it must be float32")
        return _arrays.tensor_of(seen, self.axes_lse)

    def results(self, out: Any, return_lse: bool, make: Maker) -> Tuple[Any, Any, Io]:
        """The arrays that take o and lse, made where they are not given, and attn_io for one call."""
        if out is None:
            out = make("out", self.shape_o, self.q.dtype)
        seen = self.array("out", out, self.shape_o, out=True)
        self.problem.dtype_out = seen.dtype
        lse = make("lse", self.shape_lse, Dtype.F32) if return_lse else None
        io = Io(q=self.tensors[0], k=self.tensors[1], v=self.tensors[2], o=_arrays.tensor_of(seen, self.axes))
        if lse is not None:
            io.lse = self.rows("lse", lse, out=True)
        self.give_sequences(io)
        return out, lse, io

    def give_sequences(self, io: Any) -> None:
        if self.varlen:
            io.total_q, io.total_kv = self.q.shape[0], self.k.shape[0]


def _gradient(inputs: Inputs, name: str, like: View, given: Any, accumulate: bool,
              make: Maker) -> Tuple[Any, Tensor]:
    """The array that takes a gradient, and where it lies; None and nowhere if it is not wanted."""
    if given is False:
        return None, Tensor()
    dtype = Dtype(inputs.problem.dtype_out)
    if given is None:
        if accumulate:
            raise InvalidArgument(f"accumulate adds to what {name} holds: give {name}, or {name}=False")
        given = make(name, like.shape, dtype)
    seen = inputs.array(name, given, like.shape, out=True)
    same_dtype(seen, dtype, "out")
    return given, _arrays.tensor_of(seen, inputs.axes)


def gradients_of(inputs: Inputs, dout: Any, out: Any, lse: Any, delta: Any, given: Sequence[Any],
                 accumulate: bool, make: Maker) -> Tuple[List[Any], Gradients]:
    """dq, dk and dv, made where `given` has None, and attn_gradients for one call."""
    io = Gradients(q=inputs.tensors[0], k=inputs.tensors[1], v=inputs.tensors[2], accumulate=int(accumulate))
    seen = inputs.array("dout", dout, inputs.shape_o)
    same_dtype(seen, inputs.q.dtype, "q")
    io.dout = _arrays.tensor_of(seen, inputs.axes)
    io.lse = inputs.rows("lse", lse)
    if delta is not None:
        io.delta = inputs.rows("delta", delta)
    if out is not None:
        seen = inputs.array("out", out, inputs.shape_o)
        inputs.problem.dtype_out = seen.dtype
        io.o = _arrays.tensor_of(seen, inputs.axes)
    elif delta is None:
        raise InvalidArgument("give out, or delta")
    gradients = []
    for name, like, array in zip(("dq", "dk", "dv"), (inputs.q, inputs.k, inputs.v), given):
        array, tensor = _gradient(inputs, name, like, array, accumulate, make)
        gradients.append(array)
        setattr(io, name, tensor)
    inputs.give_sequences(io)
    return gradients, io
