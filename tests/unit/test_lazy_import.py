"""Start-up stays light: torch is imported by whoever needs it, never by the name of the package or by a help text."""

from __future__ import annotations

import ast
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import meshwright

SOURCE = Path(meshwright.__file__)
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "tensorboard", "psutil")


def modules_after(code: str) -> set[str]:
    """What a fresh interpreter has imported after running ``code``."""
    script = f"import sys, json\n{code}\nsys.stderr.write('MODULES' + json.dumps(sorted(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.partition("MODULES")[2]))


def roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_import_meshwright_imports_nothing_else_of_it():
    modules = modules_after("import meshwright")
    assert {name for name in modules if name.startswith("meshwright")} == {"meshwright"}
    assert not roots(modules) & set(HEAVY)


def test_the_collector_is_paused_during_an_import_and_then_as_it_was():
    modules_after(
        "import gc, torch, meshwright.core.host\n"
        "def collections(): return sum(each['collections'] for each in gc.get_stats())\n"
        "before = collections()\nfrom meshwright import parallelize\n"
        "assert collections() - before <= 1 and gc.isenabled()  # one is due as soon as it goes on\n"
        "gc.disable()\nfrom meshwright import Trainer\nassert not gc.isenabled()"
    )


def test_help_needs_neither_torch_nor_dataclasses():
    modules = modules_after("from meshwright.cli.main import main; main(['--help'])")
    assert not roots(modules) & {*HEAVY, "dataclasses"}
    bare = modules_after("")
    assert len(modules - bare) < 40


def test_train_help_needs_no_torch():
    modules = modules_after(
        "from meshwright.cli.main import main\ntry: main(['train', '--help'])\nexcept SystemExit as e: assert e.code"
        " == 0"
    )
    assert not roots(modules) & set(HEAVY)


def test_the_first_line_comes_before_torch():
    """The launcher is replaced by one that looks at what was imported and printed until then."""
    modules = modules_after(
        "import meshwright.training.launch as launcher, io, sys\n"
        "sys.stdout = io.StringIO()\n"
        "launcher.launch = lambda config: sys.stdout.getvalue().startswith('meshwright ') - 1\n"
        "from meshwright.cli.main import main\n"
        "assert main(['train', '--name=x', '--process.count=2', '--out=o']) == 0\n"
        "assert sys.stdout.getvalue().endswith(' · x · 2 processes · o/x-…\\n'), sys.stdout.getvalue()"
    )
    assert not roots(modules) & set(HEAVY)


def test_a_comparison_and_completion_need_no_torch():
    modules = modules_after(
        "import meshwright.training.views.compared, meshwright.cli.compare\n"
        "from meshwright.cli.main import main\n"
        "assert main(['completion', '--candidates', 'meshwright train --la']) == 0"
    )
    assert not roots(modules) & set(HEAVY)


def test_a_wrong_config_is_refused_without_torch():
    modules = modules_after("from meshwright.cli.main import main; assert main(['train', '--steps=0']) == 2")
    assert not roots(modules) & set(HEAVY)


@pytest.mark.parametrize(
    "module",
    [
        "core.config",
        "core.dtypes",
        "core.dtypes",
        "planning.layout",
        "planning.techniques",
        "training.config",
        "cli.arguments",
    ],
)
def test_torch_free_modules(module):
    assert not roots(modules_after(f"import meshwright.{module}")) & set(HEAVY)


def test_the_table_the_type_checkers_imports_and_all_agree():
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {name.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == meshwright._HOME
    assert sorted(meshwright.__all__) == sorted([*meshwright._HOME, "__version__"])
    assert set(meshwright.__all__) <= set(dir(meshwright))


def test_no_submodule_can_hide_a_name_of_the_table():
    assert not set(meshwright._HOME) & {module.name for module in pkgutil.iter_modules([str(SOURCE.parent)])}


def test_every_name_loads_and_stays():
    for name in sorted(meshwright._HOME):
        value = getattr(meshwright, name)
        assert value is not None and not isinstance(value, type(sys)), name
        assert getattr(meshwright, name) is value is vars(meshwright)[name]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Traner'"):
        _ = meshwright.Traner


def test_the_process_that_writes_checkpoints_needs_no_torch():
    modules = modules_after("import meshwright.checkpoint.writer")
    assert not roots(modules) & set(HEAVY)
