"""The documents say what is there."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def test_the_list_of_rooms_is_that_of_the_house():
    assert (
        subprocess.run([sys.executable, str(ROOT / "scripts" / "house_map.py"), "--check"], check=False).returncode == 0
    ), "write docs/house.md anew: python scripts/house_map.py"


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
