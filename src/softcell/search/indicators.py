"""What different indicators say of the candidates of one and the same supernet.

- `alpha`: the probabilities of the method that trained it. Where that has none (IT-NAS), DARTS's logits are trained on
  the supernet with its weights frozen, on the validation split.
- `attention`: the indicator token of IT-NAS. Where another method trained the supernet, its weights are frozen and
  Lite-Transformers are trained on it first; batch-norm then measures its statistics anew.
- `perturbation` (DARTS-PT: Wang et al., Rethinking Architecture Selection in Differentiable NAS, ICLR 2021): how much
  accuracy the supernet loses without a candidate, which is taken out of all cells of its table; `perturbation_loss` is
  the same in loss, which a few images tell apart more finely. DARTS-PT goes on to discretise edge by edge and to
  fine-tune in between; this is its score at the trained supernet.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.arch import Layout, Mix, Rule
from softcell.arch.derive import rows, strongest
from softcell.data import Batch, Batches
from softcell.engine.capture import prepare_step
from softcell.engine.distributed import World
from softcell.engine.optim import adam, apply_gradients, sgd
from softcell.engine.schedule import rate_at, set_lr
from softcell.errors import UserError
from softcell.methods import METHODS, Method, fitted
from softcell.search.child import norms_measured_anew
from softcell.search.restored import Restored
from softcell.spaces import Supernet

NAMES = ("alpha", "attention", "perturbation")
Tables = dict[str, Tensor]
"""Per table [choices, width]; padding 0."""
Tell = Callable[[str], None]


class Without(Mix):
    """A mix that lacks one candidate at all sites of a table."""

    def __init__(self, mix: Mix, layout: Layout, table: str, choice: int, candidate: int) -> None:
        self._mix, self._sites = mix, set(layout.sites_of(table))
        self._choice, self._candidate = choice, candidate

    def live(self, site: int) -> Any:
        return self._mix.live(site)

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        self._mix.meet(site, choice, self._left(site, choice, outputs))

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        left = self._left(site, choice, outputs)
        return self._mix.combine(site, choice, left) if left else None

    def _left(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Mapping[int, Tensor | None]:
        if site not in self._sites or choice != self._choice:
            return outputs
        return {k: x for k, x in outputs.items() if k != self._candidate}


def compute(
    found: Restored, wanted: Iterable[str] | None = None, *, images: int = 512, epochs: int = 1, tell: Tell
) -> dict[str, Tables]:
    """The indicators by name; where none is asked for, all that the run's method has or that need no training.

    images: how many of the validation split perturbation looks at. epochs: how long Lite-Transformers, or DARTS's
    logits, learn on the supernet of another method.
    """
    has_alpha = not found.looks()
    names = tuple(wanted) if wanted is not None else tuple(n for n in NAMES if n != "alpha" or has_alpha)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UserError(f"an indicator must be one of {', '.join(NAMES)}, got {unknown[0]!r}")
    result: dict[str, Tables] = {}
    for name in names:
        tell(name)
        if name == "alpha":
            method = found.method if has_alpha else trained_selector(found, epochs, tell, "darts")[1]
            result[name] = _host(method.probabilities())
        elif name == "attention":
            result[name] = attention(found, epochs, tell)
        else:
            accuracy, loss = perturbation(found, images, tell)
            result |= {name: accuracy, "perturbation_loss": loss}
    return result


def attention(found: Restored, epochs: int, tell: Tell, selector: str = "itnas") -> Tables:
    """The rows of the indicator token, from one pass over the validation split: the search's own where it ended."""
    supernet, method = found.supernet, found.method
    if found.looks() and found.is_finished:
        return _host(method.probabilities())
    if not found.looks():
        supernet, method = trained_selector(found, epochs, tell, selector)
    supernet.eval()
    images = found.feeds().plain(found.dataset.train, found.parts["validation"])
    looking = method.looking()
    if looking is not None:
        _pass(supernet, looking, images)
    for plain, mix in method.looking_in_turn():
        tell("attention, one choice after the other")
        training = found.feeds().training(found.parts["weights"], found.dataset.augment).epoch(0)
        with norms_measured_anew(supernet, plain, islice(training, found.recipe.evolution.norm_batches)):
            _pass(supernet, mix, images)
    return _host(method.probabilities())


@torch.no_grad()
def _pass(supernet: Supernet, mix: Mix, images: Batches) -> None:
    for batch in images.epoch(0):
        supernet(batch.images, mix)


def trained_selector(found: Restored, epochs: int, tell: Tell, selector: str) -> tuple[Supernet, Method]:
    """A copy of the supernet with frozen weights and norms measured anew, and the method `selector` trained on it.

    A single-level one learns as the weights did, on their split; another as architectures do, on the validation split.
    """
    if epochs < 1:
        raise UserError(f"{selector} needs at least one epoch on another method's supernet, but got {epochs}")
    kind = METHODS.get(selector)
    assert issubclass(kind, Method)
    supernet = copy.deepcopy(found.supernet).requires_grad_(False).train()
    torch.manual_seed(found.recipe.seed)
    method = fitted(kind, kind.Settings(), supernet)
    method.to(found.device, next(supernet.parameters()).dtype)
    w, a, single = found.recipe.weights, found.recipe.architecture, kind.regime == "single-level"
    optimiser: torch.optim.Optimizer
    if single:
        optimiser = sgd(method.parameters(), found.device, lr=w.lr, momentum=w.momentum, weight_decay=w.weight_decay)
    else:
        groups, betas = method.parameter_groups(a.lr, a.weight_decay), (a.beta1, a.beta2)
        optimiser = adam(groups, found.device, lr=a.lr, betas=betas, weight_decay=a.weight_decay)
    batches = found.feeds().training(found.parts["weights" if single else "validation"], found.dataset.augment)
    world, parameters = World(0, 1, 0, found.device), list(method.parameters())

    def learn(*draft: Tensor) -> None:
        batch = batches.finish(*draft)
        loss = F.cross_entropy(supernet(batch.images, method.relax()), batch.labels)
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        apply_gradients(optimiser, parameters, gradients, world, w.clip if single else 0.0)

    step = prepare_step(learn, "auto", world, tell)
    for epoch in range(epochs):
        tell(f"{selector} on the frozen supernet, epoch {epoch + 1} of {epochs}")
        method.begin_epoch(epoch / max(1, epochs - 1))
        if single:
            set_lr(optimiser, rate_at(epoch, epochs, w.lr, w.lr_min, w.schedule))
        for draft in batches.drafts(epoch):
            step(*draft)
    return supernet, method


@torch.no_grad()
def perturbation(found: Restored, images: int, tell: Tell) -> tuple[Tables, Tables]:
    """What accuracy falls and loss rises by, without each candidate, on the first images of the validation split."""
    if images < 1:
        raise UserError(f"perturbation needs at least one image, but got {images}")
    supernet = found.supernet
    layout, chosen = supernet.layout, found.parts["validation"][:images]
    batches = list(found.feeds().plain(found.dataset.train, chosen).epoch(0))
    mix = found.mix()
    accuracy, loss = _measured(supernet, mix, batches)
    by_paths = found.by_paths()
    falls = {table.name: torch.zeros(table.shape, dtype=torch.float64) for table in layout.tables}
    rises = {name: values.clone() for name, values in falls.items()}
    total = sum(len(choice.candidates) for table in layout.tables for choice in table.choices)
    done = 0
    for table in layout.tables:
        for i, choice in enumerate(table.choices):
            if by_paths:  # what a candidate is worth shows where it runs
                mix = found.mix((table.name, i))
                accuracy, loss = _measured(supernet, mix, batches)
            for k in range(len(choice.candidates)):
                less, more = _measured(supernet, Without(mix, layout, table.name, i, k), batches)
                falls[table.name][i, k], rises[table.name][i, k] = accuracy - less, more - loss
                done += 1
                tell(f"perturbation, {done} of {total} candidates")
    return falls, rises


def summary(layout: Layout, found: Mapping[str, Tables]) -> dict[str, Any]:
    """Per edge the best candidate by each indicator and Kendall's tau-b between each two; plain data."""
    names = list(found)
    edges = []
    for table in layout.tables:
        values = {name: rows(table, found[name][table.name]) for name in names}
        for i, choice in enumerate(table.choices):
            allowed = _allowed(layout, choice.candidates)
            best = {n: choice.candidates[max(allowed, key=strongest(values[n][i]))] for n in names}
            taus = {
                f"{a} ~ {b}": _tau([values[a][i][k] for k in allowed], [values[b][i][k] for k in allowed])
                for p, a in enumerate(names)
                for b in names[p + 1 :]
            }
            edges.append({"table": table.name, "edge": str(choice), "best": best, "tau": taus})
    return {
        "candidates": {table.name: [list(choice.candidates) for choice in table.choices] for table in layout.tables},
        "values": {name: {t: v.tolist() for t, v in tables.items()} for name, tables in found.items()},
        "edges": edges,
    }


def _tau(a: list[float], b: list[float]) -> float | None:
    """None where one of them has nothing but ties."""
    from scipy.stats import kendalltau  # slow to import, and only needed here

    value = float(kendalltau(a, b).statistic) if len(a) > 1 else float("nan")
    return None if value != value else value


def _allowed(layout: Layout, candidates: tuple[str, ...]) -> list[int]:
    never = layout.rule.never_picked if isinstance(layout.rule, Rule) else ()
    return [k for k, op in enumerate(candidates) if op not in never] or list(range(len(candidates)))


def _measured(supernet: Supernet, mix: Mix, batches: list[Batch]) -> tuple[float, float]:
    """Accuracy and mean loss of the supernet under `mix`, in float64."""
    right = loss = count = 0.0
    for batch in batches:
        logits = supernet(batch.images, mix).double()
        loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
        right += int((logits.argmax(1) == batch.labels).sum())
        count += len(batch.labels)
    return right / count, loss / count


def _host(tables: Mapping[str, Tensor]) -> Tables:
    return {name: values.detach().double().cpu() for name, values in tables.items()}
