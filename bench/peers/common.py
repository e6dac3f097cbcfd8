# SPDX-License-Identifier: Apache-2.0
"""What the comparisons with other libraries share: cases, interleaved samples, fp64 errors, the report.

A ratio is made of pairs: one call of ours and one of the peer's, one right after the other, each side the
first in every other pair. What disturbs a shared machine for longer than a pair disturbs both, and falls out
of the ratio; the rest shows in its spread. FLOPs by the field's convention: 4 * batch * heads * dim * visible
cells forward, 2.5 times as many backward.
"""
import argparse
import itertools
import json
import math
import pathlib
import statistics
import sys
import time

# where the package is not installed
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))

COLUMNS = ("pass", "dtype", "threads", "batch", "heads", "kv_heads", "queries", "tokens", "dim", "mask",
           "ours_gflops", "peer_gflops", "ratio", "quartiles", "range", "pairs", "ours_error", "peer_error",
           "status")


def numbers(text):
    """'512,2k,4Ki' -> [512, 2000, 4096]"""
    factors = {"Ki": 1024, "k": 1000}
    answer = []
    for part in text.split(","):
        suffix = next((suffix for suffix in factors if part.endswith(suffix)), "")
        answer.append(int(part[:len(part) - len(suffix)]) * factors.get(suffix, 1))
    return answer


def arguments(description, passes=("forward", ), dtypes=("f32", "f16", "bf16")):
    parser = argparse.ArgumentParser(description=description,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=numbers, default=[8], help="list; k is 1000, Ki is 1024")
    parser.add_argument("--kv-heads", type=int, default=0, help="0: as many as heads")
    parser.add_argument("--tokens", type=numbers, default=[512, 2048])
    parser.add_argument("--queries", type=int, default=0,
                        help="of each head, without a mask, as in decoding; 0: as many as tokens")
    parser.add_argument("--dim", type=numbers, default=[64, 128])
    parser.add_argument("--mask", choices=("full", "causal", "both"), default="both")
    parser.add_argument("--dtype", default="f32", help=f"list of {', '.join(dtypes)}")
    if len(passes) > 1:
        parser.add_argument("--pass", dest="passes", default="forward", help=f"list of {', '.join(passes)}")
    parser.add_argument("--threads", type=numbers, default=[1])
    parser.add_argument("--seconds",
                        type=float,
                        default=2.0,
                        help="at most so long for a case, and 2 pairs at least")
    parser.add_argument("--pairs", type=int, default=25, help="at most so many for a case")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds before each call")
    parser.add_argument("--kernel", default=None, help="a row of our kernel table")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-check", action="store_true", help="do not compute the errors against fp64")
    parser.add_argument("--format", choices=("table", "md", "json"), default="table")
    return parser


def cases(options):
    # Libraries differ in where a causal mask begins if there are fewer queries than keys.
    masks = ("full", "causal") if options.mask == "both" else (options.mask, )
    masks = ("full", ) if options.queries else masks
    passes = getattr(options, "passes", "forward").split(",")
    axes = itertools.product(passes, options.dtype.split(","), options.threads, options.heads, options.tokens,
                             options.dim, masks)
    for kind, dtype, threads, heads, tokens, dim, mask in axes:
        yield {
            "pass": kind, "dtype": dtype, "threads": threads, "batch": options.batch, "heads": heads,
            "kv_heads": options.kv_heads or heads, "queries": options.queries or tokens, "tokens": tokens,
            "dim": dim, "mask": mask
        }


def flops(case):
    tokens = case["tokens"]
    cells = tokens * (tokens + 1) // 2 if case["mask"] == "causal" else case["queries"] * tokens
    forward = 4.0 * case["batch"] * case["heads"] * cells * case["dim"]
    return forward * (2.5 if case["pass"] == "backward" else 1.0)


def clock(function, sleep):
    """Seconds of one call: what it returns if that is a time, else by the clock here."""
    if sleep:
        time.sleep(sleep)
    begin = time.perf_counter()
    told = function()
    taken = time.perf_counter() - begin
    return told if isinstance(told, float) else taken


class AnyCore:
    """Pairs count on whatever core the system gives."""

    def free(self):
        return True

    def leave(self):
        pass


def pair_of(sides, options, core):
    """The seconds of two calls, or None if the core was not free before, between and after them."""
    taken = []
    for side in sides:
        if not core.free():
            return None
        taken.append(clock(side, options.sleep))
    return taken if core.free() else None


def pairs_of(ours, peer, options, core=AnyCore()):
    """[(seconds of ours, seconds of the peer)], after one call of each to warm up."""
    ours(), peer()
    taken = []
    end = time.perf_counter() + options.seconds
    while len(taken) < options.pairs and (len(taken) < 2 or time.perf_counter() < end):
        first = len(taken) % 2
        pair = pair_of((peer, ours) if first else (ours, peer), options, core)
        if pair is not None:
            taken.append((pair[first], pair[1 - first]))
        elif time.perf_counter() < end + options.seconds:
            core.leave()
        else:
            raise NotImplementedError("no core was free for two pairs; try --seconds, or another hour")
    return taken


def figures(case, pairs):
    """Medians of both, and the ratio of speeds, ours to the peer's: above 1 ours is faster."""
    ratios = sorted(theirs / mine for mine, theirs in pairs)
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "ours_gflops": flops(case) / statistics.median(mine for mine, _ in pairs) / 1e9,
        "peer_gflops": flops(case) / statistics.median(theirs for _, theirs in pairs) / 1e9,
        "ratio": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "range": [ratios[0], ratios[-1]],
        "pairs": len(pairs),
    }


def relative_error(result, wanted):
    """||x - ref|| / ||ref||"""
    import numpy as np
    difference = np.asarray(result, np.float64) - wanted
    return float(np.sqrt(np.sum(difference * difference) / np.sum(wanted * wanted)))


def reference_rows(q, k, v, rows, causal):
    """Rows of one head's output in fp64; q, k, v are [tokens, dim]."""
    import numpy as np
    scores = q[rows].astype(np.float64) @ k.astype(np.float64).T / math.sqrt(q.shape[1])
    if causal:
        scores[np.arange(k.shape[0])[None, :] > np.asarray(rows)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights @ v.astype(np.float64) / weights.sum(axis=1, keepdims=True)


def sample_rows(tokens, count=16):
    return sorted({round(i * (tokens - 1) / (count - 1)) for i in range(count)})


class Report:
    """Rows as they come, and at the end the geometric mean of the ratios."""

    WIDTHS = {
        "pass": 8, "dtype": 5, "ours_gflops": 11, "peer_gflops": 11, "quartiles": 12, "range": 12,
        "ours_error": 10, "peer_error": 10
    }

    def __init__(self, form, about, columns=COLUMNS):
        self.form, self.about, self.columns, self.rows = form, about, columns, []
        if form != "json":
            for name, value in about.items():
                print(f"{name}: {value}{'  ' if form == 'md' else ''}")
            print()
            print(self.line({name: name for name in columns}))
            if form == "md":
                print("|" + "---|" * len(columns))

    @staticmethod
    def text(name, value):
        if isinstance(value, list):
            return "..".join(f"{number:.2f}" for number in value)
        if isinstance(value, float):
            digits = "1e" if name.endswith("error") else "2f" if name == "ratio" else "1f"
            return f"{value:.{digits}}"
        return str(value)

    def line(self, row):
        texts = [self.text(name, row.get(name, "")) for name in self.columns]
        if self.form == "md":
            return "| " + " | ".join(texts) + " |"
        return "  ".join(
            text.rjust(self.WIDTHS.get(name, max(6, len(name)))) for name, text in zip(self.columns, texts))

    def add(self, row):
        self.rows.append(row)
        if self.form != "json":
            print(self.line(row), flush=True)

    def summary(self):
        """What is told under the rows."""
        ratios = [row["ratio"] for row in self.rows if "ratio" in row]
        if ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            yield (f"geometric mean of {len(ratios)} ratios (above 1: ours is faster): {mean:.3f}, "
                   f"from {min(ratios):.2f} to {max(ratios):.2f}")

    def finish(self):
        ratios = [row["ratio"] for row in self.rows if "ratio" in row]
        mean = math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None
        if self.form == "json":
            everything = {"schema_version": 1, "about": self.about, "rows": self.rows, "geometric_mean": mean}
            print(json.dumps(everything, indent=1))
        else:
            print("".join(f"\n{line}" for line in self.summary()))
        return 0 if ratios else 3


def processor():
    """The model of the processor, and how many this process may use."""
    import os
    model = "unknown processor"
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            model = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} usable"


def thread_pools():
    """OpenMP runtimes in this process: two of them are two pools, whose idle threads disturb each other."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            path = line.split()[-1]
            if any(part in pathlib.Path(path).name for part in ("libgomp", "libomp", "libiomp")):
                found.add(path)
    return sorted(found)
