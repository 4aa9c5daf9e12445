import io
import json

import msgspec
import pytest
from rich.console import Console

from layercast.demo.report import (
    MODES,
    DemoResult,
    ModeResult,
    answers,
    encoded,
    in_the_middle,
    moved_line,
    until_first_token,
    write_pictures,
    write_terminal,
)
from layercast.errors import Refused
from layercast.observe.timeline import Span, SpanKind

COLD = ModeResult(
    ttft_ms=2000.0,
    prompt_tokens=1024,
    computed_tokens=1024,
    loaded_tokens=0,
    bytes=0,
    layers=30,
    exposed_ms=0.0,
    overlap=None,
    verified=None,
    pids=(11,),
    text="Paris.",
)


def warm(name: str) -> ModeResult:
    return msgspec.structs.replace(
        COLD,
        ttft_ms=300.0,
        computed_tokens=64,
        loaded_tokens=960,
        bytes=22_118_400,
        exposed_ms=120.0 if name == "bulk" else 12.0,
        overlap=0.0 if name == "bulk" else 0.9,
        verified=True,
        pids=(11, 12) if name == "push" else (11,),
    )


MODE_RESULTS = {"cold": COLD, **{name: warm(name) for name in MODES[1:]}}
SPANS = {
    name: tuple(Span(SpanKind.COMPUTE, layer, layer / 100, (layer + 1) / 100) for layer in range(30)) for name in MODES
}
RESULT = DemoResult(modes=MODE_RESULTS, spans=SPANS, link_gbps=2.0)


def changed(name, **changes):
    return {**MODE_RESULTS, name: msgspec.structs.replace(MODE_RESULTS[name], **changes)}


def printed(result, tmp_path):
    text = io.StringIO()
    write_terminal(result, tmp_path, tmp_path / "demo.json", Console(file=text, width=80))
    return text.getvalue()


def test_the_line_adds_up_what_moved():
    assert moved_line(MODE_RESULTS) == "KV moved: 66,355,200 bytes, 30 layers, verified"


@pytest.mark.parametrize("name", MODES[1:])
def test_one_mode_that_was_not_checked_spoils_the_line(name):
    assert moved_line(changed(name, verified=False)).endswith("30 layers, NOT verified")


def test_a_demo_in_which_nothing_moved_is_an_error():
    with pytest.raises(Refused, match="host_bytes"):
        moved_line({"cold": COLD})


def test_an_answer_is_told_once_unless_they_differ():
    assert answers(MODE_RESULTS) == "All answer: Paris."
    assert "push: Rome." in answers(changed("push", text="Rome."))


def test_the_terminal_shows_one_table_with_a_row_a_mode_and_the_line(tmp_path):
    text = printed(RESULT, tmp_path)
    assert "link paced to 2 Gbit/s" in text
    assert "\nKV moved: 66,355,200 bytes, 30 layers, verified\n" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] and line.split()[0] in MODES]
    assert [row[0] for row in rows] == list(MODES)
    assert rows[0][1:] == ["2,000", "100%", "1,024", "0", "-", "-", "-", "-"]
    assert rows[2][1:] == ["300", "15%", "64", "960", "22.1", "12", "90%", "yes"]


def test_what_a_forward_waited_where_that_is_not_known_is_no_number(tmp_path):
    text = printed(msgspec.structs.replace(RESULT, modes=changed("bulk", exposed_ms=None, overlap=None)), tmp_path)
    (row,) = [line.split() for line in text.splitlines() if line.split()[:1] == ["bulk"]]
    assert row[5:] == ["22.1", "-", "-", "yes"]


def test_an_unpaced_link_is_not_called_paced(tmp_path):
    assert "link paced" not in printed(msgspec.structs.replace(RESULT, link_gbps=None), tmp_path)


def test_the_files_hold_every_mode_and_all_fields(tmp_path):
    write_pictures(RESULT, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"timeline.html", "timeline.png", "trace.json"}
    assert "link paced to 2 Gbit/s" in (tmp_path / "timeline.html").read_text()
    told = json.loads(encoded(RESULT))
    assert list(told) == list(MODES)
    fields = "ttft_ms prompt_tokens computed_tokens loaded_tokens bytes layers exposed_ms overlap verified pids text"
    assert all(list(mode)[:11] == fields.split() for mode in told.values())
    assert list(told["push"])[11:] == ["transfer_ms", "link_gbps", "rounds"]


def test_figures_are_told_to_the_microsecond():
    told = json.loads(encoded(DemoResult(modes=changed("bulk", ttft_ms=1 / 3, rounds=(2 / 3,)), spans={})))
    assert (told["bulk"]["ttft_ms"], told["bulk"]["rounds"]) == (0.333, [0.667])


def test_of_an_odd_or_even_number_of_rounds_the_one_in_the_middle_is_shown_with_its_own_spans():
    def round_of(ms):
        return msgspec.structs.replace(COLD, ttft_ms=ms), (Span(SpanKind.COMPUTE, 0, 0.0, ms),)

    shown = in_the_middle({"cold": [round_of(ms) for ms in (9.0, 1.0, 5.0)], "bulk": [round_of(2.0)] * 2}, 2.0, "here")
    assert (shown.modes["cold"].ttft_ms, shown.spans["cold"][0].end_s) == (5.0, 5.0)
    assert shown.modes["cold"].rounds == (9.0, 1.0, 5.0)
    assert (shown.modes["bulk"].ttft_ms, shown.modes["bulk"].link_gbps, shown.about) == (2.0, 2.0, "here")


def test_only_what_began_between_the_request_and_its_first_token_is_shown_in_the_requests_time():
    spans = [Span(SpanKind.LOAD, 0, start, start + 1.0) for start in (9.0, 10.0, 12.5, 13.0)]
    shown = until_first_token(spans, zero_s=10.0, length_s=3.0)
    assert [(span.start_s, span.end_s) for span in shown] == [(0.0, 1.0), (2.5, 3.5)]


def test_rounds_are_told_as_they_were(tmp_path):
    modes = {
        "cold": msgspec.structs.replace(COLD, rounds=(1.0,) * 6),
        "bulk": changed("bulk", rounds=(1.0,) * 3)["bulk"],
    }
    text = printed(DemoResult(modes=modes, spans={}), tmp_path)
    assert "the median of 3 to 6 rounds" in text
    assert "push:" not in text
