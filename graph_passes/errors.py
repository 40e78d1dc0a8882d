"""What can go wrong with a graph or a plan. Every message names the thing, the fault and the mend, on one line."""


class GraphPassError(Exception):
    """Base of every error that this package raises on purpose."""


class PlanError(GraphPassError):
    """A plan that does not read, does not validate, or belongs to another model."""


class GraphError(GraphPassError):
    """An ONNX file that does not read: truncated, data missing or outside its folder, not a graph of a transformer."""
