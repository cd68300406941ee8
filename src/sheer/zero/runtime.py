"""Running a layout: gradients are reduced while backward still runs, updated parameters are gathered.

Buckets are launched in plan order on every rank, every bucket at every reduction, so that no rank-dependent branch of
a model can make ranks disagree about what they communicate. All ranks must run the same number of backwards.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch.utils import _pytree

from sheer.comm import Arena, Counters, Depots, Lane, Mesh, Ticket
from sheer.errors import CommError
from sheer.layout import Bucket, Collective, Layout, Placement, change
from sheer.zero.autograd import at_end_of_backward, weakly
from sheer.zero.flat import Carry, FlatBucket, Source
from sheer.zero.gates import ModelGate, UnitGate
from sheer.zero.grads import BucketGrad, GradState, ResidentGrad, ShardedGrad, Wire
from sheer.zero.marks import Mark, hooks_of, mark
from sheer.zero.placing import Placed, Wholes, place
from sheer.zero.ties import TiedGrads
from sheer.zero.units import NO_UNITS, ROOT, Units

MAX_IN_FLIGHT = 2
"""Buckets under reduction at one time, each with the buffers it leases: one travels while the next fills."""

_GRADS: Mapping[Placement, type[ResidentGrad | ShardedGrad]] = {
    Placement.PARTIAL: ResidentGrad,
    Placement.SHARDED: ShardedGrad,
}


class Wiring(NamedTuple):
    """What the journeys between ranks are configured with."""

    dtype: torch.dtype | None
    """Wire dtype; None is each bucket's compute dtype."""
    prescale: float
    ahead: bool
    """Whether a unit is gathered while the one before it runs."""


class ZeroRuntime:
    """The buckets of one stage's parameters on the data axis. Collective to build: ranks start from rank 0's
    parameters, or from what `source` gives where parameters are sharded."""

    def __init__(
        self,
        layout: Layout,
        params: Mapping[str, torch.nn.Parameter],
        *,
        mesh: Mesh,
        device: torch.device,
        wiring: Wiring,
        depots: Depots,
        units: Units = NO_UNITS,
        source: Source | None = None,
    ) -> None:
        self.layout = layout
        self.mesh = mesh
        self.axis = axis = mesh.data
        self.arena = Arena(device)
        self.lane = Lane(axis, arena=self.arena)
        self.world_lane = self.lane if mesh.stages == 1 else Lane(mesh.world, counters=self.lane.counters)
        self.owner: weakref.ref[object] | None = None
        """The engine that drives it, for who comes from a parameter."""
        self.reducing = False
        """Whether the next backward reduces; set by the engine, which knows the accumulation boundary."""
        self.mean_factor = 1.0
        """What turns the sum over ranks and micro-batches into the mean; set by the engine for each step."""
        self.running = False
        """Whether a backward has begun and not finished."""
        self.by_user = False
        """Whether a backward that the engine did not run has brought gradients; the engine takes this back."""
        self.depots = depots
        self.placed = place(
            layout,
            params,
            units=units,
            source=source,
            lane=self.lane,
            axis=axis,
            device=device,
            depots=depots,
            ahead=wiring.ahead,
        )
        self.flats = self.placed.flats
        self.gathering = self.placed.gathering
        self.grads = tuple(self._make_grad(flat, wiring) for flat in self.flats if flat.plan.trainable)
        self._ties = TiedGrads(self.grads, mesh, self.lane.counters)
        self._all_used = torch.ones(sum(len(grad.flat.params) for grad in self.grads), device=device)
        self.gathering.before = weakly(self._launch_over)
        self._all = tuple(range(len(self.grads)))
        self._chunked = any(grad.flat.plan.key.chunk is not None for grad in self.grads)
        self._expected = self._all  # buckets that gradients of this backward may come to
        self._to_launch = self._all  # those of them that it reduces, where it does
        self._next = 0  # of those to launch
        self._sent = bytearray(len(self.grads))  # launched in this backward
        self._unreduced = {*self._all}  # not launched since gradients last arrived
        self._unreduced_before = {*self._all}
        self._in_flight: deque[BucketGrad] = deque()
        self._landed: BucketGrad | None = None  # the last one, whose sum may be on its way to the host
        self._gathering: list[Ticket] = []
        self._hooks = [
            param.register_post_accumulate_grad_hook(GradHook(self, position, index))  # type: ignore[no-untyped-call]
            for position, grad in enumerate(self.grads)
            for index, param in enumerate(grad.flat.params)
        ]
        if layout.shards_params:  # who needs a frozen parameter's value must find us too
            frozen = [param for flat in self.flats if not flat.plan.trainable for param in flat.params]
            self._hooks += [mark(p, self.placed) for p in frozen if p.is_floating_point() or p.is_complex()]
        self.gates = {
            fqn: (UnitGate if fqn != ROOT else ModelGate)(
                self.gathering, tuple(self.gathering[name] for name in needed)
            )
            for fqn, needed in (units.gates.items() if layout.shards_params else ())
        }
        """What must run around which module's calls."""

    def _make_grad(self, flat: FlatBucket, wiring: Wiring) -> BucketGrad:
        key = flat.plan.key
        # One rank sends nothing, so nothing is rounded for the journey.
        wire = Wire(wiring.dtype or key.dtype if self.axis.size > 1 else key.grad_dtype, wiring.prescale)
        make = _GRADS[self.layout.stage.grad]
        target = self.layout.stage.optim
        return make(
            flat,
            rank=self.axis.rank,
            target=target,
            lane=self.lane,
            arena=self.arena,
            wire=wire,
            depot=self.depots.grad,
        )

    # --- backward ---------------------------------------------------------------------------------------------------

    @property
    def reduced(self) -> bool:
        """Whether every bucket has been launched since gradients last arrived."""
        return not self._unreduced

    @contextmanager
    def backward(self, *, chunk: int | None = None, shared: bool = True) -> Iterator[None]:
        """Around a backward that the engine runs itself: announces it and finishes it.

        Where it is one of a chunk of a pipeline's stage, only that chunk's buckets are reduced in it, and, if it is to
        reduce the `shared` ones too, those that are not one chunk's.
        """
        self._expect(chunk, shared=shared)
        self._begin()
        self.gathering.begin_backward()
        yield
        self.gathering.end_backward()
        self.finish()

    def watch(self, outputs: object) -> None:
        """Announce the backward that will start at these forward outputs, before its first gradient arrives.

        The hook is on the outputs' graph nodes, so the outermost backward is the one that is seen, reentrant
        checkpoints inside it notwithstanding.
        """
        if not torch.is_grad_enabled():
            return
        reference = weakref.ref(self)

        def announce(_grads: object) -> None:
            runtime = reference()
            if runtime is not None and not runtime.running:
                runtime._begin()
                at_end_of_backward(runtime._finish_announced)

        for leaf in _pytree.tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.grad_fn.register_prehook(announce)

    def _expect(self, chunk: int | None, *, shared: bool = True) -> None:
        """Say which buckets the next backward is about; all where it is not one of a chunk."""
        self._expected = self._to_launch = self._all
        if chunk is not None and self._chunked:
            chunks = [grad.flat.plan.key.chunk for grad in self.grads]
            self._expected = tuple(i for i in self._all if chunks[i] in (chunk, None))
            self._to_launch = self._expected if shared else tuple(i for i in self._expected if chunks[i] is not None)

    def _begin(self) -> None:
        self._unreduced_before = {*self._unreduced}
        self._unreduced.update(self._expected)
        self.running = True
        self._start_launching()
        for index in self._expected:
            self.grads[index].begin_backward()

    def _on_grad(self, position: int, index: int) -> None:
        """A gradient has come about which counting was not enough."""
        grad = self.grads[position]
        if not self.running:  # nobody announced this backward: the model was called around the engine
            self.running = True  # where it is refused, it has not finished either
            grad.require_hidden(index)
            self._begin()
            at_end_of_backward(self._finish_announced)
            if grad.countdown.reach(index):
                return
        if not grad.countdown.live:
            grad.late = True
        elif grad.countdown.pending == 0:
            self._collect(grad)
            if self.reducing and not self.gathering.paces and _speaks_last(grad.flat.params[index]):
                self._launch_ready()

    def _collect(self, grad: BucketGrad) -> None:
        self._make_room()
        grad.open()
        grad.collect()

    def _start_launching(self) -> None:
        self._next = 0
        self._sent = bytearray(len(self.grads))

    def _launch_ready(self) -> None:
        """Launch, in plan order, the buckets whose gradients are all there."""
        while self._next < len(self._to_launch) and self.grads[self._to_launch[self._next]].countdown.pending == 0:
            self._launch(self._to_launch[self._next])
            self._next += 1

    def _launch_over(self, is_over: Callable[[str], bool]) -> None:
        """Launch the buckets of units that the backward is through with on every rank, whether this rank has been in
        them or not: reductions and gathers go over one lane, in one order."""
        if self.running and self.reducing:
            for index in self._to_launch:
                if not self._sent[index] and is_over(self.grads[index].flat.plan.key.unit):
                    self._launch(index)

    def _make_room(self) -> None:
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            if self._landed is not None:
                self._landed.vacate()
            self._landed = self._in_flight.popleft()
            self._landed.land()

    def _launch(self, index: int) -> None:
        self._make_room()
        grad = self.grads[index]
        grad.launch()
        self._sent[index] = 1
        self._unreduced.discard(index)
        self._in_flight.append(grad)

    def _finish_announced(self) -> None:
        if not self.running:  # the engine has finished it
            return
        self.gathering.end_backward()  # first on all ranks: some may be waiting for it
        if any(grad.late or grad.countdown.started for grad in self.grads):
            self.by_user = True
            self.finish()
            return
        self._rest()  # torch.autograd.grad: it accumulates nothing
        self._unreduced = self._unreduced_before
        self._show_mean()

    def finish(self) -> None:
        """The backward is over: launch what is left, so that every bucket has been, and show what can be shown."""
        self._rest()
        launching = self._to_launch if self.reducing else ()
        for index in launching:
            if not self._sent[index] or self.grads[index].late:
                self._launch(index)
        for index in self._expected:
            if index not in launching and self.grads[index].countdown.started:
                self._collect(self.grads[index])
        for index in self._all:
            if self.grads[index].late:  # a function of this chunk has reached parameters of another
                self._collect(self.grads[index])
                self.grads[index].late = False
                self._unreduced.add(index)
        if self.reducing:
            self._show_mean()

    def _show_mean(self) -> None:
        if self.reduced and self.layout.stage.optim is Placement.REPLICATED:
            self._average()

    def _rest(self) -> None:
        self.running = False
        for grad in self.grads:
            grad.countdown.live = False

    def _average(self) -> None:
        self._in_flight.clear()
        for grad in self.grads:
            grad.land()
            grad.average(self.mean_factor)

    def complete(self) -> None:
        """Everything is reduced and averaged afterwards, over the stages that hold a parameter too; gradients that no
        backward reduced are reduced now. No backward may follow before `clear` where stages share parameters."""
        self.reducing = True
        if not self.reduced:
            self._expected = self._to_launch = tuple(sorted(self._unreduced))
            self._start_launching()
            self.finish()
            self._expect(None)
        for grad in self.grads:
            grad.heed_user()
        self._average()
        self._ties.sum()

    def abort(self) -> None:
        """A backward has failed. Finish what other ranks expect of this one, then forget the whole step's gradients."""
        self.gathering.abort_backward()
        self.finish()
        self.clear()

    def clear(self) -> None:
        """Forget all gradients; `.grad` of every managed parameter becomes None."""
        self._in_flight.clear()
        self._landed = None
        self._ties.clear()
        for grad in self.grads:
            grad.clear()
        self._expect(None)
        self._sent = bytearray(b"\x01") * len(self.grads)  # nothing is due until a backward begins
        self._unreduced = {*self._all}
        self.by_user = False

    @property
    def dirty(self) -> bool:
        """Whether any gradient has arrived since the last step."""
        return any(grad.state is not GradState.EMPTY for grad in self.grads)

    def unused_here(self) -> frozenset[str]:
        """Trainable parameters without a gradient on this rank in this step."""
        return frozenset(
            slot.fqn
            for grad in self.grads
            if not all(grad.used)
            for slot, used in zip(grad.flat.plan.slots, grad.used, strict=True)
            if not used
        )

    def usage(self) -> torch.Tensor:
        """1.0 for every trainable parameter that got a gradient on this rank, in plan order; summed over ranks it says
        what nobody used. Not to be written."""
        if all(all(grad.used) for grad in self.grads):
            return self._all_used
        flags = [float(used) for grad in self.grads for used in grad.used]
        return torch.tensor(flags, dtype=torch.float32).to(self._all_used.device)

    def count_on(self, counters: Counters) -> None:
        """Go on with the counts of an earlier runtime."""
        for lane in (self.lane, self.world_lane, *self._ties.lanes):
            lane.counters = counters

    def counts(self, bucket: Bucket) -> bool:
        """Whether this stage counts and saves `bucket`: it is the first that holds it."""
        return not bucket.key.tie or bucket.key.tie[0] == self.mesh.stage

    # --- parameters -------------------------------------------------------------------------------------------------

    def adopt(self) -> list[str]:
        """Take in what the user changed in parameters since the last step, but for masters, which `absorb` it. Returns
        names whose `.data` was replaced."""
        adopted = [fqn for flat in self.flats for fqn in flat.adopt()]
        for flat in self.flats:
            flat.notice_writes()
        return adopted

    def absorb(self, position: int) -> None:
        """Let the master of the trained bucket at `position` follow the user."""
        self.grads[position].flat.absorb()

    def heed_user(self) -> None:
        """Take in all that the user changed in parameters since the last step."""
        self.adopt()
        for flat in self.flats:
            flat.absorb()
            flat.rest()

    @property
    def gathers(self) -> bool:
        """Whether updated parameters must travel between ranks at once."""
        stage = self.layout.stage
        return change(stage.optim, stage.param) is Collective.ALL_GATHER and self.axis.size > 1

    def publish(self, position: int) -> None:
        """The master of the trained bucket at `position` into parameters, and on its way to every rank."""
        self._publish(self.grads[position].flat)

    def publish_all(self) -> None:
        """Every master and every frozen parameter to every rank."""
        for flat in reversed(self.flats):
            self._publish(flat)
            flat.rest()
        self.published()

    def published(self) -> None:
        """All has been published: parameters are whole again on every rank, or to be gathered anew."""
        self.wait_gathered()
        self.gathering.refresh()

    def _publish(self, flat: FlatBucket) -> None:
        flat.publish()
        if self.gathers:
            self._gathering.append(flat.gather(self.lane))

    def wait_gathered(self) -> None:
        """Parameters are whole again on every rank."""
        for ticket in self._gathering:
            ticket.wait()
        self._gathering = []

    @contextmanager
    def whole_values(self) -> Iterator[Source]:
        """What parameters are, for another runtime that takes them over."""
        wholes = Wholes(self.placed, self.lane)
        try:
            yield wholes
        finally:
            wholes.close()

    # --- clearing the device ----------------------------------------------------------------------------------------

    def move_params(self, carry: Carry) -> None:
        """Take parameters at rest somewhere else. Between steps."""
        self.gathering.let_go_of_idle()
        for flat in self.flats:
            flat.move_params(carry)

    def move_masters(self, carry: Carry) -> None:
        """Take masters somewhere else. Between steps."""
        for flat in self.flats:
            flat.move_master(carry)

    def hold_gradients(self, hold: bool) -> None:
        """Whether there is memory for gradients. Between steps."""
        for grad in self.grads:
            grad.hold(hold)
        self.arena.trim()

    def remove_hooks(self) -> None:
        """Stop listening to parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def destroy(self) -> None:
        """Take the hooks away, give parameters memory of their own, free the buffers. Collective where parameters are
        sharded.

        Raises:
            CommError: a peer is gone, and with it values; everything else has been done.
        """
        self.remove_hooks()
        self.clear()
        for ticket in self._gathering:  # a step has failed half-way
            ticket.drop()
        self._gathering = []
        self.gathering.close()
        lost: CommError | None = None
        for flat in self.flats:
            try:
                flat.release(self.axis, lost=lost is not None)
            except CommError as error:
                lost = error
                flat.release(self.axis, lost=True)
        self.arena.trim()
        self.flats, self.grads, self.gates = (), (), {}
        self.placed = self.placed._replace(flats=(), homes={})
        if lost is not None:
            raise CommError(
                "destroy: a peer is gone, and with it its part of the sharded parameters; what could not be "
                "gathered reads as NaN. Load a checkpoint"
            ) from lost


class GradHook:
    """What the engine puts on a trainable parameter: called when autograd has accumulated its gradient.

    Weak, so that a parameter never keeps an engine alive. It is also how a parameter leads back to its engine, and,
    where it is sharded, to its values, which it does keep alive.
    """

    __slots__ = ("_countdown", "_index", "_position", "_runtime", "placed")

    def __init__(self, runtime: ZeroRuntime, position: int, index: int) -> None:
        self._runtime = weakref.ref(runtime)
        self.placed = runtime.placed if runtime.layout.shards_params else None
        self._countdown = runtime.grads[position].countdown
        self._position, self._index = position, index

    def __call__(self, _param: torch.Tensor) -> None:
        """Autograd has accumulated the parameter's gradient."""
        if self._countdown.reach(self._index):
            return
        runtime = self._runtime()
        if runtime is not None:
            runtime._on_grad(self._position, self._index)

    @property
    def runtime(self) -> ZeroRuntime | None:
        """The runtime it belongs to; None once that is gone."""
        return self._runtime()


def runtime_of(param: torch.Tensor) -> ZeroRuntime | None:
    """The runtime that trains `param`; None where none does."""
    found = [hook.runtime for hook in hooks_of(param).values() if isinstance(hook, GradHook)]
    return next((runtime for runtime in found if runtime is not None), None)


def placed_of(param: torch.Tensor) -> Placed | None:
    """Where an engine, or `Init`, has placed `param`; None where none has, or it is frozen and not sharded."""
    for hook in hooks_of(param).values():
        if isinstance(hook, (GradHook, Mark)) and hook.placed is not None:
            return hook.placed
    runtime = runtime_of(param)
    return None if runtime is None else runtime.placed


def _speaks_last(param: torch.Tensor) -> bool:
    """Whether no hook of the user's comes after ours on `param`: one that does must find `.grad` there, so its bucket
    leaves with the next one."""
    return isinstance(next(reversed(hooks_of(param).values()), None), GradHook)
