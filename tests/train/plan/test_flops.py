"""The FLOP of BERT's training are those of its traced program's matrix products."""

import math

import jax
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.random_batch import random_batch
from models import SIZES
from train.bert.objective import abstract_params, training_loss
from train.core.mesh import AXIS, make_mesh
from train.plan.flops import step_flops

BATCH, LENGTH = 2, 16


def products(jaxpr, times=1):
    """FLOP of the matrix products that a program is traced to."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            size = math.prod(shape[axis] for axis in contracted)
            total += times * 2 * size * math.prod(equation.outvars[0].aval.shape)
        turns = equation.params.get("length", 1)
        for inner in jax.tree.leaves(list(equation.params.values())):
            if hasattr(inner, "jaxpr"):
                total += products(inner.jaxpr, times * turns)
            elif hasattr(inner, "eqns"):
                total += products(inner, times * turns)
    return total


def test_flops_are_those_of_the_programs_products():
    model = SIZES["tiny"]
    loss = training_loss(model, 0)
    specs = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec()
    gradients = jax.shard_map(
        jax.value_and_grad(loss),
        mesh=make_mesh(1),
        in_specs=specs,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    batch = random_batch(model, BATCH, LENGTH)
    jaxpr = jax.make_jaxpr(gradients)(abstract_params(model), batch, np.uint32(0))
    assert products(jaxpr.jaxpr) == BATCH * step_flops(model, LENGTH)
