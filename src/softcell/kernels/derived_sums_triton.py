# mypy: ignore-errors
"""Triton kernels of `derived` that turn sums over rows into the norms' coefficients, forward and backward.

If ranks share norms, each of the two becomes two kernels with a collective between them: the first writes the sums of
this rank's rows, the second reads those of all ranks. Nothing waits for the host, so a step can be captured.
"""

import triton
import triton.language as tl

from softcell.kernels.shared import sum_in_place


@triton.jit
def _moments_of(
    partial_ptr, plane, c, c_ok, rows, tiles, measured, C: tl.constexpr, CB: tl.constexpr, TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Mean and biased variance of a plane from sums and centred squares of tiles of rows."""
    total = tl.zeros((BLOCK, CB), dtype=tl.float32)
    square = tl.zeros((BLOCK, CB), dtype=tl.float32)
    # Squares are centred at the mean of the first tile, which is close to the overall mean: one pass, little
    # cancellation.
    near = tl.load(partial_ptr + plane * C + c, mask=c_ok, other=0.0) / tl.minimum(rows, TILE)
    for start in range(0, tiles, BLOCK):
        t = start + tl.arange(0, BLOCK)
        ok = (t < tiles)[:, None] & c_ok[None, :]
        at = partial_ptr + ((t * measured + plane) * C)[:, None] + c[None, :]
        sums = tl.load(at, mask=ok, other=0.0)
        inner = tl.load(at + tiles * measured * C, mask=ok, other=0.0)
        count = tl.maximum(tl.minimum(rows - t * TILE, TILE), 1).to(tl.float32)[:, None]
        off = sums / count - near[None, :]
        total += sums
        square += tl.where(ok, inner + count * off * off, 0.0)
    mean = tl.sum(total, 0) / rows
    # Rounding may make the difference negative.
    return mean, tl.maximum(tl.sum(square, 0) / rows - (mean - near) * (mean - near), 0.0)


@triton.jit
def _store_moments(
    mean, variance, unbiased, w_ptr, moments_ptr, coefficients_ptr, plane, scale, shift, c, c_ok, planes, eps,
    C: tl.constexpr,
):  # fmt: skip
    rstd = 1.0 / tl.sqrt(variance + eps)
    to = moments_ptr + plane * C + c
    tl.store(to, mean, mask=c_ok)
    tl.store(to + planes * C, rstd, mask=c_ok)
    tl.store(to + 2 * planes * C, unbiased, mask=c_ok)
    gamma = tl.load(w_ptr + scale + c, mask=c_ok & (scale >= 0), other=1.0)
    beta = tl.load(w_ptr + shift + c, mask=c_ok & (scale >= 0), other=0.0)
    to = coefficients_ptr + plane * C + c
    tl.store(to, gamma * rstd, mask=c_ok)
    tl.store(to + planes * C, beta - mean * gamma * rstd, mask=c_ok)


@triton.jit(do_not_specialize=["rows", "tiles", "planes", "measured"])
def _finish_moments(
    partial_ptr, w_ptr, moments_ptr, coefficients_ptr, jobs_ptr, rows, tiles, planes, measured, eps, C: tl.constexpr,
    CB: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job = jobs_ptr + tl.program_id(0) * 3
    plane, scale, shift = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    mean, variance = _moments_of(partial_ptr, plane, c, c_ok, rows, tiles, measured, C, CB, TILE, BLOCK)
    unbiased = variance * (rows / tl.maximum(rows - 1, 1))
    _store_moments(
        mean, variance, unbiased, w_ptr, moments_ptr, coefficients_ptr, plane, scale, shift, c, c_ok, planes, eps, C
    )


@triton.jit(do_not_specialize=["rows", "tiles", "measured", "rank", "terms"])
def _collect_moments(
    partial_ptr, to_ptr, jobs_ptr, rows, tiles, measured, rank, terms, C: tl.constexpr, CB: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes means, centred squares and number of this rank's rows to its row of `to` [ranks, 2 terms C + 1]."""
    term = tl.program_id(0)
    plane = tl.load(jobs_ptr + term * 3)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    mean, variance = _moments_of(partial_ptr, plane, c, c_ok, rows, tiles, measured, C, CB, TILE, BLOCK)
    to = to_ptr + rank * (2 * terms * C + 1)
    tl.store(to + term * C + c, mean, mask=c_ok)
    tl.store(to + (terms + term) * C + c, variance * rows, mask=c_ok)
    tl.store(to + 2 * terms * C, rows.to(tl.float32), mask=(term == 0) & (tl.program_id(1) == 0))


@triton.jit(do_not_specialize=["ranks", "terms", "planes"])
def _merge_moments(
    from_ptr, w_ptr, moments_ptr, coefficients_ptr, reciprocals_ptr, jobs_ptr, ranks, terms, planes, eps,
    C: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Like `_finish_moments`, for the rows of all ranks (by the rule in `kernels.shared`); also 1 / their number."""
    term = tl.program_id(0)
    job = jobs_ptr + term * 3
    plane, scale, shift = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    length = 2 * terms * C + 1
    rows = tl.load(from_ptr + length - 1)
    mean = tl.load(from_ptr + term * C + c, mask=c_ok, other=0.0) * rows
    for rank in range(1, ranks):
        count = tl.load(from_ptr + rank * length + length - 1)
        rows += count
        mean += count * tl.load(from_ptr + rank * length + term * C + c, mask=c_ok, other=0.0)
    mean = mean / rows
    square = tl.zeros((CB,), dtype=tl.float32)
    for rank in range(ranks):
        row = from_ptr + rank * length
        off = tl.load(row + term * C + c, mask=c_ok, other=0.0) - mean
        square += tl.load(row + (terms + term) * C + c, mask=c_ok, other=0.0) + tl.load(row + length - 1) * off * off
    tl.store(reciprocals_ptr + plane * C + c, tl.zeros((CB,), dtype=tl.float32) + 1.0 / rows, mask=c_ok)
    _store_moments(
        mean, square / rows, square / tl.maximum(rows - 1.0, 1.0), w_ptr, moments_ptr, coefficients_ptr, plane, scale,
        shift, c, c_ok, planes, eps, C,
    )  # fmt: skip


@triton.jit(do_not_specialize=["planes"])
def _known_moments(
    running_ptr, w_ptr, moments_ptr, coefficients_ptr, jobs_ptr, planes, eps, C: tl.constexpr, BLOCK: tl.constexpr
):
    """Like `_finish_moments`, from given means and variances."""
    job = jobs_ptr + tl.program_id(0) * 3
    plane, scale, shift = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = c < C
    mean = tl.load(running_ptr + plane * C + c, mask=ok, other=0.0)
    variance = tl.load(running_ptr + (planes + plane) * C + c, mask=ok, other=1.0)
    _store_moments(
        mean, variance, variance, w_ptr, moments_ptr, coefficients_ptr, plane, scale, shift, c, ok, planes, eps, C
    )


@triton.jit(do_not_specialize=["rows", "rows_each", "samples", "planes", "terms"])
def _arrival_sums(
    buffer_ptr, gradient_ptr, moments_ptr, factors_ptr, partial_ptr, jobs_ptr, rows, rows_each, AREA: tl.constexpr,
    samples, size, planes, terms, C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g·ŷ of a node's input planes, over a part of the rows."""
    t = tl.program_id(1)
    job = jobs_ptr + t * 7
    g_unit, g_column, distance, path = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    y_unit, plane = tl.load(job + 4), tl.load(job + 5)
    c = tl.program_id(2) * CB + tl.arange(0, CB)
    c_ok = c < C
    mean = tl.load(moments_ptr + plane * C + c, mask=c_ok, other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    plain = tl.zeros((BLOCK, CB), dtype=tl.float32)
    product = tl.zeros((BLOCK, CB), dtype=tl.float32)
    begin = tl.program_id(0) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    for start in range(begin, end, BLOCK):
        m = start + tl.arange(0, BLOCK)
        m_ok = m < end
        ok = m_ok[:, None] & c_ok[None, :]
        at = gradient_ptr + g_unit.to(tl.int64) * size + g_column + m[:, None] * distance + c[None, :]
        g = tl.load(at, mask=ok, other=0.0).to(tl.float32)
        if DROPS:
            factor = tl.load(factors_ptr + path * samples + m // AREA, mask=m_ok & (path >= 0), other=1.0)
            g *= factor[:, None]
        y = tl.load(buffer_ptr + y_unit.to(tl.int64) * size + m[:, None] * C + c[None, :], mask=ok, other=0.0)
        plain += g
        product += g * (y.to(tl.float32) - mean[None, :]) * rstd[None, :]
    to = partial_ptr + (tl.program_id(0) * terms + t) * C + c
    tl.store(to, tl.sum(plain, 0), mask=c_ok)
    tl.store(to + tl.num_programs(0) * terms * C, tl.sum(product, 0), mask=c_ok)


@triton.jit
def _parameter_gradients(
    partial_ptr, parameter_gradient_ptr, place, gamma_at, beta_at, c, c_ok, splits, terms, C: tl.constexpr,
    CB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g·ŷ of this rank's rows, which are also stored as its gradients of shift and scale."""
    plain = tl.zeros((BLOCK, CB), dtype=tl.float32)
    product = tl.zeros((BLOCK, CB), dtype=tl.float32)
    for start in range(0, splits, BLOCK):
        s = start + tl.arange(0, BLOCK)
        ok = (s < splits)[:, None] & c_ok[None, :]
        at = partial_ptr + ((s * terms + place) * C)[:, None] + c[None, :]
        plain += tl.load(at, mask=ok, other=0.0)
        product += tl.load(at + splits * terms * C, mask=ok, other=0.0)
    first, second = tl.sum(plain, 0), tl.sum(product, 0)
    tl.store(parameter_gradient_ptr + gamma_at + c, second, mask=c_ok & (gamma_at >= 0))
    tl.store(parameter_gradient_ptr + beta_at + c, first, mask=c_ok & (gamma_at >= 0))
    return first, second


@triton.jit
def _store_slopes(
    first, second, reciprocal, w_ptr, moments_ptr, slopes_ptr, plane, gamma_at, c, c_ok, planes, C: tl.constexpr
):
    """∂y as a linear function of g and y."""
    mean = tl.load(moments_ptr + plane * C + c, mask=c_ok, other=0.0)
    rstd = tl.load(moments_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    gamma = tl.load(w_ptr + gamma_at + c, mask=c_ok & (gamma_at >= 0), other=1.0)
    a = gamma * rstd
    to = slopes_ptr + plane * C + c
    tl.store(to, a, mask=c_ok)
    tl.store(to + planes * C, -a * rstd * second * reciprocal, mask=c_ok)
    tl.store(to + 2 * planes * C, a * (rstd * mean * second - first) * reciprocal, mask=c_ok)


@triton.jit(do_not_specialize=["splits", "terms", "planes"])
def _finish_slopes(
    partial_ptr, w_ptr, moments_ptr, slopes_ptr, parameter_gradient_ptr, jobs_ptr, splits, terms, planes, scale,
    C: tl.constexpr, CB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Computes ∂y as a linear function of g and y, and the gradients of scale and shift, from Σ g and Σ g·ŷ."""
    job = jobs_ptr + tl.program_id(0) * 4
    place, plane, gamma_at, beta_at = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    first, second = _parameter_gradients(
        partial_ptr, parameter_gradient_ptr, place, gamma_at, beta_at, c, c_ok, splits, terms, C, CB, BLOCK
    )
    _store_slopes(first, second, scale, w_ptr, moments_ptr, slopes_ptr, plane, gamma_at, c, c_ok, planes, C)


@triton.jit(do_not_specialize=["splits", "terms"])
def _collect_slopes(
    partial_ptr, to_ptr, parameter_gradient_ptr, jobs_ptr, splits, terms, C: tl.constexpr, CB: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes Σ g and Σ g·ŷ of this rank's rows to `to` [2, terms, C]; they are its gradients of shift and scale."""
    job = jobs_ptr + tl.program_id(0) * 4
    place, gamma_at, beta_at = tl.load(job), tl.load(job + 2), tl.load(job + 3)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    first, second = _parameter_gradients(
        partial_ptr, parameter_gradient_ptr, place, gamma_at, beta_at, c, c_ok, splits, terms, C, CB, BLOCK
    )
    tl.store(to_ptr + place * C + c, first, mask=c_ok)
    tl.store(to_ptr + (terms + place) * C + c, second, mask=c_ok)


@triton.jit(do_not_specialize=["terms", "planes"])
def _merge_slopes(
    from_ptr, w_ptr, moments_ptr, slopes_ptr, reciprocals_ptr, jobs_ptr, terms, planes, C: tl.constexpr,
    CB: tl.constexpr,
):  # fmt: skip
    """∂y as a linear function of g and y, from sums over the rows of all ranks."""
    job = jobs_ptr + tl.program_id(0) * 4
    place, plane, gamma_at = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    c = tl.program_id(1) * CB + tl.arange(0, CB)
    c_ok = c < C
    first = tl.load(from_ptr + place * C + c, mask=c_ok, other=0.0)
    second = tl.load(from_ptr + (terms + place) * C + c, mask=c_ok, other=0.0)
    reciprocal = tl.load(reciprocals_ptr + plane * C + c, mask=c_ok, other=0.0)
    _store_slopes(first, second, reciprocal, w_ptr, moments_ptr, slopes_ptr, plane, gamma_at, c, c_ok, planes, C)


def measure(run, partial, planes, rows):
    """Computes moments and coefficients from the sums of a norm group's planes."""
    p, c, schedule = run.program, run.c, run.schedule
    jobs = schedule.table(tuple((plane, run.norms[plane].scale, run.norms[plane].shift) for plane in planes))
    grid = (len(planes), triton.cdiv(c, 4))
    sizes = {"C": c, "CB": 4, "TILE": run.tile, "BLOCK": min(1024, triton.next_power_of_2(partial.splits))}
    if not run.form.shared:
        schedule.launch(
            _finish_moments, grid, partial.tensor, run.parameters, run.moments, run.coefficients, jobs, rows,
            partial.splits, p.planes, partial.terms, p.eps, **sizes,
        )  # fmt: skip
        return
    # Summing rows that are zero on all other ranks is a gather.
    merged = run.temporary(run.form.ranks * (2 * len(planes) * c + 1), zeroed=True)
    schedule.launch(
        _collect_moments, grid, partial.tensor, merged, jobs, rows, partial.splits, partial.terms, run.form.rank,
        len(planes), **sizes,
    )  # fmt: skip
    schedule.call(sum_in_place, merged)
    schedule.launch(
        _merge_moments, grid, merged, run.parameters, run.moments, run.coefficients, run.reciprocals, jobs,
        run.form.ranks, len(planes), p.planes, p.eps, C=c, CB=4,
    )  # fmt: skip
    schedule.free(merged)


def arrival_sums(run, jobs, planes):
    """Sums over gradients of node inputs, one job of `_pull_rows` per plane, and the slopes computed from them."""
    p, c = run.program, run.c
    blocks = triton.cdiv(c, run.block_c)
    block = max(1, run.blocks.sums_elements // run.block_c)
    # 1,056 programs are eight per multiprocessor (`MULTIPROCESSORS`).
    splits = max(1, min(triton.cdiv(run.rows, block), triton.cdiv(1056, len(jobs) * blocks)))
    each = triton.cdiv(triton.cdiv(run.rows, splits), block) * block
    splits = triton.cdiv(run.rows, each)
    partial = run._partial(splits, len(jobs))
    run.schedule.launch(
        _arrival_sums, (splits, len(jobs), blocks), run.buffer, run.gradient, run.moments, run._scales(),
        partial.tensor, run.schedule.table(jobs), run.rows, each, size=run.rows * c, planes=p.planes,
        terms=len(jobs), C=c, CB=run.block_c, BLOCK=block, **run._drops(),
    )  # fmt: skip
    finish_slopes(run, partial, planes, run.rows)


def finish_slopes(run, partial, planes, rows):
    """Computes slopes from the gradient sums of a norm group's planes, by position in `planes`; frees the sums."""
    p, c, schedule, norms = run.program, run.c, run.schedule, run.norms
    jobs = schedule.table(tuple((i, plane, norms[plane].scale, norms[plane].shift) for i, plane in enumerate(planes)))
    grid = (len(planes), triton.cdiv(c, 4))
    block = min(run.blocks.finish_rows, triton.next_power_of_2(partial.splits))
    sizes = {"C": c, "CB": 4, "BLOCK": block, "num_warps": max(4, block // 256)}
    if not run.form.shared:
        schedule.launch(
            _finish_slopes, grid, partial.tensor, run.parameters, run.moments, run.slopes, run.parameter_gradient, jobs,
            partial.splits, partial.terms, p.planes, 0.0 if run.form.known else 1.0 / rows, **sizes,
        )  # fmt: skip
        schedule.free(partial.tensor)
        return
    assert partial.terms == len(planes)
    merged = run.temporary(2 * len(planes) * c)
    schedule.launch(
        _collect_slopes, grid, partial.tensor, merged, run.parameter_gradient, jobs, partial.splits, partial.terms,
        **sizes,
    )  # fmt: skip
    schedule.call(sum_in_place, merged)
    schedule.launch(
        _merge_slopes, grid, merged, run.parameters, run.moments, run.slopes, run.reciprocals, jobs, len(planes),
        p.planes, C=c, CB=4,
    )  # fmt: skip
    schedule.free(partial.tensor, merged)
