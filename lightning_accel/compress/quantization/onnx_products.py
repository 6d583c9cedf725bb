"""Products of an ONNX graph with constant matrices, and products with integers in place of them.

Shapes: M outputs, K inputs of a matrix, E experts, S rows, B inputs of a block.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_accel.compress.quantization.blockwise import Rounded

DOMAIN = "com.microsoft"
_IN_INT8 = 4  # the accuracy level at which inputs are rounded to int8, block by block; others are no faster than floats


class Product(NamedTuple):
    """Hold a node of a product with one constant matrix, or with that of each expert.

    Attributes:
        node: the node.
        layer: name of the module that it was traced from, "" if it is not known.
        constant: the tensor with the matrices, whose values may be in a file that is not read yet.
        permutation: of its dimensions, before it is multiplied.
        is_transposed: whether its last dimensions are (K, M) then, not (M, K).
        bias: name of the tensor that is added, "" if there is none.
        choice: node that takes the matrix of an expert for each row, None if all experts get all rows.
    """

    node: Any
    layer: str
    constant: Any
    permutation: Sequence[int]
    is_transposed: bool
    bias: str = ""
    choice: Any = None

    def matrices(self, folder: Path) -> list[Tensor]:
        """Read the matrices, each (M, K); ``folder`` has the files that the constant may refer to."""
        from onnx import TensorProto, numpy_helper

        read = TensorProto()  # the values are read into it, and go with it
        read.CopyFrom(self.constant)
        values = torch.from_numpy(numpy_helper.to_array(read, str(folder)).copy()).permute(*self.permutation)
        values = values.mT if self.is_transposed else values
        return list(values.reshape(-1, *values.shape[-2:]))


def find_products(graph: Any, names: Mapping[str, str]) -> Iterator[Product]:
    """Yield the products of a graph that can be computed with integers; ``names`` maps those of nodes to layers."""
    from onnx import TensorProto

    constants = {one.name: (one, range(len(one.dims))) for one in graph.initializer}
    for node in graph.node:  # of weights in a further file, transposes are not computed beforehand
        if node.op_type == "Transpose" and node.input[0] in constants and node.attribute:
            constants[node.output[0]] = constants[node.input[0]][0], node.attribute[0].ints
    makers = {node.output[0]: node for node in graph.node if node.op_type in ("Gather", "GatherND")}
    dims = _numbers_of_dims(graph)
    for node in graph.node:
        if node.op_type not in ("MatMul", "Gemm"):
            continue
        options = {one.name: one.f if one.name in ("alpha", "beta") else one.i for one in node.attribute}
        if options.get("transA", 0) or options.get("alpha", 1) != 1 or options.get("beta", 1) != 1:
            continue
        for side in (1, 0):
            choice = makers.get(node.input[side])
            name = node.input[side] if choice is None else choice.input[0]
            constant, permutation = constants.get(name, (None, ()))
            if constant is None or constant.data_type != TensorProto.FLOAT:
                continue
            of_x, of_result = dims.get(node.input[1 - side]), dims.get(node.output[0])
            is_plain = choice is None and len(constant.dims) == 2 and side == 1
            is_of_all = choice is None and len(constant.dims) == of_result == 3 and of_x in (2, 3) and side == 1
            if not is_plain and not is_of_all and not (choice and _takes_one_each(choice, constant, dims, of_result)):
                continue
            product = Product(node, names.get(node.name, ""), constant, permutation, side == 1, choice=choice)
            if node.op_type == "Gemm":
                product = product._replace(is_transposed=not options.get("transB", 0), bias=[*node.input, ""][2])
            num_out = constant.dims[permutation[-1 if product.is_transposed else -2]]
            if not product.bias or (product.bias in constants and [*constants[product.bias][0].dims] == [num_out]):
                yield product
            break


def _numbers_of_dims(graph: Any) -> dict[str, int]:
    known = [one for one in (*graph.value_info, *graph.input, *graph.output) if one.type.tensor_type.HasField("shape")]
    return {one.name: len(one.type.tensor_type.shape.dim) for one in known}


def _takes_one_each(choice: Any, constant: Any, dims: Mapping[str, int], of_result: int | None) -> bool:
    """Return whether a node takes one matrix (M, K) of a constant (E, M, K) for each row."""
    options = {one.name: one.i for one in choice.attribute}
    of_places = dims.get(choice.input[1])
    if len(constant.dims) != 3 or of_result != 3 or options.get("axis", 0) or options.get("batch_dims", 0):
        return False
    return of_places == (1 if choice.op_type == "Gather" else 2)


def replace_product(graph: Any, product: Product, rounded: Sequence[Rounded], bits: int) -> None:
    """Put products with integers, one for each matrix, in place of that with floats."""
    node = product.node
    new = _Nodes(graph, f"{node.input[1]}_{node.output[0]}", list(graph.node).index(node))
    if len(product.constant.dims) == 2:
        new.multiply(node.input[0], rounded[0], bits, product.bias, node.output[0])
    elif product.choice is None:
        _multiply_all(new, product, rounded, bits)
    else:
        _multiply_chosen(new, product, rounded, bits)
    graph.node.remove(node)


class _Nodes:
    """Insert nodes into a graph, in order, before the one at ``place``."""

    def __init__(self, graph: Any, stem: str, place: int) -> None:
        self.graph, self.stem, self.place, self.count = graph, stem, place, 0

    def add(
        self, kind: str, inputs: Sequence[str], output: str = "", *, outputs: int = 1, domain: str = "", **options: Any
    ) -> list[str]:
        from onnx.helper import make_node

        self.count += 1
        names = [output] if output else [f"{self.stem}_{self.count}_{number}" for number in range(outputs)]
        made = make_node(kind, inputs, names, f"{self.stem}_{kind}_{self.count}", domain=domain, **options)
        self.graph.node.insert(self.place, made)
        self.place += 1
        return names

    def constant(self, value: Tensor) -> str:
        from onnx.numpy_helper import from_array

        self.count += 1
        name = f"{self.stem}_{self.count}"
        self.graph.initializer.append(from_array(value.contiguous().numpy(), name))
        return name

    def multiply(self, x: str, rounded: Rounded, bits: int, bias: str = "", output: str = "") -> str:
        num_out, num_in = rounded.integers.shape
        integers = self.constant(pack(rounded.integers, bits, rounded.block))
        inputs = [x, integers, self.constant(rounded.scales), *(["", "", bias] if bias else [])]
        return self.add(
            "MatMulNBits", inputs, output, domain=DOMAIN,
            K=num_in, N=num_out, bits=bits, block_size=rounded.block, accuracy_level=_IN_INT8,
        )[0]  # fmt: skip


def _multiply_all(new: _Nodes, product: Product, rounded: Sequence[Rounded], bits: int) -> None:
    """Multiply rows (S, K), or those of each expert (E, S, K), with the matrices of all experts: (E, S, M)."""
    x, count = product.node.input[0], len(rounded)
    if _numbers_of_dims(new.graph)[x] == 2:
        parts = new.add("Unsqueeze", [x, new.constant(torch.tensor([0]))]) * count
    else:
        sizes = new.constant(torch.ones(count, dtype=torch.int64))
        parts = new.add("Split", [x, sizes], outputs=count, axis=0)
    products = [new.multiply(part, one, bits) for part, one in zip(parts, rounded, strict=True)]
    new.add("Concat", products, product.node.output[0], axis=0)


def _multiply_chosen(new: _Nodes, product: Product, rounded: Sequence[Rounded], bits: int) -> None:
    """Multiply rows (S, K, 1) or (S, 1, K), each with the matrix of its expert, sorted by expert meanwhile."""
    num_out, num_in = rounded[0].integers.shape
    numbers = new.constant(torch.arange(len(rounded)).unsqueeze(1))
    experts = new.add("Reshape", [product.choice.input[1], new.constant(torch.tensor([1, -1]))])[0]
    is_chosen = new.add("Equal", [experts, numbers])[0]  # (E, S)
    places = new.add("NonZero", [is_chosen])[0]  # experts and rows, by expert
    order = new.add("Gather", [places, new.constant(torch.tensor(1))], axis=0)
    counts = new.add("Cast", [is_chosen], to=7)
    counts = new.add("ReduceSum", [*counts, new.constant(torch.tensor([1]))], keepdims=0)
    x = new.add(
        "Reshape", [product.node.input[int(not product.is_transposed)], new.constant(torch.tensor([-1, num_in]))]
    )
    parts = new.add("Split", [*new.add("Gather", [*x, *order], axis=0), *counts], outputs=len(rounded), axis=0)
    products = [new.multiply(part, one, bits) for part, one in zip(parts, rounded, strict=True)]
    joined = new.add("Concat", products, axis=0)  # (S, M)
    order = new.add("Unsqueeze", [*order, new.constant(torch.tensor([1]))])
    back = new.add("ScatterND", [*joined, *order, *joined])  # each row is written once
    shape = new.constant(torch.tensor([-1, 1, num_out] if product.is_transposed else [-1, num_out, 1]))
    new.add("Reshape", [*back, shape], product.node.output[0])


def delete_unused(graph: Any) -> None:
    """Delete the nodes that take or transpose constants, and constants, that no node uses any more."""
    for part in (graph.node, graph.node, graph.initializer):
        used = {name for node in graph.node for name in node.input} | {one.name for one in graph.output}
        for place in reversed(range(len(part))):  # what was kept would be copied by extend
            one = part[place]
            is_node = part is graph.node
            if not is_node or one.op_type in ("Transpose", "Gather", "GatherND"):
                name = one.output[0] if is_node else one.name
                if name not in used:
                    del part[place]


def num_bytes(graph: Any) -> int:
    """Return the size of the constants of a graph."""
    from onnx.helper import tensor_dtype_to_np_dtype

    return sum(math.prod(one.dims) * tensor_dtype_to_np_dtype(one.data_type).itemsize for one in graph.initializer)


def pack(integers: Tensor, bits: int, block: int) -> Tensor:
    """Pack signed integers (M, K) as ONNX Runtime's MatMulNBits reads them, (M, ceil(K / B), B * bits / 8) uint8."""
    num_out, num_in = integers.shape
    zero = 2 ** (bits - 1)  # integers are unsigned there, with this one in the middle
    padded = integers.new_zeros(num_out, -(-num_in // block) * block)
    padded[:, :num_in] = integers
    unsigned = (padded.int() + zero).to(torch.uint8).view(num_out, -1, block)
    return unsigned if bits == 8 else unsigned[..., ::2] | unsigned[..., 1::2] << 4
