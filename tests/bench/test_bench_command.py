import json

import pytest
from typer.testing import CliRunner

from layercast.bench.command import lengths_of
from layercast.bench.report import encoded, figure, grid_of, write_picture, write_terminal
from layercast.bench.results import Report, Table, What, in_turn, spread, timed
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


def test_every_way_runs_in_turn_and_the_first_round_does_not_count():
    order = []
    ways = {name: lambda name=name: order.append(name) or len(order) for name in "ab"}
    assert in_turn(ways, 2) == {"a": [3, 5], "b": [4, 6]}
    assert order == list("ababab")


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
