"""Writes docs/settings.md from layercast's Config: each setting's default, and what its docstring says.

Usage: python scripts/settings.py
"""

import ast
import inspect
import json
from pathlib import Path

import msgspec

from layercast import config

PAGE = Path(__file__).resolve().parent.parent / "docs" / "settings.md"
INTRO = """# Settings

Written by `python scripts/settings.py` from the docstrings of [`Config`](../src/layercast/config.py).

In vLLM they stand in `"kv_connector_extra_config"`, in Python in `Config(host_bytes="8GiB")`. `layercast demo` and
`layercast doctor` take a TOML file (`--config`), variables (`LAYERCAST_HOST_BYTES=8GiB`) and `--set host_bytes=8GiB`;
of these the later one wins. `_bytes` may have a unit: `8GiB`, `500MB`. A name or a value that is unknown is refused.

| setting | default | what it is |
| --- | --- | --- |
"""


def docstrings(kind: type) -> dict[str, str]:
    """What stands below each field of a class, as one line."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        match field, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found


def default_of(field: msgspec.structs.FieldInfo) -> str:
    """As a user would write it; of one that is computed, how."""
    if field.default_factory is not msgspec.NODEFAULT:
        return (inspect.getdoc(field.default_factory) or "").rstrip(".")
    (written,) = config.as_written({field.name: field.default}).values()
    return f"`{written if isinstance(written, str) and written else json.dumps(written)}`"


def page() -> str:
    """The whole text of docs/settings.md."""
    told = docstrings(config.Config)
    fields = msgspec.structs.fields(config.Config)
    return INTRO + "".join(f"| `{each.name}` | {default_of(each)} | {told[each.name]} |\n" for each in fields)


if __name__ == "__main__":
    PAGE.write_text(page())
