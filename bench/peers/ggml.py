#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""attn against ggml's flash attention on the CPU: the same arrays, two processes, in turn.

    ATTN_LIBRARY=build/release/libattn.so bench/peers/ggml.py --checkout ~/ggml --tokens 512,2Ki --threads 1,2

The checkout is left alone: ggml and a small driver are built elsewhere. README.md beside this file tells
more.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

# Read by the OpenMP runtimes of both processes when they are loaded: threads that wait do not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import common # noqa: E402
import numpy as np # noqa: E402

import attn # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent


def source_of(checkout):
    """ggml's own folder in a checkout of ggml, or of llama.cpp."""
    for folder in (checkout, checkout / "ggml", checkout / "vendor" / "llama.cpp" / "ggml"):
        if (folder / "include" / "ggml.h").exists():
            return folder.resolve()
    sys.exit(f"ggml.py: {checkout} has no include/ggml.h, and no ggml folder that has")


def build(source, folder):
    """Builds ggml and the driver in `folder`; the driver's path."""
    log = folder / "log"
    with open(log, "w", encoding="utf-8") as file:
        cores = str(len(os.sched_getaffinity(0)))
        configure = ["cmake", "-S", HERE / "ggml", "-B", folder, f"-DGGML_SOURCE={source}"]
        for command in ([*configure, "-DGGML_NATIVE=ON"], ["cmake", "--build", folder, "--parallel", cores]):
            if subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode != 0:
                print(log.read_text()[-3000:], file=sys.stderr)
                sys.exit(f"ggml.py: cannot build {source}, see above")
    return folder / "ggml_driver"


SIZES = ("batch", "heads", "kv_heads", "queries", "tokens", "dim", "threads")


class Driver:
    """One process of ggml, which computes when it is told to."""

    def __init__(self, program, case, arrays, folder):
        paths = [folder / name for name in ("q", "k", "v", "o")]
        for path, array in zip(paths, arrays):
            array.tofile(path)
        self.result = paths[3]
        sizes = [str(case[name]) for name in SIZES]
        self.process = subprocess.Popen([program, *paths, *sizes, case["mask"], case["dtype"]],
                                        stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE,
                                        text=True,
                                        bufsize=1)
        self.answer("ready")

    def answer(self, wanted=None):
        line = self.process.stdout.readline().strip()
        if not line or (wanted is not None and line != wanted):
            self.process.kill()
            raise RuntimeError(f"the driver ended with {self.process.wait()}")
        return line

    def __call__(self):
        """Seconds, by the driver's own clock."""
        self.process.stdin.write("\n")
        return float(self.answer())

    def finish(self, case):
        """The result, [batch, queries, heads, dim]."""
        self.process.stdin.close()
        if self.process.wait() != 0:
            raise RuntimeError(f"the driver ended with {self.process.returncode}")
        shape = [case[name] for name in ("batch", "queries", "heads", "dim")]
        return np.fromfile(self.result, np.float32).reshape(shape)


def inputs(case, seed):
    random = np.random.default_rng(seed)
    dtype = {"f32": np.float32, "f16": np.float16}[case["dtype"]]
    shape_q, shape_kv = ((case["batch"], case[heads], case[tokens], case["dim"])
                         for heads, tokens in (("heads", "queries"), ("kv_heads", "tokens")))
    shapes = (shape_q, shape_kv, shape_kv)
    return [random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def measure(case, options, program, folder):
    q, k, v = inputs(case, options.seed)
    causal = case["mask"] == "causal"
    try:
        driver = Driver(program, case, (q.astype(np.float32), k, v), folder)
        out = np.empty(q.shape, np.float32)

        def ours():
            attn.attention(q, k, v, causal=causal, threads=case["threads"], kernel=options.kernel, out=out)

        row = {**case, **common.figures(case, common.pairs_of(ours, driver, options)), "status": "ok"}
        peer = driver.finish(case)
    except (RuntimeError, attn.Error) as error:
        return {**case, "status": str(error)}
    if not options.no_check:
        batch, head = case["batch"] - 1, case["heads"] - 1
        head_kv = head // (case["heads"] // case["kv_heads"])
        rows = common.sample_rows(case["queries"])
        wanted = common.reference_rows(q[batch, head], k[batch, head_kv], v[batch, head_kv], rows, causal)
        row["ours_error"] = common.relative_error(out[batch, head, rows], wanted)
        row["peer_error"] = common.relative_error(peer[batch, rows, head], wanted)
    return row


def main():
    parser = common.arguments(__doc__.splitlines()[0], dtypes=("f32", "f16"))
    parser.add_argument("--checkout",
                        type=pathlib.Path,
                        required=True,
                        help="source tree of ggml, or of llama.cpp")
    parser.add_argument("--build",
                        type=pathlib.Path,
                        help="folder to build in, used again if it is there; default: a temporary one")
    options = parser.parse_args()
    source = source_of(options.checkout)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.build or pathlib.Path(temporary) / "build"
        folder.mkdir(parents=True, exist_ok=True)
        program = build(source, folder.resolve())
        version = re.findall(r"^set\(GGML_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)\)",
                             (source / "CMakeLists.txt").read_text(), re.MULTILINE)
        policy = [f"{name}={os.environ[name]}" for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")]
        about = {
            "processor": common.processor(),
            "ours": f"attn {attn.version()}, {attn.library()}",
            "peer": f"ggml {'.'.join(version) or '(version not told)'} ggml_flash_attn_ext, q and o in fp32",
            "wait policy": " ".join(policy),
        }
        report = common.Report(options.format, about)
        for case in common.cases(options):
            report.add(measure(case, options, program, pathlib.Path(temporary)))
        return report.finish()


if __name__ == "__main__":
    sys.exit(main())
