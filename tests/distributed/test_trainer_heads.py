"""Trainer over a layout with other heads: outputs of several tensors, and a causal loss that no class name tells."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from support.from_pages import function_of, furthest, meet
from support.tools import fresh_accelerate

from meshwright import Layout

CLOSE = 1e-6
ROWS = 8


def trained(folder: str, layout: Layout | None, model: Any, rows: list[Any], collate: Any, **given: Any) -> Any:
    """Two steps of 8 rows, by transformers' Trainer in one process where no layout is given."""
    from transformers import Trainer, TrainingArguments

    from meshwright.integrations.transformers import Trainer as LaidOut

    meet()
    each = ROWS // (1 if layout is None else layout.dp_shard)
    options = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each, "max_steps": 2}
    quiet = {"logging_steps": 1, "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(folder, learning_rate=1e-2, optim="sgd", **options, **quiet)
    ours = {} if layout is None else {"layout": layout}
    kind: Any = Trainer if layout is None else LaidOut
    trainer = kind(model, args, train_dataset=rows, eval_dataset=rows, data_collator=collate, **given, **ours)
    trainer.train()
    return trainer


def answers(folder: str, layout: Layout | None) -> dict[str, Any]:
    """A job: predictions of a model that points to the first and the last token of an answer."""
    from transformers import LlamaConfig, LlamaForQuestionAnswering

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": ids, "start_positions": ids[:, 0] % 5, "end_positions": ids[:, 1] % 5}

    def compute_metrics(prediction: Any) -> dict[str, float]:
        seen.update(outputs=prediction.predictions, labels=prediction.label_ids)
        return {}

    seen: dict[str, Any] = {}
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForQuestionAnswering(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, **heads))
    rows = function_of("yours", "your_rows")(ROWS, 8, 8)
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        trainer = trained(folder, layout, model, rows, collate, compute_metrics=compute_metrics)
        return {"loss": trainer.evaluate()["eval_loss"], **seen}


@pytest.mark.all
def test_outputs_and_labels_of_several_tensors_are_handed_over(spmd, tmp_path):
    theirs = spmd(1, answers, str(tmp_path), None)[0]
    for ours in spmd(2, answers, str(tmp_path), Layout(dp_shard=2)):
        assert abs(ours["loss"] - theirs["loss"]) <= CLOSE
        for name in ("outputs", "labels"):
            assert len(ours[name]) == len(theirs[name]) == 2
            for one, other in zip(ours[name], theirs[name], strict=True):
                assert one.shape == other.shape and abs(one - other).max() <= 1e-5


def gpt2(folder: str, layout: Layout | None) -> list[float]:
    """A job: losses over padded rows. Trainer counts the first label of a row too, so that there is none."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        batch = function_of("yours", "padded")(rows)
        batch["labels"][:, 0] = -100
        return batch

    torch.manual_seed(0)
    dropout = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dropout))
    with fresh_accelerate(fsdp=False), contextlib.redirect_stdout(io.StringIO()):
        trainer = trained(folder, layout, model, function_of("yours", "your_rows")(16), collate)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_language_model_of_gpt2_trains_the_causal_loss_over_padded_rows(spmd, tmp_path):
    theirs = spmd(1, gpt2, str(tmp_path), None)[0]
    assert furthest(spmd(2, gpt2, str(tmp_path), Layout(dp_shard=2))[0], theirs) <= CLOSE


@pytest.mark.all
def test_a_model_that_computes_its_own_loss_is_not_taken_for_a_causal_one():
    """Its property says the causal loss too, since its class's name tells none."""
    from transformers import BertConfig, BertForMultipleChoice, BertLMHeadModel, T5Config, T5ForConditionalGeneration
    from transformers.loss.loss_utils import ForCausalLMLoss

    from meshwright.integrations.trainer_private import falls_back_to_causal

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertConfig(vocab_size=16, is_decoder=True, **sizes)
    choice = BertForMultipleChoice(bert)
    assert choice.loss_function is ForCausalLMLoss and not falls_back_to_causal(choice)
    assert falls_back_to_causal(BertLMHeadModel(bert))
    t5 = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    assert not falls_back_to_causal(T5ForConditionalGeneration(t5))
