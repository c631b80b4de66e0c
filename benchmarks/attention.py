"""`python -m benchmarks.attention`: local attention beside its naive form and torch's own, time and memory in one run.

Forward and backward of one layer on maps [batch, width, side, side]: `ours` (shifted views; products of matrices on
small maps), `unfold` (all neighbourhoods copied by F.unfold), `masked` (torch's scaled_dot_product_attention over all
pairs with a mask; without relative positions, so it does less). Memory is what is allocated at the peak on a GPU; on a
CPU it is what autograd keeps for the backward pass. A form that does not fit is told.

python -m benchmarks.attention --sides 8 32 --batch 8
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from softcell.engine.device import resolve_device, set_threads
from softcell.engine.provenance import collect, now
from softcell.nn.attention_local import attend_local

Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
LARGEST = 8 * 1024**3
"""Bytes of one copy beyond which a form is not tried."""


def unfolded(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The naive form: k² copies of keys and values."""
    n, heads, d, height, width = q.shape
    extent = rows.shape[-1]
    reach = extent // 2

    def around(x: Tensor) -> Tensor:
        return F.unfold(x.flatten(1, 2), extent, padding=reach).view(n, heads, d, extent**2, height, width)

    positions = (rows[..., :, None] + columns[..., None, :]).flatten(2)
    inside = F.unfold(torch.ones(1, 1, height, width, device=q.device), extent, padding=reach)
    logits = (q[:, :, :, None] * (around(k) + positions[None, ..., None, None])).sum(2)
    logits = logits.masked_fill(inside.view(1, 1, extent**2, height, width) == 0, -torch.inf)
    return (around(v) * torch.softmax(logits, 2)[:, :, None]).sum(3)


def masked(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """torch's own attention over all pairs, those too far apart masked; no positions."""
    height, width = q.shape[-2:]
    reach = rows.shape[-1] // 2
    y, x = torch.arange(height, device=q.device), torch.arange(width, device=q.device)
    near = ((y[:, None] - y).abs() <= reach)[:, None, :, None] & ((x[:, None] - x).abs() <= reach)[None, :, None, :]
    mask = near.reshape(height * width, height * width)
    flat = [t.flatten(3).transpose(2, 3) for t in (q, k, v)]
    return F.scaled_dot_product_attention(*flat, attn_mask=mask, scale=1.0).transpose(2, 3).reshape(q.shape)


FORMS: dict[str, Form] = {"ours": attend_local, "unfold": unfolded, "masked": masked}


def largest_copy(form: str, options: argparse.Namespace, side: int, extent: int) -> int:
    pixels = side * side
    numbers = {"ours": 1, "unfold": options.width * extent**2 * pixels, "masked": options.heads * pixels**2}[form]
    return 4 * options.batch * numbers


def measure(form: Form, options: argparse.Namespace, side: int, extent: int, device: torch.device) -> dict[str, float]:
    """Median milliseconds of forward and backward, and megabytes."""
    torch.manual_seed(0)
    d = options.width // options.heads
    shape = (options.batch, options.heads, d, side, side)
    given = [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]
    given += [torch.randn(options.heads, d, extent, device=device, requires_grad=True) for _ in range(2)]
    kept: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times = []
    for _ in range(options.rounds + 1):
        before = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = form(given[0], given[1], given[2], given[3], given[4])
        torch.autograd.grad(y.sum(), given, allow_unused=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e3 * (time.perf_counter() - before))
        if len(times) == 1 and device.type != "cuda":
            once = sum(kept.values())
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else once
    return {"ms": statistics.median(times[1:]), "megabytes": memory / 1e6}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sides", type=int, nargs="+", default=[8, 16, 32], help="of the square maps")
    parser.add_argument("--extents", type=int, nargs="+", default=[3, 5, 7])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="timed ones after one warm-up")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="a JSON file for the record")
    options = parser.parse_args(arguments)
    device = resolve_device(options.device)
    if device.type == "cpu":
        set_threads(1)
    table = Table(title=f"one layer, [{options.batch}, {options.width}, side, side], {options.heads} heads, {device}")
    for column in ("side", "extent", *FORMS):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    for side in options.sides:
        for extent in options.extents:
            found: dict[str, Any] = {"side": side, "extent": extent}
            for name, form in FORMS.items():
                fits = largest_copy(name, options, side, extent) <= LARGEST
                found[name] = measure(form, options, side, extent, device) if fits else "too large"
            rows.append(found)
            cells = (
                v if isinstance(v := found[n], str) else f"{v['ms']:.1f} ms, {v['megabytes']:.1f} MB" for n in FORMS
            )
            table.add_row(str(side), str(extent), *cells)
    Console().print(table)
    if options.out is not None:
        settings = {k: v for k, v in vars(options).items() if k != "out"}
        options.out.write_text(
            json.dumps({"date": now(), **collect(), "settings": settings, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
