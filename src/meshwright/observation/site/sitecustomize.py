"""Begin to record as soon as a script imports torch; Python runs this file at its start, from PYTHONPATH."""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


def run(name: str, file: str) -> Any:
    """Import a module from a file."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record() -> None:
    """Install the recorder, in an environment that may have no meshwright."""
    folder, parts = os.path.dirname(HERE), ("sketches", "collectives", "pieces", "copies", "patches", "reruns")
    for part in parts:
        run(f"meshwright.observation.{part}", os.path.join(folder, f"{part}.py"))
    run("_meshwright_recorder", os.path.join(folder, "recorder.py")).install()
    for part in parts:
        del sys.modules[f"meshwright.observation.{part}"]  # the script's own meshwright, if it has one, is another


def run_twice() -> None:
    """Have a copy of this process, in which torch is imported, run the script with noise first."""
    settings = json.loads(os.environ["MESHWRIGHT_OBSERVE"])
    noisy = settings.pop("noisy", None)
    child = 0
    if noisy:
        import torch

        torch.compiler.disable(others)  # imports the compiler, as both would where their optimizers step
        child = os.fork()
        if child == 0:
            settings |= {"folder": noisy, "noise": 1}
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.environ["MESHWRIGHT_OBSERVE"] = json.dumps(settings)
    if child:
        os.waitpid(child, 0)


class AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as usual, and installs the recorder once torch has been imported."""

    asks_others = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.asks_others:
            return None
        self.asks_others = True  # some only ask whether there is a torch, and import it later
        spec = importlib.util.find_spec("torch")
        self.asks_others = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_record(module: Any) -> None:
                sys.meta_path.remove(self)
                was_enabled = gc.isenabled()
                gc.disable()  # to collect among what torch creates takes longer than to create it
                execute(module)
                gc.freeze()
                if was_enabled:
                    gc.enable()
                run_twice()
                record()

            spec.loader.exec_module = execute_and_record
        return spec


def others() -> None:
    """Run the sitecustomize that this file hides, if the installation has one."""
    for folder in sys.path:
        file = os.path.join(folder or ".", "sitecustomize.py")
        if os.path.isfile(file) and os.path.dirname(os.path.abspath(file)) != HERE:
            run("_hidden_sitecustomize", file)
            return


if os.environ.get("MESHWRIGHT_OBSERVE"):
    sys.meta_path.insert(0, AfterTorch())
others()
