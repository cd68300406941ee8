"""Ways in, and what is refused on the way, each with its path, the value, what is allowed and a mend."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from pydantic import ValidationError

from sheer.config import Config, Fp16
from sheer.errors import ConfigError


def problems(given: Any) -> list[str]:
    """The lines of the one error that `given` raises, without the heading."""
    with pytest.raises(ConfigError) as caught:
        Config.load(given)
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_an_empty_config_has_pytorchs_defaults() -> None:
    config = Config.load({})
    assert config.gradient_clipping == 0.0
    assert config.optimizer is None
    assert config.zero_optimization.stage == 0
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert not config.fp16.enabled
    assert not config.bf16.check_grad_overflow
    assert config.data_types.grad_accum_dtype is None
    assert config.steps_per_print is None


def test_path_string_mapping_and_keywords_say_the_same(tmp_path: Path) -> None:
    given = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    file = tmp_path / "config.json"
    file.write_text("\N{BOM}" + json.dumps(given))
    ways = [file, str(file), given, MappingProxyType(given)]
    assert len({json.dumps(Config.load(way).to_dict()) for way in ways}) == 1
    assert Config(**given).to_dict() == Config.load(file).to_dict()
    assert Config.load(file).raw == given


def test_a_config_is_loaded_as_it_is() -> None:
    config = Config(train_batch_size=8)
    assert Config.load(config) is config


def test_a_config_is_frozen_and_apart_from_the_users_dict() -> None:
    given: dict[str, Any] = {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 0.99]}}}
    config = Config.load(given)
    given["optimizer"]["params"]["betas"].append(1)
    assert config.optimizer is not None
    assert config.optimizer.params == {"betas": [0.9, 0.99]}
    assert config.raw["optimizer"]["params"] == {"betas": [0.9, 0.99]}
    with pytest.raises(ValidationError, match="frozen"):
        config.train_batch_size = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.fp16.enabled = True


def test_a_config_survives_copy_and_pickle() -> None:
    config = Config.load({"train_batch_size": 8, "aio": {"block_size": 1}, "fp16": {"enabled": "auto"}})
    for twin in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert twin == config
        assert twin.origin == config.origin


def test_sections_check_themselves_too() -> None:
    with pytest.raises(ValidationError, match="must be a finite number of at least 0, not the number -1"):
        Fp16(loss_scale=-1)


def test_a_backend_may_be_a_callable_from_python() -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return graph

    config = Config.load({"compile": {"enabled": True, "backend": backend, "kwargs": {"dynamic": False}}})
    assert config.compile.backend is backend
    assert config.to_dict()["compile"]["backend"] is backend


def test_every_problem_of_a_file_is_told_at_once() -> None:
    told = problems(
        {
            "train_batch_size": "8",
            "zero_optimization": {"stagee": 1, "stage": 7, "reduce_bucket_size": 2.5},
            "optimizer": {"type": 3, "params": []},
            "scheduler": {"params": {}},
            "fp16": {"enabled": True, "hysteresis": 0},
            "bf16": {"enabled": True},
            "wall_clock_breakdown": True,
        }
    )
    expected = [
        "zero_optimization.stagee: unknown key in 'zero_optimization'. Did you mean 'stage'?",
        'train_batch_size: must be an integer of at least 1, or null, not the string "8". Write 8.',
        "zero_optimization.stage: must be 0, 1, 2 or 3, not the number 7.",
        "zero_optimization.reduce_bucket_size: must be an integer of at least 1, not the number 2.5.",
        "optimizer.type: must be a non-empty string, not the number 3.",
        "optimizer.params: must be an object, not the list [].",
        "scheduler.type: is missing; it must be a non-empty string.",
        "fp16.hysteresis: must be an integer of at least 1, not the number 0.",
    ]
    assert set(expected) <= set(told)
    assert sum(line.startswith("fp16.enabled and bf16.enabled are both true") for line in told) == 1
    assert sum(line.startswith("wall_clock_breakdown: true asks for DeepSpeed's") for line in told) == 1
    assert len(told) == len(expected) + 2


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"train_batch_size": -4}, "train_batch_size: must be an integer of at least 1, or null, not the number -4."),
        ({"train_batch_size": 8.0}, "not the number 8.0. Write 8."),
        ({"train_batch_size": True}, "train_batch_size: must be an integer of at least 1, or null, not true."),
        ({"gradient_clipping": float("nan")}, "gradient_clipping: must be a finite number of at least 0"),
        ({"gradient_clipping": float("inf")}, "not the number Infinity."),
        ({"gradient_clipping": False}, "gradient_clipping: must be a finite number of at least 0, not false."),
        ({"gradient_clipping": None}, "gradient_clipping: must be a finite number of at least 0, not null."),
        ({"steps_per_print": 0}, "steps_per_print: must be an integer of at least 1, or null (off)"),
        ({"steps_per_print": float("-inf")}, "not the number -Infinity."),
        ({"fp16": {"enabled": 1}}, "fp16.enabled: must be true or false, not the number 1. Write true."),
        ({"fp16": {"enabled": "True"}}, 'fp16.enabled: must be true or false, not the string "True". Write true.'),
        ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: must be a finite number of at least 0, not the number -1."),
        ({"fp16": {"min_loss_scale": 0}}, "fp16.min_loss_scale: must be a finite number above 0"),
        ({"fp16": {"initial_scale_power": 200}}, "fp16.initial_scale_power: must be an integer from 0 to 127"),
        ({"fp16": {"initial_scale_power": 3, "min_loss_scale": 16}}, "2**fp16.initial_scale_power = 8"),
        ({"fp16": True}, "fp16: must be an object {...}, or null, not true."),
        ({"zero_optimization": 1}, "zero_optimization: must be an object {...}, or null, not the number 1."),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: must be 0, 1, 2 or 3, not true."),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage"),
        ({"zero_optimization": {"reduce_bucket_size": 0}}, "must be an integer of at least 1, not the number 0."),
        ({"data_types": {"grad_accum_dtype": "fp8"}}, 'must be "fp32", "bf16" or "fp16", or null'),
        ({"gradient_allreduce_op": "avg"}, 'gradient_allreduce_op: must be "mean" or "sum", not the string "avg".'),
        ({"checkpoint": {"keep_last": 0}}, "checkpoint.keep_last: must be an integer of at least 1, or null"),
        ({"compile": {"scope": "blocks"}}, 'compile.scope: must be "auto", "module" or a list of names'),
        ({"compile": {"scope": [""]}}, "compile.scope: must be"),
        ({"compile": {"kwargs": {"backend": "eager"}}}, "move it to 'compile.backend'"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "by the top-level key 'gradient_clipping'"),
        ({"stage": 2}, "stage: unknown key at the top level. 'zero_optimization.stage' would be known."),
        ({"optimizer": {"type": "Adam", "lr": 1}}, "Arguments of the class go into 'optimizer.params'."),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16: is another name of bf16, which is given too."),
        ({3: 4}, "3: unknown key at the top level."),
    ],
)
def test_a_refusal_names_path_value_allowed_and_mend(given: dict[Any, Any], said: str) -> None:
    told = problems(given)
    assert len(told) == 1
    assert said in told[0]


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_autocast_excludes_16_bit_parameters(precision: str) -> None:
    told = problems({precision: {"enabled": True}, "torch_autocast": {"enabled": True}})
    assert len(told) == 1
    assert told[0].startswith(f"{precision}.enabled and torch_autocast.enabled are both true: {precision} makes")


def test_other_spellings_that_deepspeed_accepts() -> None:
    config = Config.load(
        {
            "bfloat16": {"enabled": True},
            "zero_optimization": True,
            "steps_per_print": float("inf"),
            "communication_data_type": "float32",
            "checkpoint": {"tag_validation": "FAIL"},
            "scheduler": None,
            "fp16": None,
        }
    )
    assert config.bf16.enabled
    assert config.zero_optimization.stage == 1
    assert config.steps_per_print is None
    assert config.communication_data_type == "fp32"
    assert "checkpoint.tag_validation" in config.without_effect
    assert config.scheduler is None
    assert not config.fp16.enabled
    assert Config.load({"zero_optimization": False}).zero_optimization.stage == 0


def test_element_counts_may_be_written_with_an_exponent() -> None:
    config = Config.load({"zero_optimization": {"reduce_bucket_size": 5e8}})
    assert config.zero_optimization.reduce_bucket_size == 500_000_000
    assert type(config.zero_optimization.reduce_bucket_size) is int


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'no file at ".*nope.json"; looked in '):
        Config.load(tmp_path / "nope.json")


def test_json_text_is_not_a_path() -> None:
    with pytest.raises(ConfigError, match=r"pass json\.loads\(text\)"):
        Config.load('{"train_batch_size": 8}')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "a": 1,\n  "b" 2\n}', r'c\.json:3:7: not valid JSON: .*, at "\\"b\\" 2"'),
        ('{"a": 1} // why', r"c\.json:1:10: not valid JSON: .* no comments"),
        ("", r"c\.json:1:1: not valid JSON"),
        ("[1]", r"c\.json: must hold one JSON object \{\.\.\.\}, not \[1\]"),
        ("[" * 100_000, r"c\.json: nested too deeply"),
        (
            '{"fp16": {"enabled": true, "enabled": false}, "x": [{"y": 1, "y": 2}], "x": [{"y": 1, "y": 2}]}',
            r"c\.json: said more than once: fp16\.enabled, y, x\.0\.y, x\. Keep one of each",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        Config.load(file)


def test_a_file_must_be_utf8_text(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        Config.load(file)
    with pytest.raises(ConfigError, match="cannot read"):
        Config.load(tmp_path)


@pytest.mark.parametrize("source", [None, 3, ["train_batch_size"]])
def test_other_sources_are_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a path to a JSON file, a dict or a sheer\.config\.Config"):
        Config.load(source)


def test_importing_sheer_imports_no_pydantic_and_config_no_torch() -> None:
    code = (
        "import sys, sheer; print('pydantic' in sys.modules, end=' '); "
        "before = 'torch' in sys.modules; import sheer.config; print(not before and 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["False", "False"]
