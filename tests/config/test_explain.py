"""Where "auto" goes, and what `explain` says about each key."""

from __future__ import annotations

from typing import Any

import pytest

from sheer.config import Config
from sheer.config.explain import Row, explain
from sheer.config.foreign import AUTO, DIFFERENCES
from sheer.errors import ConfigError


def rows(given: dict[str, Any]) -> dict[str, Row]:
    return {row.key: row for row in explain(Config.load(given))}


def nested(path: str, value: Any) -> dict[str, Any]:
    """`{"a": {"b": value}}` for "a.b"."""
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


@pytest.mark.parametrize("path", sorted(AUTO))
def test_auto_becomes_the_default_and_is_remembered(path: str) -> None:
    key = path.replace("*", "lr")
    given = nested(key, "auto")
    for block in ("optimizer", "scheduler"):
        if block in given:
            given[block]["type"] = "Adam"
    config = Config.load(given)
    assert config.auto == (key,)
    assert rows(given)[key].source == "auto"
    plain = Config.load({block: {"type": "Adam"} for block in ("optimizer", "scheduler") if block in given})
    assert config.to_dict() == plain.to_dict()


def test_arguments_that_are_auto_are_left_to_the_class() -> None:
    given = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-8}}}
    config = Config.load(given)
    assert config.optimizer is not None
    assert config.optimizer.params == {"eps": 1e-8}
    assert config.raw == given
    row = rows(given)["optimizer.params.lr"]
    assert row == Row("optimizer.params.lr", "auto", "auto", "optim", "left to the default of the class")


@pytest.mark.parametrize(
    "path", ["steps_per_print", "fp16.loss_scale", "compile.enabled", "optimizer.params", "aio.block_size"]
)
def test_auto_anywhere_else_is_refused(path: str) -> None:
    given = nested(path, "auto")
    given.get("optimizer", {})["type"] = "Adam"
    with pytest.raises(ConfigError, match=f'{path}: must be .*, not the string "auto"'):
        Config.load(given)


def test_auto_below_a_free_argument_is_the_arguments_own_business() -> None:
    config = Config.load({"optimizer": {"type": "Adam", "params": {"nested": {"mode": "auto"}}}})
    assert config.optimizer is not None
    assert config.optimizer.params == {"nested": {"mode": "auto"}}
    assert Config.load({"compile": {"kwargs": {"mode": "auto"}}}).compile.kwargs == {"mode": "auto"}


def test_every_key_has_a_source_and_a_reader() -> None:
    said = rows({"train_batch_size": 8, "fp16": {"enabled": "auto"}, "aio": {"block_size": 1}})
    assert said["train_batch_size"][1:4] == (8, "given", "engine")
    assert said["fp16.enabled"][1:4] == (False, "auto", "optim")
    assert said["compile.scope"][1:4] == ("auto", "default", "compiler")
    assert said["optimizer"] == Row("optimizer", None, "default", "optim", "not given")
    assert said["aio.block_size"][1:4] == (1, "given", "nobody")
    assert said["aio.block_size"].remark.startswith("without effect: ")
    assert "follows from the other two" in said["gradient_accumulation_steps"].remark


@pytest.mark.parametrize("path", [path for path in DIFFERENCES if path != "optimizer.type"])
def test_a_default_that_is_not_deepspeeds_is_said_until_it_is_given(path: str) -> None:
    default = rows({})[path]
    assert default.remark == (
        f"differs from DeepSpeed: {DIFFERENCES[path].ours}; there {DIFFERENCES[path].theirs}. {DIFFERENCES[path].why}"
    )
    assert rows(nested(path, default.value))[path].remark == ""


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        ({"type": "Adam"}, True),
        ({"type": "adam", "params": {"lr": 1}}, True),
        ({"type": "Adam", "params": {"adam_w_mode": False}}, False),
        ({"type": "AdamW"}, False),
    ],
)
def test_that_adam_is_adam_is_said_where_it_matters(optimizer: dict[str, Any], said: bool) -> None:
    assert ("AdamW unless" in rows({"optimizer": optimizer})["optimizer.type"].remark) is said


def test_other_spellings_are_remarked_on() -> None:
    assert "deprecated spelling" in rows({"zero_optimization": True})["zero_optimization.stage"].remark
    assert "spelled 'bfloat16'" in rows({"bfloat16": {"enabled": True}})["bf16.enabled"].remark
