"""EnTranNAS and EnTranNAS-DST written down literally, number by number: the oracle for `softcell.methods.entrannas`.

Connections are dictionaries {(i, j, k): number}; nothing here is a tensor operation of the code it checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor, nn

Key = tuple[int, int, int]
"""Source node i, target node j, number of the candidate k."""


def equation_5(alpha: Mapping[Key, float], tau: float) -> dict[Key, float]:
    found = {}
    for (i, j, k), value in alpha.items():
        top = max(a for (i2, j2, _), a in alpha.items() if (i2, j2) == (i, j))
        below = sum(math.exp((a - top) / tau) for (i2, j2, _), a in alpha.items() if (i2, j2) == (i, j))
        found[i, j, k] = math.exp((value - top) / tau) / below
    return found


def equation_7(p: Mapping[Key, float]) -> dict[Key, float]:
    return {(i, j, k): value / max(x for (_, j2, _), x in p.items() if j2 == j) for (i, j, k), value in p.items()}


def equation_8(p_hat: Mapping[Key, float], beta: Mapping[int, float]) -> dict[Key, float]:
    return {(i, j, k): max(0.0, value - 1 / (1 + math.exp(-beta[j]))) for (i, j, k), value in p_hat.items()}


def equation_9(q: Mapping[Key, float]) -> dict[Key, float]:
    found = {}
    for (i, j, k), value in q.items():
        edge = [x for (i2, j2, _), x in q.items() if (i2, j2) == (i, j)]
        found[i, j, k] = value / sum(edge) if any(x != 0 for x in edge) else 0.0
    return found


def equation_11(beta: Mapping[int, float]) -> float:
    """The regularisation without its λ."""
    return sum(-math.log(1 / (1 + math.exp(-b))) for b in beta.values()) / len(beta)


class SharingCell(nn.Module):
    """Eq 6, called once per edge: `ops` names the same module for all (i, j, k) that share w_k^(i), or others.

    `coefficients` {(i, j, k): number} makes it an engine cell; None, with the derived set S, a transit cell. With
    `reduce` and `recover` by node it is §2.5's bottleneck.
    """

    def __init__(
        self,
        num_inputs: int,
        ops: Mapping[Key, nn.Module],
        reduce: Mapping[int, nn.Module] | None = None,
        recover: Mapping[int, nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.num_inputs, self.ops, self.reduce, self.recover = num_inputs, dict(ops), reduce, recover
        parts = [*self.ops.values(), *(reduce or {}).values(), *(recover or {}).values()]
        self.parts = nn.ModuleList(dict.fromkeys(parts))

    def forward(self, inputs: list[Tensor], coefficients: Mapping[Key, Tensor | float]) -> list[Tensor]:
        nodes = list(inputs)
        for j in range(self.num_inputs, max(j for _, j, _ in coefficients) + 1):
            total: Tensor | float = 0.0
            for (i, target, k), coefficient in coefficients.items():
                if target == j:
                    x = nodes[i] if self.reduce is None else self.reduce[i](nodes[i])
                    total = total + coefficient * self.ops[i, j, k](x)
            assert isinstance(total, Tensor)
            nodes.append(total if self.recover is None else self.recover[j](total))
        return nodes
