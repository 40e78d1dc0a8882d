"""How many parameters a plan removes from a family, from the shapes of its modules."""

from __future__ import annotations

from graph_passes import NeuronPlan, Plan
from tests.zoo import PERSISTENT

POST_NORM = {"bert", "roberta", "distilbert", "electra", "bart", "marian"}
NO_BIAS = {"modernbert", "llama", "qwen3", "t5", "all_attention", "transformer_xl"}
GATED = {"modernbert", "llama", "qwen3"}
VECTORS = {"all_attention": 2 * PERSISTENT + 2, "transformer_xl": 2}
"""Vectors of each head: persistent ones and position biases."""
BUCKETS = 6
"""Rows of T5's relative-position table."""


def removed_parameters(family: str, plan: Plan) -> int:
    """Parameters that a plan removes, at width `d` and heads of width `w`.

    A query head has d*w elements of the query and w*d of the output projection, a key/value head d*w of key and of
    value, each projection but the output's a bias of w. A norm before an attention that is removed is removed too.
    """
    width = 24 if family in ("llama", "qwen3", "t5") else 32
    total = sum(_removed_with_neurons(family, group, width) for group in plan.feed_forwards)
    for number, site in enumerate(plan.sites):
        w = site.head_dim
        shared = site.heads // site.kv_heads
        kept_keys = len({head // shared for head in site.kept})
        queries, keys = len(site.dropped), site.kv_heads - kept_keys
        query_bias = key_value_bias = 0 if family in NO_BIAS else 1
        total += queries * (2 * width * w + query_bias * w) + keys * (2 * width * w + 2 * key_value_bias * w)
        if family == "whisper":
            total -= keys * w  # Whisper's keys have no bias.
        if family in VECTORS:
            total += queries * (width + VECTORS[family]) * w  # The second width is the position projection's.
        if not site.kept and family not in POST_NORM:
            norms = 1 if family in NO_BIAS and family not in VECTORS else 2
            total += 0 if family == "modernbert" and number == 0 else norms * width
            total += 2 * w if family == "qwen3" else 0
    if family == "t5":
        for kind in {site.kind for site in plan.sites} - {"cross"}:
            stack = [site for site in plan.sites if site.kind == kind]
            total += BUCKETS * len(set.intersection(*(set(site.dropped) for site in stack)))
    return total


def _removed_with_neurons(family: str, group: NeuronPlan, width: int) -> int:
    """A neuron has `width` elements of each projection before it and of the one after it, and a bias.

    A norm before a feed-forward that is removed is removed too.
    """
    before = 2 if family in GATED else 1
    bias = 0 if family in NO_BIAS - {"transformer_xl"} else before
    removed = len(group.dropped) * ((before + 1) * width + bias)
    if not group.kept and family not in POST_NORM:
        removed += (1 if family in NO_BIAS - {"transformer_xl"} else 2) * width
    return removed
