"""Prints the size of the package, what one step executes of it, and what it reaches into.

    python scripts/measure/structure.py [--repo DIR] [--step native|sockets|auto] [--json PATH]

Sizes are lines of code: comments, docstrings and blank lines are not counted. The core is all but
the extras, the checkpoints and the integrations. Sizes are read from the source of any checkout,
which is not imported. `--step` runs `plain_step.py` on two ranks. A private name is an attribute
`_x` of something that is not `self` or `cls`. A mutable global is a name of a module that some
function changes.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from lib.command_line import Parser
from lib.output import output_file, write_json

ORDER = (
    *("options", "plan", "memory", "precision", "comm", "collectives", "tensor", "engine"),
    *("optimizer", "state", "module", "wrapper", "extras", "checkpoint"),
    "integrations",
)
"""A package imports those before it; the modules beside them are what users import."""

BESIDE = ("extras", "checkpoint", "integrations")
"""What is beside the core."""

TORCHS = {"_buffers", "_modules", "_parameters", "_version"}
"""Private names of torch's that the package reads, and has too."""

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
        """First part of the path: a folder, or the name of a module that users import."""
        return self.name.partition("/")[0].removesuffix(".py")

    @property
    def part(self) -> str:
        """The package, or the single extra."""
        first, *rest = self.name.split("/")
        return "/".join((first, *rest[:-1][:1])) if first == "extras" else self.package


@dataclass
class Size:
    """Lines of code and modules; comments, which cost nothing, are counted apart."""

    modules: int = 0
    code_lines: int = 0
    core_lines: int = 0
    comment_lines: int = 0
    lines_by_package: dict[str, int] = field(default_factory=dict)
    repeated_names: list[str] = field(default_factory=list)
    strict_zips_in_core: int = 0


@dataclass
class Reach:
    """What modules read and change of each other."""

    imports_against_the_order: int
    private_of_module: list[str]
    private_of_package: list[str]
    mutable_globals: list[str]


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


def code_and_comment_lines(source: Source) -> tuple[int, int]:
    """Lines with code, and lines with nothing but a comment."""
    code: set[int] = set()
    comments: set[int] = set()
    blank = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in blank:
            code.update(range(token.start[0], token.end[0] + 1))
    code -= docstring_lines(source.tree)
    return len(code), len(comments - code)


def measure_size(repo: Path) -> Size:
    found = Size()
    names: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for source in read(repo):
        code, comments = code_and_comment_lines(source)
        found.modules += 1
        found.code_lines += code
        found.comment_lines += comments
        lines[source.part] += code
        if source.package not in BESIDE:
            found.core_lines += code
            found.strict_zips_in_core += strict_zips(source.tree)
        names[Path(source.name).name] += 1
    del names["__init__.py"]
    found.lines_by_package = dict(lines.most_common())
    found.repeated_names = sorted(name for name, number in names.items() if number > 1)
    return found


def strict_zips(tree: ast.Module) -> int:
    """Calls of ``zip(..., strict=True)``: each passes lists whose entries belong together."""
    return sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "zip"
        and any(ast.unparse(keyword) == "strict=True" for keyword in node.keywords)
        for node in ast.walk(tree)
    )


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
        return source.package if by_package else source.name

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


# --------------------------------------------------------------------------------- one plain step


def trace_step(repo: Path, transport: str) -> dict[str, tuple[int, int]]:
    """For each file that one plain step passes, the functions and lines that it executes."""
    program = Path(__file__).with_name("plain_step.py")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(program), transport],
        env={**os.environ, "PYTHONPATH": str(repo.resolve()), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return {name: tuple(executed) for name, executed in json.loads(done.stdout).items()}


# ------------------------------------------------------------------------------------- the figures


def measure_reach(repo: Path) -> Reach:
    sources = read(repo)
    return Reach(
        imports_against_the_order=against_the_order(sources),
        private_of_module=foreign_reads(sources, by_package=False),
        private_of_package=foreign_reads(sources, by_package=True),
        mutable_globals=mutable_globals(sources),
    )


def show_size(size: Size) -> None:
    for name, lines in size.lines_by_package.items():
        print(f"{name:38}{lines:6}")
    print(f"{'package, lines of code':38}{size.code_lines:6} in {size.modules} modules")
    print(f"{'core, lines of code':38}{size.core_lines:6}")
    print(f"{'lines with only a comment':38}{size.comment_lines:6}")
    print(f"{'zip(..., strict=True) in the core':38}{size.strict_zips_in_core:6}")
    print(f"{'names of several files':38}{', '.join(size.repeated_names) or '-'}")


def show_reach(reach: Reach) -> None:
    rows = {
        "imports against the order": reach.imports_against_the_order,
        "reads of another module's privates": len(reach.private_of_module),
        "reads of another package's privates": len(reach.private_of_package),
        "mutable globals": len(reach.mutable_globals),
    }
    for name, number in rows.items():
        print(f"{name:38}{number:6}")


def show_step(transport: str, executed: dict[str, tuple[int, int]]) -> None:
    for name, (functions, lines) in executed.items():
        print(f"{name:44}{functions:4} functions {lines:5} lines")
    functions, lines = map(sum, zip(*executed.values(), strict=True))
    print(
        f"{transport}: one plain step executes {lines} lines in {functions} functions of "
        f"{len(executed)} files"
    )


def main() -> None:
    parser = Parser(__doc__)
    here = Path(__file__).resolve().parents[2]
    parser.add_argument("--repo", type=Path, default=here, help="the checkout (this one)")
    parser.add_argument(
        "--step", choices=("native", "sockets", "auto"), help="what one step over it executes"
    )
    parser.add_argument(
        "--json", type=output_file, metavar="PATH", help="write figures, lists there"
    )
    args = parser.parse_args()
    if not (args.repo / "flatshard").is_dir():
        parser.error(f"--repo: there is no flatshard in {args.repo}")
    size, reach = measure_size(args.repo), measure_reach(args.repo)
    show_size(size)
    show_reach(reach)
    executed = trace_step(args.repo, args.step) if args.step else {}
    if args.step:
        show_step(args.step, executed)
    write_json(args.json, {**asdict(size), **asdict(reach), "step": executed})


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
