"""Communication-compressed optimizers for JAX, in Optax's form."""

from onebit_jax.exchanges.block_exchange import ErrorFeedbackState as ErrorFeedbackState
from onebit_jax.exchanges.codec import Codec as Codec
from onebit_jax.exchanges.count_mean import count_mean as count_mean
from onebit_jax.exchanges.deepspeed_sign_mean import (
    deepspeed_sign_mean as deepspeed_sign_mean,
)
from onebit_jax.exchanges.exchange import Exchange as Exchange
from onebit_jax.exchanges.exchange import exact_mean as exact_mean
from onebit_jax.exchanges.hierarchical import hierarchical as hierarchical
from onebit_jax.exchanges.per_shard import per_shard as per_shard
from onebit_jax.exchanges.quantized_mean import quantized_mean as quantized_mean
from onebit_jax.exchanges.random_vote_mean import RandomVoteState as RandomVoteState
from onebit_jax.exchanges.random_vote_mean import random_vote_mean as random_vote_mean
from onebit_jax.exchanges.sign_mean import sign_mean as sign_mean
from onebit_jax.exchanges.two_phase import two_phase as two_phase
from onebit_jax.exchanges.vote_mean import vote_mean as vote_mean
from onebit_jax.inspect.collectives import Collective as Collective
from onebit_jax.inspect.metrics import metrics as metrics
from onebit_jax.inspect.replicas import (
    assert_replicas_identical as assert_replicas_identical,
)
from onebit_jax.inspect.replicas import replica_mismatches as replica_mismatches
from onebit_jax.inspect.stage_costs import stage_costs as stage_costs
from onebit_jax.inspect.traffic import Traffic as Traffic
from onebit_jax.inspect.traffic import traffic as traffic
from onebit_jax.optimizers.binsgdm import ScaleByBinsgdmState as ScaleByBinsgdmState
from onebit_jax.optimizers.binsgdm import binsgdm as binsgdm
from onebit_jax.optimizers.binsgdm import scale_by_binsgdm as scale_by_binsgdm
from onebit_jax.optimizers.distributed_lion import (
    ScaleByDistributedLionState as ScaleByDistributedLionState,
)
from onebit_jax.optimizers.distributed_lion import distributed_lion as distributed_lion
from onebit_jax.optimizers.distributed_lion import (
    scale_by_distributed_lion as scale_by_distributed_lion,
)
from onebit_jax.optimizers.floor import FloorAtMean as FloorAtMean
from onebit_jax.optimizers.freeze import FreezeRule as FreezeRule
from onebit_jax.optimizers.freeze import freeze_at as freeze_at
from onebit_jax.optimizers.freeze import freeze_when_stable as freeze_when_stable
from onebit_jax.optimizers.growth import GrowthByMeanSquares as GrowthByMeanSquares
from onebit_jax.optimizers.intervals import IntervalRule as IntervalRule
from onebit_jax.optimizers.intervals import every as every
from onebit_jax.optimizers.intervals import growing_intervals as growing_intervals
from onebit_jax.optimizers.onebit_adam import AS_PUBLISHED as AS_PUBLISHED
from onebit_jax.optimizers.onebit_adam import (
    scale_by_onebit_adam as scale_by_onebit_adam,
)
from onebit_jax.optimizers.onebit_adam_alias import onebit_adam as onebit_adam
from onebit_jax.optimizers.onebit_adam_alias import onebit_adamw as onebit_adamw
from onebit_jax.optimizers.onebit_adam_state import (
    ScaleByOnebitAdamState as ScaleByOnebitAdamState,
)
from onebit_jax.optimizers.onebit_lamb import LAMB_AS_PUBLISHED as LAMB_AS_PUBLISHED
from onebit_jax.optimizers.onebit_lamb import (
    scale_by_onebit_lamb as scale_by_onebit_lamb,
)
from onebit_jax.optimizers.onebit_lamb_alias import onebit_lamb as onebit_lamb
from onebit_jax.optimizers.onebit_lamb_state import (
    ScaleByOnebitLambState as ScaleByOnebitLambState,
)
from onebit_jax.optimizers.zero_one_adam_alias import AS_DEEPSPEED as AS_DEEPSPEED
from onebit_jax.optimizers.zero_one_adam_alias import zero_one_adam as zero_one_adam
from onebit_jax.optimizers.zero_one_adam_state import (
    ZeroOneAdamState as ZeroOneAdamState,
)
from onebit_jax.step.data_parallel import DataParallel as DataParallel
from onebit_jax.step.data_parallel import data_parallel as data_parallel
from onebit_jax.step.local_gradients import local_value_and_grad as local_value_and_grad
from onebit_jax.step.local_params import local_params as local_params
from onebit_jax.step.simulated import simulated as simulated
from onebit_jax.transforms.accumulate import AccumulateState as AccumulateState
from onebit_jax.transforms.accumulate import accumulate as accumulate
from onebit_jax.transforms.clip_by_worker_norm import (
    clip_by_worker_norm as clip_by_worker_norm,
)
from onebit_jax.transforms.skip_nonfinite import (
    SkipNonfiniteState as SkipNonfiniteState,
)
from onebit_jax.transforms.skip_nonfinite import skip_nonfinite as skip_nonfinite
from onebit_jax.workers.placement import abstract_state as abstract_state
from onebit_jax.workers.placement import init as init
from onebit_jax.workers.placement import state_specs as state_specs
from onebit_jax.workers.resize import resize as resize
from onebit_jax.workers.resize import saved_state as saved_state
from onebit_jax.workers.stages import run_stage as run_stage
from onebit_jax.workers.stages import steps_by_stage as steps_by_stage
from onebit_jax.workers.transfers import Transfer as Transfer
from onebit_jax.workers.transfers import sent_bytes as sent_bytes
from onebit_jax.workers.worker_local import WorkerLocal as WorkerLocal
