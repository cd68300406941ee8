"""Which tensors of a checkpoint are to be loaded, and what they are called here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from sheer.checkpoint.mapped import Described, Source
from sheer.checkpoint.shard import Key
from sheer.errors import CheckpointError, did_you_mean

_LISTS = ("frozen", "left_out")
"""Facts that are lists of tensor names."""


@dataclass(frozen=True)
class Names:
    """Globs of names to load and to leave out, and other names for what is stored. Everything, as it is called, by
    default."""

    include: tuple[str, ...] = ("*",)
    """Globs over names as they are here; a tied tensor has several names, of which one is enough."""
    exclude: tuple[str, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    """Stored name -> name here, of a tensor or of a module with all that is in it; "" is the model itself. The longest
    one that fits counts."""

    @property
    def partial(self) -> bool:
        """Whether some names may be left out."""
        return self.include != ("*",) or bool(self.exclude)

    def has(self, *names: str) -> bool:
        """Whether a tensor of these `names` is to be loaded."""
        return any(_matches(name, self.include) and not _matches(name, self.exclude) for name in names)

    def here(self, stored: str) -> str:
        """What the stored name `stored`, of a tensor or module, is called here."""
        inside = [old for old in self.rename if _is_inside(stored, old)]
        if not inside:
            return stored
        old = max(inside, key=len)
        rest = stored[len(old) :].removeprefix(".") if old else stored
        return ".".join(filter(None, (self.rename[old], rest)))

    def of(self, index: Source, *, wanted: Collection[str] = ()) -> Source:
        """`index` as if what is to be loaded were all it has, under the names here. Raises CheckpointError where a
        pattern or a stored name fits nothing, or two tensors would have one name. `wanted` are names that are here,
        which is all that `exclude` may be about."""
        if not self.partial and not self.rename:
            return index
        self._check_used(index)
        self._check_aliases(index)
        ties = {self.here(alias): self.here(owner) for alias, owner in index.ties.items()}
        names = {owner: [owner] for owner in map(self.here, _names(index))}
        for alias, owner in ties.items():
            names.setdefault(owner, [owner]).append(alias)
        tensors: dict[Key, Described] = {}
        for key, entry in index.entries():
            name = self.here(key.name)
            here = Key(key.kind, name)
            if here in tensors:
                raise CheckpointError(f"rename gives the name {name!r} to two tensors, {key.name!r} is the second.")
            if self.has(*names[name]):
                tensors[here] = entry
        stored = {key.name for key in tensors}
        self._check_found(stored, names, wanted)
        facts = {**index.facts, "ties": {alias: owner for alias, owner in ties.items() if owner in stored}}
        facts |= {fact: [self.here(name) for name in facts[fact]] for fact in _LISTS if fact in facts}
        return index.holding(tensors, facts)

    def _check_used(self, index: Source) -> None:
        stored = {*_names(index), *index.ties}
        for old in self.rename:
            if not any(_is_inside(name, old) for name in stored):
                known = stored | {name[:at] for name in stored for at, sign in enumerate(name) if sign == "."}
                raise CheckpointError(f"rename: the checkpoint has no {old!r}.{did_you_mean(old, known)}")

    def _check_aliases(self, index: Source) -> None:
        """A tied name must not become another tensor's."""
        owners = {self.here(name): name for name in _names(index)}
        for alias, owner in index.ties.items():
            name = self.here(alias)
            if owners.setdefault(name, owner) != owner:
                raise CheckpointError(f"rename gives the name {name!r} to {owners[name]!r} and {alias!r}.")

    def _check_found(self, stored: set[str], names: Mapping[str, list[str]], wanted: Collection[str]) -> None:
        known = [name for group in names.values() for name in group]
        either = [*known, *sorted(set(wanted).difference(known))]
        for given, globs, candidates, where in (
            ("include", self.include, known, "the checkpoint"),
            ("exclude", self.exclude, either, "the checkpoint or of the model"),
        ):
            for pattern in globs:
                if not any(fnmatchcase(name, pattern) for name in candidates):
                    near = did_you_mean(pattern, candidates)
                    raise CheckpointError(f"{given}: no tensor of {where} matches {pattern!r}.{near}")
        if not stored:
            patterns = f"include {list(self.include)} without {list(self.exclude)}"
            raise CheckpointError(f"{patterns} leaves nothing of the checkpoint to load.")


def _names(index: Source) -> set[str]:
    return {key.name for key, _ in index.entries()}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_inside(name: str, module: str) -> bool:
    """Whether `name` is `module` or in it."""
    return not module or name == module or name.startswith(f"{module}.")
