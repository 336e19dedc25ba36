"""Planted bugs of 1-bit LAMB."""

from planted.bug import Bug

RULES = "tests/optimizers/test_onebit_lamb.py::test_"
FORMULA = (f"{RULES}is_its_formula[wide-default]",)
NARROW = (f"{RULES}is_its_formula[narrow-default]",)
PUBLISHED = (f"{RULES}is_its_formula[wide-as published]",)
ZEROS = tuple(f"{RULES}layers_of_zeros_have_the_ratio_one[{x}]" for x in (True, False))
WILD = (f"{RULES}the_factor_keeps_its_limits_under_wild_gradients",)
MAGNITUDE = (f"{RULES}layers_are_exchanged_at_one_magnitude",)
WRONG_STAGE = (f"{RULES}a_static_stage_in_the_wrong_place_still_makes_sense",)
FUSED = "tests/exchanges/test_exchanges.py::test_dtypes_stay[deepspeed-fused-3]"

BUGS = {
    "a layer's ratio has no limits": Bug(
        "onebit_jax/optimizers/parts/trust_ratio.py",
        "jnp.clip(ratio, *limits)",
        "ratio",
        NARROW,
    ),
    "a layer of zeros has a limit for a ratio": Bug(
        "onebit_jax/optimizers/parts/trust_ratio.py",
        "return jnp.where(both, jnp.clip(ratio, *limits), 1)",
        "return jnp.clip(jnp.where(both, ratio, 1), *limits)",
        ZEROS,
    ),
    "the ratio of a layer of zeros is counted": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "return jnp.where(ratio == 1, before, after)",
        "return after",
        ZEROS,
    ),
    "the mean ratio is corrected all the same": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "        if not self.bias_correction:\n            return state.ratio\n",
        "",
        PUBLISHED,
    ),
    "the fresh variance begins at zero": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "nu_fresh=nu,\n            frozen_at",
        "frozen_at",
        FORMULA,
    ),
    "the fresh variance begins without the floor": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "nu_fresh=nu,\n            frozen_at",
        "nu_fresh=state.nu,\n            frozen_at",
        FORMULA,
    ),
    "the fresh variance is of the momentum": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "lambda m, last: (m - self.b1 * last) / (1 - self.b1), mu, state.mu",
        "lambda m, last: m, mu, state.mu",
        FORMULA,
    ),
    "the fresh variance's correction is frozen": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "self.roots(nu_fresh, count),",
        "self.roots(nu_fresh, state.frozen_at),",
        FORMULA,
    ),
    "a factor may change at once": Bug(
        "onebit_jax/optimizers/parts/trust_ratio.py",
        "return jnp.clip(factor, last * (1 - change), last * (1 + change))",
        "return factor",
        WILD,
    ),
    "a factor has no limits": Bug(
        "onebit_jax/optimizers/parts/trust_ratio.py",
        "jnp.clip(1 - share + share * largest, *limits)",
        "1 - share + share * largest",
        WILD,
    ),
    "the decayed weights have no share of a factor": Bug(
        "onebit_jax/optimizers/parts/trust_ratio.py",
        "share = jnp.where(some, jnp.minimum(share, 1), 1)",
        "share = jnp.ones_like(share)",
        FORMULA,
    ),
    "layers are exchanged as large as they are": Bug(
        "onebit_jax/optimizers/parts/layers.py",
        "known = magnitudes > _NEGLIGIBLE * mean",
        "known = magnitudes < 0",
        MAGNITUDE,
    ),
    "a layer without a momentum to speak of is enlarged": Bug(
        "onebit_jax/optimizers/parts/layers.py",
        "known = magnitudes > _NEGLIGIBLE * mean",
        "known = magnitudes > 0",
        MAGNITUDE,
    ),
    "momenta are not scaled back": Bug(
        "onebit_jax/optimizers/parts/layers.py",
        "return times(1 / factors, agreed), state",
        "return agreed, state",
        FORMULA,
    ),
    "a late warm-up thaws what is frozen": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "            state.frozen_at > 0,\n            lambda: self.frozen_lamb",
        "            state.frozen_at < 0,\n            lambda: self.frozen_lamb",
        WRONG_STAGE,
    ),
    "an early compressed step has no fresh variance": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "nu_fresh=optax.tree.where(frozen, state.nu_fresh, state.nu)",
        "nu_fresh=state.nu_fresh",
        WRONG_STAGE,
    ),
    "an early compressed step leaves magnitudes as they are": Bug(
        "onebit_jax/optimizers/onebit_lamb_stages.py",
        "lambda: equal_magnitudes(state.mu)",
        "lambda: state.magnitude",
        WRONG_STAGE,
    ),
    "fused leaves come back in float32": Bug(
        "onebit_jax/exchanges/deepspeed_sign_mean.py",
        "lambda m, u: m.astype(u.dtype), unravel(mean), updates",
        "lambda m, u: m, unravel(mean), updates",
        (FUSED,),
    ),
}
