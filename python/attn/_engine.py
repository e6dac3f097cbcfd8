# SPDX-License-Identifier: Apache-2.0
"""run() and plan(): attention cut by a quorum schedule into workers, and a look at who does what.

An execute runs in a thread of its own: the caller's thread waits for it in Python, where an interrupt can
reach it. The event function then tells the library to stop.
"""
import ctypes
import threading
import time
import warnings
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ._errors import InvalidArgument, OutOfMemory, Unsupported
from ._library import LIBRARY, call, create_plan, failure, last_error
from ._problem import Inputs, Window, count_of, index_of, options_of
from ._spaces import host_space
from . import _types
from ._types import EventFn, Io, Operand, Options, Problem, Quorum, Status, Step

QUORUMS = {
    "cyclic": Quorum.QUORUM_CYCLIC, "rectangular": Quorum.QUORUM_RECTANGULAR, "auto": Quorum.QUORUM_AUTO
}
SIDES = {"q": Operand.Q, "kv": Operand.K}


class Kernel(NamedTuple):
    """A row of the kernel table, best first."""

    name: str
    summary: str
    reason: Optional[str] # why it refuses; None: it takes the problem
    chosen: bool


class Event(NamedTuple):
    """One step of a run, told when it ends."""

    step: str # "gather", "compute", "handover", "merge" or "resume"
    rank: int # the worker; -1 for the Tiler
    group: int # the query group, or -1
    begin: float # seconds of the monotonic clock
    end: float
    cells: int # of each batch and head
    bytes: int
    text: Optional[str] # a warning


class Rank(NamedTuple):
    """One worker's share; `groups` is its quorum, `pairs` its task list of (query group, key group, part)."""

    rank: int
    groups: List[int]
    tokens: int
    pairs: List[Tuple[int, int, int]]
    needs_q: List[int]
    needs_kv: List[int]
    cells: int
    bytes_in: int
    bytes_out: int


class Result(NamedTuple):
    o: Any
    lse: Any
    summary: Dict[str, Any]


def fields_of(struct: ctypes.Structure, *without: str) -> Dict[str, Any]:
    """A struct as a dictionary: text decoded, structs within likewise, its size and pointers left out."""
    answer: Dict[str, Any] = {}
    for name, _ in struct._fields_: # type: ignore[misc]
        value = getattr(struct, name)
        if name == "size" or name in without:
            continue
        if isinstance(value, ctypes.Structure):
            value = fields_of(value)
        elif isinstance(value, bytes):
            value = value.decode(errors="replace")
        answer[name] = value
    return answer


def verdicts(plan: Optional[ctypes.c_void_p]) -> Iterator[Kernel]:
    index = 0
    while True:
        verdict = _types.Verdict()
        if LIBRARY.attn_kernel_verdict(plan, index, ctypes.byref(verdict)) != 0:
            return # past the end
        row = fields_of(verdict)
        yield Kernel(row["name"], row["summary"], row["reason"], bool(row["chosen"]))
        index += 1


def kernels() -> List[Kernel]:
    """The kernel table, judged for this machine: a row with a reason cannot run here."""
    return list(verdicts(None))


class Watch:
    """The event function of a run: passes events on, keeps warnings, and stops the run when asked or when the
    caller's function raises."""

    def __init__(self, progress: Optional[Callable[[Event], Any]]) -> None:
        self.progress = progress
        self.stop = False
        self.raised: Optional[BaseException] = None
        self.warnings: List[str] = []
        self.function = EventFn(self.event)

    def event(self, _data: Any, pointer: Any) -> int:
        try:
            row = fields_of(pointer.contents)
            event = Event(**{**row, "step": Step(row["step"]).name[len("STEP_"):].lower()})
            if self.progress is not None:
                self.progress(event)
            elif event.text:
                self.warnings.append(event.text)
        except BaseException as error: # it may not pass through C; raised again by run()
            self.raised = error
        return int(self.stop or self.raised is not None)


class Plan:
    """Everything that is decided about a problem before any data is touched. Made by attn.plan()."""

    def __init__(self, problem: Problem, options: Options) -> None:
        self._handle = create_plan(self, problem, options)

    def __repr__(self) -> str:
        return f"<attn.Plan {self.problem}, {self.summary['workers']} workers>"

    @property
    def problem(self) -> str:
        """The problem in the form that attn.plan() reads."""
        problem = LIBRARY.attn_plan_problem(self._handle)
        text = ctypes.create_string_buffer(1 + LIBRARY.attn_problem_print(problem, None, 0))
        LIBRARY.attn_problem_print(problem, text, len(text))
        return text.value.decode()

    @property
    def flops(self) -> float:
        """Of the forward pass: 2 * visible cells * (dim_qk + dim_v) * batch * heads."""
        return LIBRARY.attn_problem_flops(LIBRARY.attn_plan_problem(self._handle))

    @property
    def workspace(self) -> int:
        """Bytes that an execute needs."""
        return LIBRARY.attn_plan_workspace(self._handle)

    @property
    def summary(self) -> Dict[str, Any]:
        """The fields of attn_summary; interest_set where the quorums are cyclic."""
        summary = _types.Summary()
        call("attn_plan_summary", self._handle, ctypes.byref(summary))
        answer = fields_of(summary)
        answer["set_q"] = summary.set_q[:summary.quorum_q]
        answer["set_kv"] = summary.set_kv[:summary.quorum_kv]
        answer["quorum"] = next(name for name, value in QUORUMS.items() if value == summary.quorum)
        return answer

    def rank(self, rank: int) -> Rank:
        """The share of one worker."""
        share = _types.Rank()
        call("attn_plan_rank", self._handle, index_of("rank", rank), ctypes.byref(share))
        try:
            pairs = [(pair.q, pair.kv, pair.part) for pair in share.pairs[:share.pair_count]]
            return Rank(share.rank, share.groups[:share.group_count], share.tokens, pairs,
                        share.needs_q[:share.needs_q_count], share.needs_kv[:share.needs_kv_count],
                        share.cells, share.bytes_in, share.bytes_out)
        finally:
            LIBRARY.attn_rank_free(ctypes.byref(share))

    def group(self, side: str, group: int) -> range:
        """The tokens of a token group; side "q" or "kv"."""
        if side not in SIDES:
            raise InvalidArgument(f"side is {side!r}; give 'q' or 'kv'")
        if not 0 <= group < self.summary["workers"]:
            raise InvalidArgument(f"group {group}: there are {self.summary['workers']} groups, from 0")
        first, count = ctypes.c_int64(), ctypes.c_int64()
        LIBRARY.attn_plan_group(self._handle, SIDES[side], group, ctypes.byref(first), ctypes.byref(count))
        return range(first.value, first.value + count.value)

    def prove(self) -> Dict[str, int]:
        """Counts how often each visible cell is owned: all `cells` must be owned `once`. O(W^2) time."""
        proof = _types.Proof()
        call("attn_plan_prove", self._handle, ctypes.byref(proof))
        return fields_of(proof)

    def kernels(self) -> List[Kernel]:
        """The kernel table, judged for this problem."""
        return list(verdicts(self._handle))

    def _execute(self, io: Io, watch: Watch, *keep: Any) -> None:
        """`keep` is what must live as long as the library computes."""
        workspace = np.empty(max(1, self.workspace), np.uint8)
        outcome: List[Tuple[int, str]] = []
        ended = threading.Event()

        def work(*_keep: Any) -> None: # the error text is this thread's
            status = LIBRARY.attn_execute(self._handle, ctypes.byref(io), workspace.ctypes.data)
            outcome.append((status, "" if status == 0 else last_error()))
            ended.set()

        try:
            try:
                threading.Thread(target=work, args=keep, name="attn.run").start()
            except RuntimeError as error:
                ended.set()
                raise OutOfMemory(f"no thread for the run: {error}") from error
            # Not Thread.join(), which an interrupt can leave too early (CPython issue 90882), and not one long
            # wait, from which an interrupt wakes this thread only if the system gave the signal to it.
            while not ended.wait(0.1):
                pass
        except BaseException: # an interrupt: the caller's arrays are his again only when the run has ended
            watch.stop = True
            wait_out(ended)
            raise
        for warning in watch.warnings:
            warnings.warn(warning, RuntimeWarning, stacklevel=3)
        if watch.raised is not None:
            raise watch.raised
        status, text = outcome[0]
        if status != Status.OK:
            raise failure(status, text)


def wait_out(ended: threading.Event) -> None:
    """Waits whatever happens: one more interrupt cannot stop sooner what is stopping."""
    while not ended.is_set():
        try:
            ended.wait()
        except BaseException:
            pass


def quorum_options(workers: Optional[int], resident: Optional[int], memory_limit: Optional[int], quorum: str,
                   rectangle: Optional[int], interest_set: Optional[Sequence[int]], threads: Optional[int],
                   kernel: Optional[str]) -> Options:
    if quorum not in QUORUMS:
        raise InvalidArgument(f"quorum is {quorum!r}; give {', '.join(map(repr, QUORUMS))}")
    options = options_of(threads,
                         kernel,
                         workers=count_of("workers", workers),
                         resident=count_of("resident", resident),
                         memory_limit=count_of("memory_limit", memory_limit),
                         quorum=QUORUMS[quorum],
                         rectangle=rectangle or 0)
    if interest_set is not None:
        options.interest_set = (ctypes.c_int64 * len(interest_set))(*interest_set)
        options.interest_size = len(interest_set)
    return options


def plan(problem: str,
         *,
         workers: Optional[int] = None,
         resident: Optional[int] = None,
         memory_limit: Optional[int] = None,
         quorum: str = "cyclic",
         rectangle: Optional[int] = None,
         interest_set: Optional[Sequence[int]] = None,
         threads: Optional[int] = None,
         kernel: Optional[str] = None) -> Plan:
    """A plan to look at: who holds and computes what, in how much memory. Touches no data.

    problem     as the program reads it: "batch=1,heads=4,kv_heads=4,tokens=30k,dim=64,dtype=f32,causal"

    The rest as in run().
    """
    parsed = Problem()
    call("attn_problem_parse", ctypes.byref(parsed), problem.encode())
    return Plan(
        parsed,
        quorum_options(workers, resident, memory_limit, quorum, rectangle, interest_set, threads, kernel))


def run(q: Any,
        k: Any,
        v: Any,
        *,
        causal: bool = False,
        window: Window = None,
        scale: Optional[float] = None,
        return_lse: bool = False,
        out: Any = None,
        layout: str = "bhnd",
        workers: Optional[int] = None,
        resident: Optional[int] = None,
        memory_limit: Optional[int] = None,
        quorum: str = "cyclic",
        rectangle: Optional[int] = None,
        interest_set: Optional[Sequence[int]] = None,
        spool: Optional[str] = None,
        spool_key: Optional[str] = None,
        gather: bool = False,
        threads: Optional[int] = None,
        kernel: Optional[str] = None,
        progress: Optional[Callable[[Event], Any]] = None) -> Result:
    """attention(), cut by a cyclic quorum schedule into independent workers.

    workers       W; default 1, or with memory_limit the smallest that fits
    resident      workers that compute at once; default 1
    memory_limit  bytes that the workspace may take
    quorum        "cyclic"; "rectangular", with `rectangle` query groups a worker; "auto": fewest bytes moved
    interest_set  one's own set; default: the best known
    spool         a folder for finished partial results: a run that was killed goes on where it was
    spool_key     names the data of a spool; the same data must have the same key, other data another
    gather        copy each worker's groups before computing, as workers elsewhere would
    progress      called with an attn.Event at each step, in another thread, one at a time. What it raises
                  stops the run and is raised here. Without it, warnings of the engine come as RuntimeWarning.

    The rest as in attention(). Returns (o, lse, summary): lse is None unless asked for; summary is
    Plan.summary with the "seconds" that the execute took. An interrupt (Ctrl-C) ends the run at the next
    step.
    """
    if (spool is None) != (spool_key is None):
        raise InvalidArgument(
            "give spool and spool_key together: partial results of other data must not be taken up")
    inputs = Inputs(q, k, v, causal, window, scale, layout)
    if inputs.gpu is not None:
        raise Unsupported("run() takes arrays in the host's memory; attention() computes on a GPU's own")
    out, lse, io = inputs.results(out, return_lse, host_space(q).make)
    watch = Watch(progress)
    options = quorum_options(workers, resident, memory_limit, quorum, rectangle, interest_set, threads,
                             kernel)
    options.in_memory = int(not gather)
    options.event = watch.function
    if spool is not None and spool_key is not None:
        options.spool, options.spool_key = str(spool).encode(), spool_key.encode()
    made = Plan(inputs.problem, options)
    begin = time.perf_counter()
    made._execute(io, watch, inputs, out, lse)
    return Result(out, lse, {**made.summary, "seconds": time.perf_counter() - begin})
