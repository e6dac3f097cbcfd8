# SPDX-License-Identifier: Apache-2.0
"""Random problems for Hypothesis: shapes, masks, and arrays of every layout and stride."""
from typing import NamedTuple, Optional, Tuple

import numpy as np
from hypothesis import strategies as st


class Case(NamedTuple):
    batch: int
    heads: int
    kv_heads: int
    tokens: int
    kv_tokens: int
    dim: int
    dim_v: int
    dtype: str
    mask: dict # causal, window, scale: keywords of attention()
    layout: str
    seed: int


def odd_strides(random, shape, dtype):
    """Standard normal numbers in an array of any strides: axes in any order, with gaps, backwards."""
    order = random.permutation(len(shape))
    steps = random.choice([1, 1, 2, -1, -3], len(shape))
    memory = random.standard_normal([shape[axis] * abs(steps[axis]) for axis in order]).astype(dtype)
    back = np.argsort(order)
    view = memory.transpose(back)[tuple(slice(None, None, step) for step in steps)]
    assert view.shape == tuple(shape)
    return view


def swap(array, layout):
    """To and from [batch, heads, tokens, dim], without a copy."""
    return array.swapaxes(1, 2) if layout == "bnhd" else array


def inputs(case, count=3):
    """q, k, v (and dout), shaped as the case's layout says."""
    random = np.random.default_rng(case.seed)
    shapes = [(case.batch, case.heads, case.tokens, case.dim),
              (case.batch, case.kv_heads, case.kv_tokens, case.dim),
              (case.batch, case.kv_heads, case.kv_tokens, case.dim_v),
              (case.batch, case.heads, case.tokens, case.dim_v)]
    return [swap(odd_strides(random, shape, case.dtype), case.layout) for shape in shapes[:count]]


bounds = st.integers(-1, 40)
windows = st.one_of(st.none(), st.none(), bounds, st.tuples(bounds, bounds))
masks = st.fixed_dictionaries(
    {"causal": st.booleans(), "window": windows, "scale": st.sampled_from([None, None, 0.3, -0.2])})


@st.composite
def cases(draw, dtypes: Tuple[str, ...] = ("float32", "float16"), window: Optional[bool] = True):
    kv_heads = draw(st.integers(1, 3))
    mask = draw(masks)
    return Case(draw(st.integers(1, 2)),
                kv_heads * draw(st.integers(1, 3)), kv_heads, draw(st.integers(1, 70)),
                draw(st.integers(1, 70)), draw(st.integers(1, 80)), draw(st.integers(1, 80)),
                draw(st.sampled_from(dtypes)), mask if window else {**mask, "window": None},
                draw(st.sampled_from(["bhnd", "bnhd"])), draw(st.integers(0, 2**32)))
