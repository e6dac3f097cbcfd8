# SPDX-License-Identifier: Apache-2.0
"""Where a call computes: how arrays are looked at there, and where its results and workspace come from.

Tensors of PyTorch are looked at directly, since its DLPack costs several times as much as all else that a call
does here; everything else by DLPack or NumPy's own interface.
"""
import functools
import sys
import threading
from typing import Any, Callable, Dict, Optional, Tuple

import numpy as np

from . import _arrays
from ._arrays import NAMES, Starts, View
from ._errors import InvalidArgument
from ._gpu_array import GpuArray, Memory
from ._library import call
from ._types import Dtype

# What a plan depends on in an array: shape, strides, dtype, GPU, and whether it may be written. Of an array
# of NumPy with its own dtype and strides in bytes; of a tensor of PyTorch with its own dtype and, last, whether
# it requires a gradient.
Signature = Tuple[Tuple[int, ...], Tuple[int, ...], Any, Optional[int], bool]
Seen = Tuple[Optional[Signature], int, Any] # with the address, and what keeps the memory alive
NOTHING: Seen = (None, 0, None)


def seen_by_dlpack(name: str, array: Any, out: bool, stream: int) -> Seen:
    view = _arrays.view(name, array, out, stream)
    return (view.shape, view.strides, view.dtype, view.gpu, view.writable), view.address, view


def seen_tensor(name: str, tensor: Any, gpu: Optional[int]) -> Seen:
    if tensor.is_neg():
        raise BufferError(f"{name} is a view that negates what lies in memory: give {name}.resolve_neg()")
    return ((tensor.shape, tensor.stride(), tensor.dtype, gpu, tensor.requires_grad), tensor.data_ptr(), tensor)


def is_tensor(signature: Signature) -> bool:
    """A tensor's of PyTorch, looked at directly?"""
    return not isinstance(signature[2], (Dtype, np.dtype))


def empty_like(tensor: Any) -> Tuple[Any, int]:
    """With the tensor's shape, strides (if dense), dtype and place; and its address."""
    array = sys.modules["torch"].empty_like(tensor)
    return array, array.data_ptr()


def view_of(name: str, signature: Signature) -> View:
    """An array as far as it can be judged without its address."""
    shape, strides, dtype, gpu, flag = signature
    if isinstance(dtype, Dtype):
        return View(name, 0, shape, strides, dtype, flag, None, gpu)
    if isinstance(dtype, np.dtype):
        return _arrays.view_of_numpy(name, shape, strides, dtype, flag)
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


class HostSpace:
    """The host's memory; results are NumPy arrays."""

    gpu, stream = None, 0

    def look(self, name: str, array: Any, out: bool = False) -> Seen:
        if type(array) is np.ndarray and array.flags.aligned:
            writable = array.flags.writeable
            return (array.shape, array.strides, array.dtype, None, writable), array.ctypes.data, array
        return seen_by_dlpack(name, array, out, self.stream)

    def empty(self, shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
        return _arrays.empty(shape, dtype)

    def make(self, _name: str, shape: Tuple[int, ...], dtype: Dtype) -> Any:
        return self.empty(shape, dtype)[0]

    def upload(self, values: Any) -> Tuple[Any, int]:
        return values, values.ctypes.data # they are there

    def starts(self, name: str, array: Any) -> Tuple[Any, int, Tuple[int, ...]]:
        raise InvalidArgument(f"{name} lies in a GPU's memory, q in the host's: give a list")


class TorchHostSpace(HostSpace):
    """The host's memory; results are tensors of PyTorch, as q is."""

    def __init__(self) -> None:
        self.torch = sys.modules["torch"]
        self.tensor, self.strided = self.torch.Tensor, self.torch.strided

    def look(self, name: str, array: Any, out: bool = False) -> Seen:
        if isinstance(array, self.tensor) and array.is_cpu and array.layout is self.strided:
            seen = seen_tensor(name, array, None)
            if seen[1] % 4 == 0: # aligned for any dtype; whether for its own is asked where that is not sure
                return seen
        return HostSpace.look(self, name, array, out)

    def empty(self, shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
        array = self.torch.empty(shape, dtype=_arrays.torch_dtypes()[dtype])
        return array, array.data_ptr()


class TorchSpace:
    """PyTorch: memory from its allocator, which knows of graphs being captured; its current stream."""

    def __init__(self, device: Any) -> None:
        self.torch = sys.modules["torch"]
        self.device, self.gpu = device, device.index
        self.stream = current_stream()(self.gpu)

    def look(self, name: str, array: Any, out: bool = False) -> Seen:
        if isinstance(array, self.torch.Tensor) and array.is_cuda:
            return seen_tensor(name, array, array.device.index)
        return seen_by_dlpack(name, array, out, self.stream)

    def empty(self, shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
        array = self.torch.empty(shape, dtype=_arrays.torch_dtypes()[dtype], device=self.device)
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

    # workspace by thread, GPU and stream, which puts its uses in order; not those of several threads, since a
    # call enqueues several kernels and those of two calls may come in between
    KEPT = threading.local()

    def __init__(self, gpu: int, stream: int) -> None:
        self.gpu, self.stream = gpu, stream

    def look(self, name: str, array: Any, out: bool = False) -> Seen:
        return seen_by_dlpack(name, array, out, self.stream)

    def empty(self, shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
        array = GpuArray(shape, dtype, self.gpu, self.stream)
        return array, array.address

    def workspace(self, size: int) -> Tuple[Any, int]:
        spaces: Dict[Tuple[int, int], Tuple[int, Memory]] = self.KEPT.__dict__.setdefault("spaces", {})
        kept = spaces.get((self.gpu, self.stream))
        if kept is None or kept[0] < size:
            kept = spaces[self.gpu, self.stream] = size, Memory(self.gpu, size)
        return kept[1], kept[1].address

    def upload(self, values: Any) -> Tuple[Any, int]:
        memory = Memory(self.gpu, values.nbytes)
        call("attn_cuda_copy", self.gpu, memory.address, values.ctypes.data, values.nbytes, self.stream)
        return memory, memory.address

    def starts(self, name: str, array: Any) -> Tuple[Any, int, Tuple[int, ...]]:
        return starts_by_dlpack(name, array, self)


HOST = HostSpace()


@functools.lru_cache(maxsize=None)
def torch_host() -> TorchHostSpace:
    return TorchHostSpace()


def host_space(q: Any) -> HostSpace:
    return torch_host() if _arrays.is_torch(q) else HOST


def space_of(q: Any, stream: Optional[int]) -> Any:
    """Where to compute: the space of q."""
    if _arrays.is_torch(q):
        if stream is None and q.is_cpu:
            return torch_host()
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
    return host_space(q)


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
    """What is known of the sequences here, the address of their list there, and what keeps it alive."""
    if array is None:
        return None, 0, None
    on_gpu = array.is_cuda if _arrays.is_torch(array) else _arrays.where(array) is not None
    if not on_gpu:
        values, starts = _arrays.sequence_starts(name, array)
        keep, address = space.upload(values)
        return starts, address, keep
    keep, address, shape = space.starts(name, array)
    if len(shape) != 1 or shape[0] < 2:
        raise InvalidArgument(
            f"{name} has shape {list(shape)}; give at least 2 numbers: 0, and the end of each sequence")
    return Starts(shape[0], longest, None), address, keep


