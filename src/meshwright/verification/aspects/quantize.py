"""Round the frozen weights of one process's model as a layout that holds them in 4 bits does."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.distributed.quantize.nf4 import pack, unpack
from meshwright.introspection.facts import model_facts
from meshwright.planning.quantize.plan import make_quantize_plan
from meshwright.planning.techniques import as_techniques
from meshwright.verification.problem import Problem


@torch.no_grad()
def in_4_bits(model: nn.Module, problem: Problem) -> nn.Module:
    """Round in place the weights that a problem's techniques hold in 4 bits, and return the model.

    They become plain weights with the values that the codes stand for, so that the model computes by plain torch.
    """
    planned, _ = make_quantize_plan(model_facts(model), as_techniques(problem.requested))
    for path in planned.modules if planned is not None else ():
        weight = model.get_submodule(path).get_parameter("weight")
        weight.copy_(unpack(pack(weight), weight.dtype))
    return model
