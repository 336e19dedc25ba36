"""Communication-compressed optimizers for JAX, in Optax's form."""

from onebit_jax.exchanges.block_exchange import ErrorFeedbackState as ErrorFeedbackState
from onebit_jax.exchanges.codec import Codec
from onebit_jax.exchanges.count_mean import count_mean
from onebit_jax.exchanges.exchange import Exchange, exact_mean
from onebit_jax.exchanges.hierarchical import hierarchical
from onebit_jax.exchanges.per_shard import per_shard
from onebit_jax.exchanges.quantized_mean import quantized_mean
from onebit_jax.exchanges.random_vote_mean import random_vote_mean
from onebit_jax.exchanges.sign_mean import sign_mean
from onebit_jax.exchanges.two_phase import two_phase
from onebit_jax.exchanges.vote_mean import vote_mean
from onebit_jax.inspect.metrics import metrics
from onebit_jax.inspect.replicas import assert_replicas_identical
from onebit_jax.inspect.replicas import replica_mismatches as replica_mismatches
from onebit_jax.inspect.stage_costs import stage_costs
from onebit_jax.inspect.traffic import Collective as Collective
from onebit_jax.inspect.traffic import Traffic as Traffic
from onebit_jax.inspect.traffic import traffic
from onebit_jax.optimizers.binsgdm import binsgdm
from onebit_jax.optimizers.binsgdm import scale_by_binsgdm as scale_by_binsgdm
from onebit_jax.optimizers.distributed_lion import distributed_lion
from onebit_jax.optimizers.distributed_lion import (
    scale_by_distributed_lion as scale_by_distributed_lion,
)
from onebit_jax.optimizers.local_steps import local_steps
from onebit_jax.optimizers.onebit_adam import (
    onebit_adam,
    onebit_adamw,
    scale_by_onebit_adam,
)
from onebit_jax.optimizers.onebit_lamb import onebit_lamb, scale_by_onebit_lamb
from onebit_jax.optimizers.parts.compressed import Compressed
from onebit_jax.optimizers.parts.compressed import FloorAtMean as FloorAtMean
from onebit_jax.optimizers.parts.freeze import FreezeRule as FreezeRule
from onebit_jax.optimizers.parts.freeze import freeze_at, freeze_when_stable
from onebit_jax.optimizers.parts.growth import (
    GrowthByMeanSquares as GrowthByMeanSquares,
)
from onebit_jax.optimizers.parts.intervals import IntervalRule as IntervalRule
from onebit_jax.optimizers.parts.intervals import (
    every,
    growing_intervals,
    intervals_by_learning_rate,
)
from onebit_jax.optimizers.zero_one_adam import zero_one_adam
from onebit_jax.step.data_parallel import DataParallel as DataParallel
from onebit_jax.step.data_parallel import data_parallel
from onebit_jax.step.local_gradients import local_value_and_grad
from onebit_jax.step.simulated import simulated
from onebit_jax.step.worker_step import worker_step
from onebit_jax.transforms.accumulate import accumulate
from onebit_jax.transforms.clip_by_worker_norm import clip_by_worker_norm
from onebit_jax.transforms.skip_nonfinite import skip_nonfinite
from onebit_jax.workers.per_worker import per_worker
from onebit_jax.workers.placement import abstract_state, init, state_specs
from onebit_jax.workers.resize import resize
from onebit_jax.workers.stages import run_stage
from onebit_jax.workers.states import mean_params, optimizer_state, own_params
from onebit_jax.workers.states import steps_by_stage as steps_by_stage
from onebit_jax.workers.transfers import Transfer as Transfer
from onebit_jax.workers.transfers import sent_bytes
from onebit_jax.workers.worker_local import WorkerLocal

__all__ = [
    "Codec",
    "Compressed",
    "Exchange",
    "WorkerLocal",
    "abstract_state",
    "accumulate",
    "assert_replicas_identical",
    "binsgdm",
    "clip_by_worker_norm",
    "count_mean",
    "data_parallel",
    "distributed_lion",
    "every",
    "exact_mean",
    "freeze_at",
    "freeze_when_stable",
    "growing_intervals",
    "hierarchical",
    "init",
    "intervals_by_learning_rate",
    "local_steps",
    "local_value_and_grad",
    "mean_params",
    "metrics",
    "onebit_adam",
    "onebit_adamw",
    "onebit_lamb",
    "optimizer_state",
    "own_params",
    "per_shard",
    "per_worker",
    "quantized_mean",
    "random_vote_mean",
    "resize",
    "run_stage",
    "scale_by_onebit_adam",
    "scale_by_onebit_lamb",
    "sent_bytes",
    "sign_mean",
    "simulated",
    "skip_nonfinite",
    "stage_costs",
    "state_specs",
    "traffic",
    "two_phase",
    "vote_mean",
    "worker_step",
    "zero_one_adam",
]
