"""Every name that other libraries keep private and that this package reaches: one table, and one way to ask for it."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from meshwright.core.devices import CUDA, cuda_release
from meshwright.core.errors import UnsupportedError, quieten_torchao
from meshwright.core.host import DOCTOR, TESTED, Range, installed, numbers

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


_FSDP = "torch.distributed.fsdp._fully_shard"
_STATE = f"{_FSDP}._fsdp_state.FSDPState"
_GROUP = f"{_FSDP}._fsdp_param_group.FSDPParamGroup"
_PARAM = f"{_FSDP}._fsdp_param.FSDPParam"
_FLOAT8 = "fully_shard that gathers weights in float8"
_CP_CPU = "context parallelism on the CPU"
_CP_CUDA = "context parallelism on CUDA in bf16 and fp16"
_CP_FP32 = "context parallelism on CUDA in fp32"
_FOREACH = "Lion, Muon and schedule-free optimizers"
_DRY = "estimates of memory, recorded steps and constructors, which run a model without values"
_ABSENT = "rehearsals of one rank of a world, and estimates of memory"
_COMPILE = "techniques.compile"
_FLEX = "flex_attention of a model that a layout cuts"
_PARTS = "weights in several parts under torch 2.11"
_PREMISES = "layouts of models with hooks on parameters"

TORCH: tuple[PrivateName, ...] = (
    # --- tensors, modes and operators
    *names_in(
        "torch",
        ("_disable_dynamo", "a fast start: the compiler is imported with the models", "a lazy torch.compiler.disable"),
    ),
    *names_in(
        "torch.utils._python_dispatch",
        ("TorchDispatchMode", EVERYTHING, "a public module"),
        ("_disable_current_modes", _DRY, "a public one"),
    ),
    *names_in(
        "torch.utils._python_dispatch.TorchDispatchMode",
        ("_should_skip_dynamo", "fast measurements: the compiler is imported for them", "a public attribute of modes"),
    ),
    *names_in(
        "torch.utils._pytree",
        ("tree_leaves", EVERYTHING, "torch.utils.pytree"),
        ("tree_map", EVERYTHING, "torch.utils.pytree"),
        ("tree_map_with_path", "context parallelism of models with mixers beside attention", "torch.utils.pytree"),
    ),
    *names_in(
        "torch._subclasses.fake_tensor",
        ("FakeTensor", _DRY, "a public FakeTensor"),
        ("FakeTensorMode", _DRY, "a public FakeTensorMode"),
        ("FakeTensorMode.may_turn_const", "estimates of memory with images", "a public limit of kept values"),
    ),
    PrivateName(
        "torch.Tensor._version", "context parallelism, float8 gathers and traces", "a public counter of writes"
    ),
    PrivateName("torch.Tensor._base", "fully_shard of models whose units return views", "a public attribute"),
    PrivateName("torch._ops.OpOverload._schema", "recorded constructors, logits in parts", "a public schema"),
    PrivateName("torch.Tensor._make_wrapper_subclass", "logits in parts", "a public constructor", documented=True),
    PrivateName("torch._C.DisableTorchFunctionSubclass", "logits in parts", "a public context", documented=True),
    PrivateName("torch._C._current_autograd_node", _PARTS, "torch 2.12, which needs no help"),
    # --- autograd
    PrivateName("torch._C._current_graph_task_id", "idle parameters, mixtures of experts and traces", "a public query"),
    PrivateName("torch._C._dispatch_keyset_full_after", "traces of collectives", "a public way on to the backend"),
    PrivateName("torch._C._functorch.peek_interpreter_stack", "traces of torch.func", "a public query"),
    PrivateName(
        "torch.autograd.Variable._execution_engine",
        "idle parameters, context parallelism in a loop of one's own and checked ZeRO strategies",
        "a public queue_callback",
    ),
    *names_in(
        "torch.Tensor",
        ("_backward_hooks", _PREMISES, "a public list of hooks"),
        ("_post_accumulate_grad_hooks", _PREMISES, "a public list of hooks"),
    ),
    # --- modules and optimizers
    *names_in(
        "torch.nn.Module",
        ("_modules", EVERYTHING, "modules() without a call for each level of each module"),
        ("_parameters", EVERYTHING, "a public view that shows absent parameters too"),
        ("_buffers", EVERYTHING, "a public view that shows absent buffers too"),
        ("_forward_pre_hooks", EVERYTHING, "a public list of hooks"),
        ("_forward_hooks", EVERYTHING, "a public list of hooks"),
        ("_apply", EVERYTHING, "a public form that maps parameters and buffers"),
        ("_non_persistent_buffers_set", "facts of a model and files of Hugging Face", "a public flag of buffers"),
        ("_compiled_call_impl", _COMPILE, "a public attribute"),
        ("_wrapped_call_impl", "the module's name in a hanging rank's report", "public frames of modules"),
    ),
    *names_in(
        "torch.optim.Optimizer",
        ("_optimizer_step_pre_hooks", "AdamW in 8 bits", "a public list of hooks"),
        ("_optimizer_step_post_hooks", "AdamW in 8 bits", "a public list of hooks"),
    ),
    PrivateName("torch.nn.MultiheadAttention._reset_parameters", "nn.MultiheadAttention on meta", "reset_parameters"),
    PrivateName(
        "torch.nn.utils.clip_grad._get_total_norm",
        "refusals of torch's norm of one stage's gradients",
        "a hook on norms",
    ),
    PrivateName("torch.nn.init._no_grad_trunc_normal_", "recorded constructors", "trunc_normal_ as one operator"),
    *names_in(
        "torch",
        ("_foreach_sqrt", _FOREACH, "a public function"),
        ("_foreach_reciprocal_", _FOREACH, "a public function"),
        ("_foreach_zero_", "gradient accumulation under DDP", "a public function"),
        documented=True,
    ),
    *names_in(
        "torch",
        ("_foreach_add_", _FOREACH, "a public function"),
        ("_foreach_addcmul_", _FOREACH, "a public function"),
        ("_foreach_lerp", _FOREACH, "a public function"),
        ("_foreach_lerp_", _FOREACH, "a public function"),
        ("_foreach_mul_", "Lion, schedule-free optimizers and fast clipping", "a public function"),
        ("_foreach_norm", "fast clipping of gradients", "a public function"),
        ("_foreach_sign_", _FOREACH, "a public function"),
    ),
    # --- the compiler and memory
    PrivateName("torch._dynamo.utils.counters", _COMPILE, "public counts of graph breaks"),
    PrivateName(
        "torch._dynamo.utils.disable_cache_limit", "AdamW of torchao", "a limit for each function (torch >= 2.12)"
    ),
    PrivateName("torch._functorch.config", "techniques.memory_budget", "an option of torch.compile"),
    *names_in(
        f"torch.{CUDA}.memory",
        ("_record_memory_history", "profiles of CUDA's memory", "a public name"),
        ("_dump_snapshot", "profiles of CUDA's memory", "a public name"),
        documented=True,
    ),
    PrivateName(f"torch.{CUDA}._sleep", "rehearsals that take messages' time", "a public kernel that waits"),
    PrivateName(
        "torch.distributed.distributed_c10d._get_default_store", "saves beside training", "a public store of a group"
    ),
    # --- kernels
    *names_in(
        "torch.ops.aten",
        ("_scaled_dot_product_flash_attention_for_cpu", _CP_CPU, "attention that returns logarithms"),
        ("_scaled_dot_product_flash_attention_for_cpu_backward", _CP_CPU, "attention that returns logarithms"),
        ("_scaled_dot_product_flash_attention", _CP_CUDA, "attention that returns logarithms"),
        ("_scaled_dot_product_flash_attention_backward", _CP_CUDA, "attention that returns logarithms"),
        ("_scaled_dot_product_efficient_attention", _CP_FP32, "attention that returns logarithms"),
        ("_scaled_dot_product_efficient_attention_backward", _CP_FP32, "attention that returns logarithms"),
        ("_grouped_mm", "estimates of memory of mixtures of experts", "a public operator"),
        ("_unsafe_view", "sequence parallelism, logits in parts, fully_shard", "a public operator"),
    ),
    *names_in(
        "torch.nn.attention.flex_attention",
        ("_identity", _FLEX, "an operator that takes no function of scores"),
        ("_validate_device", _FLEX, "a backward on the CPU"),
    ),
    # --- DTensor and meshes
    *names_in(
        "torch.distributed.tensor.DTensor",
        ("_local_tensor", EVERYTHING, "a public form that records nothing"),
        ("_spec", EVERYTHING, "a public constructor from mesh, placements and shape"),
        ("_op_dispatcher", "a second process group in one process", "destroy_process_group clearing caches"),
    ),
    *names_in(
        "torch.distributed.tensor._dtensor_spec",
        ("DTensorSpec", EVERYTHING, "a public constructor of DTensor"),
        ("TensorMeta", EVERYTHING, "a public constructor of DTensor"),
    ),
    PrivateName(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "traces of other scripts (without it shards are placed by value)",
        "a public query",
    ),
    *names_in(
        "torch.distributed.fsdp._flat_param.FlatParameter",
        ("_fqns", "traces of other scripts with FSDP1", "a public query"),
        ("_params", "traces of other scripts with FSDP1", "a public query"),
        ("_shard_param_infos", "traces of other scripts with FSDP1", "a public query"),
    ),
    PrivateName(
        "torch.distributed.fsdp.FullyShardedDataParallel._handle",
        "traces of other scripts with FSDP1",
        "a public query",
    ),
    PrivateName(
        "torch.autograd.graph.Node._input_metadata",
        "traces of other scripts in 16 bits",
        "a public query",
        documented=True,
    ),
    PrivateName(
        "torch.distributed.tensor.placement_types._StridedShard",
        "fully_shard with tensor parallelism",
        "a public class",
    ),
    PrivateName(
        "torch._C._clear_DTensor_sharding_propagator_cache",
        "a second process group in one process",
        "destroy_process_group clearing caches",
    ),
    PrivateName("torch.distributed.device_mesh.DeviceMesh._flatten", "hybrid sharding and Muon", "a public flatten"),
    # --- process groups
    *names_in(
        "torch.distributed.distributed_c10d",
        ("_world", _ABSENT, "worlds that are values"),
        ("_update_default_pg", _ABSENT, "worlds that are values"),
        ("_set_pg_timeout", "time limits of messages", "set_timeout (torch >= 2.14)"),
    ),
    *names_in(
        "torch._C._distributed_c10d",
        ("_create_work_from_future", _ABSENT, "a public constructor"),
        ("_dump_fr_trace", "reports of ranks that wait", "public records of messages"),
    ),
    PrivateName(
        "torch._C._distributed_c10d._dump_nccl_trace",
        "reports of ranks that wait on CUDA",
        "public records of messages",
        cuda_only=True,
    ),
    PrivateName("torch._C._AutoDispatchBelowADInplaceOrView", _ABSENT, "kernels that autograd does not count"),
    PrivateName("torch.testing._internal.distributed.fake_pg", _ABSENT, "a public backend without messages"),
    PrivateName("torch.distributed._symmetric_memory", "async_tensor_parallel", "a public symmetric memory"),
    PrivateName(
        "torch.nn.parallel.DistributedDataParallel._static_graph_delay_allreduce_enqueued",
        "gradient accumulation under DDP with a static graph",
        "a public flag",
    ),
    # --- FSDP2
    PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "fully_shard", "a public list of groups"),
    *names_in(
        _STATE,
        ("_fsdp_param_group", "fully_shard", "a public list of groups"),
        ("_is_root", "recovery of fully_shard from a failed step", "a reset that may come early"),
        ("_lazy_init", _FLOAT8, "a public set-up"),
        ("_mp_policy", "torch's pipeline stages over fully_shard", "a public attribute"),
        ("_register_pre_backward_hook", "models that return an object of their own", "hooks for such objects"),
        ("_root_post_backward_final_callback", "pipelines over fully_shard", "finalize_backward (torch >= 2.15)"),
        ("_state_ctx", "pipelines over fully_shard", "finalize_backward (torch >= 2.15)"),
    ),
    *names_in(_STATE, ("_fsdp_param_groups", "fully_shard", "a public list of groups"), seen=Range("2.12", "2.15")),
    *names_in(
        _GROUP,
        ("_all_gather_result", "accounts of memory", "a public buffer"),
        ("_module_fqn", "the module's name in reports of ranks that wait", "public frames of modules"),
        ("_partial_reduce_output", "hybrid sharding", "reset_iter_state (torch >= 2.12)"),
    ),
    PrivateName(_PARAM, _FLOAT8, "extensions registered for a parameter"),
    *names_in(
        _PARAM,
        ("_init_extensions", _FLOAT8, "extensions registered for a parameter"),
        ("_sharded_local_tensor", _FLOAT8, "extensions registered for a parameter"),
    ),
    PrivateName(
        f"{_FSDP}._fsdp_param._from_local_no_grad",
        "fully_shard over weights in several parts",
        "FSDP2 keeping the class of a parameter",
    ),
)

_TORCHAO, _LOW_BIT = "float8 training", "AdamW of torchao"
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
    *names_in(
        "transformers",
        ("AutoModelForCausalLM._model_mapping", "models of transformers by their names", "a list for an auto class"),
        ("masking_utils.find_packed_sequence_indices", "estimates of memory with images", "an argument for documents"),
        seen=TESTED["transformers"],
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
        ("float8_linear.matmul_with_hp_or_float8_args", _TORCHAO, _PRODUCTS),
        ("float8_utils.amax_to_scale", _TORCHAO, _PRODUCTS),
        ("float8_scaling_utils.get_maybe_axiswise_dim", _TORCHAO, _PRODUCTS),
        ("float8_scaling_utils.hp_tensor_to_float8_dynamic", _TORCHAO, _PRODUCTS),
        ("float8_training_tensor.GemmInputRole", _TORCHAO, _PRODUCTS),
        ("float8_training_tensor.hp_tensor_and_scale_to_float8", _TORCHAO, _PRODUCTS),
        ("float8_training_tensor.Float8TrainingTensor", "float8 gathers", "a public class"),
        ("float8_training_tensor.Float8TrainingTensor._data", "float8 gathers", "a public attribute"),
        ("float8_training_tensor.Float8TrainingTensor._gemm_input_role", "verification of float8", "an attribute"),
        ("float8_training_tensor.Float8TrainingTensor._scale", "float8 gathers", "a public attribute"),
        ("config.ScalingGranularity", _TORCHAO, "a documented class"),
        ("config.ScalingType", _TORCHAO, "a documented class"),
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


P = ParamSpec("P")
R = TypeVar("R")

TABLE: tuple[PrivateName, ...] = (*TORCH, *LIBRARIES)
"""Every private name that the package reaches."""
_ROWS = {row.path: row for row in TABLE}
_FOUND: dict[str, Any] = {}


def found(path: str) -> Any:
    """Import a name of the table; raise UnsupportedError, with what needs it, if the installed library lacks it."""
    if path not in _FOUND:
        try:
            _FOUND[_ROWS[path].path] = walk(path)
        except (ImportError, AttributeError) as error:
            raise absent(path) from error
    return _FOUND[path]


def found_or_none(path: str) -> Any:
    """Import a name of the table; return None where the library lacks it, for what goes on without."""
    try:
        return found(path)
    except UnsupportedError:
        return None


def needs(*paths: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that reads attributes of the table from objects: a missing one is refused by its row."""
    names = {_ROWS[path].name: path for path in paths}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except AttributeError as error:
                if error.name in names:
                    raise absent(names[error.name]) from error
                raise

        return run

    return decorate


def absent(path: str) -> UnsupportedError:
    """Return the refusal of what needs a name that is not there."""
    row = _ROWS[path]
    rest = DOCTOR if row.needed_by == EVERYTHING else "the rest works ('meshwright doctor' lists what does)"
    return UnsupportedError(
        f"{row.package} {installed(row.package)} has no {path}, which {row.needed_by} needs; {rest}"
    )


def missing() -> list[PrivateName]:
    """Return the rows whose names the installed libraries lack.

    Rows of libraries that are not installed are left out, and names that the installed release or build is known to
    have no more, or not yet.
    """
    quieten_torchao()
    return [
        row
        for row in TABLE
        if row.is_expected() and not (row.cuda_only and cuda_release() is None) and not is_there(row)
    ]


def is_there(row: PrivateName) -> bool:
    """Return whether a name can be imported, or is an attribute that its class's module declares or sets."""
    owner, _, name = row.path.rpartition(".")
    try:
        held = walk(owner)
        if hasattr(held, name) or not inspect.isclass(held):
            walk(row.path)
            return True
        source = inspect.getsource(sys.modules[held.__module__])
    except Exception:  # noqa: BLE001  whatever a library raises as it is imported
        return False
    return re.search(rf"(?m)^\s+(\w+\.)*{name}\b[^(\n]*[:=]|\.{name}\b[^(\n]*=", source) is not None


def walk(path: str) -> Any:
    """Import the longest prefix of a path that is a module, and read the rest as attributes."""
    parts = path.split(".")
    held = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if not hasattr(held, part) and inspect.ismodule(held) and hasattr(held, "__path__"):
            held = importlib.import_module(".".join(parts[:place]))
        else:
            held = getattr(held, part)
    return held
