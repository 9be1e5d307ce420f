"""Writes the first sentence of each public name's docstring into docs/api.md.

    python scripts/tables/api.py

docs/api.md decides the order of the names. The members of a class follow their class, in the order
of the source. Nothing is imported, so the frameworks of the integrations need not be installed.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lib.command_line import Parser

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "api.md"
ROW = re.compile(r"^\| `([\w.]+)(?:\(\))?` \|")
INTERNAL = {
    *("changes_nothing", "describe", "described", "extra_repr", "is_alike", "is_on"),
    *("parameter", "params", "placement", "refuse", "takes_params", "text"),
    # Methods of torch's classes, which mean the same here.
    *("data", "data_ptr", "grad", "named_children", "named_modules"),
}
"""Members without an underscore that only the library itself calls."""

Definition = ast.ClassDef | ast.FunctionDef


def find(name: str) -> Definition:
    """The definition of a full name, such as ``flatshard.wrap.wrap``, in whichever file it is."""
    module, _, last = name.rpartition(".")
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in reversed(ast.parse(file.read_text()).body):  # overloads come first
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == last:
            return node
        if isinstance(node, ast.ImportFrom) and {last, "*"} & {
            one.asname or one.name for one in node.names
        }:
            return find(f"{node.module}.{last}")
    raise LookupError(f"docs/api.md names {name}, which {file} neither defines nor imports")


def _members(owner: ast.ClassDef) -> Iterator[tuple[str, ast.stmt, str]]:
    """Name, definition and docstring of each method, property and member of an enum."""
    for node, after in zip(owner.body, [*owner.body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.FunctionDef):
            name, text = node.name, ast.get_docstring(node)
        elif isinstance(node, ast.Assign) and isinstance(after, ast.Expr):
            name, text = ast.unparse(node.targets[0]), ast.literal_eval(after.value)
        else:
            continue
        if text and not name.startswith("_") and name not in INTERNAL:
            yield name, node, text


def _row(name: str, node: ast.stmt, text: str) -> str:
    is_called = isinstance(node, ast.FunctionDef) and not any(
        isinstance(one, ast.Name) and one.id == "property" for one in node.decorator_list
    )
    found = re.match(r"(.+?\.)(?:\s|$)", text.partition("\n\n")[0], re.DOTALL)
    sentence = " ".join((found[1] if found else text).split()).replace("``", "`")
    collective = " *Collective.*" if "Collective: " in text else ""
    return f"| `{name}{'()' if is_called else ''}` | {sentence}{collective} |\n"


def updated(page: str) -> str:
    """The page with the sentences that docstrings have now."""
    lines, module, written = [], "", set[str]()
    for line in page.splitlines(keepends=True):
        if line.startswith("## "):
            module = line.removeprefix("## ").strip()
        row = ROW.match(line)
        if not row:
            lines.append(line)
        elif (name := row[1]).rpartition(".")[0] not in written:  # a member follows its class
            node = find(f"{module}.{name}")
            lines.append(_row(name, node, ast.get_docstring(node) or ""))
            written.add(name)
            # Methods of a framework's class are the framework's.
            if isinstance(node, ast.ClassDef) and module != "flatshard.integrations":
                lines += [_row(f"{name}.{one}", *rest) for one, *rest in _members(node)]
    return "".join(lines)


if __name__ == "__main__":
    Parser(__doc__).parse_args()
    PAGE.write_text(updated(PAGE.read_text()))
