"""The loss scale against a small reference model, and every part of its state."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sheer.errors import CheckpointError, ConfigError, UsageError
from sheer.optim.loss_scale import LossScale, Scaling, build_loss_scale

SETTINGS = st.fixed_dictionaries(
    {
        "initial_scale_power": st.integers(0, 6),
        "loss_scale_window": st.integers(1, 5),
        "hysteresis": st.integers(1, 4),
        "consecutive_hysteresis": st.booleans(),
    }
)
OVERFLOWS = st.lists(st.booleans(), max_size=40)


def reference(overflows, *, initial_scale_power, loss_scale_window, hysteresis, consecutive_hysteresis):
    """The scale after each step, from DeepSpeed's rule in terms of step numbers; None where it gives up."""
    power, left, last_overflow = initial_scale_power, hysteresis, -1
    for now, overflow in enumerate(overflows):
        quiet = now - last_overflow - 1
        if overflow:
            last_overflow = now
            if left > 1:
                left -= 1
            elif power == 0:
                yield None
                return
            else:
                power -= 1
        else:
            if consecutive_hysteresis:
                left = hysteresis
            if quiet > 0 and quiet % loss_scale_window == 0:
                left = hysteresis
                power += 1
        yield 2.0**power


@given(settings=SETTINGS, overflows=OVERFLOWS)
def test_it_moves_as_the_reference_does(settings, overflows):
    scale = build_loss_scale(**settings)
    for overflow, expected in zip(overflows, reference(overflows, **settings), strict=False):
        if expected is None:
            with pytest.raises(UsageError, match="at its minimum, 1: training has diverged"):
                scale.update(overflow)
        else:
            scale.update(overflow)
            assert scale.scale == expected


@given(settings=SETTINGS, before=OVERFLOWS, after=OVERFLOWS)
def test_a_loaded_state_goes_on_as_the_saved_one(settings, before, after):
    saved, loaded = build_loss_scale(**settings), build_loss_scale(**settings)
    trace(saved, before)
    loaded.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert loaded.state_dict() == saved.state_dict()
    assert trace(loaded, after) == trace(saved, after)


def trace(scale: LossScale, overflows) -> list[float | str]:
    seen: list[float | str] = []
    for overflow in overflows:
        try:
            scale.update(overflow)
            seen.append(scale.scale)
        except UsageError:
            seen.append("at the minimum")
    return seen


def test_the_default_start_and_the_rhythm_by_hand():
    assert build_loss_scale().scale == 65536.0
    scale = LossScale(8.0, window=2, hysteresis=2)
    assert trace(scale, [True, True, True, False, False, False, True, True]) == [8, 4, 2, 2, 2, 4, 4, 2]


def test_the_minimum_is_a_floor_and_falling_onto_it_is_no_error():
    scale = LossScale(6.0, hysteresis=1, min_scale=4.0)
    scale.update(True)
    assert scale.scale == 4.0
    with pytest.raises(UsageError, match=r"minimum, 4: .*lower the learning rate.*lower fp16.min_loss_scale"):
        scale.update(True)
    assert scale.scale == 4.0


def test_a_static_scale_never_moves():
    scale = build_loss_scale(loss_scale=128.0)
    assert scale.scaling is Scaling.STATIC
    assert trace(scale, [True] * 5 + [False] * 5) == [128.0] * 10


def test_a_state_of_the_other_kind_does_not_move_the_configured_scale():
    dynamic, static = build_loss_scale(initial_scale_power=4), build_loss_scale(loss_scale=128.0)
    other = build_loss_scale(loss_scale=2.0)
    other.load_state_dict(static.state_dict())
    assert other.scale == 2.0
    dynamic.load_state_dict(static.state_dict())
    assert dynamic.scale == 16.0


def test_a_state_that_lacks_a_field_is_refused():
    scale = LossScale(8.0)
    with pytest.raises(CheckpointError, match=r"lacks \['good_steps', 'hysteresis_left', 'scaling'\]"):
        scale.load_state_dict({"scale": 4.0})
    assert scale.scale == 8.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": -1.0}, "loss_scale=-1.0"),
        ({"loss_scale_window": 0}, "window=0: at least 1"),
        ({"hysteresis": 0}, "hysteresis=0: at least 1"),
        ({"min_loss_scale": 0}, "min_loss_scale=0"),
        ({"initial_scale_power": 1, "min_loss_scale": 4}, "starts at 2, below min_loss_scale=4"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_loss_scale(**settings)
