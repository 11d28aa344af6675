"""The house keeps its shape (docs/architecture.md): .importlinter checks the floors, this what it cannot say."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import grimp
import pytest
from support.source import nodes, parsed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import meshwright
from meshwright.core.private_names import TABLE

HOUSE = Path(meshwright.__file__).parent
FILES = {path.relative_to(HOUSE).as_posix(): path for path in sorted(HOUSE.rglob("*.py"))}
LONGEST = 600
LONGEST_FUNCTION = 80
"""Lines, without the docstring."""


def reached(tree: ast.AST, package: str = "") -> Iterator[str]:
    """Dotted names that code of ``package`` imports or reaches when it runs.

    Imports for annotations alone do not count.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from reached(ast.Module(node.orelse, []), package)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        yield from reached(node, package)


def names_in(place: str) -> set[str]:
    package = ".".join(["meshwright", *Path(place).parts[:-1]])
    return set(reached(parsed(FILES[place].read_text(encoding="utf-8")), package))


def is_under(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def techniques() -> list[str]:
    """The files that order imports and that have an ``apply`` of their own."""
    ordered = names_in("distributed/order.py")
    found = (place for place in FILES if "meshwright." + place.removesuffix(".py").replace("/", ".") in ordered)
    bodies = {place: parsed(FILES[place].read_text(encoding="utf-8")).body for place in found}
    return [
        place
        for place, body in bodies.items()
        if any(isinstance(node, ast.FunctionDef) and node.name == "apply" for node in body)
    ]


def test_the_tests_import_this_checkout():
    source = Path(__file__).resolve().parents[2] / "src" / "meshwright"
    assert source == HOUSE.resolve(), (
        f"the environment holds the meshwright of {HOUSE}: run make test, or install this checkout"
    )


BUDGET: dict[str, tuple[int, int, int]] = {
    ".": (2, 129, 0),
    "checkpoint": (18, 5281, 15),
    "cli": (20, 2395, 12),
    "comparison": (4, 776, 0),
    "core": (19, 3238, 5),
    "data": (16, 6583, 29),
    "distributed": (88, 21286, 74),
    "integrations": (9, 1706, 9),
    "introspection": (37, 10222, 35),
    "models": (4, 718, 4),
    "observation": (20, 4559, 31),
    "planning": (34, 8441, 21),
    "simulation": (13, 4604, 18),
    "training": (41, 10914, 27),
    "verification": (15, 3703, 6),
}
"""By room: files, lines, and private functions that are named once in their file.

A change that needs more takes it from elsewhere, or says in docs/decisions why the house grows. The goal is 340 files,
62,000 lines and 300 such functions.
"""


def test_no_room_grows_beyond_its_budget():
    spent: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for place, path in FILES.items():
        text = path.read_text(encoding="utf-8")
        parts = nodes(text)
        named = [n.id if isinstance(n, ast.Name) else n.attr for n in parts if isinstance(n, ast.Name | ast.Attribute)]
        private = [n.name for n in parts if isinstance(n, ast.FunctionDef) and re.match("_[^_]", n.name)]
        once = sum(named.count(name) == 1 for name in private)
        room = place.partition("/")[0] if "/" in place else "."
        spent[room] = [sum(pair) for pair in zip(spent[room], (1, len(text.splitlines()), once), strict=True)]
    over = {room: found for room, found in spent.items() if any(map(int.__gt__, found, BUDGET.get(room, (0, 0, 0))))}
    assert over == {}, f"files, lines and functions named once are more than {[BUDGET.get(room) for room in over]}"


def test_no_file_outgrows_its_reader():
    lengths = {place: len(path.read_text(encoding="utf-8").splitlines()) for place, path in FILES.items()}
    assert {place: length for place, length in lengths.items() if length > LONGEST} == {}, "a noun is missing"


def test_functions_are_short():
    lengths = {}
    for place, path in FILES.items():
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                said = node.body[0] if ast.get_docstring(node) else None
                lengths[f"{place}:{node.name}"] = (
                    node.end_lineno - node.lineno + 1 - (said.end_lineno - said.lineno + 1 if said else 0)
                )
    assert {name: length for name, length in lengths.items() if length > LONGEST_FUNCTION} == {}


def test_a_class_name_stands_once_in_a_room():
    homes = defaultdict(list)
    for place, path in FILES.items():
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.ClassDef):
                homes[Path(place).parent.as_posix(), node.name].append(place)
    assert {name: places for name, places in homes.items() if len(places) > 1} == {}


def circles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Sets of files each of which imports every other at however many removes (Tarjan 1972)."""
    number, lowest, path, found = {}, {}, [], []

    def visit(place: str) -> None:
        number[place] = lowest[place] = len(number)
        path.append(place)
        for other in imports[place]:
            if other not in number:
                visit(other)
            if other in path:
                lowest[place] = min(lowest[place], lowest[other])
        if lowest[place] == number[place]:
            circle = set()
            while place not in circle:
                circle.add(path.pop())
            if len(circle) > 1:
                found.append(circle)

    for place in imports:
        if place not in number:
            visit(place)
    return found


def test_no_file_imports_itself_in_a_circle():
    """Imports inside functions and those for annotations alone count: a reader follows them too.

    Packages do not: an ``__init__`` is a table of names.
    """
    graph = grimp.build_graph("meshwright", cache_dir=None)
    files = {module for module in graph.modules if not graph.find_children(module)}
    assert circles({module: graph.find_modules_directly_imported_by(module) & files for module in files}) == []


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}) == [{"a", "b", "c"}]
    assert circles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_torch_distributed_stays_on_its_floors():
    """Outside distributed/ and checkpoint/, ranks agree through distributed/process/agree; a recorder only looks."""
    floors = (
        "distributed/",
        "checkpoint/",
        "observation/recorder.py",
        "observation/pieces.py",
        "observation/collectives.py",
    )
    above = [place for place in FILES if not place.startswith(floors)]
    reached = {
        place: sorted(name for name in names_in(place) if is_under(name, "torch.distributed")) for place in above
    }
    assert len(above) > 100 and {place: names for place, names in reached.items() if names} == {}


def test_models_import_nothing_of_ours_but_private_names_and_ranges():
    models = [place for place in FILES if place.startswith("models/")]
    known = {
        name
        for place in models
        for name in names_in(place)
        if is_under(name, "meshwright") and not is_under(name, "meshwright.models")
    }
    legal = ("meshwright.core.torch_private", "meshwright.core.config.ranges")  # of the fields of a model's config
    assert known and all(any(is_under(name, module) for module in legal) for name in known)


def test_techniques_do_not_know_each_other():
    files = techniques()
    assert len(files) >= 2, "order names no techniques: this test has lost its subject"
    modules = {place: "meshwright." + place.removesuffix(".py").replace("/", ".") for place in files}
    for place, own in modules.items():
        others = {*modules.values(), "meshwright.distributed.order", "meshwright.distributed.parallel_model"} - {own}
        known = sorted(other for other in others if any(is_under(name, other) for name in names_in(place)))
        assert not known, f"{place} imports {known}: what two techniques share belongs in a file of its own"


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import torch.distributed as dist", "torch.distributed"),
        ("from torch import distributed", "torch.distributed"),
        ("def f():\n    from torch.distributed.tensor import DTensor", "torch.distributed.tensor.DTensor"),
        ("import torch\ntorch.distributed.barrier()", "torch.distributed.barrier"),
        ("from . import ddp", "house.floor.ddp"),
        ("from .ddp import apply", "house.floor.ddp.apply"),
        ("from ..core import axes", "house.core.axes"),
    ],
)
def test_every_way_to_import_is_seen(code, name):
    assert name in set(reached(parsed(code), "house.floor"))


def test_imports_for_annotations_are_not_seen():
    code = "if TYPE_CHECKING:\n    from torch.distributed import DeviceMesh\nelse:\n    import json"
    assert set(reached(parsed(code))) == {"json"}


DEVICES = "core/devices.py"
"""The one file that knows CUDA by its name; all others ask for it, or for any accelerator."""


def words_of_cuda(code: str) -> Iterator[str]:
    """Where code says the lower-case word: names, attributes, keywords, strings (docstrings excepted)."""
    loose = {id(node.value) for node in nodes(code) if isinstance(node, ast.Expr)}
    for node in nodes(code):
        said = {
            ast.Name: "id",
            ast.Attribute: "attr",
            ast.keyword: "arg",
            ast.arg: "arg",
            ast.alias: "name",
            ast.Constant: "value",
        }.get(type(node))
        word = getattr(node, said) if said and id(node) not in loose else None
        if isinstance(word, str) and re.search(r"\bcuda\b", word):
            yield ast.unparse(node)


def asks_a_tensor_for_cuda(code: str) -> Iterator[str]:
    """Uses of tensors' and modules' own ways to CUDA, which no other accelerator has."""
    calls = [node.func for node in nodes(code) if isinstance(node, ast.Call)]
    for node in nodes(code):
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or (node.attr == "cuda" and node in calls)):
            yield ast.unparse(node)


def test_cuda_is_named_in_one_file():
    found = {place: list(words_of_cuda(path.read_text(encoding="utf-8"))) for place, path in FILES.items()}
    assert found.pop(DEVICES), "the file that knows it says it no more"
    assert {place: words for place, words in found.items() if words} == {}, "is any accelerator meant, or CUDA?"


def test_no_tensor_is_asked_whether_it_is_on_cuda():
    found = {place: list(asks_a_tensor_for_cuda(path.read_text(encoding="utf-8"))) for place, path in FILES.items()}
    assert {place: uses for place, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "code",
    [
        "torch.cuda.synchronize()",
        "import torch.cuda",
        "from torch import cuda",
        "device == 'cuda'",
        "f'{name}.cuda.rank{rank}'",
        "def f(stream: torch.cuda.Stream): ...",
        "call(cuda=True)",
    ],
)
def test_the_word_is_seen(code):
    assert list(words_of_cuda(code))


@pytest.mark.parametrize(
    "code", ['"""On cuda."""', "class A:\n    x = 1\n    'module load cuda'", "CUDA", "cuda_flash()", "x = 1  # cuda"]
)
def test_other_words_are_left_alone(code):
    assert not list(words_of_cuda(code))


@pytest.mark.parametrize("code", ["tensor.cuda()", "model.part.cuda(0)", "if x.is_cuda: ..."])
def test_a_tensors_way_to_cuda_is_seen(code):
    assert list(asks_a_tensor_for_cuda(code))


PRIVATE_FILES = (
    "core/torch_private.py",
    "distributed/torch_private.py",
    "distributed/optimizer/grad_clip.py",
    "distributed/products.py",
    "distributed/loss/peft_private.py",
    "integrations/fabric.py",
    "integrations/trainer_private.py",
    "introspection/module_kinds.py",
    "distributed/weights/torch_2_11.py",
    "observation/collectives.py",  # is loaded by its path into other environments, and imports torch alone
    "observation/pieces.py",  # is loaded by its path into other environments, and imports torch alone
    "observation/recorder.py",  # is loaded by its path into other environments, and imports torch alone
    "training/slurm.py",  # submitit's script and its submission
)
REGISTRIES = {"_parameters", "_buffers", "_apply"}
"""Of nn.Module, the same since its first release."""
PRIVATE = re.compile(r"(?<!\w)_[a-zA-Z]\w*")
OF_PYTHON = {"_replace", "_getframe", "_exit", "_current_frames", "_config"}
OF_TORCH = {
    name for kind in (Tensor, nn.Module, DTensor, FSDPModule, Optimizer, DeviceMesh) for name in dir(kind)
} - REGISTRIES


def own_names() -> set[str]:
    """Names that the package gives to anything of its own."""
    found = set()
    for path in FILES.values():
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) in ("self", "cls")
            ):
                found.add(node.attr)
    return found


def private_uses(code: str, own: set[str]) -> Iterator[str]:
    """Names of other libraries that begin with an underscore, as code imports them, reads them, or asks for them by a
    string.
    """

    def is_private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__") and name not in REGISTRIES | OF_PYTHON

    for node in nodes(code):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and not node.level
            and not is_under(node.module, "meshwright")
        ):
            parts = [*node.module.split("."), *(alias.name for alias in node.names)]
            yield from (f"{node.module}: {part}" for part in parts if is_private(part))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(is_private(part) for part in alias.name.split(".")))
        elif (
            isinstance(node, ast.Attribute)
            and is_private(node.attr)
            and not ast.unparse(node).startswith(("torch.ops.", "aten."))
        ):
            mine = ast.unparse(node.value) in ("self", "cls") or node.attr not in OF_TORCH
            if not (mine and node.attr in own) and not node.attr.startswith("_meshwright"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("found", "found_or_none"):
            yield from (ast.unparse(node) for path in node.args if isinstance(path, ast.Constant | ast.JoinedStr))
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("getattr", "hasattr", "setattr")
            and len(node.args) > 1
        ):
            asked = node.args[1]
            name = asked.value if isinstance(asked, ast.Constant) else ""
            if is_private(name) and not name.startswith("_meshwright") and (name in OF_TORCH or name not in own):
                yield ast.unparse(node)


def test_what_others_keep_private_is_reached_in_one_file_for_each_library():
    own = own_names()
    found = {place: sorted(set(private_uses(path.read_text(encoding="utf-8"), own))) for place, path in FILES.items()}
    assert {place: uses for place, uses in found.items() if uses and place not in PRIVATE_FILES} == {}
    assert all(found[place] for place in PRIVATE_FILES), "a file for private names reaches none"


def words_of(code: str) -> set[str]:
    """Names that code imports, reads, defines or writes as a string; of a path also its last part."""
    found = set()
    for node in nodes(code):
        names = {
            ast.alias: "name",
            ast.Attribute: "attr",
            ast.Constant: "value",
            ast.FunctionDef: "name",
        }.get(type(node))
        word = getattr(node, names) if names else None
        if isinstance(word, str):
            found |= {word, word.rpartition(".")[2]}
    return found


def test_every_private_name_has_a_row_and_every_row_is_reached():
    own, known = own_names(), {part for row in TABLE for part in row.path.split(".")}
    codes = {
        place: path.read_text(encoding="utf-8")
        for place, path in FILES.items()
        if not place.startswith("core/private_names")
    }
    used = {name for place in PRIVATE_FILES for use in private_uses(codes[place], own) for name in PRIVATE.findall(use)}
    assert used - known - own - OF_PYTHON == set(), "add a row to core/private_names"
    written = {word for code in codes.values() for word in words_of(code)}
    assert [row.path for row in TABLE if row.name not in written] == [], "nothing reaches these: delete their rows"


@pytest.mark.parametrize(
    "code",
    [
        "tensor._local_tensor",
        "from torch.utils._pytree import tree_leaves",
        "from torch.nn.modules.dropout import _DropoutNd",
        "import torch._dynamo",
        "getattr(state, '_fsdp_param_groups', None)",
        "torch._foreach_norm(x)",
        "parameter._version",
        "found('torch._foreach_norm')(x)",
    ],
)
def test_a_private_use_is_seen(code):
    assert list(private_uses(code, {"_version", "_local_tensor"}))


@pytest.mark.parametrize(
    "code", ["self._version", "module._parameters", "torch.ops.aten._to_copy.default", "sys._getframe(1)", "part._own"]
)
def test_other_underscores_are_left_alone(code):
    assert not list(private_uses(code, {"_version", "_own"}))
