"""Attention's backward: the probabilities are formed again from q, k and logsumexp, in kernels that no atomics join.

With P the probabilities, D the factors of dropout and delta = rowsum(dO * O): dV = (P D)^T dO, dP = (dO V^T) D, the gradient of
an added bias dB = P (dP - delta), and with dS = dB times the softcap's slope and the scale, dQ = dS K and dK = dS^T Q. The first
kernel finds delta, from the output or by `statistics`. The second takes a block of keys of one kv head, and goes through all the
queries that see any of them, head by head of its group; the third takes a block of queries as the forward does. Operations a
score of these two: 4 (width + v width) and 4 width + 2 v width.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ._attention_tiles import (
    LOG2E,
    block_of,
    exponential,
    form_scores,
    hidden,
    inside,
    key_scores,
    keys_seen,
    load_rows,
    loop_of,
    queries_seen,
    query_block,
    spans,
    store_rows,
    tile_factors,
)
from ._common import arithmetic, column_sum, divide, divide_up, double, is_half, launch_rows, row_sum
from ._softmax_tiles import inverse_of, row_dot
from .attention import UNSPECIALISED, Call, geometry, padded


@triton.jit(do_not_specialize=["rows", "heads", "n", "first"])
def _row_products(
    grad, out, delta, rows, heads, n, g0, g1, g2, g3, o0, o1, o2, first, v_width: tl.constexpr, ROWS: tl.constexpr,
    V_WIDTH: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O) of all rows, counted through heads and batch; n of them a head."""
    F: tl.constexpr = arithmetic(out.dtype.element_ty)
    HALF: tl.constexpr = is_half(out.dtype.element_ty)
    row = (tl.program_id(0).to(tl.int64) + first) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    head, query = row // n, row % n
    grad += head // heads * g0 + head % heads * g1
    column = tl.arange(0, V_WIDTH)[None, :]
    there = exists[:, None] & (column < v_width)
    out_rows = out + (head // heads * o0 + head % heads * o1 + query * o2)[:, None] + column
    grad_rows = (grad + query * g2)[:, None] + column * g3
    o = tl.load(out_rows, mask=there, other=0.0).to(F)
    g = tl.load(grad_rows, mask=there, other=0.0).to(F)
    tl.store(delta + row, row_sum(o * g, HALF), mask=exists)


@triton.jit
def _load_shift(shift, row, exists, total, HALF: tl.constexpr):
    """What is subtracted from the scores of these rows: logsumexp or, where there is a `total`, the maximum."""
    value = tl.load(shift + row, mask=exists, other=0.0)
    return value * LOG2E if HALF and total is None else value


@triton.jit
def _probabilities(score, keep, shift, total, LINE: tl.constexpr, HALF: tl.constexpr, MASKED: tl.constexpr):
    """exp(score - shift) / total, what belongs to a query lying along dimension 1 - LINE of the tile."""
    p = exponential(score - tl.expand_dims(shift, LINE), HALF)
    if total is not None:
        inverse = tl.expand_dims(inverse_of(total), LINE)
        q = p * inverse
        p = q if HALF else tl.fma(tl.fma(-q, tl.expand_dims(total, LINE), p), inverse, q)
    return hidden(p, keep, 0.0, MASKED)


@triton.jit
def _through_queries(
    sums, q, k, v, grad, shift, delta, total, mask, bounds, seed, column, begin, end, head, queries, n, q2, q3, g2, g3,
    m2, m3, slope, scale, softcap, left, right, offset, threshold, keep_scale, start, whole, rest, stop, width: tl.constexpr,
    v_width: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, BOOLEAN: tl.constexpr, FOURS: tl.constexpr, EMPTY: tl.constexpr,
    EDGE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds what the queries of one head give to (dK, dV), those whose blocks are needed whole or (EDGE) the rest. Tiles lie with
    keys along their rows, so that both products take theirs as it lies."""
    F: tl.constexpr = sums[0].dtype
    HALF: tl.constexpr = is_half(k.dtype)
    MASKED: tl.constexpr = EDGE or EMPTY
    dk, dv = sums
    first_key = tl.min(column, axis=0)
    begin_loop, end_loop = loop_of(start, whole, rest, stop, EDGE)
    for at in range(begin_loop, end_loop, QUERIES):
        first = tl.multiple_of(block_of(at, whole, rest, EDGE), QUERIES)
        row = first + tl.arange(0, QUERIES)
        exists = row < queries
        shift_of_row = _load_shift(shift, row, exists, total, HALF)
        if EMPTY:
            # Neither the query of a row that sees nothing nor its gradient may reach a product: 0 times NaN.
            exists = exists & (shift_of_row != float("-inf"))
        query = load_rows(q, row, exists, q2, q3, width, WIDTH)
        product = tl.dot(k, tl.trans(query), input_precision="ieee", out_dtype=F)
        keep = inside(row[None, :], begin[:, None], end[:, None], product, EDGE)
        if EMPTY:
            keep = keep & exists[None, :]
        place = row
        if slope is not None:
            _, _, place = keys_seen(row, queries, n, left, right, offset, bounds)
        score, keep, capped = form_scores(
            product, keep, row[None, :], column[:, None], place[None, :], queries, n, mask, m2, m3, slope, scale,
            softcap, HALF, BOOLEAN,
        )  # fmt: skip
        sum_of_row = None
        if total is not None:
            sum_of_row = tl.load(total + row, mask=exists, other=0.0)
        p = _probabilities(score, keep, shift_of_row, sum_of_row, 0, HALF, MASKED)
        upstream = load_rows(grad, row, exists, g2, g3, v_width, V_WIDTH)
        dropped = p
        if seed is not None:
            factor = tl.trans(
                tile_factors(
                    seed, head, first, first_key, queries, n, threshold, keep_scale, F, FOURS, QUERIES, KEYS
                )
            )
            dropped = p * factor
        if DV:
            dv = tl.dot(dropped.to(v.dtype), upstream, dv, input_precision="ieee", out_dtype=F)
        if DK:
            dp = tl.dot(v, tl.trans(upstream), input_precision="ieee", out_dtype=F)
            if seed is not None:
                dp *= factor
            ds = p * (dp - tl.load(delta + row, mask=exists, other=0.0)[None, :])
            if softcap is not None:
                ds *= tl.fma(-capped, capped, tl.full(capped.shape, 1.0, F))
            ds = hidden(ds, keep, 0.0, MASKED)
            dk = tl.dot(ds.to(k.dtype), query, dk, input_precision="ieee", out_dtype=F)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALISED)
def _key_gradients(
    q, k, v, grad, dk, dv, shift, delta, total, mask, slopes, bounds, key_bounds, seed, heads, group, queries, n, q0, q1,
    q2, q3, k0, k1, k2, k3, v0, v1, v2, v3, g0, g1, g2, g3, dk0, dk1, dk2, dk3, dv0, dv1, dv2, dv3, m0, m1, m2, m3,
    l0, l1, scale, softcap, left, right, offset, threshold, keep_scale, first, width: tl.constexpr,
    v_width: tl.constexpr, BOOLEAN: tl.constexpr, FOURS: tl.constexpr, EMPTY: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(q.dtype.element_ty)
    program = tl.program_id(0).to(tl.int64) + first
    blocks = (n + KEYS - 1) // KEYS
    unit = program // blocks
    kv_heads = heads // group
    b, u = unit // kv_heads, unit % kv_heads
    column = (program % blocks * KEYS).to(tl.int32) + tl.arange(0, KEYS)
    exists = column < n
    key = load_rows(k + b * k0 + u * k1, column, exists, k2, k3, width, WIDTH)
    value = load_rows(v + b * v0 + u * v1, column, exists, v2, v3, v_width, V_WIDTH)
    scale = double(scale, F)
    if softcap is not None:
        softcap = double(softcap, F)
    begin, end = queries_seen(column, queries, n, left, right, offset, key_bounds)
    start, whole, rest, stop = spans(begin, end, QUERIES)
    sums = tl.zeros((KEYS, WIDTH), F), tl.zeros((KEYS, V_WIDTH), F)
    for member in range(group):
        h = u * group + member
        head = b * heads + h
        q_head, grad_head = q + b * q0 + h * q1, grad + b * g0 + h * g1
        shift_head, delta_head = shift + head * queries, delta + head * queries
        total_head = None
        if total is not None:
            total_head = total + head * queries
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + b * l0 + h * l1)
        mask_head = None
        if mask is not None:
            mask_head = mask + (b * m0 + h * m1)
        for edge in tl.static_range(0, 2):
            sums = _through_queries(
                sums, q_head, key, value, grad_head, shift_head, delta_head, total_head, mask_head, bounds, seed, column,
                begin, end, head, queries, n, q2, q3, g2, g3, m2, m3, slope, scale, softcap, left, right, offset, threshold,
                keep_scale, start, whole, rest, stop, width, v_width, dk is not None, dv is not None, BOOLEAN, FOURS, EMPTY,
                edge == 1, QUERIES, KEYS, WIDTH, V_WIDTH,
            )  # fmt: skip
    if dk is not None:
        store_rows(dk + b * dk0 + u * dk1, sums[0] * scale, column, exists, dk2, dk3, width, WIDTH)
    if dv is not None:
        store_rows(dv + b * dv0 + u * dv1, sums[1], column, exists, dv2, dv3, v_width, V_WIDTH)


@triton.jit
def _through_keys(
    sums, q, k, v, grad, delta, total, dbias, mask, seed, row, begin, end, place, head, queries, n, k2, k3, v2, v3, m2,
    m3, d2, d3, slope, scale, softcap, threshold, keep_scale, seen_from, seen_to, start, whole, rest, stop, width: tl.constexpr,
    v_width: tl.constexpr, STATISTICS: tl.constexpr, DQ: tl.constexpr, ROWS_SUMMED: tl.constexpr, KEYS_SUMMED: tl.constexpr,
    BOOLEAN: tl.constexpr, FOURS: tl.constexpr, EDGE: tl.constexpr, CLEAN: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """Adds what such keys give to dQ and the sum of dB along keys, or stores dB. With STATISTICS the state is
    instead, of each row, the sums of exp(score - maximum) and of that times dP, and the maximum so far."""
    F: tl.constexpr = sums[0].dtype
    HALF: tl.constexpr = is_half(q.dtype)
    MASKED: tl.constexpr = EDGE or mask is not None
    matrix, vector, shift = sums
    first_row = tl.min(row, axis=0)
    begin_loop, end_loop = loop_of(start, whole, rest, stop, EDGE)
    for at in range(begin_loop, end_loop, KEYS):
        first, column, exists, key, score, keep, capped = key_scores(
            q, k, mask, row, begin, end, place, at, whole, rest, seen_from, seen_to, queries, n, k2, k3, m2, m3, slope, scale,
            softcap, width, BOOLEAN, EDGE, KEYS, WIDTH,
        )  # fmt: skip
        fade = shift
        if STATISTICS:
            score = hidden(score, keep, float("-inf"), MASKED)
            higher = tl.maximum(shift, tl.max(score, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            fade, shift = exponential(shift - safe, HALF), higher
            p = exponential(score - safe[:, None], HALF)
        else:
            p = _probabilities(score, keep, shift, total, 1, HALF, MASKED)
        value = load_rows(v, column, exists, v2, v3, v_width, V_WIDTH)
        dp = tl.dot(grad, tl.trans(value), input_precision="ieee", out_dtype=F)
        if seed is not None:
            dp *= tile_factors(
                seed, head, first_row, first, queries, n, threshold, keep_scale, F, FOURS, QUERIES, KEYS
            )
        if STATISTICS:
            matrix = tl.fma(matrix, fade, row_sum(p, HALF))
            vector = tl.fma(vector, fade, row_dot(p, dp, MASKED, HALF))
        else:
            ds = hidden(p * (dp - delta[:, None]), keep, 0.0, MASKED)
            if KEYS_SUMMED:
                vector += row_sum(ds, HALF)
            elif ROWS_SUMMED:
                partial = column_sum(tl.where((row < queries)[:, None], ds, 0.0), HALF)
                tl.store(dbias + (first_row // QUERIES) * d2 + column * d3, partial, mask=column < n)
            elif dbias is not None:
                target = dbias + (row.to(tl.int64) * d2)[:, None] + column[None, :] * d3
                there = (row < queries)[:, None] & (column < n)[None, :]
                tl.store(target, ds.to(dbias.dtype.element_ty), mask=there)
            if DQ:
                if softcap is not None:
                    ds *= tl.fma(-capped, capped, tl.full(capped.shape, 1.0, F))
                    ds = hidden(ds, keep, 0.0, MASKED)
                if CLEAN:  # keys that no query here sees may hold anything
                    key = tl.where((tl.max(keep.to(tl.int32), axis=0) > 0)[:, None], key, 0.0)
                matrix = tl.dot(ds.to(k.dtype.element_ty), key, matrix, input_precision="ieee", out_dtype=F)
    return matrix, vector, shift


@triton.jit(do_not_specialize=UNSPECIALISED)
def _query_gradients(
    q, k, v, grad, dq, dbias, shift, delta, total, mask, slopes, bounds, seed, heads, group, queries, n, q0, q1, q2, q3,
    k0, k1, k2, k3, v0, v1, v2, v3, g0, g1, g2, g3, dq0, dq1, dq2, dq3, d0, d1, d2, d3, m0, m1, m2, m3, l0, l1, scale,
    softcap, left, right, offset, threshold, keep_scale, first, width: tl.constexpr, v_width: tl.constexpr,
    STATISTICS: tl.constexpr, ROWS_SUMMED: tl.constexpr, KEYS_SUMMED: tl.constexpr, BOOLEAN: tl.constexpr,
    FOURS: tl.constexpr, EMPTY: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = arithmetic(q.dtype.element_ty)
    HALF: tl.constexpr = is_half(q.dtype.element_ty)
    head, row = query_block(first, queries, QUERIES)
    exists = row < queries
    b, h = head // heads, head % heads
    query = load_rows(q + b * q0 + h * q1, row, exists, q2, q3, width, WIDTH)
    upstream = load_rows(grad + b * g0 + h * g1, row, exists, g2, g3, v_width, V_WIDTH)
    sums = tl.zeros((QUERIES,), F), tl.zeros((QUERIES,), F), tl.full((QUERIES,), float("-inf"), F)
    row_delta, row_total = sums[0], None
    if not STATISTICS:
        row_shift = _load_shift(shift, head * queries + row, exists, total, HALF)
        sums = tl.zeros((QUERIES, WIDTH), F), sums[1], row_shift
        row_delta = tl.load(delta + head * queries + row, mask=exists, other=0.0)
        if total is not None:
            row_total = tl.load(total + head * queries + row, mask=exists, other=0.0)
    k += b * k0 + h // group * k1
    v += b * v0 + h // group * v1
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + b * l0 + h * l1)
    if mask is not None:
        mask += b * m0 + h * m1
    if dbias is not None:
        dbias += b * d0 + h * d1
    scale = double(scale, F)
    if softcap is not None:
        softcap = double(softcap, F)
    begin, end, place = keys_seen(row, queries, n, left, right, offset, bounds)
    seen_from, seen_to = tl.min(begin, axis=0), tl.max(end, axis=0)
    start, whole, rest, stop = spans(begin, end, KEYS)
    for edge in tl.static_range(0, 2):
        sums = _through_keys(
            sums, query, k, v, upstream, row_delta, row_total, dbias, mask, seed, row, begin, end, place, head, queries, n,
            k2, k3, v2, v3, m2, m3, d2, d3, slope, scale, softcap, threshold, keep_scale, seen_from, seen_to, start, whole,
            rest, stop, width, v_width, STATISTICS, dq is not None, ROWS_SUMMED, KEYS_SUMMED, BOOLEAN, FOURS, edge == 1,
            mask is not None or (edge == 1 and bounds is not None), QUERIES, KEYS, WIDTH, V_WIDTH,
        )  # fmt: skip
    if STATISTICS:
        tl.store(shift + head * queries + row, sums[2], mask=exists)
        tl.store(total + head * queries + row, sums[0], mask=exists)
        mean = tl.where(sums[0] == 0.0, 0.0, divide(sums[1], sums[0]))
        tl.store(delta + head * queries + row, mean, mask=exists)
    if dq is not None:
        store_rows(dq + b * dq0 + h * dq1, sums[0] * scale, row, exists, dq2, dq3, width, WIDTH)
    if KEYS_SUMMED:
        tl.store(dbias + row.to(tl.int64) * d2, sums[1], mask=exists)


# As in attention.py; the kernel that goes through queries keeps two sums of the size of its keys.
BY_KEYS = (
    {64: (32, 128, 8, 1), 128: (16, 128, 8, 1), 256: (16, 32, 8, 1), 512: (16, 16, 4, 1)},
    {64: (16, 32, 4, 1), 512: (16, 16, 4, 1)},
)
BY_QUERIES = (
    {64: (64, 64, 4, 1), 128: (64, 64, 8, 1), 256: (32, 32, 8, 1), 512: (16, 16, 4, 1)},
    {64: (16, 32, 4, 1), 512: (16, 16, 4, 1)},
)


def row_products(grad: Tensor, out: Tensor, delta: Tensor) -> None:
    """delta from the output, its columns adjacent."""
    rows, v_width = delta.numel(), out.shape[3]
    height = max(1, 2048 // padded(v_width))
    launch_rows(
        _row_products, divide_up(rows, height), out, grad, out, delta, rows, out.shape[1], out.shape[2], *grad.stride(),
        *out.stride()[:3], v_width=v_width, ROWS=height, V_WIDTH=padded(v_width), num_warps=4, num_stages=1,
    )  # fmt: skip


def _strides(x: Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0, 0) if x is None else x.stride()


def key_gradients(
    call: Call, grad: Tensor, shift: Tensor, delta: Tensor, total: Tensor | None, dk: Tensor | None, dv: Tensor | None,
) -> None:  # fmt: skip
    """Those of dk and dv that are not None, of any strides. `shift`: logsumexp or, with `total`, the rows' maxima."""
    shape = geometry(call, *BY_KEYS)
    programs = call.k.shape[0] * call.k.shape[1] * divide_up(call.k.shape[2], shape["KEYS"])
    launch_rows(
        _key_gradients, programs, call.q, call.q, call.k, call.v, grad, dk, dv, shift, delta, total, *call.inputs(),
        call.bounds, call.key_bounds, call.seed, *call.sizes(), *call.q.stride(), *call.k.stride(), *call.v.stride(),
        *grad.stride(), *_strides(dk), *_strides(dv), *call.strides(), *call.numbers(), **call.options(), **shape,
    )  # fmt: skip


def bias_partials(call: Call, rows_summed: bool, keys_summed: bool) -> tuple[int, int]:
    """Rows and columns, for each head, of what :func:`query_gradients` writes of a bias that broadcasts over queries or keys."""
    queries = call.q.shape[2]
    block = geometry(call, *BY_QUERIES)["QUERIES"]
    rows = divide_up(queries, block) if rows_summed and not keys_summed else queries
    return rows, 1 if keys_summed else call.k.shape[2]


def _by_queries(
    call: Call,
    grad: Tensor,
    shift: Tensor,
    delta: Tensor,
    total: Tensor | None,
    dq: Tensor | None = None,
    dbias: Tensor | None = None,
    **options: bool,
) -> None:
    shape = geometry(call, *BY_QUERIES)
    programs = call.q.shape[0] * call.q.shape[1] * divide_up(call.q.shape[2], shape["QUERIES"])
    launch_rows(
        _query_gradients, programs, call.q, call.q, call.k, call.v, grad, dq, dbias, shift, delta, total,
        *call.inputs(), call.bounds, call.seed, *call.sizes(), *call.q.stride(), *call.k.stride(), *call.v.stride(),
        *grad.stride(), *_strides(dq), *_strides(dbias), *call.strides(), *call.numbers(), **options, **call.options(),
        **shape,
    )  # fmt: skip


def statistics(call: Call, grad: Tensor, shift: Tensor, delta: Tensor, total: Tensor) -> None:
    """Of each row the maximum of its scores, delta from what it is to be subtracted from, and the exponentials' sum: in place
    of logsumexp and of a delta from the output, whose roundings add to those of scores. A pass of two more products, for dtypes
    in which that would be seen."""
    _by_queries(call, grad, shift, delta, total, STATISTICS=True, ROWS_SUMMED=False, KEYS_SUMMED=False)


def query_gradients(
    call: Call,
    grad: Tensor,
    shift: Tensor,
    delta: Tensor,
    total: Tensor | None,
    dq: Tensor | None,
    dbias: Tensor | None,
    rows_summed: bool,
    keys_summed: bool,
) -> None:
    """Those of dq, of any strides, and dbias (batch, heads, *bias_partials) that are not None. Blocks that no query sees are left
    out of dbias."""
    _by_queries(
        call, grad, shift, delta, total, dq, dbias, STATISTICS=False,
        ROWS_SUMMED=rows_summed and dbias is not None, KEYS_SUMMED=keys_summed and dbias is not None,
    )  # fmt: skip
