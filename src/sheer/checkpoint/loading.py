"""Loading: a transaction. All ranks plan and agree, verify every byte and agree, and only then does anything change.

Nothing is staged: tensors in use are filled by a second read, straight into their own memory. The system's page cache
is what lies between the two reads; it costs this process nothing, and the system may take it back. Memory of our own
would double the peak, and filling fresh memory is several times slower than reading the file twice.

Which saved bytes go where is interval intersection: between what was saved and what this rank wants, for each name.
No rank, stage or split of the run that saved plays a part.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch

from sheer.checkpoint import plain
from sheer.checkpoint.folder import explained, locate, tag_of
from sheer.checkpoint.index import RNG, STATE, Index, parse_index, read_index_bytes
from sheer.checkpoint.local import open_here
from sheer.checkpoint.mapped import Reading, Source
from sheer.checkpoint.ranks import Axis, on_first, together
from sheer.checkpoint.reader import Reader, Request, convertible, host_empty, read_small
from sheer.checkpoint.shard import Key, Shard, check_shards
from sheer.checkpoint.tensorfile import CHUNK
from sheer.errors import CheckpointError, TornLoadError, nearest

_SHOWN = 10  # how many names of each sort an error lists
_TORN = (
    "All bytes had been read and verified before, and some ranks have taken theirs over: tensors that were in "
    "use may hold old and new values side by side. Load a checkpoint before going on, or end."
)

_MODULE = ("param", "buffer")

Allow = bool | Callable[[Key], bool]
"""Whether a missing tensor is to be accepted: for all alike, or asked for each."""


class LoadReport(NamedTuple):
    """What a load did; the same on every rank but for `nbytes`."""

    loaded: tuple[Key, ...]
    """The wanted tensors that now hold the checkpoint's values."""
    missing: tuple[Key, ...]
    """Wanted, not in the checkpoint, left as they were."""
    unexpected: tuple[Key, ...]
    """In the checkpoint, of a kind that was to be loaded, wanted by no rank."""
    nbytes: int
    """Bytes that this rank read; those of tensors in use count twice."""


class _Source(NamedTuple):
    """A wanted shard and the stored tensors that may fill it; more than one where tied tensors were stored apart."""

    shard: Shard
    stored: tuple[Key, ...]
    fresh: bool
    """Whether nobody has seen the shard's memory yet, so that it can be read into directly."""


class _Findings(NamedTuple):
    """How one rank's wishes fit the checkpoint, as other ranks see it."""

    crc32: int
    loaded: set[Key]
    missing: dict[Key, tuple[int, ...]]
    """With the wanted shape."""
    used: set[Key]
    """Stored tensors that some wish is about."""
    faults: set[str]
    """What no option allows: other shapes, dtypes without a conversion, ties without a meaning."""


def open_checkpoint(root: str | os.PathLike[str], tag: str | None = None) -> Index:
    """Open the checkpoint `tag` in `root`, or the one that `latest` names; `root` may be its own directory too.

    Reads and validates the index and the sizes of the files, no tensors. Needs no other rank. Raises CheckpointError
    where it is not there (with the tags that are) or does not hold together.
    """
    directory = locate(root, tag)
    with explained(f"cannot open checkpoint {directory}"):
        return parse_index(read_index_bytes(directory), directory=directory, tag=tag_of(directory))


def open_together(
    root: str | os.PathLike[str], tag: str | None = None, *, axis: Axis, local: bool = False, timeout: float = 120.0
) -> Index:
    """`open_checkpoint` for all ranks: rank 0 decides which checkpoint it is. Collective on `axis`.

    With `local`, `root` is each rank's own folder or its node's, as in `save`; load it with `at_hand`.
    """
    axis.assemble(f"load_checkpoint(tag={tag!r})", timeout=timeout)
    doing = f"opening checkpoint {tag or 'latest'!r} in {root}"

    def choose() -> tuple[Path, bytes]:
        directory = locate(root, tag)
        return directory, read_index_bytes(directory)

    directory, raw = on_first(axis, doing, choose)
    if local:
        alone = on_first(axis, doing, lambda: directory == Path(root))
        here = partial(open_here, Path(root), raw, tag=tag_of(directory), alone=alone)
        return together(axis, doing, here)
    return together(axis, doing, lambda: parse_index(raw, directory=directory, tag=tag_of(directory)))


@contextmanager
def as_it_is(index: Source, requests: Sequence[Request], *, axis: Axis) -> Iterator[Source]:
    """All ranks see all of it."""
    yield index


def load(
    index: Source,
    *,
    wanted: Sequence[Shard],
    axis: Axis,
    reader: Callable[[Any], Reading] = Reader,
    fetch: Callable[..., AbstractContextManager[Any]] = as_it_is,
    fresh: Sequence[Shard] = (),
    kinds: Collection[str] | None = None,
    ties: Mapping[str, str] | None = None,
    allow_missing: Allow = False,
    allow_unexpected: bool = False,
    timeout: float = 120.0,
) -> LoadReport:
    """Fill the data of the `wanted` shards from the checkpoint, on all ranks or on none. Collective on `axis`.

    `fresh` ones are wanted too, and nobody looks at their memory unless this returns: they are read in place. `reader`
    is what reads such a source, `fetch` what brings it together before: `at_hand` where folders are local.

    Other dtypes convert where the value keeps its meaning (fp32 to bf16; never fractions to integers). `kinds` limits
    what is loaded and what can be unexpected; others among `wanted` are left alone. `ties` maps aliases of this model
    to the names that `wanted` uses. A tensor tied in one and not in the other is loaded where that has one meaning:
    a tied value fills both; two values fill one where they are equal. Host memory besides `wanted` and `fresh`: a few
    chunks.

    Raises CheckpointError on every rank, with nothing changed, when a tensor is missing or unexpected and that is not
    allowed, has another shape, cannot be converted, or its bytes are not those that were written. Raises TornLoadError
    on every rank where all bytes were found right and a rank could not read them again: values are then mixed.
    """
    axis.assemble(f"load_checkpoint(tag={index.tag!r})", timeout=timeout)
    doing = f"loading checkpoint {index.directory}"
    chosen, new = ([s for s in shards if kinds is None or s.kind in kinds] for shards in (wanted, fresh))
    sources = together(
        axis,
        doing,
        lambda: _resolve(index, chosen, ties or {}, fresh=False) + _resolve(index, new, ties or {}, fresh=True),
    )
    found: list[_Findings] = axis.gather_objects(_judge(index, sources, merge_states=allow_unexpected))
    report = together(axis, doing, lambda: _decide(index, found, kinds, allow_missing, allow_unexpected))
    available = [source for source in sources if source.stored]
    with fetch(index, _requests(available, all_stored=True), axis=axis) as source, reader(source) as reading:
        nbytes = together(axis, doing, lambda: _verify(reading, available, compare=not allow_unexpected))
        in_use = _requests(source for source in available if not source.fresh)
        try:
            nbytes += together(axis, doing, lambda: reading.fill(in_use))
        except BaseException as error:  # an interrupt leaves values mixed too
            raise TornLoadError(f"{doing} failed in its second read: {error}\n{_TORN}") from error
    return report._replace(nbytes=nbytes)


def load_full(
    root: str | os.PathLike[str], tag: str | None = None, *, kinds: Collection[str] = ("param", "buffer")
) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint by name, on the host, in their stored dtype. Needs no engine and no ranks.

    Tied names share one tensor object, so that `module.load_state_dict(load_full(path))` fits the module that was
    saved. Raises CheckpointError where the checkpoint is not there or damaged, or two of `kinds` have a name in common.
    """
    return read_full(open_checkpoint(root, tag), kinds=kinds)


def read_full(
    index: Source, *, reader: Callable[[Any], Reading] = Reader, kinds: Collection[str] = ("param", "buffer")
) -> dict[str, torch.Tensor]:
    """`load_full` of a source that is open; `reader` is what reads such a source."""
    full: dict[str, torch.Tensor] = {}
    requests = []
    for key, entry in index.entries():
        if key.kind not in kinds:
            continue
        if key.name in full:
            raise CheckpointError(f"{key.name!r} is there as several of {sorted(kinds)}; load one of them at a time.")
        flat = host_empty(entry.numel, entry.torch_dtype)
        full[key.name] = flat.view(entry.shape)
        requests.append(Request(key, 0, flat))
    with reader(index) as reading:
        reading.fill(requests)
    full.update({alias: full[owner] for alias, owner in index.ties.items() if owner in full})
    return full


def read_state(index: Index) -> dict[str, Any]:
    """What was given to `save` as `state`, equal to it."""
    path = str(index.directory / STATE)
    state = plain.decode(plain.parse(read_small(index, STATE), what=path))
    if not isinstance(state, dict):
        raise index.damaged(STATE, "it holds no mapping")
    return state


def read_rng(index: Index, rank: int) -> dict[str, torch.Tensor] | None:
    """The generator states that rank `rank` of the saving run gave; None where it had no such rank or gave none."""
    if RNG not in index.content.files:
        return None
    try:
        states = safetensors.torch.load(read_small(index, RNG))
    except safetensors.SafetensorError as error:
        raise index.damaged(RNG, f"it is no safetensors file ({error})") from error
    mine = f"{rank:05d}."
    return {name.removeprefix(mine): state for name, state in states.items() if name.startswith(mine)} or None


def _resolve(index: Source, wanted: Sequence[Shard], ties: Mapping[str, str], *, fresh: bool) -> list[_Source]:
    """For each wanted shard, the stored tensors that go by one of its names, its own name first."""
    check_shards(wanted)
    aliases: dict[str, list[str]] = {}
    for alias, owner in ties.items():
        aliases.setdefault(owner, []).append(alias)
    stored_ties = index.ties
    sources = []
    for shard in wanted:
        names = [shard.name, *sorted(aliases.get(shard.name, []))]
        owners = [_stored(index, shard.kind, name, stored_ties) for name in names]
        sources.append(_Source(shard, tuple(dict.fromkeys(key for key in owners if key is not None)), fresh))
    return sources


def _stored(index: Source, kind: str, name: str, ties: Mapping[str, str]) -> Key | None:
    """What is stored of `name`, or of what it is tied to. To a state_dict parameters and buffers are alike, so one
    fills the other where the checkpoint has no such name of its own kind."""
    kinds = (kind, *(other for other in _MODULE if other != kind)) if kind in _MODULE else (kind,)
    candidates = (Key(each, known) for each in kinds for known in (name, ties.get(name, name)))
    return next((key for key in candidates if index.entry(key)), None)


def _judge(index: Source, sources: Iterable[_Source], *, merge_states: bool) -> _Findings:
    """What this rank found, without deciding yet what is allowed."""
    findings = _Findings(index.crc32, set(), {}, set(), set())
    for shard, stored, _ in sources:
        findings.used.update(stored)
        if stored:
            findings.loaded.add(shard.key)
        else:
            findings.missing[shard.key] = shard.shape
        findings.faults.update(_mismatch(index, shard, key) for key in stored)
        if len(stored) > 1 and shard.kind.startswith("optim.") and not merge_states:
            findings.faults.add(
                f"ties: {shard.key} is one tied tensor in this model; the checkpoint has separate states for "
                f"{', '.join(repr(key.name) for key in stored)}, which have no common value. To take that of "
                f"{stored[0].name!r}, allow unexpected tensors"
            )
    findings.faults.discard("")
    return findings


def _mismatch(index: Source, shard: Shard, key: Key) -> str:
    entry = index.entry(key)
    assert entry is not None, "sources are stored tensors"
    if entry.shape != tuple(shard.shape):
        return f"shape: {key} is {list(entry.shape)} in the checkpoint, {list(shard.shape)} is wanted"
    if not convertible(entry.torch_dtype, shard.data.dtype):
        return f"dtype: {key} is {entry.torch_dtype} in the checkpoint, which {shard.data.dtype} cannot stand for"
    return ""


def _decide(
    index: Source,
    found: Sequence[_Findings],
    kinds: Collection[str] | None,
    allow_missing: Allow,
    allow_unexpected: bool,
) -> LoadReport:
    """Put the findings of all ranks together; the same report, or the same error, on every rank."""
    if len({findings.crc32 for findings in found}) > 1:
        raise CheckpointError(
            f"the ranks opened different checkpoints (rank {_odd_rank(found)} has another than rank 0). "
            "Let rank 0 choose the tag."
        )
    missing = {key: shape for findings in found for key, shape in findings.missing.items()}
    used = set[Key]().union(*(findings.used for findings in found))
    unexpected = sorted(
        (k for k, _ in index.entries() if k not in used and (kinds is None or k.kind in kinds)), key=_weights_first
    )
    refused = [key for key in sorted(missing, key=_weights_first) if not _allowed(allow_missing, key)]
    faults = set[str]().union(*(findings.faults for findings in found))
    lines = [
        *_listed(sorted(faults, key=lambda line: (": optim." in line, line))),
        *_listed([_missing_line(index, key, missing[key], unexpected) for key in refused[: _SHOWN + 1]], len(refused)),
    ]
    if not allow_unexpected:
        shown = [_unexpected_line(index, key, missing) for key in unexpected[: _SHOWN + 1]]
        lines += _listed(shown, len(unexpected))
    if lines:
        listing = "\n".join(f"  {line}" for line in lines)
        raise CheckpointError(
            f"checkpoint {index.directory} does not fit what is to be loaded; nothing was changed:\n{listing}\n"
            "Load it into the model that was saved, or say what is meant. An engine's load_checkpoint takes "
            "load_module_strict=False (what is in both), exclude=... (not these, whatever their shape), rename={...} "
            "(other names) and reset_optimizer=True."
        )
    loaded = set[Key]().union(*(findings.loaded for findings in found))
    return LoadReport(tuple(sorted(loaded)), tuple(sorted(missing)), tuple(unexpected), 0)


def _weights_first(key: Key) -> tuple[bool, Key]:
    """The order of a list: optimizer state, which follows from its parameter, comes last."""
    return key.kind.startswith("optim."), key


def _odd_rank(found: Sequence[_Findings]) -> int:
    """The first rank whose checkpoint is not rank 0's."""
    return next(rank for rank, findings in enumerate(found) if findings.crc32 != found[0].crc32)


def _allowed(allow: Allow, key: Key) -> bool:
    return allow if isinstance(allow, bool) else allow(key)


def _listed(lines: Sequence[str], total: int | None = None) -> list[str]:
    """At most ten of `lines`, and how many more there are."""
    more = (len(lines) if total is None else total) - _SHOWN
    return [*lines[:_SHOWN], f"... and {more} more like the last"] if more > 0 else list(lines)


def _missing_line(index: Source, key: Key, shape: Sequence[int], unexpected: Sequence[Key]) -> str:
    """One wanted tensor that is not there, and what is there under a name like it."""
    candidates = {k.name: k for k in unexpected if k.kind == key.kind} or {
        k.name: k for k, _ in index.entries() if k.kind == key.kind
    }
    near = [f"{name!r} {list(_shape(index, candidates[name]))}" for name in nearest(key.name, candidates)]
    hint = f"; nearest in the checkpoint: {', '.join(near)}" if near else ""
    return f"missing: {key} {list(shape)} is wanted, not in the checkpoint{hint}"


def _unexpected_line(index: Source, key: Key, missing: Mapping[Key, tuple[int, ...]]) -> str:
    """One stored tensor that nobody wants, and the wanted names like it that found nothing."""
    candidates = {k.name: shape for k, shape in missing.items() if k.kind == key.kind}
    near = [f"{name!r} {list(candidates[name])}" for name in nearest(key.name, candidates)]
    hint = f"; nearest wanted: {', '.join(near)}" if near else ""
    return f"unexpected: {key} {list(_shape(index, key))} is in the checkpoint, not wanted{hint}"


def _shape(index: Source, key: Key) -> tuple[int, ...]:
    entry = index.entry(key)
    assert entry is not None, "only stored tensors are described"
    return entry.shape


def _requests(sources: Iterable[_Source], *, all_stored: bool = False) -> list[Request]:
    """For each source what it is filled from; with `all_stored` also what that is compared with."""
    return [
        Request(key, shard.start, shard.data.detach(), shard.rest)
        for shard, stored, _ in sources
        for key in (stored if all_stored else stored[:1])
    ]


def _verify(reading: Reading, sources: Sequence[_Source], *, compare: bool) -> int:
    """Find all that is wrong with what fills `sources`, and fill the fresh ones; the bytes read. No other changes."""
    nbytes = reading.fill(_requests(source for source in sources if source.fresh))
    nbytes += reading.check(_requests(source for source in sources if not source.fresh))
    return nbytes + (sum(_compare_tied(reading, source) for source in sources) if compare else 0)


def _compare_tied(reading: Reading, source: _Source) -> int:
    """Where tied tensors were stored apart, make sure, a chunk at a time, that they are equal; the bytes read."""
    nbytes, shard = 0, source.shard
    step = CHUNK // shard.data.dtype.itemsize
    for key in source.stored[1:]:
        for start in range(shard.start, shard.stop, step):
            one, other = (host_empty(min(step, shard.stop - start), shard.data.dtype) for _ in range(2))
            nbytes += reading.fill([Request(source.stored[0], start, one), Request(key, start, other)])
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                raise CheckpointError(
                    f"{source.stored[0]} and {key.name!r} are tied in this model; the checkpoint has two different "
                    f"values for them. Untie them in the model, or allow unexpected tensors to take that of "
                    f"{source.stored[0].name!r}."
                )
    return nbytes
