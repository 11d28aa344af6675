"""Batches of other tools become ours: labels shifted once, padding without a loss, documents apart; rows of ranks."""

from __future__ import annotations

import sys
from importlib import import_module
from types import SimpleNamespace as Fake

import pytest
import torch

from meshwright import ConfigError, MissingExtraError
from meshwright.integrations.rows import RowsOfRank, one_batch, step_batch

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
LABELS = torch.tensor([[5, 6, 7, 8], [9, 10, -100, -100]])


def test_labels_are_shifted_once():
    batch = step_batch({"input_ids": IDS, "labels": LABELS, "token_type_ids": None})
    assert batch["labels"].tolist() == [[6, 7, 8, -100], [10, -100, -100, -100]]
    assert set(batch) == {"input_ids", "labels"}
    assert step_batch({"input_ids": IDS, "labels": LABELS}, shift=False)["labels"] is LABELS
    given = step_batch({"input_ids": IDS, "labels": LABELS, "shift_labels": IDS})
    assert given["labels"] is IDS and "shift_labels" not in given


def test_labels_of_another_shape_are_refused():
    with pytest.raises(ConfigError, match=r"shape \(2,\), .* \(2, 4\) input_ids"):
        step_batch({"input_ids": IDS, "labels": torch.tensor([1, 0])})


def test_packed_documents_are_kept_apart():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    batch = step_batch({"input_ids": positions + 5, "labels": positions, "position_ids": positions, "max_length_q": 3})
    assert batch["document_ids"].tolist() == [[1, 1, 1, 2, 2]] and "max_length_q" not in batch
    assert "document_ids" not in step_batch({"input_ids": IDS, "position_ids": torch.arange(4).expand(2, 4)})


def test_microbatches_of_other_lengths_are_filled_up_without_a_loss():
    short = {"input_ids": IDS[:, :2], "attention_mask": torch.ones(2, 2), "labels": IDS[:, :2]}
    long = {"input_ids": IDS, "attention_mask": torch.ones(2, 4), "labels": IDS}
    batch = one_batch([short, long])
    assert batch["labels"][:2].tolist() == [[5, 6, -100, -100], [9, 10, -100, -100]]
    assert batch["attention_mask"][:2].tolist() == [[1, 1, 0, 0]] * 2 and len(batch["input_ids"]) == 4
    with pytest.raises(ConfigError, match=r"layout.pp = 1"):
        one_batch([{**short, "document_ids": IDS[:, :2]}, {**long, "document_ids": IDS}])


def test_one_process_of_each_place_is_taken():
    rows = RowsOfRank(rank=1, ranks=2, first=(0, 2), world=4)
    assert rows.copies == 2
    assert rows.once(torch.tensor([1, 2, 1, 2, 3, 4, 3, 4])).tolist() == [1, 2, 3, 4]
    assert RowsOfRank().once(torch.tensor(3)).item() == 3


@pytest.mark.parametrize(
    ("tool", "package", "installed"),
    [
        ("transformers", "transformers", "transformers"),
        ("trl", "trl", "trl"),
        ("accelerate", "accelerate.data_loader", "accelerate"),
        ("fabric", "lightning_fabric", "lightning-fabric"),
    ],
)
def test_a_tool_that_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch, tool, package, installed):
    name = f"meshwright.integrations.{tool}"
    for module in [name for name in sys.modules if name.partition(".")[0] == package.partition(".")[0]]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(MissingExtraError, match=rf"pip install .*{installed}"):
        import_module(name)


def an_accelerator(kind: str = "MULTI_CPU", **options):
    values = {"distributed_type": Fake(value=kind), "parallelism_config": None, "mixed_precision": "no"}
    return Fake(**values | {"gradient_accumulation_steps": 1} | options)


@pytest.mark.parametrize(
    ("accelerator", "environment", "words"),
    [
        (an_accelerator("FSDP"), {}, r"distributed type FSDP.* torchrun"),
        (an_accelerator("DEEPSPEED"), {}, "distributed type DEEPSPEED"),
        (an_accelerator(), {"ACCELERATE_USE_FSDP": "true"}, "ACCELERATE_USE_FSDP"),
        (an_accelerator(parallelism_config=object()), {}, "parallelism_config"),
        (an_accelerator(mixed_precision="bf16"), {}, r"mixed_precision='bf16'.* techniques="),
        (an_accelerator(gradient_accumulation_steps=4), {}, r"gradient_accumulation_steps=4.* as a list"),
    ],
)
def test_an_accelerator_that_would_do_the_same_is_refused(monkeypatch, accelerator, environment, words):
    from meshwright.integrations.accelerate import lay_out

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words):
        lay_out(accelerator, torch.nn.Linear(2, 2))


def test_a_checkpoint_that_does_not_exist_is_not_taken_for_another_trainers(tmp_path):
    from meshwright.integrations.trainer_private import state_folder

    with pytest.raises(ConfigError, match=r"checkpoint-9 does not exist.* resume_from_checkpoint"):
        state_folder(tmp_path / "checkpoint-9")
    with pytest.raises(ConfigError, match=r"has no folder meshwright: .* another Trainer"):
        state_folder(tmp_path)


@pytest.mark.parametrize(
    ("first", "second", "lacking"),
    [
        ({"input_ids": 6}, {"input_ids": 6, "pixel_values": 6}, "pixel_values"),
        ({"input_ids": 6, "attention_mask": 6}, {"input_ids": 6}, "attention_mask"),
        ({"inputs_embeds": 6}, {"inputs_embeds": 6}, "input_ids"),
    ],
)
def test_microbatches_with_other_keys_are_not_joined(first, second, lacking):
    pieces = [
        {key: torch.ones(2, length, dtype=torch.int64) for key, length in each.items()} for each in (first, second)
    ]
    with pytest.raises(ConfigError, match=f"microbatches of the step lack '{lacking}'"):
        one_batch(pieces)
