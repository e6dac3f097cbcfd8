#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the Python package: what pip calls (PEP 517, PEP 660), and what the CMake target attn_wheel calls.

    pip install ./python                                    the package, with the library of ../build/release
                                                            if it is there
    pip install ./python --config-settings library=PATH     with that library; an empty PATH: without one
    python3 python/build_backend.py --library PATH FOLDER   a wheel in FOLDER

There is nothing to compile, so a wheel (PEP 427) is a zip file of the package, its metadata and a list of
hashes: to write that takes less than a build tool would, which a machine without network may lack. The tag
of a wheel with a library is this platform, not manylinux, since libattn needs the system's libgomp.
"""
import argparse
import base64
import hashlib
import io
import os
import pathlib
import re
import sys
import sysconfig
import tarfile
import zipfile

HERE = pathlib.Path(__file__).resolve().parent
BUILT = HERE.parent / "build" / "release" / "libattn.so"
PACKAGE = HERE / "attn"
VERSION = ".".join(
    re.search(r"^VERSION = \((\d+), (\d+), (\d+)\)$", (PACKAGE / "_types.py").read_text(),
              re.MULTILINE).groups())
INFO = f"attn-{VERSION}.dist-info"
METADATA = f"""Metadata-Version: 2.1
Name: attn
Version: {VERSION}
Summary: Exact attention on NumPy arrays and anything that speaks DLPack
License: Apache-2.0
Requires-Python: >=3.8
Requires-Dist: numpy
Provides-Extra: bfloat16
Requires-Dist: ml-dtypes; extra == "bfloat16"
"""


def sources():
    """{name in the package: content}"""
    return {
        f"attn/{path.name}": path.read_bytes()
        for path in sorted(PACKAGE.iterdir()) if path.suffix == ".py" or path.name == "py.typed"
    }


def library_of(settings):
    """The library that goes into the wheel, or None."""
    named = (settings or {}).get("library")
    if named is None:
        return BUILT if BUILT.exists() else None
    if named and not pathlib.Path(named).is_file():
        raise FileNotFoundError(f"library={named}: there is no such file")
    return pathlib.Path(named) if named else None


def record(files):
    """The list of hashes that a wheel ends with."""
    lines = []
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(content)}")
    return "\n".join([*lines, f"{INFO}/RECORD,,", ""]).encode()


def write_wheel(folder, files, tag):
    pure = str(tag == "py3-none-any").lower()
    wheel = f"Wheel-Version: 1.0\nGenerator: attn\nRoot-Is-Purelib: {pure}\nTag: {tag}\n"
    files = {**files, f"{INFO}/METADATA": METADATA.encode(), f"{INFO}/WHEEL": wheel.encode()}
    files[f"{INFO}/RECORD"] = record(files)
    name = f"attn-{VERSION}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(folder) / name, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path) # of 1980: the same content gives the same file
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if path.endswith(".so") else 0o644) << 16
            archive.writestr(entry, content)
    return name


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    library = library_of(config_settings)
    if library is None:
        return write_wheel(wheel_directory, sources(), "py3-none-any")
    platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
    files = {**sources(), "attn/libattn.so": library.read_bytes()}
    return write_wheel(wheel_directory, files, f"py3-none-{platform}")


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return write_wheel(wheel_directory, {"attn.pth": f"{HERE}\n".encode()}, "py3-none-any")


def build_sdist(sdist_directory, config_settings=None):
    root = f"attn-{VERSION}"
    files = {**sources(), "PKG-INFO": METADATA.encode()}
    for name in ("pyproject.toml", "build_backend.py"):
        files[name] = (HERE / name).read_bytes()
    with tarfile.open(pathlib.Path(sdist_directory) / f"{root}.tar.gz", "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"{root}/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return f"{root}.tar.gz"


def main():
    parser = argparse.ArgumentParser(description="Builds a wheel of the Python package.")
    parser.add_argument("--library", default="", help="libattn.so to put inside; default: none")
    parser.add_argument("folder")
    arguments = parser.parse_args()
    os.makedirs(arguments.folder, exist_ok=True)
    print(os.path.join(arguments.folder, build_wheel(arguments.folder, {"library": arguments.library})))


if __name__ == "__main__":
    sys.exit(main())
