"""The compile report as one HTML page that needs nothing else: no script, no network, light and dark.

Colours: green is compiled, amber wants attention, red runs eagerly.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from sheer.compiler.advice import Guard
from sheer.compiler.records import Place

if TYPE_CHECKING:
    from sheer.compiler.records import Break, Fallback, Graph, Group, Recompile
    from sheer.compiler.report import Report

_AROUND = 2  # lines of source shown before and after the one that matters


def render(reports: Sequence[Report], *, title: str) -> str:
    """The whole page, one part per report."""
    parts = [_part(report, number if len(reports) > 1 else None) for number, report in enumerate(reports, 1)]
    body = "\n".join(parts) or '<p class="none">No model was compiled.</p>'
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>\n{body}\n</main></body></html>\n"
    )


def _part(report: Report, number: int | None) -> str:
    heading = "" if number is None else f"<h2>Model {number}</h2>"
    sections = [
        _summary(report),
        *[_group(report, group) for group in report.groups],
        _outside(report),
    ]
    return "\n".join([heading, *sections])


# --- the summary


def _summary(report: Report) -> str:
    tiles = [
        ("targets", str(len(report.targets)), ""),
        ("graphs", str(report.graphs), "good" if report.graphs else "bad"),
        ("breaks", str(len(report.breaks)), "warn" if report.breaks else "good"),
        ("recompiles", str(len(report.recompiles)), "warn" if len(report.recompiles) > len(report.groups) else "good"),
        ("eager", str(len({f.target for f in report.fallbacks})), "bad" if report.fallbacks else "good"),
        ("seconds", f"{report.seconds:.1f}", ""),
        ("from the cache", _cache(report.cache_hits, report.cache_misses), ""),
    ]
    cells = "".join(
        f'<div class="tile {tone}"><b>{escape(value)}</b><span>{name}</span></div>' for name, value, tone in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _cache(hits: int, misses: int) -> str:
    return f"{hits} of {hits + misses}" if hits + misses else "–"


# --- one group of targets


def _group(report: Report, group: Group) -> str:
    mine = set(group.targets)
    graphs = [graph for graph in report.compiled if graph.target in mine]
    breaks = [found for found in report.breaks if found.target in mine]
    recompiles = [found for found in report.recompiles if found.target in mine]
    fallbacks = [found for found in report.fallbacks if found.target in mine]
    many = f"{len(group.targets)} × " if len(group.targets) > 1 else ""
    return (
        f"<section><h3>{many}{escape(group.kind)} {_badges(graphs, breaks, recompiles, fallbacks)}</h3>"
        f'<p class="where">{_place(group.place)}</p>{_names(group.targets)}'
        f"{_graphs(graphs)}{_fallbacks(fallbacks)}{_breaks(breaks)}{_recompiles(recompiles)}</section>"
    )


def _badges(graphs: list[Graph], breaks: list[Break], recompiles: list[Recompile], fallbacks: list[Fallback]) -> str:
    found = [
        (len(graphs), "graph", "good"),
        (len(breaks), "break", "warn"),
        (len(recompiles), "recompile", "warn"),
        (len(fallbacks), "eager", "bad"),
    ]
    badges = [
        f'<i class="{tone}">{count} {name}{"s" * (count != 1 and name != "eager")}</i>'
        for count, name, tone in found
        if count
    ]
    return "".join(badges) or '<i class="warn">not called yet</i>'


def _names(targets: tuple[str, ...]) -> str:
    """All names; where there are many, the first and the last, and the rest on demand."""
    if len(targets) <= 4:
        return f'<p class="names">{_codes(targets)}</p>'
    ends = f"{_code(targets[0])} … {_code(targets[-1])}"
    return f'<details class="names"><summary>{ends}</summary>{_codes(targets)}</details>'


def _graphs(graphs: list[Graph]) -> str:
    if not graphs:
        return ""
    rows = [
        (
            _code(graph.target or "whole module"),
            escape(graph.mode + (f", after a break: line {graph.place.line}" if graph.resumed else "")),
            str(graph.operations),
            f"{graph.seconds:.2f}",
            _cache(graph.cache_hits, graph.cache_misses),
        )
        for graph in graphs
    ]
    return _table(["compiled in a call of", "for", "operations", "seconds", "from the cache"], rows, numbers=(2, 3, 4))


def _breaks(breaks: list[Break]) -> str:
    if not breaks:
        return ""
    items = [
        f"<li><p>{_sentence(found.reason)} Python runs here, between two graphs.</p>"
        f'<p class="where">{_place(found.place)}</p>{_source(found.place)}{_mends(*found.hints)}</li>'
        for found in breaks
    ]
    return f"<h4>Breaks</h4><ul>{''.join(items)}</ul>"


def _recompiles(recompiles: list[Recompile]) -> str:
    """Alike ones (the same advice) together, each guard with how often it failed."""
    if not recompiles:
        return ""
    by_advice: dict[tuple[str, str], list[Recompile]] = {}
    for found in recompiles:
        code, mend = Guard.of(found.guard).place, found.advice.mend
        by_advice.setdefault((mend, code) if mend else (found.guard, ""), []).append(found)
    return f"<h4>Recompiles</h4><ul>{''.join(map(_recompile, by_advice.values()))}</ul>"


def _recompile(alike: list[Recompile]) -> str:
    words, mend, _ = alike[0].advice
    guard = Guard.of(alike[0].guard)
    times = f" <i>{len(alike)} times</i>" if len(alike) > 1 else ""
    head = f"<p>{_sentence(words or 'a guard failed')}{times}</p>"
    source = f'<p class="where">{escape(guard.place)}</p><pre>{escape(guard.code)}</pre>' if guard.code else ""
    conditions = Counter(Guard.of(found.guard).condition for found in alike)
    lines = "".join(f"<li>{_code(text)}{f' × {count}' * (count > 1)}</li>" for text, count in conditions.items())
    label = "guard" if len(conditions) == 1 else f"{len(conditions)} guards"
    guards = (
        f'<details><summary>{label} that failed, in torch\'s words</summary><ul class="plain">{lines}</ul></details>'
    )
    return f"<li>{head}{source}{_mends(mend)}{guards}</li>"


def _fallbacks(fallbacks: list[Fallback]) -> str:
    if not fallbacks:
        return ""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for found in fallbacks:
        by_reason.setdefault((found.reason, found.mend), []).append(found.target)
    items = [
        f"<li><p>{_sentence(reason)}</p>{_names(tuple(targets))}{_mends(mend)}</li>"
        for (reason, mend), targets in by_reason.items()
    ]
    return f"<h4>Runs eagerly</h4><ul>{''.join(items)}</ul>"


# --- what is outside


def _outside(report: Report) -> str:
    outside = report.outside
    hooks = [
        (
            _code(h.module or "the model"),
            h.kind,
            _code(h.name),
            _place(h.place),
            _TARGET_EAGER if h.inner else _AROUND_GRAPH,
        )
        for h in outside.hooks
    ]
    entries = [(_code(f"{e.kind}.{e.name}"), _place(e.place), escape(e.note)) for e in outside.entries]
    pieces = [(_code(p.module), escape(p.kind), f"{p.parameters:,}") for p in outside.pieces]
    tables = [
        _table(["hook on", "kind", "function", "at", "runs"], hooks) if hooks else "",
        _table(["entry point", "at", "how it runs"], entries) if entries else "",
        _table(["module", "class", "parameters"], pieces, numbers=(2,)) if pieces else "",
    ]
    inside = "".join(tables) or '<p class="none">Nothing.</p>'
    return f"<section><h3>Outside the graphs</h3>{inside}</section>"


_TARGET_EAGER = '<i class="bad">inside a target, which is eager meanwhile</i>'
_AROUND_GRAPH = "around the graph, as in eager mode"


# --- pieces of HTML


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]], *, numbers: tuple[int, ...] = ()) -> str:
    tone = [' class="number"' if column in numbers else "" for column in range(10)]
    head = "".join(f"<th{tone[i]}>{escape(name)}</th>" for i, name in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{tone[i]}>{cell}</td>" for i, cell in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _source(place: Place) -> str:
    """The line, with its neighbours where the file can still be read."""
    lines = linecache.getlines(place.file)
    if not 0 < place.line <= len(lines):
        return f"<pre><mark>{escape(place.code)}</mark></pre>" if place.code else ""
    first = max(1, place.line - _AROUND)
    shown = []
    for number in range(first, min(len(lines), place.line + _AROUND) + 1):
        text = f"{number:>5}  {escape(lines[number - 1].rstrip())}"
        shown.append(f"<mark>{text}</mark>" if number == place.line else text)
    return f"<pre>{chr(10).join(shown)}</pre>"


def _mends(*mends: str) -> str:
    return "".join(f'<p class="mend">{_prose(mend)}</p>' for mend in mends if mend)


def _prose(text: str) -> str:
    """Text in which `this` is code."""
    parts = text.split("`")
    return "".join(f"<code>{escape(part)}</code>" if i % 2 else escape(part) for i, part in enumerate(parts))


def _sentence(text: str) -> str:
    return _prose(f"{text[:1].upper()}{text[1:].rstrip('.')}.")


def _place(place: Place | None) -> str:
    """`file:line in function`, the folders dimmed."""
    if place is None:
        return ""
    folder, slash, name = place.file.rpartition("/")
    return (
        f'<span class="folder">{escape(folder + slash)}</span>{escape(name)}:{place.line} in {escape(place.function)}'
    )


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _codes(names: Iterable[str]) -> str:
    return " ".join(_code(name or "the whole module") for name in names)


_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #60646c; --page: #fcfcfd; --card: #ffffff; --line: #e0e1e6;
  --soft: #f3f4f7; --good: #18794e; --goodbg: #e6f6eb; --warn: #8a5a00; --warnbg: #fff3d1; --bad: #b32424;
  --badbg: #fde8e8; --mark: #fff0b3; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --dim: #a0a4ab; --page: #111214; --card: #191b1e;
  --line: #2e3136; --soft: #212429; --good: #5bd6a0; --goodbg: #11301f; --warn: #f2c94c; --warnbg: #3a2d08;
  --bad: #ff9a9a; --badbg: #421a1c; --mark: #574708; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 66rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1.05rem; margin: 0; display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; }
h4 { font-size: .95rem; margin: 1.25rem 0 .25rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem 1.25rem;
  margin: 1rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(6.5rem, 1fr)); gap: .6rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.3rem; font-variant-numeric: tabular-nums; white-space: nowrap; }
.tile span { color: var(--dim); font-size: .85rem; }
.tile.good b { color: var(--good); } .tile.warn b { color: var(--warn); } .tile.bad b { color: var(--bad); }
i { font-style: normal; font-weight: 500; font-size: .8rem; border-radius: 99px; padding: .1rem .55rem;
  background: var(--soft); white-space: nowrap; }
i.good { color: var(--good); background: var(--goodbg); } i.warn { color: var(--warn); background: var(--warnbg); }
i.bad { color: var(--bad); background: var(--badbg); }
.where { color: var(--ink); font: 13px/1.4 ui-monospace, monospace; margin: .3rem 0; overflow-wrap: anywhere; }
.folder { color: var(--dim); }
.names { margin: .4rem 0; line-height: 1.9; } .none { color: var(--dim); margin: .4rem 0 0; }
code { font: 13px/1.4 ui-monospace, monospace; background: var(--soft); border-radius: 4px; padding: .1rem .3rem;
  overflow-wrap: anywhere; }
pre { font: 13px/1.5 ui-monospace, monospace; background: var(--soft); border-radius: 6px; padding: .6rem .8rem;
  margin: .4rem 0; overflow-x: auto; }
mark { background: var(--mark); color: inherit; display: inline-block; min-width: 100%; }
summary { cursor: pointer; } details > summary { color: var(--dim); font-size: .9rem; }
ul { margin: 0; padding: 0; list-style: none; } li { border-top: 1px solid var(--line); padding: .6rem 0; }
h4 + ul > li:first-child { border-top: 0; } li p { margin: .25rem 0; }
ul.plain li { border: 0; padding: .1rem 0; }
.mend { color: var(--good); } .mend::before { content: "→ "; }
.scroll { overflow-x: auto; margin: .75rem 0 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th { text-align: left; color: var(--dim); font-weight: 500; white-space: nowrap; }
th, td { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .number { text-align: right; font-variant-numeric: tabular-nums; }
td { min-width: 6rem; } td code { white-space: nowrap; overflow-wrap: normal; }
"""
