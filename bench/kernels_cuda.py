#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The kernel that the library chooses on a GPU, beside few-sm90 and flash-sm90 by name: does it choose well?

    ATTN_LIBRARY=build/release/libattn.so PYTHONPATH=python bench/kernels_cuda.py

Forward, bf16, full and causal: one to four heads, blocks of queries against longer caches, and sequences in one
call (cu), each of the same length.  us a call: batches of ten calls between two events, the median of three;
the results of a call are overwritten by the next, and what is in a cache stays there.  diff: the norm of the
difference of both kernels' results over that of one.  The last line: how much slower the chosen kernel is than
the better of both, as the geometric mean and at worst.
"""
import argparse
import math
import statistics
import sys

try:
    import torch
except ImportError:
    print("kernels_cuda.py: there is no PyTorch for this Python; run it by one that has it", file=sys.stderr)
    sys.exit(3)
import attn

KERNELS = (None, "few-sm90", "flash-sm90")

# batch, query heads, key heads, queries, keys
SQUARES = [(1, heads, heads, n, n) for heads in (1, 2, 4) for n in (500, 1000, 2000, 4000, 8000)]
BLOCKS = [(1, 8, 8, 100, 32000), (1, 8, 8, 500, 32000), (1, 8, 8, 2000, 32000), (1, 2, 2, 4000, 32000),
          (1, 64, 8, 500, 32000), (1, 64, 8, 64, 4096), (1, 32, 8, 64, 2048), (4, 32, 8, 64, 2048),
          (1, 32, 32, 100, 8000), (8, 8, 8, 40, 4000), (8, 8, 1, 40, 4000), (1, 32, 8, 200, 1000),
          (2, 16, 16, 60, 500), (1, 8, 2, 300, 700)]
SEQUENCES = [(1, 1, 1, 4000, 4000), (1, 2, 2, 8000, 8000), (4, 4, 4, 100, 8000), (4, 32, 8, 100, 8000),
             (8, 8, 8, 40, 4000), (2, 4, 1, 1000, 8000)]


def time_of(call):
    """us of a call on the GPU; a kernel that only waits goes before, so that the host is ahead."""
    call()
    torch.cuda.synchronize()
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        torch.cuda._sleep(2_000_000)
        begin.record()
        for _ in range(10):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 10 * 1e3)
    return statistics.median(times)


def tensors(shape, dim, together):
    batch, heads_q, heads_kv, queries, keys = shape
    torch.manual_seed(0)
    sizes = [(heads_q, queries), (heads_kv, keys), (heads_kv, keys)]
    if not together:
        return [torch.randn(batch, heads, n, dim, device="cuda", dtype=torch.bfloat16) for heads, n in sizes], {}
    starts = torch.arange(batch + 1, device="cuda", dtype=torch.int64)
    lists = {
        "cu_seqlens_q": starts * queries,
        "cu_seqlens_k": starts * keys,
        "max_seqlen_q": queries,
        "max_seqlen_k": keys
    }
    return [torch.randn(batch * n, heads, dim, device="cuda", dtype=torch.bfloat16) for heads, n in sizes], lists


def case(shape, dim, causal, together):
    """The chosen kernel's time over that of the better one."""
    (q, k, v), lists = tensors(shape, dim, together)
    out = torch.empty_like(q)
    times, results = {}, {}
    for kernel in KERNELS:
        times[kernel] = time_of(
            lambda kernel=kernel: attn.attention(q, k, v, causal=causal, kernel=kernel, out=out, **lists))
        results[kernel] = out.float().clone()
    few, flash = results["few-sm90"], results["flash-sm90"]
    better = min(times["few-sm90"], times["flash-sm90"])
    name = f"{shape[0]} {shape[1]}/{shape[2]} q {shape[3]} kv {shape[4]} d {dim} {'causal' if causal else 'full'}"
    print(f"{name + (' cu' if together else ''):42} chosen {times[None]:7.1f}  few {times['few-sm90']:7.1f}  "
          f"flash {times['flash-sm90']:7.1f}  chosen/better {times[None] / better:.2f}  "
          f"diff {float((few - flash).norm() / flash.norm()):.1e}",
          flush=True)
    return times[None] / better


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", default="64,128,256", help="head dimensions")
    dims = [int(dim) for dim in parser.parse_args().dims.split(",")]
    shapes = [(shape, False) for shape in SQUARES + BLOCKS] + [(shape, True) for shape in SEQUENCES]
    ratios = [
        case(shape, dim, causal, together) for dim in dims for shape, together in shapes for causal in (False, True)
    ]
    mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
    print(f"{len(ratios)} problems: the chosen kernel takes {mean:.3f} times what the better does, at worst {max(ratios):.2f}")


if __name__ == "__main__":
    main()
