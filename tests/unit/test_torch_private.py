"""What torch and transformers keep private still does what we take it for.

A failure here says what another version moved.
"""

from __future__ import annotations

import gc
import inspect
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright.core import torch_private as private
from meshwright.distributed.memory.account import noting_resizes
from meshwright.distributed.optimizer import grad_clip
from meshwright.distributed.process.absent_peers import name_of_operator
from meshwright.introspection import module_kinds
from meshwright.planning.recompute import OPERATOR, OVERLOADED
from meshwright.training.health import heartbeat as stacks


class Squares(private.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})).square()


def test_extension_points():
    two = torch.tensor([2.0])
    with Squares():
        squared = two.neg()
        with private.without_modes():
            plain = two.neg()
    assert squared.item() == 4 and plain.item() == -2


def test_leaves_of_nests():
    tensor = torch.ones(1)
    nest = {"a": [1, (tensor,)]}
    assert private.tree_leaves(nest) == [1, tensor] and private.tree_map(lambda x: x + 1, [1]) == [2]
    assert private.tree_map_only(int, lambda x: x + 1, [1, "a"]) == [2, "a"]
    assert private.tensors_by_path(nest) == {"['a'][1][0]": tensor}
    assert private.tree_map_with_path(lambda path, leaf: path, [nest, 2]) == [
        {"a": ["[0]['a'][0]", ("[0]['a'][1][0]",)]},
        "[1]",
    ]


@pytest.mark.parametrize("mode", [nullcontext, private.fake_mode])
def test_a_storage_is_one_object_for_as_long_as_tensors_lie_in_it(mode):
    """``id`` of a storage tells storages apart, also those without memory."""
    with mode():
        a, b = torch.empty(2, device="meta"), torch.empty(2)
        number = id(a.untyped_storage())
        gc.collect()
        assert number == id(a.view(1, 2).untyped_storage()) != id(b.untyped_storage())


def test_classes_of_operators_are_those_of_any_operator():
    assert isinstance(torch.ops.aten.add, OVERLOADED) and isinstance(torch.ops.aten.add.Tensor, OPERATOR)
    assert not isinstance(torch.ops.aten.add.Tensor, OVERLOADED) and not isinstance(torch.add, OPERATOR)


def test_storages_that_python_resizes_are_seen():
    storage, seen = torch.ones(3).untyped_storage(), []
    with noting_resizes(lambda other: seen.append(other.nbytes())):
        storage.resize_(0)
    storage.resize_(8)
    assert seen == [0] and storage.nbytes() == 8


def test_tensors_of_a_dry_run_have_no_values():
    assert not private.has_no_values(torch.ones(1))
    with private.fake_mode():
        assert private.has_no_values(torch.ones(1))
    assert not private.has_no_values(None)


def test_writes_are_counted():
    tensor = torch.ones(1)
    before = private.version_of(tensor)
    assert private.version_of(tensor.add_(1)) > before


def test_operators_tell_their_schema_and_name():
    assert (
        private.schema_of(torch.ops.aten.add_.Tensor).is_mutable
        and not private.schema_of(torch.ops.aten.add.Tensor).is_mutable
    )
    assert private.schema_of(len) is None
    assert name_of_operator(torch.ops.aten.add.Tensor) == "add" and name_of_operator(torch.ops.aten.mm.default) == "mm"
    assert private.is_grouped_product(torch.ops.aten._grouped_mm.default)
    assert not private.is_grouped_product(torch.ops.aten.mm.default)


def test_operators_on_many_tensors():
    tensors = [torch.full((4,), 2.0), torch.full((1,), 3.0)]
    assert [norm.item() for norm in grad_clip.foreach_norm(tensors)] == [4, 3]
    grad_clip.foreach_multiply_(tensors, 2.0)
    assert tensors[1].item() == 6
    others = [torch.full((4,), -4.0), torch.full((1,), 2.0)]
    assert [each[0].item() for each in grad_clip.foreach_between(tensors, others, 0.25)] == [2, 5]
    grad_clip.foreach_between_(tensors, others, 0.5)
    assert [each[0].item() for each in tensors] == [0, 4]
    grad_clip.foreach_add_(tensors, others, 2.0)
    assert [each[0].item() for each in tensors] == [-8, 8]
    grad_clip.foreach_sign_(tensors)
    assert [each[0].item() for each in tensors] == [-1, 1]
    private.foreach_zero_(tensors)
    assert not any(tensor.any() for tensor in tensors)


def test_a_recomputed_forward_is_in_a_backward():
    seen = []

    def forward(x):
        seen.append(private.is_in_backward())
        return x.sin().sin()

    checkpoint(forward, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert seen == [False, True]


def test_a_function_is_called_behind_the_backward():
    order = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: private.call_behind_backward(lambda: order.append("behind")))
    x.register_post_accumulate_grad_hook(lambda p: order.append("accumulated"))
    y.backward()
    assert order == ["accumulated", "behind"]


def test_hooks_of_parameters_are_listed_and_forgotten():
    parameter = nn.Parameter(torch.ones(1))
    assert not private.gradient_hooks(parameter) and not private.accumulation_hooks(parameter)
    parameter.register_hook(print)
    parameter.register_post_accumulate_grad_hook(repr)
    assert private.gradient_hooks(parameter) == [print] and private.accumulation_hooks(parameter) == [repr]


def test_modules_tell_their_buffers_and_hooks():
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("derived", torch.ones(1), persistent=False)
    assert private.is_persistent(module, "kept") and not private.is_persistent(module, "derived")
    module.register_forward_pre_hook(print)
    module.register_forward_hook(repr)
    before, behind = private.forward_hooks(module)
    assert list(before.values()) == [print] and list(behind.values()) == [repr]


def test_modules_initialise_themselves():
    attention, linear = nn.MultiheadAttention(4, 2), nn.Linear(2, 2)
    for module, parameter in ((attention, attention.in_proj_weight), (linear, linear.weight)):
        with torch.no_grad():
            parameter.zero_()
        private.resetting(module)()
        assert parameter.any()
    assert private.resetting(nn.Identity()) is None


def test_hooks_around_an_optimizers_step_are_seen():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    assert not private.optimizer_has_step_hooks(optimizer)
    optimizer.register_step_post_hook(lambda *_: None)
    assert private.optimizer_has_step_hooks(optimizer)


def test_a_compiled_modules_calls_can_go_elsewhere():
    module = nn.Identity()
    assert private.compiled_call(module) is None
    module.compile(backend="eager")
    assert private.compiled_call(module) is not None
    private.set_compiled_call(module, lambda x: x + 1)
    assert module(1) == 2


def test_the_compiler_is_imported():
    private.import_compiler()
    assert "torch._dynamo" in sys.modules


def test_the_compiler_is_kept_out_and_counts_its_graph_breaks():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @private.uncompiled
    def outside(x):
        return x + len(inspect.stack())

    with private.without_recompilation_limit(), private.with_activation_budget(0.5):
        torch.compile(lambda x: outside(x.sin()).cos(), backend="eager")(torch.ones(1))
    assert sum(private.graph_break_counts().values()) >= 1
    import torch._functorch.config as config

    assert config.activation_memory_budget == 1.0


def test_the_frame_that_calls_a_module_has_its_name():
    class Looks(nn.Module):
        def forward(self):
            return [frame.function for frame in inspect.stack()]

    assert stacks.CALLING in Looks()()


def test_what_draws_a_truncated_normal_stands_in_init(monkeypatch):
    asked = []
    monkeypatch.setattr(nn.init, private.SAMPLES_NORMAL, lambda tensor, *args, **kwargs: asked.append(args) or tensor)
    nn.init.trunc_normal_(torch.ones(2))
    assert len(asked) == 1


def test_a_model_of_transformers_is_built_again_and_tells_its_plan():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 16,
    }
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config)
    assert module_kinds.brings_initialiser(model) and not module_kinds.brings_initialiser(nn.Linear(1, 1))
    again = module_kinds.build_again(type(model), model.config)
    assert [p.shape for p in again.parameters()] == [p.shape for p in model.parameters()]
    assert module_kinds.tensor_plan_of(model) and module_kinds.tensor_plan_of(nn.Linear(1, 1)) is None
    assert module_kinds.names_to_ignore(nn.Linear(1, 1)) == ()
    gptj = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16))
    assert isinstance(module_kinds.names_to_ignore(gptj), (list, tuple, set))


def test_experts_can_be_computed_one_by_one():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=16,
        num_local_experts=2,
    )
    model = transformers.MixtralForCausalLM(config).double()
    module_kinds.compute_experts_one_by_one(model.config)
    assert model(torch.tensor([[1, 2]])).logits.dtype == torch.float64
    assert any(key.endswith(module_kinds.KERNEL_KEYS) for key in dir(model.config))


def test_attention_returns_logarithms_and_its_backward_takes_them():
    q, k, v, gradient = (torch.randn(1, 2, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(4))
    options = {"is_causal": True, "scale": 0.5}
    output, logarithm = private.flash_attention(q.detach(), k.detach(), v.detach(), **options)
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(torch.ones(6, 6).tril() == 0, -torch.inf)
    expected = scores.softmax(-1) @ v
    expected.backward(gradient)
    assert torch.allclose(output, expected) and torch.allclose(logarithm, scores.logsumexp(-1))
    given = (gradient.detach(), q.detach(), k.detach(), v.detach(), output, logarithm)
    found = private.flash_attention_backward(*given, **options)
    assert all(torch.allclose(made, x.grad) for made, x in zip(found, (q, k, v), strict=True))


def test_flex_attention_is_seen_above_autograd():
    from torch.nn.attention.flex_attention import flex_attention

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is private.flex_operator():
                plain.append(private.flex_score_is_plain(args[3]))
            if func == torch.Tensor.requires_grad.__get__:
                asked.append(private.is_asked_by_flex(sys._getframe(1)))
                return asked[-1] is False and func(*args)
            return func(*args, **(kwargs or {}))

    plain, asked = [], []
    q = torch.randn(1, 1, 4, 8)
    with torch.compiler.set_stance("force_eager"), Seen():
        flex_attention(q, q, q)
        flex_attention(q, q, q, score_mod=lambda score, *places: score)
        assert not q.requires_grad
    assert plain == [True, False] and asked.count(True) == 6 and asked[-1] is False
