"""The page for people: one file, nothing fetched, everything in the report on it, nothing of the user's as markup."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from sheer.compiler import render
from tests.compiler.models import Block, compiled, net, run, tokens

VOID = {"meta"}


class Text(html.parser.HTMLParser):
    """The visible text; fails on a tag that is not closed where it should be, or that would fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe")
        assert not {name for name, _ in attributes} & {"src", "href", "style", "onclick"}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)


def _text(page: str) -> str:
    parser = Text()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return re.sub(r"\s+", " ", "".join(parser.words))


class Troubled(Block):
    """Breaks, counts, and has a name that is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        if y.sum() > 1e9:  # <b>not bold</b> & "quoted"
            return y
        return y * self.calls

    def helper(self) -> None:
        """A way in that is no forward."""


def _listen(module: nn.Module, args: object) -> None:
    """A hook."""


def test_the_page_shows_everything(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Troubled(), Troubled(), *(Block() for _ in range(6)))
    model[3].register_forward_pre_hook(_listen)
    model[4].up.register_forward_pre_hook(_listen)
    compiler = compiled(model)
    for _ in range(4):
        model(torch.ones(2, 8))
    path = compiler.report.html(tmp_path / "page.html")
    page = path.read_text()
    assert "http" not in page
    assert "url(" not in page
    text = _text(page)
    for part in (
        *("2 × Troubled", "6 × Block", "3 … 8", "training"),
        *(
            "depends on the value of a tensor",
            f"{Path(__file__).name}:",
            'if y.sum() > 1e9: # <b>not bold</b> & "quoted"',
        ),
        *("attribute calls was 0", "register_buffer", "self.calls == 0"),
        *("A module inside it has a hook.", "_listen", "inside a target, which is eager meanwhile"),
        *("around the graph", "Troubled.helper", "Troubled.forward", "called directly runs eagerly"),
        *("Linear", "72"),
    ):
        assert part in text, part


def test_a_page_of_several_models_of_one_and_of_none() -> None:
    one, two = compiled(net()), compiled(net(depth=2), scope="module")
    assert "No model was compiled" in _text(render([], title="none"))
    assert "Model 1" not in _text(render([one.report], title="one"))
    text = _text(render([one.report, two.report], title="<two>"))
    for part in ("<two>", "Model 1", "Model 2", "not called yet", "the whole module"):
        assert part in text


def test_a_target_that_cannot_be_compiled_is_on_the_page() -> None:
    model = net()
    model.blocks[0].compile(backend="eager")
    compiler = compiled(model)
    text = _text(render([compiler.report], title="x"))
    assert "compiled by the user's own module.compile()" in text
    assert "Drop one of the two" in text


@pytest.mark.parametrize("source", [None, "gone"])
def test_the_page_outlives_the_model_and_its_source(source: str | None, tmp_path: Path) -> None:
    model = net()
    model.blocks[0].register_forward_pre_hook(_listen)
    compiler = compiled(model)
    run(model, tokens())
    del model
    text = _text(compiler.report.html(tmp_path / "page.html").read_text())
    assert "_listen" in text
    if source:
        compiler.report.breaks[:] = [_break_in(tmp_path / "gone.py")]
        assert "the line" in _text(render([compiler.report], title="x"))


def _break_in(path: Path):
    from sheer.compiler import Break, Place

    return Break("blocks.0", Place(str(path), 3, "forward", "the line"), "some reason", ())
