"""NOS: the relaxation of Eq 7 by hand-computed values, and the settings of §4 and Appendix A.2."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from softcell.arch import sample
from softcell.evaluate import resolve as resolve_training
from softcell.methods.nos import Nos, NosSettings
from softcell.search import resolve
from softcell.spaces.nos import NosSpace


def test_every_connection_is_a_softmax_over_all_kinds_equation_7() -> None:
    method = Nos(NosSpace().layout(), NosSettings(init_scale=1.0))
    mix: Any = method.relax()
    for name in ("normal", "reduce"):
        logits, weights = method.alpha[name].detach(), mix.tables[name]
        assert logits.shape == (18, 11)
        row = [math.exp(float(a)) for a in logits[17]]
        assert weights[17].tolist() == pytest.approx([e / sum(row) for e in row])


def test_logits_start_from_a_normal_distribution() -> None:
    torch.manual_seed(0)
    drawn = torch.cat([a.detach().flatten() for a in Nos(NosSpace().layout(), NosSettings(1.0)).alpha.values()])
    assert len(drawn) == 2 * 18 * 11
    assert abs(float(drawn.mean())) < 0.2 and 0.85 < float(drawn.std()) < 1.15


def test_the_paper_recipe_is_the_papers() -> None:
    recipe = resolve({"method": "nos", "data": "cifar10"})
    assert (recipe.scale, recipe.space, recipe.epochs, recipe.regime, recipe.batch_size) == (
        ("paper", "nos", 25, "bilevel", 64)
    )
    weights, architecture = recipe.weights, recipe.architecture
    assert (weights.lr, weights.lr_min, weights.momentum, weights.weight_decay) == (0.025, 0.0, 0.9, 3e-4)
    assert (architecture.lr, architecture.weight_decay) == (6e-4, 1e-3)
    assert recipe.split == {"weights": 0.5, "validation": 0.5}  # 25,000 images each
    assert (recipe.space_settings["cells"], recipe.space_settings["channels"]) == (8, 16)
    assert (recipe.guide.weight, recipe.guide.form, recipe.guide.teacher) == (1e3, "mean-square", None)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("cifar10", ("nos-cifar", 600, 128, 0.25, "cosine", 0, 3e-4, 0.3, 16, 20, 36)),
        ("cifar100", ("nos-cifar100", 600, 128, 0.25, "cosine", 0, 5e-4, 0.3, 16, 20, 36)),
        ("imagenet", ("nos-imagenet", 300, 512, 0.25, "linear", 5, 3e-5, 0.0, 0, 14, 48)),
    ],
)
def test_evaluation_matches_appendix_2(data: str, expected: tuple[Any, ...]) -> None:
    r = resolve_training(sample(NosSpace().layout(), 0), {"data": data})
    sizes = r.space_settings["cells"], r.space_settings["channels"]
    settings = (r.recipe, r.epochs, r.batch_size, r.lr, r.schedule, r.warmup, r.weight_decay, r.drop_path, r.cutout)
    assert (*settings, *sizes) == expected
    assert (r.lr_min, r.momentum, r.auxiliary) == (0.0, 0.9, 0.4)
