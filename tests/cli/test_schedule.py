from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from sheer.cli import main
from sheer.cli.schedule.terminal import print_timeline
from sheer.schedule import GENERATORS, by_name, parse, simulate

SIZES = ["--stages", "4", "--micro-batches", "8"]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_show_draws_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "1f1b", "--stages", "2", "--micro-batches", "3"]) == 0
    assert capsys.readouterr().out == (
        "1f1b: 2 stages, 3 micro-batches; bubble 25.0 %\n"
        "\n"
        "        0         5         10\n"
        "stage 0 F0F1····B0--F2B1--··B2--\n"
        "stage 1 ··F0B0--F1B1--F2B2--····\n"
        "\n"
        " F  forward   B  backward  · idle\n"
        "idle per stage, %: 25.0 25.0\n"
        "held at most: 2 1 micro-batches\n"
    )


@pytest.mark.parametrize("name", GENERATORS)
@pytest.mark.parametrize("coloured", [False, True])
def test_no_line_is_wider_than_the_terminal(name: str, coloured: bool) -> None:
    console = Console(width=80, color_system="truecolor" if coloured else None, force_terminal=coloured, record=True)
    print_timeline(simulate(by_name(name, 4, 12)), console)
    said = console.export_text()
    assert max(map(len, said.splitlines())) <= 80
    for micro_batch in range(12):
        assert said.count(f"F{micro_batch}") >= 4
    assert "\x1b" not in said


def test_very_unequal_costs_still_make_a_chart_of_a_few_screens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "1f1b", *SIZES, "--costs", "F=0.001,B=100"]) == 0
    assert len(capsys.readouterr().out.splitlines()) < 90


def test_chunks_have_rows_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "interleaved", *SIZES]) == 0
    said = capsys.readouterr().out
    assert "stage 3.1 ······        F0B0--F1B1--" in said
    assert "one counted per chunk" in said


def test_show_as_json_with_costs_per_piece(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--stages", "2", "--micro-batches", "2", "--costs", "F=1:2,B=2:4", "--latency", "0.5"]
    assert main(["schedule", "show", "1f1b", *asked, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["length"], said["in_flight"], said["placement"]) == (16, [2, 1], [0, 1])
    assert said["spans"][1][0] == {"action": "F0", "start": 1.5, "end": 3.5}
    assert said["critical"][0] == {"stage": 0, "action": "F0"}


def test_show_as_text_can_be_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", "zb-v", *SIZES, "--text"]) == 0
    assert parse(capsys.readouterr().out) == by_name("zb-v", 4, 8)


def test_pictures_are_written(tmp_path: Path) -> None:
    svg, png = tmp_path / "a.svg", tmp_path / "a.png"
    assert main(["schedule", "show", "zero-bubble", *SIZES, "--svg", str(svg), "--png", str(png)]) == 0
    assert svg.read_text().startswith("<svg")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_png_without_matplotlib_is_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["schedule", "show", "1f1b", *SIZES, "--png", str(tmp_path / "a.png")]) == 2
    assert "a PNG needs matplotlib: pip install 'sheer[demo]'" in capsys.readouterr().err


def test_a_function_of_ones_own_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(stages, count, chunks=1):\n"
        "    return [' '.join(f'F{k}.{c} B{k}.{c}' for k in range(count) for c in range(chunks))] * stages\n"
    )
    assert main(["schedule", "check", f"{file}:mine", "--stages", "3", "--micro-batches", "2"]) == 0
    assert capsys.readouterr().out == "mine: 3 stages, 2 micro-batches: can run\n"
    assert main(["schedule", "check", f"{file}:mine", "--stages", "1", "--micro-batches", "2", "--chunks", "2"]) == 1
    assert "stage 0 waits at B0 for B0.1 of stage 0" in capsys.readouterr().out


def test_check_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("stage 0: F0 B0 F1 B1\nstage 1: F0 F1 B0 B1\n")
    assert main(["schedule", "check", str(file)]) == 1
    said = capsys.readouterr().out
    assert said.startswith("'custom' cannot run:\n")
    assert "stage 1 waits at F1 for F1 of stage 0, which waits at B0" in said
    file.write_text("stage 0: F0 F1 B0 B1\nstage 1: F0 B0 F1 B1\n")
    assert main(["schedule", "check", str(file)]) == 0
    assert capsys.readouterr().out == "custom: 2 stages, 2 micro-batches: can run\n"


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["1f1", *SIZES], "there is no schedule and no file '1f1'"),
        (["gone.txt"], "there is no schedule and no file 'gone.txt'; there are gpipe"),
        (["1f1b"], "'1f1b' needs --stages and --micro-batches"),
        (["1f1b", *SIZES, "--chunks", "2"], "'1f1b' has 1 chunks a stage, not 2"),
        (["1f1b", "--stages", "0", "--micro-batches", "1"], "stages of at least 1, not 0"),
        (["1f1b", *SIZES, "--costs", "X=1"], "'X=1' is no cost; write F=1 or F=1:2, with one of F, B, I, W"),
        (["1f1b", *SIZES, "--costs", "F"], "'F' is no cost"),
        (["1f1b", *SIZES, "--costs", "F=-1"], "negative"),
        (["1f1b", *SIZES, "--costs", "F=nan"], "no number"),
        (["1f1b", *SIZES, "--costs", "F=1:2"], "has 2 times; give one, or one for each of 4 pieces"),
        (["1f1b", *SIZES, "--latency", "-1"], "latency is -1.0; it must be 0 or more"),
        (["gone.py:f", *SIZES], "there is no file 'gone.py'"),
        ([f"{__file__}:f", *SIZES], "has no function 'f'"),
        ([__file__], "line 1 of the schedule"),
        ([__file__, "--stages", "2"], "--stages is for schedules by name"),
    ],
)
def test_wrong_requests_say_what_is_allowed(asked: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "show", *asked]) == 2
    assert says in capsys.readouterr().err


def test_a_schedule_that_cannot_run_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"stages": ["F0 B0", "F0"]}')
    assert main(["schedule", "show", str(file)]) == 2
    assert "stage 1: F0 has no backward" in capsys.readouterr().err


def test_it_needs_no_torch() -> None:
    program = (
        "import sys\nfrom sheer.cli import main\n"
        "assert main(['schedule', 'show', '1f1b', '--stages', '2', '--micro-batches', '2']) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _page() -> str:
    return (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text(encoding="utf-8")


def _shown(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["schedule", "show", "1f1b", *SIZES])
    chart, _, _ = capsys.readouterr().out.partition("\n\n F ")
    assert _shown(chart) in _page()


@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "forward-only"])
def test_the_page_says_what_is_true(name: str) -> None:
    row = next(line for line in _page().splitlines() if line.startswith(f"| `{name}` |"))
    timeline = simulate(by_name(name, 4, 8))
    held = " ".join(map(str, timeline.in_flight)) if len(set(timeline.in_flight)) > 1 else str(timeline.in_flight[0])
    assert f"{100 * timeline.bubble:.1f} %, holds {held}" in row


def test_the_page_s_own_schedules_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = _page()
    text = page[page.index("    name: mine") : page.index("or as a function")]
    (tmp_path / "mine.txt").write_text("\n".join(line[4:] for line in text.splitlines()))
    code = page[page.index("# mine.py") :]
    (tmp_path / "mine.py").write_text(code[: code.index("```")])
    assert main(["schedule", "check", str(tmp_path / "mine.txt")]) == 0
    assert main(["schedule", "check", f"{tmp_path / 'mine.py'}:mine", *SIZES]) == 0
    (tmp_path / "mine.txt").write_text("stage 0: F0 B0 F1 B1\nstage 1: F0 F1 B0 B1\n")
    capsys.readouterr()
    assert main(["schedule", "check", str(tmp_path / "mine.txt")]) == 1
    assert _shown(capsys.readouterr().out) in page
