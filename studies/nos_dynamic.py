"""`python -m studies.nos_dynamic`: why does a NOS search rarely pick dynamic convolutions?

Searches that differ in the two dynamic candidates or in the initial logits:

    paper      Appendix A.1 as printed; logits start with deviation 1e-3
    box        the kernel is a mean over its k² taps for every image: the generator has no effect
    identity   Appendix A.1, but kernels start as the identity: the centre tap is 6 above the others before the softmax
    normal     Appendix A.1; logits start with deviation 1, "in the normal distribution" taken literally

For each the mean softmax weight of every candidate in both tiers after the search, the picks, and how far kernels are
from a mean over their taps: the mean of |k²·D - 1|. Before the searches, on the supernet of the first: the same, the
size of what each kind adds to a node, and how large gradients are against the weights they change. Stop it at any time
(or with --minutes); the same command resumes.

python -m studies.nos_dynamic --seeds 3
python -m studies.nos_dynamic --data cifar10 --data-root DIR --epochs 6 --arms paper normal --precision bfloat16
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Genotype, WeightMix
from softcell.data import load
from softcell.data.augment import normalise
from softcell.nn.calibrate import ChannelAttention, DynamicKernel, SpatialAttention
from softcell.nn.candidates import Spec, candidate
from softcell.search import SearchRecipe, resolve
from softcell.search.supernet import restore
from softcell.settings import assignments, layered
from softcell.spaces import Supernet, build_space
from softcell.spaces.block import watching
from studies.options import recipe_settings, study_parser
from studies.runs import NOT_MEASURED, Deadline, entry, finished, run_searches, spread, write_record

ARMS = ("paper", "box", "identity", "normal")
IDENTITY = 6.0
"""Initial lead of the centre tap over the others: e^6 / (e^6 + k² - 1) is 98% of a 3×3 and 94% of a 5×5 kernel."""
IMAGES = 32


class BoxKernel(DynamicKernel):
    """The mean over the taps, for every image and channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.new_full((x.shape[0], x.shape[1], self.size, self.size), 1.0 / self.size**2)


class IdentityKernel(DynamicKernel):
    """The kernel of Appendix A.1 with a constant added to the centre tap before the second softmax."""

    def forward(self, x: Tensor) -> Tensor:
        taps = super().forward(x).flatten(2).log()  # log-softmax: the constant may be added to it as well
        centre = F.one_hot(torch.tensor(self.size**2 // 2, device=x.device), self.size**2).to(taps.dtype)
        return torch.softmax(taps + IDENTITY * centre, dim=2).view(*x.shape[:2], self.size, self.size)


@candidate("box_3x3", kind="kernel")
def box_3x3(spec: Spec) -> nn.Module:
    return BoxKernel(spec.channels, 3, affine=spec.affine)


@candidate("box_5x5", kind="kernel")
def box_5x5(spec: Spec) -> nn.Module:
    return BoxKernel(spec.channels, 5, affine=spec.affine)


@candidate("identity_3x3", kind="kernel")
def identity_3x3(spec: Spec) -> nn.Module:
    return IdentityKernel(spec.channels, 3, affine=spec.affine)


@candidate("identity_5x5", kind="kernel")
def identity_5x5(spec: Spec) -> nn.Module:
    return IdentityKernel(spec.channels, 5, affine=spec.affine)


def recipe_of(arm: str, seed: int, options: argparse.Namespace) -> SearchRecipe:
    own: dict[str, Any] = {"method": "nos", "seed": seed}
    if arm in ("box", "identity"):
        own["space_settings"] = {"dynamics": [f"{arm}_3x3", f"{arm}_5x5"]}
    elif arm == "normal":
        own["method_settings"] = {"init_scale": 1.0}
    return resolve(layered(recipe_settings(options), own, assignments(options.set)))


def folder_of(arm: str, seed: int, options: argparse.Namespace) -> Path:
    return options.runs / f"{arm}-{Path(options.data).stem}-{seed}"  # type: ignore[no-any-return]


def mean_by(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The mean of the numbers with the same name."""
    found: dict[str, list[float]] = defaultdict(list)
    for name, value in pairs:
        found[name].append(value)
    return {name: statistics.fmean(values) for name, values in found.items()}


def unevenness(supernet: Supernet, weights: Mapping[str, Tensor], images: Tensor) -> dict[str, float]:
    """The mean of |k²·D - 1| over all kernels of a supernet by their size k; 0 where they are means over their taps."""
    seen: list[tuple[str, float]] = []

    def note(module: nn.Module, _: object, kernel: Tensor) -> None:
        assert isinstance(module, DynamicKernel)
        seen.append((f"{module.size}x{module.size}", float((kernel * module.size**2 - 1).abs().mean())))

    hooks = [m.register_forward_hook(note) for m in supernet.modules() if isinstance(m, DynamicKernel)]
    with torch.no_grad():
        supernet(images, WeightMix(supernet.layout, weights))
    for hook in hooks:
        hook.remove()
    return mean_by(seen)


def at_start(recipe: SearchRecipe) -> dict[str, Any]:
    """The state of a supernet of this recipe before its first step, on the first images of the training set."""
    dataset = load(recipe.data, recipe.data_root, recipe.image_size)
    first = torch.arange(min(IMAGES, len(dataset.train)))
    images = normalise(dataset.train.fetch(first).cpu(), dataset.mean, dataset.std, torch.float32)
    torch.manual_seed(recipe.seed)
    supernet = build_space(recipe.space, recipe.space_settings).supernet(dataset.shape, dataset.num_classes)
    layout = supernet.layout
    weights = {table.name: torch.full(table.shape, 1.0 / table.width) for table in layout.tables}
    mix = WeightMix(layout, weights)
    own = {name: p for name, p in supernet.named_parameters() if ".edges." in name}
    loss = F.cross_entropy(supernet(images, mix), dataset.train.labels.cpu()[first])
    found = torch.autograd.grad(loss, list(own.values()), allow_unused=True)
    gradients = [
        (_part(supernet, name), float(gradient.norm() / p.detach().norm()))
        for (name, p), gradient in zip(own.items(), found, strict=True)
        if gradient is not None
    ]
    added: list[tuple[str, float]] = []
    with torch.no_grad():
        for table in layout.tables:  # the first cell of each kind
            site = layout.sites.index(table.name)
            for choice, edge in enumerate(table.choices):
                with watching(table, site, choice) as watch:
                    supernet(images, mix)
                assert watch.features is not None
                size = watch.features.norm()
                added += [
                    (edge.candidates[k], float(x.norm() / size))
                    for k, (x, is_base) in watch.added().items()
                    if not is_base
                ]
    return {
        "uneven": unevenness(supernet, weights, images),
        "added_over_base": mean_by(added),
        "gradient_over_weight": mean_by(gradients),
    }


def _part(supernet: nn.Module, name: str) -> str:
    """The part and kind of candidate that a weight belongs to."""
    owner, layer, _ = name.rsplit(".", 2)
    module = supernet.get_submodule(owner)
    if isinstance(module, DynamicKernel):
        return f"dynamic kernel, {layer}"
    if isinstance(module, ChannelAttention | SpatialAttention):
        return "attentions"
    return "features"


def measured(arm: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """The results of one search, or that it is not finished."""
    folder = folder_of(arm, seed, options)
    if not finished(folder):
        return {"arm": arm, "seed": seed, "search": NOT_MEASURED}
    found = restore(folder, device="cpu", data_root=options.data_root)
    rows = {name: table.detach() for name, table in found.method.probabilities().items()}
    tiers: dict[int, list[tuple[str, float]]] = {1: [], 2: []}
    for table in found.supernet.layout.tables:
        for own, row in zip(table.choices, rows[table.name].tolist(), strict=True):
            tiers[2 if own.target in table.output else 1] += zip(own.candidates, row, strict=False)
    images = found.dataset.train.fetch(torch.arange(min(IMAGES, len(found.dataset.train)))).cpu()
    plain = normalise(images, found.dataset.mean, found.dataset.std, torch.float32)
    genotype = Genotype.load(folder)
    picks = Counter(pick.op for cell in genotype.cells.values() for pick in cell.picks)
    return {
        "arm": arm,
        "seed": seed,
        "search": {
            "weights": {f"tier {tier}": mean_by(pairs) for tier, pairs in tiers.items()},
            "picks": dict(picks.most_common()),
            "dynamic_picks": sum(n for op, n in picks.items() if op in found.recipe.space_settings["dynamics"]),
            "uneven": unevenness(found.supernet, rows, plain),
            "recipe": found.recipe.to_dict(),
        },
    }


def summarise(rows: list[dict[str, Any]], arms: Iterable[str]) -> dict[str, Any]:
    """Per arm the weights of the dynamic candidates, all seeds together, and how many of the picks they are."""
    summary: dict[str, Any] = {}
    for arm in arms:
        own = [row["search"] for row in rows if row["arm"] == arm and row["search"] != NOT_MEASURED]
        if not own:
            summary[arm] = NOT_MEASURED
            continue
        names = own[0]["recipe"]["space_settings"]["dynamics"]
        summary[arm] = {
            "weights": {
                f"{tier}, {name}": spread([one["weights"][tier][name] for one in own])
                for tier in own[0]["weights"]
                for name in names
            },
            "dynamic_picks": sum(one["dynamic_picks"] for one in own),
            "picks": sum(sum(one["picks"].values()) for one in own),
        }
    return summary


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = study_parser(
        "studies.nos_dynamic",
        __doc__,
        *("epochs", "set", "at_once"),
        data="digits",
        seeds=2,
        precision="auto",
        runs=Path("runs/nos-dynamic"),
        out=Path("results/nos"),
    )
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="what is compared")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, but got {options.seeds}")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parsed(arguments)
    recipes = {(arm, seed): recipe_of(arm, seed, options) for seed in range(options.seeds) for arm in options.arms}
    jobs = [(recipe, folder_of(arm, seed, options)) for (arm, seed), recipe in recipes.items()]
    run_searches(jobs, Deadline(options.minutes), options.device, options.at_once)
    rows = [measured(arm, seed, options) for arm, seed in recipes]
    summary = summarise(rows, options.arms)
    start = at_start(recipe_of("paper", 0, options))
    file = options.out / f"dynamic-{Path(options.data).stem}.json"
    write_record(file, "studies.nos_dynamic", start=start, rows=rows, summary=summary)
    for name, values in start.items():
        print(f"at the start, {name}: {', '.join(f'{k} {v:.2g}' for k, v in values.items())}")
    for arm, found in summary.items():
        if found == NOT_MEASURED:
            print(f"{arm}: {NOT_MEASURED}")
            continue
        shown = ", ".join(f"{name} {one['mean']:.3f}" for name, one in found["weights"].items())
        print(f"{arm}: {found['dynamic_picks']} of {found['picks']} picks; {shown}")
    print(f"written: {file}")


if __name__ == "__main__":
    entry(main)
