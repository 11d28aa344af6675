"""Step a model of transformers' Trainer on a mesh, and save its files."""

from __future__ import annotations

import inspect
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.trainer_callback import TrainerCallback
from transformers.trainer_pt_utils import nested_detach

from meshwright.checkpoint import load, save
from meshwright.checkpoint.background import GRACE_SEC
from meshwright.checkpoint.manifest import NAME
from meshwright.checkpoint.saving import finish_saves
from meshwright.core.errors import ConfigError, IntegrityError, UnsupportedError
from meshwright.core.losses import Loss
from meshwright.core.names import clean
from meshwright.core.record import recall
from meshwright.distributed.parallel_model import ParallelModel
from meshwright.distributed.parallelize import parallelize
from meshwright.distributed.process import agree
from meshwright.integrations.accelerate import deal_rows, mesh_of, refuse_other_sharding
from meshwright.integrations.rows import RowsOfRank, one_batch, step_batch
from meshwright.integrations.training_arguments import TRAINING_ARGUMENTS, Handling, handed_over, techniques_of
from meshwright.introspection.source import ModelOrigin
from meshwright.planning.layout import Layout
from meshwright.planning.techniques import Techniques, as_techniques
from meshwright.training.run.convert import convert_saved

# --- write and read a Trainer's folders

STATE = "meshwright"
"""Folder inside a checkpoint of Trainer: shards of model and optimizer, which any layout reads."""


def state_folder(checkpoint: str | Path) -> Path:
    """Return the folder with the state of a checkpoint.

    Raises:
        ConfigError: there is no checkpoint; another Trainer wrote it, or one with save_only_model.
    """
    if not Path(checkpoint).is_dir():
        raise ConfigError(
            f"{checkpoint} does not exist, or is no folder: give resume_from_checkpoint a folder checkpoint-N that this"
            f" Trainer wrote into output_dir, or True for its last one"
        )
    folder = Path(checkpoint) / STATE
    if not folder.is_dir():
        raise ConfigError(
            f"{checkpoint} has no folder {STATE}: it was written with save_only_model = True, or by another Trainer."
            f" Start from its weights instead: the model by from_pretrained({str(checkpoint)!r}), without"
            f" resume_from_checkpoint"
        )
    return folder


def export(shards: str, folder: str, form: str) -> None:
    """Write the model that shards hold into a folder, as transformers or peft reads it."""
    made = Path(folder) / f"{STATE}-export"
    shutil.rmtree(made, ignore_errors=True)
    convert_saved(Path(shards), made, form)
    for path in made.iterdir():
        path.replace(Path(folder) / path.name)
    made.rmdir()


_exporter: list[subprocess.Popen[str]] = []
"""The process that exports for this one, once there is one; it ends with this one."""


def export_beside(*asked: str) -> None:
    """Let a process of its own export, which knows no process group. Raises IntegrityError where it cannot."""
    if not _exporter or _exporter[0].poll() is not None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve_exports; serve_exports()"
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        _exporter[:] = [subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes)]
    there, back = _exporter[0].stdin, _exporter[0].stdout
    assert there is not None and back is not None
    print(json.dumps(asked), file=there, flush=True)
    if problem := json.loads(back.readline() or '"the process that writes it died"'):
        raise IntegrityError(f"{asked[0]} is whole, but the model was not written beside it: {problem}")


def serve_exports() -> None:
    """Export what each line of standard input asks for, and answer with its problem, or ""."""
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        problem = ""
        try:
            export(*json.loads(line))
        except Exception as error:  # noqa: BLE001  (said by who asked)
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps(problem), file=answers, flush=True)


def last_whole(folder: str | Path) -> str | None:
    """Return the newest checkpoint of a Trainer's folder whose state was saved to the end."""
    found = [path.parents[1] for path in Path(folder).glob(f"checkpoint-*/{STATE}/{NAME}")]
    return str(max(found, key=lambda path: int(path.name.rpartition("-")[2]))) if found else None


# --- step a laid-out model in the loop of ``transformers.Trainer``, through the hooks that its loop calls

LOSSES = ("compute_loss", "training_step")
"""Methods that users override, and that nothing would call here."""


class SteppedOptimizer(AcceleratedOptimizer):
    """An optimizer whose step is that of the laid-out model: clipped by the norm of all ranks, skipped by all or none.

    Args:
        report: called with the norm before clipping.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: ParallelModel, max_norm: float, report: Callable[[float], object]
    ):
        super().__init__(optimizer, device_placement=False)
        self.model, self.max_norm, self.report = model, max_norm, report
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        result = self.model.optimizer_step(self.optimizer, max_norm=self.max_norm or None)
        self._is_overflow = result.skipped
        self.report(result.grad_norm)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none is not False)


class LaidOutLoop:
    """Adapts ``transformers.Trainer`` to a laid-out model; stands before it among the bases.

    Args:
        layout: sizes of the mesh, or a mesh; by default all processes shard the model.
        techniques: precision, recomputation, adapters …; typed, or a plain dict.
        loss_fn: a loss of one's own, as of ``parallelize``; by default a causal model's cross entropy, else the loss
            that the model itself returns, declared as a mean.
        weights: where the weights of a model on meta come from, such as ``pretrained(folder)``.
        model: a module with weights, or one on meta; of ``Trainer`` also the path of a folder of transformers' files,
            of which each rank reads its share.

    Attributes:
        parallel: the laid-out model; also ``model``, which callbacks are given.
        rows: the place of this process among those that train different rows.

    Raises:
        ConfigError: an argument that would be ignored, by name, with the change to make.
    """

    handling: Mapping[str, Handling] = TRAINING_ARGUMENTS

    if TYPE_CHECKING:  # what the loop behind it has

        def __getattr__(self, name: str) -> Any: ...

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        layout: Layout | Any | None = None,
        techniques: Techniques | dict | None = None,
        loss_fn: Callable[[Tensor, Tensor], Tensor] | Loss | Mapping[str, Loss] | None = None,
        weights: Any = None,
        **options: Any,
    ):
        for name in LOSSES:
            owner = next(kind for kind in type(self).__mro__ if name in vars(kind))
            if owner is not LaidOutLoop and not owner.__module__.startswith(("transformers.", "trl.")):
                raise ConfigError(
                    f"{owner.__name__}.{name} is overridden, and forward_backward would not call it: give the loss as"
                    f" loss_fn=, a sum over tokens of (logits, labels) or a meshwright.Loss of (output, batch)"
                )
        if options.get("compute_loss_func") is not None:
            raise ConfigError(
                "compute_loss_func would be ignored here: give loss_fn=, a sum over tokens of (logits, labels) or a"
                " meshwright.Loss of (output, batch)"
            )
        if any(given is not None for given in options.get("optimizers") or ()):
            raise self._other_optimizers()
        cut = [name for name in ("pp", "cp") if isinstance(layout, Layout) and getattr(layout, name) > 1]
        if options.get("compute_metrics") is not None and cut:
            raise UnsupportedError(
                f"compute_metrics reads whole logits, and layout.{cut[0]} gives each rank a part of them: leave it out"
                f" (the evaluation's loss is there), or set layout.{cut[0]} = 1"
            )
        self.given_args = args if args is not None else self.default_arguments()
        self.requested, self.layout, self.loss_fn, self.weights = as_techniques(techniques), layout, loss_fn, weights
        self.rows = RowsOfRank()
        self._microbatches: list[dict[str, Tensor]] = []
        self._norm = torch.zeros(())
        self._weights_number, self._saves_beside = 0, False
        loop: Any = super()
        loop.__init__(model, handed_over(self.given_args, dict(self.handling)), *positional, **options)
        if self.optimizer is not None or self.lr_scheduler is not None:  # given by place
            raise self._other_optimizers()
        self.lay_out()

    def default_arguments(self) -> Any:
        """Return the arguments of a call without any."""
        from transformers import TrainingArguments

        return TrainingArguments(output_dir="tmp_trainer")

    def _other_optimizers(self) -> ConfigError:
        return ConfigError(
            "optimizers= was made before the layout, for whole parameters: give optim= in the arguments, or"
            " optimizer_cls_and_kwargs=(torch.optim.AdamW, {'lr': 1e-4})"
        )

    # --- the model

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        refuse_other_sharding(self.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: each rank moves its share."""

    def lay_out(self) -> None:
        """Lay the model out, unless it is (collective)."""
        given: Any = self.model
        if isinstance(given, ParallelModel):
            return
        if hasattr(given, "peft_config"):
            raise ConfigError(
                "the model has peft's adapters already: give the base model, and techniques={'adapters': {'rank': 16}}"
            )
        self._set_signature_columns_if_needed()
        self._loss_shifts_labels = self._loss_shifts_labels or falls_back_to_causal(given)
        trained = [p for p in given.parameters() if p.is_floating_point()]
        # without embedding tables, which no product multiplies
        tables = {module.weight for module in given.modules() if isinstance(module, nn.Embedding)}
        self._weights_number = sum(p.numel() for p in given.parameters()) - sum(table.numel() for table in tables)
        seed, dtype = self.args.seed, str(trained[0].dtype).removeprefix("torch.")
        own_loss = None if self._loss_shifts_labels else Loss(reduction="mean")
        self.parallel = parallelize(
            given,
            mesh_of(self.layout, seed, self.args.device.type),
            loss_fn=self.loss_fn if self.loss_fn is not None else own_loss,
            techniques=techniques_of(self.given_args, self.requested, dtype),
            weights=self.weights,
            seed=seed,
        )
        if self._loss_shifts_labels:
            self.parallel.learn_documents()
        for name in ("config", "generation_config"):  # read by callbacks and model cards
            if hasattr(given, name):
                setattr(self.parallel, name, getattr(given, name))
        self.rows = RowsOfRank.of(self.parallel.mesh)
        self.model = self.model_wrapped = self.parallel
        self.callback_handler.model = self.parallel
        deal_rows(self.accelerator, self.rows, seed, by_tokens=self._loss_shifts_labels)
        self.accelerator.prepare_model = lambda model, *_, **__: model
        self.gather_function = self.accelerator.gather_for_metrics

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        found: Any = super()
        parts = model.parts if isinstance(model, ParallelModel) else [model]
        return [clean(name) for part in parts for name in found.get_decay_parameter_names(part)]

    # --- rows

    def _get_dataloader(self, *args: Any, **options: Any) -> Any:
        self.lay_out()  # a model_init made another model
        found: Any = super()
        return found._get_dataloader(*args, **options)

    def get_total_train_batch_size(self, args: Any) -> int:
        return self._train_batch_size * args.gradient_accumulation_steps * self.rows.ranks

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the microbatches of a step, uncounted: ``forward_backward`` counts the labels of all ranks."""
        return list(itertools.islice(epoch_iterator, num_batches)), None

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before, found = self.state.num_input_tokens_seen, super()
        found._track_num_input_tokens(inputs)  # type: ignore[misc]
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // self.rows.copies

    def floating_point_ops(self, inputs: Mapping[str, Any]) -> int:
        tokens = inputs.get("input_ids")
        return 0 if tokens is None else 6 * tokens.numel() * self._weights_number // self.rows.copies

    # --- a step

    def training_step(self, model: Any, inputs: Mapping[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Keep a microbatch; with the last one of a step run forward and backward of all, and return their loss."""
        model.train()
        self._microbatches.append(step_batch(self._prepare_inputs(inputs), shift=self._loss_shifts_labels))
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        step, self._microbatches = self._microbatches, []
        brought = one_batch(step) if self.parallel.plan.pipeline is not None else step
        return self.parallel.forward_backward(brought).loss.to(self.args.device)

    def _clip_grad_norm(self, model: Any) -> Tensor:
        """Return the tensor that the optimizer's step will write the norm into."""
        self._norm = torch.zeros(())
        return self._norm

    def _get_grad_norm(self, model: Any, grad_norm: Tensor | None = None) -> Tensor:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None) -> Any:
        """Make optimizer and scheduler for the laid-out model, and load a checkpoint into them."""
        if self._created_lr_scheduler:
            self.lr_scheduler: Any = None
            self._created_lr_scheduler = False
        self._microbatches = []
        optimizer = self.create_optimizer()
        if not isinstance(optimizer, SteppedOptimizer):
            self.optimizer = SteppedOptimizer(
                optimizer, self.parallel, self.args.max_grad_norm, lambda norm: self._norm.fill_(norm)
            )
        self.accelerator.prepare_optimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        if resume_from_checkpoint is not None:
            load(self.parallel, state_folder(resume_from_checkpoint), optimizer=self.optimizer.optimizer)
            state = torch.load(Path(resume_from_checkpoint) / "scheduler.pt", weights_only=True)
            self.lr_scheduler.load_state_dict(state)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.parallel, train_dataloader

    # --- evaluation

    def prediction_step(
        self, model: Any, inputs: Mapping[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """Return the loss of this batch on all ranks; outputs but the loss, and labels, where somebody asks for them.

        Both are tuples where there are several, as Trainer has it.
        """
        inputs, names = self._prepare_inputs(inputs), self.label_names
        brought = tuple(inputs.get(name) for name in names)
        has_loss = (
            all(label is not None for label in brought) if names else inputs.get("return_loss", self.can_return_loss)
        )
        labels = (brought[0] if len(brought) == 1 else brought) if names and has_loss else None
        loss = None
        if has_loss:
            loss = self.parallel.evaluate(step_batch(inputs, shift=self._loss_shifts_labels)).loss.float()
        if prediction_loss_only:
            return loss, None, None
        dropped = {"labels", "shift_labels"} if self._loss_shifts_labels else set()  # the loss is there already
        if ignore_keys is None:
            config = getattr(self.parallel, "config", None)
            ignore_keys = list(getattr(config, "keys_to_ignore_at_inference", ["cache", "past_key_values"]))
        with torch.no_grad():
            output = self.parallel(**{key: value for key, value in inputs.items() if key not in dropped})
        if isinstance(output, Mapping):
            found = tuple(value for key, value in output.items() if key not in (*ignore_keys, "loss"))
        else:
            found = output[1:] if isinstance(output, tuple) and has_loss and not dropped else output
        logits = nested_detach(found)
        return loss, logits[0] if isinstance(logits, tuple) and len(logits) == 1 else logits, labels

    # --- files

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any) -> Any:
        """Train as Trainer does, until the last save is whole; True resumes from the last checkpoint that is."""
        if resume_from_checkpoint is True:
            finish_saves(agree.any_rank)
            resume_from_checkpoint = agree.from_rank_zero(last_whole(self.args.output_dir)) or True
        try:
            result = super().train(resume_from_checkpoint, *args, **options)  # type: ignore[misc]
        except BaseException:
            finish_saves(seconds=GRACE_SEC)
            raise
        finish_saves(agree.any_rank)
        return result

    def _save_checkpoint(self, *args: Any, **options: Any) -> None:
        """Save beside training, unless this is the last checkpoint, or somebody reads the folder at once.

        Then one checkpoint more than ``save_total_limit`` stays, since this one is not whole yet.
        """
        reads = any(type(one).on_save is not TrainerCallback.on_save for one in self.callback_handler.callbacks)
        is_last = self.state.global_step >= self.state.max_steps or self.control.should_training_stop
        self._saves_beside = not (is_last or reads or self.args.push_to_hub or self.args.save_only_model)
        limit, found = self.args.save_total_limit, super()
        self.args.save_total_limit = limit and limit + self._saves_beside
        try:
            found._save_checkpoint(*args, **options)  # type: ignore[misc]
        finally:
            self.args.save_total_limit, self._saves_beside = limit, False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as transformers (or, with adapters, peft) reads it, from shards of it; those of a checkpoint
        stay, with the optimizer's state, to go on from (collective).
        """
        folder = Path(output_dir if output_dir is not None else self.args.output_dir)
        keeps = _internal_call and not self.args.save_only_model
        optimizer = self.optimizer.optimizer if keeps and isinstance(self.optimizer, SteppedOptimizer) else None
        shards, origin = folder / (STATE if keeps else f"{STATE}-shards"), recall(self.parallel, ModelOrigin)
        if origin is None or not origin.config:
            raise ConfigError(
                f"{self.parallel.facts.kind} is no model of transformers' own, which save_model could write: set"
                f" save_strategy = 'no', and write the shards with meshwright.save(trainer.parallel, FOLDER)"
            )
        trains_adapters = self.requested.adapters is not None
        beside = keeps and self._saves_beside  # another process makes transformers' files meanwhile
        export_shards = export_beside if beside else export
        then = partial(export_shards, str(shards), str(folder), "adapter" if trains_adapters else "hf")
        save(self.parallel, shards, optimizer=optimizer, only_trained=trains_adapters, asynchronous=beside, then=then)
        if not keeps:
            agree.decided_once(lambda: shutil.rmtree(shards, ignore_errors=True))
        if self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.given_args, folder / "training_args.bin")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the scheduler: the optimizer's state lies beside the model's shards."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / "scheduler.pt")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check a checkpoint's folder; it is read when the optimizer is there."""
        state_folder(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load(self.parallel, state_folder(self.state.best_model_checkpoint))

    def hyperparameter_search(self, *args: Any, **options: Any) -> Any:
        """Raise UnsupportedError: trials are runs of their own."""
        raise UnsupportedError(
            "hyperparameter_search lays a model out in each trial, and ranks agree on none: start a run for each trial"
        )


def falls_back_to_causal(model: Any) -> bool:
    """Return whether the model's forward computes transformers' causal loss, though its class's name names none.

    Such are ``GPT2LMHeadModel`` and ``BertLMHeadModel``. Models that compute another loss themselves have that
    property too, and never read it.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    forward = inspect.unwrap(type(model).forward)
    reads = getattr(getattr(forward, "__code__", None), "co_names", ())
    return "loss_function" in reads and getattr(model, "loss_function", None) is ForCausalLMLoss
