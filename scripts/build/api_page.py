"""Writes docs/api.md: every public name with its signature and docstring.

python scripts/build/api_page.py
"""

import ast
import enum
import importlib
import inspect
import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"

MODULES = {
    "flatshard": "The wrapper, and what it is told.",
    "flatshard.wrap": "Which modules become units.",
    "flatshard.checkpoint": "Checkpoints of a training, and files of a whole model.",
    "flatshard.memory_plan": "What a model will take, from its shapes alone.",
    "flatshard.diagnostics.step_report": "What a recorded step consisted of.",
}
"""Modules with public names, and a line about each."""

NAMES = {
    "flatshard.checkpoint": [
        *("save", "load", "latest", "PendingSave", "save_safetensors", "load_safetensors"),
        "full_state_dict",
        "full_optim_state_dict",
        "save_safetensors",
        "load_safetensors",
        "convert",
    ],
    "flatshard.memory_plan": ["predict", "MemoryPlan", "UnitMemory"],
    "flatshard.diagnostics.step_report": ["StepReport", "UnitReport", "Range", "Kind"],
}
"""Where a module has no ``__all__``."""

LEFT_OUT = {"check_policy", "explain_no_match", "find_units", "UnitPlan", "Policy"}
"""Names that only the library itself needs."""


OWN = {"extra_repr", "in_flat", "let_go", "parameter", "placeholder", "point_at"}
"""Methods that only the library itself calls."""


def page() -> str:
    parts = [
        "# API reference",
        "Made from the docstrings by `python scripts/build/api_page.py`. **Collective** in them: "
        "every rank must make the call.",
    ]
    for module_name, about in MODULES.items():
        module = importlib.import_module(module_name)
        names = NAMES.get(module_name) or module.__all__
        parts += [f"## {module_name}", about]
        for name in sorted(set(names) - LEFT_OUT, key=str.lower):
            parts += entry(name, getattr(module, name))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def entry(name: str, thing: Any) -> list[str]:
    if not inspect.isclass(thing):
        return [f"### {name}", *described(name, thing)]
    found = [f"### {name}", *described(name, thing)]
    for member, value in vars(thing).items():
        if member.startswith("_") or member in OWN:
            continue
        function = getattr(value, "__func__", value)  # of a static method
        if inspect.isfunction(function):
            found += [f"#### {name}.{member}", *described(member, function)]
        elif isinstance(value, property):
            found.append(f"`{name}.{member}`: {text_of(value.fget)}")
    return found


def described(name: str, thing: Any) -> list[str]:
    shown = []
    if not (inspect.isclass(thing) and issubclass(thing, BaseException)):
        shown = [f"```text\n{signature(name, thing)}\n```"]
    return [*shown, text_of(thing), *members(thing)]


def members(thing: Any) -> list[str]:
    """The meanings of an enum's members, which stand below them in its source."""
    if not (inspect.isclass(thing) and issubclass(thing, enum.Enum)):
        return []
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(thing))).body
    lines = []
    for node, below in itertools.pairwise(definition.body):
        match node, below:
            case ast.Assign(targets=[ast.Name(name)]), ast.Expr(ast.Constant(str(text))):
                text = markdown(inspect.cleandoc(text)).replace("\n", "\n  ")
                lines.append(f"- `{name}`: {text}")
    return ["\n".join(lines)] if lines else []


def signature(name: str, thing: Any) -> str:
    if hasattr(thing, "__members__"):
        return f"{name}: {', '.join(thing.__members__)}"
    own = [p for p in inspect.signature(thing).parameters.values() if p.name != "self"]
    cells, is_keyword = [], False
    for one in own:
        if one.kind is one.KEYWORD_ONLY and not is_keyword:
            cells.append("*")
            is_keyword = True
        default = "" if one.default is one.empty else f"={default_of(one.default)}"
        star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        is_keyword |= one.kind is one.VAR_POSITIONAL
        cells.append(f"{star}{one.name}{default}")
    line = f"{name}({', '.join(cells)})"
    if len(line) <= 96:
        return line
    return f"{name}(\n" + "".join(f"    {cell},\n" for cell in cells) + ")"


def default_of(value: Any) -> str:
    return str(value) if hasattr(value, "name") else repr(value)


def text_of(thing: Any) -> str:
    """A docstring as Markdown: sections as lists, code marked as it is there."""
    text = markdown(inspect.getdoc(thing) or "")
    text = re.sub(r"^(Args|Returns|Raises|Attributes):\n", r"*\1:*\n\n", text, flags=re.MULTILINE)
    # An entry of a section begins four spaces in, and may go on eight spaces in.
    text = re.sub(r"^    (\*{0,2}\w+): ", r"- `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"^    (?! )(?=\S)", "", text, flags=re.MULTILINE)
    return re.sub(r"^ {8}(?=\S)", "  ", text, flags=re.MULTILINE)


def markdown(text: str) -> str:
    return text.replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page())
