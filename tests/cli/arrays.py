#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Arrays in files for run.sh, with nothing but Python's standard library.

    arrays.py make DIR              q, k, v of a small problem in every format, layout and dtype
    arrays.py bad DIR               files that must be refused
    arrays.py check DIR O [LSE]     O (and LSE) against attention computed here, in double precision
    arrays.py equal A B             two files hold the same dtype, shape and elements
    arrays.py poison FILE INDEX X   element INDEX of a '<f4' .npy becomes X
"""
import json
import math
import random
import struct
import sys

BATCH, HEADS, KV_HEADS, TOKENS, KV_TOKENS, DIM, DIM_V = 2, 4, 2, 13, 17, 5, 3
CODES = {"<f4": "f", "<f2": "e", "<f8": "d"}


def product(shape):
    return math.prod(shape)


def npy_header(descr, shape, order=False, version=1):
    text = "{'descr': %r, 'fortran_order': %r, 'shape': %r, }" % (descr, order, tuple(shape))
    length = 2 if version == 1 else 4
    text += " " * (-(8 + length + len(text) + 1) % 64) + "\n"
    head = b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(length, "little")
    return head + text.encode()


def write_npy(path, descr, shape, values, version=1):
    with open(path, "wb") as file:
        file.write(npy_header(descr, shape, version=version))
        file.write(struct.pack("<%d%s" % (len(values), CODES[descr]), *values))


def bf16(x):
    bits = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def write_safetensors(path, tensors):
    """tensors: [(name, dtype, shape, values)]"""
    header, data = {"__metadata__": {"made by": "arrays.py"}}, b""
    for name, dtype, shape, values in tensors:
        if dtype == "BF16":
            raw = struct.pack("<%dH" % len(values), *[bf16(x) for x in values])
        else:
            raw = struct.pack("<%d%s" % (len(values), {"F32": "f", "F16": "e", "F64": "d"}[dtype]), *values)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)


def read(path):
    """(dtype, shape, values) of a .npy or of the only tensor of a .safetensors"""
    with open(path, "rb") as file:
        raw = file.read()
    if raw[:6] == b"\x93NUMPY":
        length = int.from_bytes(raw[8:10], "little")
        assert raw[6:8] == b"\x01\x00" and (10 + length) % 64 == 0, "header is not as NumPy writes it"
        header = eval(raw[10 : 10 + length].decode())  # our own file
        descr, shape, data = header["descr"], list(header["shape"]), raw[10 + length :]
        return descr, shape, list(struct.unpack("<%d%s" % (product(shape), CODES[descr]), data))
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    (entry,) = [value for name, value in header.items() if name != "__metadata__"]
    shape, data = entry["shape"], raw[8 + length :]
    assert entry["data_offsets"] == [0, len(data)]
    if entry["dtype"] == "BF16":
        words = struct.unpack("<%dH" % product(shape), data)
        return "BF16", shape, [struct.unpack("<f", struct.pack("<I", w << 16))[0] for w in words]
    code = {"F32": "f", "F16": "e"}[entry["dtype"]]
    return entry["dtype"], shape, list(struct.unpack("<%d%s" % (product(shape), code), data))


def transpose(values, shape):
    """[b, h, n, d] to [b, n, h, d]"""
    b, h, n, d = shape
    return [
        values[((i * h + j) * n + t) * d + c] for i in range(b) for t in range(n) for j in range(h) for c in range(d)
    ]


def problem():
    """q, k, v whose elements are exact in every dtype: small multiples of 1/8"""
    rng = random.Random(1)
    shapes = {
        "q": [BATCH, HEADS, TOKENS, DIM],
        "k": [BATCH, KV_HEADS, KV_TOKENS, DIM],
        "v": [BATCH, KV_HEADS, KV_TOKENS, DIM_V],
    }
    return {x: (shape, [rng.randint(-16, 16) / 8 for _ in range(product(shape))]) for x, shape in shapes.items()}


def make(folder):
    tensors = {"F32": [], "F16": [], "BF16": [], "F64": []}
    for x, (shape, values) in problem().items():
        b, h, n, d = shape
        write_npy(f"{folder}/{x}.npy", "<f4", shape, values)
        write_npy(f"{folder}/{x}_v2.npy", "<f4", shape, values, version=2)
        write_npy(f"{folder}/{x}_v3.npy", "<f4", shape, values, version=3)
        write_npy(f"{folder}/{x}_f2.npy", "<f2", shape, values)
        write_npy(f"{folder}/{x}_f8.npy", "<f8", shape, values)
        write_npy(f"{folder}/{x}_bnhd.npy", "<f4", [b, n, h, d], transpose(values, shape))
        write_npy(f"{folder}/{x}_bnhd_f8.npy", "<f8", [b, n, h, d], transpose(values, shape))
        write_npy(f"{folder}/{x}_3.npy", "<f4", [h, n, d], values[: h * n * d])
        write_npy(f"{folder}/{x}_3nhd.npy", "<f4", [n, h, d], transpose(values[: h * n * d], [1, h, n, d]))
        write_npy(f"{folder}/{x}_2.npy", "<f4", [n, d], values[: n * d])
        for dtype, table in tensors.items():
            table.append((x, dtype, shape, values))
        write_safetensors(f"{folder}/only_{x}.safetensors", [("weights." + x, "F32", shape, values)])
    for dtype, table in tensors.items():
        write_safetensors(f"{folder}/all_{dtype}.safetensors", table)


def bad(folder):
    zeros = struct.pack("<24f", *range(24))
    plain = npy_header("<f4", (4, 6))
    files = {
        "empty.npy": b"",
        "magic.npy": b"NOTNUMPY" + plain[8:] + zeros,
        "cut.npy": plain + zeros[:-1],
        "long.npy": plain + zeros + b"x",
        "header_cut.npy": plain[:40],
        "header_lies.npy": plain[:8] + b"\xff\xff" + plain[10:] + zeros,
        "fortran.npy": npy_header("<f4", (4, 6), order=True) + zeros,
        "big_endian.npy": npy_header(">f4", (4, 6)) + zeros,
        "int.npy": npy_header("<i4", (4, 6)) + zeros,
        "negative.npy": npy_header("<f4", (-4, 6)) + zeros,
        "overflow.npy": npy_header("<f4", (1 << 40, 1 << 40)) + zeros,
        "five.npy": npy_header("<f4", (1, 1, 1, 4, 6)) + zeros,
        "vector.npy": npy_header("<f4", (24,)) + zeros,
        "no_tokens.npy": npy_header("<f4", (0, 6)),
        "no_dim.npy": npy_header("<f4", (4, 0)),
        "wide.npy": npy_header("<f4", (1, 513)) + b"\0" * 4 * 513,
        "text.txt": b"hello",
        "cut.safetensors": (1000).to_bytes(8, "little") + b"{}",
        "json.safetensors": (4).to_bytes(8, "little") + b"{'a'" + zeros,
        "int.safetensors": None,
        "two.safetensors": None,
    }
    for name, data in files.items():
        if data is not None:
            with open(f"{folder}/{name}", "wb") as file:
                file.write(data)
    text = b'{"x":{"dtype":"I32","shape":[24],"data_offsets":[0,96]}}'
    with open(f"{folder}/int.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + zeros)
    write_safetensors(f"{folder}/two.safetensors", [("a", "F32", [4, 6], [0] * 24), ("b", "F32", [4, 6], [0] * 24)])
    for name, shape in [("good", (4, 6)), ("other_dim", (6, 4)), ("rank3", (1, 4, 6)), ("other_tokens", (2, 6))]:
        write_npy(f"{folder}/{name}.npy", "<f4", shape, [0.5] * product(shape))
    for heads in (2, 3, 4):
        write_npy(f"{folder}/heads{heads}.npy", "<f4", (heads, 2, 4), [0.5] * (heads * 8))
    write_npy(f"{folder}/batch2.npy", "<f4", (2, 1, 2, 4), [0.5] * 16)
    write_npy(f"{folder}/batch1.npy", "<f4", (1, 1, 2, 4), [0.5] * 8)
    write_npy(f"{folder}/half.npy", "<f2", (4, 6), [0.5] * 24)


def attention(causal=False):
    """(o, lse) as flat lists over [b, h, n, ...]"""
    data = problem()
    q, k, v = data["q"][1], data["k"][1], data["v"][1]
    o, lse = [], []
    for b in range(BATCH):
        for h in range(HEADS):
            kv = b * KV_HEADS + h // (HEADS // KV_HEADS)
            for i in range(TOKENS):
                row = q[((b * HEADS + h) * TOKENS + i) * DIM :][:DIM]
                seen = i + 1 + KV_TOKENS - TOKENS if causal else KV_TOKENS
                scores = [
                    sum(x * y for x, y in zip(row, k[(kv * KV_TOKENS + j) * DIM :][:DIM])) / math.sqrt(DIM)
                    for j in range(seen)
                ]
                most = max(scores)
                weights = [math.exp(s - most) for s in scores]
                total = math.fsum(weights)
                lse.append(most + math.log(total))
                for c in range(DIM_V):
                    terms = [w * v[(kv * KV_TOKENS + j) * DIM_V + c] for j, w in enumerate(weights)]
                    o.append(math.fsum(terms) / total)
    return o, lse


def check(kind, o_path, lse_path=None):
    o, lse = attention(causal="causal" in kind)
    dtype, shape, got = read(o_path)
    want_shape = [BATCH, HEADS, TOKENS, DIM_V]
    if "bnhd" in kind:
        o, want_shape = transpose(o, want_shape), [BATCH, TOKENS, HEADS, DIM_V]
    if "3" in kind:  # one batch, no batch dimension
        first = HEADS * TOKENS * DIM_V
        o, want_shape = o[:first], [HEADS, TOKENS, DIM_V]
        if "3nhd" in kind:
            o, want_shape = transpose(o, [1] + want_shape), [TOKENS, HEADS, DIM_V]
    if kind.startswith("2"):
        o, want_shape = o[: TOKENS * DIM_V], [TOKENS, DIM_V]
    tolerance = {"<f4": 1e-6, "F32": 1e-6, "<f2": 2e-3, "F16": 2e-3, "BF16": 1.6e-2}[dtype]
    if "bf16" in kind:  # inputs: their weights may be rounded
        tolerance = 1.6e-2
    assert shape == want_shape, (shape, want_shape)
    worst = max(abs(x - y) for x, y in zip(got, o))
    assert len(got) == len(o) and worst <= tolerance, worst
    if lse_path:
        dtype, shape, got = read(lse_path)
        lse = lse[: product(shape)]
        assert dtype in ("<f4", "F32") and shape == [BATCH, HEADS, TOKENS][4 - len(want_shape) :], shape
        assert max(abs(x - y) for x, y in zip(got, lse)) <= 2e-6 and len(got) == len(lse)


def equal(one, other):
    assert read(one) == read(other)


def poison(path, index, value):
    with open(path, "r+b") as file:
        raw = file.read()
        file.seek(10 + int.from_bytes(raw[8:10], "little") + 4 * int(index))
        file.write(struct.pack("<f", float(value)))


if __name__ == "__main__":
    {"make": make, "bad": bad, "check": check, "equal": equal, "poison": poison}[sys.argv[1]](*sys.argv[2:])
