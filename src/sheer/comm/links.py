"""Point to point: one in-order link for each direction and purpose between two stages.

A message is a control block of fixed size, then, where it says so, more control bytes, then the raw tensors. Control
travels by CPU, so that a receiver learns shapes without waiting for its device. On gloo a link is a pair of tags in a
group of the pipe, and tensors come in one piece with the block where they are no larger than what has come before: gloo
sends nothing before a receive is posted, and one that is posted beforehand goes on during other work. Elsewhere
it is a group of its own two ranks: a backend with streams runs what is in one group in the order of its submission, and
two directions, or two peers, would wait for each other.

The groups are the links' own. A rank that has lost a peer breaks off with all and leaves them (`bonds.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from sheer.comm.axis import Axis
from sheer.comm.groups import own_group
from sheer.comm.tickets import Ticket, completing
from sheer.errors import CommError

_Group = dist.ProcessGroup | None

CONTROL_BYTES = 512
"""Size of every control block: the whole overhead of a message in a steady step."""

MOST_BESIDE = 2**26
"""Bytes of tensors that room is kept for beside the next message's control block."""


class Route(NamedTuple):
    """Which link: from stage to stage, for one purpose (an order of messages of its own)."""

    source: int
    target: int
    purpose: str

    def __str__(self) -> str:
        return f"{self.purpose} from stage {self.source} to stage {self.target}"


class MessageCounters:
    """Always-on counts of what this rank has sent; regression tests read them."""

    def __init__(self) -> None:
        self.messages = 0
        self.control_bytes = 0
        self.tensor_bytes = 0


class _Post(NamedTuple):
    """How to reach the peer for one kind of data."""

    group: dist.ProcessGroup
    peer: int
    tag: int

    def send(self, tensor: torch.Tensor) -> dist.Work:
        work = dist.isend(tensor, group=self.group, group_dst=self.peer, tag=self.tag)
        assert work is not None
        return work

    def receive(self, tensor: torch.Tensor) -> dist.Work:
        work = dist.irecv(tensor, group=self.group, group_src=self.peer, tag=self.tag)
        assert work is not None
        return work


class Link:
    """One end of one route: this rank either sends on it or receives. Messages arrive in the order of sending."""

    def __init__(
        self,
        route: Route,
        control: _Post,
        tensors: _Post,
        counters: MessageCounters,
        *,
        peer_rank: int,
        in_one_piece: bool,
    ) -> None:
        self.name = f"{route} (with rank {peer_rank})"
        """For errors."""
        self._sending, self._receiving = f"sending the {self.name}", f"receiving the {self.name}"
        self._control = control
        self._tensors = tensors
        self._counters = counters
        self._announced: Ticket | None = None
        self._block = torch.empty(0, dtype=torch.uint8)
        self._most = MOST_BESIDE if in_one_piece else 0
        self._room = 0  # for tensors beside the next control block; both ends count alike
        self._whole = True  # no control bytes have followed the last block
        self._sent: deque[Ticket] = deque()

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, control: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Start one message: `control` are CPU byte tensors, the first a whole block; `tensors` are flat bytes.

        The buffers are leased until `settle`.
        """
        size = sum([tensor.nbytes for tensor in tensors])
        self._counters.messages += 1
        self._counters.control_bytes += sum([part.nbytes for part in control])
        self._counters.tensor_bytes += size
        if self._comes_beside(size) and len(control) == 1:
            control, tensors = [torch.cat([*control, *(one.to(control[0].device) for one in tensors)])], []
        with completing(self._sending):
            works = [self._control.send(part) for part in control]
            works += [self._tensors.send(tensor) for tensor in tensors]
        self._sent.append(Ticket(works, (*control, *tensors), self._sending, None))

    def _comes_beside(self, size: int) -> bool:
        """Whether so many bytes of tensors have room beside the block that they came with; the next ones will."""
        if not 0 < size <= self._most:
            return False
        fits, self._room = size <= self._room, max(self._room, size)
        return fits

    @property
    def unsettled(self) -> int:
        """Messages sent whose buffers are still leased."""
        return len(self._sent)

    def settle(self, *, keep: int = 0) -> None:
        """Wait for the oldest messages until `keep` are left, and give their buffers back."""
        while len(self._sent) > keep:
            self._sent.popleft().wait()

    # --- receiving --------------------------------------------------------------------------------------------------

    def expect(self) -> None:
        """Make room for the next message, so that it can arrive during other work."""
        assert self._announced is None, f"the {self.name} is expected already"
        self._block = torch.empty(CONTROL_BYTES + self._room, dtype=torch.uint8)
        with completing(self._receiving):
            work = self._control.receive(self._block)
        self._announced = Ticket((work,), (self._block,), self._receiving, None)

    def control(self) -> torch.Tensor:
        """The expected message's control block, when it has come: uint8 on the CPU."""
        assert self._announced is not None, f"the {self.name} was never expected"
        self._announced.wait()
        self._announced = None
        self._whole = True
        return self._block[:CONTROL_BYTES]

    def more_control(self, size: int) -> torch.Tensor:
        """The `size` control bytes that follow the block."""
        self._whole = False
        rest = torch.empty(size, dtype=torch.uint8)
        with completing(self._receiving):
            self._control.receive(rest).wait()
        return rest

    def close(self) -> None:
        """Forget what is under way, and the groups."""
        self._announced, self._sent = None, deque()
        del self._control, self._tensors

    def tensors(self, sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """The message's tensors, of so many bytes each, when they have come: flat bytes on `device`, in memory of their
        own."""
        size, room = sum(sizes), self._block.numel() - CONTROL_BYTES
        if self._comes_beside(size) and self._whole:
            came = self._block.split_with_sizes([CONTROL_BYTES, *sizes, room - size])
            return [piece.to(device, copy=True) for piece in came[1:-1]]
        buffers = [torch.empty(one, dtype=torch.uint8, device=device) for one in sizes]
        with completing(self._receiving):
            works = [self._tensors.receive(buffer) for buffer in buffers]
        Ticket(works, tuple(buffers), self._receiving, None).wait()
        return buffers


class Links:
    """This rank's ends of all its routes along the pipe axis, and the end of a step that all ranks reach together."""

    def __init__(
        self,
        made: Mapping[Route, Link],
        counters: MessageCounters,
        everyone: Axis,
        control: _Group,
        groups: Sequence[dist.ProcessGroup],
    ) -> None:
        self._made = made
        self.counters = counters
        self._everyone = everyone
        self._control = control
        self._groups = [*groups]
        self._open = True

    def close(self) -> None:
        """Leave the groups that were made for these links. Idempotent."""
        self._open, self._control = False, None
        for link in self._made.values():
            link.close()
        self._made = {}
        while self._groups:
            group = self._groups.pop()
            self._everyone.bonds.discard([group])
            if dist.is_initialized():
                dist.destroy_process_group(group)

    def lost(self, error: CommError) -> CommError:
        """This rank has lost a peer, so these links are at an end. Leaves them, so that nobody waits for it in vain,
        and gives the error to raise, which says who is gone as far as the ranks find out together."""
        if not self._open:
            return error
        loss = self._everyone.bonds.lost(str(error))
        self.close()
        who = ", ".join(map(str, loss.missing))
        size, patience = self._everyone.size, loss.patience
        told = [
            f"rank(s) {who} of {size} are gone: no sign of life within {patience:g} s" if who else "",
            f"rank {self._everyone.rank}: {error}",
            f"noticed first by {loss.first}" if loss.first else "",
        ]
        return CommError("\n\n".join(filter(None, told)))

    def __getitem__(self, route: Route) -> Link:
        return self._made[route]

    def failures(self, own: str | None) -> list[str]:
        """What every rank brings, in rank order; empty when all bring None. Collective on `everyone`.

        One number when all is well; texts are exchanged only when something failed.
        """
        if self._everyone.size > 1:
            if not self._open:
                raise CommError("an earlier step has lost a rank: start the processes again, from a checkpoint")
            failed = torch.tensor(0 if own is None else 1)
            try:
                with completing("the beginning or end of a pipelined step"):
                    dist.all_reduce(failed, group=self._control)
            except CommError as error:
                raise self.lost(error) from error
            if not int(failed):
                return []
        return [text for text in self._everyone.gather_objects(own) if text is not None]


def build_links(
    pipe: Axis, routes: Sequence[Route], *, everyone: Axis | None = None, own_groups: bool | None = None
) -> Links:
    """Links for the routes that begin or end at this stage. Collective on `everyone`, with equal `routes`.

    `everyone` are the ranks that end a step together: the world, or (default) the pipe axis. `own_groups` says whether
    each route gets a group of its own; default: wherever the backend is not gloo.
    """
    everyone = everyone or pipe
    counters = MessageCounters()
    if everyone.group is None:
        return Links({}, counters, everyone, None, ())
    if pipe.size == 1 and not _native(everyone.group):  # nothing is sent, so there is no group to leave early either
        return Links({}, counters, everyone, everyone.group, ())
    everybody = _ranks(everyone)
    together = own_group([everybody], like=everyone.group, backend="gloo")
    groups = [together]
    home = pipe.group
    made: dict[Route, Link] = {}
    if home is not None and pipe.size > 1:
        pipes = sorted(set(everyone.gather_objects(_ranks(pipe))))
        control = together if pipes == [everybody] else own_group(pipes, like=home, backend="gloo")
        apart = _native(home) if own_groups is None else own_groups
        assert control is not None
        groups.append(control)
        for number, route in enumerate(routes):
            ends = sorted((route.source, route.target))
            group = own_group([tuple(ranks[end] for end in ends) for ranks in pipes], like=home) if apart else None
            groups.append(group)
            if pipe.rank in ends:
                peer = route.target if pipe.rank == route.source else route.source
                by_cpu = _Post(control, peer, 2 * number)
                tensors = _Post(control, peer, 2 * number + 1) if group is None else _Post(group, ends.index(peer), 0)
                made[route] = Link(
                    route, by_cpu, tensors, counters, peer_rank=_ranks(pipe)[peer], in_one_piece=not apart
                )
    own = list(dict.fromkeys(group for group in groups if group is not None))
    everyone.bonds.add(own)
    return Links(made, counters, everyone, together, own)


def _ranks(axis: Axis) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(axis.group))


def _native(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) != "gloo"
