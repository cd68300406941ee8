"""The batch triangle."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.config import BatchSizes, Config, resolve_batch
from sheer.errors import ConfigError, UsageError

NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def config(train: int | None, micro: int | None, accumulation: int | None) -> Config:
    return Config(**dict(zip(NAMES, (train, micro, accumulation), strict=True)))


@pytest.mark.parametrize(
    ("numbers", "ranks", "sizes"),
    [
        ((24, 3, 4), 2, (24, 3, 4)),
        ((24, 3, None), 2, (24, 3, 4)),
        ((24, None, 4), 2, (24, 3, 4)),
        ((None, 3, 4), 2, (24, 3, 4)),
        ((24, None, None), 2, (24, 12, 1)),
        ((None, 3, None), 2, (6, 3, 1)),
    ],
)
def test_what_is_left_out_follows(
    numbers: tuple[int | None, int | None, int | None], ranks: int, sizes: tuple[int, int, int]
) -> None:
    assert resolve_batch(config(*numbers), ranks) == BatchSizes(*sizes)


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.sampled_from([0b111, 0b110, 0b101, 0b011]))
def test_any_two_numbers_give_the_third(micro: int, accumulation: int, ranks: int, kept: int) -> None:
    whole = BatchSizes(micro * accumulation * ranks, micro, accumulation)
    given_numbers = [number if kept >> place & 1 else None for place, number in enumerate(whole)]
    assert resolve_batch(config(*given_numbers), ranks) == whole


@given(*[st.none() | st.integers(1, 20)] * 3, st.integers(1, 8))
def test_an_answer_always_closes_and_an_error_says_all_numbers(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    numbers = (train, micro, accumulation)
    solutions = [
        BatchSizes(m * a * ranks, m, a)
        for m in ([micro] if micro else range(1, 21))
        for a in ([accumulation] if accumulation else range(1, 21))
        if train in (None, m * a * ranks)
    ]
    if solutions and (train or micro):
        assert resolve_batch(config(*numbers), ranks) in solutions
        return
    with pytest.raises(ConfigError, match=f"data-parallel size is {ranks}.*Set train") as caught:
        resolve_batch(config(*numbers), ranks)
    for name, value in zip(NAMES, numbers, strict=True):
        assert f"{name} is {'not given' if value is None else value}" in str(caught.value)


@pytest.mark.parametrize(
    ("numbers", "ranks", "mend"),
    [
        ((None, None, None), 2, "Set train_micro_batch_size_per_gpu or train_batch_size"),
        ((None, None, 4), 2, "Set train_micro_batch_size_per_gpu or train_batch_size"),
        ((10, 4, 1), 1, "Set train_batch_size to 4, or leave one of the three out."),
        ((7, None, None), 2, "Set train_batch_size to a multiple of 2, such as 6 or 8."),
        ((10, 3, None), 2, "Set train_batch_size to a multiple of 6, such as 6 or 12."),
        ((8, None, 16), 2, "Set train_batch_size to a multiple of 32, such as 32."),
    ],
)
def test_a_triangle_that_does_not_close_says_how_to_mend_it(
    numbers: tuple[int | None, int | None, int | None], ranks: int, mend: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(mend)):
        resolve_batch(config(*numbers), ranks)


def test_auto_numbers_follow_from_the_others_or_are_named() -> None:
    auto = dict.fromkeys(NAMES, "auto")
    assert resolve_batch(Config.load(auto | {"train_batch_size": 12}), 3) == BatchSizes(12, 4, 1)
    with pytest.raises(ConfigError, match="train_batch_size is auto, train_micro_batch_size_per_gpu is auto"):
        resolve_batch(Config.load(auto), 3)


def test_there_is_at_least_one_rank() -> None:
    with pytest.raises(UsageError, match="data_parallel_size must be at least 1, not 0"):
        resolve_batch(config(8, None, None), 0)
