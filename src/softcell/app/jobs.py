"""One search or training from a complete recipe: its folder, its lock, its steps, its drawings and its report.

The command line and `softcell.api` complete recipes and call this; so do `softcell run` and the training of random
architectures.
"""

from __future__ import annotations

from pathlib import Path

from softcell.app.drawings import draw_search, draw_training
from softcell.arch import Genotype
from softcell.engine.interleave import drain
from softcell.engine.lock import locked
from softcell.engine.runfolder import output_folder
from softcell.engine.session import join_processes
from softcell.engine.task import OnEvent
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.evaluate.train import finished_training, train_steps
from softcell.recipes import resumed_folder
from softcell.search import SearchRecipe, SearchResult
from softcell.search.run import finished_search, search_steps


def search(
    recipe: SearchRecipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Searches, or returns the result if `resume` finds a finished search in `out`."""
    if resume and (done := finished_search(resumed_folder(out), recipe)) is not None:
        draw_search(done)
        return done
    with join_processes(recipe.device, recipe.deterministic) as world:
        folder = output_folder(out, world, recipe.method, recipe.space, recipe.data)
        with locked(folder, world):
            result = drain(search_steps(recipe, folder, resume=resume, overwrite=overwrite, on_event=on_event))
            draw_search(result, again=True)
        return result


def train(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    startup: float = 0.0,
) -> TrainResult:
    """Trains, or returns the result if `resume` finds a finished training in `out`.

    startup: up to this many seconds before the first step are not part of the recipe's time.
    """
    if resume and (done := finished_training(resumed_folder(out), genotype, recipe)) is not None:
        return done
    with join_processes(recipe.device, recipe.deterministic) as world:
        folder = output_folder(out, world, "train", genotype.space, recipe.data)
        with locked(folder, world):
            result = drain(
                train_steps(
                    genotype,
                    recipe,
                    folder,
                    resume=resume,
                    overwrite=overwrite,
                    on_event=on_event,
                    startup=startup,
                )
            )
            if world.is_main:
                draw_training(result)
        return result
