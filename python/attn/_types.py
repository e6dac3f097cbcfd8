# SPDX-License-Identifier: Apache-2.0
"""The structs and enumerations of attn.h and plan.h, field by field; tests/test_layout.py compares them."""
import ctypes
import enum
from ctypes import CFUNCTYPE, POINTER, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p
from typing import Any

# ATTN_VERSION_MAJOR, MINOR, PATCH: the library that this package is written for, and its own version.
VERSION = (0, 1, 0)


class Status(enum.IntEnum):
    OK = 0
    EINVAL = 1
    ENOMEM = 2
    ELIMIT = 3
    EUNSUPPORTED = 4
    EIO = 5
    EMISMATCH = 6
    ELOST = 7
    ECANCELED = 8


class Dtype(enum.IntEnum):
    F32 = 0
    F16 = 1
    BF16 = 2


class Mask(enum.IntEnum):
    MASK_FULL = 0
    MASK_CAUSAL = 1
    MASK_WINDOW = 2


class Operand(enum.IntEnum):
    Q = 0
    K = 1
    V = 2


class Quorum(enum.IntEnum):
    QUORUM_CYCLIC = 0
    QUORUM_RECTANGULAR = 1
    QUORUM_AUTO = 2


class Device(enum.IntEnum):
    CPU = 0
    CUDA = 1


class Step(enum.IntEnum):
    STEP_GATHER = 0
    STEP_COMPUTE = 1
    STEP_HANDOVER = 2
    STEP_MERGE = 3
    STEP_RESUME = 4


class Sized(ctypes.Structure):
    """A struct of attn.h that begins with its own size, which is set here."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(size=ctypes.sizeof(self), **fields)


class Problem(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("batch", c_int64),
        ("heads_q", c_int64),
        ("heads_kv", c_int64),
        ("tokens_q", c_int64),
        ("tokens_kv", c_int64),
        ("dim_qk", c_int64),
        ("dim_v", c_int64),
        ("dtype", c_int),
        ("dtype_out", c_int),
        ("mask", c_int),
        ("window_left", c_int64),
        ("window_right", c_int64),
        ("scale", c_double),
        ("placed", c_int),
        ("first_q", c_int64),
        ("first_kv", c_int64),
        ("total_q", c_int64),
        ("total_kv", c_int64),
    ]


class Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64 * 4)]


class Io(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("lse", Tensor),
        ("source", c_void_p),
        ("sink", c_void_p),
        ("cu_seqlens_q", POINTER(c_int64)),
        ("cu_seqlens_kv", POINTER(c_int64)),
        ("total_q", c_int64),
        ("total_kv", c_int64),
        ("merge", c_int),
        ("stream", c_void_p),
    ]


class Gradients(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("q", Tensor),
        ("k", Tensor),
        ("v", Tensor),
        ("o", Tensor),
        ("lse", Tensor),
        ("delta", Tensor),
        ("dout", Tensor),
        ("dq", Tensor),
        ("dk", Tensor),
        ("dv", Tensor),
        ("accumulate", c_int),
        ("cu_seqlens_q", POINTER(c_int64)),
        ("cu_seqlens_kv", POINTER(c_int64)),
        ("total_q", c_int64),
        ("total_kv", c_int64),
        ("stream", c_void_p),
    ]


class Event(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("step", c_int),
        ("rank", c_int64),
        ("group", c_int64),
        ("begin", c_double),
        ("end", c_double),
        ("cells", c_int64),
        ("bytes", c_int64),
        ("text", c_char_p),
    ]


EventFn = CFUNCTYPE(c_int, c_void_p, POINTER(Event))


class Options(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("workers", c_int64),
        ("resident", c_int64),
        ("memory_limit", c_int64),
        ("quorum", c_int),
        ("rectangle", c_int64),
        ("interest_set", POINTER(c_int64)),
        ("interest_size", c_int64),
        ("classic", c_int),
        ("threads", c_int),
        ("in_memory", c_int),
        ("backward", c_int),
        ("device", c_int),
        ("gpu", c_int),
        ("sms", c_int),
        ("deterministic", c_int),
        ("kernel", c_char_p),
        ("spool", c_char_p),
        ("spool_key", c_char_p),
        ("event", EventFn),
        ("event_data", c_void_p),
    ]


class Spread(ctypes.Structure):
    _fields_ = [("min", c_double), ("max", c_double), ("mean", c_double), ("std", c_double)]


class Summary(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("workers", c_int64),
        ("resident", c_int64),
        ("threads", c_int),
        ("quorum", c_int),
        ("classic", c_int),
        ("quorum_q", c_int64),
        ("quorum_kv", c_int64),
        ("set_q", POINTER(c_int64)),
        ("set_kv", POINTER(c_int64)),
        ("set_origin", c_char_p),
        ("subsequence", Spread),
        ("cells", c_int64),
        ("ranks_counted", c_int64),
        ("cells_worker", Spread),
        ("bytes_in", Spread),
        ("bytes_out", Spread),
        ("kernel", c_char_p),
        ("spooled", c_int),
        ("workspace", c_int64),
        ("workspace_gather", c_int64),
        ("workspace_partial", c_int64),
        ("workspace_kernel", c_int64),
        ("device_memory", c_int64),
        ("pinned_memory", c_int64),
    ]


class Pair(ctypes.Structure):
    _fields_ = [("q", c_int64), ("kv", c_int64), ("part", c_int)]


class Rank(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("rank", c_int64),
        ("groups", POINTER(c_int64)),
        ("group_count", c_int64),
        ("tokens", c_int64),
        ("pairs", POINTER(Pair)),
        ("pair_count", c_int64),
        ("needs_q", POINTER(c_int64)),
        ("needs_q_count", c_int64),
        ("needs_kv", POINTER(c_int64)),
        ("needs_kv_count", c_int64),
        ("cells", c_int64),
        ("bytes_in", c_int64),
        ("bytes_out", c_int64),
    ]


class Proof(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("cells", c_int64),
        ("once", c_int64),
        ("missing", c_int64),
        ("repeated", c_int64),
    ]


class Verdict(Sized):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("summary", c_char_p),
        ("chosen", c_int),
        ("rounds_weights", c_int),
        ("reason", c_char_p),
        ("device", c_int),
    ]


IO = c_void_p # an Io or Gradients by ctypes.byref(), or the bytes of one

# What the library is called with: name -> (result, arguments).
FUNCTIONS = {
    "attn_version": (c_char_p, []),
    "attn_last_error": (c_char_p, []),
    "attn_problem_parse": (c_int, [POINTER(Problem), c_char_p]),
    "attn_problem_print": (c_size_t, [POINTER(Problem), c_void_p, c_size_t]),
    "attn_problem_check": (c_int, [POINTER(Problem)]),
    "attn_problem_flops": (c_double, [POINTER(Problem)]),
    "attn_forward": (c_int, [POINTER(Problem), IO, POINTER(Options)]),
    "attn_backward": (c_int, [POINTER(Problem), IO, POINTER(Options)]),
    "attn_plan_create": (c_int, [POINTER(c_void_p), POINTER(Problem),
                                 POINTER(Options)]),
    "attn_plan_destroy": (None, [c_void_p]),
    "attn_plan_problem": (POINTER(Problem), [c_void_p]),
    "attn_plan_summary": (c_int, [c_void_p, POINTER(Summary)]),
    "attn_plan_workspace": (c_size_t, [c_void_p]),
    "attn_plan_group": (None, [c_void_p, c_int, c_int64,
                               POINTER(c_int64), POINTER(c_int64)]),
    "attn_plan_rank": (c_int, [c_void_p, c_int64, POINTER(Rank)]),
    "attn_rank_free": (None, [POINTER(Rank)]),
    "attn_plan_prove": (c_int, [c_void_p, POINTER(Proof)]),
    "attn_kernel_verdict": (c_int, [c_void_p, c_int64, POINTER(Verdict)]),
    "attn_execute": (c_int, [c_void_p, IO, c_void_p]),
    "attn_execute_backward": (c_int, [c_void_p, IO, c_void_p]),
    "attn_cuda_alloc": (c_int, [c_int, POINTER(c_void_p), c_size_t]),
    "attn_cuda_free": (None, [c_int, c_void_p]),
    "attn_cuda_copy": (c_int, [c_int, c_void_p, c_void_p, c_size_t, c_void_p]),
    "attn_cuda_wait": (c_int, [c_int, c_void_p]),
}
