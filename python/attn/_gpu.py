# SPDX-License-Identifier: Apache-2.0
"""Attention on arrays in a GPU's memory: kernels are enqueued on the caller's stream, nothing is waited for.

All that depends on shapes, strides, dtypes and options alone (the checks, the plan, the struct that the
library is called with) is made once and kept: a further call looks it up, writes the addresses into a copy of
the struct and executes the plan. Tensors of PyTorch are looked at directly, since its DLPack costs several
times as much as all of this; everything else by DLPack.
"""
import ctypes
import functools
import sys
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import _arrays
from ._arrays import NAMES, Starts, View
from ._errors import InvalidArgument
from ._gpu_array import GpuArray, Memory
from ._library import LIBRARY, call, create_plan, failure, last_error
from ._problem import Inputs, gradients_of
from ._types import Device, Dtype, Gradients, Io, Options

# What a plan depends on in an array: shape, strides, dtype, GPU, and whether it may be written; or of a
# tensor of PyTorch, with its own dtype, whether it requires a gradient.
Signature = Tuple[Tuple[int, ...], Tuple[int, ...], Any, Optional[int], bool]
Seen = Tuple[Optional[Signature], int, Any] # with the address, and what keeps the memory alive
NOTHING: Seen = (None, 0, None)


def seen_by_dlpack(name: str, array: Any, out: bool, stream: int) -> Seen:
    view = _arrays.view(name, array, out, stream)
    return (view.shape, view.strides, view.dtype, view.gpu, view.writable), view.address, view


def view_of(name: str, signature: Signature) -> View:
    """An array as far as it can be judged without its address."""
    shape, strides, dtype, gpu, flag = signature
    if isinstance(dtype, Dtype):
        return View(name, 0, shape, strides, dtype, flag, None, gpu)
    if flag:
        raise BufferError(f"{name} requires a gradient: use attn.torch.attention, or {name}.detach()")
    known = NAMES.get(str(dtype)[len("torch."):])
    if known is None:
        raise _arrays.wrong_dtype(name, str(dtype))
    return View(name, 0, tuple(shape), strides, known, True, None, gpu)


@functools.lru_cache(maxsize=None)
def current_stream() -> Callable[[int], int]:
    """PyTorch's function that gives the handle of a GPU's current stream."""
    cuda = sys.modules["torch"].cuda
    # the public one makes an object, which takes longer than all that is checked in a call
    quick = getattr(sys.modules["torch"]._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda gpu: cuda.current_stream(gpu).cuda_stream)


class TorchSpace:
    """PyTorch: memory from its allocator, which knows of graphs being captured; its current stream."""

    def __init__(self, device: Any) -> None:
        self.torch = sys.modules["torch"]
        self.device, self.gpu = device, device.index
        self.stream = current_stream()(self.gpu)

    def look(self, name: str, array: Any, out: bool = False) -> Seen:
        if isinstance(array, self.torch.Tensor) and array.is_cuda:
            return ((array.shape, array.stride(), array.dtype, array.device.index, array.requires_grad),
                    array.data_ptr(), array)
        return seen_by_dlpack(name, array, out, self.stream)

    def empty(self, shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
        array = self.torch.empty(shape, dtype=torch_dtype(dtype), device=self.device)
        return array, array.data_ptr()

    def workspace(self, size: int) -> Tuple[Any, int]:
        array = self.torch.empty(size, dtype=self.torch.uint8, device=self.device)
        return array, array.data_ptr()

    def upload(self, values: Any) -> Tuple[Any, int]:
        array = self.torch.from_numpy(values).to(self.device)
        return array, array.data_ptr()

    def starts(self, name: str, array: Any) -> Tuple[Any, int, Tuple[int, ...]]:
        if not isinstance(array, self.torch.Tensor):
            return starts_by_dlpack(name, array, self)
        if array.device != self.device or array.dtype not in (self.torch.int64, self.torch.int32):
            raise wrong_starts(name, f"{array.dtype} on {array.device}", self.gpu)
        array = array.to(self.torch.int64).contiguous()
        return array, array.data_ptr(), tuple(array.shape)


class PlainSpace:
    """Any other library: memory from the driver; the stream that the caller names, else CUDA's default."""

    # workspace by GPU and stream, which puts its uses in order
    KEPT: Dict[Tuple[int, int], Tuple[int, Memory]] = {}

    def __init__(self, gpu: int, stream: int) -> None:
        self.gpu, self.stream = gpu, stream

    def look(self, name: str, array: Any, out: bool = False) -> Seen:
        return seen_by_dlpack(name, array, out, self.stream)

    def empty(self, shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
        array = GpuArray(shape, dtype, self.gpu, self.stream)
        return array, array.address

    def workspace(self, size: int) -> Tuple[Any, int]:
        kept = self.KEPT.get((self.gpu, self.stream))
        if kept is None or kept[0] < size:
            kept = self.KEPT[self.gpu, self.stream] = size, Memory(self.gpu, size)
        return kept[1], kept[1].address

    def upload(self, values: Any) -> Tuple[Any, int]:
        memory = Memory(self.gpu, values.nbytes)
        call("attn_cuda_copy", self.gpu, memory.address, values.ctypes.data, values.nbytes, self.stream)
        return memory, memory.address

    def starts(self, name: str, array: Any) -> Tuple[Any, int, Tuple[int, ...]]:
        return starts_by_dlpack(name, array, self)


@functools.lru_cache(maxsize=None)
def torch_dtype(dtype: Dtype) -> Any:
    return getattr(sys.modules["torch"], next(name for name, value in NAMES.items() if value == dtype))


def space_of(q: Any, stream: Optional[int]) -> Any:
    """Where to compute: the space of q, or None for the CPU."""
    if _arrays.is_torch(q):
        if q.is_cuda and stream is None:
            return TorchSpace(q.device)
        if q.is_cuda:
            raise InvalidArgument(
                "stream: tensors of PyTorch are computed on its current stream; leave it out, "
                "and call within torch.cuda.stream(...)")
    gpu = _arrays.where(q)
    if gpu is not None:
        return PlainSpace(gpu, stream or 0)
    if stream is not None:
        raise InvalidArgument("stream is for arrays in a GPU's memory; q lies in the host's")
    return None


# ---- sequences of unequal length ----


def wrong_starts(name: str, found: str, gpu: int) -> InvalidArgument:
    return InvalidArgument(
        f"{name} is {found}; give a list, or a dense array of int64 in the memory of GPU {gpu}")


def starts_by_dlpack(name: str, array: Any, space: Any) -> Tuple[Any, int, Tuple[int, ...]]:
    capsule, gpu = _arrays.capsule_of(name, array, space.stream)
    tensor, _ = _arrays.read_capsule(name, capsule)
    shape = tuple(tensor.shape[:tensor.ndim])
    if (tensor.code, tensor.bits, tensor.lanes, gpu) != (0, 64, 1, space.gpu) or (tensor.strides and
                                                                                  tensor.strides[0] != 1):
        raise wrong_starts(name, f"of DLPack code {tensor.code}, {tensor.bits} bits, on GPU {gpu}", space.gpu)
    return (capsule, array), (tensor.data or 0) + tensor.byte_offset, shape


def sequences(space: Any, name: str, array: Any, longest: Optional[int]) -> Tuple[Optional[Starts], int, Any]:
    """What is known of the sequences here, their list's address on the GPU, and what keeps it alive."""
    if array is None:
        return None, 0, None
    on_gpu = array.is_cuda if _arrays.is_torch(array) else _arrays.where(array) is not None
    if not on_gpu:
        starts = _arrays.sequence_starts(name, array)
        keep, address = space.upload(starts.values)
        return starts._replace(values=None), address, keep
    keep, address, shape = space.starts(name, array)
    if len(shape) != 1 or shape[0] < 2:
        raise InvalidArgument(
            f"{name} has shape {list(shape)}; give at least 2 numbers: 0, and the end of each sequence")
    return Starts(None, shape[0], longest, None), address, keep


# ---- what is kept ----


class Settings(NamedTuple):
    """Keywords of a call, all of them hashable."""

    causal: bool
    window: Any
    scale: Optional[float]
    layout: str
    kernel: Optional[str]
    deterministic: bool


def settings_of(causal: bool, window: Any, scale: Optional[float], layout: str, kernel: Optional[str],
                deterministic: bool) -> Settings:
    window = tuple(window) if isinstance(window, list) else window
    return Settings(causal, window, scale, layout, kernel, deterministic)


POINTERS = {
    Io: ("q", "k", "v", "o", "lse", "cu_seqlens_q", "cu_seqlens_kv", "stream"),
    Gradients: ("dout", "q", "k", "v", "o", "lse", "delta", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_kv",
                "stream")
}
# the structs as words of 8 bytes, and which of these are the pointers
WORDS = {kind: ctypes.c_uint64 * (ctypes.sizeof(kind) // 8) for kind in POINTERS}
PLACES = {kind: [getattr(kind, name).offset // 8 for name in names] for kind, names in POINTERS.items()}


class Prepared:
    """A call of the library but for its addresses."""

    def __init__(self, inputs: Inputs, io: Any, settings: Settings, fresh: Sequence[Optional[View]]) -> None:
        self.kind = type(io)
        backward = self.kind is Gradients
        options = Options(device=Device.CUDA,
                          gpu=inputs.gpu,
                          in_memory=1,
                          backward=int(backward),
                          deterministic=int(settings.deterministic),
                          kernel=settings.kernel.encode() if settings.kernel else None)
        self.plan = create_plan(self, inputs.problem, options)
        self.io, self.words, self.places = bytes(io), WORDS[self.kind], PLACES[self.kind]
        self.function = LIBRARY.attn_execute_backward if backward else LIBRARY.attn_execute
        self.workspace = LIBRARY.attn_plan_workspace(self.plan)
        # the results that a call makes, None where it is given one or wants none
        self.fresh = [view and (view.shape, view.dtype) for view in fresh]

    def run(self, space: Any, addresses: List[int]) -> None:
        words = self.words.from_buffer_copy(self.io)
        for place, address in zip(self.places, addresses):
            words[place] = address
        io = self.kind.from_buffer(words)
        memory, address = space.workspace(self.workspace) if self.workspace else (None, None)
        status = self.function(self.plan, ctypes.byref(io), address)
        if status != 0:
            raise failure(status, last_error())
        del memory # until here: what is freed now is used again on this stream only, after these kernels


def maker(gpu: int) -> Callable[..., View]:
    """Makes results that are not there yet."""

    def make(name: str, shape: Tuple[int, ...], dtype: Dtype) -> View:
        return View(name, 0, shape, _arrays.dense_strides(shape), dtype, True, None, gpu)

    return make


def inputs_of(operands: Sequence[Signature], settings: Settings,
              starts: Sequence[Optional[Starts]]) -> Inputs:
    q, k, v = map(view_of, "qkv", operands)
    return Inputs(q, k, v, settings.causal, settings.window, settings.scale, settings.layout, *starts)


KEPT_PLANS = 1024


@functools.lru_cache(maxsize=KEPT_PLANS)
def prepare_forward(settings: Settings, return_lse: bool, starts_q: Optional[Starts],
                    starts_k: Optional[Starts], out: Optional[Signature], *operands: Signature) -> Prepared:
    inputs = inputs_of(operands, settings, (starts_q, starts_k))
    given = None if out is None else view_of("out", out)
    made, lse, io = inputs.results(given, return_lse, maker(operands[0][3]))
    return Prepared(inputs, io, settings, (made if given is None else None, lse))


@functools.lru_cache(maxsize=KEPT_PLANS)
def prepare_backward(settings: Settings, accumulate: bool, wanted: Tuple[bool,
                                                                         ...], starts_q: Optional[Starts],
                     starts_k: Optional[Starts], *signatures: Optional[Signature]) -> Prepared:
    names = POINTERS[Gradients]
    views = [
        signature and view_of(names[i] if i != 4 else "out", signature)
        for i, signature in enumerate(signatures)
    ]
    dout, q, k, v, out, lse, delta = signatures[:7]
    inputs = inputs_of((q, k, v), settings, (starts_q, starts_k))
    given = [view if want else False for want, view in zip(wanted, views[7:])]
    made, io = gradients_of(inputs, views[0], *views[4:7], given, accumulate, maker(q[3]))
    return Prepared(inputs, io, settings,
                    [view if before is None else None for view, before in zip(made, given)])


# ---- the calls ----


def forward(space: Any, q: Any, k: Any, v: Any, out: Any, return_lse: bool, starts: Sequence[Any],
            longest: Sequence[Optional[int]], settings: Settings) -> Tuple[Any, Any]:
    """(out, lse)"""
    seen = [space.look("q", q), space.look("k", k), space.look("v", v)]
    seen_out = NOTHING if out is None else space.look("out", out, True)
    lists = [
        sequences(space, f"cu_seqlens_{side}", array, most)
        for side, array, most in zip("qk", starts, longest)
    ]
    prepared = prepare_forward(settings, return_lse, lists[0][0], lists[1][0], seen_out[0], seen[0][0],
                               seen[1][0], seen[2][0])
    made, lse = prepared.fresh
    address, lse_address, rows = seen_out[1], 0, None
    if made is not None:
        out, address = space.empty(*made)
    if lse is not None:
        rows, lse_address = space.empty(*lse)
    prepared.run(
        space,
        [seen[0][1], seen[1][1], seen[2][1], address, lse_address, lists[0][1], lists[1][1], space.stream])
    return out, rows


def backward(space: Any, arrays: Sequence[Any], results: Sequence[Any], accumulate: bool,
             starts: Sequence[Any], longest: Sequence[Optional[int]], settings: Settings) -> List[Any]:
    """[dq, dk, dv]; arrays: dout, q, k, v, out, lse, delta. results: an array, None to make one, False."""
    names = ("dout", "q", "k", "v", "out", "lse", "delta", "dq", "dk", "dv")
    seen = [
        NOTHING if array is None or array is False else space.look(name, array, i >= 7)
        for i, (name, array) in enumerate(zip(names, (*arrays, *results)))
    ]
    lists = [
        sequences(space, f"cu_seqlens_{side}", array, most)
        for side, array, most in zip("qk", starts, longest)
    ]
    wanted = tuple(result is not False for result in results)
    prepared = prepare_backward(settings, accumulate, wanted, lists[0][0], lists[1][0],
                                *[one[0] for one in seen])
    addresses = [one[1] for one in seen]
    given = [None if result is False else result for result in results]
    for i, made in enumerate(prepared.fresh):
        if made is not None:
            given[i], addresses[7 + i] = space.empty(*made)
    prepared.run(space, [*addresses, lists[0][1], lists[1][1], space.stream])
    return given
