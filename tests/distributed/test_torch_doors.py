"""Torch's own doors read our parameters, gradients and optimizer state truly: what went in comes out.

The truth is the model before it was laid out, and one process of plain torch for gradients and steps.
"""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.utils._pytree import tree_leaves

from meshwright import Layout
from meshwright.core.host import is_at_least
from meshwright.distributed import (
    apply_expert_parallel,
    apply_fsdp2,
    apply_tensor_parallel,
    init_distributed,
    torch_private,
)
from meshwright.distributed.parallelizer import to_cpu
from meshwright.distributed.weights import parts_tensor, shards
from meshwright.distributed.weights.shards import pieces

pytestmark = pytest.mark.all

TOKENS = torch.arange(24).reshape(4, 6) % 37
SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def _gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0
        )
    )


def _phi3():
    """Queries, keys and values of unequal sizes in one weight; gate and up in another."""
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=2, pad_token_id=0))


def _few_key_heads():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1))


def _mpt():
    from transformers import MptConfig, MptForCausalLM

    return MptForCausalLM(MptConfig(vocab_size=96, d_model=32, n_layers=2, n_heads=4, max_seq_len=32))


def _fused_few_key_heads():
    from transformers import Phi3Config, Phi3ForCausalLM

    return Phi3ForCausalLM(Phi3Config(**SIZES, num_key_value_heads=1, pad_token_id=0))


def _mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4, experts_implementation="eager")
    )


def _llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


DENSE = ("gpt2", "phi3", "few_key_heads", "mpt", "fused_few_key_heads", "llama")
MODELS = {f.__name__[1:]: f for f in (_gpt2, _phi3, _few_key_heads, _mpt, _fused_few_key_heads, _llama, _mixtral)}
LAYOUTS = {
    "tp": Layout(tp=2, dp_shard=1),
    "fsdp-tp": Layout(tp=2, dp_shard=2),
    "hsdp-tp": Layout(tp=2, dp_shard=1, dp_replicate=2),
}


def _plain(name):
    torch.manual_seed(3)
    return MODELS[name]().double().train(False)


def _laid_out(name, mesh):
    model = _plain(name)
    if name == "mixtral":
        apply_expert_parallel(model, mesh)
    else:
        apply_tensor_parallel(model, mesh)
    apply_fsdp2(model, mesh, MixedPrecisionPolicy())
    return model


def _loss(model):
    logits = model(input_ids=TOKENS, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def _off(found, wanted):
    """Largest difference of tensors of equal names and shapes."""
    assert found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys())[:4]
    assert all(found[n].shape == wanted[n].shape for n in wanted)
    return max(float((found[n].detach().double() - wanted[n].detach().double()).abs().max()) for n in wanted)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- the doors: each gives (what torch read off the laid-out model, the truth)


def full_tensor(model, plain):
    return {n: _whole(p.detach()) for n, p in model.named_parameters()}, dict(plain.named_parameters())


def redistributed(model, plain):
    found = {n: p.detach() for n, p in model.named_parameters()}
    return {
        n: p.redistribute(placements=[Replicate()] * p.device_mesh.ndim).to_local() if isinstance(p, DTensor) else p
        for n, p in found.items()
    }, dict(plain.named_parameters())


def copies(model, plain):
    """After operators of torch's, placements must still be true."""
    made = {
        n: torch.zeros_like(p) + p.detach().clone() * 2 - p.detach().float().double()
        for n, p in model.named_parameters()
    }
    truth = {n: p.detach() * 2 - p.detach().float().double() for n, p in plain.named_parameters()}
    return {n: _whole(p) for n, p in made.items()}, truth


def on_the_cpu(model, plain):
    return {n: to_cpu(p.detach().clone()) for n, p in model.named_parameters()}, dict(plain.named_parameters())


def full_state_dict(model, plain):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)), plain.state_dict()


def vector(model, plain):
    return {"all": _whole(parameters_to_vector(model.parameters()).detach())}, {
        "all": parameters_to_vector(plain.parameters()).detach()
    }


def norms(model, plain):
    return {n: _whole(p.detach().norm()) for n, p in model.named_parameters()}, {
        n: p.detach().norm() for n, p in plain.named_parameters()
    }


def gradients_of_two_backwards(model, plain):
    for module in (model, plain):
        _loss(module).backward()
        (_loss(module) * 2).backward()
    return {n: _whole(p.grad.clone() * 1) for n, p in model.named_parameters()}, {
        n: p.grad for n, p in plain.named_parameters()
    }


def clipped_by_torch(model, plain):
    for module in (model, plain):
        _loss(module).backward()
    here, there = clip_grad_norm_(model.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1)
    found = {n: _whole(p.grad) for n, p in model.named_parameters()} | {"norm": _whole(here)}
    return found, {n: p.grad for n, p in plain.named_parameters()} | {"norm": there}


def _stepped(model, plain, make):
    both = []
    for module in (model, plain):
        optimizer = make(module.parameters())
        for _ in range(2):
            _loss(module).backward()
            optimizer.step()
            optimizer.zero_grad()
        both.append(optimizer)
    return both


def optimizer_state(model, plain, **options):
    mine, theirs = _stepped(model, plain, lambda ps: torch.optim.AdamW(ps, lr=1e-2, **options))
    found = get_optimizer_state_dict(model, mine, options=StateDictOptions(full_state_dict=True))["state"]
    wanted = get_optimizer_state_dict(plain, theirs)["state"]
    flat = [{f"{n}.{k}": v for n, state in one.items() for k, v in state.items()} for one in (found, wanted)]
    flat[0] |= {n: _whole(p.detach()) for n, p in model.named_parameters()}
    return flat[0], flat[1] | {n: p.detach() for n, p in plain.named_parameters()}


def foreach_optimizer(model, plain):
    return optimizer_state(model, plain, foreach=True)


def fused_optimizer(model, plain):
    return optimizer_state(model, plain, fused=True)


def power_iteration(model, plain):
    """Matrix products of an optimizer that looks at whole weights, as Muon does."""

    def stepped(p):
        g = p.detach()
        g = g @ g.T @ g if g.dim() == 2 else g
        p.detach().add_(g, alpha=-0.1)
        return p.detach()

    return {n: _whole(stepped(p)) for n, p in model.named_parameters()}, {
        n: stepped(p) for n, p in plain.named_parameters()
    }


def averaged(model, plain):
    """Weights that an average of torch's keeps (SWA, EMA)."""
    made = []
    for module in (model, plain):
        kept = {n: p.detach().clone() for n, p in module.named_parameters()}
        torch._foreach_lerp_(list(kept.values()), [p.detach() * 3 for p in module.parameters()], 0.25)
        made.append(kept)
    return {n: _whole(p) for n, p in made[0].items()}, made[1]


def _other(plain):
    """Other weights for the same model, as a whole state dict."""
    made = copy.deepcopy(plain)
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        parameter.detach().normal_(generator=generator)
    return made


def loaded_by_load_state_dict(model, plain):
    other, state = _other(plain), model.state_dict()
    for key, tensor in state.items():
        whole = other.state_dict()[key]
        if isinstance(tensor, DTensor):
            whole = distribute_tensor(whole, tensor.device_mesh, [Replicate()] * tensor.device_mesh.ndim)
        tensor.copy_(whole)
    model.load_state_dict(state)
    return {n: _whole(p.detach()) for n, p in model.named_parameters()}, dict(other.named_parameters())


def set_by_torch(model, plain):
    """torch deals whole tensors out by itself; where it cannot, it refuses the placement and nothing is wrong."""
    other = _other(plain)
    try:
        set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    except RuntimeError as error:
        assert "unsupported placements Shard(" in str(error)
        other = plain
    return {n: _whole(p.detach()) for n, p in model.named_parameters()}, dict(other.named_parameters())


def _saved(model):
    path = Path(tempfile.gettempdir()) / f"doors-{os.getppid()}"
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True)
    dist.barrier()
    dcp.save(get_model_state_dict(model), checkpoint_id=path)
    return path


def saved_and_read_in_one_process(model, plain):
    path = _saved(model)
    group, _ = dist.new_subgroups(1)
    whole = {n: torch.zeros_like(t) for n, t in plain.state_dict().items()}
    dcp.load(whole, checkpoint_id=path, process_group=group)
    return whole, plain.state_dict()


def saved_and_loaded(model, plain):
    path = _saved(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    dcp.load(get_model_state_dict(model), checkpoint_id=path)
    return {n: _whole(p.detach()) for n, p in model.named_parameters()}, dict(plain.named_parameters())


READING = (
    # torch itself refuses it before 2.13, with no parts either: a view of cut columns, a list of two kinds of shards
    *([vector] if is_at_least("torch", "2.13") else []),
    full_tensor,
    redistributed,
    copies,
    on_the_cpu,
    full_state_dict,
    norms,
    averaged,
    saved_and_read_in_one_process,
    saved_and_loaded,
)
WRITING = (
    gradients_of_two_backwards,
    clipped_by_torch,
    optimizer_state,
    foreach_optimizer,
    fused_optimizer,
    power_iteration,
)
WRITING += (loaded_by_load_state_dict, set_by_torch)


def _through(doors, name, layout, one_model):
    """Each door's largest difference from the truth."""
    said = {}
    mesh = init_distributed(layout)
    for door in doors:
        if not said or not one_model:
            model, plain = _laid_out(name, mesh), _plain(name)
        found, wanted = door(model, plain)
        common = found.keys() & wanted.keys()
        assert common, door
        said[door.__name__] = _off({n: found[n] for n in common}, {n: wanted[n] for n in common})
    return said


def _check(spmd, doors, name, layout, one_model):
    for said in spmd(layout.tp * layout.dp_shard * layout.dp_replicate, _through, doors, name, layout, one_model):
        assert {door: off for door, off in said.items() if not off < 1e-10} == {}


@pytest.mark.parametrize("at", LAYOUTS)
@pytest.mark.parametrize("name", DENSE)
def test_what_went_in_comes_out(spmd, name, at):
    _check(spmd, READING, name, LAYOUTS[at], one_model=True)


@pytest.mark.parametrize("at", LAYOUTS)
@pytest.mark.parametrize("name", DENSE)
def test_what_torch_writes_arrives(spmd, name, at):
    _check(spmd, WRITING, name, LAYOUTS[at], one_model=False)


ACROSS_MESHES = (vector, averaged)
"""torch computes with no list of tensors of several meshes, and experts have one of their own."""


@pytest.mark.parametrize("shards", (2, 4))
def test_experts_that_went_in_come_out(spmd, shards):
    layout = Layout(dp_shard=shards, ep=2)
    _check(spmd, [door for door in READING if door not in ACROSS_MESHES], "mixtral", layout, one_model=True)
    _check(spmd, [gradients_of_two_backwards], "mixtral", layout, one_model=True)


# --- broken on purpose


def _side_by_side(tensor):
    """What ranks hold, one behind the other, as of torch's plain shards."""
    (axis,) = (i for i, place in enumerate(tensor.placements) if hasattr(place, "parts"))
    return Shard(tensor.placements[axis].dim)._to_replicate_tensor(
        tensor._local_tensor, tensor.device_mesh, axis, tensor.shape
    )


FAULTS = {
    "parts are put together as plain shards": lambda: patch.object(parts_tensor, "whole_everywhere", _side_by_side),
    "copies of key heads are written twice": lambda: patch.object(shards, "first_copies", pieces),
    "FSDP2 makes plain DTensors of parts": lambda: patch.object(
        parts_tensor, "let_fsdp_make", lambda tensors: torch_private.let_fsdp_make(_plain_dtensor)
    ),
    "operators look at shares as if they were wholes": lambda: patch.object(parts_tensor, "_on_wholes", _on_each_share),
}


def _plain_dtensor(local, spec):
    return DTensor(local, spec, requires_grad=local.requires_grad)


def _on_each_share(func, args, kwargs):
    like = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, parts_tensor.PartsTensor))
    return parts_tensor._on_shares(func, args, kwargs, like)


def _broken(fault, name, layout):
    with FAULTS[fault]():
        try:
            said = _through(READING, name, layout, one_model=True)
        except Exception as error:
            return repr(error)[:80]
    return [door for door, off in said.items() if not off < 1e-10]


@pytest.mark.kills("doors", "fault")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(spmd, fault):
    name = "few_key_heads" if "copies" in fault else "phi3"
    at = "fsdp-tp" if "FSDP2" in fault else "tp"
    assert all(spmd(4 if at == "fsdp-tp" else 2, _broken, fault, name, LAYOUTS[at]))
