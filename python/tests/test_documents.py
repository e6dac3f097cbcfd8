# SPDX-License-Identifier: Apache-2.0
"""The Python of README.md and docs/python.md runs as printed."""
import importlib.util
import inspect
import pathlib
import re

import attn
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def blocks(name):
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def test_readme(capsys):
    (code, ) = blocks("README.md")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == "(4, 1000, 64) True\n"


def test_reference(capsys):
    names = {}
    found = blocks("docs/python.md")
    assert len(found) >= 6
    for number, code in enumerate(found):
        if "import torch" not in code or importlib.util.find_spec("torch") is not None:
            exec(compile(code, f"docs/python.md, example {number + 1}", "exec"), names)
    out = capsys.readouterr().out
    assert "[0, 1, 3] [(0, 0, 0)," in out and "'once': 100, 'missing': 0" in out


@pytest.mark.parametrize("function", [attn.attention, attn.attention_backward])
def test_signatures(function):
    """The reference shows the parameters and defaults that the function has."""
    shown = re.search(rf"^    {function.__name__}\((.*?)\)$", (ROOT / "docs" / "python.md").read_text(),
                      re.MULTILINE | re.DOTALL).group(1)
    parameters = inspect.signature(function).parameters.values()
    plain = [str(p.replace(annotation=inspect.Parameter.empty)).replace("'", '"') for p in parameters]
    first = next(i for i, p in enumerate(parameters) if p.kind is inspect.Parameter.KEYWORD_ONLY)
    assert re.sub(r"\s+", " ", shown) == ", ".join([*plain[:first], "*", *plain[first:]])


def test_public_names_are_told():
    text = (ROOT / "docs" / "python.md").read_text()
    assert [name for name in attn.__all__ if not re.search(rf"\b{name}\b", text)] == []
