"""How data enters a pipeline: a loader's batch as inputs and label, and a call of the whole module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sheer.errors import DataError, UsageError, did_you_mean


class Batch(NamedTuple):
    """One micro-batch, as the first and the last stage need it."""

    inputs: Any
    label: Any


def pair(batch: Any) -> Batch:
    """A batch that is a pair (inputs, label)."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return Batch(*batch)
    size = f" of {len(batch)}" if isinstance(batch, (tuple, list, dict)) else ""
    raise DataError(
        f"a micro-batch for a pipeline is a pair (inputs, label), got {type(batch).__name__}{size}; let the loader's"
        " collate_fn pair them, or set engine.set_batch_fn"
    )


class Arguments(NamedTuple):
    """The arguments of a model's own forward that differ from call to call, by name."""

    inputs: tuple[str, ...]
    labels: tuple[str, ...]
    """Those that only the loss needs, in the model's own forward; the last stage gets them."""
    order: tuple[str, ...]
    """All arguments, as they are passed by position."""
    constants: Mapping[str, Any]
    """The values of the others, fixed when the model was cut."""

    def split(self, batch: Any) -> Batch:
        """A dict of arguments, or (inputs, label); without labels a batch is all inputs."""
        if isinstance(batch, Mapping):
            inputs = {name: value for name, value in batch.items() if name not in self.labels}
            labels = {name: batch[name] for name in self.labels if name in batch}
            return Batch(inputs, labels or None)
        if isinstance(batch, (tuple, list)) and self.labels and len(batch) == len(self.inputs) + len(self.labels):
            cut = len(self.inputs)
            return Batch(_one_or_all(batch[:cut]), _one_or_all(batch[cut:]))
        if isinstance(batch, (tuple, list)) and len(batch) == 2 and not (len(self.inputs) == 2 and not self.labels):
            return Batch(*batch)
        return pair(batch) if self.labels else Batch(batch, None)

    def bind(self, inputs: Any) -> Mapping[str, Any]:
        """Inputs given as a dict, a tuple in the order of the arguments, or the only one itself."""
        return _named(inputs, self.inputs, what="input", constants=self.constants)

    def bind_labels(self, label: Any) -> Mapping[str, Any]:
        """Labels given in the same ways."""
        return _named(label, self.labels, what="label", constants={})

    def of_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """A call of the model as one would call it, by name; arguments that were fixed must have their value."""
        if len(args) > len(self.order):
            raise UsageError(f"forward takes at most {len(self.order)} arguments by position, got {len(args)}")
        given = dict(zip(self.order, args, strict=False)) | dict(kwargs)
        for name in set(given) - {*self.inputs, *self.labels}:
            _check_constant(name, given.pop(name), self.constants, known=(*self.inputs, *self.labels), error=UsageError)
        return given


def _named(values: Any, names: Sequence[str], *, what: str, constants: Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(values, Mapping):
        for name in values.keys() - set(names):
            _check_constant(name, values[name], constants, known=names, error=DataError)
        missing = [name for name in names if name not in values]
        if missing:
            raise DataError(
                f"the batch has no {what} {', '.join(map(repr, missing))}; it has {', '.join(values) or 'nothing'}"
            )
        return {name: values[name] for name in names}
    if not isinstance(values, (tuple, list)) or (len(names) == 1 and len(values) != 1):
        values = (values,)
    if len(values) != len(names):
        raise DataError(f"the model was cut with the {what}s {', '.join(names)}, but got {len(values)} of them")
    return dict(zip(names, values, strict=True))


def _check_constant(
    name: str, value: Any, constants: Mapping[str, Any], *, known: Sequence[str], error: type[Exception]
) -> None:
    if name not in constants:
        raise error(
            f"{name!r} is no argument that the model was cut with; those are {', '.join(known)}."
            f"{did_you_mean(name, known)} Name it in inputs=... when cutting"
        )
    if value is not constants[name] and value != constants[name]:
        raise error(
            f"{name!r} was {constants[name]!r} when the model was cut and is {value!r} now; name it in inputs=... if"
            " it changes from batch to batch, or cut with constants={...}"
        )


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if len(values) == 1 else tuple(values)
