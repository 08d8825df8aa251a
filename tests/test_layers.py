"""Imports point down: kernels, then state, models, the engine, and the user's surfaces on top."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (
    ("pallas_kernels",),
    ("jaxstate.errors", "jaxstate.typing", "jaxstate.values"),
    ("jaxstate.state",),
    ("jaxstate.models",),
    (
        "jaxstate.request",
        "jaxstate.text",
        "jaxstate.plan",
        "jaxstate.rules",
        "jaxstate.packing",
        "jaxstate.priorities",
        "jaxstate.prefix",
        "jaxstate.prefix_store",
        "jaxstate.schedule",
        "jaxstate.readings",
        "jaxstate.draft",
        "jaxstate.page",
        "jaxstate.admission",
        "jaxstate.sizing",
        "jaxstate.scheduler",
        "jaxstate.sampling",
        "jaxstate.step",
        "jaxstate.mesh",
        "jaxstate.stats",
        "jaxstate.ranks",
        "jaxstate.progress",
        "jaxstate.programs",
        "jaxstate.compilation",
        "jaxstate.stats",
        "jaxstate.prefixes",
        "jaxstate.engine",
        "jaxstate.sequences",
        "jaxstate.runner",
        "jaxstate.lm",
        "jaxstate",  # the package's front: names of the layers up to here
    ),
    ("jaxstate.serve", "jaxstate.ray"),
)
OURS = ("jaxstate", "pallas_kernels")


def layer(module: str) -> int:
    """The layer of the longest listed name that the module lies under."""
    best = {
        name: level
        for level, names in enumerate(LAYERS)
        for name in names
        if module == name or (module.startswith(name + ".") and name != "jaxstate")
    }
    if not best:
        raise LookupError(f"{module} has no layer; add it to LAYERS")
    return best[max(best, key=len)]


def imports(source: str, module: str, is_package: bool) -> set[str]:
    """Every module of ours that a file names in an import, wherever in the file it stands."""
    package = module if is_package else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = parts[: len(parts) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import name` may import the module package.name.
            found |= {
                f"{origin}.{alias.name}" if is_module(f"{origin}.{alias.name}") else origin
                for alias in node.names
            }
    return {name for name in found if name.split(".")[0] in OURS}


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def modules() -> dict[str, Path]:
    files = [path for package in OURS for path in sorted((ROOT / package).rglob("*.py"))]
    names = {path: path.relative_to(ROOT).with_suffix("").parts for path in files}
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for path, parts in names.items()
    }


@pytest.mark.parametrize("module", modules())
def test_imports_point_down(module):
    path = modules()[module]
    for name in imports(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
        assert layer(name) <= layer(module), f"{module} imports {name}, which lies above it"


def test_an_upward_import_is_seen():
    """What the walk must find: plain, relative, and hidden inside a function."""
    for source in (
        "import jaxstate.plan",
        "from jaxstate import plan",
        "from jaxstate.plan import StepPlan",
        "from .. import plan",
        "from ..plan import StepPlan",
        "def f():\n    import jaxstate.plan as e\n    return e",
    ):
        assert imports(source, "jaxstate.state.pool", False) == {"jaxstate.plan"}, source
    assert imports("from . import plan", "jaxstate", True) == {"jaxstate.plan"}
    assert layer("jaxstate.plan") > layer("jaxstate.models.mamba2") > layer("jaxstate.state.pool")
    assert layer("jaxstate.state") > layer("jaxstate.errors") > layer("pallas_kernels.mosaic.ssd")
    with pytest.raises(LookupError, match=r"jaxstate\.newcomer has no layer"):
        layer("jaxstate.newcomer")
