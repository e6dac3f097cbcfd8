#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attn against PyTorch on the CPU: the same arrays, in one process, in turn.

    ATTN_LIBRARY=build/release/libattn.so bench/peers/torch_cpu.py --tokens 512,2Ki,8Ki --threads 1,2

PyTorch's scaled_dot_product_attention is called where this version has it, else softmax(q k^T) v in separate
calls ("eager"). Both sides make their own result arrays. README.md beside this file tells what is printed.
"""
import os
import subprocess
import sys

# Read by the OpenMP runtime when it is loaded, so before any import of it: threads that wait do not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import common # noqa: E402

try:
    import torch # before attn: where both use libgomp.so.1, the one of PyTorch then serves both
except ImportError:
    print("torch_cpu.py: there is no PyTorch for this Python; run it by one that has it", file=sys.stderr)
    sys.exit(3)
import numpy as np # noqa: E402

import attn # noqa: E402

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def eager(q, k, v, causal):
    scores = q @ k.transpose(-1, -2) * q.shape[-1]**-0.5
    if causal:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(above, float("-inf"))
    return torch.softmax(scores, -1) @ v


def peer_attention(name, q, k, v, causal):
    group = q.shape[1] // k.shape[1]
    sdpa = getattr(torch.nn.functional, "scaled_dot_product_attention", None)
    if name == "sdpa" and group > 1:
        try:
            return sdpa(q, k, v, is_causal=causal, enable_gqa=True)
        except TypeError: # a version before grouped heads
            pass
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return eager(q, k, v, causal) if name == "eager" else sdpa(q, k, v, is_causal=causal)


def arrays(case, seed):
    generator = torch.Generator().manual_seed(seed)
    sides = [("heads", "queries"), ("kv_heads", "tokens"), ("kv_heads", "tokens"), ("heads", "queries")]
    shapes = [(case["batch"], case[heads], case[tokens], case["dim"]) for heads, tokens in sides]
    return [torch.randn(shape, generator=generator).to(DTYPES[case["dtype"]]) for shape in shapes]


def forward(case, options):
    """(ours, the peer's, their errors) as functions."""
    q, k, v, _ = arrays(case, options.seed)
    causal = case["mask"] == "causal"

    def ours():
        return attn.attention(q, k, v, causal=causal, threads=case["threads"], kernel=options.kernel)

    def peer():
        with torch.no_grad():
            return peer_attention(options.peer, q, k, v, causal)

    def errors():
        group = case["heads"] // case["kv_heads"]
        batch, head = case["batch"] - 1, case["heads"] - 1
        rows = common.sample_rows(case["queries"])
        inputs = [x[batch, h].float().numpy() for x, h in ((q, head), (k, head // group), (v, head // group))]
        wanted = common.reference_rows(*inputs, rows, causal)
        return [
            common.relative_error(side()[batch, head].float().numpy()[rows], wanted) for side in (ours, peer)
        ]

    return ours, peer, errors


def reference_gradients(q, k, v, dout, causal):
    """dq, dk and dv of one kv head in fp64; q and dout are [group, queries, dim]. In pieces of 256 rows."""
    queries, tokens, scale = q.shape[1], k.shape[0], q.shape[2]**-0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for head in range(q.shape[0]):
        for first in range(0, queries, 256):
            rows = slice(first, min(first + 256, queries))
            keys = slice(0, rows.stop if causal else tokens)
            scores = q[head, rows] @ k[keys].T * scale
            if causal:
                scores[np.arange(keys.stop)[None, :] > np.arange(rows.start, rows.stop)[:, None]] = -np.inf
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            dp = dout[head, rows] @ v[keys].T
            ds = p * (dp - np.sum(p * dp, axis=1, keepdims=True))
            dq[head, rows] = scale * ds @ k[keys]
            dk[keys] += scale * ds.T @ q[head, rows]
            dv[keys] += p.T @ dout[head, rows]
    return dq, dk, dv


def backward(case, options):
    q, k, v, dout = arrays(case, options.seed)
    causal = case["mask"] == "causal"
    out, lse = attn.attention(q, k, v, causal=causal, threads=case["threads"], return_lse=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    made = peer_attention(options.peer, *leaves, causal)

    def ours():
        return attn.attention_backward(dout,
                                       q,
                                       k,
                                       v,
                                       out,
                                       lse,
                                       causal=causal,
                                       threads=case["threads"],
                                       kernel=options.kernel)

    def peer():
        return torch.autograd.grad(made, leaves, dout, retain_graph=True)

    def errors():
        batch, head = case["batch"] - 1, case["kv_heads"] - 1
        group = case["heads"] // case["kv_heads"]
        heads = slice(head * group, (head + 1) * group)
        parts = [
            x.double().numpy() for x in (q[batch, heads], k[batch, head], v[batch, head], dout[batch, heads])
        ]
        wanted = reference_gradients(*parts, causal)
        return [
            max(
                common.relative_error(got[batch, part].float().numpy(), want)
                for got, part, want in zip(side(), (heads, head, head), wanted)) for side in (ours, peer)
        ]

    return ours, peer, errors


class FreeCore:
    """Processors whose other hyperthread sleeps, as bench_kernel_cpu_tiles --free tells; one after the other."""

    def __init__(self, program):
        self.program = program
        self.cores = sorted(os.sched_getaffinity(0))
        self.at = 0
        self.leave()

    def free(self):
        code = subprocess.run([self.program, "--free"], check=False).returncode
        if code not in (0, 4):
            sys.exit(f"torch_cpu.py: {self.program} --free ends with {code}")
        return code == 0

    def leave(self):
        self.at = (self.at + 1) % len(self.cores)
        os.sched_setaffinity(0, {self.cores[self.at]})


def measure(case, options, core):
    torch.set_num_threads(case["threads"])
    try:
        ours, peer, errors = {"forward": forward, "backward": backward}[case["pass"]](case, options)
        row = {**case, **common.figures(case, common.pairs_of(ours, peer, options, core)), "status": "ok"}
        if not options.no_check:
            row["ours_error"], row["peer_error"] = errors()
        return row
    except (attn.Error, MemoryError, NotImplementedError) as error:
        return {**case, "status": str(error)}
    except RuntimeError as error: # PyTorch out of memory, or without this dtype
        return {**case, "status": str(error).splitlines()[0]}


def main():
    parser = common.arguments(__doc__.splitlines()[0], passes=("forward", "backward"), dtypes=tuple(DTYPES))
    has_sdpa = hasattr(torch.nn.functional, "scaled_dot_product_attention")
    parser.add_argument("--peer", choices=("sdpa", "eager"), default="sdpa" if has_sdpa else "eager")
    parser.add_argument("--free-core",
                        metavar="PROGRAM",
                        help="one thread: count pairs only while the other hyperthread of the core sleeps, as "
                        "PROGRAM, a bench_kernel_cpu_tiles, tells")
    options = parser.parse_args()
    if options.free_core and options.threads != [1]:
        parser.error("--free-core looks at one core: it goes with --threads 1")
    attn.attention(*[np.ones((2, 2), np.float32)] * 3) # loads the OpenMP runtime
    pools = common.thread_pools()
    report = common.Report(
        options.format, {
            "processor": common.processor(), "ours": f"attn {attn.version()}, {attn.library()}", "peer":
            f"PyTorch {torch.__version__} {options.peer}", "wait policy":
            f"OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']} "
            f"GOMP_SPINCOUNT={os.environ['GOMP_SPINCOUNT']}", "OpenMP": ", ".join(pools)
        })
    if len(pools) > 1:
        print(
            "torch_cpu.py: two OpenMP runtimes in one process: a pool of threads each. Unless "
            "OMP_WAIT_POLICY is passive, the idle ones spin and take the cores of the others",
            file=sys.stderr)
    core = FreeCore(options.free_core) if options.free_core else common.AnyCore()
    for case in common.cases(options):
        report.add(measure(case, options, core))
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
