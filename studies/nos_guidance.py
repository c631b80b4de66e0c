"""Guided against unguided search (NOS, Figure 5 and Table 4): same seeds, same epochs, one teacher.

    python -m studies.nos_guidance --data cifar10 --data-root ~/data --seeds 1 2 --minutes 9

trains the teacher, searches with and without it for every seed, trains every derived network equally long, and writes
`results/nos/guidance.json` and `guidance.svg` after each part. The same command goes on where it stopped: after
`--minutes` it stops by itself and saves. What is unfinished is recorded as 'not measured'.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell import api
from softcell.engine import RunFolder
from softcell.engine.files import atomic_write_text
from softcell.engine.provenance import collect, now
from softcell.evaluate.teacher import resolve_teacher, stored_teacher, train_teacher
from softcell.report import curves_svg

MISSING = "not measured"
ARMS = ("unguided", "guided")
CURVES = ("train_accuracy", "val_accuracy")


@dataclass(frozen=True)
class Study:
    """Everything the study does, as given on the command line."""

    options: argparse.Namespace

    @property
    def work(self) -> Path:
        return Path(self.options.work)

    def folder(self, *parts: object) -> Path:
        return self.work / "-".join(map(str, parts))

    def common(self) -> dict[str, Any]:
        o = self.options
        given = {"data": o.data, "data_root": o.data_root, "device": o.device, "precision": o.precision}
        return {key: value for key, value in given.items() if value is not None}

    def run(self) -> bool:
        """Whether all is done; False where time ran out."""
        o = self.options
        if not self.teach():
            return False
        self.record()
        for seed in o.seeds:
            for arm in ARMS:
                if not self.search(seed, arm):
                    return False
                self.record()
        for seed in o.seeds:
            for arm in ARMS:
                if not self.train(seed, arm):
                    return False
                self.record()
        return True

    def teach(self) -> bool:
        o, folder = self.options, self.folder("teacher")
        if state(folder) == "finished":
            return True
        begun = state(folder) is not None
        # As in the paper, ten steps of the learning rate over the whole training.
        length = {"epochs": o.teacher_epochs, "lr_every": max(1, o.teacher_epochs // 10)}
        batch = {} if o.teacher_batch is None else {"batch_size": o.teacher_batch}
        given = {**self.common(), **length, **batch, "seed": 0, **settings(o.teacher_set)}
        recipe = stored_teacher(folder, {}) if begun else resolve_teacher(o.teacher, given)
        return train_teacher(recipe, folder, resume=begun, on_event=tell("teacher")).exit_code == 0

    def search(self, seed: int, arm: str) -> bool:
        o, folder = self.options, self.folder("search", arm, seed)
        given: dict[str, Any] = {**self.common(), "method": "nos", "space": "nos", "seed": seed, "scale": o.scale}
        given |= {} if o.search_epochs is None else {"epochs": o.search_epochs}
        given |= {"guide": {"teacher": str(self.folder("teacher").resolve())}} if arm == "guided" else {}
        begun = state(folder) is not None
        full = api.layered(given, settings(o.search_set))
        recipe = api.search_recipe({} if begun else full, resume_from=folder if begun else None)
        return api.search_with(recipe, folder, resume=begun, on_event=tell(f"search {arm} {seed}")).exit_code == 0

    def train(self, seed: int, arm: str) -> bool:
        o, folder = self.options, self.folder("train", arm, seed)
        given: dict[str, Any] = {**self.common(), "seed": seed}
        given |= {} if o.train_epochs is None else {"epochs": o.train_epochs}
        begun = state(folder) is not None
        chosen, recipe = api.train_recipe(
            self.folder("search", arm, seed) if not begun else None,
            {} if begun else api.layered(given, settings(o.train_set)),
            resume_from=folder if begun else None,
        )
        return api.train_with(chosen, recipe, folder, resume=begun, on_event=tell(f"train {arm} {seed}")).exit_code == 0

    def record(self) -> dict[str, Any]:
        """Writes what is known so far."""
        o, out = self.options, Path(self.options.results)
        teacher = results(self.folder("teacher"))
        arms = {arm: {str(seed): self.seed(arm, seed) for seed in o.seeds} for arm in ARMS}
        made = {
            "study": "NOS: attention-guided against unguided search",
            "command": " ".join(["python -m studies.nos_guidance", *sys.argv[1:]]),
            "date": now(),
            **collect(),
            "teacher": {
                "architecture": o.teacher,
                "epochs": o.teacher_epochs,
                "test_accuracy": teacher.get("accuracy", MISSING),
                "parameters": teacher.get("parameters", MISSING),
            },
            "seeds": o.seeds,
            "arms": arms,
            "summary": {arm: summary(list(rows.values())) for arm, rows in arms.items()},
            "paper": "CIFAR-10 test error 3.44 without and 2.53 with guidance (Table 4; 25 epochs, 600 epochs)",
        }
        out.mkdir(parents=True, exist_ok=True)
        atomic_write_text(out / "guidance.json", json.dumps(made, indent=2) + "\n")
        history = self.curves()
        if history:
            keys = [f"{arm} {name.split('_')[0]}" for arm in ARMS for name in CURVES]
            title = f"NOS search on {o.data}: accuracy of the proxy network, mean over seeds"
            atomic_write_text(out / "guidance.svg", curves_svg(history, keys, title))
        return made

    def seed(self, arm: str, seed: int) -> dict[str, Any]:
        search, train = self.folder("search", arm, seed), self.folder("train", arm, seed)
        rows = metrics(search)
        done = state(search) == "finished"
        found = results(train) if state(train) == "finished" else {}
        manifest = None if state(search) is None else RunFolder.open(search).manifest
        return {
            "search_epochs_done": len(rows),
            "search_recipe": None if manifest is None else manifest["recipe"],
            **{name: [row.get(name) for row in rows] for name in CURVES},
            "val_accuracy_last": rows[-1].get("val_accuracy", MISSING) if done else MISSING,
            "gradient_norms": {k: v for k, v in (rows[0] if rows else {}).items() if k.startswith("gradient_norm")},
            "derived_test_accuracy": found.get("accuracy", MISSING),
            "derived_parameters": found.get("parameters", MISSING),
            "train_epochs": len(metrics(train)) if found else MISSING,
        }

    def curves(self) -> list[dict[str, Any]]:
        """Per epoch the means over those seeds that have come so far, for epochs that all of them have."""
        history: list[dict[str, Any]] = []
        for arm in ARMS:
            runs = [rows for seed in self.options.seeds if (rows := metrics(self.folder("search", arm, seed)))]
            for epoch in range(min((len(rows) for rows in runs), default=0)):
                while len(history) <= epoch:
                    history.append({"epoch": len(history)})
                for name in CURVES:
                    values = [rows[epoch][name] for rows in runs if rows[epoch].get(name) is not None]
                    if values:
                        history[epoch][f"{arm} {name.split('_')[0]}"] = statistics.mean(values)
        return history


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("val_accuracy_last", "derived_test_accuracy"):
        values = [row[name] for row in rows if isinstance(row[name], float)]
        found[name] = (
            {"n": len(values), "mean": statistics.mean(values), "std": statistics.stdev(values)}
            if len(values) >= 2
            else MISSING
        )
    return found


def state(folder: Path) -> str | None:
    return str(RunFolder.open(folder).manifest["status"]) if (folder / "run.json").is_file() else None


def results(folder: Path) -> dict[str, Any]:
    return dict(RunFolder.open(folder).manifest["results"]) if state(folder) is not None else {}


def metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.is_file() else []


def settings(items: list[str]) -> dict[str, Any]:
    from softcell.settings import assignments

    return assignments(items)


def tell(what: str) -> Any:
    from softcell.engine.events import EpochEnded, Note

    def listen(event: object) -> None:
        if isinstance(event, EpochEnded):
            shown = {k: round(v, 4) for k, v in event.metrics.items() if k in (*CURVES, "train_loss", "seconds")}
            print(f"{what}: epoch {event.epoch} {shown}", flush=True)
        elif isinstance(event, Note):
            print(f"{what}: {event.text}", flush=True)

    return listen


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m studies.nos_guidance", description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--scale", choices=("paper", "small"), default="paper")
    parser.add_argument("--teacher", default="pyramidnet", help="pyramidnet or resnet18")
    parser.add_argument("--teacher-epochs", type=int, default=300)
    parser.add_argument("--teacher-batch", type=int, help="else the recipe's")
    parser.add_argument("--search-epochs", type=int, help="else the recipe's")
    parser.add_argument("--train-epochs", type=int, help="of every derived network; else the recipe's")
    for part in ("teacher", "search", "train"):
        parser.add_argument(f"--{part}-set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--work", default="runs/nos-guidance", help="run folders")
    parser.add_argument("--results", default="results/nos")
    parser.add_argument("--minutes", type=float, help="stop and save after so long")
    parser.add_argument("--device")
    parser.add_argument("--precision")
    return parser.parse_args(arguments)


class _TimeIsUp(Exception):
    """Time ran out between two runs."""


def _between(*_: object) -> None:
    raise _TimeIsUp


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.minutes is not None:
        signal.signal(signal.SIGTERM, _between)
        # As if the user had pressed Ctrl-C: the run in progress saves at its next step.
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, options.minutes * 60)
    study = Study(options)
    try:
        done = study.run()
    except _TimeIsUp:
        done = False
    signal.setitimer(signal.ITIMER_REAL, 0)
    study.record()
    print("done" if done else "stopped; the same command goes on", f"-> {options.results}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
