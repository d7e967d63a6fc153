"""What there is to say about a captured graph, to read and to process: inputs, findings, operators by layer, costs.

A report is plain text, JSON, the GE text (one line a node), the FX code and an HTML page. It says what was found; it
does not decide what to do about it, except that an error among the findings makes it `ok = False`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..findings import Finding
from .checks import check
from .compile import Compiled
from .costs import Chip, NodeCost, chip_named, count, floor_seconds
from .ge_graph import Graph, Node
from .interpreter import known_nodes


@dataclass(frozen=True)
class Report:
    """One graph, judged and counted."""

    name: str
    target: str
    graph: Graph | None  # None: no graph was made, the findings say why
    findings: tuple[Finding, ...]
    costs: tuple[NodeCost, ...]
    chip_name: str | None  # whose peak gives the floor; None: nothing is said of time
    kv_len: int | None
    fx_code: str
    graphs_made: int
    labels: Mapping[str, str]  # what an input is, by its name in the graph

    @property
    def ok(self) -> bool:
        """No finding is an error."""
        return not any(one.level == "error" for one in self.findings)

    @property
    def chip(self) -> Chip | None:
        """The chip whose peak gives the floor."""
        return None if self.chip_name is None else chip_named(self.chip_name)

    def layers(self) -> list[tuple[list[int | None], Counter[str]]]:
        """Operators of each layer, layers with the same operators folded together, in order."""
        by_layer: dict[int | None, Counter[str]] = {}
        for cost in self.costs:
            by_layer.setdefault(cost.node.source.layer, Counter())[cost.node.type] += 1
        folded: list[tuple[list[int | None], Counter[str]]] = []
        for layer, types in by_layer.items():
            twins = [group for group, known in folded if known == types and None not in (layer, group[0])]
            if twins:
                twins[0].append(layer)
            else:
                folded.append(([layer], types))
        return folded

    def operators(self) -> list[dict[str, Any]]:
        """For each node type: how many, floating-point operations, bytes, microseconds at the chip's peak."""
        rows: dict[str, dict[str, Any]] = {}
        chip = self.chip
        for cost in self.costs:
            row = rows.setdefault(cost.node.type, {"type": cost.node.type, "kind": cost.kind, "count": 0, "flops": 0.0})
            row["count"] += 1
            row["flops"] += cost.flops
            row["bytes"] = row.get("bytes", 0.0) + cost.nbytes
            row["floor_us"] = row.get("floor_us", 0.0) + (0.0 if chip is None else 1e6 * cost.seconds(chip))
        return sorted(rows.values(), key=lambda row: (-row["floor_us"], -row["count"]))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        inputs = self.graph.inputs if self.graph else ()
        chip = self.chip
        unknown = [] if chip is None else sorted({node.type for node in self.graph or ()} - known_nodes())
        return {
            "name": self.name,
            "target": self.target,
            "ok": self.ok,
            "graphs": self.graphs_made,
            "inputs": [
                {
                    "name": one.name,
                    "label": self.labels.get(one.name, ""),
                    "shape": list(one.shape),
                    "dtype": _dtype(one.dtype),
                    "address": one.kind,
                }
                for one in inputs
            ],
            "findings": [vars(one) for one in self.findings],
            "operators": self.operators(),
            "layers": [
                {"layers": layers, "types": dict(types)}
                | {kind: _kind_count(self, layers, kind) for kind in ("compute", "moving")}
                for layers, types in self.layers()
            ],
            "not_interpreted": unknown,
            "chip": self.chip_name,
            "kv_len": self.kv_len,
            "floor_us": None if chip is None else 1e6 * floor_seconds(self.costs, chip),
            "flops": sum(cost.flops for cost in self.costs),
            "bytes": sum(cost.nbytes for cost in self.costs),
        }

    def as_text(self) -> str:
        """To read."""
        data = self.as_dict()
        lines = [f"{self.name} on {self.target}: {data['graphs']} graph{'' if data['graphs'] == 1 else 's'}"]
        lines += ["", f"findings: {_summary(self.findings)}"]
        lines += [f"  {line}" for one in self.findings for line in str(one).splitlines()]
        if self.graph is None:
            return "\n".join(lines)
        kinds = Counter(one["address"] for one in data["inputs"])
        lines += ["", "inputs: " + ", ".join(f"{number} {kind}" for kind, number in kinds.items())]
        lines += _input_lines(data["inputs"])
        lines += ["", *_operator_lines(data)]
        lines += ["", "layers"]
        for row in data["layers"]:
            types = ", ".join(f"{number} {kind}" for kind, number in sorted(row["types"].items()))
            lines.append(f"  {span(row['layers']):>9}  {row['compute']} compute, {row['moving']} moving: {types}")
        if data["not_interpreted"]:
            lines += ["", "no meaning in the interpreter: " + ", ".join(data["not_interpreted"])]
        return "\n".join(lines)

    def ge_text(self) -> str:
        """One line a node: outputs, type, inputs, attributes, the user's line."""
        return "\n".join(_node_line(node) for node in self.graph or ())

    def write(self, folder: Path) -> list[Path]:
        """Write the report as text, JSON and HTML, the graph as text and as FX code; returns their paths."""
        from .page import page

        folder.mkdir(parents=True, exist_ok=True)
        contents = {
            "report.txt": self.as_text(),
            "report.json": json.dumps(self.as_dict(), indent=1),
            f"graph.{'export' if self.target == 'cpu' else 'ge'}.txt": self.ge_text(),
            "graph.fx.py": self.fx_code,
            "report.html": page(self),
        }
        for name, text in contents.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
        return [folder / name for name in contents]


def make_report(
    compiled: Compiled, *, target: str = "ascend-sim", chip: str = "atlas-a2-313t", kv_len: int | None = None
) -> Report:
    """Judge what a compiled function made. More graphs than one is an error."""
    chip_named(chip)
    graphs = [one for one in compiled.graphs if one.graph is not None]
    graph = graphs[0].graph if graphs else None
    findings = list(compiled.findings)
    if len(graphs) > 1:
        findings.append(_too_many(compiled, len(graphs)))
    findings += check(graph) if graph is not None else []
    costs = count(graph, kv_len) if graph is not None else []
    fx_code = next((one.fx_code for one in compiled.graphs if one.fx_code), "")
    unique = tuple(dict.fromkeys(findings))
    made = len(graphs)
    return Report(compiled.name, target, graph, unique, tuple(costs), chip, kv_len, fx_code, made, compiled.labels)


def _too_many(compiled: Compiled, made: int) -> Finding:
    first, second = (str(graph.code).splitlines() for graph in compiled.fx[:2])
    changed = next((line.strip() for line, other in zip(first, second, strict=False) if line != other), "")
    return Finding(
        "error",
        "one graph serves every call",
        f"{made} graphs over {sum(one.runs for one in compiled.graphs)} calls; the first difference: {changed}",
        "hand over as a tensor whatever changes from call to call",
    )


def _operator_lines(data: Mapping[str, Any]) -> list[str]:
    if data["floor_us"] is None:
        return ["operators", *(f"  {row['count']:4} {row['type']}" for row in data["operators"])]
    lines = [f"operators: {_si(data['flops'])}FLOP, {_si(data['bytes'])}B"]
    lines.append(f"floor of a step on {data['chip']}: {data['floor_us']:.1f} us, {keys_said(data['kv_len'])}")
    for row in data["operators"]:
        flops, moved = _si(row["flops"]), _si(row["bytes"])
        lines.append(f"  {row['count']:4} {row['type']:26} {flops:>9}FLOP {moved:>9}B  {row['floor_us']:.2f} us")
    return lines


def keys_said(kv_len: int | None) -> str:
    """What a floor takes a row to attend to."""
    return "each row over all keys that it has room for" if kv_len is None else f"each row over {kv_len} keys"


def _input_lines(inputs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Inputs that are no parameter, those of one kind on one line."""
    folded: dict[tuple[str, str, str], list[str]] = {}
    for one in inputs:
        if one["address"] != "parameter":
            key = (one["dtype"], str(one["shape"]), one["address"])
            folded.setdefault(key, []).append(one["label"] or one["name"])
    lines = []
    for (dtype, shape, address), names in folded.items():
        lines.append(f"  {dtype:9} {shape:22} {address:8}  {_some(names)}")
    return lines


def _some(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} ... {names[-1]} ({len(names)} of them)"


def _kind_count(report: Report, layers: Sequence[int | None], kind: str) -> int:
    return sum(cost.kind == kind and cost.node.source.layer == layers[0] for cost in report.costs)


def _summary(findings: Sequence[Finding]) -> str:
    levels = Counter(one.level for one in findings)
    counted = [f"{levels[level]} {level}{'s' if levels[level] != 1 else ''}" for level in ("error", "warn")]
    return ", ".join(text for text in counted if not text.startswith("0")) or "none"


def span(layers: Sequence[int | None]) -> str:
    """Equal layers in words: 0, 2-5."""
    if layers[0] is None:
        return "elsewhere"
    runs: list[list[int]] = []
    for layer in layers:
        assert layer is not None
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _si(value: float) -> str:
    for unit in ("", "k", "M", "G"):
        if value < 1000:
            return f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} T"


def _node_line(node: Node) -> str:
    outputs = ", ".join(f"{_dtype(out.dtype)}{'[?]' if out.shape is None else list(out.shape)}" for out in node.outputs)
    inputs = ", ".join(f"{name}={edge.node}:{edge.index}" for name, edge in node.inputs.items())
    hidden = ("index", "value")
    shown = {name: value for name, value in node.attrs.items() if not name.startswith("_") and name not in hidden}
    if node.type == "Const":
        shown["value"] = node.attrs["value"].reshape(-1)[:8].tolist()
    attrs = ", ".join(f"{name}={value!r}" for name, value in sorted(shown.items()))
    line = f"    # {node.source.line}" if node.source.line else ""
    return f"{node.name} = {node.type}({inputs}) {{{attrs}}} -> {outputs}{line}"
