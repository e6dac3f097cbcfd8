# SPDX-License-Identifier: Apache-2.0
"""Finds libattn, loads it and calls it.

Looked for, in this order: the file that ATTN_LIBRARY names; beside this file, where a wheel puts it;
build/release of the source tree that this file lies in; where the system's linker and pkg-config know it.
"""
import ctypes
import ctypes.util
import os
import pathlib
import shutil
import subprocess
import weakref
from typing import Any, Iterator, List, Tuple

from ._errors import BY_STATUS, Error
from ._types import FUNCTIONS, VERSION, Options, Problem, Status

HERE = pathlib.Path(__file__).resolve().parent


def pkg_config() -> str:
    """The folder of an installed libattn, or ''."""
    program = shutil.which("pkg-config")
    if program is None:
        return ""
    answer = subprocess.run([program, "--variable=libdir", "attn"],
                            capture_output=True,
                            text=True,
                            check=False)
    return answer.stdout.strip() if answer.returncode == 0 else ""


def places() -> Iterator[Tuple[str, str]]:
    """(what was looked at, path or name to load, '' if there is nothing)"""
    named = os.environ.get("ATTN_LIBRARY", "")
    yield f"ATTN_LIBRARY, which is {named or 'not set'}", named
    for file in (HERE / "libattn.so", HERE.parents[1] / "build" / "release" / "libattn.so"):
        yield f"{file}{'' if file.exists() else ', which is not there'}", str(file) if file.exists() else ""
    name = ctypes.util.find_library("attn") or ""
    yield f"the system's libraries{'' if name else ', which have no libattn'}", name
    folder = pkg_config()
    path = os.path.join(folder, "libattn.so") if folder else ""
    yield f"pkg-config attn, which says {folder or 'nothing'}", path


def find() -> Tuple[ctypes.CDLL, str]:
    tried: List[str] = []
    for what, path in places():
        if path:
            try:
                return ctypes.CDLL(path), path
            except OSError as error:
                what += f": {error}"
                if not tried: # ATTN_LIBRARY is an order: nothing else may stand in for it
                    raise ImportError(f"attn: cannot load {what}") from None
        tried.append(what)
    raise ImportError(
        "attn: found no libattn.so. Build it (cmake --preset release && cmake --build --preset release), "
        "install it, or set ATTN_LIBRARY to its path. Looked at:\n    " + "\n    ".join(tried))


def load() -> Tuple[ctypes.CDLL, str]:
    """The library, with prototypes, and the path or name that it was loaded by."""
    library, path = find()
    try:
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError as error:
        raise ImportError(
            f"attn: {path} is another version of the library, or another library: {error}") from None
    found = library.attn_version().decode()
    # Before 1.0 the interface may change with the minor version.
    if found.split(".")[:2] != [str(part) for part in VERSION[:2]]:
        raise ImportError(f"attn: {path} is version {found}, this package is {'.'.join(map(str, VERSION))}: "
                          "install matching versions, or set ATTN_LIBRARY to another library")
    return library, path


LIBRARY, PATH = load()


def last_error() -> str:
    return LIBRARY.attn_last_error().decode(errors="replace")


def failure(status: int, text: str) -> Error:
    try:
        return BY_STATUS[Status(status)](text)
    except ValueError:
        return Error(f"status {status}: {text}")


def call(name: str, *arguments: Any) -> None:
    """Calls a function of attn.h that returns a status; raises what it says."""
    status = getattr(LIBRARY, name)(*arguments)
    if status != 0:
        raise failure(status, last_error())


def create_plan(owner: Any, problem: Problem, options: Options) -> ctypes.c_void_p:
    """A plan, which is destroyed when its owner is no more."""
    handle = ctypes.c_void_p()
    call("attn_plan_create", ctypes.byref(handle), ctypes.byref(problem), ctypes.byref(options))
    weakref.finalize(owner, LIBRARY.attn_plan_destroy, handle)
    return handle
