"""A small task that uses everything a resumed run can get wrong: momentum, running statistics, schedules, random
numbers in the data and in the network, metrics summed over steps, and ranks that see parts of a batch."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softcell.engine.distributed import World, average_, sum_
from softcell.engine.metrics import Failure, LossWatch
from softcell.engine.session import seed_everything
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stochastic import DropPath

ALONE = World(0, 1, 0, torch.device("cpu"))
BATCH = 8


class Toy:
    def __init__(
        self,
        world: World = ALONE,
        *,
        num_epochs: int = 3,
        steps: int = 4,
        delay: float = 0.0,
        nan_at: tuple[int, int] | None = None,
        stop_after: int | None = None,
        before_step: Callable[[int, int], None] = lambda epoch, step: None,
    ) -> None:
        seed_everything(5)
        self.world = world
        self.num_epochs = num_epochs
        self.steps = steps
        self.delay = delay
        self.nan_at = nan_at
        self.stop_after = stop_after
        self.before_step = before_step
        self.net = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            BatchNorm2d(4),
            DropPath(0.4),
            nn.Flatten(),
            nn.Linear(64, 2),
        ).to(world.device, torch.float64)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.total = torch.zeros((), dtype=torch.float64, device=world.device)
        self.count = torch.zeros((), dtype=torch.int64, device=world.device)
        self.watch = LossWatch().to(world.device)
        self.epoch = self.done = 0
        self.jitter = 0.0

    def steps_in(self, epoch: int) -> int:
        return self.steps + epoch % 2

    def begin_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.done = 0
        self.optimizer.param_groups[0]["lr"] = 0.1 / (epoch + 1)
        for part in self.net:
            if isinstance(part, DropPath):
                part.set_fraction(epoch / self.num_epochs)
        self.total.zero_()
        self.count.zero_()
        self.jitter = float(torch.rand(()))  # a resumed epoch must neither redraw nor continue from here

    def batches(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
        part = BATCH // self.world.size
        mine = slice(self.world.rank * part, (self.world.rank + 1) * part)
        for step in range(start, self.steps_in(epoch)):
            generator = torch.Generator().manual_seed(1000 * epoch + step)
            x = torch.randn(BATCH, 3, 4, 4, dtype=torch.float64, generator=generator)
            y = torch.randint(2, (BATCH,), generator=generator)
            x += 0.1 * torch.randn_like(x)  # from the global generator, as augmentation would
            yield x[mine].to(self.world.device), y[mine].to(self.world.device)

    def step(self, batch: tuple[Tensor, Tensor]) -> None:
        self.before_step(self.epoch, self.done)
        time.sleep(self.delay)
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y) * (1.0 + self.jitter)
        if self.nan_at == (self.epoch, self.done):
            loss = loss * float("nan")
        self.watch.update(loss.detach(), self.done)
        self.optimizer.zero_grad()
        loss.backward()
        average_([p.grad for p in self.net.parameters() if p.grad is not None], self.world)
        self.optimizer.step()
        self.total += loss.detach() * len(x)
        self.count += len(x)
        self.done += 1

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        total, count = sum_(self.total.clone(), self.world), sum_(self.count.clone(), self.world)
        norm = sum(float(p.detach().abs().sum()) for p in self.net.parameters())
        metrics: dict[str, Any] = {"loss": float(total / count), "samples": int(count)}
        metrics["_records"] = {"weights": {"epoch": epoch, "norm": norm}}
        if self.stop_after == epoch:
            metrics["_stop"] = "enough"
        return metrics

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": self.net.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
            "jitter": self.jitter,
            "_local": {"meter": {"total": self.total, "count": self.count}},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]
        self.jitter = state["jitter"]
        if "_local" in state:
            self.total.copy_(state["_local"]["meter"]["total"])
            self.count.copy_(state["_local"]["meter"]["count"])

    def failed(self) -> Failure | None:
        return self.watch.failed()


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal bit by bit; times are not compared."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a if key != "seconds")
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def final_state(folder: Path) -> dict[str, Any]:
    """The state a run has left, with its history parsed and without times."""
    import json

    from softcell.engine.checkpoint import load_latest

    loaded = load_latest(folder)
    assert loaded is not None
    state = dict(loaded.state)
    state["history"] = {name: untimed([json.loads(x) for x in xs]) for name, xs in state["history"].items()}
    files = {}
    for file in sorted(folder.glob("*.jsonl")):
        files[file.stem] = untimed([json.loads(line) for line in file.read_text().splitlines()])
    assert files == state["history"], "the files and the checkpoint must say the same"
    return state
