import json
import re
import subprocess
import sys

import msgspec
import pytest

from layercast.errors import Refused
from layercast.observe.pictures import Panel, figure_of, scales_ms, write_html, write_png
from layercast.observe.timeline import Span, SpanKind
from layercast.observe.traces import write_trace


def panel(title="bulk", layers=4, length=0.1):
    step = length / layers
    spans = [Span(SpanKind.WAIT, 0, 0.0, 0.001)]
    for layer in range(layers):
        start = layer * step
        spans.append(Span(SpanKind.LOAD, layer, start, start + step / 2, "r", 4096))
        spans.append(Span(SpanKind.COMPUTE, layer, start + step / 2, start + step))
    return Panel(title, tuple(spans), "a note", length)


def test_a_panel_ends_at_the_first_token_or_behind_it():
    drawn = panel(length=0.1)
    assert drawn.length_s == pytest.approx(0.1)
    assert msgspec.structs.replace(drawn, first_token_s=0.05).length_s == pytest.approx(0.1)
    assert drawn.layers == (0, 1, 2, 3)


def test_panels_share_a_time_axis_unless_one_dwarfs_the_rest():
    alike = scales_ms([panel(length=0.1), panel(length=0.2)])
    assert alike[0] == alike[1] == pytest.approx(208)
    apart = scales_ms([panel(length=1.0), panel(length=0.1), panel(length=0.2)])
    assert apart == (pytest.approx(1040), pytest.approx(208), pytest.approx(208))


def test_panels_whose_time_axes_differ_say_so(tmp_path):
    path = tmp_path / "t.html"
    for panels, told in (([panel()], False), ([panel(), panel(length=1.0)], True)):
        write_html(panels, path, "a title")
        assert ("Mind the time axes" in path.read_text()) is told
        assert any("Mind the time axes" in text.get_text() for text in figure_of(panels, "a title").texts) is told


def test_the_first_token_is_told_of_above_a_panel_where_no_bar_is():
    (ax,) = (figure := figure_of([panel(length=0.05)], "a title")).axes
    figure.draw_without_rendering()
    (told,) = (text for text in ax.texts if "first token" in text.get_text())
    assert told.get_text() == "first token after 50 ms"
    assert told.get_window_extent().y0 > ax.get_window_extent().y1


@pytest.mark.parametrize("panels", [1, 2, 3, 4])
def test_a_png_is_drawn_for_any_number_of_panels(tmp_path, panels):
    path = tmp_path / "t.png"
    write_png([panel(str(number)) for number in range(panels)], path, "a title")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("note", ["", "as wide as it may be " * 4, "a note much longer than a panel is wide " * 8])
def test_no_words_of_a_png_reach_beyond_it_or_narrow_its_panels(note):
    figure = figure_of([msgspec.structs.replace(panel(str(n)), note=note) for n in range(4)], "a title")
    figure.draw_without_rendering()
    words = [*figure.texts, *figure.legends[0].get_texts(), *(text for ax in figure.axes for text in ax.texts)]
    assert len(words) > 8
    assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in words)
    assert all(ax.get_position().width > 0.4 for ax in figure.axes)


def test_the_page_needs_nothing_else_and_names_every_bar(tmp_path):
    path = tmp_path / "t.html"
    write_html([panel("bulk"), panel("<layerwise>")], path, "where time goes & why")
    text = path.read_text()
    assert not re.search(r"(src|href|url)\s*[=(]", text)
    assert "where time goes &amp; why" in text
    assert "&lt;layerwise&gt;" in text
    tips = re.findall(r"<rect [^>]*><title>([^<]+)</title></rect>", text)
    assert len(tips) == text.count("<rect ") == 2 * 9
    assert any("4,096 bytes" in tip for tip in tips)
    for kind in re.findall(r'<input type="checkbox" checked id="(\w+)"', text):
        assert f'<rect class="{kind}"' in text
        assert f"body:has(#{kind}:not(:checked)) rect.{kind}{{display:none}}" in text


def test_a_trace_holds_every_span_in_microseconds(tmp_path):
    path = tmp_path / "t.json"
    write_trace([panel("bulk", layers=2, length=0.1)], path)
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 5
    last = max(events, key=lambda event: event["ts"])
    assert last["ts"] + last["dur"] == pytest.approx(100_000)
    assert {event["args"]["bytes"] for event in events if event["cat"] == "load"} == {4096}


@pytest.mark.parametrize("write", [write_png, write_html])
def test_nothing_to_draw_is_refused(tmp_path, write):
    with pytest.raises(Refused, match="no panel holds a span"):
        write([Panel("empty", ())], tmp_path / "t", "a title")
    assert list(tmp_path.iterdir()) == []


def test_the_room_loads_without_matplotlib():
    code = "import sys, layercast.observe.traces; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
