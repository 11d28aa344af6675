"""Strict configuration: whatever is legal survives every form it can be written in.

Whatever is not is refused, and mended, by name.
"""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from meshwright.core.config import (
    field_doc,
    from_dict,
    keys_text,
    load_toml,
    parse_flags,
    public_keys,
    to_dict,
    to_toml,
)
from meshwright.core.config.read import line_index
from meshwright.core.config.schema import field_types, is_section, is_unset, row_of, union_arms
from meshwright.core.errors import ConfigError
from meshwright.introspection.adapter_request import Adapters
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Precision, RunTechniques, Techniques, as_techniques
from meshwright.training.config import Config


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Inner:
    """A section inside a section."""

    depth: int = 1
    """How deep."""
    label: str | None = None


@dataclass(frozen=True)
class Row:
    pattern: str
    scale: float = 1.0
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Part:
    ratio: float = 0.5
    colour: Colour = Colour.RED
    switch: bool = False
    mixed: bool | int = True
    number: int | float = 1
    word: bool | Literal["shard"] = False
    names: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    inner: Inner | None = None
    pairs: tuple[tuple[str, int], ...] = ()
    level: Literal[1, 2] = 1

    def __post_init__(self) -> None:
        if self.ratio < -1e300:
            raise ValueError("part.ratio is too small for this part")


@dataclass(frozen=True)
class Tree:
    """A tree with one field of every kind."""

    steps: int = 10
    part: Part = field(default_factory=Part)
    rows: tuple[Row, ...] = ()


def values(annotation: Any, text: st.SearchStrategy) -> st.SearchStrategy:
    """Every value that a field so annotated may hold."""
    members = union_arms(annotation)
    if len(members) > 1:
        return st.one_of([values(member, text) for member in members])
    origin = get_origin(annotation)
    if is_section(annotation):
        return instances(annotation, text)
    if origin is Literal:
        return st.sampled_from(get_args(annotation))
    if origin is tuple and Ellipsis not in get_args(annotation):
        return st.tuples(*(values(item, text) for item in get_args(annotation)))
    if origin is tuple:
        return st.lists(values(get_args(annotation)[0], text), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(text, st.one_of(st.integers(), text, st.booleans()), max_size=3)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return st.sampled_from(annotation)
    scalars = {
        bool: st.booleans(),
        int: st.integers(),
        float: st.floats(min_value=-1e300),
        str: text,
        type(None): st.none(),
    }
    return scalars[annotation]


def instances(cls: type, text: st.SearchStrategy | None = None) -> st.SearchStrategy:
    text = st.text() if text is None else text
    return st.builds(cls, **{name: values(annotation, text) for name, annotation in field_types(cls).items()})


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types: True == 1 to Python, but not to a config."""
    return left == right and repr(left) == repr(right)


@pytest.mark.all
@pytest.mark.parametrize("cls", [Tree, Config])
def test_every_value_survives_a_dict_and_toml(cls):
    @settings(max_examples=60)
    @given(instances(cls))
    def survives(instance):
        assert same(from_dict(cls, to_dict(instance)), instance)
        assert same(from_dict(cls, tomllib.loads(to_toml(instance))), instance)

    survives()


def test_toml_file_with_every_kind_of_character_survives(tmp_path):
    text = "".join(map(chr, range(0x21, 0x100))) + "\t\r\n\b\f\x00\u2028\U0001f600'''\"\"\"\\"
    tree = Tree(part=Part(names=(text, ""), inner=Inner(label=text)), rows=(Row(text),))
    path = tmp_path / "tree.toml"
    path.write_text(to_toml(tree), encoding="utf-8", newline="")
    assert load_toml(Tree, path) == tree


def test_none_that_toml_cannot_say_is_refused():
    @dataclass(frozen=True)
    class Bad:
        width: int | None = 3

    with pytest.raises(ConfigError, match=r"width = None cannot be written"):
        to_toml(Bad(None))


# What is refused, and in what words
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"steps": True}, "steps = true is true or false; expected a whole number"),
        ({"steps": 1.0}, "steps = 1.0 is a number; expected a whole number"),
        ({"steps": "10"}, "Write it without quotes: steps = 10"),
        ({"part": {"switch": 1}}, "part.switch = 1 is a whole number; expected true or false"),
        ({"part": {"switch": "True"}}, "Write it without quotes: switch = true"),
        ({"part": {"ratio": True}}, "part.ratio = true is true or false; expected a number"),
        ({"part": {"mixed": 1.5}}, "expected true or false, or a whole number"),
        ({"part": {"word": "shrad"}}, """expected true or false, or "shard". Did you mean 'shard'?"""),
        ({"part": {"word": 1}}, "part.word = 1"),
        ({"part": {"level": True}}, "part.level = true is true or false; expected one of 1, 2"),
        ({"part": {"colour": "rot"}}, 'expected one of "red", "blue"'),
        ({"part": {"names": ["a", 2]}}, "part.names[1] = 2 is a whole number; expected text"),
        ({"part": {"inner": 3}}, "part.inner = 3 is a whole number; expected a table"),
        ({"part": 3}, "part = 3 is a whole number; expected a table"),
        ({"rows": {"pattern": "x"}}, "Write each as a table: [[rows]]"),
        ({"rows": [{"scale": 2}]}, "'rows[0].pattern' is missing; it is text"),
        ({"rows": [{"pattern": "x", "scael": 2}]}, "unknown key 'rows[0].scael'. Did you mean 'rows[].scale'?"),
        ({"steps": None}, "steps = None is nothing; expected a whole number"),
        ({"part": {"pairs": [["a"]]}}, 'part.pairs[0] = ["a"] is a list; expected a list of 2: text, a whole number'),
        ({"part": {"pairs": [["a", "b"]]}}, 'part.pairs[0][1] = "b" is text; expected a whole number'),
        ({"part": {"ratio": -1e301}}, "config: part.ratio is too small for this part"),
        ([], "is a list; expected a table"),
    ],
)
def test_wrong_type_is_refused_in_the_users_words(data, says):
    with pytest.raises(ConfigError) as caught:
        from_dict(Tree, data)
    assert says in str(caught.value)


def test_a_whole_number_serves_as_a_number_and_stays_one_where_both_are_wanted():
    assert same(from_dict(Tree, {"part": {"ratio": 2}}).part.ratio, 2.0)
    assert same(from_dict(Tree, {"part": {"number": 2}}).part.number, 2)
    assert same(from_dict(Tree, {"part": {"mixed": 1}}).part.mixed, 1)
    assert same(from_dict(Tree, {"part": {"mixed": True}}).part.mixed, True)


def test_a_number_too_large_for_a_float_is_refused():
    with pytest.raises(ConfigError, match=r"part\.ratio"):
        from_dict(Tree, {"part": {"ratio": 10**400}})


@pytest.mark.parametrize(
    ("data", "key", "repair"),
    [
        ({"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate", ""),
        ({"optimizer": {"warmup_steps": 1}}, "optimizer.warmup_steps", "It belongs elsewhere: schedule.warmup_steps."),
        ({"tp": 2}, "tp", "It belongs elsewhere: layout.tp."),
        ({"every": 2}, "every", "validation.every or checkpoint.every or logging.every"),
        ({"layout": {"dp_shrad": 2}}, "layout.dp_shrad", "Did you mean 'layout.dp_shard'?"),
        ({"optimizer": {"warmup_step": 1}}, "optimizer.warmup_step", "Did you mean 'schedule.warmup_steps'?"),
        ({"optimiser": {}}, "optimiser", "Did you mean 'optimizer'?"),
        ({"techniques": {"steps": 3}}, "techniques.steps", "It belongs elsewhere: steps."),
        (
            {"model": {"rope_scaling": {"fator": 3}}},
            "model.rope_scaling.fator",
            "Did you mean 'model.rope_scaling.factor'?",
        ),
    ],
)
def test_unknown_key_names_itself_its_right_place_and_its_neighbours(data, key, repair):
    with pytest.raises(ConfigError) as caught:
        from_dict(Config, data)
    text = str(caught.value)
    assert f"unknown key '{key}'" in text and repair in text
    section = key.rpartition(".")[0]
    neighbours = [
        name.removeprefix(f"{section}.") for name in public_keys(Config) if section and name.startswith(f"{section}.")
    ]
    assert all(name.partition(".")[0].partition("[")[0] in text for name in neighbours)


def test_an_instance_serves_as_its_section():
    assert from_dict(Config, {"layout": Layout(tp=2)}).layout.tp == 2


@pytest.mark.parametrize("name", field_types(Techniques))
def test_techniques_made_in_code_are_read_as_a_files_are(name):
    """Python lets every value into a dataclass."""
    with pytest.raises(ConfigError, match=rf"techniques: {name} = "):
        as_techniques(Techniques(**{name: object()}))


@pytest.mark.parametrize(
    ("techniques", "says"),
    [
        (Techniques(compile="no"), 'compile = "no" is text; expected true or false'),
        (Techniques(adapters=Adapters(kind="lorra")), "adapters.kind = \"lorra\" is text; .* Did you mean 'lora'"),
        (Techniques(precision=Precision(loss_scale="8")), "precision.loss_scale = .* Write it without quotes"),
        (Techniques(precision=Precision(compute=torch.bfloat16)), 'Write its name: compute = "bfloat16"'),
        (Techniques(loss_chunks=0), "techniques.loss_chunks = 0 is out of range: it must be 1 or more"),
        (RunTechniques(zero_stage=4), 'zero_stage = 4 .* expected one of "auto", 0, 1, 2, 3'),
    ],
)
def test_wrong_techniques_made_in_code_are_refused_in_the_words_of_a_file(techniques, says):
    with pytest.raises(ConfigError, match=says):
        as_techniques(techniques)


def test_what_code_says_shortly_is_understood():
    read = as_techniques(Techniques(freeze="embed", precision={"compute": "bf16"}, checkpoint_modules=["a"]))
    assert read == Techniques(freeze=("embed",), precision=Precision(compute="bf16"), checkpoint_modules=("a",))
    assert is_unset(as_techniques(Techniques()).loss_chunks) and not is_unset(as_techniques(Techniques(loss_chunks=1)))


@pytest.mark.parametrize("size", ["2", 1.0, True, None])
def test_a_size_that_is_no_whole_number_makes_no_layout(size):
    with pytest.raises(ConfigError, match="layout: tp = .* expected a whole number"):
        Layout(tp=size)
    assert Layout(tp="auto") == Layout()


def test_layout_text_is_read_strictly():
    assert Layout.parse("dp_shard=2,tp=2") == Layout(dp_shard=2, tp=2)
    with pytest.raises(ConfigError, match="layout: unknown key 'dp_shrad'. Did you mean 'dp_shard'"):
        Layout.parse("dp_shrad=2")


# Files
# --------------------------------------------------------------------------------------------------------------

FILE = '''# a comment with steps = 3
steps = 5
part.ratio = 0.25

[part.inner]
label = """
depth = 7
[rows]
"""  # depth = 8
"depth" = 2

[[rows]]
pattern = "a = b # c"
[[rows]]   # the second
pattern = "x"
inner = { depth = 1 }
[rows.inner]
'''


def test_line_index_finds_tables_rows_dotted_and_quoted_keys():
    text = FILE.replace("inner = { depth = 1 }\n", "")
    assert line_index(text) == {
        "steps": 2,
        "part.ratio": 3,
        "part.inner": 5,
        "part.inner.label": 6,
        "part.inner.depth": 10,
        "rows": 12,
        "rows[0]": 12,
        "rows[0].pattern": 13,
        "rows[1]": 14,
        "rows[1].pattern": 15,
        "rows[1].inner": 16,
    }


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("steps = 1\n\n[part]\nratio = 'x'\n", 4, "part.ratio"),
        ("steps = 1\r\n\r\n[part]\r\nratios = 1\r\n", 4, "part.ratios"),
        ("[part]\ninner = { depth = 1, dept = 2 }\n", 2, "part.inner.dept"),
        ("[[rows]]\npattern = 'a'\n[[rows]]\nscale = 2\n", 3, "rows[1].pattern"),
        ("[[rows]]\npattern = 'a'\n[[rows]]\npattern = 2\n", 4, "rows[1].pattern"),
        ("part.names = [\n  'a',\n  3,\n]\n", 1, "part.names[1]"),
        ("[partt]\n", 1, "partt"),
        ("steps = 1\nsteps = 2\n", 2, "not valid TOML"),
        ("steps = \n", 1, "not valid TOML"),
        ("steps = 1\n[part\n", 2, "not valid TOML"),
        ("steps = 1\nrows = [\n", 2, "not valid TOML"),
    ],
)
def test_errors_in_a_file_name_file_and_line(tmp_path, text, line, says):
    path = tmp_path / "run.toml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load_toml(Tree, path)
    assert str(caught.value).startswith(f"{path}:{line}: ") and says in str(caught.value)


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\nsteps = 1\n")
    for name, says in (("none.toml", "no such file"), ("latin.toml", "byte 5 is not UTF-8"), (".", "cannot be read")):
        with pytest.raises(ConfigError) as caught:
            load_toml(Tree, tmp_path / name)
        assert says in str(caught.value) and str(tmp_path / name) in str(caught.value)


def test_a_byte_order_mark_does_no_harm(tmp_path):
    path = tmp_path / "bom.toml"
    path.write_bytes(b"\xef\xbb\xbfsteps = 3\n")
    assert load_toml(Tree, path).steps == 3


# Flags
# --------------------------------------------------------------------------------------------------------------


def flags_of(config: Any, prefix: str = "") -> list[str]:
    """The config as flags, in the two forms that flags have."""
    words = []
    for name, value in to_dict(config).items():
        flag = f"--{prefix}{name}"
        if isinstance(value, dict):
            words += flags_of(getattr(config, name), f"{prefix}{name}.")
        elif row_of(field_types(type(config))[name]):
            inline = [", ".join(to_toml(row).rstrip("\n").split("\n")) for row in getattr(config, name)]
            words.append(f"{flag}=[{', '.join('{' + row + '}' for row in inline)}]")
        elif isinstance(value, list):
            words += [flag, *map(str, value)]
        elif isinstance(value, bool):
            words += [flag, str(value).lower()]
        elif value is not None:
            words.append(f"{flag}={value}")
    return words


# In a flag, an item that begins with a hyphen is the next flag, "none" is none, and brackets hold an array.
FLAG_TEXT = st.text().filter(lambda text: text[:1] not in ("-", "[") and text not in ("none", "None"))


@pytest.mark.all
@settings(max_examples=25, phases=[Phase.generate])  # to shrink a failure would take minutes
@given(instances(Config, FLAG_TEXT))
def test_every_key_is_a_flag_that_means_what_toml_means(config):
    assert same(parse_flags(Config, flags_of(config), prog="p"), config)


def test_flags_change_only_what_they_name():
    start = from_dict(Config, {"steps": 7, "layout": {"tp": 2}, "model": {"rope_scaling": {"factor": 2}, "dim": 64}})
    changed = parse_flags(Config, ["--layout.pp=2", "--model.dim=none"], default=start, prog="p")
    assert changed == dataclasses.replace(
        start, layout=Layout(tp=2, pp=2), model=dataclasses.replace(start.model, dim=None)
    )


@pytest.mark.first
@pytest.mark.parametrize(
    ("words", "want"),
    [
        (["--techniques.compile=true"], RunTechniques(compile=True)),
        (["--techniques.compile", "True"], RunTechniques(compile=True)),
        (["--techniques.cpu-offload=true"], RunTechniques(cpu_offload=True)),
        (["--techniques.reshard_after_forward=false"], RunTechniques(reshard_after_forward=False)),
        (["--techniques.reshard_after_forward=1"], RunTechniques(reshard_after_forward=1)),
        (["--techniques.sync_grad_accum=shard"], RunTechniques(sync_grad_accum="shard")),
        (["--techniques.zero_stage=2"], RunTechniques(zero_stage=2)),
        (["--techniques.freeze", "embed", "norm"], RunTechniques(freeze=("embed", "norm"))),
        (["--techniques.freeze=['embed', 'norm']"], RunTechniques(freeze=("embed", "norm"))),
        (["--techniques.freeze", '["embed", "norm"]'], RunTechniques(freeze=("embed", "norm"))),
        (["--techniques.freeze=[]"], RunTechniques(freeze=())),
    ],
)
def test_flags_of_mixed_types(words, want):
    assert same(parse_flags(Config, words, prog="p").techniques, want)


def test_an_array_that_is_no_toml_is_refused():
    with pytest.raises(ConfigError, match=r"--data.ignore: \[prompt\] is not TOML .* write \['a', 'b'\]"):
        parse_flags(Config, ["--data.ignore=[prompt]"], prog="p")


def test_a_key_of_an_absent_section_makes_it():
    made = parse_flags(Config, ["--model.rope-scaling.factor", "2"], prog="p").model.rope_scaling
    assert made is not None and made.factor == 2.0 and made.low_freq_factor == 1.0
    assert parse_flags(Config, [], prog="p").model.rope_scaling is None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--techniques.comple=true"], "Did you mean 'techniques.compile'?"),
        (["config.toml"], "p does not know 'config.toml'"),
        (["--steps=3", "4"], "p does not know '4'"),
        (["--layout"], "'layout' is a section: give its keys, like --layout.pp"),
    ],
)
def test_wrong_flags_are_refused_and_say_why(words, says):
    with pytest.raises(ConfigError) as refused:
        parse_flags(Config, words, prog="p")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--techniques.compile=maybe"],
            '--techniques.compile: techniques.compile = "maybe" is text; expected true or',
        ),
        (["--techniques.compile"], "--techniques.compile needs a value: true or false"),
        (["--steps", "--seed=1"], "--steps needs a value: a whole number"),
        (["--steps=1.5"], "steps = 1.5 is a number; expected a whole number"),
        (["--steps=true"], "steps = true is true or false; expected a whole number"),
        (["--optimizer.overrides=[{patern = 'x'}]"], "unknown key 'optimizer.overrides[0].patern'"),
        (["--optimizer.overrides=[{"], "--optimizer.overrides: [{ is not TOML"),
        (["--optimizer.overrides=[1]"], "optimizer.overrides[0] = 1 is a whole number; expected a table"),
        (["--layout.tp=none"], 'layout.tp = "none" is text; expected a whole number'),
        (["--layout.tp="], "--layout.tp needs a value: a whole number"),
        (["--layout.tp", "two"], 'layout.tp = "two" is text; expected a whole number'),
        (["--optimizer.lr=fast"], 'optimizer.lr = "fast" is text; expected a number'),
        (["--techniques.cpu-offload=optimiser"], "Did you mean 'optimizer'?"),
    ],
)
def test_values_of_another_type_are_refused_in_the_words_of_a_file(words, says):
    with pytest.raises(ConfigError) as refused:
        parse_flags(Config, words, prog="p")
    assert says in str(refused.value)


@pytest.mark.parametrize("words", [["--steps", "7"], ["--layout.dp_shard=-1"], ["--epochs=none"], ["--epochs", "0.5"]])
def test_values_of_their_type_are_taken(words):
    parse_flags(Config, words, prog="p")


def test_the_optimizer_has_one_home():
    assert Config.from_dict({"optimizer": {"kind": "muon"}}).requested.optimizer == "muon"
    with pytest.raises(ConfigError, match=r"techniques.optimizer'. It belongs elsewhere: optimizer.kind"):
        Config.from_dict({"techniques": {"optimizer": "muon"}})


def test_a_list_given_twice_is_refused_not_shortened():
    with pytest.raises(ConfigError, match=r"--data\.source is given 2 times"):
        parse_flags(Config, ["--data.source=a", "--data.source", "b"], prog="p")


def test_help_tells_every_key_and_its_doc():
    text = " ".join(keys_text(Config).split())
    for key in public_keys(Config):
        if "[]" not in key:
            assert f"--{key} " in text
            assert field_doc(Config, key).replace("``", "")[:40].rpartition(" ")[0] in text


def test_field_doc_reads_the_text_below_the_field():
    assert field_doc(Inner, "depth") == "How deep."
    assert field_doc(Tree, "part.inner.depth") == field_doc(Tree, "rows[].inner.depth") == "How deep."
    assert field_doc(Inner, "label") == ""
    with pytest.raises(KeyError):
        field_doc(Tree, "part.depth")


def test_a_lone_word_is_a_list_of_one():
    assert from_dict(Adapters, {"targets": "q_proj"}).targets == ("q_proj",)

    @dataclass
    class Pair:
        both: tuple[str, str] = ("a", "b")

    with pytest.raises(ConfigError, match="both"):
        from_dict(Pair, {"both": "a"})
