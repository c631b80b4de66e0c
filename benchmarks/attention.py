"""`python -m benchmarks.attention`: time and memory of local attention, its naive form and torch's, in one run.

Forward and backward of one layer from queries, keys and values [batch, 3·width, side, side]: `ours` (Triton kernels on
a GPU; otherwise shifted views, or matrix products for small maps), `unfold` (copies all neighbourhoods with F.unfold),
`masked` (torch's scaled_dot_product_attention over all pairs with a mask, without relative positions, so it does less)
and `flex` (torch's compiled flex_attention with positions and a block mask; GPU only, heads padded to 16 values). GPU
times are those of a captured step. Memory on a GPU is the additional peak allocation; on a CPU it is what autograd
keeps for the backward pass. Forms that do not fit or fail are reported.

python -m benchmarks.attention --sides 8 32 --batch 8
python -m benchmarks.attention --batch 64 --width 8 --sides 8 16 32 56 --precision bfloat16 --rounds 20 --out FILE
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.options import machine
from softcell.engine.capture import EAGER_STEPS_PER_KEY, WARMUP, CapturedStep
from softcell.engine.timing import Stopwatch
from softcell.kernels.backend import runs_triton
from softcell.kernels.local import attend_packed, unpacked
from softcell.nn.attention import attend_local
from studies.runs import write_record

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps queries, keys and values [n, 3·c, h, w] and embeddings [heads, d, extent] to [n, c, h, w]."""
LARGEST = 8 * 1024**3
"""Bytes of one copy beyond which an implementation is not tried."""
MIN_HEAD = 16
"""Smallest head dimension that flex_attention supports; smaller heads are padded with zeros."""


def ours(packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    if runs_triton(packed):
        return attend_packed(packed, rows, columns)
    return _joined(attend_local(*unpacked(packed, rows.shape[0]), rows, columns))


def unfolded(packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The naive form: k² copies of keys and values."""
    q, k, v = unpacked(packed, rows.shape[0])
    n, heads, d, height, width = q.shape
    extent = rows.shape[-1]
    reach = extent // 2

    def around(x: Tensor) -> Tensor:
        return F.unfold(x.flatten(1, 2), extent, padding=reach).view(n, heads, d, extent**2, height, width)

    positions = (rows[..., :, None] + columns[..., None, :]).flatten(2).to(q.dtype)
    inside = F.unfold(torch.ones(1, 1, height, width, device=q.device), extent, padding=reach)
    logits = (q[:, :, :, None] * (around(k) + positions[None, ..., None, None])).sum(2)
    logits = logits.masked_fill(inside.view(1, 1, extent**2, height, width) == 0, -torch.inf)
    return _joined((around(v) * torch.softmax(logits, 2)[:, :, None]).sum(3))


def masked(packed: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """torch's attention over all pairs, with distant pairs masked; no positions."""
    q, k, v = (t.flatten(3).transpose(2, 3) for t in unpacked(packed, rows.shape[0]))
    height, width = packed.shape[-2:]
    reach = rows.shape[-1] // 2
    y, x = torch.arange(height, device=q.device), torch.arange(width, device=q.device)
    near = ((y[:, None] - y).abs() <= reach)[:, None, :, None] & ((x[:, None] - x).abs() <= reach)[None, :, None, :]
    mask = near.reshape(height * width, height * width)
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return found.transpose(2, 3).reshape(packed.shape[0], -1, height, width)


def flexed(packed: Tensor, rows: Tensor, columns: Tensor, *, compiled: bool = True) -> Tensor:
    """torch's flex_attention; the row and column terms of a neighbour are precomputed and looked up in the score."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = unpacked(packed, rows.shape[0])
    (height, width), d, reach = packed.shape[-2:], q.shape[2], rows.shape[-1] // 2
    by_row = torch.einsum("nedhw,edk->nehwk", q, rows.to(q.dtype)).flatten(2, 3)
    by_column = torch.einsum("nedhw,edk->nehwk", q, columns.to(q.dtype)).flatten(2, 3)

    def score(logit: Tensor, n: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        down = (j // width - i // width + reach).clamp(0, 2 * reach)
        across = (j % width - i % width + reach).clamp(0, 2 * reach)
        return logit + by_row[n, head, i, down] + by_column[n, head, i, across]

    room = (0, max(0, MIN_HEAD - d))
    flat = [F.pad(t.flatten(3).transpose(2, 3), room) for t in (q, k, v)]
    run: Any = _compiled() if compiled else flex_attention
    mask = _block_mask(height, width, reach, q.device)
    found: Tensor = run(flat[0], flat[1], flat[2], score_mod=score, block_mask=mask, scale=1.0)
    return found[..., :d].transpose(2, 3).reshape(packed.shape[0], -1, height, width)


_KEPT: dict[Any, Any] = {}


def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    if "flex" not in _KEPT:
        # One program per size: beyond its limit of recompilations torch falls back to eager without a warning.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.fail_on_recompile_limit_hit = True
        _KEPT["flex"] = torch.compile(flex_attention, dynamic=False)
    return _KEPT["flex"]


def _block_mask(height: int, width: int, reach: int, device: torch.device) -> Any:
    """Which pairs of pixels are neighbours; created once for each size, as in real use."""
    from torch.nn.attention.flex_attention import create_block_mask

    def near(n: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return ((i // width - j // width).abs() <= reach) & ((i % width - j % width).abs() <= reach)

    key = (height, width, reach, device)
    if key not in _KEPT:
        _KEPT[key] = create_block_mask(near, None, None, height * width, height * width, device=str(device))
    return _KEPT[key]


def _joined(y: Tensor) -> Tensor:
    return y.flatten(1, 2)


FORMS: dict[str, Form] = {"ours": ours, "unfold": unfolded, "masked": masked, "flex": flexed}


def why_not(form: str, options: argparse.Namespace, side: int, extent: int, device: torch.device) -> str | None:
    """The reason why an implementation is not tried."""
    if form == "flex" and device.type != "cuda":
        return "not measured: no gradients on a CPU"
    pixels = side * side
    copied = {"unfold": options.width * extent**2 * pixels, "masked": options.heads * pixels**2}.get(form, 0)
    return "too large" if 4 * options.batch * copied > LARGEST else None


def measure(form: Form, options: argparse.Namespace, side: int, extent: int, device: torch.device) -> dict[str, Any]:
    """Median milliseconds of forward and backward pass, and megabytes."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if options.precision == "bfloat16" else torch.float32
    packed = torch.randn(options.batch, 3 * options.width, side, side, device=device).to(dtype)
    packed = packed.to(memory_format=torch.channels_last).requires_grad_()
    size = (options.heads, options.width // options.heads, extent)
    embeddings = [torch.randn(size, device=device, requires_grad=True) for _ in range(2)]
    notes: list[str] = []
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    def step() -> None:
        y = form(packed, embeddings[0], embeddings[1])
        torch.autograd.grad(y.float().sum(), [packed, *embeddings], allow_unused=True)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        step()  # the first call compiles
    watch = Stopwatch(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    with watch:
        step()
    memory = watch.timing.peak_bytes - before if device.type == "cuda" else sum(kept.values())
    work: Callable[[], None] = step
    if device.type == "cuda":
        work = CapturedStep(step, notes.append)
        # Eager steps, then the captured one: all timed steps are replays.
        for _ in range(WARMUP + EAGER_STEPS_PER_KEY + 1):
            work()
    times = []
    for _ in range(options.rounds):
        with watch:
            work()
        times.append(1e3 * watch.timing.seconds)
    return {"ms": statistics.median(times), "megabytes": memory / 1e6, **({"notes": notes} if notes else {})}


def tried(name: str, options: argparse.Namespace, side: int, extent: int, device: torch.device) -> dict[str, Any] | str:
    reason = why_not(name, options, side, extent, device)
    if reason is not None:
        return reason
    try:
        return measure(FORMS[name], options, side, extent, device)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # any error of torch's compiled form is reported as a user would see it
        if name != "flex":
            raise
        return f"not measured: {type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[8, 16, 32], help="side lengths of the square maps")
    parser.add_argument("--extents", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds after a warm-up")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="implementations to measure")
    parser.add_argument("--out", type=Path, help="a JSON file for the record, written after every row")
    options = parser.parse_args(arguments)
    if options.width % options.heads:
        parser.error(f"--heads must divide --width, but got {options.heads} heads for {options.width} channels")
    device, _ = machine(parser, options, threads=1)
    shape = f"[{options.batch}, {options.width}, side, side]"
    table = Table(title=f"one layer, {shape}, {options.heads} heads, {options.precision}, {device}")
    for column in ("side", "extent", *options.forms):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    for side in options.sides:
        for extent in options.extents:
            found: dict[str, Any] = {name: tried(name, options, side, extent, device) for name in options.forms}
            rows.append({"side": side, "extent": extent, **found})
            if options.out is not None:
                settings = {k: v for k, v in vars(options).items() if k != "out"}
                write_record(options.out, "benchmarks.attention", settings=settings, rows=rows)
            shown = [v if isinstance(v, str) else f"{v['ms']:.2f} ms, {v['megabytes']:.1f} MB" for v in found.values()]
            table.add_row(str(side), str(extent), *shown)
            line = ", ".join(f"{name} {text}" for name, text in zip(found, shown, strict=True))
            print(f"{side}x{side}, extent {extent}: {line}", file=sys.stderr, flush=True)
    Console().print(table)


if __name__ == "__main__":
    main()
