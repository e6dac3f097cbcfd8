# SPDX-License-Identifier: Apache-2.0
"""run() and plan(): the same result from any cut, plans that say who does what, runs that can be stopped."""
import os
import signal
import threading

import attn
import numpy as np
import pytest
from cases import cases, inputs, swap
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Reference


@settings(max_examples=25)
@given(cases(), st.integers(1, 14), st.integers(1, 3), st.sampled_from(["cyclic", "rectangular", "auto"]),
       st.booleans())
def test_any_cut(case, workers, resident, quorum, gather):
    q, k, v = inputs(case)
    result = attn.run(q,
                      k,
                      v,
                      workers=workers,
                      resident=min(resident, workers),
                      quorum=quorum,
                      gather=gather,
                      return_lse=True,
                      layout=case.layout,
                      **case.mask)
    Reference(*(swap(x, case.layout) for x in (q, k, v)), **case.mask).check(swap(result.o, case.layout),
                                                                             result.lse)
    assert result.summary["workers"] == workers and result.summary["seconds"] > 0


def arrays(tokens=200):
    random = np.random.default_rng(5)
    return [random.standard_normal((2, tokens, 16), np.float32) for _ in range(3)]


def test_events():
    events = []
    result = attn.run(*arrays(), workers=7, progress=events.append)
    assert result.lse is None
    assert sum(event.cells for event in events if event.step == "compute") == 200 * 200
    assert {event.rank for event in events if event.step == "compute"} == set(range(7))
    assert all(event.begin <= event.end for event in events)


def test_memory_limit():
    limit = attn.plan("heads=2,tokens=4000,dim=16", workers=31).workspace
    result = attn.run(*arrays(4000), memory_limit=limit, gather=True)
    assert result.summary["workspace"] <= limit and result.summary["workers"] > 1
    with pytest.raises(MemoryError) as caught:
        attn.run(*arrays(), memory_limit=100)
    assert isinstance(caught.value, attn.MemoryLimit)
    with pytest.raises(ValueError, match="no such number can be meant"):
        attn.run(*arrays(), memory_limit=2**70)


def test_exception_in_progress_stops_the_run():

    class Mine(Exception):
        pass

    count = []

    def progress(event):
        count.append(event)
        if len(count) == 3:
            raise Mine("enough")

    with pytest.raises(Mine, match="enough"):
        attn.run(*arrays(), workers=13, progress=progress)
    assert len(count) < 13


@pytest.mark.parametrize("to_whom", ["process", "thread of the run"])
def test_interrupt_stops_the_run(to_whom):
    """Ctrl-C while the main thread waits: the run ends at its next step, and KeyboardInterrupt is raised,
    whichever thread the system gives the signal to."""
    steps = []

    def progress(event):
        steps.append(event)
        if len(steps) == 1 and to_whom == "process":
            os.kill(os.getpid(), signal.SIGINT)
        elif len(steps) == 1:
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        threading.Event().wait(0.05) # so that the interrupt comes before the last step

    with pytest.raises(KeyboardInterrupt):
        attn.run(*arrays(), workers=91, progress=progress)
    told = len(steps)
    assert told < 91
    threading.Event().wait(0.2)
    assert len(steps) == told # the run had ended


def test_spool_goes_on(tmp_path):
    q, k, v = arrays()
    spool = tmp_path / "spool"

    def stop_late(event):
        if event.rank == 5:
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        attn.run(q, k, v, workers=7, spool=spool, spool_key="test", progress=stop_late)
    events = []
    result = attn.run(q, k, v, workers=7, spool=spool, spool_key="test", progress=events.append)
    assert sum(event.cells for event in events if event.step == "resume") > 0
    assert np.array_equal(result.o, attn.run(q, k, v, workers=7).o)
    with pytest.raises(attn.SpoolMismatch):
        attn.run(q, k, v, workers=7, spool=spool, spool_key="other")
    with pytest.raises(ValueError, match="spool and spool_key together"):
        attn.run(q, k, v, workers=7, spool=spool)


def test_the_gil_is_free():
    """Another Python thread gets on while the library computes."""
    ticks = []
    started, done = threading.Event(), threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(1)
            started.set()
            done.wait(0.001)

    q, k, v = arrays(6000)
    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    before = len(ticks)
    attn.attention(q, k, v, threads=1)
    during = len(ticks) - before
    done.set()
    thread.join()
    assert during > 3


# ---- plans ----


def test_plan_of_the_literature():
    """10 tokens, 7 workers, interest set {0, 1, 3}."""
    plan = attn.plan("tokens=10,dim=64", workers=7, interest_set=[0, 1, 3])
    assert plan.summary["set_q"] == [0, 1, 3] and plan.summary["set_origin"] == "user"
    assert [len(plan.group("q", group)) for group in range(7)] == [1, 1, 1, 1, 2, 2, 2]
    rank = plan.rank(0)
    assert rank.groups == [0, 1, 3] and rank.cells == 7
    assert [pair[:2] for pair in rank.pairs] == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 3), (3, 0), (3, 1)]
    assert plan.prove() == {"cells": 100, "once": 100, "missing": 0, "repeated": 0}
    assert plan.flops == 4 * 100 * 64
    assert "tokens=10" in plan.problem and attn.plan(plan.problem).problem == plan.problem
    assert "7 workers" in repr(plan)
    assert [kernel.chosen for kernel in plan.kernels()].count(True) == 1


@given(st.integers(1, 500), st.integers(1, 60), st.booleans())
def test_every_cell_has_one_owner(tokens, workers, causal):
    plan = attn.plan(f"tokens={tokens},dim=8{',causal' if causal else ''}", workers=workers)
    proof = plan.prove()
    assert proof["once"] == proof["cells"] == sum(plan.rank(rank).cells for rank in range(workers))
    assert [token for group in range(workers) for token in plan.group("kv", group)] == list(range(tokens))


def test_refused():
    for text, function in (("quorum is 'ring'", lambda: attn.plan("tokens=9,dim=8", quorum="ring")),
                           ("workers is 0", lambda: attn.plan("tokens=9,dim=8", workers=0)),
                           ("rank", lambda: attn.plan("tokens=9,dim=8").rank(1)),
                           ("side is 'x'", lambda: attn.plan("tokens=9,dim=8").group("x", 0)),
                           ("group 1",
                            lambda: attn.plan("tokens=9,dim=8").group("q", 1)), ("tokens",
                                                                                 lambda: attn.plan("dim=8")),
                           ("does not cover Z_5",
                            lambda: attn.plan("tokens=9,dim=8", workers=5, interest_set=[0, 1]))):
        with pytest.raises(attn.InvalidArgument, match=text):
            function()


def test_kernels_and_version():
    names = [kernel.name for kernel in attn.kernels()]
    assert "reference" in names and any(kernel.reason is None for kernel in attn.kernels())
    assert attn.version() == attn.__version__
