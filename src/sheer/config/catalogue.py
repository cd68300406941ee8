"""Every key a config may hold, as one flat table: what Sheer acts on and what it only knows of DeepSpeed."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from types import NoneType
from typing import Any, NamedTuple, get_args

from sheer.config.foreign import AUTO, FOREIGN, Fate
from sheer.config.kinds import Kind
from sheer.config.sections import Section

READERS = {
    "train_batch_size": "engine",
    "train_micro_batch_size_per_gpu": "engine",
    "gradient_accumulation_steps": "engine",
    "optimizer": "optim",
    "scheduler": "optim",
    "gradient_clipping": "optim",
    "steps_per_print": "monitor",
    "communication_data_type": "zero",
    "prescale_gradients": "zero",
    "gradient_predivide_factor": "zero",
    "gradient_allreduce_op": "zero",
    "fp16": "optim",
    "bf16": "optim",
    "torch_autocast": "engine",
    "data_types": "zero",
    "zero_optimization": "zero",
    "compile": "compiler",
    "checkpoint": "checkpoint",
    "pipeline": "pipeline",
    "dataloader_drop_last": "data",
    "data_loader": "data",
    "csv_monitor": "monitor",
    "tensorboard": "monitor",
    "wandb": "monitor",
}
"""Which room reads each top-level key, its whole block included."""


class Entry(NamedTuple):
    """One key."""

    path: str
    kind: Kind
    fate: Fate
    section: type[Section] | None
    """Whose field it is; None for a key of DeepSpeed alone."""
    default: Any
    reader: str
    """The room that reads it; empty for a key of DeepSpeed alone."""
    off: tuple[Any, ...]
    gated: bool
    auto: bool
    """Whether "auto" may stand here."""
    required: bool

    @property
    def about(self) -> str:
        """What it does; for a key of DeepSpeed alone, why it has no effect or which feature it asks for."""
        if self.section is None:
            return FOREIGN[self.path].about
        return _docstrings(self.section)[self.path.rpartition(".")[2]]

    @property
    def remark(self) -> str:
        """What explain says where a key of DeepSpeed alone was accepted."""
        if self.fate is Fate.TUNES:
            return f"without effect: {self.about}"
        feature = self.about.partition(": ")[0]
        return f"without effect: it is off (DeepSpeed's {feature}, which Sheer does not have)."

    def is_off(self, value: Any) -> bool:
        """Whether `value` asks for nothing."""
        disabled = self.gated and isinstance(value, dict) and value.get("enabled", False) is False
        return value is None or value in self.off or disabled


class Catalogue(NamedTuple):
    """All keys by dotted path, and the blocks they are in."""

    entries: dict[str, Entry]
    blocks: dict[str, str]
    """Dotted path of each block that has keys of its own, with its documentation (empty for DeepSpeed's alone)."""

    def children(self, block: str) -> list[str]:
        """The names that may stand directly in `block` ("" for the top level), sorted."""
        prefix = f"{block}." if block else ""
        below = (path[len(prefix) :] for path in self.entries if path.startswith(prefix))
        return sorted({rest.split(".")[0] for rest in below})

    def elsewhere(self, name: str) -> list[str]:
        """The paths at which the last name is `name`."""
        return [path for path in [*self.entries, *self.blocks] if path.rpartition(".")[2] == name]


def section_of(annotation: Any) -> type[Section] | None:
    """The section class of a field's annotation, `Section` or `Section | None`; None for a plain value."""
    options = [option for option in get_args(annotation) or (annotation,) if option is not NoneType]
    section = options[0]
    return section if isinstance(section, type) and issubclass(section, Section) else None


def catalogue(model: type[Section]) -> Catalogue:
    """The catalogue of `model`'s fields and of DeepSpeed's other keys."""
    entries: dict[str, Entry] = {}
    blocks: dict[str, str] = {}
    _add_fields(model, prefix="", entries=entries, blocks=blocks)
    for path, foreign in FOREIGN.items():
        entries[path] = Entry(
            path=path,
            kind=foreign.kind,
            fate=foreign.fate,
            section=None,
            default=None,
            reader="",
            off=foreign.off,
            gated=foreign.gated,
            auto=path in AUTO,
            required=False,
        )
        for block in _blocks_above(path):
            blocks.setdefault(block, "")
    return Catalogue(entries, blocks)


def _add_fields(model: type[Section], *, prefix: str, entries: dict[str, Entry], blocks: dict[str, str]) -> None:
    for name, field in model.model_fields.items():
        path = prefix + name
        section = section_of(field.annotation)
        if section is not None:
            blocks[path] = (section.__doc__ or "").strip()
            _add_fields(section, prefix=f"{path}.", entries=entries, blocks=blocks)
            continue
        required = field.is_required()
        entries[path] = Entry(
            path=path,
            kind=next(item for item in field.metadata if isinstance(item, Kind)),
            fate=Fate.ACTS,
            section=model,
            default=None if required else field.default,
            reader=READERS[path.split(".")[0]],
            off=(),
            gated=False,
            auto=path in AUTO,
            required=required,
        )


@cache
def _docstrings(section: type[Section]) -> dict[str, str]:
    """The docstring under each field. Read from the source when somebody asks: pydantic would do it at every import."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, below in pairwise(body.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(below.value)).split())
    return found


def _blocks_above(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:depth]) for depth in range(1, len(names))]


def holds_auto(path: str) -> bool:
    """Whether "auto" may stand at `path`, a key or one name below a free-form object."""
    return path in AUTO or f"{path.rpartition('.')[0]}.*" in AUTO
