"""The modules of dtorch import only downwards: read from the source, nothing is run.

The tables below are the whole policy. A module that no table names is an error, so a new file has
to be given its place.
"""

import ast
import graphlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

pytestmark = pytest.mark.once
PACKAGE = Path(__file__).resolve().parents[1] / "dtorch"

# Lowest first. A module or folder imports its own row and the rows above it in this list.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors",),
    ("mesh",),
    ("placement",),
    ("spec",),
    ("redistribution",),
    ("program", "passes", "lowering", "communication"),
    ("strictness",),
    ("attention_kernels", "custom_ops", "expert_ops", "local_ops"),
    ("rules",),
    (
        "elementwise",
        "accelerator_results",
        "cpu_results",
        "refusals",
        "infer",
        "propagation",
        "decision",
    ),
    ("scalars", "source"),
    ("builder",),
    ("runtime",),
    ("local_specs", "inductor", "compilation", "graphs"),
    ("parts",),
    ("printing", "aliases", "tensor"),
    ("memory",),
    ("tree",),
    ("sharded_forms",),
    ("stages", "accelerator_functions"),
    ("gradients", "functionalization", "symbolic", "handlers", "tracing_modes", "tracer"),
    ("generator",),
    ("arguments", "cache", "compiled"),
    ("recording", "calls", "memo", "storages"),
    ("dispatch",),
    ("factories",),
    ("jit", "transforms", "axis_collectives", "trials", "shard_map"),
    ("random", "debug", "profiling", "nn", "parallel"),
    ("models",),
    ("distributed_spec", "build"),
    ("__init__",),  # dtorch itself imports everything, so nothing but test helpers imports it
    ("test",),
)
# Pure planning: no threads, no event loops, no processes.
PLANNING = LAYERS[: LAYERS.index(("runtime",))]
NOT_IN_PLANNING = {"threading", "_thread", "queue", "concurrent", "asyncio", "multiprocessing"}
LOCKS_IN_PLANNING = {"spec"}  # the lock of the table of specs; it starts no thread
# nn knows nothing of sharding.
FORBIDDEN = {
    "nn": {"mesh", "placement", "spec", "rules", "redistribution", "parallel"},
}
# What importing dtorch may import, and what only a function that needs it may, or a statement
# that goes on without it.
REQUIRED = {"torch", "optree", "numpy"} | sys.stdlib_module_names
OPTIONAL = {"diffusers", "safetensors", "transformers", "tokenizers", "tqdm", "IPython"}


When = Literal["module", "function", "type checking", "if installed"]


@dataclass(frozen=True)
class Import:
    """One imported module, where it stands and when it is imported."""

    importer: str
    imported: str
    line: int
    when: When

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def test_every_module_has_a_layer() -> None:
    assert modules_without_layer(PACKAGE) == []


def test_imports_go_downwards() -> None:
    assert upward_imports(PACKAGE) == []


def test_no_import_cycle() -> None:
    assert import_cycle(PACKAGE) == []


def test_imports_stand_at_module_level() -> None:
    assert imports_inside_functions(PACKAGE) == []


def test_dtorch_imports_without_optional_packages() -> None:
    assert undeclared_imports(PACKAGE) == []


def test_planning_knows_no_threads() -> None:
    assert threads_in_planning(PACKAGE) == []


# Each check finds what it is there for, in a package of the smallest files that break it.


def test_check_finds_a_module_without_layer(tmp_path: Path) -> None:
    root = write(tmp_path, {"utils.py": "", "mesh.py": ""})
    assert modules_without_layer(root) == ["dtorch.utils"]


@pytest.mark.parametrize(
    "source",
    [
        "import dtorch.tensor",
        "from dtorch import tensor",
        "from dtorch.tensor import Tensor",
        "from . import tensor",
        "from .tensor import Tensor",
        "def f():\n    from dtorch.tensor import Tensor",
        "if TYPE_CHECKING:\n    from dtorch.tensor import Tensor",
    ],
)
def test_check_finds_an_upward_import(tmp_path: Path, source: str) -> None:
    root = write(tmp_path, {"mesh.py": source, "tensor.py": "from dtorch.mesh import DeviceMesh"})
    line = source.count("\n") + 1
    assert upward_imports(root) == [f"dtorch.mesh:{line} imports dtorch.tensor"]


def test_check_finds_an_upward_import_out_of_a_folder(tmp_path: Path) -> None:
    source = "from ..builder import Builder\nfrom .registry import register\nfrom ..spec import S"
    files = {"rules/view.py": source, "rules/registry.py": "", "builder.py": "", "spec.py": ""}
    assert upward_imports(write(tmp_path, files)) == ["dtorch.rules.view:1 imports dtorch.builder"]


def test_check_finds_an_import_of_the_whole_package(tmp_path: Path) -> None:
    files = {"nn/linear.py": "import dtorch", "nn/norm.py": "from dtorch import rand"}
    assert upward_imports(write(tmp_path, files)) == [
        "dtorch.nn.linear:1 imports dtorch",
        "dtorch.nn.norm:1 imports dtorch",
    ]


def test_check_finds_sharding_in_nn(tmp_path: Path) -> None:
    root = write(tmp_path, {"nn/linear.py": "from dtorch.spec import S", "spec.py": ""})
    assert upward_imports(root) == ["dtorch.nn.linear:1 imports dtorch.spec"]


def test_check_finds_a_cycle_inside_a_layer(tmp_path: Path) -> None:
    files = {"functional.py": "from .trace import t", "trace.py": "from .functional import f"}
    root = write(tmp_path, files)
    assert upward_imports(root) == []
    assert sorted(set(import_cycle(root))) == ["dtorch.functional", "dtorch.trace"]
    (root / "trace.py").write_text("if TYPE_CHECKING:\n    from .functional import f")
    assert import_cycle(root) == []


def test_check_finds_an_import_inside_a_function(tmp_path: Path) -> None:
    source = "import math\nclass C:\n    def f(self):\n        import numpy\n        import tqdm\n"
    root = write(tmp_path, {"tensor.py": source})
    assert imports_inside_functions(root) == ["dtorch.tensor:4 imports numpy"]


def test_check_finds_an_undeclared_package(tmp_path: Path) -> None:
    source = (
        "import torch.nn, safetensors\n"
        "try:\n    import einops\nexcept ImportError:\n    pass\n"
        "try:\n    import tqdm\nexcept ImportError:\n    pass\n"
        "try:\n    import IPython\nexcept ValueError:\n    pass\n"
    )
    assert undeclared_imports(write(tmp_path, {"tensor.py": source})) == [
        "dtorch.tensor:1 imports safetensors",
        "dtorch.tensor:3 imports einops",
        "dtorch.tensor:11 imports IPython",
    ]


def test_check_finds_threads_in_planning(tmp_path: Path) -> None:
    source = "from concurrent.futures import Future"
    files = {"program.py": source, "runtime/worker.py": source}
    files |= {"spec.py": "import queue\nimport threading", "lowering.py": "import threading"}
    assert threads_in_planning(write(tmp_path, files)) == [
        "dtorch.lowering:1 imports threading",
        "dtorch.program:1 imports concurrent.futures",
        "dtorch.spec:1 imports queue",
    ]


def modules_without_layer(package: Path) -> list[str]:
    return [name for name in sources(package) if layer(name) is None]


def upward_imports(package: Path) -> list[str]:
    """Imports of a higher layer, and those that FORBIDDEN names."""

    def is_upward(found: Import) -> bool:
        source, target = layer(found.importer), layer(found.imported)
        forbidden = FORBIDDEN.get(part(found.importer), set())
        if source is None or target is None:  # another check reports it
            return False
        return target > source or part(found.imported) in forbidden

    return [str(found) for found in imports(package) if inside(found.imported) and is_upward(found)]


def import_cycle(package: Path) -> list[str]:
    """The modules of one cycle in order, the first of them again at the end; or nothing.

    An import for the type checker is never carried out, so it closes no cycle; upward_imports
    keeps it from naming a higher layer.
    """
    graph: dict[str, set[str]] = {name: set() for name in sources(package)}
    for found in imports(package):
        if inside(found.imported) and found.when != "type checking":
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def imports_inside_functions(package: Path) -> list[str]:
    return [
        str(found)
        for found in imports(package)
        if found.when == "function" and top(found.imported) not in OPTIONAL
    ]


def undeclared_imports(package: Path) -> list[str]:
    return [
        str(found)
        for found in imports(package)
        if not inside(found.imported)
        and (
            (found.when == "module" and top(found.imported) not in REQUIRED)
            or (found.when == "if installed" and top(found.imported) not in REQUIRED | OPTIONAL)
        )
    ]


def threads_in_planning(package: Path) -> list[str]:
    planning = {name for row in PLANNING for name in row}
    return [
        str(found)
        for found in imports(package)
        if part(found.importer) in planning
        and top(found.imported) in NOT_IN_PLANNING
        and not (found.imported == "threading" and part(found.importer) in LOCKS_IN_PLANNING)
    ]


def layer(module: str) -> int | None:
    """The row of LAYERS that a module of dtorch belongs to."""
    rows = (row for row, names in enumerate(LAYERS) if part(module) in names)
    return next(rows, None)


def part(module: str) -> str:
    """``dtorch.rules.view`` is part of ``rules``; ``dtorch`` itself of ``__init__``."""
    return module.split(".")[1] if "." in module else "__init__"


def top(module: str) -> str:
    return module.split(".")[0]


def inside(module: str) -> bool:
    return top(module) == "dtorch"


def sources(package: Path) -> dict[str, Path]:
    """Module names and their files."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        names = ("dtorch", *path.relative_to(package).with_suffix("").parts)
        found[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return found


def imports(package: Path) -> list[Import]:
    modules = sources(package)
    found: list[Import] = []
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        home = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node, when in import_statements(tree):
            for imported in imported_modules(node, home, modules):
                found.append(Import(name, imported, node.lineno, when))
    return found


def import_statements(
    node: ast.AST, when: When = "module"
) -> Iterator[tuple[ast.Import | ast.ImportFrom, When]]:
    """The import statements below a node, each with when it is carried out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, when
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from import_statements(child, "function")
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from import_statements(child, "type checking")
        elif isinstance(child, ast.Try) and when == "module" and survives_import_error(child):
            yield from import_statements(child, "if installed")
        else:
            yield from import_statements(child, when)


def survives_import_error(node: ast.Try) -> bool:
    """Whether a handler of a try statement names ImportError."""
    return any(h.type is not None and "ImportError" in ast.unparse(h.type) for h in node.handlers)


def imported_modules(
    node: ast.Import | ast.ImportFrom, home: str, modules: dict[str, Path]
) -> Iterator[str]:
    """Absolute names of the modules that a statement in the package ``home`` imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    base = node.module or ""
    if node.level:
        above = home.split(".")[: len(home.split(".")) - (node.level - 1)]
        base = ".".join([*above, base] if base else above)
    for alias in node.names:
        submodule = f"{base}.{alias.name}"
        yield submodule if submodule in modules else base


def write(folder: Path, files: dict[str, str]) -> Path:
    """A package of the given sources."""
    for name, source in files.items():
        path = folder / "dtorch" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder / "dtorch"
