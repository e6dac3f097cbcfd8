# SPDX-License-Identifier: Apache-2.0
"""Calls of the library, on the host or a GPU, whose making is kept.

All that depends on shapes, strides, dtypes and options alone (the checks, the problem, a GPU's plan, the
struct that the library is called with) is made once and kept: a further call looks it up, writes the addresses
into a copy of the struct and calls. On a GPU kernels are enqueued on the caller's stream and nothing is waited
for.
"""
import ctypes
import functools
import struct
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

from . import _arrays
from ._arrays import Starts, View
from ._library import LIBRARY, create_plan, failure, last_error
from ._problem import Inputs, band, count_of, gradients_of, index_of, options_of, real_of
from ._spaces import NOTHING, Signature, empty_like, is_tensor, sequences, view_of
from ._types import Device, Dtype, Gradients, Io, Options

# ---- what is kept ----


class Settings(NamedTuple):
    """Keywords of a call, all of them hashable."""

    causal: bool
    window: Any
    scale: Optional[float]
    layout: str
    threads: Optional[int]
    kernel: Optional[str]
    deterministic: bool
    memory_limit: int # 0: none


def settings_of(causal: bool, window: Any, scale: Optional[float], layout: str, threads: Optional[int],
                kernel: Optional[str], deterministic: bool, memory_limit: Optional[int] = None) -> Settings:
    if window is not None:
        window = band(causal, window)[1:] # now, since what it refuses may be no key
    if scale is not None:
        scale = real_of("scale", scale)
    if threads is not None:
        threads = index_of("threads", threads)
    return Settings(bool(causal), window, scale, str(layout), threads,
                    kernel and str(kernel), deterministic, count_of("memory_limit", memory_limit))


POINTERS = {
    Io: ("q", "k", "v", "o", "lse", "cu_seqlens_q", "cu_seqlens_kv", "stream"),
    Gradients: ("dout", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_kv",
                "stream")
}
# the structs as words of 8 bytes, and which of these are the pointers
WORDS = {kind: struct.Struct(f"{ctypes.sizeof(kind) // 8}Q") for kind in POINTERS}
PLACES = {kind: [getattr(kind, name).offset // 8 for name in names] for kind, names in POINTERS.items()}


class Prepared:
    """A call of the library but for its addresses."""

    def __init__(self, io: Any, fresh: Sequence[Optional[View]]) -> None:
        self.places = PLACES[type(io)]
        self.words, self.pack = list(WORDS[type(io)].unpack(bytes(io))), WORDS[type(io)].pack
        # the results that a call makes, None where it is given one or wants none
        self.fresh = [view and (view.shape, view.dtype) for view in fresh]
        self.like_q = False # a tensor like q serves as the first of them, and is made faster

    def run(self, space: Any, addresses: List[int]) -> None:
        words = self.words.copy()
        for place, address in zip(self.places, addresses):
            words[place] = address
        status = self.execute(space, self.pack(*words))
        if status != 0:
            raise failure(status, last_error())

    def execute(self, space: Any, io: bytes) -> int:
        raise NotImplementedError


class HostCall(Prepared):
    """Planned anew each time, since as many threads take part as OpenMP gives then."""

    def __init__(self, inputs: Inputs, io: Any, settings: Settings, fresh: Sequence[Optional[View]]) -> None:
        super().__init__(io, fresh)
        self.problem = ctypes.byref(inputs.problem)
        self.options = ctypes.byref(
            options_of(settings.threads, settings.kernel, memory_limit=settings.memory_limit))
        self.function = LIBRARY.attn_backward if isinstance(io, Gradients) else LIBRARY.attn_forward

    def execute(self, space: Any, io: bytes) -> int:
        return self.function(self.problem, io, self.options)


class GpuCall(Prepared):

    def __init__(self, inputs: Inputs, io: Any, settings: Settings, fresh: Sequence[Optional[View]]) -> None:
        super().__init__(io, fresh)
        backward = isinstance(io, Gradients)
        options = Options(device=Device.CUDA,
                          gpu=inputs.gpu,
                          in_memory=1,
                          backward=int(backward),
                          deterministic=int(settings.deterministic),
                          memory_limit=settings.memory_limit,
                          kernel=settings.kernel.encode() if settings.kernel else None)
        self.plan = create_plan(self, inputs.problem, options)
        self.function = LIBRARY.attn_execute_backward if backward else LIBRARY.attn_execute
        self.workspace = LIBRARY.attn_plan_workspace(self.plan)

    def execute(self, space: Any, io: bytes) -> int:
        memory, address = space.workspace(self.workspace) if self.workspace else (None, None)
        status = self.function(self.plan, io, address)
        del memory # until here: what is freed now is used again on this stream only, after these kernels
        return status


def prepared(inputs: Inputs, io: Any, settings: Settings, fresh: Sequence[Optional[View]]) -> Prepared:
    kind = HostCall if inputs.gpu is None else GpuCall
    return kind(inputs, io, settings, fresh)


def later(gpu: Optional[int]) -> Callable[..., View]:
    """Describes results that each call makes anew."""

    def make(name: str, shape: Tuple[int, ...], dtype: Dtype) -> View:
        return View(name, 0, shape, _arrays.dense_strides(shape), dtype, True, None, gpu)

    return make


def inputs_of(operands: Sequence[Signature], settings: Settings,
              starts: Sequence[Optional[Starts]]) -> Inputs:
    q, k, v = map(view_of, "qkv", operands)
    return Inputs(q, k, v, settings.causal, settings.window, settings.scale, settings.layout, *starts)


KEPT_CALLS = 1024


@functools.lru_cache(maxsize=KEPT_CALLS)
def prepare_forward(settings: Settings, return_lse: bool, starts_q: Optional[Starts],
                    starts_k: Optional[Starts], out: Optional[Signature], *operands: Signature) -> Prepared:
    inputs = inputs_of(operands, settings, (starts_q, starts_k))
    given = None if out is None else view_of("out", out)
    made, lse, io = inputs.results(given, return_lse, later(inputs.gpu))
    ready = prepared(inputs, io, settings, (made if given is None else None, lse))
    q, alike = inputs.q, (made.shape, made.strides, made.dtype)
    ready.like_q = is_tensor(operands[0]) and alike == (q.shape, q.strides, q.dtype)
    return ready


# of a call for gradients, as its signatures come
ARRAYS = ("dout", "q", "k", "v", "out", "lse", "delta", "dq", "dk", "dv")
Wanted = Tuple[bool, ...] # of dq, dk, dv


@functools.lru_cache(maxsize=KEPT_CALLS)
def prepare_backward(settings: Settings, accumulate: bool, wanted: Wanted, starts_q: Optional[Starts],
                     starts_k: Optional[Starts], *signatures: Optional[Signature]) -> Prepared:
    views = [signature and view_of(name, signature) for name, signature in zip(ARRAYS, signatures)]
    inputs = inputs_of(signatures[1:4], settings, (starts_q, starts_k))
    given = [view if want else False for want, view in zip(wanted, views[7:])]
    made, io = gradients_of(inputs, views[0], *views[4:7], given, accumulate, later(inputs.gpu))
    return prepared(inputs, io, settings,
                    [view if before is None else None for view, before in zip(made, given)])


# ---- the calls ----


NO_LISTS = [(None, 0, None)] * 2


def lists_of(space: Any, starts: Sequence[Any], longest: Sequence[Optional[int]]) -> List[Any]:
    """cu_seqlens_q and cu_seqlens_k, as sequences() sees them."""
    if starts[0] is None and starts[1] is None:
        return NO_LISTS
    return [
        sequences(space, f"cu_seqlens_{side}", array, most)
        for side, array, most in zip("qk", starts, longest)
    ]


def forward(space: Any, q: Any, k: Any, v: Any, out: Any, return_lse: bool, starts: Sequence[Any],
            longest: Sequence[Optional[int]], settings: Settings) -> Tuple[Any, Any]:
    """(out, lse)"""
    seen = [space.look("q", q), space.look("k", k), space.look("v", v)]
    seen_out = NOTHING if out is None else space.look("out", out, True)
    lists = lists_of(space, starts, longest)
    ready = prepare_forward(settings, return_lse, lists[0][0], lists[1][0], seen_out[0], seen[0][0],
                            seen[1][0], seen[2][0])
    made, lse = ready.fresh
    address, lse_address, rows = seen_out[1], 0, None
    if made is not None:
        out, address = empty_like(q) if ready.like_q else space.empty(*made)
    if lse is not None:
        rows, lse_address = space.empty(*lse)
    ready.run(
        space,
        [seen[0][1], seen[1][1], seen[2][1], address, lse_address, lists[0][1], lists[1][1], space.stream])
    return out, rows


def backward(space: Any, arrays: Sequence[Any], results: Sequence[Any], accumulate: bool,
             starts: Sequence[Any], longest: Sequence[Optional[int]], settings: Settings) -> List[Any]:
    """[dq, dk, dv]; arrays: dout, q, k, v, out, lse, delta. results: an array, None to make one, False."""
    seen = [
        NOTHING if array is None or array is False else space.look(name, array, i >= 7)
        for i, (name, array) in enumerate(zip(ARRAYS, (*arrays, *results)))
    ]
    lists = lists_of(space, starts, longest)
    wanted = tuple(result is not False for result in results)
    ready = prepare_backward(settings, accumulate, wanted, lists[0][0], lists[1][0],
                             *[one[0] for one in seen])
    addresses = [one[1] for one in seen]
    given = [None if result is False else result for result in results]
    for i, made in enumerate(ready.fresh):
        if made is not None:
            given[i], addresses[7 + i] = space.empty(*made)
    ready.run(space, [*addresses, lists[0][1], lists[1][1], space.stream])
    return given
