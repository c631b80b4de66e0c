"""Searches from an earlier record: their networks can be trained even if the run folders are gone.

A row of such a record has an `arm`, a `seed`, a `search` with its `recipe` and `genotype`, and `trained` with its
`recipe`; each of the two last may be 'not measured'.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.app.report import to_svg
from softcell.arch import Genotype
from softcell.engine.interleave import Running
from softcell.errors import UserError
from softcell.evaluate import resolve as resolve_training
from softcell.files import atomic_write_text
from softcell.search import SearchRecipe, resolve
from studies.runs import (
    NOT_MEASURED,
    Deadline,
    epochs_of,
    matching_recipe,
    matching_training,
    search_and_train,
    trained,
    training_results,
    without_folders,
)

Rows = dict[tuple[str, int], dict[str, Any]]  # by arm and seed
WHERE = ("data_root", "device", "threads")  # settings that say where a run takes place, not what it does


def recorded_searches(
    file: Path,
    recipes: Mapping[tuple[str, int], SearchRecipe],
    training_of: Callable[[int], Mapping[str, Any]],
    target: Path,
) -> Rows:
    """The rows of a record with a finished search; searches with other recipes are rejected.

    Args:
        recipes: the requested searches, by arm and seed; other rows of the record are ignored.
        training_of: the training settings for a seed. Training with other settings counts as not measured.
        target: where the new record goes; it must not lose anything from the old one.
    """
    try:
        rows = {(row["arm"], row["seed"]): dict(row) for row in json.loads(file.read_text())["rows"]}
        found = {key: rows[key] for key in recipes if key in rows and rows[key]["search"] != NOT_MEASURED}
        lost = [f"{arm} with seed {seed}" for arm, seed in rows if (arm, seed) not in recipes]
        for (arm, seed), row in found.items():
            row["epochs_done"] = [int(number) for number in row["epochs_done"]]
            own, genotype = row["search"]["recipe"], Genotype.from_dict(row["search"]["genotype"])
            # As in a resumed run: newer settings have their defaults.
            if other := differing(resolve(own).to_dict(), recipes[arm, seed].to_dict()):
                raise UserError(
                    f"{file} has {arm} with seed {seed} by another recipe: {', '.join(other)} differ; pass the same "
                    f"settings, or omit --searched to search again"
                )
            if row["trained"] != NOT_MEASURED:
                before, now = (
                    resolve_training(genotype, given) for given in (row["trained"]["recipe"], training_of(seed))
                )
                if differing(before.to_dict(), now.to_dict()):
                    row["trained"] = NOT_MEASURED
                    lost.append(f"the training of {arm} with seed {seed}, by other settings")
    # A ValueError too, but one that already says what is wrong.
    except UserError:
        raise
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"--searched must name a record of this study, but {file} is not one: {error!r}") from error
    if not found:
        raise UserError(f"{file} has no finished search of these arms and seeds; omit --searched to search again")
    if lost and file.resolve() == target.resolve():
        raise UserError(f"{file} would lose {', '.join(lost)}; write the new record elsewhere, by --out")
    return found


def differing(recorded: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """The settings that differ from a record's, except those that say where a run takes place."""
    was, now = (_comparable(settings) for settings in (recorded, recipe))
    return sorted(key for key in {*was, *now} if was.get(key) != now.get(key))


def _comparable(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without locations; for a teacher, the name of its folder or file is kept."""
    found = {key: value for key, value in without_folders(recipe).items() if key not in WHERE}
    if (found.get("guide") or {}).get("teacher"):
        found["guide"] = {**found["guide"], "teacher": Path(found["guide"]["teacher"]).name}
    return found


def with_training(row: dict[str, Any], place: Path, kept: Sequence[str], drawing: Path, title: str) -> dict[str, Any]:
    """A search's row with the results or progress of its training run in `place`; draws the architecture.

    Args:
        kept: results of the training run to record.
    """
    if row["search"] == NOT_MEASURED:
        return row
    atomic_write_text(drawing, to_svg(Genotype.from_dict(row["search"]["genotype"]), title))
    if row["trained"] == NOT_MEASURED:
        row["epochs_done"][-1] = len(epochs_of(place))
        row["trained"] = training_results(place, kept)
    return row


def check_resumable(
    row: Mapping[str, Any] | None, recipe: SearchRecipe, folder: Path, given: Mapping[str, Any]
) -> None:
    """Raises unless the runs that `remaining_steps` would resume have these settings.

    Called for all runs before the first starts, so that a run without time left is checked as well.
    """
    if row is None:
        matching_recipe(recipe, folder)
    matching_training(folder / "training", given)


def remaining_steps(
    row: Mapping[str, Any] | None, recipe: SearchRecipe, folder: Path, given: Mapping[str, Any], deadline: Deadline
) -> Running[None]:
    """The remaining work of a search and its training run, in `folder` and `folder/training`.

    Args:
        row: the search, if it is in a record.
        given: training settings.
    """
    if row is None:
        yield from search_and_train(recipe, folder, folder / "training", given, deadline)
    elif row["trained"] == NOT_MEASURED:
        genotype = Genotype.from_dict(row["search"]["genotype"])
        yield from trained(genotype, folder / "training", given, deadline, folder.name)
