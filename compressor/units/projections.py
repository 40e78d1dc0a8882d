"""Heads outside transformers' attention interface, gated at the module that reads them: the output projection.

Where a family computes attention in modules of its own, there is no call to intercept. Its heads are the input of the
projection that mixes them. The site has the name of that projection, as neurons have the name of the linear that reads
them, and its gate multiplies that input. Where the projection is a weight of the attention module itself, the site has
the name of that module.

Both are found without names of families or modules. One forward with gradients records how every tensor is computed. A
projection (a linear, a convolution, or a weight that `torch.einsum` contracts) reads heads if its input

1. comes from a product with the probabilities of a softmax, without another weight between them;
2. consists of consecutive chunks of the width of that product, each computed from probabilities of its own: no
   probability has a derivative in two chunks;
3. is linear in the probabilities: the sum of probabilities times their derivatives is the sum of the chunk (Euler's
   theorem on homogeneous functions), so nothing else is added to the heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from compressor.errors import ErrorCode, SiteRefusedError
from compressor.units.dependencies import hidden_from_modes
from compressor.units.hook import OutputHook, family, unwrap
from compressor.units.layers import gradients_of, removed_afterwards
from compressor.units.prunable import Site
from graph_passes import Kind, SitePlan

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d)
_attend = F.multi_head_attention_forward
_SIGNATURE = inspect.signature(_attend)
_models: list[nn.Module] = []
"""The models of the contexts that are entered."""
_projecting: list[Tensor] = []
"""The weights of output projections of calls that are running."""


def is_projection(module: nn.Module) -> bool:
    """Whether a module has a weight of its own and no parts: a linear, a convolution, or a subclass of either.

    Modules that call the attention interface are never of this kind: they have projections as parts, or no weight.
    """
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() > 1 and not any(module.children())


def channels_last(module: nn.Module, x: Tensor) -> Tensor:
    """The input of a projection with the axis that it sums over as the last one."""
    return x.movedim(1, -1) if isinstance(module, _CONVOLUTIONS) else x


@contextmanager
def hooked_projections(model: nn.Module, sites: Iterable[Site | SitePlan], on_output: OutputHook) -> Iterator[None]:
    """Pass the heads that projections read through `on_output`; sites of the attention interface are left out.

    Args:
        model: a transformers model, bare or wrapped for training.
        sites: sites of the model, or of its plan.
        on_output: called with a site's name and its heads `[batch, position, head, head_dim]`; returns the heads to
            continue with. Rows may be split into windows, or tokens flattened row by row: the first axis is a multiple
            of the rows of the batch. Sites of a plan do not record where rows are; their heads may be
            `[position, row, head, head_dim]`.
    """
    modules = dict(unwrap(model).named_modules())
    contracting: dict[str, Site | SitePlan] = {}

    def change(name: str, heads: Tensor) -> Tensor:
        return _changed_heads(contracting[name], on_output, heads)

    with ExitStack() as undo:
        undo.enter_context(called_projections(unwrap(model)))
        for site in sites:
            module = modules.get(site.name)
            if module is not None and is_projection(module):
                undo.enter_context(module.register_forward_pre_hook(partial(_change_input, site, on_output)))
            elif module is not None and contracts_heads(module, site.heads, site.head_dim):
                contracting[site.name] = site
        if contracting:
            undo.enter_context(HeadContractions({name: modules[name] for name in contracting}, change))
        yield


def _change_input(
    site: Site | SitePlan, on_output: OutputHook, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The arguments of a projection with its first one changed."""
    changed = _changed_heads(site, on_output, channels_last(module, args[0]))
    return (changed.movedim(-1, 1) if isinstance(module, _CONVOLUTIONS) else changed, *args[1:])


def _changed_heads(site: Site | SitePlan, on_output: OutputHook, x: Tensor) -> Tensor:
    """Heads `[..., head * head_dim]`, changed."""
    batch_axis = getattr(site, "batch_axis", 0)
    x = x.transpose(0, batch_axis) if batch_axis else x
    separate = x.unflatten(-1, (site.heads, -1))
    if separate.dim() != 4:
        rows = x.shape[0]  # an export records it as an axis, and len() as a constant
        separate = separate.reshape(rows, -1, *separate.shape[-2:])
    changed = on_output(site.name, separate).reshape(x.shape)
    return changed.transpose(0, batch_axis) if batch_axis else changed


def require_interface(model: nn.Module, sites: Iterable[Site | SitePlan], purpose: str) -> None:
    """Check that attention maps, which some purpose (the subject of the message) needs, are read at every site.

    Raises:
        SiteRefusedError: a site is outside transformers' attention interface.
    """
    bare = unwrap(model)
    modules = dict(bare.named_modules())
    for site in sites:
        module = modules.get(site.name)
        if module is not None and (is_projection(module) or contracts_heads(module, site.heads, site.head_dim)):
            text = (
                f"{family(bare)}: {purpose} need attention maps, and those of {site.name} are computed outside"
                " transformers' attention interface; prune heads instead"
            )
            raise SiteRefusedError(text, code=ErrorCode.SITE_REFUSED, family=family(bare), site=site.name)


class HeadContractions(TorchFunctionMode):
    """While entered, passes the heads that weights are contracted with through a function.

    A contraction `[..., head, head_dim]`, `[..., head, head_dim]` -> `[...]` of an activation and a parameter sums over
    the heads and their width, as an output projection does.

    Args:
        modules: name -> the module whose own parameters count.
        change: called with the name and the heads `[..., head * head_dim]`; returns the heads to continue with.
    """

    def __init__(self, modules: Mapping[str, nn.Module], change: Callable[[str, Tensor], Tensor]) -> None:
        super().__init__()
        self._modules, self._change = modules, change

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
            args = (args[0], *self._changed(args[0], list(args[1:])))
        return func(*args, **(kwargs or {}))

    def _changed(self, equation: str, factors: list[Tensor]) -> list[Tensor]:
        """The factors, the heads among them changed."""
        for position, weight in enumerate(factors):
            heads = factors[1 - position]
            if not _sums_heads(equation, 1 - position) or not _mixes(weight, *heads.shape[-2:]):
                continue
            for name, module in self._modules.items():
                if any(parameter is weight for parameter in module.parameters(recurse=False)):
                    factors[1 - position] = self._change(name, heads.flatten(-2)).reshape(heads.shape)
                    return factors
        return factors


def contracting_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules with parts that have a weight of three axes of their own, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if any(module.children()) and any(weight.dim() > 2 for weight in module.parameters(recurse=False))
    }


def contracts_heads(module: nn.Module, heads: int, head_dim: int) -> bool:
    """Whether a module has a weight of its own that can mix heads."""
    return any(_mixes(weight, heads, head_dim) for weight in module.parameters(recurse=False))


def _mixes(weight: Tensor, heads: int, head_dim: int) -> bool:
    """Whether a weight is `[outputs, head, head_dim]`; weights of single heads have heads first."""
    return weight.dim() == 3 and weight.shape[0] != heads and weight.shape[1:] == (heads, head_dim)


def _sums_heads(equation: str, position: int) -> bool:
    """Whether the last two axes of a factor, and no others, are summed over, in the order of the other factor."""
    factors, _, output = equation.replace(" ", "").partition("->")
    terms = factors.split(",")
    if len(terms) != 2 or not output or "." in equation:
        return False
    heads, weight = terms[position], terms[1 - position]
    summed = "".join(label for label in heads if label not in output)
    return len(summed) == 2 and heads.endswith(summed) and summed in weight


@contextmanager
def called_projections(model: nn.Module) -> Iterator[None]:
    """While entered, PyTorch's attention function calls the output projections of a model as modules.

    Their inputs are `[batch, position, head * head_dim]`, and hooks on them run. Modules of PyTorch do not take their
    fused path, which has no projection of its own; other models are affected by that alone. Contexts may be nested.
    Replicas of `nn.DataParallel` are other models, and a forward that gradient checkpointing repeats has to be repeated
    inside the context.
    """
    is_fused = torch.backends.mha.get_fastpath_enabled()
    _models.append(model)
    F.multi_head_attention_forward = _attend_by_modules
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        _models.remove(model)
        torch.backends.mha.set_fastpath_enabled(is_fused)
        if not _models:
            F.multi_head_attention_forward = _attend


def _attend_by_modules(*args: Any, **kwargs: Any) -> Any:
    """PyTorch's function, which finds its output projection under the name `linear`."""
    arguments = _SIGNATURE.bind(*args, **kwargs).arguments
    query, output_weight = arguments["query"], arguments["out_proj_weight"]
    projection = _owner(output_weight, arguments["out_proj_bias"])
    # Where torch records calls, the function passes itself to the recorder, which calls it again.
    if projection is None or any(weight is output_weight for weight in _projecting):
        return _attend(*args, **kwargs)
    sizes, linear = (query.shape[0], query.shape[1] if query.dim() == 3 else 1), F.linear

    def project(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if weight is not output_weight:
            return linear(input, weight, bias)
        F.linear = linear  # the module calls it
        by_row = projection(input.unflatten(0, sizes).transpose(0, 1))
        return by_row.transpose(0, 1).flatten(0, 1)

    F.linear = project
    _projecting.append(output_weight)
    try:
        return _attend(*args, **kwargs)
    finally:
        _projecting.pop()
        F.linear = linear


def _owner(weight: Tensor, bias: Tensor | None) -> nn.Linear | None:
    """The linear with these parameters. A parametrized weight is no parameter, and is not computed here."""
    for module in (module for model in dict.fromkeys(_models) for module in model.modules()):
        if isinstance(module, nn.Linear):
            parameters = dict(module.named_parameters(recurse=False))
            if parameters.get("weight") is weight and parameters.get("bias") is bias:
                return module
    return None


_PRODUCTS = ("Addmm", "Baddbmm", "Bmm", "Convolution", "Embedding", "Linear", "Mm")
"""Operations that read a weight or multiply two activations, as autograd names them."""
_SOFTMAXES = ("Softmax", "SafeSoftmax")
_TOLERANCE, _HALF_TOLERANCE = 1e-4, 1e-2
"""Largest difference, relative to the sum of magnitudes, at which two sums count as equal, and in half precision."""


@contextmanager
def observed_projections(
    model: nn.Module, on_heads: Callable[[Site], None], on_contraction: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Report the projections that read heads while the model runs, at their first call that does.

    Inside the context gradients are recorded, parameters require them, and fused attention is computed step by step.

    Args:
        on_heads: called with the heads that a projection reads; their key/value heads are those of its values.
        on_contraction: called with the module path of a weight that `torch.einsum` contracts, and with a copy of what
            it reads, which nothing else does.
    """
    seen: set[str] = set()

    def examine(name: str, x: Tensor) -> None:
        site = heads_in(name, x) if name not in seen else None
        if site is not None:
            seen.add(name)
            on_heads(site)

    def examine_contraction(name: str, x: Tensor) -> Tensor:
        examine(name, x)
        x = x.clone()
        on_contraction(name, x)
        return x

    def on_input(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            examine(name, channels_last(module, args[0]))

    projections = ((name, module) for name, module in model.named_modules() if is_projection(module))
    contracting = contracting_modules(model)
    with (
        removed_afterwards(module.register_forward_pre_hook(partial(on_input, name)) for name, module in projections),
        gradients_of((weight for weight in model.parameters() if weight.is_floating_point()), required=True),
        torch.enable_grad(),
        HeadContractions(contracting, examine_contraction) if contracting else nullcontext(),
        sdpa_kernel(SDPBackend.MATH),
    ):
        yield


@hidden_from_modes()
def heads_in(name: str, x: Tensor) -> Site | None:
    """The heads that a tensor `[..., head * head_dim]` consists of, which is read at a module path; None: not shown."""
    if x.grad_fn is None:
        return None
    value_projections, products, softmaxes = _origins(x.grad_fn)
    kept = [getattr(product, "_saved_mat2", None) for product in products]  # the values, where autograd keeps them
    widths = {0 if values is None else int(values.shape[-1]) for values in kept}
    width = widths.pop() if len(widths) == 1 else 0
    if not softmaxes or not width or x.shape[-1] % width:
        return None
    chunks = x.split(width, dim=-1)
    derivatives = [_slopes(chunk, softmaxes) for chunk in chunks]
    # A model may fill in the probabilities of padding, which are not numbers where a whole row is hidden.
    probabilities = [_saved_probabilities(softmax).detach().nan_to_num() for softmax in softmaxes]
    rows = [axis for axis in range(x.dim() - 1) if _holds_rows(x, axis, softmaxes)]
    is_linear = all(_is_sum(chunk, probabilities, parts) for chunk, parts in zip(chunks, derivatives, strict=True))
    if not rows or not is_linear or not _are_disjoint(derivatives):
        return None
    kv_heads = _count_groups([_slopes(chunk, value_projections) for chunk in chunks])
    # Every axis depends only on the first row where there is a single one; then its axis has one entry.
    is_single = all(len(part) == 1 for part in probabilities)
    batch_axis = min(rows, key=lambda axis: x.shape[axis]) if is_single else rows[0]
    return Site(name, _attention_kind(softmaxes), len(chunks), kv_heads, width, batch_axis)


def _operation(node: Node) -> str:
    """Name of the operation that a node is the derivative of: `Bmm` for `BmmBackward0`."""
    return type(node).__name__.partition("Backward")[0]


def _inputs(node: Node) -> list[Node]:
    return [source for source, _ in node.next_functions if source is not None]


def _saved_probabilities(softmax: Any) -> Tensor:
    """The probabilities `[..., query, key]`, which the derivative of a softmax needs."""
    saved = _saved_by_model(softmax)
    probabilities: Tensor = softmax._saved_result if saved is None else saved
    return probabilities


def _saved_by_model(node: Any) -> Tensor | None:
    """The output of a `torch.autograd.Function` that saved it, if it consists of probabilities.

    Their rows sum to one, or to zero where all is hidden.
    """
    try:
        saved: Sequence[Tensor | None] = getattr(node, "saved_tensors", ())
    except RuntimeError:  # they were released, or changed in place
        return None
    for tensor in saved:
        if not (isinstance(tensor, Tensor) and tensor.grad_fn is node and tensor.output_nr == 0 and tensor.dim() > 2):
            continue
        values = tensor.detach().double().nan_to_num()
        sums = values.sum(-1)
        if bool((values >= 0).all() and (((sums - 1).abs() <= _HALF_TOLERANCE) | (sums == 0)).all() and sums.any()):
            return tensor
    return None


def _is_weight(node: Node) -> bool:
    """Whether a node is a parameter of two axes or more, or a tensor computed from nothing else but by a lookup."""
    layout = list(_layout(node))
    variable = getattr(layout[-1], "variable", None)
    return variable is not None and variable.dim() > 1 and all(_operation(part) != "Embedding" for part in layout[:-1])


def _origins(start: Node) -> tuple[list[Node], list[Node], list[Any]]:
    """What a tensor is computed from, up to the nearest weights and softmaxes.

    Returns:
        The operations that read a weight, the products of two activations that no other such product follows, and the
        softmaxes.
    """
    weights, products = list[Node](), list[Node]()
    softmaxes = list[Any]()  # their saved tensors have no types
    stack, visited = [(start, False)], {start}
    while stack:
        node, is_behind_product = stack.pop()
        # PyTorch's own softmax, or one with a derivative of the model's own.
        if _operation(node) in _SOFTMAXES or _saved_by_model(node) is not None:
            softmaxes.append(node)
            continue
        is_product = _operation(node) in _PRODUCTS
        if is_product and any(map(_is_weight, _inputs(node))):
            weights.append(node)
            continue
        if is_product and not is_behind_product:
            products.append(node)
        for source in _inputs(node):
            if source not in visited:
                visited.add(source)
                stack.append((source, is_behind_product or is_product))
    return weights, products, softmaxes


def _attention_kind(softmaxes: Sequence[Any]) -> Kind:
    if not any(map(_is_self_attention, softmaxes)):
        return "cross"
    return "causal" if all(_is_causal(_saved_probabilities(softmax)) for softmax in softmaxes) else "bidirectional"


def _is_self_attention(softmax: Node) -> bool:
    """Whether queries and keys are projected from the same activation."""
    _, products, _ = _origins(_inputs(softmax)[0])
    pairs = [_inputs(product)[-2:] for product in products]  # the factors are the last inputs of each operation
    return any(len(pair) == 2 and not _sources(pair[0]).isdisjoint(_sources(pair[1])) for pair in pairs)


def _sources(node: Node) -> set[Node]:
    """The activations that a tensor is projected from."""
    weights, _, _ = _origins(node)
    activations = [source for weight in weights for source in _inputs(weight) if not _is_weight(source)]
    return {list(_layout(activation))[-1] for activation in activations}


def _layout(node: Node) -> Iterator[Node]:
    """A node and those before it while each has one input, such as a reshape for a matmul."""
    yield node
    while len(node.next_functions) == 1 and (source := node.next_functions[0][0]) is not None:
        yield (node := source)


def _is_causal(probabilities: Tensor) -> bool:
    """Whether no query attends to a later key, in `[..., query, key]`."""
    queries, keys = probabilities.shape[-2:]
    return queries == keys > 1 and not bool(probabilities.triu(1).any())


def _slopes(chunk: Tensor, nodes: Sequence[Node]) -> list[Tensor | None]:
    """The derivatives of the sum of a chunk by the outputs of nodes; None: the chunk does not depend on one."""
    edges = [GradientEdge(node, 0) for node in nodes]
    return list(torch.autograd.grad(chunk.sum(), edges, retain_graph=True, allow_unused=True)) if edges else []


def _is_sum(chunk: Tensor, probabilities: Sequence[Tensor], derivatives: Sequence[Tensor | None]) -> bool:
    """Whether a chunk is linear in probabilities, of which it has these derivatives."""
    pairs = zip(probabilities, derivatives, strict=True)
    terms = [part.double() * slope.double() for part, slope in pairs if slope is not None]
    magnitude = sum(float(term.abs().sum()) for term in terms)
    difference = float(chunk.detach().double().sum()) - sum(float(term.sum()) for term in terms)
    tolerance = _HALF_TOLERANCE if chunk.element_size() < 4 else _TOLERANCE
    return magnitude > 0 and abs(difference) <= tolerance * magnitude


def _holds_rows(x: Tensor, axis: int, softmaxes: Sequence[Node]) -> bool:
    """Whether the first entry of an axis depends only on the first probabilities, which belong to the first row.

    The first axis of probabilities holds rows, or rows times heads or windows.
    """
    slopes = [slope for slope in _slopes(x.select(axis, 0), softmaxes) if slope is not None]
    return not any(bool((slope[max(1, len(slope) // x.shape[axis]) :] != 0).any()) for slope in slopes)


def _are_disjoint(derivatives: Sequence[Sequence[Tensor | None]]) -> bool:
    """Whether no entry of a tensor has a derivative in two chunks."""
    used = ([(part != 0).int() for part in parts if part is not None] for parts in zip(*derivatives, strict=True))
    return not any(parts and int(torch.stack(parts).sum(0).max()) > 1 for parts in used)


def _count_groups(derivatives: Sequence[Sequence[Tensor | None]]) -> int:
    """Number of value heads: consecutive chunks that depend on the same outputs of a value projection share one."""
    heads = len(derivatives)
    first = [
        next(earlier for earlier in range(head + 1) if earlier == head or _overlap(derivatives[earlier], of_head))
        for head, of_head in enumerate(derivatives)
    ]
    groups = len(set(first))
    shared = heads // groups
    return groups if first == [head // shared * shared for head in range(heads)] else heads


def _overlap(left: Iterable[Tensor | None], right: Iterable[Tensor | None]) -> bool:
    pairs = zip(left, right, strict=True)
    return any(bool(((a != 0) & (b != 0)).any()) for a, b in pairs if a is not None and b is not None)
