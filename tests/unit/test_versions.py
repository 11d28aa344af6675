"""The stated range of releases is the one that was run, and what is outside of it is met by a sentence."""

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from meshwright import UnsupportedError
from meshwright.core import host
from meshwright.core.host import TESTED, Range, numbers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import releases as script  # noqa: E402

FILES = script.files()
OLDEST, NEWEST = (
    FILES[name].read_text(encoding="utf-8") for name in (min(FILES, key=numbers), max(FILES, key=numbers))
)
BOUND = re.compile(r"^([A-Za-z0-9_-]+)(?:\[\w+\])?>=([0-9.]+)$")


def pins(text):
    return {script._name(line): line.partition("==")[2] for line in text.splitlines() if "==" in line}


def test_the_stated_range_is_from_the_oldest_to_the_newest_environment():
    for package in ("torch", "transformers"):
        assert pins(OLDEST)[package].startswith(TESTED[package].oldest)
        assert pins(NEWEST)[package].startswith(TESTED[package].newest)
    pythons = [
        match[1] for text in (f.read_text() for f in FILES.values()) if (match := re.search("python (.+)", text))
    ]
    assert max(pythons, key=numbers) == TESTED["python"].newest and min(pythons, key=numbers) == TESTED["python"].oldest


def test_the_lower_bounds_of_the_metadata_are_those_of_the_oldest_environment():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(x for extra in script.EXTRAS for x in project["optional-dependencies"][extra])]
    bounds = {script._name(m[1]): m[2] for line in lines if (m := BOUND.match(line))}
    here = pins(OLDEST)
    assert bounds.keys() <= here.keys() and len(bounds) > 12
    assert {
        name: here[name]
        for name, bound in bounds.items()
        if numbers(here[name])[: len(numbers(bound))] != numbers(bound)
    } == {}
    assert project["requires-python"] == f">={TESTED['python'].oldest}"


@pytest.mark.parametrize("package, version", [("torch", "2.10.1"), ("transformers", "4.57.6"), ("torch", "1.13")])
def test_an_older_release_is_refused_with_the_range_and_the_command(monkeypatch, package, version):
    monkeypatch.setattr(host, "installed", lambda name: version)
    with pytest.raises(UnsupportedError) as caught:
        host.refuse_older(package)
    said = str(caught.value)
    assert version in said and str(TESTED[package]) in said and "meshwright doctor" in said and "pip install" in said


def test_a_newer_release_is_a_sentence_and_those_of_the_range_are_none(monkeypatch):
    monkeypatch.setattr(host, "installed", lambda name: "2.16.0a0+git" if name == "torch" else None)
    (said,) = host.newer_than_tested()
    assert "torch 2.16.0a0+git" in said and str(TESTED["torch"]) in said
    for version in ("2.11.0", "2.13.0+cpu", "2.15.3"):
        monkeypatch.setattr(host, "installed", lambda name, version=version: version if name == "torch" else None)
        host.refuse_older("torch")
        assert host.newer_than_tested() == []


def test_versions_are_compared_by_their_numbers():
    assert numbers("2.9.1") < numbers("2.11.0") < numbers("2.13.0+cpu") and numbers("2.16.0a0+git1234") == (2, 16, 0)
    assert Range("2.9", "2.15").is_newer("2.100") and not Range("2.9", "2.15").is_older("2.10")


def test_the_oldest_and_the_newest_release_have_recorded_results():
    results = json.loads(script.RESULTS.read_text(encoding="utf-8"))
    assert {script._name(name) for name in results} >= {min(FILES, key=numbers), max(FILES, key=numbers)}


def test_an_environment_installs_what_it_pins_and_nothing_that_contradicts_it():
    for text in (path.read_text(encoding="utf-8") for path in FILES.values()):
        own = pins(text)
        assert own.keys().isdisjoint(script._name(line) for line in script.constraints(text))
        assert set(script._pins(text)) <= set(script.requirements(text))


def test_an_environment_that_cannot_be_made_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_ENVIRONMENTS", str(tmp_path / "file"))
    (tmp_path / "file").touch()
    with pytest.raises(script.Unavailable) as caught:
        script.environment(min(FILES, key=numbers))
    assert "\n" not in str(caught.value) and "torch 2." in str(caught.value)
