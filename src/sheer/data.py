"""The data loader: an order that depends on nothing but (seed, epoch, length), and a position that can be resumed.

A position is (epoch, samples consumed over all ranks) and always names the *next* sample to be delivered. It does not
know the number of ranks or the size of a micro-batch, so a run resumes mid-epoch at other ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from sheer.errors import DataError, UsageError
from sheer.observe import Teller

_END = object()


class Position(NamedTuple):
    """Where a run stands in its data."""

    epoch: int
    """Epochs finished (or given up) before this one."""
    consumed: int
    """Samples of this epoch already delivered, over all ranks. Always a position from which samples remain."""


class Share(NamedTuple):
    """Which part of each global micro-batch belongs to this rank."""

    micro_batch: int
    """Samples per micro-batch on one rank."""
    rank: int
    world: int

    @property
    def stride(self) -> int:
        """Samples in one micro-batch over all ranks."""
        return self.micro_batch * self.world


class Feed(NamedTuple):
    """How samples become batches: torch's `DataLoader` arguments that do not concern the order."""

    dataset: Any
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    pin_memory: bool
    drop_last: bool

    def open(self, seed: int, **order: Any) -> Iterator[Any]:
        """Iterate a fresh torch `DataLoader`; `order` is its `batch_sampler` or `batch_size`.

        The explicit generator keeps torch from drawing the workers' seeds out of the global stream, which would
        make a resumed run differ from an uninterrupted one.
        """
        loader: DataLoader[Any] = DataLoader(
            self.dataset,
            collate_fn=self.collate_fn or collate,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator().manual_seed(seed),
            **order,
        )
        return iter(loader)


def collate(samples: list[Any]) -> Any:
    """torch's default, but that samples which are tuples give a tuple, which is passed as positional arguments."""
    batch = default_collate(samples)
    return tuple(batch) if isinstance(samples[0], tuple) and isinstance(batch, list) else batch


class _Source(Protocol):
    """One way to put a data set in order."""

    kind: str
    """Name stored with a position; positions of different kinds do not fit each other."""

    @property
    def length(self) -> int | None:
        """Samples in the data set, None where only iterating tells."""

    def batches(self) -> int | None:
        """Micro-batches per epoch on each rank, None where only iterating tells."""

    def is_over(self, consumed: int) -> bool:
        """Whether it is known that no batch follows after `consumed` samples."""

    def open(self, seed: int, position: Position) -> Iterator[Any]:
        """The batches of this rank from `position` to the epoch's end."""


class _OwnOrder:
    """Our own order of a map-style data set: a permutation by (seed, epoch), or as it is."""

    kind = "order"

    def __init__(self, feed: Feed, part: Share, *, shuffle: bool) -> None:
        self._feed, self._part, self._shuffle = feed, part, shuffle
        self.length = _length_of(feed.dataset)
        if self.length == 0:
            raise DataError("The data set is empty: len(dataset) is 0, at least 1 sample is needed.")
        if self.is_over(0):
            raise DataError(
                f"The data set has {self.length} samples but one micro-batch over all ranks takes {part.stride} "
                f"({part.micro_batch} on each of {part.world}), and drop_last drops the incomplete one: nothing is "
                "left. Set drop_last to false (the tail is then filled by wrapping), or make the micro-batch smaller."
            )

    def batches(self) -> int:
        full, tail = divmod(self.length, self._part.stride)
        return full if self._feed.drop_last or not tail else full + 1

    def is_over(self, consumed: int) -> bool:
        needed = self._part.stride if self._feed.drop_last else 1
        return self.length - consumed < needed

    def open(self, seed: int, position: Position) -> Iterator[Any]:
        worker_seed = _mix(seed, position.epoch, position.consumed, self._part.rank)
        return self._feed.open(worker_seed, batch_sampler=_Indices(self._indices(seed, position)))

    def _indices(self, seed: int, position: Position) -> Iterator[list[int]]:
        """Index lists of this rank's micro-batches; past the end they wrap to the start of the same order."""
        order: torch.Tensor | None = None
        if self._shuffle:
            generator = torch.Generator().manual_seed(_mix(seed, position.epoch))
            order = torch.randperm(self.length, generator=generator)
        start = position.consumed
        mine = self._part.rank * self._part.micro_batch + torch.arange(self._part.micro_batch)
        while not self.is_over(start):
            places = (start + mine) % self.length
            yield (places if order is None else order[places]).tolist()
            start += self._part.stride


class _UserOrder:
    """The user's own sampler (of indices) or batch sampler (of index lists): this rank's share is its business."""

    kind = "sampler"

    def __init__(self, feed: Feed, part: Share, *, sampler: Iterable[Any], batched: bool) -> None:
        self._feed, self._part, self._sampler, self._batched = feed, part, sampler, batched
        self.length = _length_of(feed.dataset)

    def batches(self) -> int | None:
        if not isinstance(self._sampler, Sized):
            return None
        size = 1 if self._batched else self._part.micro_batch
        return len(self._sampler) // size if self._feed.drop_last else -(-len(self._sampler) // size)

    def is_over(self, consumed: int) -> bool:
        return False

    def open(self, seed: int, position: Position) -> Iterator[Any]:
        done = _batches_in(position, self._part)
        indices = self._index_lists(seed, position.epoch)
        _skip(indices, done, what="sampler")
        worker_seed = _mix(seed, position.epoch, position.consumed, self._part.rank)
        return self._feed.open(worker_seed, batch_sampler=_Indices(indices))

    def _index_lists(self, seed: int, epoch: int) -> Iterator[list[int]]:
        _set_epoch(self._sampler, epoch)
        entries = _seeded_iter(self._sampler, _mix(seed, epoch))
        if self._batched:
            yield from entries
            return
        while batch := list(islice(entries, self._part.micro_batch)):
            if len(batch) < self._part.micro_batch and self._feed.drop_last:
                return
            yield batch


class _Stream:
    """An `IterableDataset`: its own order, iterated whole by each rank; resumed by reading past what was delivered."""

    kind = "stream"
    length = None

    def __init__(self, feed: Feed, part: Share) -> None:
        self._feed, self._part = feed, part

    def batches(self) -> int | None:
        return None

    def is_over(self, consumed: int) -> bool:
        return False

    def open(self, seed: int, position: Position) -> Iterator[Any]:
        _set_epoch(self._feed.dataset, position.epoch)
        batches = self._feed.open(
            _mix(seed, position.epoch, self._part.rank),
            batch_size=self._part.micro_batch,
            drop_last=self._feed.drop_last,
        )
        _skip(batches, _batches_in(position, self._part), what="IterableDataset")
        return batches


class ResumableLoader:
    """Iterates one epoch per `iter`, in micro-batches of this rank, and knows its position. Built by `build_loader`.

    The position moves when a batch is handed to the user, not when a worker prefetches it, and names the batch that
    comes next: after an epoch's last batch it is the start of the next epoch. A pass begins with its first `next`. One
    that is left early counts as its epoch: the next `iter` starts the following epoch, unless `load_state_dict` has
    been called since, which makes the running iterator (or the next one) go on from the loaded position. Only the
    newest iterator may be used.
    """

    def __init__(self, source: _Source, part: Share, *, feed: Feed, seed: int, shuffle: bool) -> None:
        self._source, self._part, self._feed = source, part, feed
        self._seed, self._shuffle = seed, shuffle
        self._position = Position(epoch=0, consumed=0)
        self._resumed = False  # the position was loaded and no batch has been delivered from it yet
        self._pass = 0  # counts iterators, so that one that was overtaken can tell
        self.dataset = feed.dataset
        self.batch_size = part.micro_batch

    @property
    def position(self) -> Position:
        """Epoch and consumed samples of the batch that comes next."""
        return self._position

    def __len__(self) -> int:
        """Micro-batches in a full epoch, equal on all ranks. Raises TypeError where only iterating tells (a stream)."""
        batches = self._source.batches()
        if batches is None:
            raise TypeError(f"a loader over a {self._source.kind} without a length has no len(); iterate it instead")
        return batches

    def __iter__(self) -> Iterator[Any]:
        self._begin_pass()
        this_pass = self._pass
        batches: Iterator[Any] | None = None
        while True:
            if this_pass != self._pass:
                raise UsageError(
                    "This iterator of the loader was overtaken by a newer iter(loader), and one loader has one "
                    "position. Finish one pass before the next, or build a second loader (for evaluation, say)."
                )
            resumed, self._resumed = self._resumed, False
            if batches is None or resumed:
                batches = self._source.open(self._seed, self._position)
            batch = next(batches, _END)
            if batch is not _END:
                self._advance()
                yield batch
            elif resumed and self._position.consumed:
                # Saved after the last batch, before the end was seen: go on with the next epoch.
                self._next_epoch()
                batches = None
            else:
                self._end_pass()
                return

    def state_dict(self) -> dict[str, Any]:
        """The position, as JSON: equal on all ranks when they have been handed equally many batches."""
        return {
            "kind": self._source.kind,
            "epoch": self._position.epoch,
            "consumed": self._position.consumed,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "length": self._source.length,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, at any number of ranks and micro-batch size.

        The saved seed replaces this loader's, so that the epoch keeps its order. Raises DataError, and changes
        nothing, when the data set's length, the kind of order or (mid-epoch) `shuffle` differs from the saved one.
        """
        position = self._checked(state)
        self._seed, self._position, self._resumed = state["seed"], position, True
        if self._source.is_over(position.consumed):
            self._next_epoch()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise the DataError that `load_state_dict(state)` would raise; changes nothing."""
        self._checked(state)

    def _checked(self, state: Mapping[str, Any]) -> Position:
        mine = self.state_dict()
        missing = sorted(mine.keys() - state.keys())
        if missing:
            raise DataError(f"The saved loader position lacks {missing}; it has {sorted(state)}.")
        for key in ("epoch", "consumed", "seed"):
            if type(state[key]) is not int:
                raise DataError(f"The saved loader position has {key}={state[key]!r}; an integer is needed.")
        position = Position(epoch=state["epoch"], consumed=state["consumed"])
        if min(position) < 0:
            raise DataError(f"The saved loader position is negative: {position}.")
        must_match = ["kind", "length"] + (["shuffle"] if position.consumed else [])
        for key in must_match:
            if state[key] != mine[key]:
                raise DataError(
                    f"The saved loader position has {key}={state[key]!r}, this loader has {mine[key]!r}: the same "
                    "place in the data cannot be found. Use the data set and loader of the saved run, or resume "
                    "without the loader's position."
                )
        if self._source.kind != _OwnOrder.kind:
            _batches_in(position, self._part)
        return position

    def _begin_pass(self) -> None:
        self._pass += 1
        if self._position.consumed and not self._resumed:
            self._next_epoch()

    def _advance(self) -> None:
        self._position = self._position._replace(consumed=self._position.consumed + self._part.stride)
        if self._source.is_over(self._position.consumed):
            self._next_epoch()

    def _end_pass(self) -> None:
        # Where the end was foreseen, the last batch already moved the position to the next epoch.
        if self._position.consumed:
            self._next_epoch()

    def _next_epoch(self) -> None:
        self._position = Position(epoch=self._position.epoch + 1, consumed=0)


class RepeatingLoader:
    """Iterates `loader` again and again, endlessly; each round is one epoch of a `ResumableLoader`."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        batch = next(self._batches, _END)
        if batch is _END:
            self._batches = iter(self._loader)
            batch = next(self._batches, _END)
        if batch is _END:
            raise DataError(
                "RepeatingLoader: the loader gave no batch in a whole pass, so it cannot be repeated. Is the data set "
                "empty, or the loader a generator that can be iterated only once?"
            )
        return batch


def build_loader(
    dataset: Dataset[Any] | IterableDataset[Any],
    *,
    micro_batch: int,
    rank: int,
    world: int,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    seed: int = 1234,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
    sampler: Iterable[int] | None = None,
    batch_sampler: Iterable[list[int]] | None = None,
) -> ResumableLoader:
    """A loader of this rank's micro-batches whose position can be saved and resumed mid-epoch.

    A map-style data set is put in one global order, a pure function of (seed, epoch, length). With m samples per
    micro-batch and N ranks, micro-batch k of rank r is samples `[k*m*N + r*m, +m)` of it: one optimizer step sees the
    same samples however its global batch is split into ranks and accumulation. The tail is filled by wrapping to the
    start of the order, so that all ranks have equally many batches of equal size; `drop_last` leaves it out instead.

    With `sampler` or `batch_sampler` the order, and which part of it is this rank's, is the user's. `set_epoch` is
    called where it has one; otherwise it must give the same order for the same epoch, to be resumed exactly (torch's
    random samplers without a generator of their own do: they are seeded by (seed, epoch) here). An `IterableDataset`
    is iterated whole by each rank in its own order, so it must split itself by rank and give all ranks equally many
    batches. Both resume by skipping, and only where the saved position is a whole number of batches.

    With workers, random transforms inside the data set depend on (seed, epoch, rank, place of resuming); without,
    they use this process's global generators. Raises DataError for arguments or a data set that cannot work.
    """
    _check_arguments(micro_batch=micro_batch, rank=rank, world=world, num_workers=num_workers, seed=seed)
    part = Share(micro_batch, rank, world)
    feed = Feed(dataset, collate_fn, num_workers, pin_memory, drop_last)
    chosen = sampler if sampler is not None else batch_sampler
    if sampler is not None and batch_sampler is not None:
        raise DataError("Both sampler and batch_sampler are given; give one of them.")
    source: _Source
    if isinstance(dataset, IterableDataset):
        if chosen is not None:
            raise DataError("An IterableDataset has its own order: sampler and batch_sampler cannot be used with it.")
        _tell_about_stream(rank, world)
        source = _Stream(feed, part)
    elif chosen is not None:
        _tell_about_generator(chosen, rank)
        source = _UserOrder(feed, part, sampler=chosen, batched=batch_sampler is not None)
    else:
        source = _OwnOrder(feed, part, shuffle=shuffle)
    return ResumableLoader(source, part, feed=feed, seed=seed, shuffle=shuffle)


class _Indices:
    """Hands one prepared iterator of index lists to torch's `DataLoader` as its batch sampler."""

    def __init__(self, lists: Iterator[list[int]]) -> None:
        self._lists = lists

    def __iter__(self) -> Iterator[list[int]]:
        return self._lists


def _check_arguments(*, micro_batch: int, rank: int, world: int, num_workers: int, seed: int) -> None:
    least = {"micro_batch": 1, "world": 1, "rank": 0, "num_workers": 0}
    given = {"micro_batch": micro_batch, "world": world, "rank": rank, "num_workers": num_workers}
    for name, value in given.items():
        if type(value) is not int or value < least[name]:
            raise DataError(f"{name}={value!r}: an integer of at least {least[name]} is needed.")
    if rank >= world:
        raise DataError(f"rank={rank} with world={world}: the rank must be below the number of ranks.")
    if type(seed) is not int:
        raise DataError(f"seed={seed!r}: an integer is needed.")


def _length_of(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise DataError(
            f"{type(dataset).__name__} has no len(): a map-style data set needs __len__ and __getitem__; for one that "
            "can only be iterated, derive from torch.utils.data.IterableDataset."
        ) from None


def _mix(*numbers: int) -> int:
    """A seed that depends on all `numbers` and their order; neighbouring seeds and epochs do not collide."""
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _batches_in(position: Position, part: Share) -> int:
    """How many batches of this rank `position` stands for; DataError unless it is a whole number."""
    batches, rest = divmod(position.consumed, part.stride)
    if rest:
        raise DataError(
            f"The saved position, {position.consumed} samples into epoch {position.epoch}, is not a whole number of "
            f"micro-batches of {part.micro_batch} on {part.world} ranks, and this loader can only skip whole ones. "
            "Resume with the saved micro-batch size and number of ranks, or at an epoch's start."
        )
    return batches


def _skip(items: Iterator[Any], count: int, *, what: str) -> None:
    skipped = sum(1 for _ in islice(items, count))
    if skipped < count:
        raise DataError(
            f"Cannot resume after {count} batches: the {what} ended after {skipped}. It must give the same batches "
            "again for the same epoch."
        )


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside, and put it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _seeded_iter(sampler: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate `sampler`; what it draws from torch's global generator when it starts comes from `seed`.

    torch's random samplers draw (a seed, or the whole order) with their first item.
    """
    with _global_seed(seed):
        entries = iter(sampler)
        first = next(entries, _END)
    if first is not _END:
        yield first
        yield from entries


def _set_epoch(order: Any, epoch: int) -> None:
    """Tell a user's sampler or stream the epoch, where it wants to know (torch's `set_epoch` convention).

    A batch sampler is made over a sampler, its attribute `sampler`, which is told too.
    """
    for one in (order, getattr(order, "sampler", None)):
        set_epoch = getattr(one, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def _tell_about_generator(sampler: Any, rank: int) -> None:
    if any(getattr(one, "generator", None) is not None for one in (sampler, getattr(sampler, "sampler", None))):
        Teller(speaks=rank == 0).warn_once(
            "generator",
            "The sampler has a generator of its own, whose place is not saved: a resumed epoch has another order. "
            "Make the sampler without one; its order then follows from (seed, epoch).",
        )


def _tell_about_stream(rank: int, world: int) -> None:
    share = "" if world == 1 else f" Each of the {world} ranks iterates it whole: it must give each its own share."
    Teller(speaks=rank == 0).info(
        "The data set is an IterableDataset: it keeps its own order, and a resumed run reads past the batches that "
        f"were already delivered.{share}"
    )
