"""An ONNX graph as a model of PyTorch: its nodes run one by one, and its weights are parameters.

What reads the modules of a model works on a graph too, because the network has the modules that it expects:

- every matmul with a weight of two axes is an `nn.Linear`, whose path is the name of the group that ends in it;
- the nodes between two sums of the residual stream are one layer of a module list;
- every sum of two activations passes through an `nn.Identity`, where it can be observed.

Nodes that depend on inputs and constants alone, such as those of an attention mask, run before the first layer.
"""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

import graph_passes
from compressor.answers import AnswerKind, answer_kind
from compressor.errors import ErrorCode, InputError
from compressor.graph.layers import Division, GraphLinear, Layer, Operator
from compressor.graph.operators import executor, tensor_of
from compressor.graph.program import Program
from compressor.silence_libraries import one_line
from compressor.targets.base import Feeds
from compressor.targets.example_rows import ExampleRows, record_example_rows
from compressor.targets.graph_facts import graph_digest
from compressor.targets.onnxruntime.ort_session import unoptimized_runner
from compressor.units import Site
from compressor.units.hook import unwrap
from graph_passes import FoundGroup, Plan, Refusal, RefusalCode
from graph_passes.errors import listed
from graph_passes.passes import Normalize
from graph_passes.passes.insert_gates import FINGERPRINT

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
    def is_parameter(self) -> bool:
        """Whether it is trained."""
        return isinstance(getattr(self.owner, self.name), nn.Parameter)

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
                f" ({one_line(error)}); give rows of sizes that the graph takes, e.g. shorter ones"
            )
            raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, node=operation.name, shapes=shapes) from error
        for number, value in zip(operation.results, outputs, strict=False):
            if value is not None:
                computed[number] = value
        for number in operation.drops:
            computed.pop(number, None)


def _read(operand: Operand, computed: Mapping[int, Tensor], shared: Mapping[int, Tensor]) -> Tensor | None:
    """The value of an operand."""
    if isinstance(operand, int):
        return computed[operand] if operand in computed else shared[operand]
    return None if operand is None else operand.value


class GraphNetwork(PreTrainedModel):
    """A graph as a model of PyTorch; `network_of` makes one, with a `forward` that names the inputs of the graph.

    It knows its groups (`KnowsGroups`) and its signature (`HasSignature`).

    Attributes:
        graph_layers: the layers between sums of the residual stream, in order.
        weights: initializer of the graph -> its parameter or buffer.
        precision: the precision in which the file stores its matrices; the network computes in float32.
    """

    main_input_name = "input_ids"
    _supports_sdpa = True

    def __init__(self, config: PretrainedConfig, program: Program) -> None:
        PreTrainedModel.__init__(self, config)  # not that of a further base, which makes modules of its own
        self.file, self.search_outcome = program.file, program.search.outcome
        self._content, self._sizes, self.precision = program.content, program.sizes, program.precision
        self.input_specs, self.output_specs = program.signature
        if self.main_input_name not in program.inputs:
            self.main_input_name = program.inputs[0]
        self.constants, self.sums = nn.Module(), nn.ModuleDict()  # what belongs to no linear
        builder = _Builder(self, program)
        self.weights = builder.weights
        self._shared = builder.shared
        self._inputs, self._results = builder.inputs, builder.outputs
        self._before, self._after = builder.before, builder.after
        self.graph_layers = nn.ModuleList(builder.layers)
        groups = [group for group in program.search.groups if group.linear in builder.paths]
        self.group_names = [group.linear for group in groups]
        self.sites = tuple(
            Site(group.linear, group.kind, group.units, group.kv_heads, group.width)
            for group in groups
            if group.kind is not None and group.kv_heads is not None
        )
        self.feed_forwards = {group.linear: group.units for group in groups if group.type == "neurons"}
        self.obstacles = (
            *program.search.obstacles,
            *(_no_linear(group) for group in program.search.groups if group not in groups),
        )

    def _init_weights(self, module: nn.Module) -> None:
        """Weights are those of the graph."""

    def get_input_embeddings(self) -> Any:
        """A graph has no module of embeddings."""
        return None

    get_output_embeddings = get_input_embeddings

    @property
    def initializers(self) -> dict[str, Tensor]:
        """The weights by the names of the graph, in its layouts."""
        return {name: weight.value for name, weight in self.weights.items() if weight.is_parameter}

    def _read_graph(self) -> ir.Model:
        """The graph as its file has it, normalized, so that initializers have the names of `weights`."""
        if graph_digest(self.file) != self._content:
            text = f"{self.file}: the file has changed since this run read it; run the command again"
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=self.file)
        model = graph_passes.load(self.file)
        model.metadata_props.pop(FINGERPRINT, None)  # of the whole model, where a run wrote the file
        Normalize()(model)
        graph_passes.record_example_sizes(model, self._sizes)
        return model

    def write_gated(self, plan: Plan, path: Path, example: ExampleRows | None = None) -> None:
        """Write the graph with the gates of a plan, as `export_reference` writes that of a PyTorch model.

        Without examples that the graph carries, inputs of trials and timing are random.

        Raises:
            PlanError: the plan has other groups than the graph.
            OSError: the disk is full or the folder cannot be written; no file remains.
        """
        model = self.with_weights()
        graph_passes.gate_groups(model, plan)
        if example is not None:
            record_example_rows(model, example)
        if plan.model is not None:
            model.metadata_props[FINGERPRINT] = plan.model
        graph_passes.save(model, path)

    def reference_run(self, plan: Plan) -> Callable[[Feeds], dict[str, np.ndarray]]:
        """Runs the file in ONNX Runtime, without its optimizations and without the interpreter of the network.

        The weights are those of the network now, and the gates of the plan are multiplied into them: the reference of
        a proof shares neither the inserted gates nor the operators in torch with what is proven.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            graph_passes.save(self.with_weights(plan), path)
            return unoptimized_runner(path)

    def with_weights(self, gates: Plan | None = None) -> ir.Model:
        """The graph as its file has it, normalized, with the weights that the network has now.

        Args:
            gates: a plan whose gates are multiplied into the weights of the matmuls that its groups end in; None: the
                weights stay as they are.

        Raises:
            InputError: the file has changed since it was read.
        """
        model = self._read_graph()
        factors = {} if gates is None else self._factors(gates)
        for name, stored in self.initializers.items():
            value = model.graph.initializers[name]
            assert value.const_value is not None
            content = stored.detach().cpu().numpy()
            if (factor := factors.get(name)) is not None:
                content = content * (factor[:, None] if self.weights[name].is_transposed else factor)
            content = content.astype(value.const_value.dtype.numpy())
            if not np.array_equal(content, value.const_value.numpy()):
                value.const_value = ir.Tensor(content, dtype=value.const_value.dtype, name=name)
        return model

    def _factors(self, plan: Plan) -> dict[str, np.ndarray]:
        """Initializer of the weight that a group ends in -> the gate of each of its inputs, for changed groups."""
        changed = [group for group in plan.groups if group.gate != (1.0,) * group.units]
        gates = {self.get_submodule(group.name): np.repeat(np.array(group.gate), group.width) for group in changed}
        return {
            name: gates[weight.owner]
            for name, weight in self.weights.items()
            if weight.name == "weight" and weight.owner in gates
        }

    def compute(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The outputs of the graph, from its inputs, by name."""
        shared = self._shared
        shared.clear()
        for name, number in self._inputs.items():
            value = inputs[name]
            shared[number] = value.float() if value.is_floating_point() else value
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


def _no_linear(group: FoundGroup) -> Refusal:
    node = group.products[0]
    why = "ends units, and is no matmul of an activation with a matrix, as a network needs"
    return Refusal(frozenset((group.linear,)), node.op_type, node.name or "", why, RefusalCode.NO_RULE)


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
        self.shared: dict[int, Tensor] = {}
        self._numbers: dict[ir.Value, int] = {}
        self._linears: dict[tuple[Hashable, bool, ir.Value | None], nn.Linear] = {}
        self.paths: dict[str, nn.Linear] = {}
        division = Division(program.graph)
        self._parameters, self._used = division.parameters, division.uses
        for linear in division.linears:  # groups first: their paths are names in plans
            if (linear.weight.name or "") in program.paths:
                self._module_of(linear)
        self.before = [self._operation(operator) for operator in division.before]
        self.inputs = {
            value.name or "": self._number(value) for value in program.graph.inputs if not value.is_initializer()
        }
        *layers, last = division.layers
        self.layers = [
            GraphLayer(self._operations(layer), self.shared, *map(self._numbers_of, (layer.operands, layer.results)))
            for layer in layers
        ]
        self.after = self._operations(last)
        self.outputs: dict[str, Operand] = {value.name or "": self._operand(value) for value in program.graph.outputs}

    def _number(self, value: ir.Value) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _numbers_of(self, values: Iterable[ir.Value]) -> tuple[int, ...]:
        return tuple(map(self._number, values))

    def _operand(self, value: ir.Value | None) -> Operand:
        if value is None:
            return None
        return self._weight(value) if value.is_initializer() else self._number(value)

    def _weight(self, value: ir.Value) -> Weight:
        """The parameter or buffer of an initializer."""
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
            run = executor(node, self._program.opset(node))
        operands = tuple(self._operand(value) for value in operator.reads)
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


def network_of(
    program: Program, config: PretrainedConfig, base: type[GraphNetwork] = GraphNetwork, **options: Any
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
        config, program, **options
    )
    return network.eval()


def file_model(model: nn.Module) -> GraphNetwork | None:
    """The model inside the wrappers of training, if it was loaded from an ONNX file; else None."""
    bare: Any = unwrap(model)
    return bare if isinstance(bare, GraphNetwork) else None


def _content(value: ir.Value) -> Tensor:
    """The values of an initializer; floating-point numbers of less than 32 bits as float32."""
    assert value.const_value is not None
    tensor = tensor_of(value.const_value)
    return tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor


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
