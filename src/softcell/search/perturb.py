"""Perturbation-based selection on a trained supernet of any method.

DARTS-PT: Wang, Cheng, Chen, Tang, Hsieh, Rethinking Architecture Selection in Differentiable NAS, ICLR 2021,
Algorithm 1:

    edges, in random order   keep the candidate whose removal lowers the validation accuracy most; tune the supernet
    nodes, in random order   keep the input edges whose removal lowers it most; tune the supernet

One round decides one edge (later one node) of every table, as the authors' code does for normal and reduction cell.
The supernet is then tuned for `select.epochs` epochs; nothing is tuned after the last round, since no decision follows.

Deviation: the architecture parameters stay as the search left them while weights are tuned. The authors' code trains
those of undecided edges too, by DARTS's own step, which other methods do not have.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Rule, StrongestEach, Table, TopInputs, WeightMix, derive
from softcell.arch.choice import LINK
from softcell.arch.mix import Live
from softcell.data import Batches
from softcell.engine import checkpoint
from softcell.engine.capture import prepare_step
from softcell.engine.distributed import World, on_main
from softcell.engine.metrics import Measured, measure
from softcell.engine.optim import apply_gradients, load_optimiser, rate_at, set_lr, sgd
from softcell.engine.reduce import gradients_of
from softcell.engine.session import forked_rng
from softcell.errors import UserError
from softcell.kernels.shared import norms_of
from softcell.methods import Method
from softcell.nn.norm import running_statistics
from softcell.nn.objective import Objective
from softcell.search.indicators import Only, Without
from softcell.search.recipe import SearchRecipe
from softcell.search.supernet import StepContext, batch_statistics, recalibrated
from softcell.spaces import Bound, Supernet
from softcell.spaces.execution import modules_only

FILE = "selection.bin"
"""In the run folder: the state of a selection after its latest round."""

Edge = tuple[str, int]
"""A table's name and the number of a choice in it."""
Decided = dict[Edge, int | None]
"""The candidate that an edge keeps; None: the edge is removed. Edges that are not in it are undecided."""


@dataclass(frozen=True, slots=True)
class Question:
    """One decision: among the candidates of edge `number`, or (`is_node`) among the input edges of node `number`."""

    table: str
    number: int
    is_node: bool


class WithoutEdge(Without):
    """A mix without one edge, at all sites of a table."""

    def __init__(self, mix: Mix, layout: Layout, table: str, choice: int) -> None:
        super().__init__(mix, layout, table, choice, candidate=-1)

    def _left(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Mapping[int, Tensor | None]:
        return {} if self._is_here(site, choice) else outputs


def check_perturbable(layout: Layout, method: Method) -> None:
    """Raises where a selection by perturbation has no meaning or is not supported."""
    if not isinstance(layout.rule, StrongestEach | TopInputs):
        raise UserError(
            "selection by perturbation decides edges one by one, but the rule of space "
            f"{layout.space!r} ({type(layout.rule).__name__}) picks operations of several edges together; leave out "
            "--select perturbation, or let evolution select (--set evolution.generations=20)"
        )
    if method.selection is not None and method.planner is not None and method.planner.num_plans() is not None:
        raise UserError(
            f"selection by perturbation removes candidates from a supernet that runs all of them, but method "
            f"{method.name!r} trains single paths in space {layout.space!r}; leave out --select perturbation, or let "
            "evolution select (--set evolution.generations=20)"
        )


def allowed_candidates(layout: Layout, table: Table, choice: int) -> list[int]:
    """The candidates that the space may keep on an edge; for a competing edge only its link."""
    if choice in table.contest_of:
        return [LINK]
    never = layout.rule.never_picked if isinstance(layout.rule, Rule) else ()
    candidates = table.choices[choice].candidates
    return [k for k, op in enumerate(candidates) if op not in never] or list(range(len(candidates)))


def num_inputs(layout: Layout, table: Table, target: int) -> int:
    """The number of input edges of a node that the space's rule keeps."""
    return sum(pick.target == target for pick in layout.rule(table, torch.zeros(table.shape)))


def questions(layout: Layout, seed: int) -> list[list[Question]]:
    """The rounds: one undecided edge of every table, then one node of every table, in random orders."""
    rng = random.Random(f"perturbation {seed}")
    edges, nodes = list[list[Question]](), list[list[Question]]()
    for table in layout.tables:
        own = [i for i in range(len(table)) if len(allowed_candidates(layout, table, i)) > 1]
        rng.shuffle(own)
        edges.append([Question(table.name, i, False) for i in own])
        targets = [t for t in table.targets if len(table.incoming(t)) > num_inputs(layout, table, t)]
        rng.shuffle(targets)
        nodes.append([Question(table.name, t, True) for t in targets])
    return [*_together(edges), *_together(nodes)]


def _together(columns: list[list[Question]]) -> list[list[Question]]:
    longest = max(len(column) for column in columns)
    return [[column[i] for column in columns if i < len(column)] for i in range(longest)]


class PerturbationSelection:
    """Decides edge by edge. The supernet's weights change during the selection and are restored at the end.

    weights: augmented training batches that tune the supernet. judged: the validation images that accuracies are
    measured on. in_step: entered around every forward pass.
    """

    def __init__(
        self,
        recipe: SearchRecipe,
        supernet: Supernet,
        method: Method,
        objective: Objective,
        world: World,
        *,
        weights: Batches,
        judged: Batches,
        in_step: StepContext,
        notify: Callable[[str], None],
    ) -> None:
        check_perturbable(supernet.layout, method)
        self._recipe, self._settings, self._world = recipe, recipe.select, world
        self._supernet, self._method, self._objective = supernet, method, objective
        self._layout = supernet.layout
        self._weights, self._judged = weights, judged
        self._in_step, self._notify = in_step, notify
        self._rounds = questions(self._layout, recipe.seed)
        self._lr = self._settings.lr or recipe.weights.lr / 10
        w = recipe.weights
        own = self._parameters()
        self._optimiser = sgd(own, world.device, lr=self._lr, momentum=w.momentum, weight_decay=w.weight_decay)
        self._decided: Decided = {}
        for table in self._layout.tables:
            for i, choice in enumerate(table.choices):
                allowed = allowed_candidates(self._layout, table, i)
                # An edge with a single candidate is decided, unless it competes for its node, which is measured.
                contested = i in table.contest_of
                if len(allowed) == 1 and not (contested and self._is_asked(table, choice.target)):
                    self._decided[table.name, i] = allowed[0]
        self._edges: list[dict[str, Any]] = []
        self._nodes: list[dict[str, Any]] = []
        self._final: Measured | None = None

    def __call__(self, folder: Path) -> tuple[Genotype, dict[str, Any]]:
        """The selected architecture, and a record of the selection for `run.json`.

        A selection that was interrupted continues after the latest round in `folder`, with the same result.
        """
        file, origin = folder / FILE, self._origin()
        with forked_rng(self._world.device), self._weights_kept():
            # The drop rate of the search's last epoch (`SearchTask.begin_epoch`).
            self._supernet.drop_path.set_fraction((self._recipe.epochs - 1) / self._recipe.epochs)
            first = self._restore(file, origin)
            for number in range(first, len(self._rounds)):
                # By the round's number, so that a resumed selection draws the same; torch accepts 64 bits.
                torch.manual_seed((self._recipe.seed * 1009 + number) % 2**64)
                for question in self._rounds[number]:
                    self._decide(question, number)
                if number + 1 < len(self._rounds):
                    self._tune(number)
                self._save(file, origin, number + 1)
            final = self._final or self._measure(self._mix())
            self._save(file, origin, len(self._rounds), final=final)
        return derive(self._layout, self._strengths(), about={"method": self._method.name}), self._record(final)

    # Deciding

    def _decide(self, question: Question, number: int) -> None:
        table = self._layout.table(question.table)
        noun = f"node {question.number}" if question.is_node else f"edge {table.choices[question.number]}"
        self._notify(f"perturbation, {number + 1} of {len(self._rounds)}: {noun} of {table.name!r}")
        whole = self._measure(self._mix())
        if question.is_node:
            self._decide_node(table, question.number, whole)
        else:
            self._decide_edge(table, question.number, whole)

    def _decide_edge(self, table: Table, number: int, whole: Measured) -> None:
        """Keeps argmin_o ACC without o (Algorithm 1, operations)."""
        choice = table.choices[number]
        found = {
            k: self._measure(self._mix(without=(table.name, number, k)))
            for k in allowed_candidates(self._layout, table, number)
        }
        best = max(found, key=lambda k: (*self._harm(found[k]), -k))
        self._decided[table.name, number] = best
        removals = {choice.candidates[k]: _plain(value) for k, value in found.items()}
        row = {"table": table.name, "edge": str(choice), "kept": choice.candidates[best], "supernet": _plain(whole)}
        self._edges.append({**row, "without": removals})

    def _decide_node(self, table: Table, target: int, whole: Measured) -> None:
        """Keeps the input edges with the lowest accuracies without them (Algorithm 1, topology)."""
        inputs = sorted(table.incoming(target), key=lambda i: table.choices[i].source)
        found = {i: self._measure(self._mix(without=(table.name, i, None))) for i in inputs}
        ranked = sorted(inputs, key=lambda i: (*self._harm(found[i]), -table.choices[i].source), reverse=True)
        kept = set(ranked[: num_inputs(self._layout, table, target)])
        for i in inputs:
            if i not in kept:
                self._decided[table.name, i] = None
            elif i in table.contest_of:
                self._decided[table.name, i] = LINK
        names = [str(table.choices[i]) for i in inputs if i in kept]
        removals = {str(table.choices[i]): _plain(value) for i, value in found.items()}
        row = {"table": table.name, "node": target, "kept": names, "supernet": _plain(whole)}
        self._nodes.append({**row, "without": removals})

    def _harm(self, without: Measured) -> tuple[float, float]:
        """A key that is larger the more a removal hurts; the other measure breaks ties.

        Deviation: the authors' code takes the first candidate of those whose accuracies are equal, which is `none` in
        NAS-Bench-201 wherever a few images do not distinguish candidates.
        """
        if not math.isfinite(without.loss):
            raise UserError(
                f"selection by perturbation needs a finite validation loss, but got {without.loss}; the search has "
                "diverged, or select.lr is too high"
            )
        harm = (-without.accuracy, without.loss)
        return harm if self._settings.measure == "accuracy" else harm[::-1]

    def _is_asked(self, table: Table, target: int) -> bool:
        return any(q.is_node and (q.table, q.number) == (table.name, target) for r in self._rounds for q in r)

    # Measuring

    @torch.no_grad()
    def _mix(self, without: tuple[str, int, int | None] | None = None) -> Mix:
        """The mix of the method's probabilities and of all decisions, without a candidate or an edge (None)."""
        if self._method.selection is not None:  # its mix has no plain weights
            return self._attending_mix(without)
        tables = {name: values.detach().clone() for name, values in self._method.probabilities().items()}
        for (name, i), k in self._decided.items():
            tables[name][i] = 0.0
            if k is not None:
                tables[name][i, k] = 1.0
        if without is not None:
            name, i, removed = without
            tables[name][i, slice(None) if removed is None else removed] = 0.0
        lives = {site: self._live(self._layout.table(name)) for site, name in enumerate(self._layout.sites)}
        return WeightMix(self._layout, tables, lives)

    def _live(self, table: Table) -> Live:
        """What runs: all candidates of undecided edges, and what decided ones keep."""

        def of(i: int) -> tuple[int, ...]:
            if (table.name, i) not in self._decided:
                return tuple(range(len(table.choices[i].candidates)))
            kept = self._decided[table.name, i]
            return () if kept is None else (kept,)

        return tuple(of(i) for i in range(len(table)))

    def _attending_mix(self, without: tuple[str, int, int | None] | None) -> Mix:
        """The same for a method that combines feature maps itself: a decided edge passes it one candidate."""
        mix = self._method.relax()
        for (name, i), k in self._decided.items():
            mix = WithoutEdge(mix, self._layout, name, i) if k is None else Only(mix, self._layout, name, i, k)
        if without is None:
            return mix
        name, i, removed = without
        if removed is None:
            return WithoutEdge(mix, self._layout, name, i)
        return Without(mix, self._layout, name, i, removed)

    @torch.no_grad()
    def _measure(self, mix: Mix) -> Measured:
        """Loss and accuracy of the supernet under `mix`, over all processes; nothing else changes."""

        def forward(images: Tensor) -> Tensor:
            with self._in_step():
                logits: Tensor = self._supernet(images, mix)
                return logits

        self._supernet.eval()
        with self._norms(mix):
            return measure(forward, self._judged.epoch(0), self._world)

    @contextmanager
    def _norms(self, mix: Mix) -> Iterator[None]:
        """BatchNorm uses statistics of each batch (as the authors do), recalibrated or running ones."""
        if self._settings.norms == "batch":
            # The last batch may be empty on a rank, where nothing is fused; collectives must match on all.
            cells = modules_only() if self._world.size > 1 else nullcontext()
            with batch_statistics(self._supernet), cells:
                yield
        elif self._settings.norms == "recalibrated":
            batches = islice(self._weights.epoch(0), self._recipe.evolution.norm_batches)
            with recalibrated(self._supernet, mix, batches, self._in_step):
                yield
        else:
            yield

    # Tuning

    def _parameters(self) -> list[nn.Parameter]:
        modules: tuple[nn.Module, ...] = (self._supernet, self._objective)
        return [p for module in modules for p in module.parameters() if p.requires_grad]

    def _tune(self, number: int) -> None:
        """Trains the remaining weights between two rounds, at a learning rate that falls over all rounds."""
        epochs, w, parameters = self._settings.epochs, self._recipe.weights, self._parameters()
        mix = self._mix()

        def learn(*draft: Tensor) -> None:
            batch = self._weights.finish(*draft)
            norms = self._recipe.norms
            several = norms == "local" and self._world.size > 1
            with norms_of(norms):
                with self._in_step():
                    used = self._attending_mix(None) if self._method.selection is not None else mix
                    loss = self._objective(Bound(self._supernet, used), batch.images, batch.labels).loss
                also = running_statistics((self._supernet, self._objective)) if several else []
                found = gradients_of(loss, parameters, self._world, also=also)
            apply_gradients(self._optimiser, parameters, found.means, self._world, w.clip, averaged=True)

        # A new step in every round: a captured one would keep the mix of the round before.
        step = prepare_step(
            learn, self._recipe.engine, self._world, self._notify, divides=self._recipe.norms == "local"
        )
        self._supernet.train()
        self._objective.train()
        total = epochs * (len(self._rounds) - 1)
        for epoch in range(number * epochs, (number + 1) * epochs):
            set_lr(self._optimiser, rate_at(epoch, total, self._lr, min(w.lr_min, self._lr), "cosine"))
            # Numbered after the epochs of the search, so that no order and no augmentation repeats.
            for draft in self._weights.drafts(self._recipe.epochs + epoch):
                step(*draft)

    # State

    @contextmanager
    def _weights_kept(self) -> Iterator[None]:
        """Restores weights, statistics and drop rates at the end, so that the search itself is measured."""
        modules: tuple[nn.Module, ...] = (self._supernet, self._objective)
        kept = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
        drop = self._supernet.drop_path.current.clone()
        try:
            yield
        finally:
            for module, state in zip(modules, kept, strict=True):
                module.load_state_dict(state)
                module.train()
            self._supernet.drop_path.current.copy_(drop)

    def _origin(self) -> str:
        """A digest of the supernet, method and settings, so that no selection continues one of another search."""
        digest = hashlib.sha256(repr(sorted(self._recipe.to_dict()["select"].items())).encode())
        for module in (self._supernet, self._method, self._objective):
            for name, value in module.state_dict().items():
                digest.update(name.encode())
                if isinstance(value, Tensor):
                    digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _save(self, file: Path, origin: str, done: int, final: Measured | None = None) -> None:
        state: dict[str, Any] = {
            "origin": origin,
            "round": done,
            "decided": [[table, i, -1 if k is None else k] for (table, i), k in self._decided.items()],
            "edges": self._edges,
            "nodes": self._nodes,
        }
        if final is None:  # a finished selection keeps its decisions only
            state |= {
                "supernet": self._supernet.state_dict(),
                "objective": self._objective.state_dict(),
                "optimiser": self._optimiser.state_dict(),
            }
        else:
            state |= {"final": _plain(final), "images": final.count}
        on_main(lambda: checkpoint.save_file(file, state), self._world)

    def _restore(self, file: Path, origin: str) -> int:
        """Continues after the latest round in `file`; 0 if there is none of this search."""
        state = on_main(lambda: checkpoint.load_file(file), self._world)
        if state is None or state.get("origin") != origin:
            return 0
        self._decided = {(table, i): None if k < 0 else k for table, i, k in state["decided"]}
        self._edges, self._nodes = state["edges"], state["nodes"]
        if "final" in state:
            self._final = Measured(state["final"]["loss"], state["final"]["accuracy"], int(state["images"]))
            return len(self._rounds)
        self._supernet.load_state_dict(state["supernet"])
        self._objective.load_state_dict(state["objective"])
        load_optimiser(self._optimiser, state["optimiser"])
        done = int(state["round"])
        self._notify(f"perturbation: continuing after {done} of {len(self._rounds)} rounds")
        return done

    # Result

    def _strengths(self) -> dict[str, Tensor]:
        """Per table [choices, width], 1 for all that is kept: the space's rule derives exactly these picks."""
        strengths = {table.name: torch.zeros(table.shape, dtype=torch.float64) for table in self._layout.tables}
        for (name, i), k in self._decided.items():
            if k is not None:
                strengths[name][i, k] = 1.0
        return strengths

    def _record(self, final: Measured) -> dict[str, Any]:
        return {
            "perturbation": {
                "by": "perturbation",
                "measure": self._settings.measure,
                "norms": self._settings.norms,
                "split": "validation",
                "images": final.count,
                **_plain(final),
                "edges": self._edges,
                "nodes": self._nodes,
            }
        }


def _plain(value: Measured) -> dict[str, float]:
    return {"accuracy": value.accuracy, "loss": value.loss}
