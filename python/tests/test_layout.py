# SPDX-License-Identifier: Apache-2.0
"""_types.py says what attn.h says: a program in C prints sizes, offsets, values; the version likewise."""
import ctypes
import enum
import os
import pathlib
import re
import shutil
import subprocess

import attn
import pytest
from attn import _types

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include"


def header():
    """attn.h, with what it includes, without comments."""
    text = "".join((HEADER / "attn" / name).read_text() for name in ("attn.h", "plan.h"))
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def c_name(kind):
    return "attn_" + re.sub(r"(?<=.)([A-Z])", r"_\1", kind.__name__).lower()


def structs():
    return [
        kind for kind in vars(_types).values() if isinstance(kind, type)
        and issubclass(kind, ctypes.Structure) and "_fields_" in vars(kind) and kind is not _types.Sized
    ]


def enumerations():
    return [
        kind for kind in vars(_types).values()
        if isinstance(kind, type) and issubclass(kind, enum.IntEnum) and kind is not enum.IntEnum
    ]


def expected():
    """What C should print: {expression: value}"""
    values = {}
    for kind in structs():
        values[f"sizeof({c_name(kind)})"] = ctypes.sizeof(kind)
        for name, _ in kind._fields_:
            values[f"offsetof({c_name(kind)}, {name})"] = getattr(kind, name).offset
            values[f"sizeof((({c_name(kind)} *)0)->{name})"] = getattr(kind, name).size
    for kind in enumerations():
        values.update({f"ATTN_{member.name}": member.value for member in kind})
        values[f"sizeof({c_name(kind)})"] = ctypes.sizeof(ctypes.c_int)
    values.update(zip(("ATTN_VERSION_MAJOR", "ATTN_VERSION_MINOR", "ATTN_VERSION_PATCH"), _types.VERSION))
    return values


def test_structs_and_enumerations(tmp_path):
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    assert len(structs()) >= 12 and len(enumerations()) == 7
    lines = [f'    printf("{expression}=%lld\\n", (long long)({expression}));' for expression in expected()]
    source = tmp_path / "layout.c"
    source.write_text("#include <attn/attn.h>\n#include <stdio.h>\nint main(void)\n{\n" + "\n".join(lines) +
                      "\n}\n")
    subprocess.run([compiler, "-I", HEADER, source, "-o", tmp_path / "layout"], check=True)
    answer = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in (line.rsplit("=", 1) for line in answer.splitlines())}
    assert found == expected()


def test_no_field_is_missing():
    """The header's structs have no field that _types.py lacks, which offsets alone would not tell."""
    for kind in structs():
        body = re.search(r"typedef struct %s \{(.*?)\} %s;" % ((c_name(kind), ) * 2), header(), re.S).group(1)
        declarations = [re.sub(r"\[[^]]*\]|\([^)]*\)", "", part) for part in body.split(";") if part.strip()]
        names = [re.findall(r"\w+", name)[-1] for part in declarations for name in part.split(",")]
        assert names == [name for name, _ in kind._fields_], c_name(kind)


def test_no_value_is_missing():
    for kind in enumerations():
        if kind is _types.Status:
            names = re.findall(r"X\(ATTN_(\w+), \d+", header())
        else:
            body = re.search(r"typedef enum %s \{(.*?)\}" % c_name(kind), header(), re.S).group(1)
            names = re.findall(r"ATTN_(\w+)", body)
        assert names == [member.name for member in kind], c_name(kind)


def test_each_status_has_its_exception():
    by_status = {kind.status: kind for kind in attn.Error.__subclasses__()}
    assert set(by_status) == set(attn.Status) - {attn.Status.OK}
