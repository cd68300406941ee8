"""A backward in two halves, as zero-bubble schedules need it: gradients of the inputs now, of the weights later.

Qi et al. 2023 (arXiv:2401.10241), by autograd's graph as it stands. A node is *on the way* if an input can be reached
from it. Where such a node also has weights beside that way (a matrix product: its input and its matrix), the gradient
that comes into it is kept; the second half starts again from there, and computes only what leads to those weights. So
each kernel runs once, and each weight's gradient is accumulated once, with all its hooks.

Some weights cannot wait, and come with the first half:

- of a node that computes everything or nothing: a compiled block, a custom `autograd.Function`;
- of a node whose saved tensors are recomputed or fetched when they are read (activation checkpointing, offload): a
  second half would do that again;
- shared by two nodes of which one lies on the way of the other: starting again at one would pass the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

Tell = Callable[[str], None]
Cheap = Callable[[object], bool]


class Root(NamedTuple):
    """Where a backward starts: an output, and the gradient of it."""

    edge: GradientEdge
    grad: torch.Tensor


Later = Callable[[], None]
"""The second half of a backward; to be called once."""


def backward(roots: Sequence[Root]) -> None:
    """The whole backward: gradients of everything."""
    if roots:
        torch.autograd.backward([root.edge for root in roots], [root.grad for root in roots])


def backward_inputs(
    roots: Sequence[Root], inputs: Sequence[torch.Tensor], *, tell: Tell, cheap: Cheap = lambda hook: False
) -> Later:
    """The first half: `.grad` of `inputs`, which are leaves. Returns the second; `tell` hears what could not wait.

    `cheap` says of a hook that unpacks a saved tensor whether it may run twice.
    """
    graph = _Graph(roots, inputs, cheap)
    if not graph.on_the_way:
        return lambda: backward(roots)
    early, late = graph.deal(tell)
    kept: dict[Node, tuple[torch.Tensor | None, ...]] = {}
    waiting = [hub for group in late for hub in group if hub.root is None]
    handles = [hub.node.register_prehook(partial(_keep, kept, hub.node)) for hub in waiting]
    now = [root for root in roots if root.edge.node in graph.on_the_way]
    now += [hub.root for group in early for hub in group if hub.root is not None]
    weights = {weight for group in early for hub in group for weight in hub.weights}
    try:
        torch.autograd.backward(
            [root.edge for root in now],
            [root.grad for root in now],
            inputs=[*inputs, *(weight.variable for weight in weights)],  # type: ignore[attr-defined]
            retain_graph=bool(late),
        )
    finally:
        for handle in handles:
            handle.remove()
    return partial(_backward_weights, late, kept)


def _keep(kept: dict[Node, tuple[torch.Tensor | None, ...]], node: Node, grads: tuple[torch.Tensor, ...]) -> None:
    kept[node] = grads


def _backward_weights(groups: list[list[_Hub]], kept: dict[Node, tuple[torch.Tensor | None, ...]]) -> None:
    """The second half. Groups share no weight, so each weight's gradient is accumulated once."""
    while groups:
        group = groups.pop(0)
        roots: list[Root] = []
        for hub in group:
            if hub.root is not None:
                roots.append(hub.root)
            else:
                grads = enumerate(kept.pop(hub.node, ()))
                roots += [Root(GradientEdge(hub.node, slot), grad) for slot, grad in grads if grad is not None]
        if roots:
            weights = [weight.variable for weight in {w for hub in group for w in hub.weights}]  # type: ignore[attr-defined]
            torch.autograd.backward([root.edge for root in roots], [root.grad for root in roots], inputs=weights)


class _Hub(NamedTuple):
    """Where the second half may start, and the weights (their nodes in the graph) that are to be reached from there."""

    node: Node
    weights: frozenset[Node]
    root: Root | None = None
    """Set where it is an output that no input leads to; its gradient is known from the beginning."""


class _Dealt(NamedTuple):
    """Groups of hubs that share no weights between groups."""

    early: list[list[_Hub]]
    late: list[list[_Hub]]


class _Graph:
    """What lies between the outputs, the inputs and the weights."""

    def __init__(self, roots: Sequence[Root], inputs: Sequence[torch.Tensor], cheap: Cheap) -> None:
        self._cheap = cheap
        ends = {id(leaf) for leaf in inputs}
        self.on_the_way: set[Node] = set()
        beside: dict[Node, frozenset[Node]] = {}  # weights that are reached without going on the way
        self.hubs: list[_Hub] = []
        for node in _children_first([root.edge.node for root in roots]):
            children = _children(node)
            leaf = getattr(node, "variable", None)  # of the node that accumulates into a leaf
            if leaf is not None:
                beside[node] = frozenset() if id(leaf) in ends else frozenset([node])
            else:
                beside[node] = frozenset().union(*(beside[c] for c in children if c not in self.on_the_way))
            if (leaf is not None and id(leaf) in ends) or any(child in self.on_the_way for child in children):
                self.on_the_way.add(node)
                if beside[node]:
                    self.hubs.append(_Hub(node, beside[node]))
        self.hubs.reverse()  # as autograd meets them
        for root in roots:
            node = root.edge.node
            if node not in self.on_the_way and beside[node]:
                self.hubs.append(_Hub(node, beside[node], root))

    def deal(self, tell: Tell) -> _Dealt:
        """Which weights come with the first half, and which with the second."""
        early: list[list[_Hub]] = []
        late: list[list[_Hub]] = []
        for group in _sharing(self.hubs):
            reason = self._hindrance(group)
            if reason:
                tell(f"{reason}: its weights' gradients come with the inputs' (I), not later (W)")
            (early if reason else late).append(group)
        return _Dealt(early, late)

    def _hindrance(self, group: list[_Hub]) -> str | None:
        for hub in group:
            if hub.root is not None:
                continue
            node: object = hub.node
            if isinstance(node, BackwardCFunction):
                return f"{hub.node.name()} computes all its gradients at once"
            if _reads_through_hooks(hub.node, self._cheap):
                return "activation checkpointing, or another hook on saved tensors, would run twice"
        if len(group) > 1 and self._entangled(group):
            return "a weight is used twice on the way through a stage"
        return None

    def _entangled(self, group: list[_Hub]) -> bool:
        """Whether the way from one hub leads through another."""
        members = {hub.node for hub in group}
        for hub in group:
            below = [child for child in _children(hub.node) if child in self.on_the_way]
            if any(node in members for node in _children_first(below)):
                return True
        return False


def _children(node: Node) -> list[Node]:
    return [child for child, _ in node.next_functions if child is not None]


def _children_first(roots: Sequence[Node]) -> Iterator[Node]:
    """Every node below `roots` and they themselves, each after all that are below it."""
    seen: set[Node] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(_children(root)))]
        while path:
            node, rest = path[-1]
            child = next((child for child in rest if child not in seen), None)
            if child is None:
                path.pop()
                yield node
            else:
                seen.add(child)
                path.append((child, iter(_children(child))))


def _sharing(hubs: Sequence[_Hub]) -> list[list[_Hub]]:
    """The hubs in groups: two that share a weight are in one."""
    group_of: dict[Node, list[_Hub]] = {}
    groups: list[list[_Hub]] = []
    for hub in hubs:
        joined = [hub]
        for other in {id(group_of[w]): group_of[w] for w in hub.weights if w in group_of}.values():
            joined = [*other, *joined]
            groups = [group for group in groups if group is not other]
        groups.append(joined)
        group_of.update((weight, joined) for member in joined for weight in member.weights)
    return groups


def _reads_through_hooks(node: Node, cheap: Cheap) -> bool:
    """Whether something was put in place of the node's saved tensors that must not be asked twice."""
    saved = (getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_"))
    flat = (one for value in saved for one in (value if isinstance(value, (tuple, list)) else (value,)))
    hooks = (getattr(one, "unpack_hook", None) for one in flat)
    return any(hook is not None and not cheap(hook) for hook in hooks)
