"""What `softcell reproduce` runs for each paper, as plain data: searches, networks, training runs, published numbers.

`PROTOCOL` is the same for all tables and fixed before the first run. Published numbers are the papers' own, at full
length; they are never ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]
SMALL_CELLS = {"cells": 3, "channels": 4}

SEEDS = 3
"""Searches of a row."""
TRAINING_SEEDS = 3
"""Training runs of one network."""
RANDOM_CELLS = 4
EPOCHS = 60
"""Epochs of the short training recipe."""
PROTOCOL = (
    "Searches have the paper's length and settings, with several seeds.",
    f"All networks of a table are trained with one short recipe: the paper's, for {EPOCHS} epochs, with drop-path "
    "reduced in proportion to the length. Learning rate, weight decay (whose effect shrinks with the number of steps), "
    "cutout and auxiliary tower are the paper's. Searches and training runs compute in bfloat16 on a GPU.",
    "Every network is trained with seed 0, which gives the spread over networks; the first network of some rows and "
    f"all published cells with {TRAINING_SEEDS} seeds, which gives the spread over training seeds.",
    f"{RANDOM_CELLS} random cells of the same space, within a limit of parameters, are trained in the same way. Random "
    "search has as many epochs in total as the search it is compared with.",
    "The test set is read once per training run, at the end; nothing is selected by it.",
)
TEACHER = "TEACHER"
"""Placeholder for the folder of the paper's teacher in the settings of a search."""


@dataclass(frozen=True)
class Training:
    """How the networks of a table are trained and which results are shown.

    settings: those of `TrainRecipe`. figures: `error`, `accuracy` or `recall_at_K`. heading: the data and the metric.
    """

    heading: str
    settings: Settings
    figures: tuple[str, ...] = ("error",)


@dataclass(frozen=True)
class Row:
    """One row of a table. One of `search`, `cell`, `random` and `classifier` says where its networks come from.

    search: name of a search of the paper; a network per seed. cell: name in `plan.CELLS`. random: a space.
    classifier: settings of the ResNet-18 of NOS's Table 1. trainings: those of the table that apply; empty for all.
    published: the paper's numbers by column. repeats: its first network is trained with several seeds.
    """

    name: str
    search: str | None = None
    cell: str | None = None
    random: str | None = None
    classifier: Settings | None = None
    trainings: tuple[str, ...] = ()
    published: Mapping[str, str] = field(default_factory=dict)
    repeats: bool = False


@dataclass(frozen=True)
class PaperTable:
    """One table of a paper. columns: figures of searches and networks; those of `trainings` follow.

    compare: two rows and a column, from which the verdict is made. missing: why it is not measured, and the recipe.
    limit: most parameters of a random cell.
    """

    number: str
    title: str
    rows: tuple[Row, ...] = ()
    trainings: Mapping[str, Training] = field(default_factory=dict)
    columns: tuple[str, ...] = ("parameters", "multiply_adds")
    compare: tuple[str, str, str] | None = None
    seeds: int = SEEDS
    limit: int | None = None
    missing: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Paper:
    """A paper: searches by name (settings of `SearchRecipe`), its teacher, its tables. page: its documentation."""

    key: str
    name: str
    page: str
    searches: Mapping[str, Settings]
    tables: tuple[PaperTable, ...]
    teacher: Settings | None = None
    small: Settings = field(default_factory=dict)
    """Settings of all searches of a rehearsal."""
    small_training: Settings = field(default_factory=lambda: {"space_settings": SMALL_CELLS})


def short(recipe: str, data: str, drop_path: float, full: int, **settings: Any) -> dict[str, Any]:
    """The short recipe: `EPOCHS` of the paper's `full` epochs, with drop-path in proportion."""
    scaled = round(drop_path * EPOCHS / full, 6)
    return {"recipe": recipe, "data": data, "epochs": EPOCHS, "drop_path": scaled, **settings}


def _cifar10(error: str, parameters: str, cost: str | None = None) -> dict[str, str]:
    """Published numbers: test error on CIFAR-10 in %, parameters, and GPU days of the search."""
    return {"cifar10": error, "parameters": parameters} | ({} if cost is None else {"cost": cost})


CIFAR10 = Training("CIFAR-10 test error, %", short("cifar", "cifar10", 0.2, 600))
CIFAR100 = Training("CIFAR-100 test error, %", short("cifar", "cifar100", 0.2, 600))
HELD = {"held": 0.1, "weights": 0.9}
"""5,000 images of CIFAR-10 that are not used for training; the rest for weights and architecture."""
HELD_HALVES = {"held": 0.1, "weights": 0.45, "validation": 0.45}
CELLS_OF_DARTS = (
    Row("DARTS_V2, published", cell="DARTS_V2", published=_cifar10("2.76 ± 0.09", "3.3M")),
    Row("PC-DARTS, published", cell="PC-DARTS", published=_cifar10("2.57 ± 0.07", "3.6M")),
    Row("GDAS, published", cell="GDAS", published=_cifar10("2.93", "3.4M")),
)
FIRST_ORDER = {"method": "darts", "data": "cifar10"}


def random_search(space: str, epochs: int) -> dict[str, Any]:
    """Random search with as many epochs in total as a search of `epochs`: ten for each architecture."""
    return {
        "method": "random",
        "space": space,
        "data": "cifar10",
        "epochs": 10,
        # Rounded up: never fewer epochs than the search that it is compared with.
        "method_settings": {"samples": -(-epochs // 10)},
    }


def _snas(level: str) -> dict[str, Any]:
    return {"method": "snas", "data": "cifar10", "split": HELD, "resource": {"preset": level}}


def _darts(regime: str) -> dict[str, Any]:
    split = HELD if regime == "single-level" else HELD_HALVES
    return {**FIRST_ORDER, "regime": regime, "split": split, "child_every": 1}


SNAS = Paper(
    "snas",
    "SNAS",
    "papers/snas.md",
    searches={
        "snas-mild": _snas("mild"),
        "snas-moderate": _snas("moderate"),
        "snas-aggressive": _snas("aggressive"),
        "darts-first-order": _darts("bilevel"),
        "darts-second-order": _darts("unrolled"),
        "darts-single-level": _darts("single-level"),
        "random-search": random_search("darts", 150),
    },
    tables=(
        PaperTable(
            "1",
            "search accuracy and the child's accuracy without retraining (Table 1; curves of Figures 3 and 4)",
            (
                Row("SNAS, mild", "snas-mild", published={"search": "88.54", "child": "90.67", "cost": "1.5"}),
                Row("SNAS, moderate", "snas-moderate"),
                Row("SNAS, aggressive", "snas-aggressive"),
                Row(
                    "DARTS, second order",
                    "darts-second-order",
                    published={"search": "87.67", "child": "54.66", "cost": "1"},
                ),
                Row("DARTS, first order", "darts-first-order"),
                Row("DARTS, single-level", "darts-single-level"),
            ),
            columns=("search", "child", "child_bn", "loss_of_child", "entropy", "parameters", "cost"),
            compare=("SNAS, mild", "DARTS, second order", "loss_of_child"),
            notes=(
                "Search and child are measured on the same 5,000 images of the training set, which were not used for "
                "training; the paper does not say which images it used.",
            ),
        ),
        PaperTable(
            "2",
            "networks trained on CIFAR-10",
            (
                Row("SNAS, mild", "snas-mild", published=_cifar10("2.98", "2.9M", "1.5")),
                Row("SNAS, moderate", "snas-moderate", published=_cifar10("2.85 ± 0.02", "2.8M", "1.5"), repeats=True),
                Row("SNAS, aggressive", "snas-aggressive", published=_cifar10("3.10 ± 0.04", "2.3M", "1.5")),
                Row("DARTS, first order", "darts-first-order", published=_cifar10("3.00 ± 0.14", "3.3M", "0.4")),
                Row("DARTS, second order", "darts-second-order", published=_cifar10("2.76 ± 0.09", "3.3M", "1")),
                Row("DARTS, single-level", "darts-single-level", published=_cifar10("3.56 ± 0.10", "3.0M", "0.3")),
                Row("random search, same epochs", "random-search", published=_cifar10("3.29 ± 0.15", "3.2M", "1")),
                Row("random cells", random="darts", repeats=True),
                Row("SNAS mild, published", cell="SNAS-mild", published=_cifar10("2.98", "2.9M")),
                Row("SNAS moderate, published", cell="SNAS-moderate", published=_cifar10("2.85 ± 0.02", "2.8M")),
                Row("SNAS aggressive, published", cell="SNAS-aggressive", published=_cifar10("3.10 ± 0.04", "2.3M")),
                *CELLS_OF_DARTS,
            ),
            trainings={"cifar10": CIFAR10},
            columns=("parameters", "multiply_adds", "cost"),
            compare=("SNAS, moderate", "random cells", "cifar10"),
            limit=4_000_000,
        ),
        PaperTable(
            "3",
            "ImageNet",
            missing="not measured: ImageNet is not available here (paper: 27.3 / 9.2 at 4.3M). Recipe: "
            "softcell train GENOTYPE --data imagenet --recipe imagenet",
        ),
    ),
    small={"space_settings": SMALL_CELLS},
)


def _entrannas(**settings: Any) -> dict[str, Any]:
    return {"method": "entrannas", "data": "cifar10", **settings}


def _dst(sparsity: float) -> dict[str, Any]:
    return {"method": "entrannas-dst", "data": "cifar10", "method_settings": {"sparsity": sparsity}}


_SEARCHED = ("search_bn", "child_bn", "gap_bn", "parameters", "multiply_adds", "cost")
ENTRANNAS = Paper(
    "entrannas",
    "EnTranNAS",
    "papers/entrannas.md",
    searches={
        "entrannas": _entrannas(),
        "engines-last": _entrannas(method_settings={"engines": "last"}),
        "engines-all": _entrannas(method_settings={"engines": "all"}),
        "no-sharing": _entrannas(space_settings={"share_features": False}),
        "no-bottleneck": _entrannas(space_settings={"bottleneck": 1}),
        "no-sharing-no-bottleneck": _entrannas(space_settings={"share_features": False, "bottleneck": 1}),
        **{f"dst-{weight:g}": _dst(weight) for weight in (0.0, 0.1, 0.3, 1.0, 3.0)},
        "darts": {**FIRST_ORDER, "child_every": 10},
        "random-search": random_search("darts", 50),
    },
    tables=(
        PaperTable(
            "engines",
            "which cells are engines (the paper's ablation), compared with DARTS and random cells",
            (
                Row("first cells (EnTranNAS)", "entrannas", repeats=True),
                Row("last cells", "engines-last"),
                Row("all cells", "engines-all"),
                Row("DARTS, first order", "darts"),
                Row("random search, same epochs", "random-search"),
                Row("random cells", random="darts", repeats=True),
                *CELLS_OF_DARTS,
            ),
            trainings={"cifar10": CIFAR10},
            columns=_SEARCHED,
            compare=("first cells (EnTranNAS)", "random cells", "cifar10"),
            limit=4_000_000,
            notes=(
                "The paper's tables are not in the text available to us. Its abstract reports 2.22 % error "
                "on CIFAR-10 with 0.07 GPU-days (of its best variant) and 23.8 % top-1 error on ImageNet.",
                "The supernet of DARTS is measured with its running statistics, which fit it.",
            ),
        ),
        PaperTable(
            "efficiency",
            "cost and accuracy with feature sharing and the bottleneck (§2.3, §2.5)",
            (
                Row("sharing, bottleneck 4", "entrannas", repeats=True),
                Row("sharing alone", "no-bottleneck"),
                Row("bottleneck alone", "no-sharing"),
                Row("neither", "no-sharing-no-bottleneck"),
            ),
            trainings={"cifar10": CIFAR10},
            columns=_SEARCHED,
            compare=("sharing, bottleneck 4", "neither", "cost"),
        ),
        PaperTable(
            "sparsity",
            "EnTranNAS-DST: size and accuracy by λ (Eq 11)",
            (
                *(
                    Row(f"λ = {weight:g}", f"dst-{weight:g}", repeats=weight == 1.0)
                    for weight in (0.0, 0.1, 0.3, 1.0, 3.0)
                ),
                Row("random cells", random="darts", repeats=True),
            ),
            trainings={"cifar10": CIFAR10},
            columns=_SEARCHED,
            compare=("λ = 1", "λ = 0", "parameters"),
            limit=4_000_000,
        ),
        PaperTable(
            "imagenet",
            "direct search on ImageNet",
            missing="not measured: ImageNet is not available here (paper: 23.8 top-1 error in 2.1 GPU-days). Recipe: "
            "softcell search entrannas-dst --data imagenet",
        ),
    ),
    small={"space_settings": SMALL_CELLS},
)

_CLASSIFIER = {"epochs": EPOCHS, "lr_every": 6}
NOS = Paper(
    "nos",
    "NOS",
    "papers/nos.md",
    searches={
        "guided": {"method": "nos", "data": "cifar10", "guide": {"teacher": TEACHER}},
        "unguided": {"method": "nos", "data": "cifar10"},
        "random-search": random_search("nos", 25),
    },
    tables=(
        PaperTable(
            "1",
            "self-calibration operations added to a ResNet-18",
            tuple(
                Row(name, classifier=settings, published={"cifar10": ten, "cifar100": hundred})
                for name, settings, ten, hundred in (
                    ("ResNet-18", {}, "4.95", "23.61"),
                    ("+ dynamic 3×3", {"operation": "dynamic_conv_3x3"}, "4.63", "22.63"),
                    ("+ dynamic 5×5", {"operation": "dynamic_conv_5x5"}, "4.78", "23.45"),
                    ("+ dilated dynamic 3×3", {"operation": "dil_dynamic_conv_3x3"}, "4.97", "24.00"),
                    ("+ dilated dynamic 5×5", {"operation": "dil_dynamic_conv_5x5"}, "4.92", "23.75"),
                    ("+ spatial attention", {"operation": "spatial_attention"}, "4.79", "23.51"),
                    ("+ channel attention", {"operation": "channel_attention"}, "4.83", "23.20"),
                )
            ),
            trainings={
                "cifar10": Training("CIFAR-10 test error, %", {"data": "cifar10", **_CLASSIFIER}),
                "cifar100": Training("CIFAR-100 test error, %", {"data": "cifar100", **_CLASSIFIER}),
            },
            compare=("+ dynamic 3×3", "ResNet-18", "cifar10"),
            notes=(
                "Classifiers are trained with the settings of A.2.1 for 60 instead of 300 epochs; the learning rate is "
                "divided by 10 after every tenth of them, as in the paper.",
            ),
        ),
        PaperTable(
            "4",
            "search with and without guidance, trained on CIFAR-10 and transferred to CIFAR-100 (Figure 5: curves)",
            (
                Row(
                    "guided",
                    "guided",
                    published={
                        "cifar10": "2.53 best, 2.67 ± 0.06",
                        "cifar100": "16.21 best, 16.72 ± 0.24",
                        "parameters": "2.6M",
                        "cost": "0.35",
                    },
                    repeats=True,
                ),
                Row("unguided", "unguided", published={"cifar10": "3.44", "cifar100": "18.80"}),
                Row("random search, same epochs", "random-search"),
                Row(
                    "random cells",
                    random="nos",
                    published={"cifar10": "3.85 best of 30", "cifar100": "21.66", "parameters": "2.4M"},
                    repeats=True,
                ),
            ),
            trainings={
                "cifar10": Training("CIFAR-10 test error, %", short("nos-cifar", "cifar10", 0.3, 600)),
                "cifar100": Training("CIFAR-100 test error, %", short("nos-cifar100", "cifar100", 0.3, 600)),
            },
            columns=("search", "parameters", "multiply_adds", "cost"),
            compare=("guided", "unguided", "cifar10"),
            limit=4_000_000,
            notes=("The teacher is PyramidNet-110 (α = 84), trained for 300 epochs with the paper's recipe.",),
        ),
        PaperTable(
            "3",
            "ImageNet",
            missing="not measured: ImageNet is not available here (paper: 25.8 / 8.1 at 4.0M and 440M). Recipe: "
            "softcell train GENOTYPE --data imagenet --recipe nos-imagenet",
        ),
    ),
    teacher={"classifier": "pyramidnet", "data": "cifar10"},
    small={"space_settings": {"cells": 3, "channels": 4, "nodes": 2}},
)

_REDUCED = {
    # space: published errors of DARTS, DARTS-PT and IT-NAS on CIFAR-10, then on CIFAR-100
    "s1": (("3.84", "3.50", "2.57"), ("29.46", "24.48", "23.31")),
    "s2": (("4.85", None, "3.11"), ("26.05", "23.16", "20.58")),
    "s3": (("3.34", "2.49", "2.43"), ("28.90", "22.03", "20.76")),
    "s4": (("7.20", None, "3.36"), ("22.85", "20.80", "20.69")),
}
_SELECTED = {"DARTS": "darts", "DARTS, perturbation": "darts-pt", "IT-NAS": "itnas"}
_OWN: dict[str, Settings] = {
    "darts": {"method": "darts"},
    "darts-pt": {"method": "darts", "select": {"by": "perturbation"}},
    "itnas": {"method": "itnas"},
}


def _reduced_rows() -> tuple[Row, ...]:
    rows = []
    for space, published in _REDUCED.items():
        for data, errors in zip(("cifar10", "cifar100"), published, strict=True):
            where = f"{space.upper()} on {data.upper().replace('CIFAR', 'CIFAR-')}"
            for (label, key), error in zip(_SELECTED.items(), errors, strict=True):
                known = {} if error is None else {data: error}
                rows.append(Row(f"{where}: {label}", f"{key}-{space}-{data}", trainings=(data,), published=known))
            rows.append(Row(f"{where}: random cells", random=space, trainings=(data,)))
    return tuple(rows)


ITNAS = Paper(
    "itnas",
    "IT-NAS",
    "papers/it-nas.md",
    searches={
        **{key: {**own, "space": "darts", "data": "cifar10"} for key, own in _OWN.items()},
        "random-search": random_search("darts", 50),
        **{
            f"{key}-{space}-{data}": {**own, "space": space, "data": data}
            for space in _REDUCED
            for data in ("cifar10", "cifar100")
            for key, own in _OWN.items()
        },
    },
    tables=(
        PaperTable(
            "2",
            "networks of the DARTS space, trained on CIFAR-10 and transferred to CIFAR-100",
            (
                Row(
                    "IT-NAS",
                    "itnas",
                    published={
                        "cifar10": "2.41 ± 0.02",
                        "cifar100": "16.70 ± 0.06",
                        "parameters": "3.67M ± 0.40",
                        "cost": "0.25",
                    },
                    repeats=True,
                ),
                Row(
                    "DARTS, first order",
                    "darts",
                    published={"cifar10": "3.00 ± 0.14", "cifar100": "17.76", "parameters": "3.3M", "cost": "0.4"},
                ),
                Row("DARTS, perturbation", "darts-pt", published=_cifar10("2.61 ± 0.08", "3.0M", "0.8")),
                Row("random search, same epochs", "random-search"),
                Row("random cells", random="darts", repeats=True),
                Row("SNAS moderate, published", cell="SNAS-moderate", published=_cifar10("2.85 ± 0.02", "2.8M")),
                *CELLS_OF_DARTS,
            ),
            trainings={"cifar10": CIFAR10, "cifar100": CIFAR100},
            columns=("search", "parameters", "multiply_adds", "cost"),
            compare=("IT-NAS", "random cells", "cifar10"),
            limit=4_000_000,
        ),
        PaperTable(
            "4",
            "the reduced spaces S1 to S4, searched and trained on CIFAR-10 and on CIFAR-100",
            _reduced_rows(),
            trainings={"cifar10": CIFAR10, "cifar100": CIFAR100},
            columns=("search", "parameters", "cost"),
            compare=("S2 on CIFAR-10: IT-NAS", "S2 on CIFAR-10: DARTS", "cifar10"),
            seeds=2,
            notes=("SVHN: not measured here.",),
        ),
        PaperTable(
            "5",
            "NAS-Bench-201",
            missing="looked up in the benchmark's table, not trained: `softcell bench nb201` and, in the repository, "
            "`python -m studies.nb201`",
        ),
        PaperTable(
            "3",
            "ImageNet, ProxylessNAS's chain (Tables 3 and 6)",
            missing="not measured: ImageNet is not available here (paper: 24.1 / 7.3 at 5.2M and 591M; with SE 78.2 % "
            "accuracy). Recipe: softcell search itnas --space proxyless --data imagenet --scale chain --max-flops 600M",
        ),
    ),
    small={"space_settings": SMALL_CELLS, "select": {"epochs": 0}},
)


def _full(**settings: Any) -> dict[str, Any]:
    return {"method": "fullattention", "data": "cifar10", **settings}


# The ablation without phase 1 begins with random logits; phase 1 itself begins with zeros.
_ALONE = {"pretrain": {"epochs": 0}, "method_settings": {"init_scale": 1e-3}}
_FOUND = ("search", "parameters", "multiply_adds", "cost")
FULLATTENTION = Paper(
    "fullattention",
    "full-attention NAS",
    "papers/full-attention.md",
    searches={
        "both": _full(),
        "alone": _full(**_ALONE),
        "tied": _full(**_ALONE, space_settings={"tied": True}),
    },
    tables=(
        PaperTable(
            "III",
            "networks trained on CIFAR-10 and CIFAR-100, 96 channels",
            (
                Row(
                    "both phases",
                    "both",
                    published={"cifar10": "3.44", "cifar100": "20.68", "parameters": "2.52M", "cost": "2"},
                    repeats=True,
                ),
                Row("random networks", random="fullattention", repeats=True),
            ),
            trainings={
                "cifar10": Training("CIFAR-10 test error, %", short("fullattention-cifar", "cifar10", 0.0, 500)),
                "cifar100": Training("CIFAR-100 test error, %", short("fullattention-cifar", "cifar100", 0.0, 500)),
            },
            columns=_FOUND,
            compare=("both phases", "random networks", "cifar10"),
            seeds=4,
            notes=(
                "The paper searches with four seeds and takes the one with the best validation accuracy; all four are "
                "trained here. Phase 1 learns from CIFAR-10 without labels, not from ImageNet.",
            ),
        ),
        PaperTable(
            "V",
            "fine-grained recognition on CUB-200-2011",
            (
                Row("both phases", "both", published={"cub": "85.30", "parameters": "3.82M"}, repeats=True),
                Row("random networks", random="fullattention"),
            ),
            trainings={
                "cub": Training(
                    "CUB-200-2011 test accuracy, %",
                    short("fine-grained", "cub200", 0.0, 200, image_size=144),
                    ("accuracy",),
                ),
            },
            columns=_FOUND,
            compare=("both phases", "random networks", "cub"),
            seeds=4,
            notes=("Images have 144×144 pixels instead of 448×448; weights start at random, not from ImageNet.",),
        ),
        PaperTable(
            "VI",
            "zero-shot retrieval on CUB-200-2011",
            (
                Row(
                    "both phases",
                    "both",
                    published={
                        "retrieval recall_at_1": "68.4",
                        "retrieval recall_at_2": "78.5",
                        "retrieval recall_at_4": "86.0",
                        "retrieval recall_at_8": "91.6",
                    },
                    repeats=True,
                ),
                Row("random networks", random="fullattention"),
            ),
            trainings={
                "retrieval": Training(
                    "",
                    {"recipe": "retrieve", "task": "retrieve", "data": "cub200", "image_size": 128},
                    ("recall_at_1", "recall_at_2", "recall_at_4", "recall_at_8"),
                ),
            },
            columns=_FOUND,
            compare=("both phases", "random networks", "retrieval recall_at_1"),
            seeds=4,
            notes=("Crops of 128 from 144 pixels instead of 227 from 256; the paper's 50 epochs.",),
        ),
        PaperTable(
            "VII",
            "ablation on CIFAR-10, 80 channels: stages instead of cells, and phase 1",
            (
                Row("cells, without phase 1", "tied", published={"cifar10-80": "4.38", "parameters": "1.76M"}),
                Row("stages, without phase 1", "alone", published={"cifar10-80": "4.08", "parameters": "1.74M"}),
                Row(
                    "stages and phase 1",
                    "both",
                    published={"cifar10-80": "3.70", "parameters": "1.75M"},
                    repeats=True,
                ),
                Row("random networks", random="fullattention"),
            ),
            trainings={
                "cifar10-80": Training(
                    "CIFAR-10 test error, %",
                    short("fullattention-cifar", "cifar10", 0.0, 500, space_settings={"channels": 80}),
                ),
            },
            columns=_FOUND,
            compare=("stages and phase 1", "stages, without phase 1", "cifar10-80"),
        ),
        PaperTable(
            "IV",
            "ImageNet",
            missing="not measured: ImageNet is not available here (paper: 26.7 / 8.4 at 4M). Recipe: "
            "softcell train GENOTYPE --data imagenet --recipe fullattention-imagenet",
        ),
    ),
    small={"space_settings": {"layers": 1}},
    small_training={"space_settings": {"channels": 16}},
)

PAPERS = {paper.key: paper for paper in (SNAS, ENTRANNAS, NOS, ITNAS, FULLATTENTION)}
