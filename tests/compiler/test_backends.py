from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from sheer.compiler import check_backend
from sheer.compiler.backends import resolve
from sheer.errors import CompileError, ConfigError
from tests.compiler.models import assert_same, compiled, net, run, tokens, twin

SEEN: list[int] = []
NOT_CALLABLE = 3


def counting(graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    """A user's backend: counts the operations of each graph it is given, then runs it as it is."""
    SEEN.append(sum(node.op == "call_function" for node in graph_module.graph.nodes))
    return graph_module.forward


def _raises(graph_module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
    raise ValueError("no luck today")


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("inductr", ["'inductr'", "Did you mean 'inductor'"]),
        ("no_such_package.fn", ["no_such_package", "ModuleNotFoundError"]),
        (f"{__name__}.countin", ["'countin'", "Did you mean 'counting'"]),
        (f"{__name__}.NOT_CALLABLE", ["int", "cannot be called"]),
        (3, ["3", "callable"]),
    ],
)
def test_a_wrong_backend_says_what_is_allowed(backend: object, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        check_backend(backend)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kwargs", [{"dynamc": True}, {"backend": "eager"}, {"isolate_recompiles": True}])
def test_a_wrong_kwarg_is_named(kwargs: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=f"compile.kwargs.{next(iter(kwargs))}"):
        compiled(net(), kwargs=kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"options": {"fx_graph_cach": False}},
            ["compile.kwargs.options.fx_graph_cach", "Did you mean 'fx_graph_cache'"],
        ),
        ({"options": ["fx_graph_cache"]}, ["compile.kwargs.options", "object"]),
        ({"options": {"fx_graph_cache": "no"}}, ["fx_graph_cache", "refuses", "bool"]),
        ({"mode": "max-autotun"}, ["max-autotun", "refuses"]),
        ({"mode": "default", "options": {"fx_graph_cache": True}}, ["mode", "options", "refuses"]),
    ],
)
def test_arguments_that_torch_refuses_are_named_shortly_before_training(
    kwargs: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        compiled(net(), backend="inductor", kwargs=kwargs)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value)) < 600


def test_the_cache_can_be_switched_off_by_an_option() -> None:
    model = net(depth=2)
    compiler = compiled(model, backend="inductor", kwargs={"options": {"fx_graph_cache": False}})
    with torch.no_grad():
        model(tokens())
    assert compiler.report.cache_hits == compiler.report.cache_misses == 0
    assert compiler.report.graphs == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_working_backend_passes(backend: str) -> None:
    assert check_backend(backend, device=torch.device("cpu")) is None


def test_no_compiler_is_an_error_before_training_that_names_the_mend() -> None:
    model = net()
    broken = torch._inductor.config.patch({"cpp.cxx": (None, "/nonexistent/g++")})
    with broken, pytest.raises(CompileError) as error:
        compiled(model, backend="inductor")
    for word in ("'inductor'", "g++", "Install a C++ compiler", "aot_eager"):
        assert word in str(error.value)
    assert "_compiled_call_impl" not in model.blocks[0].__dict__


def test_an_import_path_is_used_and_sees_only_the_graphs_of_the_blocks() -> None:
    model = net(depth=4)
    SEEN.clear()
    compiler = compiled(model, backend=f"{__name__}.counting")
    assert SEEN == []
    assert_same(run(model, tokens()), run(twin(model), tokens()))
    assert len(SEEN) == 1
    assert SEEN[0] >= 5
    assert compiler.report.graphs == 1
    assert resolve(counting) is counting


def test_a_backend_that_fails_names_the_target() -> None:
    model = net()
    compiled(model, backend=_raises)
    with pytest.raises(CompileError) as error:
        model(tokens())
    for word in ("'blocks.0'", "Block", "no luck today", "aot_eager"):
        assert word in str(error.value)


def test_options_given_by_the_user_are_not_changed() -> None:
    options = {"guard_filter_fn": lambda entries: [True for _ in entries]}
    kwargs = {"options": options}
    model = net()
    compiled(model, backend="inductor", kwargs=kwargs)
    model(tokens())
    assert list(options) == ["guard_filter_fn"]
    assert list(kwargs) == ["options"]


def test_importing_the_room_does_not_import_dynamo() -> None:
    program = "import torch, sheer.compiler, sys; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_disable_in_kwargs_compiles_nothing_and_says_so() -> None:
    model = net()
    compiler = compiled(model, kwargs={"disable": True})
    assert not compiler.enabled
    assert "_compiled_call_impl" not in model.blocks[0].__dict__
    assert any("kwargs.disable" in sentence for sentence in compiler._teller.told)
