"""Figures on lm-eval's tasks: those of lm-eval's own class for transformers' models, on every layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.families import save_tokenizer, saved
from support.followed import found_in
from support.problems import FSDP2, ONE

from meshwright import ConfigError, Layout
from meshwright.cli.arguments import open_model
from meshwright.core.errors import MeshwrightError
from meshwright.data.tokenizers import FileTokenizer
from meshwright.training.config import ProcessConfig

pytestmark = pytest.mark.all

CHOICES = """
task: ours_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: ours_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.json}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}, {{metric: bits_per_byte}}]
"""
WRITTEN = """
task: ours_written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/written.json}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["{end}"], max_gen_toks: 12}}
metric_list: [{{metric: exact_match}}]
"""
NAMES = ("ours_choices", "ours_perplexity", "ours_written")
LAID_OUT = {
    "one": ONE,
    "fsdp": FSDP2,
    "tp": Layout(tp=2, dp_shard=1),
    "pp": Layout(pp=2, dp_shard=1),
    "cp": Layout(cp=2, dp_shard=1),
}


def written_by_transformers(folder, question, tokens):
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = FileTokenizer(folder)
    ids = torch.tensor([tokenizer.encode(question).tolist()])
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": tokenizer.end_of_document}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return tokenizer.decode(out[0, ids.shape[1] :].tolist())


@pytest.fixture(scope="module")
def places(tmp_path_factory, pool):
    """A model, and a folder of tasks with data beside them."""
    model, tasks = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("tasks")
    saved(model, "llama")
    save_tokenizer(model)
    questions = ["loss(a", "if x=1:\n", "mesh", "axis(1,2)=", "the sum of", "def f(x)", "rank"]
    rows = [
        {"question": q, "choices": [" a", " step", "(b, c)", q[::-1]][: 2 + i % 3], "answer": i % 2}
        for i, q in enumerate(questions)
    ]
    (tasks / "choices.json").write_text("\n".join(map(json.dumps, rows)))
    texts = [{"text": " ".join(questions) * n} for n in (1, 2, 4)]  # longer than the model's window of 64
    (tasks / "texts.json").write_text("\n".join(map(json.dumps, texts)))
    answers = [pool.run(written_by_transformers, model, q, 12, world=1)[0] for q in questions[:4]]
    end = answers[0][3]
    answers = ["no", *(answer.split(end)[0] for answer in answers[1:])]
    rows = [{"question": q, "answer": a} for q, a in zip(questions[:4], answers, strict=True)]
    (tasks / "written.json").write_text("\n".join(map(json.dumps, rows)))
    for name, yaml in (("choices", CHOICES), ("rolling", ROLLING), ("written", WRITTEN)):
        (tasks / f"{name}.yaml").write_text(yaml.format(folder=tasks, end=end))
    return model, tasks


def by_their_own_class(model, tasks):
    import os

    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    os.environ["DISABLE_MULTIPROC"] = "1"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(model), tokenizer=tokenizer, batch_size=1)
    options = {"log_samples": False, "task_manager": TaskManager(include_path=str(tasks), include_defaults=False)}
    found = lm_eval.simple_evaluate(theirs, tasks=list(NAMES), **options)["results"]
    return {
        task: {key.removesuffix(",none"): value for key, value in figures.items() if isinstance(value, float)}
        for task, figures in found.items()
    }


def by_ours(model, tasks, layout, rows, names=NAMES):
    from meshwright.integrations.lm_eval import TaskRequest, evaluate_tasks
    from meshwright.training.evaluation import ModelOnRanks

    request = TaskRequest(
        ModelOnRanks(open_model(str(model)), layout, ProcessConfig()), names, str(tasks), batch_rows=rows
    )
    found = evaluate_tasks(request)
    return {
        task: {key: value for key, value in figures.items() if isinstance(value, float)}
        for task, figures in found.items()
    }


@pytest.mark.parametrize(("name", "rows"), [("one", 1), ("one", 5), ("fsdp", 2), ("tp", 4), ("pp", 3), ("cp", 3)])
def test_figures_are_those_of_lm_evals_own_class(spmd, places, name, rows):
    ((expected),) = spmd(1, by_their_own_class, *places, timeout=300)
    assert 0 < expected["ours_written"]["exact_match"] < 1 and set(expected) == set(NAMES)
    found, *others = spmd(LAID_OUT[name].world, by_ours, *places, LAID_OUT[name], rows, timeout=300)
    for task, figures in expected.items():
        assert found[task] == pytest.approx(figures, rel=2e-6), task
    assert not any(others)


WRONG = {
    ("ours_choises",): (ConfigError, "has no task 'ours_choises'. Did you mean 'ours_choices'?"),
    ("ours_absent",): (MeshwrightError, "lm-eval could not read its data or its files"),
    (): (ConfigError, "--tasks is empty"),
}


def refused(model, tasks):
    from meshwright.integrations.lm_eval import TaskRequest, evaluate_tasks
    from meshwright.training.evaluation import ModelOnRanks

    for names in WRONG:
        try:
            evaluate_tasks(TaskRequest(ModelOnRanks(open_model(str(model)), ONE, ProcessConfig()), names, tasks))
        except MeshwrightError as error:
            yield type(error), str(error)


def refusals(model, tasks):
    import lm_eval.tasks

    found = list(refused(model, tasks))
    assert by_ours(model, tasks, ONE, 1, NAMES[:1])
    names = found_in("like --tasks (.*)", found[-1][1]).split(",")
    return found, [list(Path(lm_eval.tasks.__file__).parent.rglob(f"{name}.yaml")) for name in names]


@pytest.mark.follows("--tasks")
def test_tasks_that_are_not_there_are_refused_in_a_sentence(spmd, places, tmp_path):
    absent = CHOICES.replace("ours_choices", "ours_absent").replace("choices.json", "gone.json")
    (tmp_path / "absent.yaml").write_text(absent.format(folder=tmp_path))
    (tmp_path / "choices.yaml").write_text(CHOICES.format(folder=places[1]))
    (tmp_path / "choices.json").write_bytes((places[1] / "choices.json").read_bytes())
    ((found, named),) = spmd(1, refusals, places[0], str(tmp_path), timeout=300)
    assert "name tasks of lm-eval, like --tasks" in found[-1][1] and all(named)
    for (kind, text), (error, complaint) in zip(found, WRONG.values(), strict=True):
        assert kind is error and complaint in text and len(text.splitlines()) == 1
