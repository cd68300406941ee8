"""The user's torch optimizer, updating flat shards instead of parameters.

A *run* is a stretch of neighbouring parameters in one bucket that share their history: one long tensor for the
optimizer. A bucket starts as one run. A parameter that no rank used in a step keeps its value and its moments, as in
plain PyTorch, so its history parts from its neighbours' and the run splits there. State belongs to the parameter's
name: it is exported and restored per parameter, whatever the runs were.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby, pairwise
from math import prod
from typing import Any

import torch

from sheer import device as devices
from sheer.comm import Depot, DeviceMemory
from sheer.errors import UsageError
from sheer.layout import Interval, Slot, overlap
from sheer.optim.forms import StateForm, as_tensor, form_of
from sheer.optim.incoming import Incoming
from sheer.optim.lion import Lion
from sheer.optim.paging import BucketPaging, NoPaging, Paging
from sheer.optim.pieces import Master, Run, SavedState, StatePiece

_ELEMENTWISE: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        Lion,
    }
)


# Fused kernels that divide gradients on the way.
_FUSED: frozenset[type[torch.optim.Optimizer]] = frozenset({torch.optim.Adam, torch.optim.AdamW})

MASTER = "(master)"
"""Key under which a parked parameter's fp32 value is kept; never written to a checkpoint."""


def needs_whole_tensors(base: torch.optim.Optimizer) -> bool:
    """Whether an update depends on more than the element itself (LAMB, Adafactor, Muon ...), found by trying.

    For each group, three steps on a small matrix are compared with three on its flattened halves, each half in an
    optimizer of its own, as if on a rank of its own. The optimizer's own state is not touched. An optimizer that cannot
    be tried counts as needing whole tensors.
    """
    if type(base) in _ELEMENTWISE:
        return False
    return any(_mixes_elements(base, group) for group in base.param_groups)


def _mixes_elements(base: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 6, generator=generator)
    grads = [torch.randn(8, 6, generator=generator) for _ in range(3)]
    halves = [half.clone() for half in whole.view(2, 24)]
    try:
        _try_steps(base, group, whole, grads)
        for number, half in enumerate(halves):
            _try_steps(base, group, half, [grad.view(2, 24)[number] for grad in grads])
    except Exception:
        return True
    return not torch.allclose(whole.reshape(-1), torch.cat(halves), rtol=1e-5, atol=1e-7)


def expected_state(base: torch.optim.Optimizer, group: int, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The per-element state that `base` will make for the parameters of a group, found by trying: what it is kept in,
    by key. Empty where it cannot be tried."""
    tensor = torch.zeros(6, dtype=dtype)
    try:
        state = _try_steps(base, base.param_groups[group], tensor, [torch.ones_like(tensor)])
    except Exception:
        return {}
    return {key: value.dtype for key, value in state.items() if form_of(value, tensor) == StateForm.ELEMENT}


def _try_steps(
    base: torch.optim.Optimizer, group: Mapping[str, Any], tensor: torch.Tensor, grads: list[torch.Tensor]
) -> dict[str, Any]:
    """The state of `tensor` after steps with `grads`."""
    trial = copy.copy(base)
    options = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
    if "lr" in options:  # a warmup may just have set it to 0, and then nothing would be seen
        options["lr"] = 0.1
    trial.param_groups = [{**options, "params": [tensor]}]
    trial.state = defaultdict(dict)
    trial.state[tensor] = _state_at_the_start(base, group, tensor)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    for grad in grads:
        tensor.grad = grad.clone()
        type(base).step(trial)
    return dict(trial.state[tensor])


def _state_at_the_start(base: torch.optim.Optimizer, group: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """What an optimizer that makes state in its constructor would have made for `like`, from one of its parameters."""
    owner = next((param for param in group["params"] if param.dim() and param.numel() and base.state.get(param)), None)
    if owner is None:
        return {}
    return {
        key: torch.full_like(like, value.flatten()[0].item())
        if form_of(value, owner) == StateForm.ELEMENT
        else copy.deepcopy(value)
        for key, value in base.state[owner].items()
    }


def cannot_shard(base: torch.optim.Optimizer) -> UsageError:
    """What to say of an optimizer that needs whole tensors where parameters are updated in shards."""
    return UsageError(
        f"{type(base).__name__} updates a parameter by more than its own element (its shape or norm), or failed when "
        "it was tried on flat tensors, so it cannot work on shards of flat buffers. Allowed: zero_optimization.stage "
        "0, or an element-wise optimizer such as AdamW at stages 1 and 2."
    )


class FlatOptimizer:
    """Drives `base` over the masters. Groups stay 1:1 with the user's, and stay the same dict objects."""

    def __init__(
        self,
        base: torch.optim.Optimizer,
        masters: Sequence[Master],
        *,
        depot: Depot | None = None,
        in_parts: bool = False,
        given: list[list[torch.Tensor]] | None = None,
    ) -> None:
        """`depot` is where the masters rest, and the state is to; by default the memory that they are in. `in_parts`
        asks for masters to be updated one by one, where the optimizer can."""
        self.base = base
        self.masters = tuple(masters)
        here = self.masters[0].tensor.device if self.masters else devices.host()
        self.depot: Depot = DeviceMemory(here) if depot is None else depot
        self.device = self.depot.device
        self._in_parts = in_parts
        self._paging: Paging = BucketPaging(self, self._expected) if self.depot.paged else NoPaging()
        self.whole_tensors = needs_whole_tensors(base)
        if self.whole_tensors and any(master.owned.numel != master.bucket.numel for master in self.masters):
            raise cannot_shard(base)
        self.given = given or [list(group["params"]) for group in base.param_groups]
        """The user's parameters of each group, to give back in the end."""
        self.parked: list[StatePiece] = []
        """State of parameters that do not train now, kept on one rank each until they do again."""
        self._parked_forms: dict[str, str] = {}
        base.state.clear()
        self._set_runs([run for index in range(len(self.masters)) for run in self._first_runs(index)])

    def _expected(self, index: int) -> dict[str, torch.dtype]:
        master = self.masters[index]
        return expected_state(self.base, master.bucket.key.group or 0, master.tensor.dtype)

    def _first_runs(self, index: int) -> Iterator[Run]:
        master = self.masters[index]
        if not self.whole_tensors:
            yield self.run_over(index, master.owned)
            return
        for slot in master.bucket.slots:
            run = self.run_over(index, Interval(slot.start, slot.stop))
            run.tensor = run.tensor.view(slot.shape)
            yield run

    def run_over(self, index: int, span: Interval) -> Run:
        """Elements `span` of master `index` as one tensor for the optimizer."""
        master = self.masters[index]
        return Run(index, span, master.tensor[span.start - master.owned.start : span.stop - master.owned.start])

    def _set_runs(self, runs: list[Run]) -> None:
        self.runs = runs
        for number, group in enumerate(self.base.param_groups):
            group["params"][:] = [r.tensor for r in runs if self.masters[r.master].bucket.key.group == number]

    # --- update -----------------------------------------------------------------------------------------------------

    def update(
        self,
        grads: Sequence[torch.Tensor],
        *,
        factor: torch.Tensor | None = None,
        unused: Collection[str] = (),
        first: Callable[[int], None] | None = None,
        then: Callable[[int], None] | None = None,
    ) -> None:
        """One optimizer step with `factor` (0-d; clipping and loss scale) times `grads` (one per master: [owned], may
        be overwritten); parameters in `unused` keep still.

        `first` is called with the index of each master before it is updated, `then` after that, so that its result can
        travel while the next is computed. Masters are updated one by one in order of use. An optimizer of the user's,
        or one with step hooks, steps once all the same: its step may count, or look at all parameters.
        """
        if unused:
            self._isolate(frozenset(unused))
        moving = [run for run in self.runs if not unused or any(s.fqn not in unused for s in self._slots(run))]
        factor = None if factor is None else factor.to(self.device)
        turns = self._turns()
        dividing: AbstractContextManager[None] = nullcontext()
        if factor is not None and self._divides:
            dividing, factor = self._divided_by(factor), None
        with dividing:
            for number, turn in enumerate(turns):
                for index in turn:
                    if first is not None:
                        first(index)
                for index in turns[number + 1] if number + 1 < len(turns) else ():
                    self._paging.expect(index)
                mine = {index: self._gradient(index, grads[index], factor) for index in turn}
                self._step([run for run in moving if run.master in mine], mine)
                for index in turn:
                    if then is not None:
                        then(index)
                    self._paging.keep(index)

    def _turns(self) -> list[Sequence[int]]:
        """The masters of each call of the optimizer."""
        order = range(len(self.masters) - 1, -1, -1)
        if not self._in_parts or not self.may_step_in_parts:
            return [order]
        return [(index,) for index in order]

    def _gradient(self, index: int, grad: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
        """As the optimizer wants it."""
        grad = grad.to(self.device, self.masters[index].tensor.dtype)
        return grad if factor is None else grad.mul_(factor)

    @property
    def _divides(self) -> bool:
        """Whether a fused kernel applies the factor, which saves a pass over the gradients."""
        return type(self.base) in _FUSED and all(group.get("fused") for group in self.base.param_groups)

    @contextmanager
    def _divided_by(self, factor: torch.Tensor) -> Iterator[None]:
        """As torch's GradScaler tells a fused optimizer by what to divide."""
        self.base.grad_scale = factor.reciprocal()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del self.base.grad_scale  # type: ignore[attr-defined]

    @property
    def may_step_in_parts(self) -> bool:
        """Whether several calls of the optimizer, each for some of the masters, are as one call for all."""
        hooks = self.base._optimizer_step_pre_hooks or self.base._optimizer_step_post_hooks
        return type(self.base) in _ELEMENTWISE and not hooks

    def _step(self, runs: Sequence[Run], grads: Mapping[int, torch.Tensor]) -> None:
        for run in runs:
            start = self.masters[run.master].owned.start
            run.tensor.grad = grads[run.master][run.span.start - start : run.span.stop - start].view_as(run.tensor)
        self.base.step()
        for run in runs:
            run.tensor.grad = None

    def runs_of(self, index: int) -> list[Run]:
        """The runs of one master."""
        return [run for run in self.runs if run.master == index]

    def _slots(self, run: Run) -> list[Slot]:
        """The parameters that have elements in this run (padding has none)."""
        slots = self.masters[run.master].bucket.slots
        return [slot for slot in slots if overlap(Interval(slot.start, slot.stop), run.span) is not None]

    def _isolate(self, unused: frozenset[str]) -> None:
        runs = []
        for run in self.runs:
            spans = self._spans(run, unused)
            runs.extend(self._split(run, spans) if len(spans) > 1 else [run])
        if len(runs) != len(self.runs):
            self._set_runs(runs)

    def _spans(self, run: Run, unused: frozenset[str]) -> list[Interval]:
        """`run` cut where neighbours differ in being used; padding goes with what stands before it."""
        stretches = [list(group) for _, group in groupby(self._slots(run), key=lambda slot: slot.fqn in unused)]
        cuts = [run.span.start, *(stretch[0].start for stretch in stretches[1:]), run.span.stop]
        return [Interval(start, stop) for start, stop in pairwise(cuts)]

    def _split(self, run: Run, spans: Sequence[Interval]) -> list[Run]:
        state = self.base.state.pop(run.tensor, None)
        parts = [self.run_over(run.master, span) for span in spans]
        for part in parts if state else ():
            start, stop = part.span.start - run.span.start, part.span.stop - run.span.start
            self.base.state[part.tensor] = {
                key: value[start:stop] if form_of(value, run.tensor) == StateForm.ELEMENT else copy.deepcopy(value)
                for key, value in state.items()
            }
        return parts

    # --- state by name ----------------------------------------------------------------------------------------------

    def forms(self) -> dict[str, str]:
        """The `StateForm` of every state there is on this rank."""
        forms = dict(self._parked_forms)
        for run in self.runs:
            for key, value in self.base.state.get(run.tensor, {}).items():
                # A 0-d parameter cannot tell the two apart; its neighbours can.
                if value is not None and forms.get(key) != StateForm.ELEMENT:
                    forms[key] = self._checked_form(key, value, run)
        return forms

    def _checked_form(self, key: str, value: object, run: Run) -> str:
        form = form_of(value, run.tensor)
        if form is None:
            raise UsageError(
                f"optimizer state {key!r} of {type(self.base).__name__} is a {type(value).__name__}; tensors and "
                "numbers can be saved"
            )
        if form == StateForm.WHOLE and not self.whole_tensors:
            raise UsageError(
                f"optimizer state {key!r} of {type(self.base).__name__} has shape {tuple(value.shape)}, "  # type: ignore[attr-defined]
                "which is neither one value per element nor one value; it cannot be assigned to a parameter"
            )
        return form

    def export(self, *, within: Mapping[int, Interval] | None = None) -> Iterator[StatePiece]:
        """The state of this rank's elements, per parameter; of `within` (by master index) where given.

        A state that is not per element goes out where the parameter's first element is.
        """
        yield from (piece for piece in self.parked if piece.key != MASTER)
        forms = self.forms()
        for run in self.runs:
            master = self.masters[run.master]
            span = overlap(run.span, within[run.master]) if within is not None else run.span
            if span is None:
                continue
            for key, value in self.base.state.get(run.tensor, {}).items():
                if value is None:
                    continue
                element = forms[key] == StateForm.ELEMENT
                for piece in master.bucket.pieces(span):
                    if prod(piece.shape) == 0:  # without elements there is nothing to remember
                        continue
                    if element:
                        at = piece.offset - run.span.start
                        data = value.reshape(-1)[at : at + piece.stop - piece.start]
                        yield StatePiece(key, piece.fqn, piece.shape, piece.start, data)
                    elif piece.start == 0:
                        whole = as_tensor(value)
                        yield StatePiece(key, piece.fqn, tuple(whole.shape), 0, whole.reshape(-1))

    def blank(
        self,
        saved: Mapping[str, Mapping[str, SavedState]],
        forms: Mapping[str, str],
        *,
        rank: int,
        world: int,
        reuse: bool = False,
    ) -> Incoming:
        """Room for the state that was saved of this rank's elements: `saved` by name and key.

        Parameters that do not train here are parked, whole, on one rank each. Fill the `pieces` of what is returned,
        then hand it to `adopt`. With `reuse` the state that there is gives its memory where it fits; fill `in_use` too
        then, once nothing can fail any more.
        """
        strange = sorted(key for key, form in forms.items() if form == StateForm.WHOLE)
        if strange and not self.whole_tensors:
            raise UsageError(
                f"the state {strange} of {type(self.base).__name__} has one tensor per parameter that is not of the "
                "parameter's shape; an element-wise optimizer on flat buffers cannot use it"
            )
        trained = {slot.fqn for master in self.masters for slot in master.bucket.slots}
        idle = [fqn for fqn in sorted(saved) if fqn not in trained]
        return Incoming(self, saved, forms, parked=idle[rank::world], reuse=reuse)

    def adopt(self, incoming: Incoming) -> None:
        """Make `incoming` the optimizer's state; parameters it does not mention start afresh."""
        self.base.state.clear()
        runs: list[Run] = []
        for index in range(len(self.masters)):
            for run, state in incoming.runs(index):
                runs.append(run)
                if state:
                    self.base.state[run.tensor] = state
        self._set_runs(runs)
        self._paging.adopt(incoming.elements)
        self.parked = incoming.parked
        self._parked_forms = {piece.key: incoming.forms[piece.key] for piece in incoming.parked if piece.key != MASTER}

    def move(
        self, masters: Sequence[torch.Tensor], carry: Callable[[torch.Tensor, torch.device], torch.Tensor] | None
    ) -> None:
        """`masters` have moved: the same values elsewhere, in the same order. `carry`, if given, takes the state of
        every element somewhere else; it is told the device that it is at home on."""
        self.masters = tuple(m._replace(tensor=tensor) for m, tensor in zip(self.masters, masters, strict=True))
        runs = []
        for old in self.runs:
            run = self.run_over(old.master, old.span)
            run.tensor = run.tensor.view(old.tensor.shape)
            state = self.base.state.pop(old.tensor, None)
            if state is not None:
                self.base.state[run.tensor] = {
                    key: carry(value, self.device)
                    if carry is not None and form_of(value, old.tensor) in (StateForm.ELEMENT, StateForm.WHOLE)
                    else value
                    for key, value in state.items()
                }
            runs.append(run)
        self._set_runs(runs)

    def release(self) -> None:
        """Give the user's optimizer its own parameters back."""
        self.base.state.clear()
        for group, given in zip(self.base.param_groups, self.given, strict=True):
            group["params"][:] = given
        self.runs = []
