"""Properties over all keys: misspellings are caught, valid configs round-trip, the schema agrees, all is documented."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sheer.config import Config
from sheer.config.catalogue import READERS, Entry
from sheer.config.foreign import ALIASES, AUTO, Fate
from sheer.config.kinds import (
    Anything,
    Backend,
    Choice,
    Flag,
    Interval,
    Kind,
    Maybe,
    Names,
    Object,
    Real,
    Text,
    Whole,
)
from sheer.config.schema import json_schema
from sheer.errors import ConfigError

CATALOGUE = Config.catalogue()
SCHEMA = jsonschema.Draft202012Validator(json_schema())
PATHS = sorted([*CATALOGUE.entries, *CATALOGUE.blocks])
ROOMS = {path.stem for path in (Path(__file__).parents[2] / "src" / "sheer").iterdir()} | {"engine"}


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.dictionaries(st.text(string.ascii_lowercase, min_size=1, max_size=6), values, max_size=2)


json_leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
json_values = st.recursive(json_leaves, lambda inner: st.lists(inner, max_size=2) | objects(inner), max_leaves=4)


def values_of(kind: Kind) -> st.SearchStrategy[Any]:
    """Values that `kind` should accept, built without asking it."""
    match kind:
        case Flag():
            return st.booleans()
        case Whole():
            whole = st.integers(kind.minimum if kind.minimum is not None else -9, kind.maximum or 10**9)
            return whole | whole.map(float) if kind.exponent else whole
        case Real():
            low = kind.minimum if kind.minimum is not None else kind.above
            return st.floats(low, 1e6, allow_nan=False, exclude_min=kind.above is not None) | st.integers(1, 10**6)
        case Text() | Backend():
            return st.text(min_size=1, max_size=8)
        case Choice():
            return st.sampled_from([*kind.options, *kind.aliases])
        case Names():
            return st.sampled_from([[], ["A", "b.*"], *kind.keywords])
        case Object():
            return objects(json_values)
        case Interval():
            return st.none() | st.integers(1, 10**6) | st.just(float("inf"))
        case Maybe():
            return st.none() | values_of(kind.kind)
        case _:
            assert isinstance(kind, Anything)
            return json_values


def accepted_values(entry: Entry) -> st.SearchStrategy[Any]:
    if entry.fate in (Fate.ABSENT, Fate.REMOVED):
        off = st.sampled_from([None, *entry.off])
        return off | st.just({"enabled": False}) if entry.gated else off
    return values_of(entry.kind) | st.just("auto") if entry.auto else values_of(entry.kind)


def put(config: dict[str, Any], path: str, value: Any) -> None:
    *blocks, name = path.split(".")
    for block in blocks:
        config = config.setdefault(block, {})
    config[name] = value


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Valid config files: any keys, any accepted values, without the contradictions that checks.py knows."""
    config: dict[str, Any] = {}
    for path in draw(st.lists(st.sampled_from(sorted(CATALOGUE.entries)), max_size=8, unique=True)):
        put(config, path, draw(accepted_values(CATALOGUE.entries[path])))
    for block in ("optimizer", "scheduler"):
        if block in config:
            config[block]["type"] = "Adam"
    precisions = [name for name in ("fp16", "bf16", "torch_autocast") if config.get(name, {}).get("enabled") is True]
    assume(len(precisions) <= 1)
    fp16 = config.get("fp16", {})
    assume(fp16.get("min_loss_scale", 1) <= 2 ** fp16.get("initial_scale_power", 16))
    zero = config.get("zero_optimization", {})
    for name in ("offload_optimizer", "offload_param"):
        section = zero.get(name, {})
        assume(section.get("device") != "nvme" or section.get("nvme_path") not in (None, "auto"))
    assume(zero.get("offload_param", {}).get("device", "none") in ("none", "auto") or zero.get("stage") == 3)
    assume("backend" not in config.get("compile", {}).get("kwargs", {}))
    return config


@st.composite
def misspelled(draw: st.DrawFn) -> tuple[str, str]:
    """A path of the catalogue, and the same with one edit in its last name that makes it unknown."""
    path = draw(st.sampled_from(PATHS))
    block, _, name = path.rpartition(".")
    place = draw(st.integers(0, len(name) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase + "_"))
    swapped = name[:place] + name[place : place + 2][::-1] + name[place + 2 :]
    edits = [name[:place] + letter + name[place:], name[:place] + name[place + 1 :]]
    edits += [name[:place] + letter + name[place + 1 :], swapped]
    wrong = draw(st.sampled_from(edits))
    assume(wrong and wrong not in CATALOGUE.children(block) and wrong not in ALIASES)
    return path, f"{block}.{wrong}".lstrip(".")


@given(misspelled())
def test_one_edit_in_any_key_is_caught_with_its_path_and_the_key(pair: tuple[str, str]) -> None:
    path, wrong = pair
    config: dict[str, Any] = {}
    put(config, wrong, None)
    name = path.rpartition(".")[2]
    with pytest.raises(ConfigError) as caught:
        Config.load(config)
    line = next(line for line in str(caught.value).splitlines() if line.startswith(f"  - {wrong}: unknown key"))
    suggested = line.partition("Did you mean")[2].partition("?")[0]
    if len(name) == 2:  # one edit leaves half of a two-letter key, which is like anything; all names are told instead
        suggested += line.partition("Known there:")[2]
    assert f"'{name}'" in suggested


@given(configs())
def test_a_valid_config_loads_agrees_with_the_schema_and_round_trips(config: dict[str, Any]) -> None:
    SCHEMA.validate(config)
    loaded = Config.load(config)
    again = Config.load(loaded.to_dict())
    assert again.to_dict() == loaded.to_dict()
    assert again.model_dump_json() == loaded.model_dump_json()


@given(st.sampled_from(sorted(CATALOGUE.entries)), json_values)
def test_what_is_loaded_is_in_the_schema_whatever_the_value(path: str, value: Any) -> None:
    config: dict[str, Any] = {}
    put(config, path, value)
    try:
        Config.load(config)
    except ConfigError:
        return
    SCHEMA.validate(config)


@given(misspelled())
def test_the_schema_refuses_unknown_keys_too(pair: tuple[str, str]) -> None:
    config: dict[str, Any] = {}
    put(config, pair[1], None)
    assert not SCHEMA.is_valid(config)


def test_the_schema_is_a_schema_and_describes_every_key() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in PATHS:
        place = schema
        for name in path.split("."):
            place = next(part for part in (place, *place.get("anyOf", [])) if "properties" in part)
            assert place["additionalProperties"] is False
            place = place["properties"][name]
        assert place["description"]


@pytest.mark.parametrize("given_value", [True, {"stage": 1}, None])
def test_the_schema_knows_the_deprecated_spelling_of_zero(given_value: Any) -> None:
    SCHEMA.validate({"zero_optimization": given_value})
    assert not SCHEMA.is_valid({"zero_optimization": 1})


@pytest.mark.parametrize("path", [path for path, entry in CATALOGUE.entries.items() if entry.fate is Fate.ACTS])
def test_every_field_is_documented_and_owned_by_a_room(path: str) -> None:
    entry = CATALOGUE.entries[path]
    assert entry.about.endswith(".")
    assert entry.reader == READERS[path.split(".")[0]]
    assert entry.reader in ROOMS
    assert entry.required or entry.kind.accepts(entry.default)
    assert entry.auto == (path in AUTO)


def test_pydantics_own_schema_describes_the_fields_as_well() -> None:
    assert Config.model_json_schema()["$defs"]["Fp16"]["properties"]["enabled"]["type"] == "boolean"
