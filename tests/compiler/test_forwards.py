"""What is computed equals eager, in few graphs, and gradients come block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import nn

from tests.compiler.models import Block, assert_same, compiled, net, run, tokens, twin

# Generated code may add in another order than eager does.
GENERATED = {"rtol": 1e-5, "atol": 1e-6}


@pytest.mark.parametrize(
    ("backend", "scope"),
    [("aot_eager", "auto"), ("eager", "module"), ("aot_eager", ["Linear", "embed"])],
    ids=["auto", "module", "list"],
)
def test_outputs_and_gradients_equal_eager_bit_by_bit(backend: str, scope: Any) -> None:
    model = net()
    plain = twin(model)
    compiler = compiled(model, backend=backend, scope=scope)
    for step in range(3):
        assert_same(run(model, tokens(seed=step)), run(plain, tokens(seed=step)))
    assert compiler.report.graphs >= 1
    assert compiler.report.fallbacks == []


def test_inductor_computes_the_same_and_its_seconds_count_the_backward() -> None:
    model = net(depth=2)
    with torch._functorch.config.patch(enable_autograd_cache=False):  # else a warm cache brings both graphs at once
        compiler = compiled(model, backend="inductor")
        out = model(tokens())
        forward_seconds = compiler.report.seconds
        out.sum().backward()
    assert 0 < forward_seconds < compiler.report.seconds
    assert_same(run(model, tokens()), run(twin(model), tokens()), **GENERATED)
    assert compiler.report.graphs == 1


def test_equal_blocks_are_one_graph_and_train_eval_alternation_two() -> None:
    model = net(depth=12, dropout=0.1)
    compiler = compiled(model)
    for _ in range(4):
        model.train()
        run(model, tokens())
        model.eval()
        with torch.no_grad():
            model(tokens())
    assert compiler.report.graphs == 2
    assert compiler.report.recompiles == []


def test_freezing_and_unfreezing_is_two_graphs() -> None:
    model = net()
    compiler = compiled(model, backend="aot_eager")
    for frozen in (False, True, False, True):
        for block in model.blocks:
            block.requires_grad_(not frozen)
        assert_same(run(model, tokens()), run(twin(model), tokens()))
    assert compiler.report.graphs == 2


def test_changing_batch_sizes_are_three_graphs() -> None:
    """The first size, any size from the second on, and a batch of one, which torch always takes for a constant."""
    model = net()
    compiler = compiled(model)
    for batch in (8, 8, 3, 8, 5, 1, 8):
        assert_same(run(model, tokens(batch)), run(twin(model), tokens(batch)))
    assert compiler.report.graphs == 3
    assert compiler.report.fallbacks == []


def test_changing_batch_sizes_where_the_first_block_gets_another_kind_of_input_are_twice_as_many() -> None:
    """The first block's input needs no gradient and that of the others does, so each of the three comes twice.

    Any size costs the others a graph of their own although the first block has one by then: `requires_grad` differs.
    """
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), Block())
    compiler = compiled(model, backend="aot_eager")
    for batch in (8, 8, 3, 8, 5, 1, 8):
        x = torch.randn(5, batch, 8).transpose(0, 1)
        assert_same(run(model, x), run(twin(model), x))
    assert compiler.report.graphs == 6
    assert compiler.report.fallbacks == []


@pytest.mark.parametrize(
    ("batches", "graphs"),
    [((6, 3, 7), 1), ((6, 3, 1), 2), ((8, 3, 7), 2), ((5, 3, 7), 2)],
    ids=["any size", "and one", "as large as the width", "as large as the length"],
)
def test_dynamic_from_the_start_is_one_graph_fewer(batches: tuple[int, ...], graphs: int) -> None:
    """Torch takes sizes that are equal when it compiles for one size: a first batch as large as the width (8, a
    constant) is a constant too, one as large as the length (5) must stay so; either way the next is a graph more."""
    model = net()
    compiler = compiled(model, kwargs={"dynamic": True})
    for batch in batches:
        run(model, tokens(batch))
    assert compiler.report.graphs == graphs


def test_blocks_of_other_widths_do_not_use_up_each_others_limit() -> None:
    widths = list(range(4, 13))  # one more than torch's limit
    stages = nn.Sequential(*(nn.Sequential(nn.Linear(a, a + 1), nn.Tanh()) for a in widths))
    compiler = compiled(stages, scope=[str(i) for i in range(len(widths))])
    x = torch.randn(2, 4, requires_grad=True)
    assert_same(run(stages, x), run(twin(stages), x))
    assert compiler.report.graphs == len(widths)
    assert compiler.report.recompiles == []
    assert compiler.report.fallbacks == []


@pytest.mark.parametrize(
    "root",
    [
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        lambda: nn.Linear(8, 8),
        lambda: nn.LayerNorm(8),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
    ],
    ids=["Sequential", "Linear", "LayerNorm", "TransformerEncoderLayer"],
)
def test_native_roots_compile(root: Callable[[], nn.Module]) -> None:
    module = root()
    compiler = compiled(module)
    x = torch.randn(2, 3, 8)
    assert_same(run(module, x), run(twin(module), x))
    assert compiler.report.graphs == 1
    (shared,) = compiler._forwards._shared.values()
    code = shared.copy()._code
    assert len(torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)) == 1  # in a frame of our own


def test_gradients_arrive_block_by_block() -> None:
    model = net(depth=4)
    compiled(model, backend="aot_eager")
    run(model, tokens())
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: arrived.append(name))
    ready_at_entry: dict[str, int] = {}
    for index, block in enumerate(model.blocks):
        block.register_full_backward_pre_hook(
            lambda module, grads, index=index: ready_at_entry.update({f"blocks.{index}": len(arrived)})
        )
    run(model, tokens())
    per_block = len(list(model.blocks[0].parameters()))
    # When the backward of a block begins, the head (2) and every later block are done.
    assert [ready_at_entry[f"blocks.{i}"] for i in (3, 2, 1, 0)] == [2 + i * per_block for i in range(4)]
    assert len(arrived) == len(list(model.parameters()))


def test_two_compilers_on_modules_of_one_class_are_independent() -> None:
    first, second = net(seed=1), net(seed=2)
    one, two = compiled(first), compiled(second, backend="aot_eager")
    wanted = [run(twin(m), tokens()) for m in (first, second)]
    for _ in range(2):
        assert_same(run(first, tokens()), wanted[0])
        assert_same(run(second, tokens()), wanted[1])
    assert (one.report.graphs, two.report.graphs) == (1, 1)
    one.disable()
    assert_same(run(first, tokens()), wanted[0])
    assert_same(run(second, tokens()), wanted[1])
    assert (one.report.graphs, two.report.graphs) == (1, 1)


def test_autocast() -> None:
    model = net()
    compiler = compiled(model, backend="aot_eager")

    def call(module: nn.Module) -> Callable[..., torch.Tensor]:
        def autocast(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return module(x)

        return autocast

    plain = twin(model)
    found, wanted = run(model, tokens(), call=call(model)), run(plain, tokens(), call=call(plain))
    assert found.output.dtype == torch.bfloat16
    assert_same(found, wanted)
    assert_same(run(model, tokens()), run(plain, tokens()))
    assert compiler.report.graphs == 2
    assert compiler.report.fallbacks == []


class Picky(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise KeyError("three")
        return super().forward(x)


def test_an_exception_in_forward_leaves_everything_usable() -> None:
    model = nn.Sequential(Picky(), Picky())
    plain = twin(model)
    compiled(model)
    for batch in (2, 3, 2, 3, 4):
        x = torch.randn(batch, 8)
        if batch == 3:
            with pytest.raises(KeyError, match="three"):
                model(x)
        else:
            assert_same(run(model, x), run(plain, x))


def test_direct_calls_to_forward_are_plain_and_right() -> None:
    model = net()
    compiler = compiled(model)
    x = torch.randn(2, 8)
    assert torch.equal(model.blocks[0].forward(x), twin(model).blocks[0](x))
    assert compiler.report.graphs == 0


def test_keywords_reach_the_compiled_forward() -> None:
    model = net()
    compiled(model)
    x = torch.randn(2, 8)
    assert torch.equal(model.blocks[0](x, scale=0.25), model.blocks[0].forward(x, scale=0.25))
    with pytest.raises(TypeError, match="scal"):
        model.blocks[0](x, scal=0.25)


def test_parameters_moved_into_one_flat_buffer_stay_one_graph() -> None:
    model = net()
    compiler = compiled(model, backend="aot_eager")
    plain = twin(model)
    run(model, tokens())
    parameters = list(model.parameters())
    starts = [128 * i for i in range(len(parameters))]
    flat = torch.zeros(starts[-1] + 128)
    for start, parameter in zip(starts, parameters, strict=True):
        flat[start : start + parameter.numel()] = parameter.detach().flatten()
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
    assert_same(run(model, tokens()), run(plain, tokens()))
    flat.mul_(0.5)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    assert_same(run(model, tokens()), run(plain, tokens()))
    assert compiler.report.graphs == 1


def test_inference_mode_before_training() -> None:
    model = net()
    compiled(model, backend="aot_eager")
    with torch.inference_mode():
        before = model(tokens())
    found = run(model, tokens())
    assert_same(found, run(twin(model), tokens()))
    assert torch.equal(before, found.output)


def test_tied_and_shared_modules() -> None:
    model = net()
    model.head.weight = model.embed.weight
    model.blocks[2] = model.blocks[0]
    model.blocks[1].up.weight = model.blocks[0].up.weight
    plain = twin(model)
    compiler = compiled(model)
    assert compiler.targets == ("blocks.0", "blocks.1")
    assert_same(run(model, tokens()), run(plain, tokens()))
