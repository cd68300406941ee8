"""Nothing is silent: breaks, recompiles and fallbacks are kept with place and reason, and said once."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from sheer.compiler import Recompile
from tests.compiler.models import Block, Listener, compiled, net, run, tokens


class Breaking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        torch._dynamo.graph_break()
        return self.down(y)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


class Unusual(nn.Module):
    """Its forward does not go through `module(...)`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0].forward(x))


def test_a_break_is_kept_with_its_place_and_said_once() -> None:
    model = nn.Sequential(Breaking(), Breaking())
    compiler = compiled(model)
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(2):
        model(x)
    (found,) = compiler.report.breaks
    assert found.target == "0"
    first_line = inspect.getsourcelines(Breaking.forward)[1]
    assert str(found.place) == f"{__file__}:{first_line + 2} in forward"
    assert found.place.code == "torch._dynamo.graph_break()"
    assert found.reason
    assert compiler.report.graphs == 2
    said = compiler._teller.said
    assert len([sentence for sentence in said if "breaks at" in sentence]) == 1
    assert str(found.place) in str(compiler.report)


def test_a_python_counter_is_said_once_with_its_guard_and_then_the_limit() -> None:
    model = nn.Sequential(Counting(), Counting())
    compiler = compiled(model)
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(10):
        model(x)
    assert model[0].calls == 10
    guards = [recompile.guard for recompile in compiler.report.recompiles]
    assert len(guards) >= 7
    assert all("self.calls == " in guard and "HINT" not in guard for guard in guards)
    storm = [sentence for sentence in compiler._teller.said if "keeps recompiling" in sentence]
    assert len(storm) == 1
    assert "self.calls ==" in storm[0]
    assert "gave up recompiling" in compiler.report.fallbacks[0].reason
    assert f"{__file__}:" in compiler.report.fallbacks[0].reason
    assert "register_buffer" in compiler.report.fallbacks[0].mend
    assert {recompile.place.file for recompile in compiler.report.recompiles} == {__file__}
    assert len([sentence for sentence in compiler._teller.said if "gave up" in sentence]) == 1


def test_an_ordinary_recompile_is_kept_but_not_said() -> None:
    model = nn.ModuleList([Block(), Block()])
    compiler = compiled(model)
    for batch in (4, 6, 8):
        model[0](torch.randn(batch, 8))
    (found,) = compiler.report.recompiles
    assert isinstance(found, Recompile)
    assert "size mismatch" in found.guard
    assert compiler._teller.said == []


@pytest.mark.parametrize("module", [nn.LSTM(8, 8), nn.Identity()], ids=["LSTM", "Identity"])
def test_where_torch_compiles_nothing_it_is_said(module: nn.Module) -> None:
    compiler = compiled(module)
    module(torch.randn(2, 8))
    assert compiler.report.graphs == 0
    (found,) = compiler.report.fallbacks
    assert f"{type(module).__name__}.forward" in found.reason
    assert any(found.reason in sentence for sentence in compiler._teller.said)


def test_a_target_that_is_never_called_is_said_at_the_review() -> None:
    model = Unusual()
    compiler = compiled(model)
    model(torch.randn(2, 8))
    assert compiler.report.fallbacks == []
    compiler.review()
    compiler.review()
    assert [f.target for f in compiler.report.fallbacks] == ["blocks.0"]
    assert len(compiler._teller.said) == 1
    assert "module.forward" in compiler._teller.said[0]


class Disabled(Block):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def test_a_forward_that_is_not_ours_to_compile_is_said() -> None:
    model = nn.Sequential(Disabled(), Disabled())
    compiler = compiled(model)
    x = torch.randn(2, 8)
    assert torch.equal(model(x), model[1].forward(model[0].forward(x)))
    assert compiler.report.graphs == 0
    assert [f.target for f in compiler.report.fallbacks] == ["0", "1"]


def test_a_foreign_reset_is_survived() -> None:
    model = net()
    compiler = compiled(model)
    before = run(model, tokens())
    torch._dynamo.reset()
    after = run(model, tokens())
    assert torch.equal(before.output, after.output)
    assert compiler.report.graphs == 2
    compiler.disable()


def test_the_users_own_compiles_are_not_counted_as_ours() -> None:
    model = net()
    compiler = compiled(model)
    run(model, tokens())
    own = torch.compile(lambda x: x * 2 + 1, backend="eager")
    own(torch.ones(3))
    run(model, tokens())
    assert compiler.report.graphs == 1


def test_many_targets_are_one_line_of_text() -> None:
    compiler = compiled(net(depth=12))
    assert "12 x Block: 'blocks.0' ... 'blocks.11'\n" in f"{compiler.report}\n"


def test_the_report_reads_as_text() -> None:
    model = net(depth=2)
    compiler = compiled(model, teller=Listener())
    assert str(compiler.report).startswith("compile: on, 0 graphs")
    run(model, tokens())
    text = str(compiler.report)
    assert "1 graph in" in text
    assert "'blocks.0', 'blocks.1'" in text
    compiler.disable()
    assert str(compiler.report).startswith("compile: off")


class Twisted(Block):
    """An if on a tensor's value, twice, so that what goes on after a break breaks again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        if y.sum() > 1e9:
            return x
        print("", end="")
        return self.down(y)


def test_breaks_say_the_users_function_its_line_and_a_mend() -> None:
    model = nn.Sequential(Twisted(), Twisted())
    compiler = compiled(model)
    model(torch.randn(2, 8, requires_grad=True))
    branch, printed = compiler.report.breaks
    assert branch.place.function == printed.place.function == "forward"
    assert branch.place.code == "if y.sum() > 1e9:"
    assert "value of a tensor" in branch.reason
    assert "torch.where" in branch.hints[0]
    assert "print" in printed.hints[0]
    assert not any("report an issue" in hint for hint in printed.hints)
    assert [graph.resumed for graph in compiler.report.compiled] == [False, True]


def test_each_graph_says_what_it_is_for() -> None:
    model = net()
    compiler = compiled(model)
    run(model, tokens())
    with torch.no_grad():
        model(tokens())
    assert [graph.mode for graph in compiler.report.compiled] == ["training", "inference"]
    assert {graph.target for graph in compiler.report.compiled} == {"blocks.0"}
    assert all(graph.operations >= 5 and graph.seconds > 0 for graph in compiler.report.compiled)
    assert compiler.report.cache_hits == compiler.report.cache_misses == 0
    (group,) = compiler.report.groups
    assert (group.kind, group.targets) == ("Block", ("blocks.0", "blocks.1", "blocks.2"))


def test_a_counter_storm_is_mended_by_its_own_guard_not_by_the_last_one() -> None:
    model = nn.Sequential(Counting(), Counting())
    compiler = compiled(model)
    for batch in (2, 2, 2, 4, 4):
        model(torch.randn(batch, 8, requires_grad=True))
    (storm,) = [sentence for sentence in compiler._teller.said if "keeps recompiling" in sentence]
    assert "self.calls ==" in storm
    assert "register_buffer" in storm


def test_the_count_of_calls_kept_in_a_tensor_is_the_mend() -> None:
    class Mended(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * self.calls

    model = nn.Sequential(Mended(), Mended())
    compiler = compiled(model)
    x = torch.randn(2, 8, requires_grad=True)
    for _ in range(5):
        model(x)
    assert model[0].calls == 5
    assert compiler.report.graphs == 1
    assert compiler.report.recompiles == []


def test_alternating_training_and_evaluation_never_recompiles_after_the_second_step() -> None:
    model = net(dropout=0.1)
    compiler = compiled(model)
    counts = []
    for _ in range(5):
        model.train()
        run(model, tokens())
        model.eval()
        run(model, tokens())  # with gradients
        with torch.no_grad():
            model(tokens())
        counts.append((compiler.report.graphs, len(compiler.report.recompiles)))
    assert counts[1:] == counts[:1] * 4
    assert counts[0][0] <= 3
