"""What `layercast doctor` was asked to look at, and its report. Looks through the other modules of this room."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from layercast.config import from_mapping, from_sources
from layercast.doctor.checks import Check, Level, after_refusals
from layercast.doctor.machine import gather, judge, settled
from layercast.doctor.model import config_of, model_of, weight_bytes
from layercast.doctor.translate import read, translate
from layercast.doctor.vllm import flag_of, judge_model, serve_command, transfer_of

FOR_A_MODEL = ("gpu", "memory", "memlock", "shm", "folder")
"""What of the machine matters to a model that vLLM serves; of these, the folder to settings without a model."""


class Report(msgspec.Struct, frozen=True):
    """Findings, and what to type after them (empty where there is nothing)."""

    checks: tuple[Check, ...]
    command: str = ""


def examine(
    model: str | None, theirs: Path | None, config_file: Path | None, environ: Mapping[str, str], pairs: Sequence[str]
) -> Report:
    """Of this machine; or of a model under vLLM, of another connector's settings, or of both together.

    Raises what can't be read: Missing, BadSetting, UnknownSetting. Settings given in `pairs` win over translated ones.
    """
    facts = gather(config_file, environ, pairs)
    if model is None and theirs is None:
        return _report(judge(facts))
    chosen, role = from_sources(config_file, environ, pairs), "kv_both"
    checks: tuple[Check, ...] = ()
    if theirs is not None:
        told = {name: getattr(chosen, name) for name in (pair.partition("=")[0] for pair in pairs)}
        found = translate(read(theirs), told)
        role, checks = found.role, found.checks
        chosen = from_mapping(msgspec.to_builtins(chosen) | found.settings)
        if model is None:
            folder = (check for check in judge(settled(facts, chosen)) if check.name == "folder")
            return _report((*checks, *folder), shlex.join(flag_of(transfer_of(role, found.settings))))
    assert model is not None
    known = model_of(config_of(model, environ))
    weights = weight_bytes(model, environ)
    facts = msgspec.structs.replace(settled(facts, chosen), weight_bytes=0 if facts.gpu and weights else weights)
    machine = (check for check in judge(facts) if check.name in FOR_A_MODEL)
    return _report(
        (*checks, *judge_model(known, facts), *machine), serve_command(_folder_of(model), known, facts, role)
    )


def _report(checks: Iterable[Check], command: str = "") -> Report:
    """What rests on a refusal is not checked, and no command is offered that would fail."""
    checks = tuple(after_refusals(checks))
    return Report(checks, "" if any(check.level is Level.ERROR for check in checks) else command)


def _folder_of(model: str) -> str:
    """What vLLM takes for a model: of a config's file, the folder it lies in."""
    return str(Path(model).absolute().parent) if Path(model).is_file() else model
