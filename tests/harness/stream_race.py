"""A data-race detector for code that uses device streams, on a machine that has none.

Streams here are only clocks: every operator runs at once, in program order, and what is checked is whether it *would*
have been ordered. Each access to memory is kept as (byte range of the storage, stream, that stream's time). Two of
them that overlap, of which one writes, race unless the later one's stream had been made to wait for the earlier one:
vector clocks, as in Lamport, "Time, clocks and the ordering of events in a distributed system", and Fidge,
"Timestamps in message-passing systems that preserve the partial ordering".

Byte ranges, since the bugs of flat buffers are between a buffer and a view of it. Allocation and free are writes by the
stream that allocates, since a caching allocator reuses memory in that stream's order only.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

EVERYTHING = 1 << 62  # past the last byte of any storage

Clock = dict[int, int]

# Arguments that collectives read and write; their schemas do not say. One that is not here is refused.
COLLECTIVES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "c10d::_allgather_base_": ((1,), (0,)),
    "c10d::_reduce_scatter_base_": ((1,), (0,)),
    "c10d::alltoall_base_": ((1,), (0,)),
    "c10d::allreduce_": ((0,), (0,)),
    "c10d::broadcast_": ((0,), (0,)),
    "c10d::send": ((0,), ()),
    "c10d::recv_": ((), (0,)),
    "c10d::barrier": ((), ()),
}


class Race(NamedTuple):
    """Two accesses of which nothing says which comes first."""

    op: str
    stream: str
    earlier_op: str
    earlier_stream: str
    start: int
    stop: int

    def __str__(self) -> str:
        return (
            f"{self.op} on stream {self.stream} is not ordered after {self.earlier_op} on stream {self.earlier_stream} "
            f"(bytes {self.start} to {self.stop})"
        )


class Access(NamedTuple):
    """One operator's use of one byte range of one storage."""

    start: int
    stop: int
    writes: bool
    op: str
    stream: Stream
    time: int


class Stream:
    """The part of `torch.Stream` that orders work. Made by `Races.stream`."""

    def __init__(self, races: Races, number: int, name: str) -> None:
        self._races, self.number, self.name = races, number, name
        self.seen: Clock = {number: 0}
        """Of every stream, the time up to which work here comes after work there."""

    def tick(self) -> int:
        """One more operator was put on this stream."""
        self.seen[self.number] += 1
        return self.seen[self.number]

    def learn(self, clock: Clock) -> None:
        """What comes now comes after everything in `clock`."""
        for number, time in clock.items():
            self.seen[number] = max(self.seen.get(number, 0), time)

    def record_event(self, event: Event | None = None) -> Event:
        """Mark the work put here so far."""
        event = event or Event(self._races)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Let what comes on this stream wait for an event."""
        self._races.note_frees()  # memory freed before this wait was not yet protected by it
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Let what comes on this stream wait for all that is on the other."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait, and so all that is put on any stream afterwards."""
        self.record_event().synchronize()

    def __enter__(self) -> Stream:
        self._races.push(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._races.pop()


class Event:
    """The part of `torch.Event` that orders work. Waiting on one that was never recorded orders nothing, as in CUDA."""

    def __init__(self, races: Races) -> None:
        self._races = races
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        """Mark the work put on `stream` (default: the current one) so far."""
        self._races.note_frees()
        self.clock = dict((stream or self._races.current_stream()).seen)

    def wait(self, stream: Stream | None = None) -> None:
        """Let what comes on `stream` (default: the current one) wait for this."""
        (stream or self._races.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        """Let the host wait for this."""
        self._races.host_waits(self)


class Memory:
    """One storage: who allocated it, and the accesses that a later one might race with."""

    def __init__(self, storage: torch.UntypedStorage, owner: Stream) -> None:
        self.ref = StorageWeakRef(storage)
        self.owner = owner
        self.accesses: list[Access] = []

    def use(self, access: Access) -> Iterator[Race]:
        """Add an access and yield the races it makes."""
        for old in self.accesses:
            overlaps = old.start < access.stop and access.start < old.stop
            ordered = access.stream.seen.get(old.stream.number, 0) >= old.time
            if overlaps and (old.writes or access.writes) and not ordered:
                bounds = max(old.start, access.start), min(old.stop, access.stop)
                yield Race(access.op, access.stream.name, old.op, old.stream.name, *bounds)
        if access.writes:  # whoever comes after this one comes after what it covers
            self.accesses = [a for a in self.accesses if a.start < access.start or access.stop < a.stop]
        self.accesses.append(access)


class Races:
    """The races found in a `detect_races()` block, and the streams to use in it."""

    def __init__(self) -> None:
        self.found: list[Race] = []
        self._streams: list[Stream] = []
        self._memory: dict[int, Memory] = {}
        self._host: Clock = {}
        self._local = threading.local()  # the current stream is each thread's own, as it is in torch
        self.default = self.stream("compute")

    # -- streams ---------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """A new stream."""
        stream = Stream(self, len(self._streams), name)
        stream.learn(self._host)
        self._streams.append(stream)
        return stream

    def event(self) -> Event:
        """A new event, recorded nowhere."""
        return Event(self)

    def current_stream(self) -> Stream:
        """Where this thread's operators go: the innermost `with stream:`, else the default."""
        stack: list[Stream] = getattr(self._local, "stack", [])
        return stack[-1] if stack else self.default

    def push(self, stream: Stream) -> None:
        """Make `stream` current in this thread."""
        self._local.stack = [*getattr(self._local, "stack", []), stream]

    def pop(self) -> None:
        """Undo the last `push` of this thread."""
        self._local.stack = self._local.stack[:-1]

    def host_waits(self, event: Event) -> None:
        """What any stream is given from now on comes after the event."""
        self.note_frees()
        self._host.update({n: max(t, self._host.get(n, 0)) for n, t in event.clock.items()})
        for stream in self._streams:
            stream.learn(self._host)

    # -- memory ----------------------------------------------------------------------------------------------------

    def access(self, op: str, *, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> None:
        """An operator on the current stream uses these tensors."""
        stream = self.current_stream()
        time = stream.tick()
        # Writes last: an operator does not race with itself, and its write covers its own reads.
        for tensor, is_write in [(t, False) for t in reads] + [(t, True) for t in writes]:
            start, stop = byte_range(tensor)
            memory = self._of(tensor.untyped_storage(), self.default)
            self.found.extend(memory.use(Access(start, stop, is_write, op, stream, time)))

    def allocated(self, storage: torch.UntypedStorage) -> None:
        """The current stream allocates: whatever ran there before may have used the same memory."""
        stream = self.current_stream()
        memory = self._of(storage, stream)
        memory.owner = stream
        self.found.extend(memory.use(Access(0, EVERYTHING, True, "allocation", stream, stream.tick())))

    def freed(self, memory: Memory) -> None:
        """The owner may hand this memory out again from its next operator on."""
        owner = memory.owner
        self.found.extend(memory.use(Access(0, EVERYTHING, True, "free", owner, owner.tick())))

    def note_frees(self) -> None:
        """Find storages that died since the last look."""
        for key in [key for key, memory in self._memory.items() if memory.ref.expired()]:
            self.freed(self._memory.pop(key))

    def resized(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """`resize_` frees what there was and allocates what there will be."""
        if storage.nbytes():
            self.freed(self._of(storage, self.default))
        if nbytes:
            self.allocated(storage)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether an operator has used this storage before."""
        return storage._cdata in self._memory

    def _of(self, storage: torch.UntypedStorage, owner: Stream) -> Memory:
        # The weak reference in Memory keeps the address from being reused for another storage.
        return self._memory.setdefault(storage._cdata, Memory(storage, owner))


class _Watch(TorchDispatchMode):
    """Tells `races` what each operator reads and writes."""

    def __init__(self, races: Races) -> None:
        super().__init__()
        self._races = races

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._races.note_frees()
        result = func(*args, **kwargs)
        reads, writes = _arguments(func, args, kwargs)
        outputs = tensors(result)
        known = {t.untyped_storage()._cdata for t in (*reads, *writes)}
        fresh = [t for t in outputs if t.untyped_storage()._cdata not in known]
        if outputs and not fresh and not writes:
            return result  # a view: no memory is touched
        for tensor in fresh:
            if not self._races.knows(tensor.untyped_storage()):
                self._races.allocated(tensor.untyped_storage())
        self._races.access(func._schema.name, reads=reads, writes=[*writes, *fresh])
        return result


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that an operator reads and those that it writes."""
    schema = func._schema
    if schema.name.startswith("c10d::"):
        if schema.name not in COLLECTIVES:
            raise NotImplementedError(f"the race detector does not know what {schema.name} reads and writes")
        read, written = COLLECTIVES[schema.name]
        return tensors([args[i] for i in read]), tensors([args[i] for i in written])
    values = [
        *zip(schema.arguments, args, strict=False),
        *((a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs),
    ]
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for argument, value in values:
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_write else reads).extend(tensors(value))
    return reads, writes


def tensors(tree: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and byte after the last, in the tensor's storage. Gaps between strides count as touched."""
    start = tensor.storage_offset() * tensor.element_size()
    if tensor.numel() == 0:
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


@contextmanager
def detect_races() -> Iterator[Races]:
    """Watch the operators, storage resizes and deaths of this block in this thread."""
    races = Races()
    resize = torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
        races.note_frees()
        races.resized(storage, nbytes)
        return resize(storage, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", watched_resize), _Watch(races):
        yield races
        races.note_frees()
