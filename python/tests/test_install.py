# SPDX-License-Identifier: Apache-2.0
"""pip install ./python, without a network, into a fresh environment; wheels; the editable install."""
import base64
import csv
import hashlib
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import venv
import zipfile

import attn
import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CODE = """import attn, numpy
print(attn.__file__, attn.library(), attn.attention(*[numpy.ones((3, 2), "f4")] * 3).sum())"""

if importlib.util.find_spec("pip") is None:
    pytest.skip("no pip", allow_module_level=True)


@pytest.fixture
def backend():
    spec = importlib.util.spec_from_file_location("build_backend", ROOT / "build_backend.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def library():
    if not os.path.isabs(attn.library()):
        pytest.skip("the library in use was found by name, not by path")
    return attn.library()


class Environment:
    """A fresh virtual environment that sees this Python's NumPy."""

    def __init__(self, folder):
        venv.create(folder, system_site_packages=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self.folder = folder
        # Behind the new one's own packages, since attn may be installed beside NumPy.
        packages, = folder.glob("lib/python*/site-packages")
        (packages / "numpy.pth").write_text(f"{pathlib.Path(numpy.__file__).parents[1]}\n")

    def install(self, *arguments):
        # In an environment of its own, this Python's packages are not site packages of the new one.
        own = [] if sys.prefix == sys.base_prefix else ["--no-deps", "--ignore-installed"]
        subprocess.run([
            sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.python, "install",
            "--quiet", "--no-index", *own, *arguments
        ],
                       check=True,
                       cwd=self.folder)

    def run(self, code, **more):
        """File of the package, library, and the sum of a result."""
        kept = {
            name: value
            for name, value in os.environ.items() if name not in ("ATTN_LIBRARY", "PYTHONPATH")
        }
        answer = subprocess.run([self.python, "-c", code],
                                cwd=self.folder,
                                check=True,
                                capture_output=True,
                                text=True,
                                env={**kept, **more})
        return answer.stdout.split()


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "venv")


@pytest.mark.parametrize("isolation", [[], ["--no-build-isolation"]])
def test_pip_install(environment, library, isolation):
    environment.install(*isolation, "--config-settings", f"library={library}", ROOT)
    file, found, total = environment.run(CODE)
    assert file.startswith(str(environment.folder)) and found.startswith(str(
        environment.folder)) and total == "6.0"


def test_pip_install_without_a_library(environment, library):
    environment.install("--config-settings", "library=", ROOT)
    file, found, total = environment.run(CODE, ATTN_LIBRARY=library)
    assert file.startswith(str(environment.folder)) and found == library and total == "6.0"


def test_editable(environment, library):
    environment.install("--no-build-isolation", "--editable", ROOT)
    assert environment.run(CODE, ATTN_LIBRARY=library)[0] == str(ROOT / "attn" / "__init__.py")


def test_wheel(environment, backend, tmp_path, library):
    name = backend.build_wheel(tmp_path, {"library": library})
    assert re.fullmatch(rf"attn-{re.escape(attn.__version__)}-py3-none-linux_\w+\.whl", name)
    with zipfile.ZipFile(tmp_path / name) as archive:
        names = archive.namelist()
        assert {"attn/__init__.py", "attn/torch.py", "attn/py.typed", "attn/libattn.so"} <= set(names)
        listed = list(csv.reader(archive.read(names[-1]).decode().splitlines()))
        assert [row[0] for row in listed] == names
        for path, digest, size in listed[:-1]:
            content = archive.read(path)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert digest == f"sha256={wanted}" and int(size) == len(content)
    first = (tmp_path / name).read_bytes()
    backend.build_wheel(tmp_path, {"library": library})
    assert (tmp_path / name).read_bytes() == first
    environment.install(tmp_path / name)
    assert environment.run(CODE)[2] == "6.0"


def test_sdist(environment, backend, tmp_path):
    environment.install("--config-settings", "library=", tmp_path / backend.build_sdist(tmp_path))
    assert environment.run("import importlib.metadata; print(importlib.metadata.version('attn'))") == [
        attn.__version__
    ]


def test_no_such_library(backend, tmp_path):
    with pytest.raises(FileNotFoundError, match="library=nowhere: there is no such file"):
        backend.build_wheel(tmp_path, {"library": "nowhere"})
