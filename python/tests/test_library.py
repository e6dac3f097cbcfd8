# SPDX-License-Identifier: Apache-2.0
"""Where the library is looked for, and what is said when it is not there or another one."""
import os
import pathlib
import shutil
import subprocess
import sys

import attn
import pytest

PACKAGE = pathlib.Path(attn.__file__).parent


def run(code, path, **environment):
    # ctypes.util.find_library may find an installed libattn by LD_LIBRARY_PATH and pkg-config by its own path
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("ATTN_LIBRARY", "LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "PYTHONPATH")
    }
    return subprocess.run([sys.executable, "-c", code],
                          capture_output=True,
                          text=True,
                          check=False,
                          cwd=path, # "-c" looks for packages where it runs first
                          env={**clean, "PYTHONPATH": str(path), **environment})


@pytest.fixture
def copy(tmp_path):
    """The package away from the source tree."""
    shutil.copytree(PACKAGE, tmp_path / "attn", ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    return tmp_path


@pytest.fixture
def library():
    if not os.path.isabs(attn.library()):
        pytest.skip("the library in use was found by name, not by path")
    return attn.library()


WHERE = "import attn; print(attn.library())"


def test_beside_the_package_and_by_variable(copy, library):
    shutil.copy(library, copy / "attn" / "libattn.so")
    assert run(WHERE, copy).stdout.strip() == str(copy / "attn" / "libattn.so")
    assert run(WHERE, copy, ATTN_LIBRARY=library).stdout.strip() == library


def test_source_tree(tmp_path, library):
    shutil.copytree(PACKAGE,
                    tmp_path / "python" / "attn",
                    ignore=shutil.ignore_patterns("*.so*", "__pycache__"))
    (tmp_path / "build" / "release").mkdir(parents=True)
    shutil.copy(library, tmp_path / "build" / "release" / "libattn.so")
    answer = run(WHERE, tmp_path / "python")
    assert answer.stdout.strip() == str(tmp_path / "build" / "release" / "libattn.so")


def test_pkg_config(copy, library):
    (copy / "lib").mkdir()
    shutil.copy(library, copy / "lib" / "libattn.so")
    (copy / \
     "attn.pc").write_text(f"libdir={copy}/lib\nName: attn\nDescription: test\nVersion: {attn.version()}\n")
    if shutil.which("pkg-config") is None or "the system's libraries, which have no" not in run(
            "import attn", copy).stderr:
        pytest.skip("no pkg-config, or libattn is installed")
    assert run(WHERE, copy, PKG_CONFIG_PATH=str(copy)).stdout.strip() == str(copy / "lib" / "libattn.so")


def test_nowhere(copy):
    answer = run("import attn", copy)
    if answer.returncode == 0:
        pytest.skip("libattn is installed")
    assert "ImportError: attn: found no libattn.so. Build it" in answer.stderr
    for place in ("ATTN_LIBRARY, which is not set", f"{copy}/attn/libattn.so, which is not there",
                  "build/release", "the system's libraries", "pkg-config"):
        assert place in answer.stderr


def test_variable_names_nothing(copy):
    answer = run("import attn", copy, ATTN_LIBRARY="/nowhere/libattn.so")
    assert answer.returncode != 0
    assert "cannot load ATTN_LIBRARY, which is /nowhere/libattn.so" in answer.stderr


def test_another_library(copy, tmp_path):
    compiler = os.environ.get("CC") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    from attn._types import FUNCTIONS
    lines = [f"void {name}(void) {{}}" for name in FUNCTIONS if name != "attn_version"]
    source = tmp_path / "old.c"
    for text, function in (("is version 0.0.9, this package is 0.1.0",
                            'const char *attn_version(void) { return "0.0.9"; }'),
                           ("is another version of the library, or another library", "")):
        source.write_text("\n".join([*lines, function, ""]))
        subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "old.so", source], check=True)
        answer = run("import attn", copy, ATTN_LIBRARY=str(tmp_path / "old.so"))
        assert answer.returncode != 0 and text in answer.stderr
