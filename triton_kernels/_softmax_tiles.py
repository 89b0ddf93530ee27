"""One tile of rows of the softmax: what the kernels of softmax.py compute alike, and recompute bit for bit.

Rows of x, of the mask and of the gradient: the leading dimensions, merged to three, have sizes (any, n1, n2) and strides of each
operand. Columns of x and of the gradient are adjacent, those of the mask `step` apart (0 where it broadcasts).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._common import divide, row_sum
from ._philox import factors


@triton.jit
def row_offsets(row, n1, n2, s0, s1, s2):
    rest = row // n2
    return (rest // n1) * s0 + (rest % n1) * s1 + (row % n2) * s2


@triton.jit
def lead(row, n, DROPOUT: tl.constexpr, FOURS: tl.constexpr):
    """How many columns before a row its tile begins. Blocks of four random words do not end with the rows, unless their length
    is a multiple of 4 (FOURS)."""
    if DROPOUT and not FOURS:
        return (row * n % 4).to(tl.int32)
    else:
        return tl.zeros_like(row).to(tl.int32)


@triton.jit
def visible_columns(row, rows, n, n2, causal):
    """How many columns each row sees; 0 for rows that do not exist."""
    if causal is None:
        return tl.where(row < rows, n, 0)
    else:
        query = row % n2
        return tl.where(row < rows, tl.minimum(tl.maximum(query + causal + 1, 0), n), 0)


@triton.jit
def readable(column, visible, n):
    """Where to read: what is visible, rounded up to 16 columns, so that reads stay 16 bytes wide under a causal limit."""
    return (column >= 0) & (column < (visible + 15) // 16 * 16) & (column < n)


@triton.jit
def load_scores(
    x, mask, column, step, visible, n, scale, F: tl.constexpr, BOOLEAN: tl.constexpr, CAUSAL: tl.constexpr
):
    """(scale x + mask, what is kept): -inf where masked, where nothing, even NaN, is looked at. `x` and `mask` point to rows."""
    inside = readable(column, visible, n)
    value = tl.load(x + column, mask=inside, other=0.0).to(F)
    hidden = tl.full(value.shape, float("-inf"), F)
    if mask is None:
        keep = inside
        score = value * scale
    elif BOOLEAN:
        keep = tl.load(mask + column.to(tl.int64) * step, mask=inside, other=0) != 0
        score = value * scale
    else:
        add = tl.load(mask + column.to(tl.int64) * step, mask=inside, other=float("-inf")).to(F)
        keep = add != float("-inf")
        score = tl.fma(value, scale, add)
    if CAUSAL:
        keep = keep & (column < visible)
    return tl.where(keep, score, hidden), keep


@triton.jit
def inverse_of(total):
    """1 / total per row, and 0 where nothing is kept."""
    return tl.where(total == 0.0, 0.0, divide(tl.full(total.shape, 1.0, total.dtype), total))


@triton.jit
def quotient(e, total, inverse, HALF: tl.constexpr):
    """e / total by the reciprocal and, unless 16 bits follow, one correction: a division's result at a multiplication's price."""
    q = e * inverse[:, None]
    return q if HALF else tl.fma(tl.fma(-q, total[:, None], e), inverse[:, None], q)


@triton.jit
def tile_factors(
    seed,
    row,
    n,
    skipped,
    start,
    threshold,
    keep_scale,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Dropout factors of a tile that begins `start` columns after the rows' tiles, which begin `skipped` before the rows."""
    return factors(seed, row * n - skipped + start, threshold, keep_scale, F, ROWS, COLUMNS)


@triton.jit
def weighted(p, g, MASKED: tl.constexpr):
    """p g; where something may be masked, a probability of zero hides its gradient, which may be NaN from a masked value."""
    if MASKED:
        return tl.where(p == 0.0, 0.0, p * g)
    else:
        return p * g


@triton.jit
def row_dot(p, g, MASKED: tl.constexpr, HALF: tl.constexpr):
    """Sums of p g over rows, the products unrounded unless 16 bits follow: the sum's error reaches every element of the row."""
    if HALF:
        return tl.sum(weighted(p, g, MASKED), axis=1)
    elif p.dtype == tl.float64:
        if MASKED:
            g = tl.where(p == 0.0, 0.0, g)
        product = p * g
        return row_sum(product, HALF) + row_sum(tl.fma(p, g, -product), HALF)
    else:
        return tl.sum(weighted(p.to(tl.float64), g.to(tl.float64), MASKED), axis=1).to(tl.float32)
