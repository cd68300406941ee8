"""A model with a forward of its own as a pipeline's source: cut at its blocks, with its own modules and names.

torch.fx records the forward (`tracing`), `slicing` cuts the record at the blocks, and here the pieces get what they
call: the model's own submodule objects, in a tree that has the model's names.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from sheer.errors import UsageError, did_you_mean
from sheer.pipeline.entry import Arguments
from sheer.pipeline.program import Op
from sheer.pipeline.slicing import Slice, Sliced, slice_program
from sheer.pipeline.timing import Stopwatch
from sheer.pipeline.tracing import Program, trace
from sheer.pipeline.units import Held, Unit

LABELS = ("labels", "label", "targets", "target")
"""Arguments that are taken for the label where the model makes its own loss and nothing else is said."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Holder(nn.Module):
    """A place in the model's tree, on the way to what this stage holds; its forward was cut."""


@dataclass(frozen=True)
class CutUnit:
    """A stretch of the model's forward, recorded for training and for evaluation."""

    kind: str
    names: tuple[str, ...]
    calls: tuple[str, ...]
    reads: tuple[str, ...]
    training: Slice
    evaluating: Slice
    entry: Arguments | None
    """On the first unit: how to name what comes in."""

    def __call__(self, root: nn.Module, carry: Any) -> Any:
        """Run on the values that are alive at the cut before it."""
        part = self.training if root.training else self.evaluating
        takes = part.piece.takes
        values = dict(zip(takes, carry, strict=True)) if self.entry is None else self.entry.bind(carry)
        return part.run(root, values)


@dataclass(frozen=True)
class CutLoss:
    """The end of a forward that makes its own loss: what follows from the labels."""

    training: Slice
    evaluating: Slice
    entry: Arguments

    def whole(self, root: nn.Module, output: Any, labels: Mapping[str, Any]) -> Any:
        """What the model returns, from what its last unit gave."""
        part = self.training if root.training else self.evaluating
        takes = [name for name in part.piece.takes if name not in labels]
        values = (output,) if len(takes) == 1 else output
        return part.run(root, {**dict(zip(takes, values, strict=True)), **labels})

    def __call__(self, root: nn.Module, output: Any, label: Any) -> torch.Tensor:
        """The loss in what the model returns."""
        return find_loss(self.whole(root, output, self.entry.bind_labels(label)))


def find_loss(returned: Any) -> torch.Tensor:
    """The loss in what a model returned: itself, its `loss`, or the only scalar in a tuple.

    Raises:
        UsageError: there is none, or more than one.
    """
    if isinstance(returned, Mapping) and "loss" in returned:
        return find_loss(returned["loss"])
    if isinstance(getattr(returned, "loss", None), torch.Tensor):
        return find_loss(returned.loss)
    parts = returned if isinstance(returned, (tuple, list)) else (returned,)
    scalars = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 0]
    if len(scalars) == 1:
        return scalars[0]
    raise UsageError(
        f"the model returned {type(returned).__name__} with {len(scalars)} scalar tensors where its loss was looked"
        " for; have it return the loss, or a dict with 'loss', or pass loss_fn to from_module"
    )


class Cut:
    """A model, recorded and cut at its blocks.

    Args:
        blocks: globs over module names; the outermost modules they match stay whole, and are where the model is cut.
        inputs, labels, constants: which arguments of forward differ from call to call, which of them only the loss
            needs, and values for others that are not to have their default.
        own_loss: whether the model makes its own loss.
        sample: arguments of one call, to answer questions of the forward with.

    Raises:
        UsageError: what is wrong with them, or what of the forward cannot be recorded.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        blocks: str | Sequence[str],
        inputs: str | Sequence[str] | None,
        labels: str | Sequence[str] | None,
        constants: Mapping[str, Any] | None,
        own_loss: bool,
        sample: Any,
    ) -> None:
        self.model = model
        self._blocks = find_blocks(model, blocks)
        self._looked_into = {"", *(name for block in self._blocks for name in _ancestors(block))}
        for name in sorted(self._looked_into):
            _refuse_hooks(name, model.get_submodule(name))
        given = _named_sample(model, sample)
        self.entry = _arguments(model, inputs, labels, constants, own_loss=own_loss, sample=given)
        self._record = {training: self._traced(training, self.entry, given) for training in (True, False)}
        try:
            sliced = self._sliced()
        except UsageError:
            if labels is not None or not self.entry.labels:
                raise
            self.entry = self.entry._replace(inputs=(*self.entry.inputs, *self.entry.labels), labels=())
            sliced = self._sliced()
        self._given = given
        self._names = self._places(sliced)
        self._units = self._put_together(sliced)
        self.loss = self._loss_of(sliced)

    def unlabelled(self) -> tuple[Slice, Slice] | None:
        """The whole forward without its labels, in training and in evaluation; None where it cannot do without."""
        optional = inspect.signature(self.model.forward).parameters
        if not self.entry.labels or any(optional[n].default is inspect.Parameter.empty for n in self.entry.labels):
            return None
        entry = self.entry._replace(labels=())
        try:
            records = [self._traced(training, entry, self._given) for training in (True, False)]
        except UsageError:  # the model's forward fails without them as well
            return None
        whole = [slice_program(record, blocks=(), labels=()).units[0] for record in records]
        return whole[0], whole[1]

    def _traced(self, training: bool, entry: Arguments, sample: Mapping[str, Any] | None) -> Program:
        varying = (*entry.inputs, *entry.labels)
        with _in_mode([self.model.get_submodule(name) for name in self._looked_into], training):
            return trace(
                self.model,
                inputs=varying,
                constants={name: value for name, value in entry.constants.items() if name not in varying},
                looked_into=frozenset(self._looked_into),
                sample=sample,
            )

    def _sliced(self) -> tuple[Sliced, Sliced]:
        training, evaluating = (
            slice_program(self._record[mode], blocks=self._blocks, labels=self.entry.labels) for mode in (True, False)
        )
        never = [name for name in self._blocks if name not in training.blocks]
        if never or training.blocks != evaluating.blocks:
            raise UsageError(
                f"the blocks must be called alike in training and evaluation; in training the forward calls"
                f" {', '.join(filter(None, training.blocks)) or 'none'}, in evaluation"
                f" {', '.join(filter(None, evaluating.blocks)) or 'none'}, of {', '.join(self._blocks)}"
            )
        return training, evaluating

    # ---- as a source

    @property
    def kinds(self) -> Sequence[str]:
        """The class of each block; `Prologue` and `Epilogue` around them."""
        return [unit.kind for unit in self._units]

    def numels(self) -> Sequence[int]:
        """Number of parameters that each unit uses."""
        return [sum({id(p): p.numel() for _, p in self._parameters(names)}.values()) for names in self._names]

    def seconds(self, sample: Any) -> Sequence[float]:
        """Time of each unit on `sample`, run in the model itself."""
        named = _named_sample(self.model, sample)
        assert named is not None
        watch = Stopwatch({name: value for name, value in named.items() if name in self.entry.inputs})
        for unit in self._units:
            watch.run(unit, self.model)
        return watch.seconds

    def ties(self) -> Mapping[str, Sequence[Held]]:
        """Parameters of several units, or of one that knows them by another name than the model's first."""
        canonical = {id(parameter): name for name, parameter in self.model.named_parameters()}
        places: dict[str, list[Held]] = {}
        for unit, names in enumerate(self._names):
            for name, parameter in self._parameters(names):
                held = places.setdefault(canonical[id(parameter)], [])
                if Held(unit, name) not in held:
                    held.append(Held(unit, name))
        return {
            name: held for name, held in places.items() if len({one.unit for one in held}) > 1 or held[0].name != name
        }

    def populate(self, root: nn.Module, units: Sequence[int]) -> Mapping[int, Unit]:
        """Put the model's own submodules and parameters into `root`, under the model's names."""
        wanted = {name for unit in units for name in self._names[unit]}
        for name in (*self._in_order(), *self._record[True].constants):
            if name in wanted:
                self._put(root, name)
        root.training = self.model.training
        return {unit: self._units[unit] for unit in units}

    def _in_order(self) -> Iterator[str]:
        """Every module, parameter and buffer of the model, so that a stage has its own in the model's order."""
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            yield prefix
            for name in (*module._parameters, *module._buffers):
                yield f"{prefix}.{name}" if prefix else name

    def _put(self, root: nn.Module, name: str) -> None:
        *path, last = name.split(".")
        here, there = root, self.model
        for atom in path:
            there = _child(there, atom)
            if atom not in here._modules:
                holder = nn.ModuleDict() if isinstance(there, nn.ModuleDict) else Holder()
                holder.training = there.training
                _add(here, atom, holder)
            here = _child(here, atom)
        if here is there:  # the inside of a module that is here as a whole
            return
        if name in self._record[True].constants:
            here.register_buffer(last, self._record[True].constants[name], persistent=False)
        elif last in there._modules:
            _add(here, last, _child(there, last))
        elif last in there._parameters:
            here.register_parameter(last, there._parameters[last])
        else:
            persistent = last not in there._non_persistent_buffers_set
            here.register_buffer(last, there._buffers[last], persistent=persistent)

    # ---- what each unit holds

    def _places(self, sliced: tuple[Sliced, Sliced]) -> list[tuple[str, ...]]:
        """Names of the modules, parameters and buffers of each unit. What nothing uses goes to the first."""
        held: list[dict[str, None]] = []
        for parts in zip(*(one.units for one in sliced), strict=True):
            held.append(dict.fromkeys(name for part in parts for name in self._used(part)))
        for one in sliced:
            if one.loss is not None:
                held[-1] |= dict.fromkeys(self._used(one.loss))
        homes = {id(self._find(name)): unit for unit in range(len(held) - 1, -1, -1) for name in held[unit]}
        for name, thing in self._all_places():
            if not any(name in names for names in held):
                held[homes.get(id(thing), 0)][name] = None
        return [tuple(names) for names in held]

    def _used(self, part: Slice) -> Iterator[str]:
        for call in part.piece.calls:
            if call.op is Op.MODULE:
                yield call.target
            elif call.op is Op.READ:
                owner = call.target.rpartition(".")[0]
                yield call.target if owner in self._looked_into else owner

    def _all_places(self) -> Iterator[tuple[str, Any]]:
        """Everything that stays whole, under all of its names: children of what is looked into, and its own tensors."""
        for parent in sorted(self._looked_into):
            module = self.model.get_submodule(parent)
            prefix = f"{parent}." if parent else ""
            for name, child in module._modules.items():
                if child is not None and prefix + name not in self._looked_into:
                    yield prefix + name, child
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield prefix + name, tensor

    def _find(self, name: str) -> Any:
        if name in self._record[True].constants:
            return self._record[True].constants[name]
        owner, _, last = name.rpartition(".")
        return getattr(self.model.get_submodule(owner), last)

    def _parameters(self, names: Sequence[str]) -> Iterator[tuple[str, nn.Parameter]]:
        for name in names:
            found = self._find(name)
            if isinstance(found, nn.Parameter):
                yield name, found
            elif isinstance(found, nn.Module):
                yield from found.named_parameters(prefix=name, remove_duplicate=False)

    def _put_together(self, sliced: tuple[Sliced, Sliced]) -> list[CutUnit]:
        training, evaluating = sliced
        count = len(training.units)
        kinds = [type(self.model.get_submodule(name)).__name__ if name else "" for name in training.blocks]
        units = []
        for index, pair in enumerate(zip(training.units, evaluating.units, strict=True)):
            kind = kinds[index] or ("Prologue" if index < count - 1 else "Epilogue")
            entry = self.entry if index == 0 else None
            slices = [*pair, *(one.loss for one in sliced if one.loss is not None and index == count - 1)]
            calls, reads = (
                tuple(dict.fromkeys(call.target for part in slices for call in part.piece.calls if call.op is op))
                for op in (Op.MODULE, Op.READ)
            )
            units.append(CutUnit(kind, self._names[index], calls, reads, *pair, entry=entry))
        return units

    def _loss_of(self, sliced: tuple[Sliced, Sliced]) -> CutLoss | None:
        training, evaluating = (one.loss for one in sliced)
        return None if training is None or evaluating is None else CutLoss(training, evaluating, self.entry)


def find_blocks(model: nn.Module, patterns: str | Sequence[str]) -> tuple[str, ...]:
    """The outermost modules whose names match a glob, in the model's order."""
    modules = dict(model.named_modules())
    globs = [patterns] if isinstance(patterns, str) else list(patterns)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in modules if name):
            raise UsageError(
                f"blocks={glob!r} matches no module of {type(model).__name__}."
                f"{did_you_mean(glob.rstrip('.*'), [name for name in modules if name])} A glob such as"
                " 'transformer.h.*' names the modules that stay whole"
            )
    hits = [name for name in modules if name and any(fnmatchcase(name, glob) for glob in globs)]
    found = tuple(name for name in hits if not any(outer in hits for outer in _ancestors(name)))
    for name in found:
        if type(modules[name]).forward is nn.Module.forward:
            raise UsageError(
                f"blocks: {name!r} is a {type(modules[name]).__name__}, which is not called; name its children,"
                f" {name + '.*'!r}"
            )
    return found


def _ancestors(name: str) -> list[str]:
    """The names of the modules around this one, but the whole."""
    atoms = name.split(".")
    return [".".join(atoms[:depth]) for depth in range(1, len(atoms))]


def _refuse_hooks(name: str, module: nn.Module) -> None:
    found = [kind for kind in _HOOKS if getattr(module, kind)]
    if found:
        raise UsageError(
            f"{name or 'the model itself'} ({type(module).__name__}) has {found[0].strip('_').replace('_', ' ')}, but"
            " its forward is cut in pieces, so they could not run; put them on a block, or on the PipelineModule"
        )


def _named_sample(model: nn.Module, sample: Any) -> Mapping[str, Any] | None:
    """The sample as arguments of forward by name."""
    if sample is None or isinstance(sample, Mapping):
        return sample
    values = sample if isinstance(sample, (tuple, list)) else (sample,)
    return dict(zip(inspect.signature(model.forward).parameters, values, strict=False))


def _arguments(
    model: nn.Module,
    inputs: str | Sequence[str] | None,
    labels: str | Sequence[str] | None,
    constants: Mapping[str, Any] | None,
    *,
    own_loss: bool,
    sample: Mapping[str, Any] | None,
) -> Arguments:
    known = inspect.signature(model.forward).parameters
    plain = [p for p in known.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY, p.POSITIONAL_ONLY)]
    names = [parameter.name for parameter in plain]
    usual = [name for name in LABELS if name in names][:1] if own_loss else []
    late = _listed(labels, usual)
    varying = list(sample) if sample is not None else [p.name for p in plain if p.default is p.empty]
    early = tuple(name for name in _listed(inputs, varying) if name not in late)
    fixed = {p.name: p.default for p in plain if p.default is not p.empty} | dict(constants or {})
    open_ended = any(p.kind is p.VAR_KEYWORD for p in known.values())
    for name in (*early, *late, *(constants or {})):
        if name not in names and not open_ended:
            raise UsageError(
                f"{type(model).__name__}.forward has no argument {name!r}; it takes {', '.join(names)}."
                f"{did_you_mean(name, names)}"
            )
    missing = [p.name for p in plain if p.name not in fixed and p.name not in (*early, *late)]
    if missing:
        raise UsageError(f"{type(model).__name__}.forward needs {', '.join(missing)}; name it in inputs or constants")
    return Arguments(early, late, tuple(names), {name: v for name, v in fixed.items() if name not in (*early, *late)})


def _listed(given: str | Sequence[str] | None, usual: Sequence[str]) -> tuple[str, ...]:
    if given is None:
        return tuple(usual)
    return (given,) if isinstance(given, str) else tuple(given)


@contextlib.contextmanager
def _in_mode(modules: Sequence[nn.Module], training: bool) -> Iterator[None]:
    before = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, was in zip(modules, before, strict=True):
            module.training = was


def _child(module: nn.Module, name: str) -> nn.Module:
    found = module._modules[name]
    assert found is not None
    return found


def _add(parent: nn.Module, name: str, child: nn.Module) -> None:
    if name not in parent._modules and hasattr(parent, name):
        raise UsageError(
            f"a {type(parent).__name__} has an attribute {name!r} of its own, so no module can have that name"
        )
    parent.add_module(name, child)
