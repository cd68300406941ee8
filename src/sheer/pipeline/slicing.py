"""A program cut at its blocks: which calls run together, and what is alive at each cut. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import nn

from sheer.errors import UsageError
from sheer.pipeline.program import Call, Op, Piece, Ref, fill, refs_in
from sheer.pipeline.tracing import Program

_VIEWS = frozenset(
    {"contiguous", "flatten", "float", "getitem", "permute", "reshape", "squeeze", "to", "transpose", "unsqueeze"}
    | {"view", "view_as", "getattr", "size"}
)
"""What a loss does to an output before it meets the labels; it is left to the loss, so that the output stays whole."""


class Slice(NamedTuple):
    """One unit's calls, and what it returns of what it then knows."""

    piece: Piece
    returns: Any

    def run(self, root: nn.Module, values: Mapping[str, Any]) -> Any:
        """Run on `values`, with the modules of `root`."""
        return fill(self.returns, self.piece.run(root, values))


class Sliced(NamedTuple):
    """A program in units. What follows from the labels is apart: it is the loss."""

    units: tuple[Slice, ...]
    blocks: tuple[str, ...]
    """The block that each unit calls; the empty string where it calls none."""
    loss: Slice | None


def slice_program(program: Program, *, blocks: Collection[str], labels: Collection[str]) -> Sliced:
    """Cut `program` so that each call of a block is a unit; what comes before and after them too.

    Calls between two blocks go with the second, but taking a block's output apart goes with that block. Parameters
    are read where they are used. A carry is the tuple of the values that are alive at the cut.

    Raises:
        UsageError: a label is needed before the last block has run.
    """
    reads = {call.name: call for call in program.calls if call.op is Op.READ}
    groups, names = _group([call for call in program.calls if call.name not in reads], blocks)
    label_refs = set(labels)
    tail = _take_tail(groups, label_refs, program.output)
    if not groups[-1]:
        del groups[-1], names[-1]
    loss_calls = _with_reads(tail, reads, refs_in(program.output))
    after = _needs(loss_calls, refs_in(program.output)) - label_refs
    order = [*program.inputs, *(call.name for call in program.calls)]
    slices: list[Slice] = []
    for group in reversed(groups):
        calls = _with_reads(group, reads, set() if labels or slices else after)
        if group is not groups[0]:
            calls = (*_devices(_needs(calls, after), program.calls), *calls)
        gives = tuple(name for name in order if name in after)
        after = _needs(calls, after)
        takes = tuple(name for name in order if name in after)
        slices.append(Slice(Piece.of(calls, takes=takes, gives=gives), tuple(Ref(name) for name in gives)))
    slices.reverse()
    gives = slices[-1].piece.gives
    if not labels:
        slices[-1] = slices[-1]._replace(returns=program.output)
        return Sliced(tuple(slices), tuple(names), None)
    if len(gives) == 1:
        slices[-1] = slices[-1]._replace(returns=Ref(gives[0]))
    wanted = tuple(sorted(refs_in(program.output)))
    loss = Slice(Piece.of(loss_calls, takes=(*gives, *sorted(label_refs)), gives=wanted), program.output)
    return Sliced(tuple(slices), tuple(names), loss)


def _group(calls: Sequence[Call], blocks: Collection[str]) -> tuple[list[list[Call]], list[str]]:
    """The calls of each unit, in order, and the block that each calls."""
    groups: list[list[Call]] = []
    names: list[str] = []
    waiting: list[Call] = []  # since the last block
    parts: set[str] = set()  # the last block's output, and what is taken out of it
    for call in calls:
        if call.op is Op.MODULE and call.target in blocks:
            if waiting and not groups:
                groups.append(waiting)
                names.append("")
                waiting = []
            groups.append([*waiting, call])
            names.append(call.target)
            waiting, parts = [], {call.name}
        elif call.op is Op.FUNCTION and call.target is getitem and call.refs() and call.refs() <= parts:
            groups[-1].append(call)
            parts.add(call.name)
        else:
            waiting.append(call)
    groups.append(waiting)
    names.append("")
    return groups, names


def _take_tail(groups: list[list[Call]], label_refs: set[str], output: Any) -> tuple[Call, ...]:
    """Take what follows from the labels out of the last group."""
    if not label_refs:
        return ()
    late = set(label_refs)
    for position, group in enumerate(groups):
        for call in group:
            if call.refs() & late:
                if position < len(groups) - 1:
                    raise UsageError(
                        f"{', '.join(sorted(label_refs))} cannot be the label: the forward needs it before the last"
                        " block has run. Say labels=(): it then travels from the first stage, as an input"
                    )
                late.add(call.name)
    users: dict[str, set[str]] = {}
    for call in groups[-1]:
        for ref in call.refs():
            users.setdefault(ref, set()).add(call.name)
    returned = refs_in(output)
    for call in reversed(groups[-1]):
        only = users.get(call.name, set())
        if _is_view(call) and only and only <= late and call.name not in returned:
            late.add(call.name)
    tail = tuple(call for call in groups[-1] if call.name in late)
    groups[-1] = [call for call in groups[-1] if call.name not in late]
    return tail


def _is_view(call: Call) -> bool:
    name = call.target if call.op is Op.METHOD else getattr(call.target, "__name__", "")
    return call.op in (Op.METHOD, Op.FUNCTION) and name in _VIEWS


def _with_reads(calls: Sequence[Call], reads: Mapping[str, Call], returned: Collection[str]) -> tuple[Call, ...]:
    """`calls` with the parameters they read, each before its first use, and those that are returned."""
    found: dict[str, Call] = {}
    for call in calls:
        for ref in sorted(call.refs() & reads.keys()):
            found.setdefault(ref, reads[ref])
        found[call.name] = call
    for name in sorted(reads.keys() & set(returned)):
        found.setdefault(name, reads[name])
    return tuple(found.values())


def _devices(needed: Collection[str], calls: Sequence[Call]) -> list[Call]:
    """Devices do not travel: each stage has its own. What needs one takes it from a tensor that came."""
    asked = [c.name for c in calls if c.name in needed and c.target is getattr and c.args[1] == "device"]
    tensors = tuple(Ref(name) for name in sorted(set(needed) - set(asked)))
    return [Call(name, Op.FUNCTION, device_among, (tensors,)) for name in asked]


def device_among(values: Sequence[Any]) -> torch.device:
    """The device of the tensors among `values`."""
    return next(value.device for value in values if isinstance(value, torch.Tensor))


def _needs(calls: Sequence[Call], after: Collection[str]) -> set[str]:
    """What must be known before `calls` so that `after` is known after them."""
    return (set(after) | {ref for call in calls for ref in call.refs()}) - {call.name for call in calls}
