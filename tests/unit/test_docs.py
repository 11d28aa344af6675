"""The documents say what is there."""

import ast
import re
import sys
import tomllib
import types
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

import meshwright
from meshwright.core.host import TESTED

ROOT = Path(__file__).parents[2]
HOUSE = ROOT / "src" / "meshwright"
MOST_WORDS = 42_000
"""Of all Markdown that git tracks; what was tested is data (docs/data), not prose."""
DOORS = ("meshwright.distributed.parallelizer", "meshwright.distributed.transforms")
LOOPS = tuple(f"meshwright.integrations.{tool}" for tool in ("transformers", "trl", "accelerate", "fabric", "lm_eval"))


def documented() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    module = ""
    for line in (ROOT / "docs/api.md").read_text().splitlines():
        if match := re.match(r"## `(meshwright[\w.]*)`", line):
            module = match.group(1)
        elif line.startswith("## "):
            module = ""
        elif module and (match := re.match(r"- `(\w+)", line)):
            found.setdefault(module, set()).add(match.group(1))
    return found


def test_the_api_page_lists_exactly_the_public_names():
    pages = documented()
    assert set(pages) == {"meshwright", "meshwright.data", "meshwright.distributed", *DOORS, *LOOPS}
    for module, names in pages.items():
        public = {name for name in import_module(module).__all__ if not name.startswith("__")}
        assert names == public, module


def test_every_public_name_has_a_docstring():
    for module, names in documented().items():
        for name in names:
            assert (getattr(import_module(module), name).__doc__ or "").strip(), f"{module}.{name}"


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


def test_no_page_and_no_message_asks_an_index_for_meshwright():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    asks = re.compile(r"pip\s+install\s+['\"]?meshwright(?:\[[\w,]+\])?+(?! @ git|` finds nothing)")
    for page in [*pages, *(ROOT / "src").rglob("*.py")]:
        assert page.name == "journal.md" or not asks.search(page.read_text()), page


def test_every_extra_is_listed_with_how_to_install_it():
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", install_section(), re.MULTILINE)))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(listed) == extras.keys() - {"docs", "dev", "all"}


def install_section() -> str:
    return (ROOT / "docs/index.md").read_text().split("## Install")[1]


def test_the_reference_has_every_public_name():
    paths = re.findall(r"^::: (\S+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE)
    for path in paths:
        module, _, name = path.rpartition(".")
        assert hasattr(import_module(module), name), path
    named = {path.rpartition(".")[2] for path in paths}
    for module in ("meshwright", "meshwright.data", "meshwright.distributed"):
        assert {name for name in import_module(module).__all__ if not name.startswith("__")} <= named


KEMPNERFORGE = {
    "expert_parallel": ("apply_expert_parallel",),
    "parallel": ("apply_ac", "apply_float8", "apply_fsdp2", "build_parallel_model", "default_mp_policy", "get_dp_mesh"),
    "pipeline_parallel": (
        "PipelineStageModule",
        "build_pipeline_schedule",
        "build_pipeline_stage",
        "build_stage_module",
        "get_pp_mesh",
    ),
    "setup": ("destroy_distributed", "get_dp_mesh", "get_world_info", "init_distributed", "is_rank_zero"),
    "tensor_parallel": ("apply_tensor_parallel", "get_tp_mesh"),
    "utils": ("clip_grad_norm_",),
}


def test_names_stand_where_kempnerforge_has_them():
    places = [
        (import_module(f"meshwright.distributed.{module}"), name)
        for module, names in KEMPNERFORGE.items()
        for name in names
    ]
    assert [f"{module.__name__}.{name}" for module, name in places if not callable(getattr(module, name, None))] == []


def test_files_that_the_architecture_names_are_there():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:\w+/)+\w+)(?:\.py)?`", text))
    homes = {path.with_suffix("").relative_to(ROOT).as_posix() for path in (ROOT / "src").rglob("*")}
    for folder in ("tests", "benchmarks", "scripts"):
        homes |= {path.with_suffix("").relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*")}
    gone = [name for name in named if not any(f"/{home}".endswith(f"/{name}") for home in homes)]
    assert len(named) > 50 and gone == []


def definitions(tree: ast.Module) -> dict[str, int]:
    """The lines of what a file defines: names, and Class.method."""
    found = {}
    for node in tree.body:
        lines = (node.end_lineno or 0) - node.lineno + 1
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id: lines for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = lines
            inside = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {f"{node.name}.{one.name}": (one.end_lineno or 0) - one.lineno + 1 for one in inside}
    return found


def named_in(page: str) -> list[tuple[str, str]]:
    """Each `file.py:definition` of a page, once."""
    return list(dict.fromkeys(re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / page).read_text(encoding="utf-8"))))


def test_definitions_that_the_spine_walks_are_there_and_can_be_read_in_an_hour():
    named, total = named_in("docs/spine.md"), 0
    changed = (ROOT / "docs/spine.md").read_text(encoding="utf-8").partition("## To change something")[2]
    for file, name in named:
        found = definitions(ast.parse((HOUSE / file).read_text(encoding="utf-8")))
        assert name in found, f"docs/spine.md: {file} defines no {name}"
        within = (file, name.partition(".")[0]) in named and "." in name
        total += 0 if within or f"`{file}:{name}`" in changed else found[name]
    assert len(named) > 40 and total < 3_000


def test_definitions_that_extend_names_are_there():
    named = named_in("docs/extend.md")
    assert named
    for file, name in named:
        assert name in definitions(ast.parse((HOUSE / file).read_text(encoding="utf-8"))), f"{file}: {name}"


def tracked() -> list[Path]:
    skipped = {".git", ".venv", ".cache", ".pytest_cache", "build", "dist", "runs", "node_modules"}
    entries = [entry for entry in ROOT.iterdir() if entry.name not in skipped]
    return [path for entry in entries for path in ([entry] if entry.suffix == ".md" else entry.rglob("*.md"))]


def test_the_documents_stay_short():
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in tracked()}
    assert sum(words.values()) <= MOST_WORDS, "say it in fewer words, or drop what nobody reads: " + ", ".join(
        f"{name} {count}" for name, count in sorted(words.items(), key=lambda entry: -entry[1])[:8]
    )


def test_the_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 60


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r"- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def code_of(page: str) -> dict[str, Any]:
    """Run a page's first block of Python; return what it defines."""
    block = re.search(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    module = types.ModuleType("a_page")
    sys.modules["a_page"] = module
    exec(compile(block.group(1), page, "exec"), vars(module))
    return vars(module)


def test_the_model_of_the_page_is_cut_on_every_axis():
    model = code_of("docs/your-model.md")["MyModel"]
    cut = meshwright.plan(model, meshwright.Layout(tp=2, dp_shard=1)).tensor
    assert cut is not None and cut.sequence_parallel
    named = str(cut)
    assert "attention" in named and "down" in named
    assert meshwright.plan(model, meshwright.Layout(pp=2, dp_shard=1)).pipeline is not None
    assert meshwright.plan(model, meshwright.Layout(cp=2, dp_shard=1)).context is not None


def test_the_transform_of_the_page_acts():
    names = code_of("docs/extend.md")
    norm, up = nn.LayerNorm(4), nn.Linear(4, 4)
    model, before = nn.ModuleDict({"norm": norm, "up": up}), up.weight.detach().clone()
    names["apply_model_transforms"](model, {"scaled_norms": {"scale": 0.5}})
    assert norm.weight.tolist() == [0.5] * 4 and torch.equal(up.weight, before)


def test_tested_ranges_are_those_that_the_host_is_asked_about():
    text = (ROOT / "docs/tested.md").read_text(encoding="utf-8")
    for package in ("torch", "transformers"):
        assert re.search(
            rf"^\| {package} \| {TESTED[package].oldest} to {TESTED[package].newest} \|", text, re.MULTILINE
        )
