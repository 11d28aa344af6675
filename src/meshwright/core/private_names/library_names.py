"""List the private names of libraries other than torch, and the functions that they leave undocumented."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from meshwright.core.host import TESTED, Range, installed, numbers

# --- describe a name that another library keeps private, and that code of this package reaches

EVERYTHING = "everything"
"""``needed_by`` of the names without which ``meshwright.distributed`` cannot be imported."""


@dataclass(frozen=True)
class PrivateName:
    """One private name.

    Attributes:
        path: dotted path from the library's import name; its last part may be an attribute that a method sets.
        needed_by: what stops working without the name, in a user's words.
        until: the public way that would replace it.
        seen: oldest and newest release of the library in which the name was found.
        documented: the library's documentation names it.
        cuda_only: builds of torch without CUDA lack it.
    """

    path: str
    needed_by: str
    until: str
    seen: Range = TESTED["torch"]
    documented: bool = False
    cuda_only: bool = False

    @property
    def package(self) -> str:
        """The library's import name, under which its metadata is found too."""
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def is_expected(self) -> bool:
        """Return whether the installed release should have the name: neither older nor known to have dropped it."""
        here = installed(self.package)
        if here is None or self.seen.is_older(here):
            return False
        tested = TESTED.get(self.package)
        was_dropped = tested is not None and numbers(self.seen.newest) < numbers(tested.newest)
        return not (was_dropped and self.seen.is_newer(here))


def names_in(owner: str, *rows: tuple[str, str, str], **common: Any) -> tuple[PrivateName, ...]:
    """Return rows of one module or class from (name, needed_by, until) each."""
    return tuple(PrivateName(f"{owner}.{name}", needed_by, until, **common) for name, needed_by, until in rows)


# --- list the private names of libraries other than torch, and the functions that they leave undocumented

_FLOAT8, _LOW_BIT = "float8 training", "AdamW of torchao"
_PRODUCTS = "products outside of a converted module"
_TRAINER, _LOOP = "meshwright.integrations.transformers and trl", "a hook of transformers.Trainer"
_FABRIC = "meshwright.integrations.fabric"

LIBRARIES: tuple[PrivateName, ...] = (
    *names_in(
        "transformers.PreTrainedModel",
        ("_init_weights", "models of transformers on meta", "a public base class"),
        ("_from_config", "models of transformers on meta", "a from_config of every class"),
        ("_tp_plan", "tensor-parallel plans that models of transformers bring along", "a tp_plan of every class"),
        ("_keys_to_ignore_on_load_unexpected", "files of Hugging Face with more tensors than the model", "a list"),
        seen=TESTED["transformers"],
    ),
    *names_in(
        "transformers.PretrainedConfig",
        ("_attn_implementation", "context parallelism of models of transformers", "a getter"),
        ("_experts_implementation", "layouts of transformers' mixtures of experts", "a setter on the built model"),
        seen=TESTED["transformers"],
    ),
    PrivateName(
        "transformers.AutoModelForCausalLM._model_mapping",
        "models of transformers by their names",
        "a list of what an auto class builds",
        TESTED["transformers"],
    ),
    *names_in(
        "transformers.Trainer",
        ("_clip_grad_norm", _TRAINER, _LOOP),
        ("_created_lr_scheduler", _TRAINER, _LOOP),
        ("_get_dataloader", _TRAINER, _LOOP),
        ("_get_grad_norm", _TRAINER, _LOOP),
        ("_load_best_model", _TRAINER, _LOOP),
        ("_load_from_checkpoint", _TRAINER, _LOOP),
        ("_move_model_to_device", _TRAINER, _LOOP),
        ("_prepare_for_training", _TRAINER, _LOOP),
        ("_prepare_inputs", _TRAINER, _LOOP),
        ("_save_optimizer_and_scheduler", _TRAINER, _LOOP),
        ("_set_signature_columns_if_needed", _TRAINER, _LOOP),
        ("_track_num_input_tokens", _TRAINER, _LOOP),
        ("_train_batch_size", _TRAINER, _LOOP),
        ("_loss_shifts_labels", _TRAINER, "a public flag of transformers.Trainer"),
        seen=TESTED["transformers"],
    ),
    *names_in(
        "accelerate",
        ("accelerator.Accelerator._is_accelerate_prepared", _TRAINER, "a public flag"),
        ("optimizer.AcceleratedOptimizer._is_overflow", _TRAINER, "a setter"),
        seen=Range("1.15", "1.15"),
    ),
    *names_in(
        "peft",
        ("tuners.tuners_utils.BaseTunerLayer._disable_adapters", "preference training", "a switch that trains on"),
        (
            "utils.transformers_weight_conversion.convert_peft_config_for_transformers",
            "adapters of mixtures of experts",
            "targets that peft does not rewrite",
        ),
        seen=Range("0.21", "0.21"),
    ),
    *names_in(
        "torchao.float8",
        ("float8_linear.matmul_with_hp_or_float8_args", _FLOAT8, _PRODUCTS),
        ("float8_utils.amax_to_scale", _FLOAT8, _PRODUCTS),
        ("float8_scaling_utils.get_maybe_axiswise_dim", _FLOAT8, _PRODUCTS),
        ("float8_scaling_utils.hp_tensor_to_float8_dynamic", _FLOAT8, _PRODUCTS),
        ("float8_training_tensor.GemmInputRole", _FLOAT8, _PRODUCTS),
        ("float8_training_tensor.hp_tensor_and_scale_to_float8", _FLOAT8, _PRODUCTS),
        ("float8_training_tensor.Float8TrainingTensor", "float8 gathers", "a public class"),
        ("float8_training_tensor.Float8TrainingTensor._data", "float8 gathers", "a public attribute"),
        ("float8_training_tensor.Float8TrainingTensor._gemm_input_role", "verification of float8", "an attribute"),
        ("float8_training_tensor.Float8TrainingTensor._scale", "float8 gathers", "a public attribute"),
        ("config.ScalingGranularity", _FLOAT8, "a documented class"),
        ("config.ScalingType", _FLOAT8, "a documented class"),
        seen=Range("0.18", "0.18"),
    ),
    *names_in(
        "torchao.optim",
        ("adam.single_param_adam", _LOW_BIT, "a step of one parameter"),
        ("quant_utils.quantize_4bit_with_qmap", "checkpoints of low-bit optimizers", "a documented function"),
        ("quant_utils.quantize_8bit_with_qmap", "checkpoints of low-bit optimizers", "a documented function"),
        ("subclass_4bit.OptimState4bit", _LOW_BIT, "a documented class"),
        ("subclass_8bit.OptimState8bit", _LOW_BIT, "a documented class"),
        seen=Range("0.18", "0.18"),
    ),
    *names_in(
        "lightning_fabric",
        ("strategies.strategy._BackwardSyncControl", _FABRIC, "a public base class"),
        ("strategies.strategy.Strategy._backward_sync_control", _FABRIC, "a constructor's argument"),
        ("strategies.model_parallel.ModelParallelStrategy._device_mesh", _FABRIC, "a setter"),
        ("strategies.model_parallel.ModelParallelStrategy._setup_distributed", _FABRIC, "a public hook"),
        ("wrappers._FabricModule._forward_module", _FABRIC, "a public attribute"),
        seen=Range("2.6", "2.6"),
    ),
    *names_in(
        "submitit.slurm.slurm.SlurmExecutor",
        ("_make_submission_file_text", "meshwright launch", "a public text of the script"),
        ("_submit_command", "meshwright launch", "a job that is a command"),
        seen=Range("1.5", "1.5"),
    ),
)
