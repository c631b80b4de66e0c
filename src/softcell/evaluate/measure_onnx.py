"""Measures the latency of ONNX files on this device; needs Python 3.9, numpy and onnxruntime only.

    pip install onnxruntime numpy
    python measure.py

`softcell latency --pack DIR` copies this file to DIR/measure.py, next to `pack.json` and the ONNX files that it lists:
the candidates of a search space at every size where they can be, and some whole networks. The result is `latency.json`,
a table for `softcell search --latency-table`. Measured times are kept in `times.json`: after an interruption the same
command measures only the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WARM_UP = 0.2
"""Seconds of calls before the first measurement, for allocation and clocks."""
SAMPLE = 0.002
"""Minimum seconds of one sample; shorter calls are repeated within it, since clocks have limited resolution."""


def open_session(file: str | Path, threads: int = 1, provider: str = "CPUExecutionProvider") -> Any:
    """An onnxruntime session; threads: of one operation, 0 for all cores."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(str(file), options, providers=[provider])
    if provider not in session.get_providers():  # onnxruntime would use the CPU instead
        raise RuntimeError(f"onnxruntime cannot use {provider} on this device")
    return session


def call_of(session: Any, shape: list[int]) -> Any:
    """A function without arguments that runs the session once on the same random pixels float32 `shape`."""
    import numpy

    pixels = numpy.random.default_rng(0).random(shape, dtype=numpy.float32)
    feed = {session.get_inputs()[0].name: pixels}
    return lambda: session.run(None, feed)


def measure_calls(calls: list[Any], repeats: int = 15) -> list[list[float]]:
    """For every call `repeats` samples in milliseconds, sorted; interleaved, so that load affects all calls equally."""
    counts = []
    for call in calls:
        spent, last, number = 0.0, 0.0, 0
        while number < 2 or spent < WARM_UP:
            last = seconds(call, 1)
            spent, number = spent + last, number + 1
        counts.append(max(1, round(SAMPLE / max(last, 1e-9))))
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for number, call in enumerate(calls):
            samples[number].append(seconds(call, counts[number]) / counts[number] * 1e3)
    return [sorted(found) for found in samples]


def seconds(call: Any, times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def latency_table(
    places: Sequence[tuple[str, str, Any]],
    times: Mapping[Any, float],
    networks: Sequence[tuple[Sequence[tuple[str, str]], float]],
) -> tuple[dict[str, dict[str, float]], float, list[tuple[float, float]]]:
    """The times of candidates by table and name, the fixed time, and (predicted, measured) times of whole networks.

    places: (table, candidate, measurement) of every edge where the candidate can be; its time is the mean over them.
    times: milliseconds by measurement. networks: (table, candidate) of all picks of a network, and its time.
    `fixed`, the time of everything around the candidates, is the median difference between a network and the sum of its
    picks. Where that is negative, since candidates take less time inside a network than alone, their times are scaled
    down to fit the networks instead.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for table, op, measurement in places:
        found.setdefault(table, {}).setdefault(op, []).append(times[measurement])
    table_of = {table: {op: statistics.fmean(own) for op, own in row.items()} for table, row in found.items()}
    sums = [sum(table_of.get(table, {}).get(op, 0.0) for table, op in picks) for picks, _ in networks]
    pairs = [(total, networks[number][1]) for number, total in enumerate(sums)]
    fixed = statistics.median(measured - total for total, measured in pairs) if pairs else 0.0
    if fixed < 0.0:
        # The median network is below its sum, so some sum is above 0.
        fixed, scale = 0.0, statistics.median(measured / total for total, measured in pairs if total > 0.0)
        table_of = {table: {op: scale * own for op, own in row.items()} for table, row in table_of.items()}
        pairs = [(scale * total, measured) for total, measured in pairs]
    return table_of, fixed, [(total + fixed, measured) for total, measured in pairs]


def _write_json(file: Path, content: Any) -> None:
    """Replaces a file in one step, so that an interruption leaves the old content or the new."""
    temporary = file.with_name(f".{file.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure the ONNX files of this folder on this device.")
    parser.add_argument("--pack", default=str(Path(__file__).parent), help="folder with pack.json (default: this one)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads, 0 for all cores (default: 1)")
    parser.add_argument("--provider", default="CPUExecutionProvider", help="execution provider of onnxruntime")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="samples per file (default: 15)")
    parser.add_argument("--device", default=platform.processor() or platform.machine(), help="name for the table")
    given = parser.parse_args(arguments)
    if given.repeats < 1 or given.threads < 0:
        parser.error("--repeats must be 1 or more and --threads 0 or more")
    folder = Path(given.pack)
    try:
        import numpy
        import onnxruntime

        pack = json.loads((folder / "pack.json").read_text(encoding="utf-8"))
    except ImportError as error:
        parser.error(f"{error}; install it: pip install onnxruntime numpy")
    except (OSError, ValueError) as error:
        parser.error(f"pack.json must be in {folder}, as `softcell latency --pack` wrote it: {error}")
    available = onnxruntime.get_available_providers()
    if given.provider not in available:
        parser.error(f"--provider must be one of {', '.join(available)}, got {given.provider!r}")
    setting = {"threads": given.threads, "provider": given.provider, "repeats": given.repeats}
    setting.update(pack=pack["digest"], onnxruntime=onnxruntime.__version__, numpy=numpy.__version__)
    done = _earlier_times(folder / "times.json", setting)
    for number, (name, shape) in enumerate(pack["files"].items()):
        if name in done:
            continue
        samples = measure_calls(
            [call_of(open_session(folder / name, given.threads, given.provider), shape)], given.repeats
        )
        done[name] = statistics.median(samples[0])
        _write_json(folder / "times.json", {"setting": setting, "times": done})
        print(f"{number + 1:>4} of {len(pack['files'])}  {done[name]:9.4f} ms  {name}", flush=True)
    _write_json(folder / "latency.json", _finished(pack, done, given))
    print(f"written: {folder / 'latency.json'}, for softcell search --latency-table")
    return 0


def _earlier_times(file: Path, setting: dict[str, Any]) -> dict[str, float]:
    """Times that an interrupted call with the same setting has measured."""
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return dict(earlier["times"]) if earlier.get("setting") == setting else {}


def _finished(pack: dict[str, Any], done: dict[str, float], given: argparse.Namespace) -> dict[str, Any]:
    """The content of latency.json.

    A candidate's time is what it takes more than a graph that only copies the same input: inside a network the call of
    onnxruntime is paid once, not once per candidate.
    """
    times = {name: max(0.0, done[name] - done[base]) for name, base in pack["baselines"].items()}
    networks = [(one["picks"], done[one["file"]]) for one in pack["networks"]]
    table, fixed, pairs = latency_table(pack["places"], times, networks)
    checks = [{"predicted": guess, "measured": found} for guess, found in pairs]
    error = statistics.fmean(abs(guess / found - 1.0) for guess, found in pairs) if pairs else None
    about = {**pack["about"], "device": given.device, "threads": given.threads, "provider": given.provider}
    about.update(networks=checks, mean_deviation=error)
    for one, (guess, found) in zip(pack["networks"], pairs):  # noqa: B905 - `strict` needs Python 3.10
        print(f"{one['file']}: {found:.4g} ms measured, {guess:.4g} ms predicted")
    if error is not None:
        print(f"mean prediction error {error:.1%} on {len(pairs)} whole networks")
    return {"about": about, "fixed": fixed, **table}


if __name__ == "__main__":
    sys.exit(main())
