"""Timelines as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

Knows spans only. One process a panel, one thread for compute and one for each kind of copy.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from layercast.observe.pictures import Panel
from layercast.observe.timeline import SpanKind

_THREADS = {kind: number for number, kind in enumerate(SpanKind)} | {SpanKind.WAIT: 0}


def write_trace(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels' spans to `path` in the Trace Event Format (times in microseconds)."""
    events: list[dict[str, object]] = []
    for process, panel in enumerate(panels):
        events.append(_named("process_name", process, 0, panel.title))
        events.extend(
            _named("thread_name", process, number, kind) for kind, number in _THREADS.items() if kind != SpanKind.WAIT
        )
        events.extend(
            {
                "name": f"{span.kind} layer {span.layer}",
                "cat": span.kind,
                "ph": "X",
                "pid": process,
                "tid": _THREADS[span.kind],
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": {"layer": span.layer, "bytes": span.nbytes, "request": span.request},
            }
            for span in panel.spans
        )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _named(what: str, process: int, thread: int, name: str) -> dict[str, object]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
