"""The table of the rules that a graph obeys, each with an id that stays; `verify` and `check` say what breaks them.

The rules run after every pass and on every load, so they are fast: a block is checked once, a call only for what it
binds. No rule raises, whatever a graph holds that the codec decodes.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from precast.ir.errors import BundleError, some
from precast.ir.graph.schema import Graph
from precast.ir.manifest import ModelInfo
from precast.ir.verify.cache_rules import CACHE_RULES
from precast.ir.verify.capture_rules import CAPTURE_RULES
from precast.ir.verify.facts import Facts
from precast.ir.verify.index_rules import INDEX_RULES, INPUT_RULES
from precast.ir.verify.param_rules import PARAM_RULES
from precast.ir.verify.shard_rules import SHARD_RULES
from precast.ir.verify.step_rules import STEP_RULES
from precast.ir.verify.value_rules import FORM_RULES, VALUE_RULES

_MEANING = (*VALUE_RULES, *STEP_RULES, *PARAM_RULES, *CACHE_RULES, *INPUT_RULES)
RULES = (*FORM_RULES, *_MEANING, *INDEX_RULES, *CAPTURE_RULES, *SHARD_RULES)
"""All rules, in the order in which they are checked. An id keeps its meaning for good."""


class Violation(msgspec.Struct, frozen=True):
    """One way in which a graph breaks a rule: the rule's id, where, and what was expected and found there."""

    rule: str
    where: str
    message: str


def verify(graph: Graph, model: ModelInfo | None = None) -> tuple[Violation, ...]:
    """All violations, in the order of the rules; of each rule the first 100.

    With `model`, the graph is held against its numbers too: it is whole, and what an engine runs.
    """
    facts = Facts(graph, model)
    for rules in (
        FORM_RULES,
        _MEANING,
        (*INDEX_RULES, *CAPTURE_RULES, *SHARD_RULES),
    ):  # each take for granted that those before hold
        found = tuple(
            Violation(rule.id, where, message) for rule in rules for where, message in islice(rule.check(facts), 100)
        )
        if found:
            return found
    return ()


def check(graph: Graph, model: ModelInfo | None = None) -> None:
    """Raise BundleError("graph-invalid"), with all violations in one message, unless there are none."""
    found = verify(graph, model)
    if not found:
        return
    lines = [f"the graph breaks {len({violation.rule for violation in found})} of the language's rules"]
    lines += [f"  {line}" for line in some([f"{item.rule} {item.where}: {item.message}" for item in found])]
    raise BundleError("graph-invalid", "\n".join(lines), fix="build the bundle again, with a builder of this version")
