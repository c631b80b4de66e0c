"""Different indicators of the candidates of one supernet.

- `alpha`: the probabilities of the method that trained it. Where it has none (IT-NAS), DARTS's logits are trained on
  the frozen supernet, on the validation split.
- `attention`: the indicator token of IT-NAS. Where another method trained the supernet, Lite-Transformers are
  trained on the frozen supernet first, with BatchNorm in training mode.
- `perturbation` (DARTS-PT: Wang et al., Rethinking Architecture Selection in Differentiable NAS, ICLR 2021): how much
  accuracy the supernet loses without a candidate, which is removed from all cells of its table; `perturbation_loss` is
  the same in loss, which resolves small differences better. DARTS-PT discretises edge by edge and tunes in between
  (`softcell.search.perturb`); this is its score at the trained supernet. A supernet at chance has nothing to lose:
  `Baseline` is its accuracy with all candidates.
- `discretisation`: the accuracy of the supernet once an edge keeps one candidate.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.arch import Layout, Mix, Rule, WeightMix
from softcell.arch.rules import rows
from softcell.data import Batch, Batches
from softcell.engine.capture import prepare_step
from softcell.engine.distributed import World
from softcell.engine.optim import adam, apply_gradients, rate_at, set_lr, sgd
from softcell.errors import UserError
from softcell.methods import METHODS, Method
from softcell.search.supernet import Restored, recalibrated
from softcell.spaces import Supernet

NAMES = ("alpha", "attention", "perturbation", "discretisation")
USUAL = NAMES[:3]
"""The default."""
PERTURBED = ("perturbation", "perturbation_loss")
Tables = dict[str, Tensor]
"""Per table [choices, width]; padding 0."""
Notify = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Baseline:
    """The accuracy of a supernet with all candidates, on the images of the perturbation.

    accuracy: where choices are attended to one by one, the mean over them. most_frequent: the share of the most
    frequent class.
    recalibrated: whether BatchNorm was recalibrated for each mix.
    """

    accuracy: float
    images: int
    most_frequent: float
    recalibrated: bool

    @property
    def guessing(self) -> float:
        """The accuracy up to which a supernet may be guessing.

        Always answering one class is right for at most the share of the most frequent class. Two standard deviations of
        this share over the images are added; guessing exceeds that once in forty times.
        """
        return self.most_frequent + 2 * math.sqrt(self.most_frequent * (1 - self.most_frequent) / self.images)

    @property
    def at_chance(self) -> bool:
        return self.accuracy <= self.guessing

    def to_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy,
            "images": self.images,
            "norms": "recalibrated" if self.recalibrated else "running statistics",
            "guessing": self.guessing,
            "at_chance": self.at_chance,
        }


@dataclass(frozen=True, slots=True)
class Indicators:
    """Indicators by name; the baseline if perturbation is among them."""

    values: dict[str, Tables]
    baseline: Baseline | None

    @property
    def saying_nothing(self) -> tuple[str, ...]:
        """Those measured on a supernet at chance: their differences are noise."""
        return PERTURBED if self.baseline is not None and self.baseline.at_chance else ()


class Without(Mix):
    """A mix without one candidate, at all sites of a table."""

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

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        left = {choice: self._left(site, choice, own) for choice, own in outputs.items()}
        return self._mix.compete(site, {choice: own for choice, own in left.items() if own})

    def _left(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Mapping[int, Tensor | None]:
        if not self._is_here(site, choice):
            return outputs
        return {k: x for k, x in outputs.items() if k != self._candidate}

    def _is_here(self, site: int, choice: int) -> bool:
        return site in self._sites and choice == self._choice


class Only(Without):
    """A mix that keeps one candidate of a choice, with a coefficient of 1, at all sites of a table."""

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        if isinstance(self._mix, WeightMix) and self._is_here(site, choice):
            return outputs.get(self._candidate)
        return super().combine(site, choice, outputs)

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        if isinstance(self._mix, WeightMix):
            return Mix.compete(self, site, outputs)
        return super().compete(site, outputs)

    def _left(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Mapping[int, Tensor | None]:
        if not self._is_here(site, choice):
            return outputs
        return {k: x for k, x in outputs.items() if k == self._candidate}


def compute(
    found: Restored, wanted: Iterable[str] | None = None, *, images: int = 512, epochs: int = 1, notify: Notify
) -> Indicators:
    """The indicators `wanted`; by default all that the run's method has or that need no training.

    images: the most images of the validation split that perturbation uses. epochs: for which Lite-Transformers, or
    DARTS's logits, learn on the supernet of another method.
    """
    has_alpha = found.method.selection is None
    names = tuple(wanted) if wanted is not None else tuple(n for n in USUAL if n != "alpha" or has_alpha)
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise UserError(f"an indicator must be one of {', '.join(NAMES)}, got {unknown[0]!r}")
    result: dict[str, Tables] = {}
    baseline = None
    for name in names:
        notify(name)
        if name == "alpha":
            method = found.method if has_alpha else trained_selector(found, epochs, notify, "darts")[1]
            result[name] = _host(method.probabilities())
        elif name == "attention":
            result[name] = attention(found, epochs, notify)
        elif name == "discretisation":
            result[name] = discretisation(found, images, notify)
        else:
            falls, rises, baseline = perturbation(found, images, notify)
            result |= dict(zip(PERTURBED, (falls, rises), strict=True))
    return Indicators(result, baseline)


def attention(found: Restored, epochs: int, notify: Notify) -> Tables:
    """The rows of the indicator token, from the passes of a selection: those of the search where it has finished."""
    supernet, method = found.supernet, found.method
    if method.selection is not None and found.is_finished:
        return _host(method.probabilities())
    if method.selection is None:
        supernet, method = trained_selector(found, epochs, notify, "itnas")
    supernet.eval()
    images = found.feeds().plain(found.dataset.train, found.parts["validation"])
    assert method.selection is not None
    for mix, calibration in method.selection.passes():
        if calibration is None:
            _pass(supernet, mix, images)
            continue
        notify("attention, one choice at a time")
        training = found.feeds().training(found.parts["weights"], found.dataset.augment).epoch(0)
        with recalibrated(supernet, calibration, islice(training, found.recipe.evolution.norm_batches)):
            _pass(supernet, mix, images)
    return _host(method.probabilities())


@torch.no_grad()
def _pass(supernet: Supernet, mix: Mix, images: Batches) -> None:
    for batch in images.epoch(0):
        supernet(batch.images, mix)


def trained_selector(found: Restored, epochs: int, notify: Notify, selector: str) -> tuple[Supernet, Method]:
    """A copy of the supernet with frozen weights, and the method `selector` trained on it.

    BatchNorm of the copy is in training mode. A single-level method learns as the weights did, on their split; another
    learns as architectures do, on the validation split.
    """
    if epochs < 1:
        raise UserError(f"{selector} needs at least one epoch on another method's supernet, but got {epochs}")
    kind = METHODS.get(selector)
    assert issubclass(kind, Method)
    supernet = copy.deepcopy(found.supernet).requires_grad_(False).train()
    torch.manual_seed(found.recipe.seed)
    method = kind.for_supernet(kind.Settings(), supernet)
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

    step = prepare_step(learn, "auto", world, notify)
    for epoch in range(epochs):
        notify(f"{selector} on the frozen supernet, epoch {epoch + 1} of {epochs}")
        method.begin_epoch(epoch / max(1, epochs - 1))
        if single:
            set_lr(optimiser, rate_at(epoch, epochs, w.lr, w.lr_min, w.schedule))
        for draft in batches.drafts(epoch):
            step(*draft)
    return supernet, method


@torch.no_grad()
def perturbation(found: Restored, images: int, notify: Notify) -> tuple[Tables, Tables, Baseline]:
    """The fall of accuracy and the rise of loss without each candidate, on the first images of the validation split."""
    if images < 1:
        raise UserError(f"perturbation needs at least one image, but got {images}")
    layout, chosen = found.supernet.layout, found.parts["validation"][:images]
    batches = list(found.feeds().plain(found.dataset.train, chosen).epoch(0))
    norms = _norm_batches(found, len(chosen))
    by_paths, baselines = found.by_paths(), list[float]()
    falls = {table.name: torch.zeros(table.shape, dtype=torch.float64) for table in layout.tables}
    rises = {name: values.clone() for name, values in falls.items()}
    total = sum(len(choice.candidates) for table in layout.tables for choice in table.choices)
    done = 0
    for table in layout.tables:
        for i, choice in enumerate(table.choices):
            if by_paths or not baselines:  # with paths a candidate counts only where it runs
                mix = found.mix((table.name, i))
                accuracy, loss = _measured(found.supernet, mix, batches, norms)
                baselines.append(accuracy)
            for k in range(len(choice.candidates)):
                without = Without(mix, layout, table.name, i, k)
                less, more = _measured(found.supernet, without, batches, norms)
                falls[table.name][i, k], rises[table.name][i, k] = accuracy - less, more - loss
                done += 1
                notify(f"perturbation, {done} of {total} candidates")
    labels = torch.cat([batch.labels for batch in batches])
    most_frequent = int(torch.bincount(labels).max()) / len(labels)
    return falls, rises, Baseline(sum(baselines) / len(baselines), len(labels), most_frequent, norms is not None)


@torch.no_grad()
def discretisation(found: Restored, images: int, notify: Notify) -> Tables:
    """The accuracy of the supernet once an edge keeps one candidate in all cells, while all others stay mixed.

    IT-NAS, §4.4 and Figure 3, after DARTS-PT. Deviation: DARTS-PT trains the supernet on to convergence after each;
    here only batch-norm is recalibrated, where perturbation does that too.
    """
    if images < 1:
        raise UserError(f"discretisation needs at least one image, but got {images}")
    layout, chosen = found.supernet.layout, found.parts["validation"][:images]
    batches = list(found.feeds().plain(found.dataset.train, chosen).epoch(0))
    norms = _norm_batches(found, len(chosen))
    result = {table.name: torch.zeros(table.shape, dtype=torch.float64) for table in layout.tables}
    for table in layout.tables:
        for i, choice in enumerate(table.choices):
            notify(f"discretisation, {table.name} {choice}")
            mix = found.mix((table.name, i))
            for k in range(len(choice.candidates)):
                only = Only(mix, layout, table.name, i, k)
                result[table.name][i, k], _ = _measured(found.supernet, only, batches, norms)
    return result


def _norm_batches(found: Restored, images: int) -> list[Batch] | None:
    """Training batches on which BatchNorm is recalibrated for each mix; None: the running statistics fit.

    Running statistics are those of the mixes that weights were trained in. DARTS trains in the mix that is perturbed
    here, and keeps them; DARTS-PT's released code normalises by each batch (`softcell.search.perturb`). Where cells are
    sampled or replaced (`many_cells`) they fit no mix: EnTranNAS-DST in NAS-Bench-201 on digits is right for 28% of the
    images with them, and for 85% with its own. Attention changes with the images and at every step, and they lag
    behind: 21% and 65% after two epochs of IT-NAS.

    Statistics are recalibrated for the mix without a candidate, too: else a misfit would show instead of the candidate.
    As many images as the perturbation uses are enough (5 batches instead of 20: 0.2 points in the first example, and
    most of the time saved); never more batches than the search itself uses. All mixes get the same batches.
    """
    if not (found.method.many_cells or found.method.selection is not None):
        return None
    count = min(found.recipe.evolution.norm_batches, -(-images // found.recipe.batch_size))
    training = found.feeds().training(found.parts["weights"], found.dataset.augment)
    return list(islice(training.epoch(0), count))


def summary(layout: Layout, found: Mapping[str, Tables], saying_nothing: Collection[str] = ()) -> dict[str, Any]:
    """Per edge the best candidate by each indicator and Kendall's tau-b between each two; plain data.

    Where several candidates are equal (`tied` names them) there is no best one, nor by indicators at chance.
    """
    names = list(found)
    edges = []
    for table in layout.tables:
        values = {name: rows(table, found[name][table.name]) for name in names}
        for i, choice in enumerate(table.choices):
            allowed = _allowed(layout, choice.candidates)
            firsts = {
                n: [choice.candidates[k] for k in _first(values[n][i], allowed)]
                for n in names
                if n not in saying_nothing
            }
            taus = {
                f"{a} ~ {b}": None
                if {a, b} & set(saying_nothing)
                else _tau([values[a][i][k] for k in allowed], [values[b][i][k] for k in allowed])
                for p, a in enumerate(names)
                for b in names[p + 1 :]
            }
            best = {n: firsts[n][0] if len(firsts.get(n, ())) == 1 else None for n in names}
            tied = {n: ops for n, ops in firsts.items() if len(ops) > 1}
            edges.append({"table": table.name, "edge": str(choice), "best": best, "tied": tied, "tau": taus})
    return {
        "candidates": {table.name: [list(choice.candidates) for choice in table.choices] for table in layout.tables},
        "values": {name: {t: v.tolist() for t, v in tables.items()} for name, tables in found.items()},
        "saying_nothing": list(saying_nothing),
        "edges": edges,
    }


def _first(row: list[float], allowed: list[int]) -> list[int]:
    """The candidates with the highest value: several where they differ only by rounding in float32."""
    highest = max(row[k] for k in allowed)
    return [k for k in allowed if math.isclose(row[k], highest, rel_tol=1e-6, abs_tol=1e-7)]


def _tau(a: list[float], b: list[float]) -> float | None:
    """Kendall's tau-b; None where all values of one of them are equal."""
    from scipy.stats import kendalltau  # slow to import, and only needed here

    value = float(kendalltau(a, b).statistic) if len(a) > 1 else float("nan")
    return None if value != value else value


def _allowed(layout: Layout, candidates: tuple[str, ...]) -> list[int]:
    never = layout.rule.never_picked if isinstance(layout.rule, Rule) else ()
    return [k for k, op in enumerate(candidates) if op not in never] or list(range(len(candidates)))


def _measured(supernet: Supernet, mix: Mix, batches: list[Batch], norms: list[Batch] | None) -> tuple[float, float]:
    """Accuracy and mean loss of the supernet under `mix`, in float64. norms: for recalibration."""
    right = loss = count = 0.0
    with nullcontext() if norms is None else recalibrated(supernet, mix, norms):
        for batch in batches:
            logits = supernet(batch.images, mix).double()
            loss += float(F.cross_entropy(logits, batch.labels, reduction="sum"))
            right += int((logits.argmax(1) == batch.labels).sum())
            count += len(batch.labels)
    return right / count, loss / count


def _host(tables: Mapping[str, Tensor]) -> Tables:
    return {name: values.detach().cpu().double() for name, values in tables.items()}
