"""An Accelerator beside a laid-out model: what it gathers, and which of its calls are refused."""

from __future__ import annotations

from typing import Any

import torch
from support.from_pages import function_of, meet
from support.tools import fresh_accelerate

from meshwright import ConfigError, Layout, save


def calls(folder: str, layout: Layout) -> dict[str, Any]:
    """A job: texts and tensors gathered from 5 rows, and the words of each refusal."""
    from accelerate import Accelerator

    from meshwright.integrations.accelerate import lay_out

    with fresh_accelerate(fsdp=False):
        meet()
        accelerator = Accelerator(cpu=True)
        model = lay_out(accelerator, function_of("yours", "your_model")(), layout=layout)
        loader = accelerator.prepare(torch.utils.data.DataLoader(list(range(5)), batch_size=1))
        gathered = [accelerator.gather_for_metrics([f"row {int(row)}" for row in batch]) for batch in loader]
        tensors = [accelerator.gather_for_metrics(batch, use_gather_object=True) for batch in loader]
        texts = [text for part in gathered for text in part]
        found: dict[str, Any] = {"texts": texts, "tensors": [int(row) for part in tensors for row in part]}
        other = torch.nn.Linear(2, 2)
        rows = [{"input_ids": torch.tensor([row, 1]), "labels": torch.tensor([row, 1])} for row in range(5)]
        tails = accelerator.prepare(torch.utils.data.DataLoader(rows, batch_size=2))
        found["labels"] = [batch["labels"][:, 0].tolist() for batch in tails]
        assert rows[0]["labels"][0] == 0, "the data set is as it was"
        found["other"] = isinstance(getattr(accelerator.prepare(other), "module", other), torch.nn.Linear)
        for name, given in (("prepare", model), ("backward", torch.ones(())), ("save_state", folder)):
            try:
                getattr(accelerator, name)(given)
            except ConfigError as error:
                found[name] = str(error)
        try:
            accelerator.load_state(folder)
        except ConfigError as error:
            found["load_state"] = str(error)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        handle = save(model, f"{folder}/state", optimizer=optimizer, asynchronous=True)
        accelerator.end_training()
        found["saved"] = (handle.done, handle.problem)
        return found


REMEDIES = {
    "prepare": "leave it out",
    "backward": "model.forward_backward(step_batch(batch))",
    "save_state": "meshwright.save(model",
    "load_state": "meshwright.load(model",
}


def test_objects_are_gathered_once_and_its_own_steps_are_refused(spmd, tmp_path):
    for layout in (Layout(dp_shard=2), Layout(dp_shard=1, tp=2)):
        seen: list[list[int]] = []
        for found in spmd(2, calls, str(tmp_path), layout):
            assert found["texts"] == [f"row {number}" for number in range(5)]
            assert found["tensors"] == list(range(5)) and found["other"] and found["saved"] == (True, "")
            learnt = [label for part in found["labels"] for label in part if label >= 0]
            seen.append(learnt)
            assert {len(part) for part in found["labels"]} <= {1, 2}
            for name, remedy in REMEDIES.items():
                assert remedy in found[name], found
        dealt = sorted(seen[0] + seen[1]) if layout.tp == 1 else seen[0]
        assert dealt == list(range(5)), "every row is learnt once, whatever was repeated to make the last batches even"
