"""A report as one HTML page that needs nothing else: findings, tables, and the graph drawn, equal layers drawn once."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from .costs import MOVING, SILENT, VIEWS
from .ge_graph import Graph, Node
from .report import Report, keys_said, span

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; color: #1d2733; }
table { border-collapse: collapse; } td, th { padding: .2em .8em; text-align: left; border-bottom: 1px solid #dde3ea; }
td.n { text-align: right; font-variant-numeric: tabular-nums; } code { font-size: 12px; }
.error { border-left: 4px solid #c22f2f; } .warn { border-left: 4px solid #c9932b; }
.finding { padding: .4em .8em; margin: .5em 0; background: #f6f8fa; }
svg text { font: 12px system-ui, sans-serif; } svg .compute { fill: #dbeafe; stroke: #3b6fb6; }
svg .moving { fill: #fdf0d5; stroke: #b58434; } svg .outside { fill: #eef1f4; stroke: #98a4b1; }
svg path { fill: none; stroke: #8593a3; } figure { overflow-x: auto; margin: 1em 0; }
"""
_WIDTH, _HEIGHT, _ACROSS, _DOWN = 170, 30, 190, 56


def page(report: Report) -> str:
    """The whole page."""
    data = report.as_dict()
    parts = [f"<h1>{escape(report.name)} on {escape(report.target)}</h1>", f"<p>{_headline(data)}</p>"]
    parts.append("<h2>Findings</h2>")
    parts += [_finding(vars(one)) for one in report.findings] or ["<p>None.</p>"]
    if report.graph is not None:
        parts += ["<h2>Operators</h2>", _operators(data), "<h2>Layers</h2>", _layers(data)]
        for layers, _ in report.layers():
            title = "Outside of layers" if layers[0] is None else f"Layer {layers[0]}" + _others(layers)
            parts += [f"<h2>{title}</h2>", f"<figure>{draw(report.graph, layers[0])}</figure>"]
        parts += ["<h2>Inputs</h2>", _inputs(data)]
    head = f"<!doctype html><meta charset=utf-8><title>{escape(report.name)}</title><style>{_STYLE}</style>"
    return head + "\n".join(parts)


def _headline(data: dict[str, Any]) -> str:
    verdict = "No errors" if data["ok"] else "Errors"
    text = f"{verdict}; {data['graphs']} graph{'' if data['graphs'] == 1 else 's'}"
    if data["floor_us"] is None:
        return text
    return f"{text}; floor of a step on {data['chip']}: {data['floor_us']:.1f} µs, {keys_said(data['kv_len'])}"


def _others(layers: Sequence[int | None]) -> str:
    return f" ({len(layers) - 1} more are the same)" if len(layers) > 1 else ""


def _finding(one: dict[str, Any]) -> str:
    line = f"<br><code>{escape(one['line'])}</code>" if one["line"] else ""
    source = f"<br><small>{escape(one['source'])}</small>" if one["source"] else ""
    text = f"<b>{escape(one['rule'])}</b>: {escape(one['value'])}; {escape(one['remedy'])}"
    return f"<div class='finding {one['level']}'>{text}{line}{source}</div>"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows)
    return f"<table><tr>{cells}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f"<td class=n>{value:,.1f}</td>" if isinstance(value, float) else f"<td class=n>{value:,}</td>"
    return f"<td>{escape(str(value))}</td>"


def _operators(data: dict[str, Any]) -> str:
    if data["floor_us"] is None:
        return _table(["operator", "count"], [[row["type"], row["count"]] for row in data["operators"]])
    rows = [
        [row["type"], row["count"], row["flops"] / 1e6, row["bytes"] / 1e3, row["floor_us"]]
        for row in data["operators"]
    ]
    return _table(["operator", "count", "MFLOP", "kB", "floor, µs"], rows)


def _layers(data: dict[str, Any]) -> str:
    rows = []
    for row in data["layers"]:
        name = span(row["layers"])
        types = ", ".join(f"{number} {kind}" for kind, number in sorted(row["types"].items()))
        rows.append([name, row["compute"], row["moving"], types])
    return _table(["layers", "compute", "moving", "operators"], rows)


def _inputs(data: dict[str, Any]) -> str:
    rows = [[one["name"], one["label"], one["dtype"], one["shape"], one["address"]] for one in data["inputs"]]
    return _table(["name", "what it is", "dtype", "shape", "address"], rows)


def draw(graph: Graph, layer: int | None) -> str:
    """The nodes of one layer as SVG, from top to bottom; what comes from outside is grey."""
    own = [node for node in graph if node.source.layer == layer and node.type not in SILENT]
    if layer is None:
        own = [node for node in own if not node.type.startswith("Data")]
    names = {node.name for node in own}
    edges = [(source.name, node.name) for node in own for source in _sources(graph, node)]
    outside = list(dict.fromkeys(source for source, _ in edges if source not in names))
    outside = [name for name in outside if graph.node(name).type not in ("Data", "Const")]
    depth = dict.fromkeys(outside, 0)
    for node in own:
        above = [depth[source] for source, target in edges if target == node.name and source in depth]
        depth[node.name] = 1 + max(above, default=0)
    rows: dict[int, list[str]] = {}
    for name, level in depth.items():
        rows.setdefault(level, []).append(name)
    place = {name: (index, level) for level, row in rows.items() for index, name in enumerate(row)}
    width = max((len(row) for row in rows.values()), default=1) * _ACROSS
    height = (max(rows, default=0) + 1) * _DOWN
    lines = [_arrow(place[a], place[b]) for a, b in edges if a in place and b in place]
    boxes = [_box(graph.node(name), place[name], name in names) for name in depth]
    return f"<svg width='{width}' height='{height}' viewBox='-6 -6 {width} {height}'>{''.join(lines + boxes)}</svg>"


def _sources(graph: Graph, node: Node) -> list[Node]:
    """The nodes that a node reads, views looked through."""
    found = []
    for edge in node.inputs.values():
        made = graph.producer(edge)
        while made.type in VIEWS and "x" in made.inputs:
            made = graph.producer(made.inputs["x"])
        found.append(made)
    return found


def _box(node: Node, place: tuple[int, int], own: bool) -> str:
    x, y = place[0] * _ACROSS, place[1] * _DOWN
    kind = "outside" if not own else "moving" if node.type in MOVING else "compute"
    shapes = "\n".join(f"{list(out.shape or ())} {out.dtype}" for out in node.outputs)
    hint = escape(f"{node.name}\n{shapes}\n{node.source.line}")
    return (
        f"<g><title>{hint}</title><rect class={kind} x={x} y={y} width={_WIDTH} height={_HEIGHT} rx=5 />"
        f"<text x={x + _WIDTH / 2} y={y + 19} text-anchor=middle>{escape(node.type)}</text></g>"
    )


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    x1, y1 = start[0] * _ACROSS + _WIDTH / 2, start[1] * _DOWN + _HEIGHT
    x2, y2 = end[0] * _ACROSS + _WIDTH / 2, end[1] * _DOWN
    return f"<path d='M{x1},{y1} C{x1},{y1 + 18} {x2},{y2 - 18} {x2},{y2}' />"
