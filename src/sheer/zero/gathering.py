"""Parameters sharded at rest: gathered before use, one unit ahead of it, and let go of after it.

Gathers are collectives, so all ranks submit them in one order: that of a plan, a sequence of units for forward and one
for backward, each with every unit in it. A rank that comes to a unit first submits what the plan has before it, and at
the end of a pass what is left: it gathers what it skips, because other ranks may not skip it. The plan of the first
step is the order of definition; what was seen on it, agreed over ranks, is the plan from then on. What a plan lacks (a
block called more often than on the first step, or outside a call of the whole module) is gathered when it is called:
then every rank must make that call. Reductions keep to the plan too: a unit's gradients leave when the backward's plan
is through with it, so that gathers and reductions have one order on one lane.

Forward: a unit is whole from a call's beginning to its end; the last one of a forward stays, for backward begins with
it. Backward: a unit is whole from the gradient of a call's output until something that ran before that call is reached.
What belongs to no block (the unit "") stays from its first use to the update.

A pipeline's stage has a plan for each kind of pass and each of its chunks, and says which pass comes next (`turn`), so
that the unit which that one begins with stays, or is on its way, when it begins. Between a forward and its backward
nothing is kept: other micro-batches come between.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch

from sheer.comm import Axis, Lane, Ticket, Vault
from sheer.errors import CommError, UsageError
from sheer.zero.autograd import at_end_of_backward, inside_backward, weakly
from sheer.zero.flat import ShardedFlat
from sheer.zero.order import Walk, complete, merge
from sheer.zero.outside import OutsideReads, read_since, recorded
from sheer.zero.units import ROOT


class Presence(Enum):
    """Whether a unit's parameters are here."""

    AWAY = "sharded"
    ARRIVING = "being gathered"
    WHOLE = "gathered"


@dataclass(eq=False)
class Unit:
    """What is gathered at once."""

    name: str
    flats: tuple[ShardedFlat, ...]
    presence: Presence = Presence.AWAY
    depth: int = 0
    """Calls of it that are running."""
    pins: int = 0
    """How many hold it besides the passes (`GatheredParameters`)."""
    kept: bool = False
    """Whether it stays until the update, because a parameter was read outside its calls."""
    tickets: list[Ticket] = field(default_factory=list)

    def name_of(self, param: torch.nn.Parameter) -> str:
        """The name of `param`, which is one of its own."""
        return next(name for flat in self.flats if (name := flat.name_of(param)))


@dataclass(eq=False)
class Call:
    """One call of a module in a forward, as its backward needs it."""

    units: tuple[Unit, ...]
    start: int
    """When it began and ended, by the count of such moments."""
    stop: int = 0
    began: int = 0
    """The same by what autograd has recorded."""
    ended: int = 0


class Phase(Enum):
    """What a pass over the units is for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    INPUTS = "the inputs' half of a backward"
    WEIGHTS = "the weights' half of a backward"


class Pass(NamedTuple):
    """A kind of pass, each with a plan of its own."""

    phase: Phase
    chunk: int = 0


class _Opening(NamedTuple):
    """What a unit is whole for in a backward."""

    start: int
    """Of the call whose backward runs."""
    task: int
    """Autograd's number of that backward: those of reentrant checkpoints have greater ones than what runs them."""


class Gathering:
    """The units of one model. Does nothing where nothing is sharded (`flats` is empty)."""

    def __init__(
        self,
        flats: Sequence[ShardedFlat],
        order: Sequence[str],
        *,
        chunks: Sequence[Sequence[str]],
        ahead: bool,
        axis: Axis,
        lane: Lane,
        vault: Vault,
    ) -> None:
        self.vault = vault
        self.before: Callable[[Callable[[str], bool]], None] = _nothing
        """Called at every position of the backward's plan, before its gather, with a function that says which units the
        plan is through with: then is the time to reduce their gradients."""
        self._ahead = ahead
        self._axis = axis
        self._lane = lane
        self._units = {name: Unit(name, tuple(f for f in flats if f.plan.key.unit == name)) for name in order}
        self.outside = OutsideReads(weakly(self._read_outside))
        """Active while a call of the whole module runs and none of a block."""
        self.read_outside: set[str] = set()
        """Parameters to move to what is in no block; equal on all ranks. After the first step: what it has read where
        no call of a block ran."""
        self._noticed: set[str] = set()  # such reads of the first step, on this rank
        self.blanks = {flat.blank: flat.plan.key.unit or "no block" for flat in flats}
        """Storage of a placeholder -> the unit it stands for."""
        self._unit_of = {
            id(param): unit for unit in self._units.values() for flat in unit.flats for param in flat.params
        }
        self._chunks = tuple(map(tuple, chunks))
        self._walks = {
            Pass(phase, chunk): Walk(names if phase is Phase.FORWARD else names[::-1])
            for phase in Phase
            for chunk, names in enumerate(self._chunks)
        }
        self._records: dict[Pass, list[tuple[str, ...]]] | None = {one: [] for one in self._walks}
        """What the first step has come to in each kind of pass; None once the plans are agreed."""
        self.turn(None)
        self._forward_end = recorded()
        self._lone: list[Call] = []  # since then, outside a call of the whole module
        self._clock = 0
        self._depth = 0  # calls of the whole module that are running
        self._training = False  # whether the outermost of them began where gradients are wanted
        self._open: dict[Unit, _Opening] = {}
        self._running = False  # a backward
        self._holding = False  # nothing is let go of before the update: a backward has made a graph of itself
        self._broken = False  # a gather has failed: there is nobody to keep in step with

    def __getitem__(self, name: str) -> Unit:
        return self._units[name]

    @property
    def paces(self) -> bool:
        """Whether there is a plan that reductions keep to."""
        return any(self._chunks)

    @property
    def within_forward(self) -> bool:
        """Whether a call of the whole module, or a forward of a stage, is running."""
        return self._depth > 0

    @property
    def learning(self) -> bool:
        """Whether the first step with sharded parameters is still going on."""
        return bool(self._units) and self._records is not None

    # --- one unit ---------------------------------------------------------------------------------------------------

    def _submit(self, unit: Unit) -> None:
        if unit.presence is Presence.AWAY:
            unit.presence = Presence.ARRIVING
            with self._noting_failure():
                for flat in unit.flats:
                    unit.tickets.append(flat.gather(self._lane))

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except CommError:
            self._broken = True
            raise

    def _arrive(self, unit: Unit) -> None:
        if unit.presence is Presence.WHOLE:
            return
        self._submit(unit)
        with self._noting_failure():
            for ticket in unit.tickets:
                ticket.wait()
        for flat in unit.flats:
            flat.show()
        unit.presence = Presence.WHOLE

    def _release(self, unit: Unit) -> None:
        """Let go of a unit, unless something keeps it."""
        if not (unit.name == ROOT or unit.depth or unit.pins or unit.kept or self._holding):
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        if unit.presence is Presence.AWAY:
            return
        for ticket in unit.tickets:
            ticket.drop()
        for flat, ticket in zip(unit.flats, unit.tickets, strict=False):  # the last may never have been submitted
            flat.hide(ticket)
        unit.tickets, unit.presence = [], Presence.AWAY

    def _prefetch(self, walk: Walk, position: int) -> None:
        if self._ahead and position < len(walk.order):
            self._submit(self._units[walk.order[position]])

    # --- which pass -------------------------------------------------------------------------------------------------

    def turn(self, current: Pass | None, *, following: Pass | None = None) -> None:
        """The next pass is `current`, and then comes `following`; None: as the module is called, whatever comes."""
        back = current if current is not None and current.phase is not Phase.FORWARD else Pass(Phase.BACKWARD)
        ahead = current if current is not None and current.phase is Phase.FORWARD else Pass(Phase.FORWARD)
        self._passes = (ahead, back)
        nothing = Walk(())
        self._forward, self._backward = self._walks.get(ahead, nothing), self._walks.get(back, nothing)
        self._following = None if following is None else self._walks.get(following, nothing)
        self._piped = current is not None

    def _kept(self, walk: Walk) -> str | None:
        """The last unit of `walk`, where the pass after it begins with it."""
        last = walk.order[-1] if walk.order else None
        if self._piped:
            return last if self._following is not None and self._following.order[:1] == (last,) else None
        return last if walk is self._forward and torch.is_grad_enabled() else None

    def _end(self, walk: Walk) -> None:
        """The rest of a pass, and the beginning of the one that is known to follow."""
        self._pass(walk, walk.rest())
        if self._following is not None:
            self._prefetch(self._following, 0)

    # --- forward ----------------------------------------------------------------------------------------------------

    def begin_pipelined(self) -> None:
        """A forward of a pipeline's stage begins, its loss included. What belongs to no block is gathered with the
        first one, so that a rank which never comes to its layers gathers it too."""
        self.begin_forward()
        if ROOT in self._units:
            self._arrive(self._units[ROOT])

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, a parameter that is read where no call of a block runs is gathered first, a loss's too."""
        if not self._units:
            yield
            return
        self.outside.begin()
        try:
            yield
        finally:
            self.outside.end()

    def begin_forward(self) -> None:
        """A call of the whole module begins."""
        self._depth += 1
        if self._depth == 1 and not inside_backward():
            self._training = torch.is_grad_enabled()
            if self._running:
                self.abort_backward()
            self._forward.restart()

    def end_forward(self) -> None:
        """It has ended: gather what other ranks may have used and this one has not."""
        self._depth -= 1
        if self._depth or inside_backward():
            return
        self._end(self._forward)
        if torch.is_grad_enabled():
            self._note(self._passes[0], self._forward)
            self._forward_end = recorded()
            self._lone.clear()

    def _note(self, what: Pass, walk: Walk) -> None:
        if self._records is not None and what in self._records:
            self._records[what].append(tuple(walk.record))

    def abort_forward(self) -> None:
        """It has raised. Other ranks may go on, so they find this one where they expect it."""
        if self._broken or not isinstance(sys.exc_info()[1], Exception):
            self._depth -= 1
            return
        with suppress(CommError):  # what has failed is on its way to the user
            self.end_forward()

    def _read_outside(self, param: torch.nn.Parameter) -> None:
        """`param` is wanted where no call of a block runs."""
        unit = self._unit_of.get(id(param))
        if unit is None or unit.name == ROOT:
            return
        # In a reentrant checkpoint there is no gradient yet, but its backward will want it.
        unit.kept = unit.kept or self._training
        if self.learning:
            self._noticed.add(unit.name_of(param))
        self._arrive(unit)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Refuse a loss for which a parameter that is not here was read after the last forward.

        Raises:
            UsageError: naming it.
        """
        if self._holding:  # a backward with create_graph has read parameters, where they were whole, and they still are
            return
        for param, moment in read_since(self._forward_end, loss) if self._units else ():
            unit = self._unit_of.get(id(param))
            if unit is not None and unit.name != ROOT and not (unit.pins or self._was_called(unit, moment)):
                raise UsageError(
                    f"parameter {unit.name_of(param)!r} was read after the forward, for the loss, where it is sharded "
                    "(stage 3), so only a placeholder was. Read it inside the model's forward, or inside "
                    "sheer.zero.GatheredParameters with the backward in it too, or, once, for good: "
                    "sheer.zero.register_external_parameter(model, parameter)"
                )

    @property
    def _is_lone(self) -> bool:
        """Whether a call that begins or ends now is outside a call of the whole module, and may have a backward."""
        recording = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return recording and not self._depth and not inside_backward()

    def _was_called(self, unit: Unit, moment: int) -> bool:
        """Whether a call of `unit` was running outside a call of the whole module then."""
        return any(call.units.count(unit) and call.began <= moment < call.ended for call in self._lone)

    def enter(self, units: tuple[Unit, ...]) -> Call:
        """A call that needs `units` begins."""
        self._clock += 1
        call = Call(units, self._clock)
        if self._is_lone:
            call.began = recorded()
        fresh = [unit for unit in units if not unit.depth]
        for unit in units:
            unit.depth += 1
        try:
            for unit in fresh:
                self._bring(unit)
        except BaseException:
            self.leave(call)
            raise
        return call

    def _bring(self, unit: Unit) -> None:
        task = torch._C._current_graph_task_id()
        if task != -1:
            self._reenter(unit, task)
        elif unit.name == ROOT or not self._depth:
            self._arrive(unit)
        else:
            self._come_to(unit, self._forward)

    def _come_to(self, unit: Unit, walk: Walk) -> None:
        skipped = walk.reach(unit.name)
        planned = skipped is not None
        self._pass(walk, skipped or range(0))
        if planned:
            self._tell_position(walk, walk.at - 1)
        self._arrive(unit)
        if planned:
            self._prefetch(walk, walk.at)

    def _tell_position(self, walk: Walk, position: int) -> None:
        if walk is self._backward:
            self.before(lambda name: walk.is_over(name, position))

    def _pass(self, walk: Walk, positions: range) -> None:
        """Gather what this rank skips; what the plan has twice in a row stays for the second time."""
        for position in positions:
            unit = self._units[walk.order[position]]
            self._tell_position(walk, position)
            self._arrive(unit)
            self._prefetch(walk, position + 1)
            following = walk.order[position + 1] if position + 1 < len(walk.order) else None
            stays = following == unit.name or (following is None and self._kept(walk) == unit.name)
            if not stays and unit not in self._open:
                self._release(unit)

    def leave(self, call: Call) -> None:
        """It has ended, or raised."""
        self._clock += 1
        call.stop = self._clock
        inside = inside_backward()
        if self._is_lone:
            call.ended = recorded()
            self._lone.append(call)
        for unit in call.units:
            unit.depth -= 1
            if not (unit.depth or inside or self._stays(unit)):
                self._release(unit)

    def _stays(self, unit: Unit) -> bool:
        if not self._depth:
            return False
        walk = self._forward
        return unit.name == (self._kept(walk) if walk.next is None else walk.next)

    # --- backward ---------------------------------------------------------------------------------------------------

    def on_backward(self, call: Call) -> None:
        """The gradient of an output of `call` is there: its backward begins."""
        task = torch._C._current_graph_task_id()
        if not self._running:
            self.begin_backward()
            at_end_of_backward(self.end_backward)
        if torch.is_grad_enabled():  # create_graph: a second backward will go through these units' memory
            self._holding = True
        fresh = [unit for unit in call.units if unit not in self._open]
        for unit in call.units:
            self._open[unit] = _Opening(call.start, task)
        self._close(after=call.stop, task=task)
        for unit in fresh:
            self._open_up(unit)

    def want(self, call: Call) -> None:
        """What autograd has saved of `call`'s units is about to be used."""
        if all(unit.presence is Presence.WHOLE for unit in call.units):
            return
        if not inside_backward():
            raise UsageError(
                f"what autograd saved of {call.units[0].name} cannot be looked at outside a backward: at stage 3 it is "
                "sharded"
            )
        self.on_backward(call)

    def _reenter(self, unit: Unit, task: int) -> None:
        """A checkpoint runs its forward again. Its backward has yet to come, so the unit stays until then."""
        if not self._running:
            self.begin_backward()
            at_end_of_backward(self.end_backward)
        if unit not in self._open:
            self._close(after=self._clock, task=task)
            self._open[unit] = _Opening(-1, task)
            self._open_up(unit)

    def _open_up(self, unit: Unit) -> None:
        if unit.name == ROOT:
            self._arrive(unit)
        else:
            self._come_to(unit, self._backward)

    def _close(self, *, after: int, task: int) -> None:
        """Autograd runs what was made last first, so units of calls that began after this moment are done with, and
        so are those of inner backwards."""
        for unit, opening in list(self._open.items()):
            if opening.start > after or opening.task > task:
                del self._open[unit]
                self._finish_with(unit)

    def _finish_with(self, unit: Unit) -> None:
        """The backward is through with a unit; it goes unless the next pass begins with it."""
        if self._backward.next is not None or unit.name != self._kept(self._backward):
            self._release(unit)

    def begin_backward(self) -> None:
        """A backward begins; whatever it reaches, this rank will have gathered every unit when it ends."""
        self._running = True
        self._backward.restart()

    def end_backward(self) -> None:
        """It has ended. Idempotent."""
        if not self._running:
            return
        opened, self._open = self._open, {}
        for unit in opened:
            self._finish_with(unit)
        self._end(self._backward)
        self._running = False
        self._note(self._passes[1], self._backward)

    def abort_backward(self) -> None:
        """It has failed; other ranks may go on."""
        if self._broken:
            self._running, self._open = False, {}
            return
        with suppress(CommError):
            self.end_backward()

    # --- between steps ----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Shards have new values: nothing that was gathered counts any more. Collective once, after the first step."""
        self._holding = False
        self._lone.clear()
        for unit in self._units.values():
            unit.kept = False
            self._let_go(unit)
        if self._records is not None and any(
            records for one, records in self._records.items() if one.phase is not Phase.FORWARD
        ):
            self._agree()

    def let_go_of_idle(self) -> None:
        """Free what is gathered and in no use; it is gathered again when it is. All ranks make this call."""
        for unit in self._units.values():
            if not (unit.depth or unit.pins or unit.kept or unit in self._open or self._holding):
                self._let_go(unit)

    def _agree(self) -> None:
        assert self._records is not None
        told = self._axis.gather_objects(
            ([list(dict.fromkeys(records)) for records in self._records.values()], self._noticed)
        )
        self.read_outside.update(name for _, noticed in told for name in noticed)
        for place, one in enumerate(self._records):
            seen = merge(record for records, _ in told for record in records[place])
            self._walks[one] = Walk(self._completed(one, seen))
        self._records = None
        self.turn(None)

    def _completed(self, one: Pass, seen: tuple[str, ...]) -> tuple[str, ...]:
        """The plan of a kind of pass, which has come to `seen` on the first step: with what other steps may come to."""
        units = self._chunks[one.chunk]
        if one.phase is Phase.FORWARD:
            return complete(seen, units)
        if one.phase is not Phase.BACKWARD and not seen:  # a first stage has no inputs to find gradients of
            return ()
        trained = [name for name in units if any(flat.plan.trainable for flat in self._units[name].flats)]
        return complete(seen[::-1], trained)[::-1]

    @contextmanager
    def pinned(self, names: Iterable[str]) -> Iterator[None]:
        """Units that are whole inside. Collective."""
        units = [self._units[name] for name in dict.fromkeys(names) if name in self._units]
        kept = [unit for unit in units if unit.presence is not Presence.AWAY]
        for unit in units:
            unit.pins += 1
            self._arrive(unit)
        try:
            yield
        finally:
            for unit in units:
                unit.pins -= 1
                for flat in unit.flats:
                    flat.adopt()  # in units that stay too, so that all parameters are of one dtype again
                if unit not in kept and not unit.pins and not unit.depth:
                    self._let_go(unit)

    def close(self) -> None:
        """Let go of everything, whatever state it is in, and forget it."""
        for unit in self._units.values():
            self._let_go(unit)
        self._units, self._open, self._unit_of = {}, {}, {}


def _nothing(_over: Callable[[str], bool]) -> None:
    """Nobody waits for anything else."""
