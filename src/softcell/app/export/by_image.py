"""Convolutions with a kernel per image, in ONNX.

In torch such a convolution has one group per image and channel, a number that depends on the batch. ONNX wants the
number of groups as a constant, but takes the kernel as an input: a `Scan` goes over the images and convolves each with
its own kernel. (Products and sums over the taps need a graph of hundreds of nodes and twice the time to run, products
of matrices over windows seven times that.)
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram

from softcell.errors import UserError


# Annotations as they are, not as text: the operation's schema is read from them, and not every torch reads text.
@torch.library.custom_op("softcell::conv_by_image", mutates_args=())
def conv_by_image(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """x [n, groups·i, h, w] with weight [n, groups·o, i, kh, kw] to [n, groups·o, h', w']: stands for the `Scan`."""
    pairs = zip(x, weight, strict=True)
    return torch.cat([F.conv2d(one[None], own, None, stride, padding, dilation, groups) for one, own in pairs])


@conv_by_image.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Tensor:
    first = F.conv2d(x[:1], weight[0], None, stride, padding, dilation, groups)
    return x.new_empty(x.shape[0], *first.shape[1:])


def has_kernels_per_image(program: ExportedProgram) -> bool:
    """Whether some convolution's number of groups, its last argument, is computed; most networks have none."""
    return any(
        node.target is torch.ops.aten.conv2d.default and not isinstance(node.args[-1], int | list)
        for node in program.graph.nodes
        if len(node.args) == 7
    )


def grouped_by_image(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: Any = 1,
) -> Tensor:
    """A convolution whose number of groups is a multiple of the batch, image by image; every other is left alone.

    x [1, n·g·i, h, w]; weight [n·g·o, i, kh, kw]; gives [1, n·g·o, h', w'] for g groups per image.
    """
    if isinstance(groups, int):
        return NotImplemented  # type: ignore[no-any-return]
    per_image, batch = groups.node.expr.as_coeff_Mul()
    if not (per_image.is_Integer and batch.is_Symbol):
        raise UserError(
            f"in ONNX the groups of a convolution must be a constant, or so many for each image, but got {groups}; "
            "export with --to torch-export"
        )
    count, (outputs, inner, *_) = int(per_image), weight.shape
    own = x.reshape(-1, count * inner, *x.shape[-2:])
    kernels = weight.reshape(-1, count * (outputs // groups), *weight.shape[1:])
    y: Tensor = torch.ops.softcell.conv_by_image(own, kernels, list(stride), list(padding), list(dilation), count)
    y = y.reshape(1, -1, *y.shape[-2:])
    return y if bias is None else y + bias[:, None, None]


def scan(x: Any, weight: Any, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Any:
    """What `conv_by_image` is in ONNX; called while a graph is written."""
    from onnx import TensorProto, helper
    from onnxscript import opset20

    convolved = helper.make_node(
        "Conv",
        ["batch", "kernel"],
        ["made"],
        group=groups,
        strides=list(stride),
        pads=[*padding, *padding],
        dilations=list(dilation),
    )
    unsqueeze, squeeze = (
        helper.make_node(*names)
        for names in (("Unsqueeze", ["one", "axis"], ["batch"]), ("Squeeze", ["made", "axis"], ["found"]))
    )
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        for names in (("one", "kernel"), ("found",))
    )
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
    body = helper.make_graph([unsqueeze, convolved, squeeze], "one_image", inputs, outputs, [axis])
    return opset20.Scan(x, weight, body=body, num_scan_inputs=2)
