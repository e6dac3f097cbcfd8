# SPDX-License-Identifier: Apache-2.0
"""Results in a GPU's memory, for callers whose library is not PyTorch: they take them by DLPack."""
import ctypes
import sys
import weakref
from typing import Any, Dict, Optional, Tuple

from ._arrays import (BYTES, DLPACK_CUDA, DLPACK_DEFAULT_STREAM, DLPACK_DTYPES, DLPACK_MAJOR,
                      DLManagedTensor, DLManagedTensorVersioned, DLTensor, dense_strides, name_of)
from ._library import LIBRARY, call
from ._types import Dtype


class Memory:
    """Bytes of a GPU's memory. They are free again when nobody has this object and no kernel uses them."""

    def __init__(self, gpu: int, size: int) -> None:
        pointer = ctypes.c_void_p()
        call("attn_cuda_alloc", gpu, ctypes.byref(pointer), max(1, size))
        self.address = pointer.value or 0
        weakref.finalize(self, LIBRARY.attn_cuda_free, gpu, self.address)


# What a capsule points to, by its address, until its consumer gives it back.
EXPORTED: Dict[int, Tuple[Any, ...]] = {}
# The capsules that may not have been consumed yet, by the same addresses.
PENDING: Dict[int, Any] = {}
CAPSULE_NAMES = b"dltensor_versioned", b"dltensor"

capsule_is = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object,
                               ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
Callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p,
                                ctypes.c_void_p)(("PyCapsule_New", ctypes.pythonapi))


@Callback
def deleter(address: int) -> None:
    EXPORTED.pop(address, None)


def sweep() -> None:
    """Takes back what lies in capsules that only PENDING has any more.

    One that was consumed has another name, and its consumer calls the deleter. Capsules have no destructor: a
    consumer that refuses one destroys it while its exception is on the way, when no Python code may run.
    """
    for address in list(PENDING):
        # another thread may be here, too, and have taken it out
        consumed = not any(capsule_is(PENDING.get(address), name) for name in CAPSULE_NAMES)
        alone = sys.getrefcount(PENDING.get(address)) <= 2 # PENDING and the argument
        if consumed or alone:
            PENDING.pop(address, None)
        if alone and not consumed:
            EXPORTED.pop(address, None)


class GpuArray:
    """A dense array in a GPU's memory, to be taken over by DLPack: cupy.from_dlpack(array)."""

    def __init__(self, shape: Tuple[int, ...], dtype: Dtype, gpu: int, stream: int) -> None:
        self.shape, self.gpu, self._dtype, self._stream = shape, gpu, dtype, stream
        self._memory = Memory(gpu, dense_strides((1, *shape))[0] * BYTES[dtype])
        weakref.finalize(self, sweep)

    def __repr__(self) -> str:
        return f"<attn.GpuArray {list(self.shape)} {self.dtype}, GPU {self.gpu}>"

    @property
    def dtype(self) -> str:
        return name_of(self._dtype)

    @property
    def address(self) -> int:
        return self._memory.address

    def __dlpack_device__(self) -> Tuple[int, int]:
        return DLPACK_CUDA[0], self.gpu

    def __dlpack__(self,
                   *,
                   stream: Optional[int] = None,
                   max_version: Optional[Tuple[int, int]] = None,
                   dl_device: Optional[Tuple[int, int]] = None,
                   copy: Optional[bool] = None) -> Any:
        """A capsule; where the consumer's stream is another one, after a wait for what computes the array."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this array is given away in its place: ask for no copy and no other device")
        reader = 0 if stream in (None, DLPACK_DEFAULT_STREAM) else stream
        if reader not in (-1, self._stream):
            call("attn_cuda_wait", self.gpu, self._stream)
        return self._capsule(max_version is not None and max_version[0] >= DLPACK_MAJOR)

    def _capsule(self, versioned: bool) -> Any:
        rank = len(self.shape)
        shape, strides = (
            (ctypes.c_int64 * rank)(*numbers) for numbers in (self.shape, dense_strides(self.shape)))
        code, bits = next(key for key, value in DLPACK_DTYPES.items() if value == self._dtype)
        tensor = DLTensor(data=self.address,
                          device_type=DLPACK_CUDA[0],
                          device_id=self.gpu,
                          ndim=rank,
                          code=code,
                          bits=bits,
                          lanes=1,
                          shape=shape,
                          strides=strides)
        back = ctypes.cast(deleter, ctypes.c_void_p)
        managed = (DLManagedTensorVersioned(major=DLPACK_MAJOR, deleter=back, tensor=tensor)
                   if versioned else DLManagedTensor(tensor=tensor, deleter=back))
        address = ctypes.addressof(managed)
        sweep()
        EXPORTED[address] = (managed, shape, strides, self._memory)
        PENDING[address] = new_capsule(address, CAPSULE_NAMES[0 if versioned else 1], None)
        return PENDING[address]
