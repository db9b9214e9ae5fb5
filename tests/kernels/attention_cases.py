"""Random cases of attention over pages and branches, and what every backend must make of them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import lane_width
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant

TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Of a case.

    Attributes:
      visible: of each row, positions that its queries see, in the order of queries.
      branches, entries: trees of a row, and tokens of each; 0 without any.
    """

    visible: tuple[tuple[int, ...], ...]
    kv_heads: int = 1
    group: int = 2
    head_dim: int = 64
    page_size: int = 128
    branches: int = 0
    entries: int = 0
    dtype: str = "float32"
    seed: int = 0


class Case(NamedTuple):
    """Arguments of attention, in NumPy. Pages that no row owns are full of NaN."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    table: np.ndarray
    visible: np.ndarray
    branch_k: np.ndarray | None
    branch_v: np.ndarray | None
    paths: np.ndarray | None


@st.composite
def shapes(draw: st.DrawFn, page_sizes: tuple[int, ...] = (16, 48, 128, 256)) -> Shapes:
    """Small ones, with lengths at the edges of pages, empty rows and single tokens."""
    page_size = draw(st.sampled_from(page_sizes))
    most = 2 * max(page_size, 128)
    edges = [0, 1, page_size - 1, page_size, page_size + 1, most]
    length = st.one_of(st.sampled_from(edges), st.integers(0, most))
    batch, rows = draw(st.integers(1, 3)), draw(st.sampled_from([1, 3, 5]))
    branches = draw(st.sampled_from([0, 1, 4, 6]))
    return Shapes(
        visible=tuple(tuple(draw(length) for _ in range(rows)) for _ in range(batch)),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 4])),
        head_dim=draw(st.sampled_from([64, 80, 128, 256])),
        page_size=page_size,
        branches=branches,
        entries=draw(st.integers(-(-rows // branches), 6) | st.just(31)) if branches else 0,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        seed=draw(st.integers(0, 2**31)),
    )


def make(shape: Shapes) -> Case:
    """Values are normal; a row's pages lie anywhere, and its queries sit anywhere in its tree."""
    rng = np.random.default_rng(shape.seed)
    visible = np.array(shape.visible, np.int32)
    batch, rows = visible.shape
    per_row = max(1, -(-int(visible.max()) // shape.page_size))
    count = batch * per_row + 2
    table = rng.permutation(count)[: batch * per_row].reshape(batch, per_row).astype(np.int32)

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(jnp.dtype(shape.dtype))

    heads, size = shape.kv_heads, shape.head_dim
    k, v = (normal(count, heads, shape.page_size, size) for _ in "kv")
    unowned = ~np.isin(np.arange(count), table)
    k[unowned] = v[unowned] = np.nan
    q = normal(batch, rows, heads * shape.group, size)
    if not shape.branches:
        return Case(q, k, v, table, visible, None, None, None)
    branch_k, branch_v = (normal(batch, heads, shape.entries, shape.branches, size) for _ in "kv")
    paths = random_paths(rng, (*visible.shape, shape.branches), shape.entries)
    return Case(q, k, v, table, visible, branch_k, branch_v, paths)


def tree(rng: np.random.Generator, entries: int) -> list[int]:
    """The paths of a random tree's entries: half of them continue the one before."""
    paths: list[int] = []
    for entry in range(entries):
        parent = entry - 1 if rng.random() < 0.5 else int(rng.integers(-1, entry))
        paths.append((paths[parent] if parent >= 0 else 0) | 1 << entry)
    return paths


def random_paths(rng: np.random.Generator, shape: tuple[int, int, int], entries: int) -> np.ndarray:
    """(branch, path) of B x R queries, anywhere in M random trees a row or in none."""
    batch, rows, branches = shape
    paths = np.zeros((batch, rows, 2), np.int32)
    for b in range(batch):
        trees = [[0, *tree(rng, entries)] for _ in range(branches)]
        for r in range(rows):
            branch = rng.integers(branches)
            paths[b, r] = branch, rng.choice(trees[branch])
    return paths


def entries_on(path: int) -> list[int]:
    """The entries on a path, in order."""
    return [entry for entry in range(31) if path >> entry & 1]


def hide_unseen(case: Case, window: int | None = None) -> Case:
    """With NaN at positions that no query of their row sees."""
    k, v = case.k_pages.copy(), case.v_pages.copy()
    size = k.shape[2]
    last = case.visible.astype(int)
    if case.paths is not None:
        last = last + np.bitwise_count(case.paths[..., 1])
    first = np.where(last == 0, last.max(), last - (window or last.max()))
    for row, starts, pages in zip(case.visible, first, case.table, strict=True):
        for index, page in enumerate(pages):
            position = index * size + np.arange(size)
            unseen = (position >= row.max()) | (position < starts.min())
            k[page][:, unseen] = v[page][:, unseen] = np.nan
    return case._replace(k_pages=k, v_pages=v)


def pack_kv(k, v) -> jnp.ndarray:
    """Keys and values as pages of the kernels for TPUs have them."""
    return kv_pages.pack_kv(jnp.asarray(k), jnp.asarray(v), lane_width(k.shape[-1]))


def expected(case: Case, variant: AttentionVariant = PLAIN) -> np.ndarray:
    """One query head after the other, in float64: [B, R, heads, head_dim]."""
    group = case.q.shape[2] // case.k_pages.shape[1]
    result = np.zeros(case.q.shape)
    for b, r, h in np.ndindex(case.q.shape[:3]):
        k, v = (
            pages[case.table[b], h // group].reshape(-1, case.q.shape[3])[: case.visible[b, r]]
            for pages in (case.k_pages, case.v_pages)
        )
        if case.paths is not None:
            branch, path = case.paths[b, r]
            seen = np.s_[b, h // group, entries_on(path), branch]
            k = np.concatenate([k, case.branch_k[seen]])
            v = np.concatenate([v, case.branch_v[seen]])
        if variant.window is not None:
            k, v = k[-int(variant.window) :], v[-int(variant.window) :]
        if not len(k):
            continue
        scores = k.astype(np.float64) @ case.q[b, r, h].astype(np.float64)
        scores *= k.shape[1] ** -0.5 if variant.scale is None else variant.scale
        if variant.soft_cap is not None:
            scores = variant.soft_cap * np.tanh(scores / variant.soft_cap)
        sink = -np.inf if variant.sinks is None else float(variant.sinks[h])
        most = max(scores.max(), sink)
        weights = np.exp(scores - most)
        result[b, r, h] = weights / (weights.sum() + np.exp(sink - most)) @ v.astype(np.float64)
    return result
