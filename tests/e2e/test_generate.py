"""generate: a text as it is written, conversations in a chat template, and folders of transformers' files."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from e2e_runs import Job
from tokenizers import Tokenizer

from meshwright.cli.arguments import open_model, open_run
from meshwright.data.tokenizers import FileTokenizer
from meshwright.data.turns import ChatTemplate
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.training.run.occupancy import occupied
from meshwright.training.run.opened import Conversation, Opened, Sampler, ends_of_turn

pytestmark = pytest.mark.all

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def ran(pool, tiny, tmp_path_factory):
    """A run of the decoder on bytes."""
    config = tiny | {"model.size": "debug", "out": str(tmp_path_factory.mktemp("runs")), "steps": 2}
    config |= {"sample.tokens": 20, "sample.prompt": "def "}
    return pool.run(Job(config), world=1, timeout=60)[0].folder


@pytest.fixture
def run(ran, tmp_path):
    return shutil.copytree(ran, tmp_path / "run")


@pytest.fixture(scope="module")
def hf(model, tmp_path_factory):
    """A folder as people download it: weights, tokenizer, chat template."""
    folder = shutil.copytree(model, tmp_path_factory.mktemp("hf") / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def generated(folder, ids, tokens):
    """The likeliest ids behind ``ids``, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    end = FileTokenizer(folder).end_of_document
    prompt = torch.tensor([ids])
    options = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": end, "pad_token_id": end}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, len(ids) :].tolist()


def of_template(folder, messages):
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)


def test_a_text_comes_in_parts_and_is_whole_in_the_end(ask, run):
    sampler = Sampler.of(Opened.of_run(*open_run(str(run))), 1, temperature=0.8, seed=3)
    parts = []
    sampler.continue_text("né ", 30, parts.append)
    ids = sampler.model.generate(list("né ".encode()), 30, temperature=0.8, seed=3, stop=256)
    assert len(parts) > 10 and "".join(parts) == sampler.opened.tokenizer.decode([*"né ".encode(), *ids])
    words = "--prompt=né ", "--tokens=30", "--temperature=0.8", "--seed=3"
    assert ask("generate", run, *words) == (0, "".join(parts) + "\n", "")


def test_a_folder_of_transformers_is_continued_as_transformers_does(ask, hf):
    ids = FileTokenizer(hf).encode("loss(a)").tolist()
    expected = FileTokenizer(hf).decode([*ids, *generated(hf, ids, 12)])
    words = ["generate", hf, "--prompt=loss(a)", "--tokens=12", "--temperature=0", "--chat=false"]
    assert ask(*words) == (0, expected + "\n", "")
    status, out, err = ask("generate", hf, "--prompt=loss(a)", "--tokens=5", "--top_k=1", "--seed=8", "--chat=false")
    assert (status, err) == (0, "") and expected.startswith(out.rstrip("\n"))


@pytest.fixture
def asked(monkeypatch):
    """The ids that models are asked to continue."""
    found, generate = [], ParallelModel.generate

    def recorded(model, ids, *words, **options):
        found.append(list(ids))
        return generate(model, ids, *words, **options)

    monkeypatch.setattr(ParallelModel, "generate", recorded)
    return found


def test_a_question_goes_through_the_chat_template_once(ask, hf, asked):
    ids = of_template(hf, [{"role": "user", "content": "sum"}])
    expected = FileTokenizer(hf).decode(generated(hf, ids, 10))
    assert ask("generate", hf, "--chat", "--prompt=sum", "--tokens=10", "--temperature=0") == (0, expected + "\n", "")
    assert asked == [ids]


def test_a_conversation_keeps_its_turns(ask, hf, asked, monkeypatch):
    messages, expected, prompts = [], "", []
    for question in ("sum", "axis"):
        messages.append({"role": "user", "content": question})
        prompts.append(of_template(hf, messages))
        answer = FileTokenizer(hf).decode(generated(hf, prompts[-1], 4))
        messages.append({"role": "assistant", "content": answer})
        expected += answer + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("sum\n\naxis\n/exit\nmore\n"))
    assert ask("generate", hf, "--chat", "--tokens=4", "--temperature=0") == (0, expected, "")
    assert asked == prompts


def test_an_answer_ends_with_its_turn(hf, tmp_path):
    folder = shutil.copytree(hf, tmp_path / "hf")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 71, "content": "<|im_end|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    known, end = FileTokenizer(folder), Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    ends = ends_of_turn(ChatTemplate(TEMPLATE.replace("<|endoftext|>", "<|im_end|>\n"), {}), known)
    assert ends == {end} and known.end_of_document != end
    assert ends_of_turn(ChatTemplate(TEMPLATE.replace("<|endoftext|>", "\n"), {}), known) == set()

    opened = open_model(str(folder))
    sampler = Sampler.of(opened, 1, temperature=0.0)
    chat = Conversation(sampler, ChatTemplate(TEMPLATE.replace("<|endoftext|>", "<|im_end|>\n"), {}))
    likeliest = sampler.model.generate
    sampler.model.generate = lambda ids, tokens, *, stop, **more: likeliest(ids, 0, **more) if end in stop else [1]
    assert chat.ask("sum", 5, lambda part: None) == ""


@pytest.mark.first("words3---tokens = -1 is out of range: it must be a finite number, 0 or more")
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["{run}", "--chat"], "has no chat template"),
        (["{run}", "--chat", "--template=gone.jinja"], "--template gone.jinja does not exist"),
        (["{run}", "--template=gone.jinja"], "--template is for --chat"),
        (["{run}", "--tokens=-1"], "--tokens = -1 is out of range: it must be a finite number, 0 or more"),
        (["{run}", "--prompt=bad \udcff byte"], "the text to continue is not UTF-8 behind 'bad '"),
        (["{run}", "--top_p=0"], "--top-p = 0.0 is out of range"),
        (["{run}", "--threads=0"], "--threads = 0 is out of range"),
        (["{run}", "--dtype=bf16"], "--dtype does not go with {run}, which is the folder of a run"),
        (["{hf}", "--step=3"], "--step does not go with {hf}, which is a model of transformers"),
        (["{hf}", "--dtype=bf17"], "--dtype = 'bf17' is not a dtype"),
        (["{empty}"], "without a config.json, so it is no model of transformers either"),
        (["{config}"], "has a config.json and no weights"),
        (["{bare}"], "holds no tokenizer.json: name the tokenizer that the model was trained with"),
    ],
)
def test_bad_requests_are_refused_in_a_sentence(ask, run, hf, tmp_path, words, complaint):
    places = {"run": run, "hf": hf, **{name: tmp_path / name for name in ("empty", "config", "bare")}}
    (tmp_path / "empty").mkdir()
    shutil.copytree(hf, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(hf, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    status, out, err = ask("generate", *(word.format(**places) for word in words))
    assert (status, out) == (2, "") and complaint.format(**places) in err and len(err.splitlines()) == 1


def test_it_says_whether_the_chat_template_is_used_and_how_it_is(ask, hf):
    words = ["generate", hf, "--prompt=sum", "--tokens=1", "--temperature=0"]
    assert ask(*words)[2] == "meshwright: as plain text (--chat: in the chat template)\n"
    assert ask(*words, "--chat")[2] == ask(*words, "--chat=false")[2] == ""


def test_a_template_outside_a_run_is_not_opened_unasked(ask, run, tmp_path):
    named = tmp_path / "chat.jinja"
    named.write_text("{{ messages[-1].content }}")
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace('template = ""', f'template = "{named}"'))
    status, out, err = ask("generate", run, "--chat", "--prompt=the", "--tokens=3")
    assert (status, out) == (2, "") and f"--template {named}" in err
    assert ask("generate", run, "--chat", "--prompt=the", "--tokens=3", f"--template={named}")[0] == 0


def test_a_run_says_why_it_has_no_checkpoint_yet(ask, run):
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints" / "step-00000002.partial").mkdir(parents=True)
    status, _, err = ask("generate", run)
    assert status == 2 and "step-00000002.partial is what an interrupted save left" in err
    with occupied(run):
        status, _, err = ask("generate", run)
    assert status == 2 and f"is being trained by another job (process {os.getpid()} on" in err and "wait" in err


def test_a_run_that_is_being_trained_says_which_step_writes(ask, run):
    with occupied(run):
        status, out, err = ask("generate", run, "--tokens=2")
    assert (
        status == 0 and out.startswith("def ") and err == f"meshwright: {run}, step 2; the run is still being trained\n"
    )
    assert ask("generate", run, "--tokens=2") == (0, out, "")


def test_a_closed_pipe_and_ctrl_c_end_it_cleanly(environment, run):
    words = [sys.executable, "-m", "meshwright", "generate", str(run), "--tokens=1000000"]
    started = [subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in "ab"]
    for process in started:
        assert process.stdout.read(6)
    started[0].send_signal(signal.SIGINT)
    text, err = started[0].communicate(timeout=30)
    assert (started[0].returncode, err, text[-1:]) == (130, b"meshwright: interrupted\n", b"\n")
    started[1].stdout.close()
    assert (started[1].wait(timeout=30), started[1].stderr.read()) == (141, b"")
    started[1].stderr.close()
