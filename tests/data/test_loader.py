"""The loader's order, its tail, its position, and that a resumed run sees what an uninterrupted one would have."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, IterableDataset, RandomSampler

from sheer.data import Position, RepeatingLoader, ResumableLoader, build_loader
from sheer.errors import DataError, UsageError


class Numbers(Dataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Counting(IterableDataset):
    """Gives epoch*1000 + 0, 1, 2, ..."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(self.epoch * 1000, self.epoch * 1000 + self.length)


def loaders(length: int, *, micro_batch: int, world: int, **options) -> list[ResumableLoader]:
    return [
        build_loader(Numbers(length), micro_batch=micro_batch, rank=rank, world=world, **options)
        for rank in range(world)
    ]


def global_order(ranks: list[ResumableLoader], batches: int | None = None) -> list[int]:
    """The samples in global order: micro-batch by micro-batch, rank by rank."""
    rows = zip(*(islice(iter(loader), batches) for loader in ranks), strict=True)
    return [int(sample) for row in rows for batch in row for sample in batch]


def epoch_order(length: int, **options) -> list[int]:
    return global_order(loaders(length, micro_batch=1, world=1, **options))


# Order


def test_an_epoch_is_a_permutation_and_epochs_differ():
    loader = build_loader(Numbers(50), micro_batch=1, rank=0, world=1)
    first, second = [[int(b) for b in loader] for _ in range(2)]
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))


def test_without_shuffle_the_order_is_the_data_sets():
    assert epoch_order(7, shuffle=False) == list(range(7))


def test_seed_decides_the_order():
    assert epoch_order(50, seed=1) == epoch_order(50, seed=1)
    assert epoch_order(50, seed=1) != epoch_order(50, seed=2)


def test_neighbouring_seed_and_epoch_do_not_share_an_order():
    later = build_loader(Numbers(50), micro_batch=1, rank=0, world=1, seed=1)
    list(later)
    assert [int(b) for b in later] != epoch_order(50, seed=2)


@given(length=st.integers(1, 60), micro_batch=st.integers(1, 5), world=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_split_sees_the_same_order_and_wraps_the_tail(length, micro_batch, world):
    order = epoch_order(length)
    ranks = loaders(length, micro_batch=micro_batch, world=world)
    seen = global_order(ranks)
    stride = micro_batch * world
    assert len(seen) == -(-length // stride) * stride
    assert seen == [order[i % length] for i in range(len(seen))]
    assert {len(loader) * stride for loader in ranks} == {len(seen)}


@given(length=st.integers(20, 60), micro_batch=st.integers(1, 5), world=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_drop_last_leaves_the_tail_out(length, micro_batch, world):
    ranks = loaders(length, micro_batch=micro_batch, world=world, drop_last=True)
    seen = global_order(ranks)
    kept = length // (micro_batch * world) * micro_batch * world
    assert seen == epoch_order(length)[:kept]
    assert len(ranks[0]) * micro_batch * world == kept


def test_iterating_draws_nothing_from_the_global_generator():
    before = torch.get_rng_state()
    list(build_loader(Numbers(9), micro_batch=2, rank=0, world=1))
    list(build_loader(Numbers(9), micro_batch=2, rank=0, world=1, sampler=RandomSampler(Numbers(9))))
    assert torch.equal(torch.get_rng_state(), before)


def test_collate_fn_and_workers():
    plain = build_loader(Numbers(10), micro_batch=2, rank=1, world=2, collate_fn=tuple)
    worked = build_loader(Numbers(10), micro_batch=2, rank=1, world=2, collate_fn=tuple, num_workers=2)
    assert list(worked) == list(plain)
    assert all(type(batch) is tuple for batch in plain)


# Position


@given(
    length=st.integers(1, 60),
    before=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    after=st.tuples(st.integers(1, 5), st.integers(1, 4)),
    epochs=st.integers(0, 2),
    batches=st.integers(0, 8),
)
@settings(max_examples=100, deadline=None)
def test_resume_mid_epoch_at_another_split(length, before, after, epochs, batches):
    saved = loaders(length, micro_batch=before[0], world=before[1])
    for _ in range(epochs):
        global_order(saved)
    start = global_order(saved, batches)
    state = json.loads(json.dumps(saved[0].state_dict()))
    assert all(loader.state_dict() == state for loader in saved)

    resumed = loaders(length, micro_batch=after[0], world=after[1], seed=99)
    for loader in resumed:
        loader.load_state_dict(state)
    rest = global_order(resumed)

    whole = build_loader(Numbers(length), micro_batch=1, rank=0, world=1)
    for _ in range(epochs):
        list(whole)
    order = [int(b) for b in whole]
    if len(start) >= length:  # that epoch was over: the next one follows
        start, order = [], [int(b) for b in whole]
    expected = (start + rest)[:length]
    assert expected == order
    assert len(rest) - (length - len(start)) < after[0] * after[1]


def test_the_position_is_that_of_delivered_batches_not_of_prefetched_ones():
    loader = build_loader(Numbers(40), micro_batch=2, rank=0, world=1, num_workers=2)
    batches = iter(loader)
    next(batches)
    assert loader.position == Position(epoch=0, consumed=2)
    batches.close()


def test_after_the_last_batch_the_position_is_the_next_epoch():
    loader = build_loader(Numbers(5), micro_batch=2, rank=0, world=1)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    assert loader.position == Position(epoch=1, consumed=0)
    assert list(batches) == []
    assert loader.position == Position(epoch=1, consumed=0)


def test_a_pass_left_early_counts_as_its_epoch():
    loader = build_loader(Numbers(9), micro_batch=1, rank=0, world=1)
    next(iter(loader))
    assert loader.position == Position(epoch=0, consumed=1)
    next(iter(loader))
    assert loader.position == Position(epoch=1, consumed=1)


def test_iter_alone_begins_no_pass():
    loader = build_loader(Numbers(9), micro_batch=1, rank=0, world=1)
    running = iter(loader)
    next(running)
    iter(loader)
    next(running)
    assert loader.position == Position(epoch=0, consumed=2)


def test_loading_moves_the_running_iterator():
    loader = build_loader(Numbers(9), micro_batch=1, rank=0, world=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    first = [int(next(batches)) for _ in range(8)]
    loader.load_state_dict(state)
    assert [int(b) for b in batches] == first
    assert loader.position == Position(epoch=1, consumed=0)


def test_an_overtaken_iterator_says_so():
    loader = build_loader(Numbers(9), micro_batch=1, rank=0, world=1)
    old, new = iter(loader), iter(loader)
    next(old)
    next(new)
    with pytest.raises(UsageError, match=r"overtaken by a newer iter\(loader\)"):
        next(old)
    assert loader.position == Position(epoch=1, consumed=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 8}, "length=8, this loader has 9"),
        ({"kind": "stream"}, "kind='stream', this loader has 'order'"),
        ({"shuffle": False}, "shuffle=False, this loader has True"),
        ({"consumed": "4"}, "consumed='4'; an integer"),
        ({"epoch": True}, "epoch=True; an integer"),
        ({"consumed": -1}, "negative"),
    ],
)
def test_a_position_that_does_not_fit_is_refused_and_nothing_changes(change, message):
    loader = build_loader(Numbers(9), micro_batch=1, rank=0, world=1)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(DataError, match=message):
        loader.load_state_dict(before | change)
    assert loader.state_dict() == before


def test_a_position_without_a_key_is_refused():
    loader = build_loader(Numbers(9), micro_batch=1, rank=0, world=1)
    with pytest.raises(DataError, match=r"lacks \['consumed', 'kind', 'length', 'seed', 'shuffle'\]"):
        loader.load_state_dict({"epoch": 1})


def test_drop_last_resumed_with_less_than_a_batch_left_starts_the_next_epoch():
    narrow = build_loader(Numbers(9), micro_batch=2, rank=0, world=1, drop_last=True)
    list(islice(iter(narrow), 3))
    wide = build_loader(Numbers(9), micro_batch=4, rank=0, world=1, drop_last=True)
    wide.load_state_dict(narrow.state_dict())
    assert wide.position == Position(epoch=1, consumed=0)


# The user's own order


@pytest.mark.parametrize("workers", [0, 1])
def test_a_random_sampler_resumes_exactly(workers):
    def build() -> ResumableLoader:
        data = Numbers(20)
        return build_loader(
            data, micro_batch=3, rank=0, world=1, sampler=RandomSampler(data), num_workers=workers, collate_fn=list
        )

    whole = build()
    expected = [list(whole), list(whole)]
    assert expected[0] != expected[1]

    saved = build()
    list(saved)
    head = list(islice(iter(saved), 2))
    torch.manual_seed(7)
    resumed = build()
    resumed.load_state_dict(saved.state_dict())
    assert head + list(resumed) == expected[1]
    assert len(resumed) == 7


def test_a_distributed_sampler_is_told_the_epoch():
    data = Numbers(20)
    sampler = DistributedSampler(data, num_replicas=2, rank=1, seed=3)
    loader = build_loader(data, micro_batch=10, rank=1, world=2, sampler=sampler, collate_fn=list)
    mine = [next(iter(loader)) for _ in range(2)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert mine[epoch] == list(sampler)


def test_a_batch_sampler_over_a_distributed_one_is_told_the_epoch_too():
    sampler = DistributedSampler(Numbers(20), num_replicas=2, rank=1, seed=3)
    lists = BatchSampler(sampler, batch_size=10, drop_last=False)
    loader = build_loader(Numbers(20), micro_batch=10, rank=1, world=2, batch_sampler=lists, collate_fn=list)
    assert next(iter(loader)) != next(iter(loader))


def test_a_sampler_whose_order_cannot_be_resumed_is_warned_about_on_rank_0(caplog):
    for rank in range(2):
        sampler = RandomSampler(Numbers(9), generator=torch.Generator())
        build_loader(Numbers(9), micro_batch=1, rank=rank, world=2, sampler=sampler)
        build_loader(Numbers(9), micro_batch=1, rank=rank, world=2, sampler=RandomSampler(Numbers(9)))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a resumed epoch has another order" in caplog.text


def test_a_batch_sampler_decides_the_batches():
    data = Numbers(7)
    lists = BatchSampler(range(7), batch_size=3, drop_last=False)
    loader = build_loader(data, micro_batch=3, rank=0, world=1, batch_sampler=lists, collate_fn=list)
    assert list(loader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(loader) == 3


def test_a_sampler_with_drop_last():
    loader = build_loader(Numbers(7), micro_batch=3, rank=0, world=1, sampler=range(7), drop_last=True, collate_fn=list)
    assert list(loader) == [[0, 1, 2], [3, 4, 5]]
    assert len(loader) == 2


def test_a_sampler_that_gives_less_on_resume_is_an_error():
    saved = build_loader(Numbers(9), micro_batch=1, rank=0, world=1, sampler=range(9))
    list(islice(iter(saved), 5))
    resumed = build_loader(Numbers(9), micro_batch=1, rank=0, world=1, sampler=range(3))
    resumed.load_state_dict(saved.state_dict())
    with pytest.raises(DataError, match="Cannot resume after 5 batches: the sampler ended after 3"):
        next(iter(resumed))


# Streams


def stream(length: int, **options) -> ResumableLoader:
    return build_loader(Counting(length), **({"micro_batch": 2, "rank": 0, "world": 1, "collate_fn": list} | options))


def test_a_stream_keeps_its_order_and_is_told_the_epoch():
    loader = stream(5)
    assert list(loader) == [[0, 1], [2, 3], [4]]
    assert list(loader) == [[1000, 1001], [1002, 1003], [1004]]
    assert list(stream(5, drop_last=True)) == [[0, 1], [2, 3]]


def test_a_stream_resumes_by_reading_past():
    saved = stream(6)
    list(saved)
    list(islice(iter(saved), 2))
    resumed = stream(6)
    resumed.load_state_dict(saved.state_dict())
    assert list(resumed) == [[1004, 1005]]


def test_a_stream_saved_after_its_last_batch_resumes_with_the_next_epoch():
    saved = stream(4)
    list(islice(iter(saved), 2))
    assert saved.position == Position(epoch=0, consumed=4)
    resumed = stream(4)
    resumed.load_state_dict(saved.state_dict())
    assert list(resumed) == [[1000, 1001], [1002, 1003]]


def test_a_stream_resumes_at_another_split_only_at_whole_batches():
    saved = stream(12)
    list(islice(iter(saved), 3))
    assert [batch[0] for batch in _resumed(saved, micro_batch=3)] == [6, 9]
    with pytest.raises(DataError, match="6 samples into epoch 0, is not a whole number of micro-batches of 4"):
        _resumed(saved, micro_batch=4)


def _resumed(saved: ResumableLoader, **options) -> ResumableLoader:
    loader = stream(12, **options)
    loader.load_state_dict(saved.state_dict())
    return loader


def test_a_stream_has_no_length_and_no_sampler():
    with pytest.raises(TypeError, match="has no len"):
        len(stream(4))
    with pytest.raises(DataError, match="IterableDataset has its own order"):
        stream(4, sampler=range(4))


def test_a_stream_is_explained_once_on_rank_0(caplog):
    with caplog.at_level(logging.INFO, logger="sheer"):
        for rank in range(2):
            loader = stream(4, rank=rank, world=2)
            list(loader)
            list(loader)
    assert len(caplog.records) == 1
    assert "must give each its own share" in caplog.text


# Arguments, and repeating


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch": 0}, "micro_batch=0: an integer of at least 1"),
        ({"micro_batch": 2.0}, "micro_batch=2.0"),
        ({"world": 0}, "world=0"),
        ({"rank": 2, "world": 2}, "rank=2 with world=2"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": "x"}, "seed='x'"),
        ({"sampler": range(9), "batch_sampler": [[1]]}, "give one of them"),
        ({"micro_batch": 5, "world": 2, "drop_last": True}, "9 samples but one micro-batch over all ranks takes 10"),
    ],
)
def test_arguments_that_cannot_work(options, message):
    with pytest.raises(DataError, match=message):
        build_loader(Numbers(9), **({"micro_batch": 1, "rank": 0, "world": 1} | options))


def test_an_empty_data_set_is_refused():
    with pytest.raises(DataError, match=r"len\(dataset\) is 0"):
        build_loader(Numbers(0), micro_batch=1, rank=0, world=1)


def test_a_data_set_without_a_length_is_refused():
    with pytest.raises(DataError, match=r"generator has no len\(\)"):
        build_loader((i for i in range(3)), micro_batch=1, rank=0, world=1)


def test_repeating_goes_through_the_epochs_and_follows_a_load():
    loader = build_loader(Numbers(4), micro_batch=2, rank=0, world=1, collate_fn=list)
    once = build_loader(Numbers(4), micro_batch=2, rank=0, world=1, collate_fn=list)
    expected = [*once, *once, *once]
    endless = RepeatingLoader(loader)
    start = loader.state_dict()
    assert [next(endless) for _ in range(6)] == expected
    loader.load_state_dict(start)
    assert list(islice(endless, 6)) == expected


def test_repeating_nothing_is_an_error():
    with pytest.raises(DataError, match="gave no batch in a whole pass"):
        next(RepeatingLoader([]))
