"""Collect the advice that the package prints, from its source, and read it as a user would: what to set, type or call.

A message is a string of the source that asks for a change ("Set …", "leave … out") and names it: a key of the config,
a flag, a command, an argument. Values that are known only when it is printed stand between « and ».
"""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin

import meshwright
from meshwright import ParallelModel, Techniques
from meshwright.core.config import from_dict, public_keys
from meshwright.core.config.ranges import limits
from meshwright.core.config.schema import field_types, sections, union_arms
from meshwright.core.errors import MeshwrightError
from meshwright.planning.pipeline.orders import KINDS
from meshwright.training.slurm import LaunchConfig

from .source import nodes

ATTRIBUTES = {*dir(ParallelModel), "config", "plan", "safetensors"}
"""What a user's variable called model has, and a file of that name."""
OTHERS = {
    "Accelerator",
    "Embedding",
    "F.cross_entropy",
    "Fabric",
    "clip_gradients",
    "model.save_pretrained",
    "torch.nn.functional.cross_entropy",
}
"""Functions of other libraries that messages call with keywords."""
ARGUMENTS = {
    "ignore_index",
    "mesh_dim_names",
    "optimizer_cls_and_kwargs",
    "quantization_config",
    "save_original_format",
}
"""Arguments of other libraries' functions."""

HOUSE = Path(meshwright.__file__).parent
SECTIONS = tuple(sorted({path.partition(".")[0] for path, _ in sections(LaunchConfig) if path} - {""}))
VERBS = (
    "add allow ask begin bring build call change check choose compare compute configure continue convert copy correct"
    " cut decide declare draw fetch fit freeze give go group install judge keep lay leave lengthen let log look lower"
    " make measure mend move name open pack post prepare put raise read rehearse remove rename request return run save"
    " say scale seed set shard shorten start state step submit switch take train try type unset untie update use verify"
    " wait write"
).split()
_BEGINS = re.compile(
    rf"(?:^|[.:;,]\s+|\(|»|\b(?:or|and|then|instead|to)\s+)(?:{'|'.join(VERBS)})\b(?!\(| cannot)", re.IGNORECASE
)
_ENDS = re.compile(r"\.(?=\s|$)")
KEY = re.compile(rf"(?<![\w.'/@«])(?:{'|'.join(SECTIONS)})(?:\.[a-z_0-9]+)+(?!\w)(?!\.«)(?![.\w]*[(*\[])")
VALUE = r"\[[^\]]*\]|\"[^\"]*\"|'[^']*'|«[^»]*»|-?[A-Za-z0-9_+./-]*[A-Za-z0-9_]"
SETTING = re.compile(rf"(?<![\w.])([a-z_]+(?:\.[a-z_0-9]+)*)(?: = | to (?:at most )?(?=«|\d|false|true|none))({VALUE})")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z_.-]*[a-z_]")
COMMAND = re.compile(r"meshwright (?=[a-z])(\w+)")


@dataclass(frozen=True)
class Message:
    """A string of the source that gives advice."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text}"


@cache
def trees() -> Mapping[str, tuple[ast.AST, ...]]:
    return {
        path.relative_to(HOUSE).as_posix(): nodes(path.read_text(encoding="utf-8"))
        for path in sorted(HOUSE.rglob("*.py"))
    }


@cache
def _constants(module: str) -> dict[str, str]:
    """Texts that a file's upper-case names stand for, its own and imported ones."""
    place = module.removeprefix("meshwright.").replace(".", "/")
    file = next((one for one in (f"{place}.py", f"{place}/__init__.py") if one in trees()), None)
    if file is None:
        return {}
    package = ".".join(["meshwright", *Path(file).parts[:-1]]).split(".")
    found: dict[str, str] = {}
    for node in trees()[file][0].body:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names if source.startswith("meshwright") else ():
                if alias.name.isupper() and alias.name in (known := _constants(source)):
                    found[alias.asname or alias.name] = known[alias.name]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = text_of(node.value, found)
            if text is not None:
                found[node.targets[0].id] = text
    return found


def text_of(node: ast.AST, constants: Mapping[str, str]) -> str | None:
    """The text of a string of the source; None of anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(str(part.value))
        elif isinstance(part, ast.FormattedValue):
            words = ast.unparse(part.value)
            parts.append(constants.get(words, f"«{words}»"))
    return "".join(parts)


def strings(place: str) -> Iterator[tuple[int, str]]:
    """Every text of a file with its line, docstrings and single words left out."""
    parts = trees()[place]
    module = "meshwright." + place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    loose = {id(node.value) for node in parts if isinstance(node, ast.Expr)}
    inner = {id(part) for node in parts if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in (one for one in parts if isinstance(one, ast.expr)):
        is_whole = isinstance(node, ast.JoinedStr) and id(node) not in loose
        if is_whole or (isinstance(node, ast.Constant) and id(node) not in loose | inner):
            text = text_of(node, _constants(module))
            if text is not None and " " in text.strip():
                yield node.lineno, text


@cache
def messages() -> tuple[Message, ...]:
    """Every message of the package that names the change it asks for."""
    found = (Message(f"{place}:{line}", text) for place in trees() for line, text in strings(place))
    return tuple(message for message in found if advices(message.text))


def expanded(text: str) -> str:
    """A text in which ``a = b = 1`` is ``a = 1 and b = 1``."""
    while chain := re.search(r"([a-z_.]+) = (?=[a-z_.]+ = )((?:[a-z_.]+ = )*)(\S*\w)", text):
        text = f"{text[: chain.start()]}{chain[1]} = {chain[3]} and {chain[2]}{chain[3]}{text[chain.end() :]}"
    return text


def asked(text: str) -> Iterator[str]:
    """The parts of a text that ask for a change: from a verb to the end of its sentence."""
    text, at = expanded(text), 0
    while begin := _BEGINS.search(text, at):
        if text.count("«", 0, begin.end()) > text.count("»", 0, begin.end()):  # within an expression
            at = begin.end()
            continue
        end = _ENDS.search(text, begin.end())
        at = end.end() if end else len(text)
        yield text[begin.start() : at].lstrip(" .:;,(»")


def full_key(name: str, text: str) -> str | None:
    """The whole key that a name stands for where it is advised: itself, or one of its last word that the text names."""
    if KEY.fullmatch(name):
        return name
    return next((key for key in KEY.findall(text) if key.endswith(f".{name}")), None)


def _plain(value: str) -> str:
    value = value.strip("'\"")
    return "…" if re.search(r"[«»]", value) or re.fullmatch(r"-?[\d.e]*", value) else value


def settings(text: str) -> list[tuple[str, str]]:
    """Keys and values that a text asks to set, as they are written."""
    found = [(full_key(name, text), value) for part in asked(text) for name, value in SETTING.findall(part)]
    return [(key, value) for key, value in found if key is not None]


def left_out(text: str) -> set[str]:
    """Keys that a text asks to leave out, or to set, by a pronoun: those that it names before."""
    found: set[str] = set()
    for begin in re.finditer(
        r"\b(?:[Ll]eave|[Ss]et) (?:it|this|that|these|one of them|one of the two)\b(?! out of)", text
    ):
        known = re.findall(rf"{KEY.pattern}|(?<=techniques\.)«[^»]*»|«asked»|«request»", text[: begin.start()])
        found |= {re.sub("«.*?»", "…", key) for key in known[: 2 if "one of" in begin[0] else 1]}
    return found


def advices(text: str) -> set[str]:
    """Names of what a text asks for: ``key = value``, ``key``, ``--flag``, ``meshwright verb``, ``name()``, ``name=``.

    Values that are numbers, or that are known when they are printed, are ``…``.
    """
    if MARKUP.search(text):
        return set()
    found = {f"{key}, by 'it'" for key in left_out(text)}
    given = settings(text)
    found |= {f"{key} = {_plain(value)}" for key, value in given}
    for part in asked(text):
        found |= {"pip install"} if re.search(r"pip3? install|install_command\(|«command»", part) else set()
        part = re.sub(r"«command\('(\w+)'[^»]*»", r"meshwright \1", part)
        part = re.sub("«[^»]*»", "…", part)
        found |= {key for key in KEY.findall(part) if key not in dict(given) and f"{key}.…" not in part}
        found |= set(FLAG.findall(part))
        found |= {f"meshwright {verb}" for verb in COMMAND.findall(part) if verb in verbs()}
        found |= {f"{name}()" for name in CALL.findall(part) if name in callables()}
        found |= {f"{name}=" for name in KEYWORD.findall(part)}
        found |= set(DOCS.findall(part))
    return found


MARKUP = re.compile(
    r"<(?:script|ul|li|svg|rect|text|g|div|span|p|t[rdh]|path|line|a|h\d|code|title|circle|table|section|i|b)\b"
    r"|=\"«|\$\(|\$fpath|COMP_|commandline|\[--key|--layout\.\*|efsdp|wandb sync --id|mem=64G"
)
"""Strings of pages, of shells' scripts, of usage lines and of figures."""
DOCS = re.compile(r"docs/[\w-]+\.md")
CALL = re.compile(r"(?<![\w.])(?:[a-z_]+\.)*([A-Za-z_]\w+)\((?!s\))")
KEYWORD = re.compile(r"(?<![\w.'\"(-])([a-z][a-z_]*)=(?![=\s])")


@cache
def verbs() -> tuple[str, ...]:
    from meshwright.cli.main import VERBS as known

    return tuple(known)


@cache
def callables() -> Mapping[str, list[set[str] | None]]:
    """Functions and classes of the package: name -> the arguments of each of them (None: takes any)."""
    found: dict[str, list[set[str] | None]] = {}
    for parts in trees().values():
        for node in parts:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(_arguments(node))
            elif isinstance(node, ast.ClassDef):
                init = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
                fields = {
                    a.target.id for a in node.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)
                }
                found.setdefault(node.name, []).append(
                    _arguments(init) if isinstance(init, ast.FunctionDef) else fields
                )
    return found


def _arguments(node: ast.FunctionDef) -> set[str] | None:
    if node.args.kwarg:
        return None
    return {one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]}


FOREIGN = {
    "--shm-size": "Docker",
    "--logdir": "tensorboard",
    "--repo-type": "hf download",
    "--local-dir": "hf download",
    "--revision": "hf download",
    "--nodes": "srun",
    "--python": "uv",
}
"""Flags of other programs, and the word by which a message names the program."""


def flags_of(verb: str) -> set[str]:
    """Every flag of a verb, keys of its config among them."""
    from meshwright.cli.completion import KEYS
    from meshwright.cli.help import config_of, described, options_of
    from meshwright.cli.main import VERBS as known
    from meshwright.core.config import public_keys
    from meshwright.core.config.flags import flag_of

    usage, _ = described(verb, known[verb][0])
    keys = {f"--{key.partition('[]')[0]}" for key in public_keys(config_of(verb))} if KEYS in usage else set()
    return keys | {"--help"} | {flag_of(name) for cls in options_of(known[verb][0]) for name in field_types(cls)}


def value_of(text: str) -> object:
    """The value that an advised word stands for, in a file or behind a flag: quoted or not."""
    if text[:1] in "'\"":
        return text[1:-1]
    try:
        found = tomllib.loads(f"it = {text}")["it"]
        return tuple(found) if isinstance(found, list) else found
    except tomllib.TOMLDecodeError:
        return text


def nested(key: str, value: object) -> dict:
    for name in reversed(key.split(".")):
        value = {name: value}
    assert isinstance(value, dict)
    return value


def faults(text: str) -> list[str]:
    """What is wrong with the names in a message: keys, values, flags, commands, calls, arguments, pages."""
    text = re.sub("«[^»]*»", "«»", expanded(text))
    return [*_wrong_keys(text), *_wrong_flags(text), *_wrong_calls(text), *_wrong_pages(text)]


@cache
def keys() -> frozenset[str]:
    """Every key, and the tables that hold keys."""
    known = {key.partition("[]")[0] for key in public_keys(LaunchConfig)}
    known |= {f"techniques.{field.name}" for field in fields(Techniques)}
    return frozenset(known | {".".join(key.split(".")[:n]) for key in known for n in (2, 3)})


def _wrong_keys(text: str) -> Iterator[str]:
    for key in KEY.findall(text):
        attribute = re.fullmatch(r"model\.(\w+).*", key)
        if key not in keys() and not (attribute and attribute[1] in ATTRIBUTES) and key not in ("slurm.tasks",):
            yield f"{key} is no key"
    for name, word in SETTING.findall(text):
        key = full_key(name, text)
        if key in keys() and not re.search("[«»…{]", word):
            yield from _wrong_value(key, value_of(word))


def _wrong_value(key: str, value: object) -> Iterator[str]:
    try:
        from_dict(LaunchConfig, nested(key, value))
        if key in limits(LaunchConfig):
            limits(LaunchConfig)[key].check(key, value)
    except MeshwrightError as error:
        yield str(error)


def _wrong_flags(text: str) -> Iterator[str]:
    every = set().union(*map(_flags, verbs()))
    for flag in FLAG.findall(text):
        if flag not in every and FOREIGN.get(flag, "\0") not in text:
            yield f"no verb takes {flag}"
    for verb, rest in re.findall(r"(?:'|: |[Ww]rite |with |srun )meshwright (?!trace \d)([a-z]+)([^'.;,]*)", text):
        if verb not in verbs():
            yield f"meshwright {verb}: no such verb"
            continue
        for flag in FLAG.findall(rest):
            if flag not in _flags(verb):
                yield f"meshwright {verb} does not take {flag}"


@cache
def _flags(verb: str) -> frozenset[str]:
    return frozenset(flags_of(verb))


def _wrong_calls(text: str) -> Iterator[str]:
    for found in re.finditer(r"(?<![\w.»])([A-Za-z_][\w.]*)\(", text):
        written = _call(text[found.start() :])
        if written is None:
            continue
        name = found[1].rpartition(".")[2]
        keywords = {one.arg for one in written.keywords if one.arg}
        if name in callables():
            if not any(taken is None or keywords <= taken for taken in callables()[name]):
                yield f"{found[1]} takes no {', '.join(sorted(keywords))}"
        elif found[1].startswith("meshwright.") or (keywords and found[1] not in OTHERS):
            yield f"{found[1]}: no such function"
    for name in re.findall(r"(?<![\w.'/])meshwright((?:\.[A-Za-z_]\w*)+)", text):
        if not _is_there(f"meshwright{name}"):
            yield f"meshwright{name} does not exist"
    for name in KEYWORD.findall(re.sub("«[^»]*»", "…", text)):
        if name not in ARGUMENTS and not any(
            name in (taken or ()) for known in callables().values() for taken in known
        ):
            yield f"no function takes {name}="
    for found in re.finditer(r"techniques=(?=\{)", text):
        try:
            from_dict(Techniques, {name: held for name, held in _literal(text[found.end() :]).items() if held != ...})
        except MeshwrightError as error:
            yield str(error)


def _call(text: str) -> ast.Call | None:
    """The call that a text begins with; None where it is none of Python's."""
    depth, opened = 0, text.index("(")
    for at in range(opened, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            words = re.sub("«[^»]*»", "0", text[: at + 1]).replace("=…", "=...").replace("…", "*_")
            try:
                made = ast.parse(words, mode="eval").body
            except SyntaxError:
                return None
            return made if isinstance(made, ast.Call) else None
    return None


def _literal(text: str) -> dict:
    depth = 0
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if depth == 0:
            try:
                return ast.literal_eval(text[: at + 1])
            except (ValueError, SyntaxError):
                return {}
    return {}


def _is_there(name: str) -> bool:
    module, _, rest = name.rpartition(".")
    if not module:
        return True
    try:
        return hasattr(importlib.import_module(module), rest) or bool(importlib.util.find_spec(name))
    except ImportError:
        return _is_there(module) and hasattr(pkgutil.resolve_name(module), rest)


def _wrong_pages(text: str) -> Iterator[str]:
    for page in DOCS.findall(text):
        if not (HOUSE.parents[1] / page).is_file():
            yield f"{page} is not there"


def links() -> dict[str, dict[str, str]]:
    """Collect the tests with the marker ``follows``: advice -> each test's name -> its source.

    The source has the functions, classes and tables of its file that it names.
    """
    found: dict[str, dict[str, str]] = {}
    tests = Path(__file__).parents[1]
    for file in sorted(tests.rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        if "mark.follows(" not in text:
            continue
        parts: dict[str, ast.stmt] = {}
        for node in ast.parse(text).body:
            for one in node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", node)]:
                parts[getattr(one, "name", getattr(one, "id", ""))] = node
        for name, node in parts.items():
            marks = [mark for mark in getattr(node, "decorator_list", ()) if ast.unparse(mark).startswith(FOLLOWS)]
            if marks:
                source = "\n".join(ast.get_source_segment(text, part) or "" for part in _reached(node, parts))
                for advice in ast.literal_eval(ast.unparse(marks[0]).removeprefix(FOLLOWS)[:-1].join(("(", ",)"))):
                    found.setdefault(advice, {})[f"{file.relative_to(tests)}::{name}"] = source
    return found


def _reached(node: ast.stmt, parts: Mapping[str, ast.stmt]) -> list[ast.stmt]:
    """The statement, and those of its file that it names, and those that these name."""
    found, queue = [], [node]
    while queue:
        if (node := queue.pop()) not in found:
            found.append(node)
            queue += [parts[one.id] for one in ast.walk(node) if isinstance(one, ast.Name) and one.id in parts]
    return found


FOLLOWS = "pytest.mark.follows("
LEFT_OUT = object()
"""In place of a value: the key is to be left out."""
Way = tuple[tuple[str, object], ...]
"""Keys that are set together, each with its value."""


def ways(text: str) -> list[Way]:
    """The changes of settings that a printed message offers, each to be made alone."""
    found: list[Way] = []
    for line in expanded(text).splitlines():
        for part in asked(line):
            subjects = list(dict.fromkeys(KEY.findall(line[: line.index(part)])))
            part = re.sub(r" ?\([^()]*\)", "", part)
            for words in re.split(r",? or (?!more\b|less\b)", part):
                found += _way(words.rstrip("."), subjects, line)
    return list(dict.fromkeys(way for way in found if way))


def _way(words: str, subjects: list[str], line: str) -> list[Way]:
    """Read one alternative of an advice."""
    if len(subjects) > 1 and re.search(r"[Ll]eave one of (?:them|the two) out", words):
        return [((key, LEFT_OUT),) for key in subjects[:2]]
    if none := re.search(r"Set one of them to (\w+)", words):
        return [((key, none[1]),) for key in subjects[:2]]
    if subjects and re.search(r"\b[Ll]eave (?:it|this) out\b(?! of)", words):
        return [((subjects[0], LEFT_OUT),)]
    if out := re.search(rf"\b[Ll]eave ({KEY.pattern}) out|\b[Ll]eave out ({KEY.pattern})", words):
        return [((out[1] or out[2], LEFT_OUT),)]
    it = re.search(r"\b(?:[Ss]et|[Ll]eave|[Uu]se) (?:it )?(?:to |at )?(\"?(?:auto|none|true|false)\"?)$", words)
    if subjects and it:
        return [((subjects[0], value_of(it[1])),)]
    if use := re.match(r"(?:[Uu]se |[Ss]et )?(\w+)(?:,|$)", words):
        known = [key for key in subjects if use[1] in CHOICES.get(key, ())]
        if known:
            return [((known[0], use[1]),)]
    pairs = [(full_key(name, line), value) for name, value in SETTING.findall(words)]
    return [tuple((key, value_of(value)) for key, value in pairs if key is not None)]


CHOICES = {
    f"techniques.{key}": [*get_args(arms[-1]), *[True, False][: 2 * (bool in arms)]]
    for key, arms in ((key, union_arms(kind)) for key, kind in field_types(Techniques).items())
    if get_origin(arms[-1]) is Literal
} | {"techniques.pipeline_schedule": KINDS}


def legal(line: str) -> list[Way]:
    """The values that a line of a printed message lists as legal for its first key."""
    subjects = KEY.findall(line)
    listed = re.search(r"[Ll]egal(?: here)?(?:: | are )(.*?)(?:\.(?=\s|$)|$)", line)
    if not listed or not subjects:
        return []
    if span := re.fullmatch(rf"({KEY.pattern}) = (\d+) to (\d+)", listed[1]):
        return [((span[1], value),) for value in (int(span[2]), int(span[3]))]
    values = [value_of(word) for word in re.split(r", or |, | / | or ", listed[1]) if re.fullmatch(r"[\w.-]+", word)]
    return [((subjects[0], value),) for value in values]


def name_of(way: Way) -> set[str]:
    """The advices that following a way follows."""
    left = {key for key, value in way if value is LEFT_OUT}
    given = {f"{key} = {_plain(str(value).lower())}" for key, value in way if key not in left}
    return given | left | {f"{key}, by 'it'" for key in left}


def is_followed(advice: str, known: set[str]) -> bool:
    """Whether an advice is among those that are followed, which have values where a message has a placeholder."""
    key = advice.removesuffix("…")
    return advice in known or (advice.endswith(" = …") and any(one.startswith(key) for one in known))
