import json
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from layercast.bench.command import lengths_of
from layercast.bench.report import encoded, figure, grid_of, write_picture, write_terminal
from layercast.bench.results import Report, Table, Timeline, What, in_turn, interval, ratio, spread, timed
from layercast.cli import app, main
from layercast.errors import BadSetting

TABLE = Table(
    title="host to device",
    rows={"contiguous": {"GB/s": 53.21987, "of contiguous": 1.0}, "layercast": {"GB/s": 51.0, "host us a layer": 4.0}},
    bar="GB/s",
    best="contiguous",
    checks={"layercast": True},
    absent={"LMCache layerwise": "not installed (lmcache)"},
    note="in turn",
)


def report_of(*tables):
    return Report(command="layercast bench layers", card="H100", versions={"torch": "2"}, tables=tables, took_s=1.0)


def test_the_ways_run_in_turn_forth_and_back_and_the_first_round_does_not_count():
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert in_turn(ways, 2) == {"a": [3, 6], "b": [4, 5]}
    assert order == list("baabba")


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=40))
def test_an_interval_holds_the_median_between_two_of_the_values(values):
    low, high = interval(values)
    assert {low, high} <= set(values)
    assert low <= statistics.median(values) <= high


def test_of_six_values_the_interval_is_all_of_them_and_of_fifteen_the_fourth_to_the_twelfth():
    assert interval([6.0, 5, 4, 3, 2, 1]) == (1, 6)
    assert interval([float(n) for n in range(15, 0, -1)]) == (4, 12)


def test_a_ratio_is_that_of_each_round_so_what_slows_a_whole_round_is_not_seen_in_it():
    theirs = [10.0, 30.0, 10.0, 50.0, 10.0, 10.0]
    found = ratio("of it", [1.1 * value for value in theirs], theirs)
    assert found == pytest.approx({"of it": 1.1, "of it, low": 1.1, "of it, high": 1.1})


def test_an_interval_stands_behind_what_lies_in_it_and_makes_no_column_of_its_own():
    row = {"ms": 3.0, "of floor": 1.13, "of floor, low": 1.12, "of floor, high": 1.2}
    grid = grid_of(Table(title="t", rows={"layerwise": row}, bar="ms"))
    assert [column.header for column in grid.columns] == ["", "ms", "of floor"]
    assert list(grid.columns[2].cells) == ["1.13 (1.12-1.20)"]


def test_a_timeline_is_summed_up_on_the_terminal_and_whole_in_the_json(capsys):
    line = Timeline(ordered=0.4, landed=(1.0, 2.0), reached=(0.5, 1.5), began=(1.0, 2.25), done=3.0)
    report = report_of(msgspec.structs.replace(TABLE, timelines={"layerwise": line}))
    write_terminal(report)
    assert "landed 1.00 to 2.00" in (said := capsys.readouterr().out)
    assert "waited 1.25 at gates" in " ".join(said.split())
    (found,) = json.loads(encoded(report))["tables"]
    assert found["timelines"]["layerwise"]["began"] == [1.0, 2.25]


def test_a_run_is_timed_from_a_quiet_device_to_its_end():
    seen = []
    host, whole = timed(lambda: seen.append("start") or (lambda: seen.append("end")), lambda: seen.append("quiet"))
    assert seen == ["quiet", "start", "end"]
    assert 0 <= host <= whole
    assert spread("ms", [3.0, 1.0, 2.0]) == {"ms": 2.0, "least": 1.0, "most": 3.0, "runs": 3.0}


def test_a_rival_that_is_not_installed_is_named_on_the_terminal_and_in_the_json(capsys):
    write_terminal(report_of(TABLE))
    said = capsys.readouterr().out
    assert "LMCache layerwise: not installed (lmcache)" in said
    assert "1 of 1" in said
    found = json.loads(encoded(report_of(TABLE)))["tables"][0]
    assert found["absent"] == {"LMCache layerwise": "not installed (lmcache)"}
    assert found["rows"]["contiguous"]["GB/s"] == 53.22


def test_a_figure_that_a_way_does_not_have_is_a_dash():
    grid = grid_of(TABLE)
    assert [column.header for column in grid.columns] == ["", "GB/s", "of contiguous", "host us a layer"]
    assert list(grid.columns[3].cells) == ["-", "4.00"]
    assert (figure(1234.5), figure(12.34), figure(1.234)) == ("1,234", "12.3", "1.23")


def test_a_check_that_failed_is_told_as_wrong(capsys):
    table = Table(title="up", rows={"x": {"ms": 1.0}}, bar="ms", checks={"bits": False, "order": True})
    report = report_of(table)
    assert report.wrong == ("up: bits",)
    write_terminal(report)
    assert "WRONG: up: bits" in capsys.readouterr().out


def test_every_report_makes_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib")
    write_picture(report_of(TABLE, TABLE), tmp_path / "layers.png")
    assert (tmp_path / "layers.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_lengths_are_cached_plus_new():
    assert lengths_of(["8192+512", "2048+256"]) == ((8192, 512), (2048, 256))
    for wrong in ("8192", "8192+", "+1", "a+b", "0+1", "8192+-1"):
        with pytest.raises(BadSetting, match="cached"):
            lengths_of([wrong])


@pytest.mark.parametrize("what", What)
def test_without_a_gpu_every_measurement_says_so_and_ends_with_2(what, monkeypatch, tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["layercast", "bench", what, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "NVIDIA GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_help_names_every_measurement():
    said = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(what in said for what in What)
