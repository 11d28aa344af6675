"""Carry, map or refuse every field of the Trainer's arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal

from meshwright.core.dtypes import canonical_dtype
from meshwright.core.errors import ConfigError
from meshwright.planning.techniques import Precision, Techniques

# --- decide for each argument of another tool whether it stays the tool's, becomes ours, or is refused by name


@dataclass(frozen=True)
class Handling:
    """The handling of one argument.

    Attributes:
        kind: "carried": the tool acts on it as ever; "mapped": it becomes a request of ours; "refused": nothing would
            act on it here, so that a value other than the legal ones is an error.
        words: of "mapped", what it becomes; of "refused", the change to make.
        legal: of "refused", the values that stay legal; None: those that switch the argument off (false, 0, empty).
    """

    kind: Literal["carried", "mapped", "refused"]
    words: str = ""
    legal: Callable[[Any], bool] | None = None


CARRIED = Handling("carried")
_RECOMPUTE = Handling("mapped", "techniques.activation_checkpointing = full, or its form by every_n_layers and offload")


def refused(words: str, legal: Callable[[Any], bool] | None = None) -> Handling:
    return Handling("refused", words, legal)


def refuse(arguments: Any, table: Mapping[str, Handling], tool: str) -> None:
    """Raise ConfigError for the first field of a tool's dataclass that nothing would act on.

    A field that the table lacks, of a newer release of the tool, may keep its default.
    """
    for field in fields(arguments):
        value, handling = getattr(arguments, field.name), table.get(field.name)
        usual = None if field.default is MISSING else field.default
        usual = usual if field.default_factory is MISSING else field.default_factory()
        if handling is None:
            if value != usual and value:
                raise ConfigError(
                    f"{tool}: {field.name} = {value!r} is an argument that this meshwright does not know, of a newer"
                    f" release: leave it at its default, {usual!r}"
                )
        elif handling.kind == "refused" and not (handling.legal(value) if handling.legal else not value):
            raise ConfigError(f"{tool}: {field.name} = {value!r} would be ignored here. {handling.words}")


# --- decide what becomes of each field of ``transformers.TrainingArguments`` and ``trl.SFTConfig``

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop")
"""Words of ``optim`` whose optimizers step each element by its own gradients, so that a shard steps as the whole."""
SAMPLINGS = ("random", "sequential")
_LAYOUT = "The layout is ours: leave it out, and give layout=Layout(...)."
_DDP = "How gradients travel is decided by the layout: leave it at its default."
_PRECISION = "Evaluation computes as training does: set bf16, or techniques={'precision': ...}."
_HUB = "Upload the folder that save_model writes with huggingface_hub."
_MODEL = "It would change the model while it is laid out: change the model before it is handed over."


def _carried(names: str) -> dict[str, Handling]:
    return dict.fromkeys(names.split(), CARRIED)


def _refused(names: str, words: str) -> dict[str, Handling]:
    return dict.fromkeys(names.split(), refused(words))


TRAINING_ARGUMENTS: dict[str, Handling] = {
    **_carried("output_dir per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps"),
    **_carried("learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1"),
    **_carried("adam_beta2 adam_epsilon tf32 seed data_seed full_determinism use_cpu ddp_backend ddp_timeout"),
    **_carried("logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter log_level"),
    **_carried("log_level_replica disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id"),
    **_carried("trackio_static_space_id include_num_input_tokens_seen skip_memory_metrics"),
    **_carried("eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start"),
    **_carried("eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics"),
    **_carried("save_only_model save_strategy save_steps save_total_limit load_best_model_at_end"),
    **_carried("metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint"),
    **_carried("dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers"),
    **_carried("dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order"),
    **_carried("remove_unused_columns label_names length_column_name do_train do_eval do_predict"),
    **_carried("resume_from_checkpoint local_rank"),
    "optim": refused(
        f"Its optimizer steps shards unlike whole tensors, or was not tried. Legal: {', '.join(OPTIMIZERS)}; or give"
        " optimizer_cls_and_kwargs=, whose optimizer is tried on small shards before the first step.",
        lambda value: str(getattr(value, "value", value)) in OPTIMIZERS,
    ),
    "max_grad_norm": Handling("mapped", "max_norm of optimizer_step: the norm over all ranks' shards"),
    "bf16": Handling("mapped", "techniques.precision.compute = bfloat16"),
    "fp16": Handling("mapped", "techniques.precision.compute = float16, with a scaled loss"),
    **dict.fromkeys(("activation_checkpointing", "activation_checkpointing_kwargs"), _RECOMPUTE),
    **dict.fromkeys(("gradient_checkpointing", "gradient_checkpointing_kwargs"), _RECOMPUTE),
    "torch_compile": Handling("mapped", "techniques.compile: each repeated block"),
    "torch_compile_backend": Handling("mapped", "techniques.compile_backend"),
    "torch_compile_mode": refused("Blocks are compiled without a mode: leave it out."),
    "accelerator_config": Handling("mapped", "loaders by data ranks: dispatch_batches and uneven batches are refused"),
    "average_tokens_across_devices": refused(
        "The loss is always the mean over the tokens of all ranks: leave it at True.", bool
    ),
    "train_sampling_strategy": refused(
        f"It orders rows by each rank's own random stream or by world ranks. Legal: {', '.join(SAMPLINGS)}.",
        lambda value: str(getattr(value, "value", value)) in SAMPLINGS,
    ),
    **_refused("fsdp fsdp_config deepspeed parallelism_config", _LAYOUT),
    **_refused("ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph", _DDP),
    **_refused("bf16_full_eval fp16_full_eval", _PRECISION),
    **_refused("use_liger_kernel liger_kernel_config neftune_noise_alpha", _MODEL),
    **_refused("push_to_hub hub_token hub_private_repo hub_model_id hub_always_push hub_revision", _HUB),
    "hub_strategy": CARRIED,
    "label_smoothing_factor": refused("Give the smoothed loss: loss_fn=, a sum over tokens of (logits, labels)."),
    "optim_target_modules": refused("It belongs to low-rank optimizers, which step whole matrices: leave it out."),
    "auto_find_batch_size": refused("One rank cannot choose a batch for all: 'meshwright plan' tells what fits."),
    "torch_empty_cache_steps": refused("Leave it out: forward_backward frees what it gathered."),
    "use_cache": refused("Training keeps no keys and values: leave it at False."),
    "debug": refused("Its hooks read whole activations: meshwright.verify compares a layout with one process."),
    "save_on_each_node": refused("A checkpoint is one folder that all nodes see: leave it at False."),
    "enable_jit_checkpoint": refused("Save by save_steps."),
    "eval_use_gather_object": refused("Tensors are gathered from data ranks: leave it at False."),
}

SFT_CONFIG: dict[str, Handling] = {
    **TRAINING_ARGUMENTS,
    **_carried("model_init_kwargs trust_remote_code chat_template_path dataset_text_field dataset_kwargs"),
    **_carried("dataset_num_proc eos_token max_length truncation_mode shuffle_dataset packing packing_strategy"),
    **_carried("padding_free pad_to_multiple_of eval_packing completion_only_loss assistant_only_loss pad_token"),
    "loss_type": refused("Legal: nll. Give another loss as loss_fn=.", lambda value: value in ("nll", "chunked_nll")),
    "router_aux_loss_coef": refused("Set router_aux_loss_coef and output_router_logits in the model's config."),
    "activation_offloading": refused("Set techniques={'activation_checkpointing': 'offload'}."),
}


def techniques_of(arguments: Any, given: Techniques, dtype: str) -> Techniques:
    """Return the techniques with those that the arguments ask for.

    Args:
        dtype: the model's, in which Trainer computes without a flag.

    Raises:
        ConfigError: an argument and a technique contradict each other.
    """
    made = replace(given, precision=_precision(arguments, given, dtype))
    is_asked = getattr(arguments, "activation_checkpointing", None)
    is_asked = getattr(arguments, "gradient_checkpointing", False) if is_asked is None else is_asked
    if is_asked and given.activation_checkpointing == "none":  # else the technique says which of its forms
        options = getattr(arguments, "activation_checkpointing_kwargs", None)
        options = dict(options or getattr(arguments, "gradient_checkpointing_kwargs", None) or {})
        every, offload = options.pop("every_n_layers", 1), options.pop("offload", False)
        if options.pop("use_reentrant", False) or options:
            raise ConfigError(
                "TrainingArguments: activation_checkpointing_kwargs holds options that are not carried"
                f" ({', '.join(options) or 'use_reentrant = True'}). Legal: every_n_layers, offload, use_reentrant ="
                " False; other forms are words of techniques.activation_checkpointing."
            )
        if offload and every != 1:
            raise ConfigError(
                "TrainingArguments: activation_checkpointing_kwargs asks for offload and every_n_layers; give one of"
                " them"
            )
        made = replace(made, activation_checkpointing="offload" if offload else "full")
        if every != 1:
            made = replace(made, activation_checkpointing="every_n", checkpoint_every=every)
    if getattr(arguments, "torch_compile", False):
        backend = arguments.torch_compile_backend or made.compile_backend
        made = replace(made, compile=True, compile_backend=backend)
    return made


def _precision(arguments: Any, given: Techniques, dtype: str) -> Precision:
    word = {"no": "", "bf16": "bfloat16", "fp16": "float16"}.get(arguments.mixed_precision)
    if word is None:
        raise ConfigError(
            f"TrainingArguments: mixed_precision = {arguments.mixed_precision!r} is not carried. Legal: no, bf16, fp16;"
            f" for float8 set techniques={{'float8': 'tensorwise'}}"
        )
    compute = given.precision.compute
    if not word:
        master = given.precision.master
        own = dtype if master == "auto" else master
        return replace(given.precision, compute=own) if compute == "auto" else given.precision
    if compute != "auto" and canonical_dtype(compute, where="techniques.precision.compute") != word:
        raise ConfigError(
            f"TrainingArguments: {arguments.mixed_precision} = True computes in {word}, and"
            f" techniques.precision.compute is {compute}: leave one of them out"
        )
    return replace(given.precision, compute=word)


def handed_over(arguments: Any, table: dict[str, Handling]) -> Any:
    """Return a copy of the arguments in which what became ours is off; the caller's stay as they are.

    Raises:
        ConfigError: an argument that nothing would act on, by name.
    """
    refuse(arguments, table, type(arguments).__name__)
    loaders = arguments.accelerator_config
    for key, legal in (("dispatch_batches", (None, False)), ("even_batches", (True,))):
        if loaders is not None and getattr(loaders, key) not in legal:
            raise ConfigError(
                f"{type(arguments).__name__}: accelerator_config.{key} = {getattr(loaders, key)} is not carried: each"
                f" data rank reads its own rows, and as many of them as the others. Legal: {legal[-1]}."
            )
    if loaders is not None and (loaders.gradient_accumulation_kwargs or {}).get("sync_each_batch"):
        raise ConfigError(
            f"{type(arguments).__name__}: accelerator_config.gradient_accumulation_kwargs.sync_each_batch would be"
            " ignored here. Set techniques={'sync_grad_accum': True}."
        )
    if arguments.save_only_model and arguments.load_best_model_at_end:
        raise ConfigError(
            f"{type(arguments).__name__}: load_best_model_at_end reads a checkpoint's shards, which save_only_model ="
            " True leaves out: set one of them to False"
        )
    ours = copy.copy(arguments)
    off = {"bf16": False, "fp16": False, "mixed_precision": "no", "torch_compile": False, "torch_compile_backend": None}
    off |= dict.fromkeys(("activation_checkpointing", "gradient_checkpointing"), False)
    for name, value in off.items():
        if hasattr(ours, name):
            setattr(ours, name, value)
    ours.accelerator_config = copy.copy(loaders)
    return ours
