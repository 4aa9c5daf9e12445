"""The command line. It reads settings and arguments, calls one function, and prints what came back.

Engines are imported by the commands that need them, never when this module is.
"""

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from layercast import __version__
from layercast.bench.results import What
from layercast.config import cache_folder, existing, from_sources
from layercast.errors import BadSetting, LayercastError, Missing, Refused

if TYPE_CHECKING:
    from layercast.doctor.checks import Check

LINK_GBPS = 2.0
"""The demo's link unless told otherwise: slow enough that a laptop shows what runs behind compute."""
Choice = TypeVar("Choice", bound=StrEnum)


class Dtype(StrEnum):
    """The demo's element types."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def _one_of(kind: type[Choice]) -> Callable[[str], Choice]:
    """Reads one of the words of `kind`. Typer's own way of it puts "Value error, " before what it says of others."""

    def read(word: str) -> Choice:
        if word not in list(kind):
            raise typer.BadParameter(f"{word!r} is not one of {', '.join(repr(each.value) for each in kind)}.")
        return kind(word)

    return read


app = typer.Typer(
    help="A language model's KV cache, moved layer by layer.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A setting, such as host_bytes=8GiB; may be given several times. Names end in their unit (_ms, _s, "
        "_us, _bytes), bytes may have one of their own (MiB, GiB, GB); an unknown name lists all. Default: LAYERCAST_* "
        "variables, then --config.",
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings from a TOML file. Default: none.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Also write the result as JSON. Default: not.")
]
FiguresFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="The figures as JSON. Default: a file in --out.")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"layercast {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """A language model's KV cache, moved layer by layer."""


@app.command()
def doctor(
    json: JsonFile = None,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Of a model under vLLM here: a folder, or a name already fetched. Default: of this machine.",
        ),
    ] = None,
    theirs: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Settings of AscendStore, LMCache, NIXL or vLLM's offloading (JSON or YAML), and what they become "
            "here. Default: none.",
        ),
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """What would go wrong here, and what to do. Fails only where something can't work."""
    from layercast.doctor.checks import Level
    from layercast.doctor.examine import examine

    if json is not None:
        _check_place(json)
    report = examine(vllm, theirs, config, os.environ, settings or ())
    if json is not None:
        said = msgspec.json.encode({"version": __version__, **msgspec.to_builtins(report)})
        _write(json, msgspec.json.format(said, indent=2) + b"\n")
    _print_checks(report.checks)
    if report.command:
        print(f"\n{report.command}")
    if any(check.level is Level.ERROR for check in report.checks):
        raise typer.Exit(1)


def _print_checks(checks: "tuple[Check, ...]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "blue", "warning": "yellow", "error": "bold red", "not checked": "dim"}
    table = Table(box=None, pad_edge=False, show_header=False)
    for check in checks:
        said = Text(check.found)
        if check.advice:
            said.append(f"\n-> {check.advice}", style="italic")
        table.add_row(Text(check.level, style=styles[check.level]), Text(check.name, style="bold"), said)
    Console().print(table)


@app.command()
def why(
    request: Annotated[str, typer.Argument(metavar="REQUEST", help="The request's id, or how it begins.")],
    log: Annotated[
        Path,
        typer.Argument(
            metavar="LOG", help="The engine's log, at level INFO for `layercast`.", exists=True, dir_okay=False
        ),
    ],
) -> None:
    """What the pool did for a request, or why nothing.

    Prints the request's receipts, which are in an engine's log.
    """
    from layercast.observe.receipts import receipts_in

    with log.open(errors="replace") as lines:
        receipts = receipts_in(lines, "")
    found = [receipt for receipt in receipts if receipt.request.startswith(request)]
    for receipt in found:
        print(receipt.sentence)
    if not found:
        print(f"{log} has no receipt {_instead(request, [receipt.request for receipt in receipts])}", file=sys.stderr)
        raise typer.Exit(1)


def _instead(request: str, others: list[str]) -> str:
    """What a log holds instead of a request's receipts, and what to do."""
    if others:
        few = ", ".join(list(dict.fromkeys(reversed(others)))[:3])
        return (
            f"of {request!r}, but of others, the latest: {few}. vLLM names a request by the id of its answer "
            "(cmpl-..., chatcmpl-...) and writes the receipt when it has ended"
        )
    return (
        "at all: vLLM writes them where LayercastConnector is in use and the logger `layercast` is at INFO "
        "(VLLM_LOGGING_LEVEL=INFO); an embedded engine writes none, its results have them: "
        "print(result.receipt.sentence)"
    )


@app.command()
def demo(
    json: FiguresFile = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where timeline.png, timeline.html and trace.json go.")
    ] = Path("demo-out"),
    link_gbps: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="GBIT/S", help="Pace copies to a link of this many gigabits a second; 0 = do not pace."
        ),
    ] = LINK_GBPS,
    dtype: Annotated[
        Dtype,
        typer.Option(parser=_one_of(Dtype), metavar="TYPE", help="bfloat16, float32, or auto: the quicker one here."),
    ] = Dtype.AUTO,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the converted model is kept. Default: layercast in ~/.cache."),
    ] = None,
    vllm: Annotated[bool, typer.Option("--vllm", help="In a vLLM engine on the CPU: cold, bulk, layerwise.")] = False,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """A real small model: cold, bulk, layerwise, push.

    The same long prompt is answered in each of these ways; a table, a picture and JSON tell what each took.
    """
    chosen = from_sources(config, os.environ, settings or ())  # a mistake shows before the seconds that imports take
    figures, kept = json or out / "demo.json", cache or cache_folder()
    _check_new(out, "--out")
    _check_place(figures)
    _check_folder(kept, "--cache")
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise Missing(
            "torch and transformers are not here: make demo installs them, or pip install '.[demo]' in the clone"
        )
    if vllm:
        if find_spec("vllm") is None:
            raise Missing("vLLM is not here: make demo-vllm installs its CPU build (Linux, without an NVIDIA GPU)")
        from layercast.demo.vllm import run
    else:
        from layercast.demo.scenario import run
    from layercast.demo.report import encoded, write_pictures, write_terminal
    from layercast.demo.scenario import Options

    options = Options(config=chosen, cache=kept, link_gbps=link_gbps or None, dtype=dtype.value)
    result = run(options, lambda line: print(line, file=sys.stderr, flush=True))
    write_terminal(result, out, figures)
    _write(figures, encoded(result))
    _make_folder(out)
    write_pictures(result, out)


@app.command()
def bench(
    what: Annotated[
        What,
        typer.Argument(parser=_one_of(What), metavar="WHAT", help="Measure layers, overlap, graph, busy or peer."),
    ],
    json: FiguresFile = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the picture goes.")] = Path("bench-out"),
    tokens: Annotated[int, typer.Option(min=256, metavar="TOKENS", help="layers, peer: tokens that move.")] = 8192,
    block: Annotated[int, typer.Option(min=1, metavar="TOKENS", help="Tokens in a block.")] = 16,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CACHED+NEW",
            help="overlap, graph: tokens that are loaded and computed; may be given several times. Default: three. "
            "busy takes the first.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Rounds counted, after one that warms up.")] = 15,
    brief: Annotated[
        bool, typer.Option(help="layers, overlap: what an engine would take, and its limits, alone.")
    ] = False,
) -> None:
    """What copies, gates and overlap cost on GPUs here.

    Each is measured on this machine's GPUs, beside other ways to do the same where these are installed.
    """
    from layercast.bench.command import LENGTHS, Options, lengths_of, run
    from layercast.bench.report import encoded, write_picture, write_terminal

    lengths = lengths_of(shape) if shape else LENGTHS
    options = Options(what=what, tokens=tokens, block=block, lengths=lengths, repeats=repeats, brief=brief)
    figures = json or out / f"{what}.json"
    _check_new(out, "--out")
    _check_place(figures)
    report = run(
        options,
        lambda line: print(line, file=sys.stderr, flush=True),
        lambda report: _write(figures, encoded(report)),
    )
    write_terminal(report)
    _make_folder(out)
    try:
        write_picture(report, out / f"{what}.png")
    except Refused as error:
        print(f"no picture: {error}", file=sys.stderr)
    if report.wrong:
        raise typer.Exit(1)


def _check_folder(folder: Path, option: str) -> None:
    """Raises BadSetting, before anything long has run, if `option` chose a folder that can't be written or made."""
    there = existing(folder)
    if not there.is_dir():
        where = "" if there == folder else f"{folder}: "
        raise BadSetting(f"{where}{there} is no folder; choose another with {option}")
    try:
        tempfile.TemporaryFile(dir=there).close()  # what may be written is more than permissions tell: /proc
    except OSError as error:
        raise BadSetting(f"{folder}: can't be written ({error.strerror}); choose another with {option}") from error


def _check_new(folder: Path, option: str) -> None:
    """As _check_folder; raises BadSetting too if its parent is not there either, or is /: a mistyped place, mostly."""
    _check_folder(folder, option)
    parent = folder.absolute().parent
    if existing(folder) != folder and (parent == parent.parent or existing(folder) != parent):
        raise BadSetting(f"{folder}: is not there; make it first (mkdir -p), or choose another with {option}")


def _check_place(file: Path) -> None:
    """Raises BadSetting if the file that --json chose can't be written, or is a folder."""
    if file.is_dir():
        raise BadSetting(f"{file}: is a folder; name a file with --json")
    if not file.exists():
        _check_new(file.parent, "--json")
    elif not os.access(file, os.W_OK):
        raise BadSetting(f"{file}: can't be written; choose another with --json")


def _make_folder(folder: Path) -> None:
    """Make it unless it is there, and say so."""
    if not folder.exists():
        folder.mkdir()
        print(f"made the folder {folder}", file=sys.stderr)


def _write(file: Path, content: bytes) -> None:
    """Write a file whose place has been checked."""
    _make_folder(file.parent)
    file.write_bytes(content)


def main() -> None:
    """Run the command line. A mistake of the caller's or the machine's is one line, not a traceback."""
    try:
        app()
    except LayercastError as error:
        print(f"layercast: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"layercast: {where}{error.strerror}; make room, or have it written elsewhere", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
