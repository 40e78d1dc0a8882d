"""An ONNX file as the model of a run: its weights are arrays, and ONNX Runtime runs it."""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import onnx_ir as ir

import graph_passes
from compressor.errors import CompressorError, ErrorCode, InputError
from compressor.graph.config import GraphConfig
from compressor.graph.program import CACHED_BRANCH, Program, widen
from compressor.model_folder.access import ModelAccess
from compressor.model_folder.feeds import Draw, cannot_make, text_feeds
from compressor.model_folder.folder import ModelFolder
from compressor.model_folder.processor import IMAGES
from compressor.processes import on_accelerator
from compressor.targets.base import Feeds
from compressor.targets.caches import PADDING, positions
from compressor.targets.example_rows import ExampleRows, record_example_rows
from compressor.targets.graph_facts import graph_digest
from compressor.targets.onnxruntime.ort_session import runner, session_settings, unoptimized_runner
from compressor.units import PrunableGroup, Site
from compressor.units.prunable import Attention, LinearWeights, known_groups, nothing_to_remove
from graph_passes import Plan
from graph_passes.flow.caches import read_caches
from graph_passes.passes.insert_gates import FINGERPRINT
from graph_passes.passes.name_decoding_axes import IDS, MASK, POSITIONS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from compressor.graph.network import GraphNetwork

Outputs = dict[str, np.ndarray]
_TOKENS, _TYPES = "input_ids", "token_type_ids"


class GraphFile(ModelAccess):
    """The graph of a file, as `ModelFolder.model`.

    It knows its groups (`KnowsGroups`) and its signature (`HasSignature`), and runs on arrays (`RunsArrays`). Methods
    with gradients convert it into a PyTorch model (`network`), which has the weights from then on.

    Args:
        program: the graph.
        config: its configuration, for tasks.

    Attributes:
        input_specs: type and axes of each input by name.
        output_specs: type and axes of each output by name.
    """

    file: Path
    exporter: ClassVar[str] = "compressor.engines.export_file"
    cached_exporter: ClassVar[str] = "compressor.generation.export_file"
    changes_with_length: ClassVar[bool] = False

    def __init__(self, program: Program, config: GraphConfig) -> None:
        self.config, self._program = config, program
        self.file, self.precision, self.search_outcome = program.file, program.precision, program.outcome
        self.input_specs, self.output_specs = program.signature
        lengths = {
            spec.shape[1] for name, spec in self.input_specs.items() if name.endswith(_TOKENS) and spec.shape[1:]
        }
        self.text_length = lengths.pop() if len(lengths) == 1 else None
        self.sites, self.obstacles = program.sites, program.obstacles
        self.group_names = [group.linear for group in program.groups]
        self.feed_forwards = {group.linear: group.units for group in program.groups if group.type == "neurons"}
        trained = {linear.weight for linear in program.division.linears} | program.division.parameters
        self._names = [name for name, value in program.graph.initializers.items() if value in trained]
        self._changed: dict[str, np.ndarray] = {}
        self._network: GraphNetwork | None = None
        self._forward: Callable[[Feeds], Outputs] | None = None  # while there is no network that may learn

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(self.input_specs)

    @property
    def generates(self) -> bool:  # type: ignore[override]
        return self._program.cached is not None

    @property
    def pads_left(self) -> bool:
        """Whether the graph of a decoder with caches reads texts with padding on the left."""
        return self._program.cached is None or PADDING not in self._program.cached.metadata_props

    @property
    def network(self) -> PreTrainedModel:
        """The graph as a model of PyTorch, which has its weights from now on.

        Raises:
            InputError: the graph has an operator that is not supported.
        """
        if self._network is None:
            network = self._make_network()
            changed, self._changed, self._forward = self._changed, {}, None
            self._network = network
            self.load_state(changed)
        vars(self._network.config).update(self.config.to_dict())  # which tasks may have completed since
        return self._network

    def _make_network(self) -> GraphNetwork:
        from compressor.graph.network import network_of  # which needs PyTorch

        try:
            return network_of(self._program, self.config)
        except InputError as error:
            if "op_type" not in error.details:
                raise
            raise InputError(f"{self.file}: {error}", code=error.code, path=self.file, **error.details) from error

    @property
    def table_size(self) -> int | None:
        return next(iter(self._program.tables.values()), None)

    def make_feeds(self, folder: ModelFolder, batch: int, seq: int, seed: int) -> dict[str, np.ndarray]:
        rng, feeds = np.random.default_rng(seed), dict[str, np.ndarray]()
        if _TOKENS in self.input_specs:
            draw: Draw = lambda limit, rows, positions: rng.integers(0, limit, (rows, positions))  # noqa: E731
            feeds = text_feeds(folder, batch, seq, self.inputs, draw)
            if _TYPES in self.input_specs and _TYPES not in feeds:  # of a tokenizer without them
                feeds[_TYPES] = np.zeros_like(feeds[_TOKENS])
        if IMAGES in self.input_specs and folder.image_size is not None:
            feeds[IMAGES] = rng.standard_normal((batch, *folder.image_size), np.float32)
        missing = next((name for name in self.inputs if name not in feeds), None)
        if missing is not None:
            raise cannot_make(folder, f"needs {missing}, which cannot be generated", input=missing)
        return {name: np.asarray(feeds[name], spec.dtype) for name, spec in self.input_specs.items()}

    def run(self, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The outputs by name, `[batch, ...]` each, of the inputs by name.

        Raises:
            InputError: the graph does not run on these inputs.
        """
        if self._network is not None:
            return forward_of(self._network, feeds)
        self._forward = self._forward or self.forward()
        return self._forward(feeds)

    @property
    def _runs_network(self) -> bool:
        """Whether PyTorch runs the model, and not ONNX Runtime on the CPU."""
        return self._network is not None and self._network.device.type != "cpu"

    def forward(self) -> Callable[[Feeds], Outputs]:
        if self._runs_network:
            return partial(forward_of, self._network)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            graph_passes.save(self.wide(), path)
            session = runner(path, session_settings("cpu", None))

        def run(feeds: Feeds) -> Outputs:
            try:
                return session(self.wide_feeds(feeds))
            except InputError as error:
                if error.code is not ErrorCode.RUNTIME_FAILED:
                    raise
                shapes = {name: list(array.shape) for name, array in feeds.items()}
                text = (
                    f"{self.file}: the graph does not run on inputs of these sizes: {shapes} ({error}); give rows of "
                    f"sizes that the graph takes, e.g. shorter rows, or export the graph again if it runs on no rows"
                )
                raise InputError(text, code=ErrorCode.TENSOR_MISMATCH, path=self.file, shapes=shapes) from error

        return run

    def snapshot(self) -> Callable[[Feeds], Outputs]:
        return partial(forward_of, copy.deepcopy(self.network).eval()) if self._runs_network else self.forward()

    def state(self) -> dict[str, np.ndarray]:
        return {name: self._values(name) for name in self._names}

    def load_state(self, state: Mapping[str, np.ndarray]) -> None:
        for name, values in state.items():
            self.write(name, values)

    def fingerprint(self) -> str:
        """`sha256:...` of the operators and of every initializer as float32; a configuration beside the file does not
        count."""
        digest = hashlib.sha256(self._program.digest.encode())
        for name in sorted(self._program.graph.initializers):
            values = self._values(name)
            digest.update(f"{name} {values.shape}".encode())
            digest.update(np.ascontiguousarray(values).data)
        return f"sha256:{digest.hexdigest()}"

    @property
    def structure(self) -> list[Any]:
        return [type(self).__name__, self._program.digest]

    def linear(self, path: str) -> LinearWeights:
        linear = self._program.linears[path][0]
        weight = self._values(linear.weight.name or "")
        bias = None if linear.bias is None else self._values(linear.bias.name or "").astype(np.float64)
        return LinearWeights((weight.T if linear.is_transposed else weight).copy(), bias)

    def set_linear(self, path: str, weights: LinearWeights) -> None:
        for linear in self._program.linears[path]:  # an exporter may store the weight once for each call
            self.write(linear.weight.name or "", weights.weight.T if linear.is_transposed else weights.weight)
            if linear.bias is not None and weights.bias is not None:
                self.write(linear.bias.name or "", weights.bias)

    def _values(self, name: str) -> np.ndarray:
        """The present values of an initializer; floats of less than 32 bits as float32."""
        if self._network is not None and (weight := self._network.weights.get(name)) is not None:
            values: np.ndarray = weight.value.detach().cpu().numpy()
            return values
        return self._changed[name] if name in self._changed else self._original(name)

    def _original(self, name: str) -> np.ndarray:
        tensor = self._program.graph.initializers[name].const_value
        assert tensor is not None
        values = tensor.numpy()
        is_narrow = tensor.dtype.is_floating_point() and values.dtype.itemsize < 4
        return values.astype(np.float32) if is_narrow else values

    def write(self, name: str, values: np.ndarray) -> None:
        """Give an initializer other values, in its layout."""
        if self._network is None:
            self._changed[name] = np.array(values, self._original(name).dtype)
            self._forward = None
        elif (weight := self._network.weights.get(name)) is not None:
            import torch

            with torch.no_grad():
                weight.value.copy_(torch.from_numpy(np.array(values)))

    def groups(self, feeds: Feeds, attention: Attention, group_by: Any = "kv") -> list[PrunableGroup]:
        return known_groups(self, group_by)

    def attentions(self, feeds: Feeds, attention: Attention) -> list[Site]:
        return list(self.sites)

    def no_heads_error(self) -> CompressorError:
        return nothing_to_remove(self)

    def on_accelerator(self, copies: int = 2) -> AbstractContextManager[None]:
        if self._network is None:  # ONNX Runtime runs the graph on the CPU
            return nullcontext()
        return on_accelerator(self._network, copies)

    def write_gated(self, plan: Plan, path: Path, example: ExampleRows | None = None) -> None:
        """Write the graph with the gates of a plan, as `export_reference` writes that of a PyTorch model.

        If the graph stores no examples, inputs of trials and timing are random.

        Raises:
            PlanError: the plan has other groups than the graph.
            OSError: the disk is full or the folder cannot be written; no file remains.
        """
        _write_gated(self.with_weights(), plan, path, example)

    def write_cached(self, plan: Plan, path: Path) -> None:
        """Write the graph of a decoder with its caches and with the gates of a plan; see `write_gated`."""
        _write_gated(self.with_weights(with_caches=True), plan, path)

    @contextmanager
    def reference(self, plan: Plan) -> Iterator[Callable[[Feeds], Outputs]]:
        """Runs the file in ONNX Runtime, without its optimizations; that of a decoder with empty caches.

        The file has the present weights, with the gates of the plan multiplied into them: the reference of a proof
        shares neither the inserted gates nor the operators in PyTorch with the proven graph. Where the file lacks an
        initializer that changes, such as the copy of a bias that it stores once, the normalized graph takes its place.
        """
        model = self.with_weights(plan, with_caches=self.generates)
        source = self._source(with_caches=self.generates).graph.initializers
        changed = {
            name: value.const_value
            for name, value in model.graph.initializers.items()
            if value.const_value is not source[name].const_value
        }
        with tempfile.TemporaryDirectory() as folder:
            path = self.file
            if changed:
                path, whole = Path(folder) / "model.onnx", graph_passes.load(self.file)
                is_stored = changed.keys() <= whole.graph.initializers.keys()
                for name, tensor in changed.items() if is_stored else ():
                    whole.graph.initializers[name].const_value = tensor
                graph_passes.save(whole if is_stored else model, path)
            run = unoptimized_runner(path)
            yield partial(_run_empty, model, run) if self.generates else run

    def _source(self, *, with_caches: bool) -> ir.Model:
        """The normalized graph of the file; that of a decoder with its caches or for whole texts."""
        source = self._program.cached if with_caches else self._program.model
        assert source is not None
        return source

    def with_weights(self, gates: Plan | None = None, *, with_caches: bool = False) -> ir.Model:
        """The normalized graph with the weights that the model has now.

        Args:
            gates: a plan whose gates are multiplied into the weights of the matmuls that its groups end in; None: the
                weights stay as they are.
            with_caches: whether it is the graph of a decoder with its caches.

        Raises:
            InputError: the file has changed since it was read.
        """
        if graph_digest(self.file) != self._program.content:
            text = f"{self.file}: the file has changed since this run read it; run the command again"
            raise InputError(text, code=ErrorCode.FILE_MISMATCH, path=self.file)
        model = self._source(with_caches=with_caches).clone()
        factors = {} if gates is None else self._factors(gates)
        for name in self._names:
            value = model.graph.initializers[name]
            assert value.const_value is not None
            content = self._values(name)
            if (factor := factors.get(name)) is not None:
                content = content * factor
            content = content.astype(value.const_value.dtype.numpy())
            if not np.array_equal(content, value.const_value.numpy()):
                value.const_value = ir.Tensor(np.ascontiguousarray(content), dtype=value.const_value.dtype, name=name)
        return model

    def wide(self) -> ir.Model:
        """The graph with its present weights, in float32 where it computes in half precision."""
        model = self.with_weights()
        if self.precision != "fp32":
            widen(model)
        return model

    def wide_feeds(self, feeds: Feeds) -> dict[str, np.ndarray]:
        """The inputs of the graph that `wide` returns."""
        types = {name: spec.dtype for name, spec in self.input_specs.items()}
        halves = self.precision != "fp32"
        wide = {
            name: np.dtype(np.float32) if halves and dtype == np.float16 else dtype for name, dtype in types.items()
        }
        return {name: np.asarray(feeds[name], dtype) for name, dtype in wide.items() if name in feeds}

    def _factors(self, plan: Plan) -> dict[str, np.ndarray]:
        """Initializer of the weight that a group ends in -> the gate of each of its inputs, for changed groups."""
        factors = {}
        for group in (group for group in plan.groups if group.gate != (1.0,) * group.units):
            gate = np.repeat(np.array(group.gate), group.width)
            for linear in self._program.linears[group.name]:
                factors[linear.weight.name or ""] = gate[:, None] if linear.is_transposed else gate
        return factors


def _write_gated(model: ir.Model, plan: Plan, path: Path, example: ExampleRows | None = None) -> None:
    """Write a graph, which is changed, with the gates of a plan; see `GraphFile.write_gated`."""
    graph_passes.gate_groups(model, plan)
    if example is not None:
        record_example_rows(model, example)
    if plan.model is not None:
        model.metadata_props[FINGERPRINT] = plan.model
    graph_passes.save(model, path)


def _run_empty(model: ir.Model, run: Callable[[Feeds], Outputs], feeds: Feeds) -> Outputs:
    """The outputs of a decoder on whole texts `[text, position]` and empty caches, without the new caches."""
    caches, ids = read_caches(model), feeds[IDS]
    counted = positions(feeds.get(MASK, np.ones_like(ids)))
    completed = {**feeds, POSITIONS: counted, CACHED_BRANCH: np.zeros(1, np.bool_)}
    for value in model.graph.inputs:
        name, dtype = value.name or "", np.dtype(np.int64 if value.dtype is None else value.dtype.numpy())
        if value in caches:
            sizes = [size if isinstance(size, int) else 0 for size in value.shape or ()]
            completed[name] = np.empty((len(ids), *sizes[1:]), dtype)
        elif name in completed:
            completed[name] = np.asarray(completed[name], dtype)
    returned = {output.name for output in caches.values() if output is not None}
    return {name: output for name, output in run(completed).items() if name not in returned}


def forward_of(network: Any, feeds: Feeds) -> Outputs:
    """Run the network of a graph where it is."""
    import torch

    with torch.no_grad():
        tensors = {name: torch.from_numpy(np.asarray(feeds[name])) for name in network.input_specs if name in feeds}
        outputs = network(**{name: tensor.to(network.device) for name, tensor in tensors.items()})
    return {name: value.cpu().numpy() for name, value in outputs.items()}
