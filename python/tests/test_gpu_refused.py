# SPDX-License-Identifier: Apache-2.0
"""Arrays in a GPU's memory where there is none, or beside others: clear before any kernel is asked for."""
import ctypes
import gc

import attn
import numpy as np
import pytest
from attn import _calls, _gpu_array
from test_dlpack import Exporter


@pytest.fixture
def qkv(random):
    return [random.standard_normal((2, 3, 9, 8), np.float32) for _ in range(3)]


class OnGpu(Exporter):
    """Says that it lies on a GPU; keeps what it was asked with."""

    def __init__(self, array, **keywords):
        super().__init__(array, device=2, **keywords)
        self.asked = []

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        return super().__dlpack__(**keywords)


def no_gpu():
    try:
        _gpu_array.Memory(0, 1)
    except attn.Unsupported:
        return True
    return False


def test_no_gpu(qkv):
    if not no_gpu():
        pytest.skip("there is a GPU")
    with pytest.raises(attn.Unsupported, match="CUDA|GPU|driver"):
        attn.attention(*map(OnGpu, qkv))
    with pytest.raises(NotImplementedError):
        attn.attention_backward(*map(OnGpu, (qkv[0], *qkv, qkv[0], qkv[0][..., 0].copy())))
    gc.collect()


def test_beside_others(qkv):
    refused = (
        ((OnGpu(qkv[0]), *qkv[1:]), {}, "k lies in the host's memory, q in the memory of GPU 0"),
        ((*qkv[:2], OnGpu(qkv[2])), {}, "v lies in the memory of GPU 0, q in the host's memory"),
        (map(OnGpu, qkv), {"out": qkv[0]}, "out lies in the host's memory"),
        (map(OnGpu, qkv), {"layout": "nhd"}, "layout is 'nhd'"),
        (map(OnGpu, (qkv[0], qkv[1][:, :2], qkv[2])), {}, "v has heads 3"),
        (qkv, {"stream": 5}, "stream is for arrays in a GPU's memory"),
    )
    for arrays, keywords, text in refused:
        with pytest.raises(ValueError, match=text):
            attn.attention(*arrays, **keywords)
    with pytest.raises(attn.Unsupported, match="run.. takes arrays in the host's memory"):
        attn.run(*map(OnGpu, qkv))


@pytest.mark.parametrize("versioned", [True, False])
@pytest.mark.parametrize("stream, told", [(None, 1), (0, 1), (2, 2), (77, 77)])
def test_owners_are_told_the_stream(qkv, versioned, stream, told, monkeypatch):
    arrays = [OnGpu(x, versioned=versioned) for x in qkv]
    seen = []

    class Stop(Exception):
        pass

    def prepare(*arguments):
        seen.append(arguments)
        raise Stop

    monkeypatch.setattr(_calls, "prepare_forward", prepare)
    with pytest.raises(Stop):
        attn.attention(*arrays, stream=stream)
    for array in arrays:
        assert array.asked[-1]["stream"] == told
    shape, strides, dtype, gpu, writable = seen[0][-3]
    assert (shape, strides, gpu, writable) == ((2, 3, 9, 8), (216, 72, 8, 1), 0, True)


# ---- arrays of ours, given to others: the protocol alone, on memory of the host ----


class Fake:
    """Stands for a GPU's memory."""

    def __init__(self, _gpu, size):
        self.bytes = ctypes.create_string_buffer(size)
        self.address = ctypes.addressof(self.bytes)


@pytest.mark.parametrize("version, kind", [(None, b"dltensor"), ((1, 0), b"dltensor_versioned")])
def test_results_are_given_away_once(monkeypatch, version, kind):
    monkeypatch.setattr(_gpu_array, "Memory", Fake)
    waited = []
    monkeypatch.setattr(_gpu_array, "call", lambda *arguments: waited.append(arguments))
    array = _gpu_array.GpuArray((2, 3), attn._types.Dtype.F16, 1, 7)
    assert array.dtype == "float16" and array.shape == (2, 3) and array.__dlpack_device__() == (2, 1)
    before = len(_gpu_array.EXPORTED)
    capsule = array.__dlpack__(stream=7, max_version=version)
    assert not waited
    tensor, _ = attn._arrays.read_capsule("array", capsule)
    assert (tensor.data, tensor.device_type, tensor.device_id) == (array.address, 2, 1)
    assert tensor.shape[:2] == [2, 3] and tensor.strides[:2] == [3, 1]
    assert (tensor.code, tensor.bits, tensor.lanes) == (2, 16, 1)
    assert attn._arrays.capsule_is(capsule, kind) and len(_gpu_array.EXPORTED) == before + 1
    del tensor, capsule
    _gpu_array.sweep()
    assert len(_gpu_array.EXPORTED) == before
    array.__dlpack__(stream=9)
    array.__dlpack__(stream=-1)
    array.__dlpack__()
    assert waited == [("attn_cuda_wait", 1, 7)] * 2
    for keywords in ({"copy": True}, {"dl_device": (1, 0)}):
        with pytest.raises(BufferError, match="no copy and no other device"):
            array.__dlpack__(**keywords)


def test_a_consumer_that_refuses(monkeypatch):
    """It destroys the capsule with its exception on the way: the caller gets that, and the memory is free."""
    monkeypatch.setattr(_gpu_array, "Memory", Fake)
    monkeypatch.setattr(_gpu_array, "call", lambda *arguments: None)
    _gpu_array.sweep()
    before = len(_gpu_array.EXPORTED)
    array = _gpu_array.GpuArray((2, 3), attn._types.Dtype.F32, 0, 0)
    for _ in range(3):
        with pytest.raises((BufferError, RuntimeError), match="[Uu]nsupported device"):
            np.from_dlpack(array)
        assert len(_gpu_array.EXPORTED) <= before + 1
    del array
    gc.collect()
    assert len(_gpu_array.EXPORTED) == before


def test_the_consumer_gives_it_back(monkeypatch):
    """As a consumer does: the capsule is renamed, its deleter called later."""
    monkeypatch.setattr(_gpu_array, "Memory", Fake)
    capsule = _gpu_array.GpuArray((4,), attn._types.Dtype.F32, 0, 0).__dlpack__()
    pointer = attn._arrays.capsule_pointer(capsule, b"dltensor")
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    used = b"used_dltensor"
    rename(capsule, used)
    managed = attn._arrays.DLManagedTensor.from_address(pointer)
    del capsule
    gc.collect()
    assert pointer in _gpu_array.EXPORTED
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(pointer)
    assert pointer not in _gpu_array.EXPORTED
