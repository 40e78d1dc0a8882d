"""The pruning plan: which units of each group are kept, with which scales and masks.

Learning writes plans, and the graph passes read them. A group is a set of interchangeable units at one point of the
model: the heads of an attention site, or the neurons of a feed-forward. A plan lists groups by their module paths, the
original ids of the kept units, and one scale for each kept unit. It is JSON with a published schema
(`Plan.model_json_schema()`), against which it is validated when it is read.
"""

from graph_passes.plan.groups import GroupPlan, GroupType, Kind, NeuronPlan, SitePlan
from graph_passes.plan.pruning_plan import Plan

__all__ = ["GroupPlan", "GroupType", "Kind", "NeuronPlan", "Plan", "SitePlan"]
