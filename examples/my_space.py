"""A custom search space: a chain of layers that each choose an operation.

Try `softcell search --plugin examples/my_space.py --space chain --set space.layers=6`.
"""

from dataclasses import dataclass

from torch import nn

from softcell.arch import Choice, Layout, StrongestEach, Table, check_against
from softcell.errors import UserError
from softcell.nn import Spec
from softcell.spaces import MixedCell, Network, PickedCell, Space, Supernet, register_space


@register_space
@dataclass(frozen=True)
class ChainSpace(Space):  # softcell.testing.check_space(ChainSpace()) checks its contracts
    name = "chain"
    layers: int = 4  # annotated fields are settings: --set space.layers=6
    channels: int = 8
    candidates: tuple[str, ...] = ("skip_connect", "nor_conv_3x3", "sep_conv_3x3", "max_pool_3x3")

    def layout(self):  # layer i connects node i to node i + 1: one table, used at one site
        choices = tuple(Choice(i, i + 1, self.candidates) for i in range(self.layers))
        return Layout(self.name, (Table("chain", choices, (self.layers,)),), ("chain",), rule=StrongestEach())

    def supernet(self, shape, num_classes):  # all candidates; BatchNorm has no scale and shift during the search
        cell = MixedCell(self.layout().tables[0], 1, lambda source: Spec(self.channels, affine=False))
        return ChainSupernet(self, shape, num_classes).surround(cell, self.channels)

    def network(self, genotype, shape, num_classes, *, search_form=False, auxiliary=False):  # only the chosen ones
        check_against(genotype, self.layout())
        if auxiliary:
            raise UserError("a chain has no auxiliary tower; set auxiliary=0")
        network = ChainNetwork(genotype, shape, num_classes)
        spec, picked = Spec(self.channels, affine=not search_form), genotype.cells["chain"]
        return network.surround(PickedCell(picked, 1, lambda source: spec, network.drop_path), self.channels)


class Surrounded:  # the same names in supernet and network: weights are copied by name
    def surround(self, cell, channels):
        self.stem, self.cell = nn.Conv2d(self.shape[0], channels, 3, padding=1), cell
        self.classifier = nn.Linear(channels, self.num_classes)
        return self

    def head(self, features):
        return self.classifier(features.mean(dim=(2, 3)))


class ChainSupernet(Surrounded, Supernet):
    def features(self, x, mix):  # one feature map per resolution; here there is only one
        return [self.cell([self.stem(x)], mix, site=0)[-1]]


class ChainNetwork(Surrounded, Network):
    def features(self, x):
        return [self.cell([self.stem(x)])[-1]]
