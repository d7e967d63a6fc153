"""One contender in a process of its own: orders come as JSON lines on stdin, answers leave as JSON lines on stdout.

    python -m airdecode.engine.bench.worker NAME

Between orders the process waits on its pipe. What libraries print goes to stderr, so that answers stay readable.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Any

from .contender import Case, Contender, UnavailableError, make, missing


def answer(name: str, contender: Contender | None, order: dict[str, Any]) -> tuple[Contender | None, dict[str, Any]]:
    """Carry out one order; the contender is made with the first, so that an import error is an answer too."""
    contender = contender or make(name)
    match order["do"]:
        case "convert":
            contender.convert(Case(**order["case"]))
            return contender, {}
        case "prepare":
            return contender, {"runs": contender.prepare(Case(**order["case"]))}
        case "run":
            run = contender.run(order["prompts"], order["new_tokens"])
            return contender, {"tokens": run.tokens, "arrivals": run.arrivals}
        case "close":
            contender.close()
            return None, {}
    raise AssertionError(f"unknown order {order['do']!r}")


def main(name: str) -> None:
    """Answer orders until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    contender: Contender | None = None
    for line in sys.stdin:
        try:
            contender, found = answer(name, contender, json.loads(line))
        except UnavailableError as error:
            found = {"unavailable": str(error)}
        except ImportError as error:
            found = {"unavailable": str(missing(name, error))}
        except Exception as error:  # a peer's failure is a line of the report, whatever it is
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
