"""Signatures of vLLM's connector base class, read from its source.

python signatures.py VERSION=path/to/v1/base.py ...     writes signatures.json beside this file
"""

import ast
import json
import sys
from pathlib import Path

FILE = Path(__file__).parent / "signatures.json"
BASES = ("KVConnectorBase_V1", "SupportsHMA")


def signatures(source):
    """Method to its kind and parameters (without self or cls; optional ones end in "?"), and whether it is abstract."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in BASES:
            found |= {item.name: _of(item) for item in node.body if isinstance(item, ast.FunctionDef)}
    return found


def _of(function):
    marks = [ast.unparse(mark) for mark in function.decorator_list]
    names = [arg.arg for arg in function.args.args][1:]
    optional = len(function.args.defaults)
    names = [f"{name}?" if at >= len(names) - optional else name for at, name in enumerate(names)]
    names += [f"**{function.args.kwarg.arg}"] if function.args.kwarg else []
    kind = "property" if "property" in marks else "classmethod" if "classmethod" in marks else "method"
    return {"kind": kind, "abstract": "abstractmethod" in marks, "parameters": names}


if __name__ == "__main__":
    found = {version: signatures(Path(path).read_text()) for version, path in (arg.split("=") for arg in sys.argv[1:])}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
