"""Compiles small functions through torchair on generated libraries and executes the GE graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def simulate(function: Callable[..., Any], *inputs: Any, wide: bool = False, **options: Any) -> Any:
    """What the interpreter gives for `function` on `inputs`."""
    return compiled(function, wide=wide, **options)(*inputs)


def compiled(function: Callable[..., Any], *, wide: bool = False, execute: Any = None, **options: Any) -> Any:
    """`function` behind torchair and the interpreter (or `execute`), its graphs and findings beside it."""
    from airdecode.graph.targets.ascend_sim.compile import compile_function
    from airdecode.graph.targets.ascend_sim.interpreter import Interpreter

    def interpret(graph: Any, given: Any) -> Any:
        return Interpreter(graph, wide=wide).run(given)

    return compile_function("step", function, execute or interpret, **options)


def types(made: Any, *, views: bool = False) -> list[str]:
    """The node types of the only graph, in order; constants, inputs and views left out."""
    hidden = {"Data", "Const", "NetOutput"} | (set() if views else {"Reshape", "Squeeze", "Unsqueeze"})
    assert len(made.graphs) == 1
    return [node.type for node in made.graphs[0].graph if node.type not in hidden]
