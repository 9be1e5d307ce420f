"""Prints the figures of the package's structure: its size, its core path, and what it reaches into.

    python scripts/measure/structure.py [--repo DIR] [--json PATH]

Reads source only, and imports nothing of it, so it works on any checkout, with or without packages
inside `flatshard/`. A private name is an attribute `_x` of something that is not `self` or `cls`.
A mutable global is a name of a module that some function changes. The files that a parameter, a
gradient and an optimizer step pass are those that docs/architecture.md lists.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command_line import Parser
from output_files import output_file, write_json

ORDER = (
    *("options", "plan", "memory", "precision", "comm", "tensor", "engine", "optimizer"),
    *("diagnostics", "state", "module", "compat", "wrapper", "extras", "checkpoint"),
    "integrations",
)
"""A package imports those before it; the modules beside them are what users import."""

CORE = (
    *("plan/layout.py", "plan/schedule.py"),
    *("comm/communicator.py", "comm/work.py", "comm/topology.py", "comm/transports/native.py"),
    "tensor/sharded_tensor.py",
    *("engine/hooks.py", "engine/forward.py", "engine/backward.py", "engine/unit.py"),
    *("engine/handle.py", "engine/gather.py", "engine/param_views.py", "engine/grad_*.py"),
    *("engine/prefetch.py", "engine/saved_tensors.py", "engine/reduce_queue.py"),
    "engine/context.py",
)
"""What every step of every strategy passes."""

FLAT_CORE = (
    *("layout", "schedule", "collectives", "pending", "topology", "communicators"),
    *("shard_tensor", "unit", "context", "handle", "param_views", "gradients", "reduction"),
    *("grad_publisher", "portions", "prefetch", "saved_tensors"),
)
"""The same where all modules lie in one folder."""

TORCHS = {"_buffers", "_modules", "_parameters", "_version"}
"""Private names of torch's that the package reads, and has too."""

JOURNEYS = ("parameter", "gradient", "optimizer step")
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"),
    *("popleft", "remove", "setdefault", "update"),
}


@dataclass(frozen=True)
class Source:
    """A module: its path below the package's folder, its lines, its tree."""

    name: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        return self.name.rpartition("/")[0].partition("/")[0]


@dataclass
class Figures:
    """All figures of a checkout; a list names what the number before it counts."""

    modules: int = 0
    lines: int = 0
    code_lines: int = 0
    comment_lines: int = 0
    trailing_comments: int = 0
    core_lines: int = 0
    core_files: list[str] = field(default_factory=list)
    exempt_imports: int = 0
    private_of_module: int = 0
    private_of_package: int | None = None
    private_reads: list[str] = field(default_factory=list)
    mutable_globals: list[str] = field(default_factory=list)
    journeys: dict[str, list[str]] = field(default_factory=dict)


def read(repo: Path) -> list[Source]:
    folder = repo / "flatshard"
    sources = []
    for path in sorted(folder.rglob("*.py")):
        text = path.read_text()
        sources.append(Source(path.relative_to(folder).as_posix(), text, ast.parse(text)))
    return sources


# ------------------------------------------------------------------------------------------- lines


def docstring_lines(tree: ast.Module) -> set[int]:
    """Lines of strings that stand alone: docstrings, and what is said below an attribute."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_and_comment_lines(source: Source) -> tuple[int, int, int]:
    """Lines with code; lines with nothing but a comment; comments behind code."""
    code: set[int] = set()
    comments: set[int] = set()
    blank = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstring_lines(source.tree)
    return len(code), len(comments - code), len(comments & code)


def is_core(source: Source, flat: bool) -> bool:
    if flat:
        return source.name.removesuffix(".py") in FLAT_CORE
    return any(Path(source.name).match(pattern) for pattern in CORE)


# ----------------------------------------------------------------------------------------- imports


def against_the_order(sources: list[Source]) -> int:
    """Imports of a package that comes later."""
    count = 0
    for source in sources:
        if source.package not in ORDER:
            continue
        allowed = ORDER[: ORDER.index(source.package) + 1]
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatshard."):
                count += (node.module or "").split(".")[1] not in allowed
    return count


def named_exceptions(repo: Path) -> int:
    """The pairs in NEIGHBOURS, a list that the flat layout's test of layers had."""
    for path in (repo / "tests").rglob("test_layers.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEIGHBOURS":
                return sum(map(len, ast.literal_eval(node.value).values()))
    return 0


# ---------------------------------------------------------------------------------------- privates


def private_reads(source: Source) -> Iterator[tuple[str, int]]:
    """Private names that a module reads from something else, and their lines."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.attr, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatshard"):
            yield from ((one.name, node.lineno) for one in node.names if is_private(one.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in TORCHS


def private_definitions(source: Source) -> set[str]:
    """Private names that a module gives to its own things."""
    found = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=value):
                found |= {e.value for e in ast.walk(value) if isinstance(e, ast.Constant)}
    return {name for name in found if isinstance(name, str) and is_private(name)}


def foreign_reads(sources: list[Source], by_package: bool) -> list[str]:
    """Reads of privates that are defined, but not where they are read."""

    def place(source: Source) -> str:
        return source.package or source.name if by_package else source.name

    defined: dict[str, set[str]] = {}
    for source in sources:
        for name in private_definitions(source):
            defined.setdefault(name, set()).add(place(source))
    return [
        f"{source.name}:{line} {name}"
        for source in sources
        for name, line in private_reads(source)
        if defined.get(name, set()) - {place(source)} and place(source) not in defined[name]
    ]


# ----------------------------------------------------------------------------------------- globals


def mutable_globals(sources: list[Source]) -> list[str]:
    """Names of modules that functions assign again, or whose contents they change."""
    found = set()
    for source in sources:
        names = {name for node in source.tree.body for name in assigned(node)}
        origins = dict.fromkeys(names, source.name) | imported_names(source)
        for function in ast.walk(source.tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                own = local_names(function)
                found |= {
                    f"{origins[name]}: {name}"
                    for name in changed(function)
                    if name in origins and name not in own
                }
    known = {f"{s.name}: {n}" for s in sources for node in s.tree.body for n in assigned(node)}
    return sorted(found & known)


def assigned(node: ast.stmt) -> list[str]:
    """Names that a statement of a module binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def imported_names(source: Source) -> dict[str, str]:
    """For each name that comes from another module of the package, that module's file."""
    return {
        one.asname or one.name: (node.module or "").partition(".")[2].replace(".", "/") + ".py"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flatshard.")
        for one in node.names
    }


def local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    nodes = list(ast.walk(function))
    shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    stored = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return (stored | {n.arg for n in nodes if isinstance(n, ast.arg)}) - shared


def changed(function: ast.AST) -> set[str]:
    """Names that a function declares global, or changes the contents of."""
    found = set()
    for node in ast.walk(function):
        match node:
            case ast.Global(names=names):
                found.update(names)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)):
                if attr in MUTATORS:
                    found.add(name)
            case (
                ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
                | ast.Attribute(value=ast.Name(id=name), ctx=ast.Store() | ast.Del())
            ):
                found.add(name)
    return found


# ------------------------------------------------------------------------------------- the figures


def journeys(repo: Path) -> dict[str, list[str]]:
    """For each journey that docs/architecture.md describes, the files in its numbered list."""
    page = repo / "docs" / "architecture.md"
    if not page.exists():
        return {}
    sections = re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)
    found = {}
    for name in JOURNEYS:
        for section in sections:
            if re.match(rf"The life of an? {name}$", section.partition("\n")[0]):
                found[name] = re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)
    return found


def measure(repo: Path) -> Figures:
    sources = read(repo)
    flat = not any(source.package for source in sources)
    sizes = [code_and_comment_lines(source) for source in sources]
    core = [source for source in sources if is_core(source, flat)]
    return Figures(
        modules=len(sources),
        lines=sum(count_lines(source) for source in sources),
        code_lines=sum(code for code, _, _ in sizes),
        comment_lines=sum(comments for _, comments, _ in sizes),
        trailing_comments=sum(trailing for _, _, trailing in sizes),
        core_lines=sum(count_lines(source) for source in core),
        core_files=[f"{source.name} {count_lines(source)}" for source in core],
        exempt_imports=named_exceptions(repo) if flat else against_the_order(sources),
        private_of_module=len(foreign_reads(sources, by_package=False)),
        private_of_package=None if flat else len(foreign_reads(sources, by_package=True)),
        private_reads=foreign_reads(sources, by_package=not flat),
        mutable_globals=mutable_globals(sources),
        journeys=journeys(repo),
    )


def count_lines(source: Source) -> int:
    return source.text.count("\n")


def show(figures: Figures) -> None:
    rows = {
        "modules": figures.modules,
        "lines": figures.lines,
        "code lines": figures.code_lines,
        "comment lines": f"{figures.comment_lines} "
        f"({100 * figures.comment_lines / figures.lines:.1f} %)",
        "comments behind code": f"{figures.trailing_comments}; with comment lines, one for "
        f"{figures.code_lines / (figures.comment_lines + figures.trailing_comments):.1f} lines",
        "core path, lines": f"{figures.core_lines} in {len(figures.core_files)} files",
        "imports exempt from the order": figures.exempt_imports,
        "reads of another module's privates": figures.private_of_module,
        "reads of another package's privates": figures.private_of_package,
        "mutable globals": len(figures.mutable_globals),
    }
    for name, value in rows.items():
        print(f"{name:38}{'-' if value is None else value}")
    for name in JOURNEYS:
        files = figures.journeys.get(name, [])
        print(f"{f'files that a {name} passes':38}{len(files) or '-'}  {', '.join(files)}")


def main() -> None:
    parser = Parser(__doc__)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--repo", type=Path, default=here, help="the checkout (this one)")
    parser.add_argument(
        "--json", type=output_file, metavar="PATH", help="write figures, lists there"
    )
    args = parser.parse_args()
    if not (args.repo / "flatshard").is_dir():
        parser.error(f"--repo: there is no flatshard in {args.repo}")
    figures = measure(args.repo)
    show(figures)
    write_json(args.json, asdict(figures))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
