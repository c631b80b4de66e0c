r"""`python -m studies.entrannas_dst`: which settings of EnTranNAS-DST find a network of a usable size.

Every arm is EnTranNAS-DST with different settings of temperature, λ and thresholds; see `studies.entrannas_arms` for
the record. Searches share one GPU. Stop it at any time (or with --minutes); the same command resumes. Unfinished
searches are recorded as not measured.

python -m studies.entrannas_dst --data-root DIR --precision bfloat16 --arms exponential-0.1 exponential-0.3 \
    exponential-1 --seeds 3 --minutes 9           # settles the default's size on CIFAR-10; run it until all are done
python -m studies.entrannas_dst --data-root DIR --arms constant-0.1 exponential-0.1 schedule=linear,sparsity=0.3
python -m studies.entrannas_dst --data digits --epochs 2 --arms constant-0.1 linear-0.1   # a rehearsal
"""

from __future__ import annotations

from typing import Any

from softcell.settings import assignments
from studies.entrannas_arms import arms_parser, run_arms
from studies.runs import entry

# An arm spells out its settings, so that it keeps its meaning when a default changes.
ARMS: dict[str, dict[str, Any]] = {
    "constant-0.1": {"schedule": "constant", "sparsity": 0.1, "threshold_speed": 3.0},
    "constant-1": {"schedule": "constant", "sparsity": 1.0, "threshold_speed": 3.0},
    "exponential-0": {"schedule": "exponential", "sparsity": 0.0, "threshold_speed": 3.0},
    "exponential-0.1": {"schedule": "exponential", "sparsity": 0.1, "threshold_speed": 3.0},
    "exponential-0.3": {"schedule": "exponential", "sparsity": 0.3, "threshold_speed": 3.0},
    "exponential-1": {"schedule": "exponential", "sparsity": 1.0, "threshold_speed": 3.0},
    "exponential-3": {"schedule": "exponential", "sparsity": 3.0, "threshold_speed": 3.0},
    "exponential-fast": {"schedule": "exponential", "sparsity": 0.1, "threshold_speed": 10.0},
    "exponential-faster": {"schedule": "exponential", "sparsity": 0.1, "threshold_speed": 30.0},
    "exponential-to-0.03": {"schedule": "exponential", "last_temperature": 0.03, "threshold_speed": 3.0},
    "linear-0.1": {"schedule": "linear", "sparsity": 0.1, "threshold_speed": 3.0},
}


def main(arguments: list[str] | None = None) -> None:
    parser = arms_parser("studies.entrannas_dst", __doc__, "cifar10")
    parser.add_argument(
        "--arms",
        nargs="+",
        default=list(ARMS),
        metavar="ARM",
        help=f"{', '.join(ARMS)}, or settings of the method as KEY=VALUE,KEY=VALUE; all named ones by default",
    )
    options = parser.parse_args(arguments)
    for arm in options.arms:
        if "=" not in arm and arm not in ARMS:
            parser.error(f"--arms must name {', '.join(ARMS)} or have the form KEY=VALUE, got {arm!r}")
    arms = {arm: assignments(arm.split(",")) if "=" in arm else ARMS[arm] for arm in options.arms}
    run_arms("studies.entrannas_dst", "entrannas-dst", arms, "dst", options)


if __name__ == "__main__":
    entry(main)
