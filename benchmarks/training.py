"""`python -m benchmarks.training`: training steps of derived networks, in three ways in one run.

plain: the formulation of other toolkits (module by module, channels-first, float32, eager). modules: the same modules,
channels-last in bfloat16, captured. fused: each cell as one operation, bfloat16, captured. kernels, only if named: the
same, with convolutions of all widths in Triton kernels (`library_channels`). On a CPU: small networks compared with
plain PyTorch in both layouts (`benchmarks.training_cpu`).

python -m benchmarks.training --rounds 20 --out record.json
python -m benchmarks.training --network darts --way modules --way fused
python -m benchmarks.training --network nb1shot1 --way modules --way fused --way kernels
python -m benchmarks.training --device cpu --threads 2 --out record.json
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import training_cpu
from benchmarks.options import machine, step_options
from benchmarks.training_cpu import BEST_201
from softcell.engine.session import keep_freed_memory
from softcell.kernels.backend import cell_settings
from studies.runs import write_record
from tests.reference.published_genotypes import DARTS_V2

WAYS: dict[str, dict[str, Any]] = {
    "plain": {"engine": "eager", "precision": "float32", "fused": False, "channels_first": True},
    "modules": {"engine": "graph", "precision": "bfloat16", "fused": False},
    "fused": {"engine": "graph", "precision": "bfloat16", "fused": True},
}
NO_LIBRARY = 2**30
"""More channels than any network has."""


@dataclass(frozen=True)
class Case:
    """A network: its space, training recipe and image size; without a genotype, a random one is drawn with `seed`."""

    space: str
    recipe: str
    size: int = 32
    genotype: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    seed: int = 0


def cases() -> dict[str, Case]:
    """The networks of the papers, at the papers' sizes."""
    return {
        "darts": Case("darts", "cifar", genotype=DARTS_V2),
        "imagenet": Case("darts", "imagenet", 224, DARTS_V2, {"image_size": 224}),
        "nos": Case("nos", "nos-cifar"),
        "fullattention": Case("fullattention", "fullattention-cifar"),
        "nb201": Case("nb201", "cifar", genotype=BEST_201),
        # Two 3×3 convolutions, one 1×1 and a pool; all blocks lead to the output.
        "nb1shot1": Case("nb1shot1-2", "cifar", seed=9),
    }


def measured(name: str, case: Case, ways: list[str], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """The cost of a step, one row per way."""
    from benchmarks.gpu import forget, made_data, made_training, measure
    from softcell.arch import notation, sample
    from softcell.engine.session import open_session
    from softcell.spaces import build_space

    space = build_space(case.space)
    genotype = sample(space.layout(), case.seed) if case.genotype is None else notation.parse(case.genotype)
    rows = []
    opened = open_session(device="cuda", seed=0, precision="float32", deterministic=False, threads=0)
    with opened as session, made_data(4096 if case.size == 32 else 512, case.size) as data:
        for way in ways:
            forget()
            settings = {"recipe": case.recipe, **case.settings, **WAYS["fused" if way == "kernels" else way]}
            with cell_settings(**({"library_channels": NO_LIBRARY} if way == "kernels" else {})):
                task = made_training(data, session, genotype, **settings)
                row = measure(task, rounds)
            row |= {"way": way, "batch": task.recipe.batch_size}
            row["images_per_second"] = 1e3 * task.recipe.batch_size / row["ms"]
            rows.append(row)
            speed = f"{row['images_per_second']:.0f} images/s, {row['ms']:.1f} ms ({row['busy_ms']:.1f} busy)"
            memory = f"{row['kernels']} kernels, {row['peak_gb']:.2f} GB"
            say(f"{name} {way}: {speed}, {memory}, first step {row['first_ms'] / 1e3:.1f} s")
            del task
    return rows


def main() -> None:
    parser = step_options("python -m benchmarks.training", __doc__, rounds=20, one_size=True)
    parser.add_argument("--network", action="append", choices=list(cases()), help="run only this one; may be repeated")
    parser.add_argument("--way", action="append", choices=[*WAYS, "kernels"], help="run only this one; may be repeated")
    options = parser.parse_args()
    device, threads = machine(parser, options)
    console = Console()
    if device.type != "cuda":
        if options.way or not set(options.network or ()) <= set(training_cpu.CASES):
            parser.error(f"on a CPU only {' and '.join(training_cpu.CASES)} are compared, in all ways: --device cuda")
        keep_freed_memory()  # as in every run on a CPU; the plain ways benefit, too
        rows = [training_cpu.compared(name, options.rounds) for name in options.network or training_cpu.CASES]
        on_cpu = Table("network", "way", "CPU ms", "wall ms", title=f"one training step, {threads} CPU threads")
        for row in rows:
            for way, spent in row["ways"].items():
                on_cpu.add_row(row["network"], way, f"{spent['cpu_ms']:.1f}", f"{spent['wall_ms']:.1f}")
            ratios = f"{row['ratio_cpu']:.2f}", f"{row['ratio_wall']:.2f}"
            on_cpu.add_row(row["network"], "best plain / softcell", *ratios, end_section=True)
        console.print(on_cpu)
        if options.out is not None:
            write_record(options.out, "benchmarks.training", threads=threads, rounds=options.rounds, networks=rows)
        return
    found: dict[str, Any] = {}
    for name in options.network or cases():
        found[name] = measured(name, cases()[name], options.way or list(WAYS), options.rounds, console.print)
        if options.out is not None:
            write_record(options.out, "benchmarks.training", threads=threads, rounds=options.rounds, networks=found)
    table = Table("network", "way", "images/s", "× first", "ms", "busy ms", "kernels", "peak GB", "first step, s")
    for name, rows in found.items():
        for row in rows:
            table.add_row(
                name,
                row["way"],
                f"{row['images_per_second']:.0f}",
                f"{row['images_per_second'] / rows[0]['images_per_second']:.2f}",
                f"{row['ms']:.1f}",
                f"{row['busy_ms']:.1f}",
                str(row["kernels"]),
                f"{row['peak_gb']:.2f}",
                f"{row['first_ms'] / 1e3:.1f}",
            )
    console.print(table)
    for name, rows in found.items():
        console.print(f"{name} {rows[-1]['way']}, the longest kernels:")
        for kernel in rows[-1]["longest"]:
            console.print(f"  {kernel['ms']:7.3f} ms {kernel['calls']:5} × {kernel['kernel']}")


if __name__ == "__main__":
    main()
