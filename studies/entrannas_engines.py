"""`python -m studies.entrannas_engines`: which cells of EnTranNAS should be engines (the paper's Table 1 ablates this).

Arms: the first or the last cell of each type, all normal cells with the first reduction cell, all cells (a DARTS
supernet with shared features and an annealed temperature), or cell numbers. See `studies.entrannas_arms` for the
record. Stop it at any time (or with --minutes); the same command resumes.

python -m studies.entrannas_engines --seeds 3                                               # digits, on a CPU
python -m studies.entrannas_engines --data cifar10 --data-root DIR --precision bfloat16 --seeds 3 --minutes 9
python -m studies.entrannas_engines --data cifar10 --data-root DIR --arms first 0,1,2,5
"""

from __future__ import annotations

from typing import Any

from softcell.spaces import build_space
from studies.entrannas_arms import arms_parser, recipe_of, run_arms
from studies.runs import entry

ARMS = ("first", "last", "normal", "all")


def engines_of(arm: str, sites: tuple[str, ...]) -> dict[str, Any]:
    """The method's setting for an arm; sites: the type of every cell, in order."""
    if arm in ("first", "last", "all"):
        return {"engines": arm}
    if arm == "normal":
        normal = [site for site, kind in enumerate(sites) if kind == "normal"]
        return {"engines": sorted([*normal, sites.index("reduce")])}
    return {"engines": [int(site) for site in arm.split(",")]}


def main(arguments: list[str] | None = None) -> None:
    parser = arms_parser("studies.entrannas_engines", __doc__, "digits")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="ARM",
        help=f"{', '.join(ARMS)}, or numbers of cells as 0,2,5; all named ones by default",
    )
    options = parser.parse_args(arguments)
    for arm in options.arms:
        if arm not in ARMS and not all(part.isdecimal() for part in arm.split(",")):
            parser.error(f"--arms must name {', '.join(ARMS)} or cells as 0,2,5, got {arm!r}")
    settings = recipe_of("entrannas", {}, 0, options).space_settings
    sites = build_space("darts", settings).layout().sites
    arms = {arm: engines_of(arm, sites) for arm in options.arms}
    run_arms("studies.entrannas_engines", "entrannas", arms, "engines", options)


if __name__ == "__main__":
    entry(main)
