# SPDX-License-Identifier: Apache-2.0
"""Arrays of others, looked at in place: address, shape, strides, dtype, and which memory it is.

NumPy arrays by their own interface, anything else by DLPack (https://dmlc.github.io/dlpack/latest/). A
capsule of DLPack is borrowed, not consumed: it stays alive as long as the view does, and its own destructor
hands the memory back, whatever happens in between. Nothing is ever copied.

An array in a GPU's memory may still be being written. Its owner is told on which stream it will be read, and
makes that stream wait.
"""
import ctypes
import functools
import math
import sys
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ._errors import InvalidArgument
from ._types import Dtype, Tensor

BYTES = {Dtype.F32: 4, Dtype.F16: 2, Dtype.BF16: 2}
NUMPY_DTYPES = {np.dtype(np.float32): Dtype.F32, np.dtype(np.float16): Dtype.F16}
NAMES = {"float32": Dtype.F32, "float16": Dtype.F16, "bfloat16": Dtype.BF16}


class View(NamedTuple):
    name: str # for messages
    address: int
    shape: Tuple[int, ...]
    strides: Tuple[int, ...] # in elements
    dtype: Dtype
    writable: bool
    owner: Any # keeps the memory alive
    gpu: Optional[int] = None # in whose memory it lies; None: the host's


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class DLManagedTensor(ctypes.Structure): # before version 1
    _fields_ = [("tensor", DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


DLPACK_MAJOR = 1
DLPACK_CPU = (1, 3) # kDLCPU, and kDLCUDAHost: pinned memory of the host
DLPACK_CUDA = (2, 13) # kDLCUDA, and kDLCUDAManaged: memory that moves between host and GPU
DLPACK_DEFAULT_STREAM = 1 # CUDA's, which is 0 to CUDA itself
DLPACK_READ_ONLY, DLPACK_COPIED = 1, 2
DLPACK_DTYPES = {(2, 32): Dtype.F32, (2, 16): Dtype.F16, (4, 16): Dtype.BF16} # (code, bits)

capsule_is = ctypes.pythonapi.PyCapsule_IsValid
capsule_is.restype, capsule_is.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def dense_strides(shape: Tuple[int, ...]) -> Tuple[int, ...]:
    """Of an array without gaps, last axis fastest."""
    return tuple(math.prod(shape[axis + 1:]) for axis in range(len(shape)))


def wrong_dtype(name: str, dtype: str) -> TypeError:
    return TypeError(f"{name} is {dtype}; attn computes in float32, float16 and bfloat16: convert it first")


def view_of_numpy(name: str, shape: Tuple[int, ...], strides: Tuple[int, ...], numpy: Any,
                  writable: bool) -> View:
    """Of an array of NumPy's dtype `numpy`, aligned, with strides in bytes, wherever it lies."""
    dtype = NUMPY_DTYPES.get(numpy)
    if dtype is None:
        if numpy.name != "bfloat16" or not numpy.isnative:
            raise wrong_dtype(name, str(numpy))
        dtype = Dtype.BF16 # of ml_dtypes
    size = BYTES[dtype]
    if any(stride % size for stride in strides):
        raise InvalidArgument(f"{name} has strides {strides} in bytes: elements of {size} bytes must lie on "
                              f"multiples of {size}")
    return View(name, 0, shape, tuple(stride // size for stride in strides), dtype, writable, None)


def view_numpy(name: str, array: np.ndarray) -> View:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be ignored: give {name}.filled(...)")
    seen = view_of_numpy(name, array.shape, array.strides, array.dtype, array.flags.writeable)
    if not array.flags.aligned:
        raise InvalidArgument(
            f"{name} begins at an odd address: elements must lie on multiples of {BYTES[seen.dtype]}")
    return seen._replace(address=array.ctypes.data, owner=array)


def where(array: Any) -> Optional[int]:
    """The GPU in whose memory an array lies; None for the host's, and for what is no array."""
    device = getattr(array, "__dlpack_device__", None)
    if isinstance(array, np.ndarray) or device is None:
        return None
    kind, index = device()
    return int(index) if int(kind) in DLPACK_CUDA else None


def capsule_of(name: str, array: Any, stream: int) -> Tuple[Any, Optional[int]]:
    """The array's capsule, and its GPU."""
    kind, index = map(int, array.__dlpack_device__())
    keywords = {}
    if kind in DLPACK_CUDA:
        keywords["stream"] = stream or DLPACK_DEFAULT_STREAM
    elif kind not in DLPACK_CPU:
        raise InvalidArgument(
            f"{name} lies on device {getattr(array, 'device', (kind, index))}; attn computes on arrays in "
            "the memory of the host or of an NVIDIA GPU: copy it there first")
    gpu = index if keywords else None
    try:
        return array.__dlpack__(max_version=(DLPACK_MAJOR, 0), **keywords), gpu
    except TypeError: # an exporter that is older than versions
        return array.__dlpack__(**keywords), gpu


def read_capsule(name: str, capsule: Any) -> Tuple[DLTensor, int]:
    """The tensor that a capsule holds, and its flags."""
    if capsule_is(capsule, b"dltensor_versioned"):
        pointer = capsule_pointer(capsule, b"dltensor_versioned")
        managed = DLManagedTensorVersioned.from_address(pointer)
        if managed.major != DLPACK_MAJOR:
            raise BufferError(f"{name} speaks DLPack {managed.major}; attn knows version {DLPACK_MAJOR}")
        return managed.tensor, managed.flags
    if capsule_is(capsule, b"dltensor"):
        return DLTensor.from_address(capsule_pointer(capsule, b"dltensor")), 0
    raise BufferError(f"{name} gives a DLPack capsule of an unknown kind: {capsule!r}")


def view_dlpack(name: str, array: Any, out: bool, stream: int) -> View:
    try:
        capsule, gpu = capsule_of(name, array, stream)
    except (BufferError, RuntimeError) as error: # for example a tensor of PyTorch that requires a gradient
        raise BufferError(f"{name}: {error}") from error
    tensor, flags = read_capsule(name, capsule)
    dtype = DLPACK_DTYPES.get((tensor.code, tensor.bits))
    if dtype is None or tensor.lanes != 1:
        raise wrong_dtype(name,
                          str(getattr(array, "dtype", f"of DLPack code {tensor.code}, {tensor.bits} bits")))
    shape = tuple(tensor.shape[:tensor.ndim])
    if tensor.strides:
        strides = tuple(tensor.strides[:tensor.ndim])
    else:
        strides = dense_strides(shape)
    address = (tensor.data or 0) + tensor.byte_offset
    if address % BYTES[dtype]:
        raise InvalidArgument(
            f"{name} begins at an odd address: elements must lie on multiples of {BYTES[dtype]}")
    if out and flags & DLPACK_COPIED:
        raise BufferError(f"{name} can only be had as a copy, which cannot be written for its owner")
    return View(name, address, shape, strides, dtype, not flags & DLPACK_READ_ONLY, (capsule, array), gpu)


def view(name: str, array: Any, out: bool = False, stream: int = 0) -> View:
    """What lies in the array's memory; `out`: it is to be written. In a GPU's, on `stream`. A View stays what
    it is."""
    if isinstance(array, View):
        seen = array
    elif isinstance(array, np.ndarray):
        seen = view_numpy(name, array)
    elif hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        seen = view_dlpack(name, array, out, stream)
    else:
        raise TypeError(f"{name} is a {type(array).__name__}; give a NumPy array or one that speaks DLPack")
    if 0 in seen.shape:
        raise InvalidArgument(f"{name} has shape {list(seen.shape)}: no axis may be empty")
    if out and not seen.writable:
        raise InvalidArgument(f"{name} is read-only: give one that can be written")
    if out and any(stride == 0 and extent > 1 for stride, extent in zip(seen.strides, seen.shape)):
        raise InvalidArgument(
            f"{name} is broadcast (a stride is 0), so that its elements share memory: give one "
            "that owns them all")
    return seen


def tensor_of(seen: View, axes: Tuple[Optional[int], ...]) -> Tensor:
    """attn_tensor, whose axes batch, head, token and dim are these of the array; None: it has none."""
    strides = [0 if axis is None else seen.strides[axis] for axis in axes]
    if not any(strides):
        # All zero means contiguous to the library; the stride of an axis of one element can be anything.
        single = [i for i, axis in enumerate(axes) if axis is None or seen.shape[axis] == 1]
        if not single:
            raise InvalidArgument(
                f"{seen.name} is one element, broadcast along every axis: give a copy of it")
        strides[single[0]] = 1
    return Tensor(seen.address, (ctypes.c_int64 * 4)(*strides))


def is_torch(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def empty(shape: Tuple[int, ...], dtype: Dtype) -> Tuple[Any, int]:
    """np.empty() at the begin of a cache line, and its address: gradients whose vectors cross lines take 2 to
    10 % longer."""
    line = 64
    room = np.empty(math.prod(shape) * BYTES[dtype] + line, np.uint8)
    address = room.ctypes.data
    skip = -address % line
    return np.ndarray(shape, numpy_dtype(dtype), room, skip), address + skip


def name_of(dtype: Dtype) -> str:
    return next(name for name, value in NAMES.items() if value == dtype)


@functools.lru_cache(maxsize=None)
def torch_dtypes() -> List[Any]:
    """PyTorch's, by Dtype."""
    return [getattr(sys.modules["torch"], name_of(dtype)) for dtype in Dtype]


@functools.lru_cache(maxsize=None)
def numpy_dtype(dtype: Dtype) -> Any:
    if dtype != Dtype.BF16:
        return np.dtype(name_of(dtype))
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(
            "the result is bfloat16, which NumPy has only with the package ml_dtypes: install it, or "
            "give out=") from None
    return np.dtype(ml_dtypes.bfloat16)


class Starts(NamedTuple):
    """Where sequences begin and end in tensors that hold them one after another."""

    count: int # sequences + 1
    longest: Optional[int] # None: not known here
    total: Optional[int]


def sequence_starts(name: str, starts: Any) -> Tuple[Any, Starts]:
    """An array of int64, and what is known of it."""
    values = np.ascontiguousarray(np.asarray(starts))
    if values.ndim != 1 or values.size < 2 or values.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} must be a list of at least 2 integers: 0, and the end of each sequence")
    values = values.astype(np.int64, copy=False)
    lengths = np.diff(values)
    if values[0] != 0 or lengths.min() < 0:
        raise InvalidArgument(f"{name} must begin at 0 and never fall")
    return values, Starts(values.size, max(1, int(lengths.max())), int(values[-1]))


SCHEMES: Dict[Tuple[str, int], Tuple[Optional[int], ...]] = {
    ("bhnd", 4): (0, 1, 2, 3),
    ("bnhd", 4): (0, 2, 1, 3),
    ("bhnd", 3): (None, 0, 1, 2),
    ("bnhd", 3): (None, 1, 0, 2),
    ("bhnd", 2): (None, None, 0, 1),
    ("bnhd", 2): (None, None, 0, 1),
}
