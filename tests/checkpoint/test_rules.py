"""What a save and a load refuse, accept and report; on every rank, with nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sheer.checkpoint import (
    Axis,
    Key,
    LoadReport,
    Shard,
    find,
    list_tags,
    load,
    load_full,
    open_checkpoint,
    open_together,
    read_state,
    save,
)
from sheer.errors import CheckpointError
from tests.checkpoint.ranks import Solo, cut, errors_on_ranks, on_ranks, same, whole


def save_alone(root: Path, *shards: Shard, tag: Any = "t", state: Any = None, **options: Any) -> None:
    save(root, tag, shards=shards, facts=options.pop("facts", {}), state=state or {}, rng={}, axis=Solo(), **options)


def load_alone(root: Path, *wanted: Shard, **options: Any) -> LoadReport:
    return load(open_checkpoint(root), wanted=wanted, axis=Solo(), **options)


def param(name: str, *values: float) -> Shard:
    return whole("param", name, torch.tensor(values))


# Saving ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tag", ["", "a/b", "a\\b", "..", ".hidden", "latest", " x", "x\n", "x" * 201, "\ud800", 7, None, b"t"], ids=repr
)
def test_a_tag_that_cannot_be_a_directory_name_is_refused(tmp_path: Path, tag: Any) -> None:
    with pytest.raises(CheckpointError, match="tag"):
        save_alone(tmp_path / "root", param("w", 1), tag=tag)
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize("tag", ["global_step100", "best model", "étape-1", "x" * 200, "-rf", "a.b"])
def test_a_tag_that_can_be_one_is_taken(tmp_path: Path, tag: str) -> None:
    save_alone(tmp_path, param("w", 1), tag=tag)
    assert (list_tags(tmp_path), open_checkpoint(tmp_path).tag) == ([tag], tag)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"client_state": {"best": [1, torch.ones(3)]}},
            r"state\['client_state'\]\['best'\]\[1\] is torch.Tensor of sh",
        ),
        (
            {"client_state": {"when": {1, 2}}},
            r"state\['client_state'\]\['when'\] is builtins.set \(\{1, 2\}\), which JSON",
        ),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\) \(tuple\)"),
        ({"f": print}, r"state\['f'\] is builtins.builtin_function_or_method"),
    ],
)
def test_state_that_is_not_json_is_refused_by_its_path_on_every_rank(tmp_path: Path, state: Any, message: str) -> None:
    root = tmp_path / "root"
    errors = errors_on_ranks(2, lambda axis: save(root, "t", shards=[], facts={}, state=state, rng={}, axis=axis))
    for error in errors:
        with pytest.raises(CheckpointError, match=message):
            raise error or AssertionError
    assert not root.exists()


def test_state_that_holds_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        save_alone(tmp_path, state={"loop": loop})


BAD_SHARDS = {
    "outside": (
        Shard("param", "w", (4,), 2, torch.ones(3)),
        r"param 'w' \[4\]: the interval \[2, 5\) is outside its 4",
    ),
    "not flat": (Shard("param", "w", (2, 2), 0, torch.ones(2, 2)), "must be 1-D and contiguous"),
    "strided": (Shard("param", "w", (2,), 0, torch.ones(4)[::2]), "must be 1-D and contiguous"),
    "empty": (Shard("param", "w", (4,), 2, torch.ones(0)), "an empty interval of a tensor with 4 elements"),
    "kind": (Shard("exp_avg", "w", (1,), 0, torch.ones(1)), "kind 'exp_avg' is unknown"),
    "name": (Shard("param", "\ud800", (1,), 0, torch.ones(1)), "not valid Unicode"),
    "sparse": (Shard("param", "w", (2,), 0, torch.ones(2).to_sparse()), "cannot be stored"),
    "gap": (Shard("param", "w", (4,), 0, torch.ones(3)), r"param 'w' \[4\]: elements 3 to 3 are held by nobody"),
}


@pytest.mark.parametrize(("shard", "message"), BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_a_shard_that_is_no_part_of_a_whole_is_refused(tmp_path: Path, shard: Shard, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        save_alone(tmp_path / "root", param("v", 1), shard)
    assert not (tmp_path / "root").exists()


def test_ranks_that_do_not_fit_together_are_named(tmp_path: Path) -> None:
    value = torch.ones(10)
    pieces = cut("param", "w", value, cuts=[4])
    wrong = {
        r"'w' \[10\]: elements 2 to 3 are held twice, by rank 0 and rank 1": Shard("param", "w", (10,), 2, value[2:]),
        r"'w' is \[5, 2\] torch.float32 on rank 1 and \[10\] torch.float32 on": Shard(
            "param", "w", (5, 2), 4, value[4:]
        ),
        r"'w' is \[10\] torch.float16 on rank 1": Shard("param", "w", (10,), 4, value[4:].half()),
    }
    for message, second in wrong.items():
        shards = [pieces[0], second]
        errors = errors_on_ranks(
            2,
            lambda axis: save(tmp_path, "t", shards=[shards[axis.rank]], facts={}, state={}, rng={}, axis=axis),  # noqa: B023
        )
        for error in errors:
            with pytest.raises(CheckpointError, match=message):
                raise error or AssertionError
    assert list_tags(tmp_path) == []


def test_ranks_that_disagree_on_the_tag_are_named(tmp_path: Path) -> None:
    def body(axis: Axis) -> None:
        save(tmp_path, f"step{axis.rank // 2}", shards=[], facts={}, state={}, rng={}, axis=axis)

    for error in errors_on_ranks(3, body):
        with pytest.raises(CheckpointError, match="disagree on the tag: rank 2 'step1', rank 0 'step0'"):
            raise error or AssertionError


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5, "2"])
def test_keep_last_is_a_count(tmp_path: Path, keep_last: Any) -> None:
    with pytest.raises(CheckpointError, match="keep_last is"):
        save_alone(tmp_path, keep_last=keep_last)


def test_ties_must_lead_to_what_is_stored(tmp_path: Path) -> None:
    for ties in ({"head": "nowhere"}, {"head": "head"}, ["head"]):
        with pytest.raises(CheckpointError, match=r"tied to|not a mapping"):
            save_alone(tmp_path, param("head", 1), facts={"ties": ties})


# Opening --------------------------------------------------------------------------------------------------------------


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    assert find(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="there is no directory"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        open_checkpoint(tmp_path)
    save_alone(tmp_path, tag="global_step100", save_latest=False)
    assert find(tmp_path) is None
    assert find(tmp_path, "global_step10") is None
    with pytest.raises(CheckpointError, match=r"no file `latest`, so name one by `tag`.*'global_step100'"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint 'global_step10'. Did you mean 'global_step100'\?"):
        open_checkpoint(tmp_path, "global_step10")


def test_a_latest_that_names_nothing_is_an_error_never_a_fresh_start(tmp_path: Path) -> None:
    save_alone(tmp_path, tag="a")
    (tmp_path / "latest").write_text("gone\n")
    with pytest.raises(CheckpointError, match="names 'gone', which is not there"):
        find(tmp_path)
    for text in ("", "../../etc", "\x00", "x" * 5000):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(CheckpointError, match="names no tag"):
            find(tmp_path)


def test_root_may_be_the_checkpoint_itself(tmp_path: Path) -> None:
    save_alone(tmp_path, param("w", 1), tag="a", state={"n": 1})
    index = open_checkpoint(tmp_path / "a")
    assert index.tag == "a"
    assert read_state(index) == {"n": 1}


def test_rank_0_decides_which_checkpoint_it_is(tmp_path: Path) -> None:
    save_alone(tmp_path, param("w", 1), tag="a")

    def body(axis: Axis) -> str:
        # Only rank 0's idea of the place counts; the others need not even be able to look for it.
        return open_together(tmp_path if axis.rank == 0 else tmp_path / "nowhere", axis=axis).tag

    assert on_ranks(3, body) == ["a", "a", "a"]
    for error in errors_on_ranks(2, lambda axis: open_together(tmp_path, "b", axis=axis)):
        assert isinstance(error, CheckpointError)


# Loading --------------------------------------------------------------------------------------------------------------


def test_names_that_do_not_match_are_listed_in_both_directions_with_the_nearest(tmp_path: Path) -> None:
    save_alone(tmp_path, param("blocks.0.weight", 1, 2), param("fine", 1), whole("buffer", "mask", torch.ones(1)))
    fine = param("fine", 0)
    wanted = [whole("param", "block.0.weight", torch.zeros(3)), fine, whole("optim.exp_avg", "mask", torch.zeros(1))]
    with pytest.raises(CheckpointError) as raised:
        load_alone(tmp_path, *wanted)
    text = str(raised.value)
    assert (
        "missing: param 'block.0.weight' [3] is wanted, not in the checkpoint; nearest in the checkpoint: 'blocks.0"
        in text
    )
    assert "missing: optim.exp_avg 'mask' [1] is wanted, not in the checkpoint" in text
    assert (
        "unexpected: param 'blocks.0.weight' [2] is in the checkpoint, not wanted; nearest wanted: 'block.0.w" in text
    )
    assert "unexpected: buffer 'mask' [1]" in text
    assert fine.data.item() == 0, "nothing was changed"


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save_alone(tmp_path, *(param(f"a{i}", 1) for i in range(25)))
    with pytest.raises(CheckpointError) as raised:
        load_alone(tmp_path)
    assert str(raised.value).count("unexpected: ") == 10
    assert "and 15 more" in str(raised.value)


def test_missing_and_unexpected_can_be_allowed_and_are_reported(tmp_path: Path) -> None:
    save_alone(tmp_path, param("a", 1), param("b", 2))
    b, c = param("b", 0), param("c", 7)
    report = load_alone(tmp_path, b, c, allow_missing=lambda key: key.name == "c", allow_unexpected=True)
    assert report[:3] == ((Key("param", "b"),), (Key("param", "c"),), (Key("param", "a"),))
    assert (b.data.item(), c.data.item()) == (2, 7)
    with pytest.raises(CheckpointError, match="missing: param 'c'"):
        load_alone(tmp_path, b, c, allow_missing=lambda key: key.name == "d", allow_unexpected=True)


def test_what_one_rank_wants_is_not_unexpected_on_another(tmp_path: Path) -> None:
    save_alone(tmp_path, param("a", 1), param("b", 2))
    wanted = [param("a", 0), param("b", 0)]
    reports = on_ranks(2, lambda axis: load(open_checkpoint(tmp_path), wanted=[wanted[axis.rank]], axis=axis))
    assert [shard.data.item() for shard in wanted] == [1, 2]
    assert reports[0].loaded == reports[1].loaded == (Key("param", "a"), Key("param", "b"))


def test_other_kinds_are_left_alone(tmp_path: Path) -> None:
    save_alone(tmp_path, param("w", 1), whole("optim.exp_avg", "w", torch.ones(1)))
    wanted = [param("w", 0), whole("optim.step", "w", torch.zeros(1))]
    report = load_alone(tmp_path, *wanted, kinds={"param", "buffer"})
    assert [shard.data.item() for shard in wanted] == [1, 0]
    assert report.unexpected == report.missing == ()


def test_parameters_and_buffers_fill_each_other_as_in_a_state_dict(tmp_path: Path) -> None:
    save_alone(tmp_path, param("scale", 1), whole("buffer", "mask", torch.ones(1)), facts={"ties": {"also": "mask"}})
    scale, mask, also = whole("buffer", "scale", torch.zeros(1)), param("mask", 0.0), param("also", 0.0)
    report = load_alone(tmp_path, scale, mask, also)
    assert [shard.data.item() for shard in (scale, mask, also)] == [1, 1, 1]
    assert report.missing == report.unexpected == ()


@pytest.mark.parametrize(
    ("stored", "wanted", "message"),
    [
        (torch.ones(4), torch.zeros(2, 2), r"shape: param 'w' is \[4\] in the checkpoint, \[2, 2\] is wanted"),
        (torch.ones(1, dtype=torch.complex64), torch.zeros(1), "dtype: param 'w' is torch.complex64"),
        (torch.ones(1), torch.zeros(1, dtype=torch.int64), "dtype: param 'w' is torch.float32"),
        (torch.tensor([300]), torch.zeros(1, dtype=torch.uint8), r"integers .* that torch.uint8 cannot hold exactly"),
        (torch.tensor([2**24 + 1]), torch.zeros(1), r"integers .* that torch.float32 cannot hold exactly"),
    ],
)
def test_what_cannot_be_the_same_value_is_refused(
    tmp_path: Path, stored: torch.Tensor, wanted: torch.Tensor, message: str
) -> None:
    save_alone(tmp_path, whole("param", "w", stored))
    with pytest.raises(CheckpointError, match=message):
        load_alone(tmp_path, whole("param", "w", wanted))
    assert not wanted.any()


def test_a_fault_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    value = torch.randn(1000)
    save_alone(tmp_path, whole("param", "w", value), whole("param", "v", value))
    (tmp_path / "t" / "rank00000.safetensors").open("r+b").close()
    data = bytearray((tmp_path / "t" / "rank00000.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "t" / "rank00000.safetensors").write_bytes(data)
    wanted = [whole("param", "w", torch.zeros(1000)), whole("param", "v", torch.zeros(1000))]
    errors = errors_on_ranks(2, lambda axis: load(open_checkpoint(tmp_path), wanted=[wanted[axis.rank]], axis=axis))
    for error in errors:
        with pytest.raises(CheckpointError, match=r"rank 1: .*rank00000.safetensors: param 'v': bytes .* checksum"):
            raise error or AssertionError
    assert not wanted[0].data.any(), "rank 0 could read all of its own, and still took nothing"


def test_ranks_that_opened_different_checkpoints_are_named(tmp_path: Path) -> None:
    save_alone(tmp_path, param("w", 1), tag="a")
    save_alone(tmp_path, param("w", 2), tag="b")
    for error in errors_on_ranks(
        2, lambda axis: load(open_checkpoint(tmp_path, "ab"[axis.rank]), wanted=[param("w", 0)], axis=axis)
    ):
        with pytest.raises(CheckpointError, match=r"different checkpoints .*rank 1"):
            raise error or AssertionError


# Ties -----------------------------------------------------------------------------------------------------------------


def test_tied_in_the_checkpoint_fills_both_where_they_are_apart(tmp_path: Path) -> None:
    state = whole("optim.exp_avg", "emb", torch.tensor([5.0]))
    save_alone(tmp_path, param("emb", 3), state, facts={"ties": {"head": "emb"}})
    emb, head, moment = param("emb", 0), param("head", 0), whole("optim.exp_avg", "head", torch.zeros(1))
    load_alone(tmp_path, emb, head, moment)
    assert (emb.data.item(), head.data.item(), moment.data.item()) == (3, 3, 5)
    full = load_full(tmp_path)
    assert full["head"] is full["emb"]


def test_the_owner_may_have_another_name(tmp_path: Path) -> None:
    save_alone(tmp_path, param("emb", 3), facts={"ties": {"head": "emb"}})
    head = param("head", 0)
    load_alone(tmp_path, head, ties={"emb": "head"})
    assert head.data.item() == 3
    save_alone(tmp_path, param("emb", 4))  # this one knows nothing of `head`
    load_alone(tmp_path, head, ties={"emb": "head"})
    assert head.data.item() == 4


def test_stored_apart_and_equal_fills_the_tied_one(tmp_path: Path) -> None:
    save_alone(tmp_path, param("emb", *[float("nan")] * 99), param("head", *[float("nan")] * 99))
    emb = whole("param", "emb", torch.zeros(99))
    report = load_alone(tmp_path, emb, ties={"head": "emb"})
    assert emb.data.isnan().all()
    assert report.unexpected == ()


def test_stored_apart_and_different_has_no_one_meaning(tmp_path: Path) -> None:
    save_alone(tmp_path, param("emb", 3), param("head", 4))
    emb = param("emb", 0)
    with pytest.raises(CheckpointError, match=r"'emb' and 'head' are tied in this model; .* two different values"):
        load_alone(tmp_path, emb, ties={"head": "emb"})
    assert emb.data.item() == 0
    load_alone(tmp_path, emb, ties={"head": "emb"}, allow_unexpected=True)
    assert emb.data.item() == 3


def test_optimizer_states_stored_apart_are_not_merged(tmp_path: Path) -> None:
    stored = [whole("optim.exp_avg", name, torch.ones(1)) for name in ("emb", "head")]
    save_alone(tmp_path, *stored)
    wanted = whole("optim.exp_avg", "emb", torch.zeros(1))
    with pytest.raises(CheckpointError, match="separate states for 'emb', 'head', which have no common value"):
        load_alone(tmp_path, wanted, ties={"head": "emb"})
    load_alone(tmp_path, wanted, ties={"head": "emb"}, allow_unexpected=True)
    assert same(wanted.data, torch.ones(1))


def test_kinds_with_names_in_common_are_not_mixed_into_one_dict(tmp_path: Path) -> None:
    save_alone(tmp_path, param("w", 1), whole("optim.exp_avg", "w", torch.ones(1)))
    with pytest.raises(CheckpointError, match="'w' is there as several of"):
        load_full(tmp_path, kinds=("param", "optim.exp_avg"))
