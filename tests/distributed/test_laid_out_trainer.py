"""Trainer over a layout is Trainer in one process: losses, evaluation, clipping, folders, resumed runs."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.followed import found_in
from support.from_pages import function_of, furthest, meet
from support.odd import written
from support.ranks import refusal
from support.tools import fresh_accelerate

import meshwright
from meshwright import ConfigError, Layout, UnsupportedError

pytestmark = pytest.mark.all

CLOSE = 1e-6


def arguments(folder: str, **options: Any) -> dict[str, Any]:
    base = {"output_dir": folder, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4}
    base |= {"learning_rate": 1e-2, "logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return base | {"save_strategy": "no", "max_grad_norm": 0.5} | options


def made(folder: str, layout: Layout, options: dict[str, Any], given: dict[str, Any] | None = None) -> Any:
    """A trainer on this rank; ``given`` are its own keywords."""
    from transformers import TrainingArguments

    from meshwright.integrations.transformers import Trainer

    model, rows, padded = (function_of("yours", name) for name in ("your_model", "your_rows", "padded"))
    given = {"train_dataset": rows(), "data_collator": padded, "eval_dataset": rows(8), **(given or {})}
    return Trainer(
        given.pop("model", None) or model(), TrainingArguments(**arguments(folder, **options)), layout=layout, **given
    )


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(folder: str, layout: Layout, options: dict[str, Any], resume: str | None = None) -> dict[str, Any]:
    """A job: train, evaluate, and tell."""
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        trainer = made(folder, layout, options)
        trainer.train(resume_from_checkpoint=resume)
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        found = {"losses": losses(trainer), "norms": norms, "eval": trainer.evaluate()["eval_loss"]}
        found["weights"] = trainer.parallel.state_dict(rank0_only=True)
        return found | {"tokens": trainer.state.num_input_tokens_seen, "epoch": trainer.state.epoch}


def by_hand(steps: int, count: int = 48) -> tuple[list[float], list[float]]:
    """The same by plain torch in one process: the rows of Trainer's order, cut by none of our code or Trainer's."""
    from accelerate.data_loader import SeedableRandomSampler

    model, rows, padded = (function_of("yours", name) for name in ("your_model", "your_rows", "padded"))
    model, rows = model(), rows(count)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    order = list(SeedableRandomSampler(rows, data_seed=42))
    found, norms = [], []
    for step in range(steps):
        batch = padded([rows[index] for index in order[8 * step : 8 * (step + 1)]])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        targets = batch["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=-100)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found, norms


def evaluated_by_theirs(folder: str, rows: int) -> tuple[float, int]:
    """A job: transformers' own Trainer (DDP) trains 4 steps; the evaluation's loss, and tokens."""
    from transformers import Trainer, TrainingArguments

    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        model, own, padded = (function_of("yours", name) for name in ("your_model", "your_rows", "padded"))
        options = {
            "per_device_train_batch_size": rows,
            "per_device_eval_batch_size": rows,
            "include_num_input_tokens_seen": "non_padding",
        }
        args = TrainingArguments(**arguments(folder, **options))
        trainer = Trainer(model(), args, train_dataset=own(), eval_dataset=own(8), data_collator=padded)
        trainer.train()
        return trainer.evaluate()["eval_loss"], trainer.state.num_input_tokens_seen


LAYOUTS = {
    "dp_shard=2": Layout(dp_shard=2),
    "dp_shard=2,tp=2": Layout(dp_shard=2, tp=2),
    "pp=2": Layout(pp=2, dp_shard=1),
    "dp_replicate=2,cp=2": Layout(dp_replicate=2, dp_shard=1, cp=2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process(spmd, tmp_path, name):
    layout = LAYOUTS[name]
    rows = 2 if layout.dp_shard * layout.dp_replicate == 2 else 4
    options = {"per_device_train_batch_size": rows, "per_device_eval_batch_size": rows}
    options |= {"include_num_input_tokens_seen": "non_padding"}
    ranks = spmd(layout.world, run, str(tmp_path), layout, options)
    expected, norms = spmd(1, by_hand, 4)[0]
    held, tokens = spmd(4 // rows, evaluated_by_theirs, str(tmp_path), rows)[0]
    for found in ranks:
        assert furthest(found["losses"], expected) <= CLOSE
        assert furthest(found["norms"], norms) <= CLOSE
        assert abs(found["eval"] - held) <= CLOSE
        assert found["tokens"] == tokens


@pytest.mark.parametrize("name", ["dp_shard=2", "dp_shard=2,tp=2", "dp_replicate=2,cp=2"])
@pytest.mark.parametrize("count", [11, 13, 15])
def test_rows_that_do_not_fill_the_last_step_are_learnt_once(spmd, tmp_path, name, count):
    """Ranks have as many rows by repeating some, from which nothing is learnt: of 11, the second rank has none left."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 2}
    expected, norms = spmd(1, by_hand, 2, count)[0]
    for losses, found, _ in spmd(LAYOUTS[name].world, few_rows, str(tmp_path), LAYOUTS[name], options, count):
        assert furthest(losses, expected) <= CLOSE and furthest(found, norms) <= CLOSE


def few_rows(folder: str, layout: Layout, options: dict[str, Any], count: int) -> Any:
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        trainer = made(folder, layout, options, {"train_dataset": function_of("yours", "your_rows")(count)})
        trainer.train()
        norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
        return losses(trainer), norms, trainer.state.epoch


def whole_run(
    folder: str, layout: Layout, options: dict[str, Any], given: dict[str, Any], resume: str | bool | None
) -> Any:
    """A job: a run of a model from a folder on meta, or resumed; (losses, norms, learning rates)."""
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        trainer = made(folder, layout, options, given)
        trainer.train(resume_from_checkpoint=resume)
        if resume is None:
            trainer.save_model()
        return losses(trainer), [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_flag_of_precision_is_the_plans(spmd, tmp_path):
    """bf16: weights stay float32, and losses those of bfloat16."""
    found = spmd(2, run, str(tmp_path), Layout(dp_shard=2), {"bf16": True})
    expected, _ = spmd(1, by_hand, 4)[0]
    assert CLOSE < furthest(found[0]["losses"], expected) < 3e-2
    assert {tensor.dtype for tensor in found[0]["weights"].values()} == {torch.float32}


def test_a_run_goes_on_in_another_layout_and_its_folders_are_transformers(spmd, tmp_path):
    """Saved on dp_shard 2 at step 2 of 4; resumed on tp 2; from_pretrained reads checkpoint and model, as trained."""
    from transformers import AutoModelForCausalLM

    options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2, "load_best_model_at_end": False}
    expected, _ = spmd(1, by_hand, 4)[0]
    first, rates = spmd(2, whole_run, str(tmp_path), Layout(dp_shard=2), options, {}, None)[0]
    assert furthest(first, expected) <= CLOSE
    checkpoint = tmp_path / "checkpoint-2"
    assert {"config.json", "model.safetensors", "scheduler.pt", "trainer_state.json", "meshwright"} <= {
        path.name for path in checkpoint.iterdir()
    }
    other = {**options, "per_device_train_batch_size": 4}
    second, resumed = spmd(2, whole_run, str(tmp_path), Layout(dp_shard=1, tp=2), other, {}, str(checkpoint))[0]
    assert furthest(second, expected) <= CLOSE and resumed == rates
    batch = function_of("yours", "padded")(function_of("yours", "your_rows")(4))
    last = AutoModelForCausalLM.from_pretrained(tmp_path)
    resumed_last = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    middle = AutoModelForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        logits = [model(**batch).logits for model in (last, resumed_last, middle)]
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 < (logits[0] - logits[2]).abs().max()


def saved_run(folder: str, layout: Layout, asynchronous: bool) -> dict[str, Any]:
    """A job: a run that saves at every step; the bytes of what it kept, and how its saves were made."""
    from transformers import TrainerCallback

    from meshwright.integrations import trainer_private

    class Reads(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            newest = trainer_private.last_whole(args.output_dir)
            assert newest is not None and newest.endswith(f"checkpoint-{state.global_step}")

    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3}
        trainer = made(folder, layout, options, {} if asynchronous else {"callbacks": [Reads()]})
        asked, save = [], trainer_private.save
        trainer_private.save = lambda *args, **given: (asked.append(given["asynchronous"]), save(*args, **given))[1]
        try:
            trainer.train()
        finally:
            trainer_private.save = save
        kept = sorted(Path(folder).glob("checkpoint-*"))
        found = {f"{path.name}/{key}": value for path in kept for key, value in written(path / "meshwright").items()}
        whole = {f"{path.name}/model": (path / "model.safetensors").read_bytes() for path in kept}
        return {"asked": asked, "state": found, "model": whole}


@pytest.mark.parametrize("name", ["dp_shard", "tp"])
def test_saves_beside_training_have_the_bytes_of_saves_that_are_waited_for(spmd, tmp_path, name):
    """A callback that reads the folder in on_save makes them wait; so does the last one, which keeps the limit."""
    layout = Layout(dp_shard=2) if name == "dp_shard" else Layout(dp_shard=1, tp=2)
    beside, waited = (spmd(2, saved_run, str(tmp_path / str(way)), layout, way)[0] for way in (True, False))
    assert beside["asked"] == [True, True, True, False] and waited["asked"] == [False] * 4
    assert beside["model"] == waited["model"] and len(beside["model"]) == 3
    assert beside["state"].keys() == waited["state"].keys()
    assert [key for key, value in waited["state"].items() if not torch.equal(value, beside["state"][key])] == []


def test_true_resumes_from_the_last_checkpoint_that_is_whole(spmd, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1}
    first, _ = spmd(2, whole_run, str(tmp_path), Layout(dp_shard=2), options, {}, None)[0]
    for step in (3, 4):
        (tmp_path / f"checkpoint-{step}" / "meshwright" / "manifest.json").unlink()
    again, _ = spmd(2, whole_run, str(tmp_path), Layout(dp_shard=2), options, {}, True)[0]
    assert again[:2] == first[:2] and furthest(again, first) <= CLOSE and len(again) == 4


def test_a_model_is_read_from_its_folder(spmd, tmp_path):
    """Each rank reads its slices: the same losses as of the module with weights."""
    function_of("yours", "your_model")().save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model")}
    found, _ = spmd(2, whole_run, str(tmp_path / "run"), Layout(dp_shard=2), {}, given, None)[0]
    assert furthest(found, spmd(1, by_hand, 4)[0][0]) <= CLOSE


def refused(folder: str, options: dict[str, Any], given: dict[str, Any], environment: dict[str, str]) -> str:
    """A job: the words in which a trainer is refused."""
    import os

    with fresh_accelerate(fsdp=False):
        meet()
        os.environ.update(environment)
        try:
            made(folder, Layout(dp_shard=1), options, given)
        except (ConfigError, UnsupportedError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for name in environment:
                os.environ.pop(name, None)
    return ""


def loss_of_ones_own(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


REFUSED = {
    "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, {}, {}, "loss_fn="),
    "optim": ({"optim": "adafactor"}, {}, {}, "adamw_torch_fused"),
    "neftune_noise_alpha": ({"neftune_noise_alpha": 5.0}, {}, {}, "before it is handed over"),
    "train_sampling_strategy": ({"train_sampling_strategy": "group_by_length"}, {}, {}, "random, sequential"),
    "fsdp": ({"fsdp": "full_shard"}, {}, {}, "layout=Layout(...)"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, {}, {}, "meshwright plan"),
    "bf16": ({"bf16": True}, {"techniques": {"precision": {"compute": "float32"}}}, {}, "leave one of them out"),
    "compute_loss_func": ({}, {"compute_loss_func": loss_of_ones_own}, {}, "loss_fn="),
    "ACCELERATE_USE_FSDP": ({}, {}, {"ACCELERATE_USE_FSDP": "true"}, "torchrun"),
    "dispatch_batches": ({"accelerator_config": {"dispatch_batches": True}}, {}, {}, "its own rows"),
}


@pytest.mark.first
@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused_by_name(spmd, tmp_path, name):
    options, given, environment, remedy = REFUSED[name]
    said = spmd(1, refused, str(tmp_path), options, given, environment)[0]
    assert said.startswith("ConfigError") and name in said and remedy in said, said
    assert len(said) < 400


class Own(torch.nn.Module):
    """A model that is not transformers': the small one, in a module around it."""

    def __init__(self):
        super().__init__()
        self.inner = function_of("yours", "your_model")()

    def forward(self, input_ids: Any, attention_mask: Any = None) -> Any:
        return self.inner(input_ids, attention_mask=attention_mask).logits


def summed(logits: Any, labels: Any) -> Any:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def advised(folder: str) -> list[str]:
    """A job: the words in which an optimizer and a save are refused, after which what they advise is done."""
    layout, saves = Layout(dp_shard=1), {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    own = {"model": Own(), "loss_fn": summed}
    other = {"optimizers": (torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), None)}
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        texts = [refusal(lambda: made(folder, layout, {}, other))]
        given = eval(found_in("optimizer_cls_and_kwargs=(.*)", texts[0]))
        for options, more in (({}, {"optimizer_cls_and_kwargs": given}), ({"optim": "adamw_torch"}, {})):
            trainer = made(folder, layout, {"max_steps": 1, **options}, more)
            trainer.train()
            assert type(trainer.optimizer.optimizer) is torch.optim.AdamW
        trainer = made(folder, layout, saves, own)
        texts.append(refusal(trainer.train))
        trainer = made(folder, layout, saves | {"save_strategy": "no"}, own)
        trainer.train()
        meshwright.save(trainer.parallel, f"{folder}/shards")
        meshwright.load(trainer.parallel, f"{folder}/shards")
    return texts


@pytest.mark.first
@pytest.mark.follows("optimizer_cls_and_kwargs=", "save()")
def test_what_the_trainer_advises_is_done(spmd, tmp_path):
    of_optimizer, of_save = spmd(1, advised, str(tmp_path))[0]
    assert "optimizers= was made before the layout, for whole parameters: give optim=" in of_optimizer
    assert "is no model of transformers' own, which save_model could write: set save_strategy = 'no'" in of_save


def overriding(folder: str) -> str:
    """A job: a subclass with a loss that nothing would call."""
    from meshwright.integrations.transformers import Trainer

    class Mine(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    with fresh_accelerate(fsdp=False):
        try:
            Mine(function_of("yours", "your_model")())
        except ConfigError as error:
            return str(error)
    return ""


@pytest.mark.first
def test_a_loss_that_is_overridden_is_refused(spmd, tmp_path):
    said = spmd(1, overriding, str(tmp_path))[0]
    assert "Mine.compute_loss" in said and "loss_fn=" in said


def predicted(folder: str, layout: Layout) -> dict[str, Any]:
    """A job: predictions of a few rows, handed to compute_metrics; and the best of three checkpoints at the end."""
    seen: dict[str, Any] = {"rows": []}

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen["rows"].append(len(prediction.predictions))
        seen.update(logits=prediction.predictions.copy(), labels=prediction.label_ids.copy())
        return {"odd": float((prediction.predictions.argmax(-1) % 2).mean())}

    options = {"max_steps": 3, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        trainer = made(folder, layout, options, {"compute_metrics": compute_metrics})
        trainer.train()
        losses_seen = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        after = trainer.evaluate()["eval_loss"]
        return seen | {"losses": losses_seen, "after": after, "state": trainer.parallel.state_dict()}


def test_metrics_see_every_row_once_and_the_best_checkpoint_is_read(spmd, tmp_path):
    """The worst, as it is asked for: the first."""
    ranks = spmd(4, predicted, str(tmp_path), Layout(dp_shard=2, tp=2))
    model, batch = (
        function_of("yours", "your_model")(),
        function_of("yours", "padded")(function_of("yours", "your_rows")(8)),
    )
    for found in ranks:
        assert found["rows"] == [8] * 4
        assert abs(found["after"] - max(found["losses"])) <= CLOSE and found["losses"][0] > found["losses"][-1]
        model.load_state_dict(found["state"])
        with torch.no_grad():
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
            assert torch.tensor(found["logits"][row, :length]).allclose(logits[row, :length], atol=1e-5)
            assert found["labels"][row, :length].tolist() == batch["labels"][row, :length].tolist()


def classified(folder: str, layout: Layout | None) -> list[float]:
    """A job: a classifier's loss of each step, by transformers' Trainer where no layout is given.

    All rows are one microbatch of one process then: it adds up the means of several.
    """
    from transformers import LlamaConfig, LlamaForSequenceClassification, Trainer, TrainingArguments

    from meshwright.integrations.transformers import Trainer as LaidOut

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0)
    config.num_attention_heads, config.num_key_value_heads, config.num_labels = 4, 2, 3
    model, rows = LlamaForSequenceClassification(config), function_of("yours", "your_rows")(shortest=8, longest=8)
    named = [{"input_ids": row["input_ids"], "labels": row["input_ids"][0] % 3} for row in rows]
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        alone = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1} if layout is None else {}
        args = TrainingArguments(**arguments(folder, **alone))
        given = {} if layout is None else {"layout": layout}
        trainer = (Trainer if layout is None else LaidOut)(model, args, train_dataset=named, **given)
        trainer.train()
        return losses(trainer)


def test_a_model_with_another_loss_trains_its_own(spmd, tmp_path):
    theirs = spmd(1, classified, str(tmp_path), None)[0]
    assert furthest(spmd(2, classified, str(tmp_path), Layout(dp_shard=2))[0], theirs) <= CLOSE


def adapted(folder: str) -> tuple[list[float], list[str]]:
    """A job: adapters alone are trained, and written."""
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        meet()
        given = {"techniques": {"adapters": {"rank": 4, "targets": ["q_proj", "v_proj"]}}}
        trainer = made(folder, Layout(dp_shard=2), {}, given)
        trainer.train()
        trainer.save_model()
        return losses(trainer), [name for name, p in trainer.parallel.named_parameters() if p.requires_grad]


def test_adapters_are_trained_and_written_as_peft_reads_them(spmd, tmp_path):
    from peft import PeftModel

    found, trained = spmd(2, adapted, str(tmp_path))[0]
    assert found[-1] < found[0] + 0.1 and trained and all("lora_" in name for name in trained)
    model = PeftModel.from_pretrained(function_of("yours", "your_model")(), tmp_path)
    moved = [p.abs().max() for name, p in model.named_parameters() if "lora_B" in name]
    assert len(moved) == 4 and min(moved) > 1e-3  # they begin at 0
