# SPDX-License-Identifier: Apache-2.0
"""Arrays by DLPack: in place, handed back once, refused where they must be."""
import ctypes
import gc
import sys

import attn
import numpy as np
import pytest
from attn import _arrays
from reference import ROUNDED_WEIGHTS, Reference

Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, Destructor]


EXPORTERS = [] # a capsule in a cycle of garbage must not outlive what it points to


class Exporter:
    """An array that can be had by DLPack only, as an exporter of this kind would give it."""

    def __init__(self, array, versioned=True, major=1, flags=0, device=1, code=2, dense=False, name=None,
                 poisoned=False):
        self.array, self.versioned, self.major, self.flags = array, versioned, major, flags
        self.device, self.poisoned = device, poisoned
        self.code, self.dense, self.name, self.deleted = code, dense, name, 0
        self.destructor = Destructor(self.delete)
        EXPORTERS.append(self)

    def delete(self, _capsule):
        """From now on the memory may be anything."""
        self.deleted += 1
        if self.poisoned:
            self.array[...] = np.nan

    def __dlpack_device__(self):
        return (self.device, 0)

    def __dlpack__(self, **keywords):
        if not self.versioned and "max_version" in keywords:
            raise TypeError("unexpected keyword")
        array, item = self.array, self.array.itemsize
        self.shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self.strides = (ctypes.c_int64 * array.ndim)(*(stride // item for stride in array.strides))
        tensor = _arrays.DLTensor(data=array.ctypes.data - 64,
                                  device_type=self.device,
                                  ndim=array.ndim,
                                  code=self.code,
                                  bits=8 * item,
                                  lanes=1,
                                  shape=self.shape,
                                  byte_offset=64,
                                  strides=None if self.dense else self.strides)
        if self.versioned:
            self.managed = _arrays.DLManagedTensorVersioned(major=self.major, flags=self.flags, tensor=tensor)
        else:
            self.managed = _arrays.DLManagedTensor(tensor=tensor)
        name = self.name or (b"dltensor_versioned" if self.versioned else b"dltensor")
        return new_capsule(ctypes.addressof(self.managed), name, self.destructor)


@pytest.fixture
def qkv(random):
    return [random.standard_normal((2, 3, 9, 8), np.float32).swapaxes(1, 2) for _ in range(3)]


@pytest.mark.parametrize("versioned", [True, False])
def test_in_place_and_handed_back(qkv, versioned):
    reference = Reference(*qkv)
    exporters = [Exporter(x.copy(), versioned, poisoned=True) for x in qkv]
    memory = np.full((2, 9, 3, 8), np.nan, np.float32)
    out = Exporter(memory, versioned, dense=True)
    assert attn.attention(*exporters, out=out) is out
    reference.check(memory)
    gc.collect()
    assert [x.deleted for x in exporters] == [1, 1, 1]
    assert out.deleted == 1
    assert isinstance(attn.attention(*(Exporter(x) for x in qkv)), np.ndarray)


def test_all_memory_is_held_until_the_end(qkv, monkeypatch):
    """No capsule of any array is let go before the library has returned."""
    arrays, execute = {}, attn._calls.HostCall.execute

    def hook(*arguments):
        gc.collect()
        assert arrays and not any(x.deleted for x in arrays.values())
        return execute(*arguments)

    def exporters(**named):
        arrays.clear()
        arrays.update((name, Exporter(x)) for name, x in named.items())
        return arrays

    monkeypatch.setattr(attn._calls.HostCall, "execute", hook)
    out, lse = attn.attention(**exporters(q=qkv[0], k=qkv[1], v=qkv[2], out=np.zeros_like(qkv[0])),
                              return_lse=True)
    delta = np.zeros_like(lse)
    attn.attention_backward(**exporters(dout=qkv[0], q=qkv[0], k=qkv[1], v=qkv[2], out=out.array, lse=lse,
                                        delta=delta, dq=np.zeros_like(qkv[0]), dk=np.zeros_like(qkv[1]),
                                        dv=np.zeros_like(qkv[2])))
    gc.collect()
    assert all(x.deleted == 1 for x in arrays.values())


def test_handed_back_after_an_error(qkv):
    q = Exporter(qkv[0])
    with pytest.raises(ValueError, match="no kernel"):
        attn.attention(q, *qkv[1:], kernel="x")
    gc.collect()
    assert q.deleted == 1


def test_numpy_capsules(qkv):
    """NumPy's own exporter, behind an object that is no ndarray."""

    class Wrapper:

        def __init__(self, array):
            self.array, self.__dlpack_device__ = array, array.__dlpack_device__

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

        def __dlpack__(self, **keywords):
            return self.array.__dlpack__(**keywords)

    before = [sys.getrefcount(x) for x in qkv]
    Reference(*qkv).check(attn.attention(*(Wrapper(x) for x in qkv)))
    gc.collect()
    assert [sys.getrefcount(x) for x in qkv] == before


def test_refused(qkv):
    q, k, v = qkv
    out = np.zeros_like(q)
    odd = np.zeros(q.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(q.shape)
    refused = (
        (Exporter(q, device=4), ValueError, "q lies on device"),
        (Exporter(odd), ValueError, "q begins at an odd address"),
        (Exporter(q, major=2), BufferError, "q speaks DLPack 2"),
        (Exporter(q, name=b"used_dltensor"), BufferError, "unknown kind"),
        (Exporter(q, code=1), TypeError, "q is of DLPack code 1, 32 bits"),
        (Exporter(q.astype(np.float64)), TypeError, "of DLPack code 2, 64 bits"),
    )
    for exporter, kind, text in refused:
        with pytest.raises(kind, match=text):
            attn.attention(exporter, k, v)
    with pytest.raises(ValueError, match="out is read-only"):
        attn.attention(q, k, v, out=Exporter(out, flags=_arrays.DLPACK_READ_ONLY))
    with pytest.raises(BufferError, match="out can only be had as a copy"):
        attn.attention(q, k, v, out=Exporter(out, flags=_arrays.DLPACK_COPIED))
    Reference(q, k, v).check(attn.attention(Exporter(q, flags=_arrays.DLPACK_READ_ONLY), k, v))


def test_bfloat16_without_a_dtype_for_it(qkv, monkeypatch):
    """bf16 from an exporter that is no PyTorch: NumPy has no dtype for the result, but out= does."""
    _arrays.numpy_dtype.cache_clear() # another test may have found it
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    bits = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in qkv]
    values = [(x.astype(np.uint32) << 16).view(np.float32) for x in bits]
    exporters = [Exporter(x, code=4) for x in bits]
    with pytest.raises(TypeError, match="install it, or give out="):
        attn.attention(*exporters)
    Reference(*values, rounding=ROUNDED_WEIGHTS).check(attn.attention(*exporters, out=np.zeros_like(qkv[0])))
