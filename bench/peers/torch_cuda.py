#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attn against PyTorch's kernels on a GPU, cuDNN, FlashAttention-2, memory-efficient: same tensors, in turn.

    ATTN_LIBRARY=build/release/libattn.so bench/peers/torch_cuda.py --format md

Without options: head dims 64, 128, 256, full and causal, 512 to 16Ki tokens, 16Ki tokens and 2048 columns in
all, bf16, forward and backward; grouped heads (32 of q, 8 of k and v, d=128, causal, 4Ki and 32Ki tokens);
fp32 (8 heads, 8Ki tokens, the same dims and masks); few queries against many keys (64 heads of q, 8 of k and v,
d=128, full, forward).

Time is the GPU's own, by events around a batch of calls in a row. A kernel that only waits goes before the
batch, so that Python has enqueued it by the time that its first call begins: what the host needs for a call
is in no figure (--overhead shows it). A round is one batch of each contestant; the next round begins with
another of them. A ratio is the median over the rounds. README.md beside this file tells what is printed.
"""
import argparse
import contextlib
import ctypes
import datetime
import itertools
import math
import os
import statistics
import sys
import threading
import time

import common

try:
    import torch
except ImportError:
    print("torch_cuda.py: there is no PyTorch for this Python; run it by one that has it", file=sys.stderr)
    sys.exit(3)
import attn
import attn.torch

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
PEERS = {"cudnn": "CUDNN_ATTENTION", "flash": "FLASH_ATTENTION", "efficient": "EFFICIENT_ATTENTION"}
OURS = {"ours": None, "ours_fma": "fma"} # a part of the kernel's name; None: the library's choice
FP32_ROW, GRID_ROW = ("ours", "efficient", "ours_fma"), ("ours", "cudnn", "flash") # as the columns are
COLUMNS = ("pass", "dtype", "mask", "batch", "heads", "kv_heads", "queries", "tokens", "dim", "ours", "cudnn", "flash",
           "efficient", "ours_fma", "ratio", "quartiles", "errors", "sm_mhz", "watts", "status")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cases", default="grid,gqa,fp32,few", help="list of grid, gqa, fp32, few")
    parser.add_argument("--dims", type=common.numbers, default=[64, 128, 256], help="of the grid and of fp32")
    parser.add_argument("--seqs",
                        type=common.numbers,
                        default=[512 << i for i in range(6)],
                        help="of the grid")
    parser.add_argument("--tokens", type=int, default=16384, help="of a cell of the grid, in all sequences")
    parser.add_argument("--groups", default="32/8", help="of gqa: list of query heads / key heads")
    parser.add_argument("--queries", type=common.numbers, default=[1, 8, 16, 64], help="of few")
    parser.add_argument("--keys", type=common.numbers, default=[32768, 131072], help="of few")
    parser.add_argument("--columns", type=int, default=2048, help="heads times dim, of the grid")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the grid, of gqa and of few")
    parser.add_argument("--mask", choices=("full", "causal", "both"), default="both", help="of the grid and of fp32")
    parser.add_argument("--pass", dest="passes", default="forward,backward", help="list of forward, backward")
    parser.add_argument("--layout", choices=("bhnd", "bnhd"), default="bhnd", help="of the tensors in memory")
    parser.add_argument("--peers", default="cudnn,flash,efficient", help=f"list of {', '.join(PEERS)}")
    parser.add_argument("--kernel", default=None, help="a row of our kernel table")
    parser.add_argument("--deterministic",
                        action="store_true",
                        help="gradients with the same bits every time, of all; a peer that has none is refused")
    parser.add_argument("--repeat", type=int, default=7, help="rounds of a cell")
    parser.add_argument("--batch-ms", type=float, default=8.0, help="of one contestant in one round, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-check", action="store_true", help="do not compute the errors against fp64")
    parser.add_argument("--overhead",
                        action="store_true",
                        help="the host's time of a call instead, in microseconds")
    parser.add_argument("--format", choices=("table", "md", "json"), default="table")
    return parser


def cases(options):
    masks = ("full", "causal") if options.mask == "both" else (options.mask,)
    chosen = options.cases.split(",")
    for kind in options.passes.split(","):
        grid = itertools.product(options.dims, masks, options.seqs) if "grid" in chosen else ()
        for dim, mask, tokens in grid:
            heads = max(1, options.columns // dim)
            yield {
                "pass": kind, "dtype": options.dtype, "mask": mask, "batch": max(1, options.tokens // tokens),
                "heads": heads, "kv_heads": heads, "queries": tokens, "tokens": tokens, "dim": dim
            }
        grouped = itertools.product(options.groups.split(","), (4096, 32768)) if "gqa" in chosen else ()
        for group, tokens in grouped:
            heads, kv_heads = map(int, group.split("/"))
            yield {
                "pass": kind, "dtype": options.dtype, "mask": "causal", "batch": 1, "heads": heads,
                "kv_heads": kv_heads, "queries": tokens, "tokens": tokens, "dim": 128
            }
        for dim, mask in itertools.product(options.dims, masks) if "fp32" in chosen else ():
            yield {
                "pass": kind, "dtype": "f32", "mask": mask, "batch": 1, "heads": 8, "kv_heads": 8,
                "queries": 8192, "tokens": 8192, "dim": dim
            }
        few = itertools.product(options.keys, options.queries) if "few" in chosen and kind == "forward" else ()
        for tokens, queries in few:
            yield {
                "pass": kind, "dtype": options.dtype, "mask": "full", "batch": 1, "heads": 64, "kv_heads": 8,
                "queries": queries, "tokens": tokens, "dim": 128
            }


def flops(case):
    """Half of them under a causal mask, as peers count."""
    forward = 4.0 * case["batch"] * case["heads"] * case["queries"] * case["tokens"] * case["dim"]
    return forward * (0.5 if case["mask"] == "causal" else 1.0) * (2.5 if case["pass"] == "backward" else 1.0)


def arrays(case, options):
    """q, k, v, dout: [batch, heads, queries or tokens, dim], in memory as --layout says."""
    generator = torch.Generator("cuda").manual_seed(options.seed)
    made = []
    queries, keys = (case["heads"], case["queries"]), (case["kv_heads"], case["tokens"])
    for heads, tokens in (queries, keys, keys, queries):
        shape = [case["batch"], heads, tokens, case["dim"]]
        if options.layout == "bnhd":
            shape[1:3] = shape[2:0:-1]
        one = torch.randn(shape, generator=generator, device="cuda", dtype=DTYPES[case["dtype"]])
        made.append(one.transpose(1, 2) if options.layout == "bnhd" else one)
    return made


# ---- contestants: functions that enqueue one call and return its results ----


def ours(case, options, tensors, name):
    q, k, v, dout = tensors
    keywords = {"causal": case["mask"] == "causal", "kernel": options.kernel}
    if OURS[name] is not None:
        rows = [row.name for row in attn.kernels() if OURS[name] in row.name]
        if not rows:
            raise NotImplementedError(f"there is no {OURS[name]} kernel")
        keywords["kernel"] = rows[0]
    if case["pass"] == "forward":
        return lambda: (attn.attention(q, k, v, **keywords),)
    out, lse = attn.attention(q, k, v, return_lse=True, **keywords)
    keywords["deterministic"] = options.deterministic
    return lambda: attn.attention_backward(dout, q, k, v, out, lse, **keywords)


def backend(name):
    """The context in which PyTorch takes the peer's kernel; ours needs none."""
    if name not in PEERS:
        return contextlib.nullcontext()
    return torch.nn.attention.sdpa_kernel(getattr(torch.nn.attention.SDPBackend, PEERS[name]))


def peer(case, tensors, name):
    q, k, v, dout = tensors
    keywords = {"is_causal": case["mask"] == "causal", "enable_gqa": case["heads"] != case["kv_heads"]}
    sdpa = torch.nn.functional.scaled_dot_product_attention
    if case["pass"] == "forward":
        return lambda: (sdpa(q, k, v, **keywords),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    with backend(name):
        made = sdpa(*leaves, **keywords) # raises where PyTorch is told to be deterministic and the peer is not
    return lambda: torch.autograd.grad(made, leaves, dout, retain_graph=True)


# ---- time ----


def batch_seconds(call, repeats, host):
    """The GPU's seconds of one call, of `repeats` in a row; the host takes `host` seconds to enqueue one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2e9 * (1.5 * host * repeats + 20e-6))) # cycles, of at most 2 GHz
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3 / repeats


def warm_up(call, options):
    """(calls in a batch, the host's seconds of a call)"""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        call()
    host = (time.perf_counter() - begin) / 3
    torch.cuda.synchronize()
    seconds = batch_seconds(call, 3, host)
    return max(3, min(100, round(options.batch_ms * 1e-3 / seconds))), host


def rounds(calls, options):
    """{name: [seconds of one call, in each round]}"""
    plan, taken, names = {}, {name: [] for name in calls}, list(calls)
    for name in names:
        with backend(name):
            plan[name] = warm_up(calls[name], options)
    for turn in range(options.repeat):
        for name in names[turn % len(names):] + names[:turn % len(names)]:
            with backend(name):
                taken[name].append(batch_seconds(calls[name], *plan[name]))
    return taken


class Meter:
    """Clock and power while a cell is measured, from the driver's NVML, every 10 ms."""

    def __init__(self):
        self.samples, self.device, self.library = [], ctypes.c_void_p(), None
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL("libnvidia-ml.so.1")
            properties = torch.cuda.get_device_properties(0)
            place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
            bus = "{:08x}:{:02x}:{:02x}.0".format(*place).encode()
            if library.nvmlInit_v2() == 0 and library.nvmlDeviceGetHandleByPciBusId_v2(
                    bus, ctypes.byref(self.device)) == 0:
                self.library = library
                threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        clock, power = ctypes.c_uint(), ctypes.c_uint()
        while True:
            if (self.library.nvmlDeviceGetClockInfo(self.device, 1, ctypes.byref(clock)) == 0 and
                    self.library.nvmlDeviceGetPowerUsage(self.device, ctypes.byref(power)) == 0):
                self.samples.append((clock.value, power.value / 1000))
            time.sleep(0.01)

    def driver(self):
        text = ctypes.create_string_buffer(80)
        if self.library is None or self.library.nvmlSystemGetDriverVersion(text, len(text)) != 0:
            return "-"
        return text.value.decode()

    def figures(self):
        """Of the time since the last call of this: median clock, median power."""
        taken, self.samples = self.samples, []
        if not taken:
            return {"sm_mhz": "-", "watts": "-"}
        return {
            name: round(statistics.median(column)) for name, column in zip(("sm_mhz", "watts"), zip(*taken))
        }


# ---- errors ----


def reference(case, tensors):
    """In fp64 the results of the last kv head of the last batch: (o,), or (dq, dk, dv). In pieces of rows."""
    group = case["heads"] // case["kv_heads"]
    q, k, v, dout = (
        x[-1, -group:].double() if x.shape[1] == case["heads"] else x[-1, -1].double() for x in tensors)
    if group == 1:
        k, v = (x.reshape(case["tokens"], -1) for x in (k, v))
    scale, tokens, queries = case["dim"]**-0.5, case["tokens"], case["queries"]
    out, dq, dk, dv = (torch.zeros_like(x) for x in (q, q, k, v))
    columns = torch.arange(tokens, device=q.device)
    for head, first in itertools.product(range(group), range(0, queries, 2048)):
        rows = slice(first, min(first + 2048, queries))
        p = q[head, rows] @ k.T * scale
        if case["mask"] == "causal":
            p.masked_fill_(columns[None] > columns[rows, None], -math.inf)
        p = torch.softmax(p, -1)
        out[head, rows] = p @ v
        if case["pass"] == "backward":
            ds = dout[head, rows] @ v.T
            ds -= (p * ds).sum(-1, keepdim=True)
            ds *= p
            dq[head, rows] = scale * ds @ k
            dk += scale * ds.T @ q[head, rows]
            dv += p.T @ dout[head, rows]
    return (out,) if case["pass"] == "forward" else (dq, dk, dv)


def error(results, wanted, group):
    """The largest over the results of ||x - ref|| / ||ref||; a NaN stays one."""
    worst = []
    for got, want in zip(results, wanted):
        part = got[-1, -group:].double() if want.dim() == 3 else got[-1, -1].double()
        worst.append(((part - want).norm() / want.norm()).item())
    return math.nan if any(map(math.isnan, worst)) else max(worst)


# ---- a cell ----


def contestants(case, options, tensors):
    """{name: function}, {name: why not}"""
    row = FP32_ROW if case["dtype"] == "f32" else GRID_ROW
    peers = options.peers.split(",")
    calls, refused = {}, {}
    for name in row:
        if name in PEERS and name not in peers or name == "ours_fma" and options.kernel:
            continue
        try:
            calls[name] = ours(case, options, tensors, name) if name in OURS else peer(case, tensors, name)
            with backend(name):
                calls[name]()
        except (attn.Error, NotImplementedError, RuntimeError) as reason:
            calls.pop(name, None)
            refused[name] = str(reason).splitlines()[0]
    torch.cuda.synchronize()
    return calls, refused


def measure(case, options, meter):
    tensors = arrays(case, options)
    calls, refused = contestants(case, options, tensors)
    row = {**case, "status": "; ".join(f"{name}: {text}" for name, text in refused.items()) or "ok"}
    meter.figures()
    taken = rounds(calls, options)
    row.update(meter.figures())
    row["seconds"] = taken
    row.update({name: flops(case) / statistics.median(seconds) / 1e12 for name, seconds in taken.items()})
    first = next((name for name in taken if name in PEERS), None)
    if "ours" in taken and first is not None:
        ratios = sorted(theirs / mine for mine, theirs in zip(taken["ours"], taken[first]))
        row["ratio"], row["against"] = statistics.median(ratios), first
        row["quartiles"] = statistics.quantiles(ratios, n=4, method="inclusive")[::2]
    if not options.no_check and calls:
        wanted = reference(case, tensors)
        group, row["errors"] = case["heads"] // case["kv_heads"], {}
        for name, call in calls.items():
            with backend(name):
                row["errors"][name] = error(call(), wanted, group)
    return row


class Report(common.Report):
    """The ratio is that of the first peer that a row has: cuDNN, else FA2, and in fp32 the memory-efficient kernel."""

    WIDTHS = {**common.Report.WIDTHS, "queries": 7, "tokens": 6, "ours_fma": 11, "errors": 30}

    @staticmethod
    def text(name, value):
        if isinstance(value, dict):
            return " ".join(f"{one:.1e}" for one in value.values())
        if isinstance(value, float) and name == "ratio":
            return f"{value:.3f}"
        return common.Report.text(name, value)

    def summary(self):
        passes = dict.fromkeys(row["pass"] for row in self.rows)
        for kind, (peer, spelled) in itertools.product(passes, (("cudnn", "cuDNN"), ("flash", "FA2"))):
            against = [row for row in self.rows if row["pass"] == kind and row.get("against") == peer]
            grid = [row for row in against if row["heads"] == row["kv_heads"]]
            if grid:
                worst = min(grid, key=lambda row: row["ratio"])
                mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in grid))
                yield (f"{kind}: geometric mean of {len(grid)} ratios to {spelled} {mean:.3f}, the worst "
                       f"{worst['ratio']:.3f} (d={worst['dim']}, {worst['mask']}, {worst['tokens']} tokens)")


# ---- the host's part of a call ----


def by_autograd(case, tensors):
    """Our calls as autograd makes them; those that are compared above go around it."""
    q, k, v, dout = tensors
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    if case["pass"] == "forward":
        return lambda: attn.torch.attention(*leaves, causal=True)
    made = attn.torch.attention(*leaves, causal=True)
    return lambda: torch.autograd.grad(made, leaves, dout, retain_graph=True)


def overhead(options):
    """Microseconds of the host for one call, of a problem so small that the GPU never makes it wait."""
    case = {
        "dtype": options.dtype, "mask": "causal", "batch": 1, "heads": 1, "kv_heads": 1, "queries": 256,
        "tokens": 256, "dim": 64
    }
    print("host's time of one call, microseconds: median and least of 20 batches of 100")
    for kind in options.passes.split(","):
        case["pass"] = kind
        tensors = arrays(case, options)
        calls, refused = contestants(case, options, tensors)
        if "ours" in calls:
            calls["autograd"] = by_autograd(case, tensors)
        for name, call in calls.items():
            taken = []
            for _ in range(20):
                torch.cuda.synchronize()
                with backend(name):
                    begin = time.perf_counter()
                    for _ in range(100):
                        call()
                    taken.append((time.perf_counter() - begin) * 1e4)
            print(f"{kind:9} {name:10} {statistics.median(taken):7.1f} {min(taken):7.1f}")
        for name, text in refused.items():
            print(f"{kind:9} {name:10} {text}")


def about(options, meter):
    cudnn = torch.backends.cudnn.version() or 0
    return {
        "date": datetime.date.today().isoformat(),
        "GPU": f"{torch.cuda.get_device_name()}, driver {meter.driver()}",
        "ours": f"attn {attn.version()}, {attn.library()}",
        "peers": f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, cuDNN {cudnn // 10000}."
                 f"{cudnn // 100 % 100}.{cudnn % 100}, and FlashAttention-2 as PyTorch has it",
        "figures": "TFLOP/s (4*b*h*queries*tokens*d, half if causal, backward 2.5 times) of the median round; ratio: "
                   "ours to cuDNN, without it to FA2, in fp32 to efficient; errors against fp64, in the order of the columns",
        "time": f"events around batches of about {options.batch_ms} ms, {options.repeat} rounds, "
                "contestants in turn, launches ahead of the GPU"
    }


def main():
    options = arguments().parse_args()
    if not torch.cuda.is_available():
        print("torch_cuda.py: PyTorch sees no GPU here", file=sys.stderr)
        return 3
    if options.overhead:
        overhead(options)
        return 0
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8") # what PyTorch asks for, of the reference's products
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    meter = Meter()
    report = Report(options.format, about(options, meter), COLUMNS)
    for case in cases(options):
        report.add(measure(case, options, meter))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
