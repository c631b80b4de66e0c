"""`python -m benchmarks.onnx_file`: time to export and to run the ONNX file of a NOS network, on one core.

python -m benchmarks.onnx_file --cells 20 --channels 36 --rounds 6
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from softcell.app.export.graph import check_onnx, write_onnx
from softcell.app.export.model import INPUT, Model, sample_pixels
from softcell.arch import sample
from softcell.spaces import build_space
from studies.runs import write_record

SHAPE = (3, 32, 32)


def model_of(cells: int, channels: int, seed: int) -> Model:
    space = build_space("nos", {"cells": cells, "channels": channels})
    network = space.network(sample(space.layout(), seed), SHAPE, 10).eval()
    return Model(network, SHAPE, tuple("0123456789"), (0.5,) * 3, (0.2,) * 3, {})


def milliseconds(file: Path, batch: int, rounds: int) -> float:
    """Median of a pass in onnxruntime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    pixels, times = {INPUT: sample_pixels(SHAPE, batch).numpy()}, []
    for _ in range(rounds):
        began = time.perf_counter()
        session.run(None, pixels)
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.onnx_file", description=(__doc__ or "").splitlines()[0])
    for name, default in (("cells", 5), ("channels", 8), ("seed", 0), ("batch", 8), ("rounds", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = model_of(options.cells, options.channels, options.seed)
    kernels = str(model.network.genotype.to_dict()["cells"]).count("dynamic")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        began = time.perf_counter()
        write_onnx(model, file)
        found = {"dynamic_kernels": kernels, "write_seconds": time.perf_counter() - began, "bytes": file.stat().st_size}
        found |= {"difference": check_onnx(file, model), "ms": milliseconds(file, options.batch, options.rounds)}
    print("\n".join(f"{name}: {value:.4g}" for name, value in found.items()))
    if options.out is not None:
        write_record(options.out, "benchmarks.onnx_file", **found)


if __name__ == "__main__":
    main()
