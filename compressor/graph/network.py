"""An ONNX graph as a model of PyTorch: its nodes run one by one, and its weights are parameters.

Code that reads the modules of a model works on a graph too, because the network has these modules:

- every matmul with a weight of two axes is an `nn.Linear`, whose path is the name of the group that ends in it;
- the nodes between two sums of the residual stream are one layer of a module list;
- every sum of two activations passes through an `nn.Identity`, where it can be observed.

Nodes that depend on inputs and constants alone, such as those of an attention mask, run before the first layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from compressor.answers import AnswerKind, answer_kind
from compressor.errors import ErrorCode, InputError
from compressor.graph.config import GraphConfig
from compressor.graph.fusions import fuse
from compressor.graph.layers import Division, Layer, Operator
from compressor.graph.operators import executor, tensor_of
from compressor.graph.program import Program, widen
from compressor.silence_libraries import one_line
from graph_passes.attention.linears import GraphLinear
from graph_passes.errors import listed

Outputs = tuple[Tensor | None, ...]
Execute = Callable[[Sequence[Tensor | None]], Outputs]
_LOGITS = "logits"
_SPANS = {"start_positions": "start_logits", "end_positions": "end_logits"}
"""Label of an answer that is a span of a text -> the output that is compared with it."""


@dataclass(frozen=True)
class Weight:
    """The parameter or buffer of a module that holds an initializer of a graph, transposed or not, as linears do."""

    owner: nn.Module
    name: str
    is_transposed: bool = False

    @property
    def value(self) -> Tensor:
        """The values, in the layout of the initializer."""
        stored: Tensor = getattr(self.owner, self.name)
        return stored.T if self.is_transposed else stored


Operand = int | Weight | None
"""Number of a computed value, or a weight; None: an optional input that is left out."""


@dataclass
class Operation:
    """One node, ready to run.

    Attributes:
        run: computes the outputs, whose numbers are `results`.
        operands: the inputs.
        name: operator and name of the node, for messages.
        drops: numbers of values that no later node of the same layer reads.
    """

    run: Execute
    operands: tuple[Operand, ...]
    results: tuple[int, ...]
    name: str
    drops: tuple[int, ...] = ()


class Values(tuple[Tensor, ...]):
    """The values after a layer, which know their numbers: a pass may continue with those of a later layer."""

    numbers: tuple[int, ...]

    def __new__(cls, numbers: tuple[int, ...], computed: Mapping[int, Tensor]) -> Self:
        values = super().__new__(cls, (computed[number] for number in numbers))
        values.numbers = numbers
        return values


class GraphLayer(nn.Module):
    """The nodes between two sums of the residual stream.

    Args:
        operations: the nodes.
        shared: values of the current forward that every layer may read: the inputs, and what depends on them alone.
        operands: numbers of the values that earlier layers compute, the residual stream first.
        results: numbers of the values that later layers read, the residual stream first.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        shared: Mapping[int, Tensor],
        operands: tuple[int, ...],
        results: tuple[int, ...],
    ) -> None:
        super().__init__()
        self._operations, self._shared, self.operands, self.results = operations, shared, operands, results

    def forward(self, *values: Tensor) -> Values:
        """The values of `results`, from those of `operands`."""
        computed = dict(zip(self.operands, values, strict=True))
        execute(self._operations, computed, self._shared)
        return Values(self.results, computed)


def execute(operations: Sequence[Operation], computed: dict[int, Tensor], shared: Mapping[int, Tensor]) -> None:
    """Run nodes in order, add their results to the computed values, and remove those that are not read any more.

    Raises:
        InputError: a node does not run on the values that it gets, e.g. with more positions than the graph has.
    """
    for operation in operations:
        operands = [_read(operand, computed, shared) for operand in operation.operands]
        try:
            outputs = operation.run(operands)
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError) as error:
            shapes = [list(operand.shape) for operand in operands if operand is not None]
            text = (
                f"the graph does not run on these inputs: {operation.name} with tensors of {listed(map(str, shapes))}"
                f" ({one_line(error)}); give rows of sizes that the graph takes, e.g. shorter rows"
            )
            raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, node=operation.name, shapes=shapes) from error
        for number, value in zip(operation.results, outputs, strict=False):
            if value is not None:
                computed[number] = value
        for number in operation.drops:
            computed.pop(number, None)


def _read(operand: Operand, computed: Mapping[int, Tensor], shared: Mapping[int, Tensor]) -> Tensor | None:
    if isinstance(operand, int):
        return computed[operand] if operand in computed else shared[operand]
    return None if operand is None else operand.value


class GraphNetwork(PreTrainedModel):
    """A graph as a model of PyTorch; `network_of` makes one, with a `forward` that names the inputs of the graph.

    It knows its groups (`KnowsGroups`) and its signature (`HasSignature`), and computes in float32.

    Attributes:
        graph_layers: the layers between sums of the residual stream, in order.
        weights: initializer of the graph -> its parameter or buffer.
        embedding_tables: the parameters whose rows operators look up.
    """

    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig, program: Program) -> None:
        PreTrainedModel.__init__(self, config)  # not that of a further base, which makes modules of its own
        self.input_specs, self.output_specs = program.signature
        self.file, self.search_outcome = program.file, program.outcome
        self.group_names = [group.linear for group in program.groups]
        self.sites, self.obstacles = program.sites, program.obstacles
        self.feed_forwards = {group.linear: group.units for group in program.groups if group.type == "neurons"}
        if self.main_input_name not in program.inputs:
            self.main_input_name = program.inputs[0]
        self.constants, self.sums = nn.Module(), nn.ModuleDict()  # what belongs to no linear
        builder = _Builder(self, program)
        self.weights = builder.weights
        tables = (getattr(table.owner, table.name) for table in builder.tables)
        self.embedding_tables = [table for table in tables if isinstance(table, nn.Parameter)]
        self._shared = builder.shared
        self._inputs, self._results = builder.inputs, builder.outputs
        self._before, self._after = builder.before, builder.after
        self.graph_layers = nn.ModuleList(builder.layers)

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are those of the graph."""

    def get_input_embeddings(self) -> Any:
        """A graph has no module of embeddings."""
        return None

    get_output_embeddings = get_input_embeddings

    def compute(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of the graph, from its inputs, by name."""
        shared = self._shared
        shared.clear()
        for name, number in self._inputs.items():
            value = inputs[name]
            shared[number] = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        try:
            execute(self._before, shared, {})
            computed: dict[int, Tensor] = {}
            layers: Any = self.graph_layers  # each a `GraphLayer`
            for layer in layers:
                # What replays the values of a later layer in place of this one leaves it without operands.
                values = layer(*(computed.get(number) for number in layer.operands))
                computed = dict(zip(values.numbers, values, strict=True))
            execute(self._after, computed, shared)
            return {
                name: operand.value if isinstance(operand, Weight) else {**shared, **computed}[operand]
                for name, operand in self._results.items()
                if operand is not None
            }
        finally:
            shared.clear()

    def answer(self, inputs: Mapping[str, Tensor], labels: Tensor | None) -> ModelOutput:
        """The outputs, and, where there are labels, the loss of the logits, or else of the first output of floats."""
        outputs = self.compute(inputs)
        if labels is not None:
            floats = (output for output in outputs.values() if output.is_floating_point())
            scored = outputs[_LOGITS] if _LOGITS in outputs else next(floats)
            return ModelOutput({"loss": self._loss(scored, labels), **outputs})
        if all(name in inputs for name in _SPANS):
            losses = [nn.functional.cross_entropy(outputs[name], inputs[label]) for label, name in _SPANS.items()]
            return ModelOutput({"loss": torch.stack(losses).mean(), **outputs})
        return ModelOutput(outputs)

    def _loss(self, output: Tensor, labels: Tensor) -> Tensor:
        kind = answer_kind(self.config)
        if kind is AnswerKind.NUMBERS or (labels.is_floating_point() and kind is AnswerKind.CLASS):
            return nn.functional.mse_loss(output.reshape(labels.shape), labels.to(output))
        if kind is AnswerKind.CLASSES:
            return nn.functional.binary_cross_entropy_with_logits(output, labels.to(output))
        return nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())


class _Input(inspect.Parameter):
    """A parameter for an input, whose name need not be an identifier, e.g. `input.1`."""

    def __init__(self, name: str) -> None:
        super().__init__("input", inspect.Parameter.KEYWORD_ONLY)
        self._name = name


class _Builder:
    """Makes the modules and operations of a network from a graph."""

    def __init__(self, network: GraphNetwork, program: Program) -> None:
        self._network, self._program = network, program
        self.weights: dict[str, Weight] = {}
        self.tables: list[Weight] = []
        self.shared: dict[int, Tensor] = {}
        self._numbers: dict[ir.Value, int] = {}
        self._linears: dict[tuple[Hashable, bool, ir.Value | None], nn.Linear] = {}
        self.paths: dict[str, nn.Linear] = {}
        self._model = fuse(program.model)
        widen(self._model)
        graph = self._model.graph
        division = Division(graph)
        self._parameters, self._used = division.parameters, division.uses
        for linear in division.linears:  # groups first: their paths are names in plans
            if (linear.weight.name or "") in program.paths:
                self._module_of(linear)
        self.before = [self._operation(operator) for operator in division.before]
        self.inputs = {value.name or "": self._number(value) for value in graph.inputs if not value.is_initializer()}
        *layers, last = division.layers
        self.layers = [
            GraphLayer(self._operations(layer), self.shared, *map(self._numbers_of, (layer.operands, layer.results)))
            for layer in layers
        ]
        self.after = self._operations(last)
        self.outputs: dict[str, Operand] = {value.name or "": self._operand(value) for value in graph.outputs}

    def _number(self, value: ir.Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _numbers_of(self, values: Iterable[ir.Value]) -> tuple[int, ...]:
        return tuple(map(self._number, values))

    def _operand(self, value: ir.Value | None) -> Operand:
        if value is None:
            return None
        return self._weight(value) if value.is_initializer() else self._number(value)

    def _weight(self, value: ir.Value) -> Weight:
        name = value.name or ""
        if name not in self.weights:
            constants, stored = self._network.constants, _content(value)
            attribute = _attribute(name, constants)
            if value in self._parameters:
                constants.register_parameter(attribute, nn.Parameter(stored))
            else:
                constants.register_buffer(attribute, stored)
            self.weights[name] = Weight(constants, attribute)
        return self.weights[name]

    def _operations(self, layer: Layer) -> list[Operation]:
        """The operations of a layer, each with the values that are not read any more after it."""
        operations = []
        for operator, unused in zip(layer.operators, layer.unused, strict=True):
            operation = self._operation(operator)
            if operator.adds_activations:
                self._network.sums[str(len(self._network.sums))] = module = nn.Identity()
                operation.run = partial(_observed_sum, operation.run, module)
            operation.drops = self._numbers_of(unused)
            operations.append(operation)
        return operations

    def _operation(self, operator: Operator) -> Operation:
        node, linear = operator.node, operator.linear
        if linear is not None:
            run: Execute = partial(_run_linear, self._module_of(linear))
        else:
            domain = "" if node.domain == "ai.onnx" else node.domain
            run = executor(node, node.version or self._model.opset_imports.get(domain, 1))
        operands = tuple(self._operand(value) for value in operator.reads)
        if node.op_type == "Gather" and isinstance(operands[0], Weight):
            self.tables.append(operands[0])
        return Operation(run, operands, self._numbers_of(node.outputs), f"{node.op_type} {node.name}")

    def _module_of(self, linear: GraphLinear) -> nn.Linear:
        """The module of a matmul; matmuls with the same weight and bias share it, and the calls of one module."""
        name = linear.weight.name or ""
        path = self._program.paths.get(name)
        key = (linear.weight, linear.is_transposed, linear.bias)
        if path in self.paths and key not in self._linears:  # the weight is a copy of that of another call
            module = self._linears[key] = self.paths[path]
            self.weights.setdefault(name, Weight(module, "weight", linear.is_transposed))
            if linear.bias is not None and module.bias is not None:
                self.weights.setdefault(linear.bias.name or "", Weight(module, "bias"))
        if key not in self._linears:
            known = self.weights.get(name)
            module = nn.Linear(1, 1, bias=linear.bias is not None, device="meta")
            if known is not None and known.is_transposed == linear.is_transposed:
                module.weight = getattr(known.owner, known.name)  # tied weights
            else:
                stored = _content(linear.weight)
                module.weight = nn.Parameter(stored.T.contiguous() if linear.is_transposed else stored)
            module.out_features, module.in_features = module.weight.shape
            if linear.bias is not None:
                bias = self._weight(linear.bias) if self._used[linear.bias] else None
                module.bias = nn.Parameter(_content(linear.bias)) if bias is None else getattr(bias.owner, bias.name)
                self.weights.setdefault(linear.bias.name or "", Weight(module, "bias"))
            _attach(self._network, path or name.removesuffix(".weight").strip(".") or "linear", module)
            if path is not None:
                self.paths[path] = module
            self.weights.setdefault(name, Weight(module, "weight", linear.is_transposed))
            self._linears[key] = module
        return self._linears[key]


class NetworkConfig(PretrainedConfig):
    """The entries of a `GraphConfig` as a configuration of transformers."""

    model_type = "onnx"


def network_of(
    program: Program, config: GraphConfig, base: type[GraphNetwork] = GraphNetwork, **options: Any
) -> GraphNetwork:
    """The network of a graph, in evaluation mode.

    Its class, made with further `options`, is `base` with a `forward` whose parameters are the inputs of the graph.

    Raises:
        InputError: the graph has an operator that is not supported.
    """
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    parameters += [_Input(name) for name in program.inputs]
    parameters.append(inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None))

    def forward(self: GraphNetwork, labels: Tensor | None = None, **inputs: Tensor) -> ModelOutput:
        return self.answer(inputs, labels)

    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    network: GraphNetwork = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})(
        NetworkConfig(**config.to_dict()), program, **options
    )
    return network.eval()


def _content(value: ir.Value) -> Tensor:
    assert value.const_value is not None
    return tensor_of(value.const_value).clone()  # the graph keeps its own


def _run_linear(module: nn.Linear, operands: Sequence[Tensor | None]) -> Outputs:
    return (module(operands[0]),)


def _observed_sum(run: Execute, module: nn.Identity, operands: Sequence[Tensor | None]) -> Outputs:
    """A sum, which passes through a module where it can be observed."""
    return (module(run(operands)[0]),)


def _attribute(name: str, module: nn.Module) -> str:
    """A name for a parameter of a module, which has no dots and is not taken."""
    attribute = name.replace(".", "_") or "constant"
    while hasattr(module, attribute):
        attribute += "_"
    return attribute


def _attach(network: nn.Module, path: str, module: nn.Module) -> None:
    """Add a module at a path, or at a similar one if the path is taken."""
    *parents, leaf = [part for part in path.split(".") if part]
    owner = network
    for part in parents:
        while isinstance(getattr(owner, part, None), nn.Linear) or (
            hasattr(owner, part) and not isinstance(getattr(owner, part), nn.Module)
        ):
            part += "_"
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    while hasattr(owner, leaf):
        leaf += "_"
    owner.add_module(leaf, module)
