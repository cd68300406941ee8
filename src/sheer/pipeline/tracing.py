"""From a model's own forward to a program: recorded once, with whole modules as single calls.

torch.fx records what the forward does with its inputs. Only modules that contain a block are looked into; every other
one is one call, so what happens inside it may be anything. Where the forward asks a value a question that it branches
on (`if t > limit`, `len(x)`, `for part in x`), the answer is found on the sample and the program checks it whenever it
runs.
"""

from __future__ import annotations

import dis
import linecache
import operator
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from sheer.errors import SheerError, UsageError
from sheer.pipeline.program import Call, Op, Ref, expect, run_call
from sheer.pipeline.timing import untouched

_FACTORIES = tuple(
    getattr(torch, name)
    for name in (
        "arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "tensor", "zeros",
    )
)  # fmt: skip
_OPS = {
    "call_module": Op.MODULE,
    "get_attr": Op.READ,
    "call_method": Op.METHOD,
    "call_function": Op.FUNCTION,
}
_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Program(NamedTuple):
    """A whole forward."""

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    output: Any
    """What it returns: constants, `Ref`s and containers of both."""
    constants: Mapping[str, torch.Tensor]
    """Tensors that are neither parameters nor buffers but were used, by the names that READ calls have for them."""


def trace(
    model: nn.Module,
    *,
    inputs: Sequence[str],
    constants: Mapping[str, Any],
    looked_into: frozenset[str],
    sample: Mapping[str, Any] | None,
) -> Program:
    """The program of `model.forward(**inputs, **constants)`.

    Args:
        inputs: names of the arguments that differ from call to call.
        constants: all other arguments that are given, with their values.
        looked_into: names of the modules whose forwards are recorded; all others are single calls.
        sample: a value for each input, or None: then nothing may branch on what follows from them.

    Raises:
        UsageError: the forward cannot be recorded; with the line that is in the way and what helps.
    """
    tracer = _Tracer(model, inputs=inputs, constants=constants, looked_into=looked_into, sample=sample)
    try:
        graph = tracer.trace(model)
    except SheerError:
        raise
    except Exception as error:
        raise UsageError(
            f"{_users_line(error.__traceback__) or type(model).__name__}: the forward cannot be recorded up to here:"
            f" {type(error).__name__}: {error}. Put what this line does into a module of its own (or into a block),"
            f" which is then called as it is{_hint(sample)}"
        ) from error
    return _program(graph, tracer.constants)


def _hint(sample: Mapping[str, Any] | None) -> str:
    return "; or give sample_input, so that questions about shapes have an answer" if sample is None else ""


def _program(graph: fx.Graph, constants: Mapping[str, torch.Tensor]) -> Program:
    calls = tuple(_call(node) for node in graph.nodes if node.op in _OPS)
    (output,) = (_plain(node.args[0]) for node in graph.nodes if node.op == "output")
    return Program(tuple(node.target for node in graph.nodes if node.op == "placeholder"), calls, output, constants)


def _call(node: fx.Node) -> Call:
    return Call(node.name, _OPS[node.op], node.target, _plain(tuple(node.args)), _plain(dict(node.kwargs)))


def _name(node: fx.Node) -> str:
    """What a `Ref` calls it; fx itself renames arguments that are called like a builtin, such as `input`."""
    return str(node.target) if node.op == "placeholder" else node.name


def _plain(value: Any) -> Any:
    """`value` with fx's nodes as `Ref`s and its containers as Python's own."""
    if isinstance(value, fx.Node):
        return Ref(_name(value))
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(_plain(value.start), _plain(value.stop), _plain(value.step))
    return value


class _Value(fx.Proxy):
    """A value that is not known while the forward is recorded; questions about it go to the sample."""

    def __getattr__(self, name: str) -> _Attribute:
        return _Attribute(self, name)

    def __len__(self) -> int:
        return int(self._answer(len))

    def __int__(self) -> int:
        return int(self._answer(int))

    def __index__(self) -> int:
        return int(self._answer(int))

    def __float__(self) -> float:
        return float(self._answer(float))

    def _answer(self, question: Callable[[Any], Any]) -> Any:
        tracer = self.tracer
        assert isinstance(tracer, _Tracer)
        return tracer.answer(self, question)


class _Attribute(fx.proxy.Attribute, _Value):
    """An attribute of one."""


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(
        self,
        model: nn.Module,
        *,
        inputs: Sequence[str],
        constants: Mapping[str, Any],
        looked_into: frozenset[str],
        sample: Mapping[str, Any] | None,
    ) -> None:
        super().__init__(autowrap_functions=_FACTORIES)
        self._autowrap_search.append(torch)  # their names are looked up there
        self._inputs = inputs
        self._given = constants
        self._looked_into = looked_into
        self._samples = None if sample is None else _Samples(model, sample)
        self.constants: dict[str, torch.Tensor] = {}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self._looked_into

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """The inputs as unknowns; all other arguments as they are."""
        values = {name: self.create_proxy("placeholder", name, (), {}) for name in self._inputs}

        def forward(root: nn.Module) -> Any:
            return root.forward(**values, **self._given)

        return forward, [self.root]

    def create_arg(self, a: Any) -> Any:
        """Tensors that belong to nobody are kept here, not, as in torch.fx, on the user's model."""
        if isinstance(a, torch.Tensor) and not isinstance(a, nn.Parameter) and not self._is_buffer(a):
            name = next((name for name, known in self.constants.items() if known is a), None)
            if name is None:
                name = f"_constant{len(self.constants)}"
                self.constants[name] = a
            return self.create_node("get_attr", name, (), {})
        return super().create_arg(a)

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        return any(tensor is buffer for buffer in self.root.buffers())

    # ---- questions

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.answer(obj, bool))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        length = _unpacked() if self._samples is None else self.answer(obj, len)
        if length is None:
            length = self.answer(obj, len)
        return iter([operator.getitem(obj, index) for index in range(length)])

    def answer(self, obj: fx.Proxy, question: Callable[[Any], Any]) -> Any:
        """What `question` gives for the sample; the program will check that it stays so."""
        line = _users_line_now()
        if self._samples is None:
            raise UsageError(
                f"{line}: the model's forward decides here by a value that follows from its inputs"
                f" ({question.__name__} of it), so it cannot be cut as it is. Give sample_input=..., a batch's inputs"
                " like those to come: the decision is then taken on it and checked whenever the pipeline runs. Or move"
                " the decision into a block, where anything is allowed"
            )
        found = question(self._samples.value(obj.node))
        self.create_node("call_function", expect, cast(Any, (obj.node, found, question, line)), {})
        return found


class _Samples:
    """Values of recorded calls on the sample, computed when they are asked for."""

    def __init__(self, model: nn.Module, sample: Mapping[str, Any]) -> None:
        self._model = model
        self._known = dict(sample)

    def value(self, node: fx.Node) -> Any:
        """What this call gives."""
        waiting = [node]
        with fx._symbolic_trace._maybe_revert_all_patches(), torch.no_grad(), untouched(self._model):
            while waiting:
                last = waiting[-1]
                if last.op == "placeholder" and _name(last) not in self._known:
                    raise UsageError(f"the forward asks about its argument {last.target!r}; add it to sample_input")
                missing = [one for one in last.all_input_nodes if _name(one) not in self._known]
                if missing:
                    waiting += missing
                    continue
                waiting.pop()
                if _name(last) not in self._known:
                    self._known[_name(last)] = run_call(self._model, _call(last), self._known)
        return self._known[_name(node)]


# ---- where in the user's code


def _unpacked() -> int | None:
    """Into how many names the user's line unpacks what it iterates over, as the byte code says."""
    frame = _users_frame(sys._getframe())
    if frame is None:
        return None
    for instruction in _instructions_at(frame):
        return instruction.argval if instruction.opname == "UNPACK_SEQUENCE" else None
    return None


def _instructions_at(frame: types.FrameType) -> Iterator[dis.Instruction]:
    return (one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti)


def _users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    return frame


def _users_line_now() -> str:
    frame = _users_frame(sys._getframe())
    return "the forward" if frame is None else _line(frame.f_code.co_filename, frame.f_lineno)


def _users_line(traceback: types.TracebackType | None) -> str | None:
    """The innermost line of the user's own code."""
    found = None
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not name.startswith(_NOT_THE_USERS):
            found = _line(name, traceback.tb_lineno)
        traceback = traceback.tb_next
    return found


def _line(filename: str, number: int) -> str:
    text = linecache.getline(filename, number).strip()
    return f"{filename}:{number}{f' `{text}`' if text else ''}"
