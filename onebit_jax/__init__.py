"""Communication-compressed optimizers for JAX, in Optax's form."""

from onebit_jax._accumulate import AccumulateState as AccumulateState
from onebit_jax._accumulate import accumulate as accumulate
from onebit_jax._alias import onebit_adam as onebit_adam
from onebit_jax._alias import onebit_adamw as onebit_adamw
from onebit_jax._clip import clip_by_worker_norm as clip_by_worker_norm
from onebit_jax._collectives import Collective as Collective
from onebit_jax._compressed import SignMeanState as SignMeanState
from onebit_jax._count_mean import count_mean as count_mean
from onebit_jax._data_parallel import DataParallel as DataParallel
from onebit_jax._data_parallel import data_parallel as data_parallel
from onebit_jax._deepspeed import DeepSpeedSignMeanState as DeepSpeedSignMeanState
from onebit_jax._deepspeed import deepspeed_sign_mean as deepspeed_sign_mean
from onebit_jax._exchange import ExactMeanState as ExactMeanState
from onebit_jax._exchange import Exchange as Exchange
from onebit_jax._exchange import exact_mean as exact_mean
from onebit_jax._freeze import FreezeRule as FreezeRule
from onebit_jax._freeze import freeze_at as freeze_at
from onebit_jax._freeze import freeze_when_stable as freeze_when_stable
from onebit_jax._gradients import local_value_and_grad as local_value_and_grad
from onebit_jax._hierarchical import hierarchical as hierarchical
from onebit_jax._metrics import metrics as metrics
from onebit_jax._onebit_adam import ScaleByOnebitAdamState as ScaleByOnebitAdamState
from onebit_jax._onebit_adam import scale_by_onebit_adam as scale_by_onebit_adam
from onebit_jax._per_shard import per_shard as per_shard
from onebit_jax._per_worker import PerWorker as PerWorker
from onebit_jax._placement import abstract_state as abstract_state
from onebit_jax._placement import init as init
from onebit_jax._placement import resize as resize
from onebit_jax._placement import state_specs as state_specs
from onebit_jax._replicas import (
    assert_replicas_identical as assert_replicas_identical,
)
from onebit_jax._replicas import replica_mismatches as replica_mismatches
from onebit_jax._sign_mean import sign_mean as sign_mean
from onebit_jax._skip import SkipNonfiniteState as SkipNonfiniteState
from onebit_jax._skip import skip_nonfinite as skip_nonfinite
from onebit_jax._traffic import Traffic as Traffic
from onebit_jax._traffic import traffic as traffic
