"""Fails when a file, a function or a class of src/ outgrows the project's limits."""

import ast
import sys
from pathlib import Path

FILE_LINES, FUNCTION_LINES, SELF_ATTRIBUTES = 400, 60, 12
ROOT = Path(__file__).resolve().parent.parent / "src"


def attributes_of(node: ast.ClassDef) -> set[str]:
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def complaints(path: Path) -> list[str]:
    text = path.read_text()
    found = []
    lines = text.count("\n")
    if lines > FILE_LINES:
        found.append(f"{path}: {lines} lines (limit {FILE_LINES})")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines (limit {FUNCTION_LINES})")
        if isinstance(node, ast.ClassDef) and len(attributes_of(node)) > SELF_ATTRIBUTES:
            found.append(f"{path}:{node.lineno}: {node.name} has over {SELF_ATTRIBUTES} attributes on self")
    return found


def main() -> int:
    files = sorted(ROOT.rglob("*.py"))
    found = [line for path in files for line in complaints(path)]
    total = sum(path.read_text().count("\n") for path in files)
    print("\n".join(found) if found else f"sizes fine: {len(files)} files, {total} lines")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
