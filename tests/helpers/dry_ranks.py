"""A search on two ranks, of which one makes a dry pass before its first step: `(world, folder) -> plain results`."""

from pathlib import Path
from typing import Any

from softcell.engine.distributed import World
from softcell.search import dry_pass, resolve, search
from tests.helpers.search_toys import THREE_EDGES, settings


def searches_on_rank(world: World, folder: Path) -> dict[str, Any]:
    """With and without a dry pass on the first rank, into `folder`/with and `folder`/without."""
    made: list[str] = []
    for name, chosen in (("with", 0), ("without", -1)):

        def launches(world: World, precision: str, chosen: int = chosen) -> bool:
            return world.rank == chosen

        def run_alone(run: Any, notify: Any, name: str = name) -> int:
            run()
            made.append(name)
            return 0

        dry_pass.launches_kernels = launches
        dry_pass.warm_up_by_run = run_alone
        given = settings("nb201", folder / "data.npz", epochs=1, space_settings=THREE_EDGES, drop_path=0.3)
        search(resolve(given), folder / name)
    return {"made": made}
