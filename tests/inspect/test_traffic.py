"""Bytes counted from compiled programs, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from virtual_workers import mesh_over

from onebit_jax import traffic


def counted(f, mesh, in_specs, out_specs, *args):
    step = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    return traffic(step.lower(*args).compile(), mesh)


def varying(x, axis):
    return lax.pcast(x, axis, to="varying")


@pytest.fixture(scope="module")
def mesh():
    return mesh_over({"a": 4, "b": 2})


def test_psum_over_one_axis_of_two(mesh):
    found = counted(lambda x: lax.psum(x, "a"), mesh, P("a"), P(), jnp.ones(4 * 100))
    (one,) = found.collectives
    assert one == ("all-reduce", "f32", 400, ("a",), 4, 1, "every", 2 * 400 * 3 // 4)
    assert found.sent_bytes() == found.sent_bytes(axis="a") == 600
    assert found.sent_bytes(axis="b") == 0
    # Plain Adam has no stages: both are what every step sends.
    assert found.stages == ()
    assert found.sent_bytes("warmup") == found.sent_bytes("compressed") == 600


def test_all_to_all_and_all_gather_of_words(mesh):
    def f(x):
        x = lax.all_to_all(x, "a", 0, 0, tiled=True)
        return lax.all_gather(x[:6], "b", tiled=True, to="invarying")

    found = counted(f, mesh, P(("a", "b")), P("a"), jnp.ones(8 * 64, jnp.uint32))
    exchanged, gathered = found.collectives
    assert exchanged == ("all-to-all", "u32", 256, ("a",), 4, 1, "every", 192)
    assert gathered == ("all-gather", "u32", 48, ("b",), 2, 1, "every", 24)


def test_psum_scatter_and_ppermute(mesh):
    def f(x):
        scattered = lax.psum_scatter(x, ("a", "b"), tiled=True)
        return lax.ppermute(x, "a", [(0, 1), (1, 2)]), scattered

    found = counted(f, mesh, P(("a", "b")), (P(("a", "b")),) * 2, jnp.ones(8 * 16))
    by_op = {each.op: each for each in found.collectives}
    assert by_op["reduce-scatter"][2:] == (64, ("a", "b"), 8, 1, "every", 56)
    assert by_op["collective-permute"][2:] == (64, ("a",), 4, 1, "every", 64)
    assert found.sent_bytes(axis="a") == 120
    assert found.sent_bytes(axis="b") == 56


@pytest.mark.parametrize(
    ("dtype", "width"), [("uint8", 1), ("int16", 2), ("float32", 4), ("bool", 1)]
)
def test_widths(mesh, dtype, width):
    found = counted(
        lambda x: lax.all_gather(x, "a", to="invarying"),
        mesh,
        P("a"),
        P(),
        jnp.ones(4 * 24, dtype),
    )
    assert found.sent_bytes() == 3 * 24 * width


def test_three_workers_round_up():
    mesh = mesh_over({"data": 3})
    found = counted(lambda x: lax.psum(x, "data"), mesh, P("data"), P(), jnp.ones(3))
    assert found.sent_bytes() == 6  # 2 · 2/3 · 4 = 5⅓


def test_one_worker_sends_nothing():
    mesh = mesh_over({"data": 1})
    found = counted(lambda x: lax.psum(x, "data"), mesh, P("data"), P(), jnp.ones(3))
    assert found.sent_bytes("warmup") == found.sent_bytes("compressed") == 0


def test_an_axis_of_size_one_sends_nothing():
    mesh = mesh_over({"data": 8, "model": 1})

    def f(x):
        return lax.psum(lax.psum(x, "data"), "model")

    found = counted(f, mesh, P(("data", "model")), P(), jnp.ones(8))
    assert found.sent_bytes() == found.sent_bytes(axis="data") == 7
    assert found.sent_bytes(axis="model") == 0


def test_loops_multiply(mesh):
    def f(x):
        def inner(carry, _):
            return lax.ppermute(carry, "a", [(0, 1), (1, 0)]) * 2, None

        def outer(carry, _):
            carry, _ = lax.scan(inner, carry, length=3)
            return varying(lax.psum(carry, "b"), "b"), None

        return lax.scan(outer, x, length=5)[0]

    spec = P(("a", "b"))
    found = counted(f, mesh, spec, spec, jnp.ones(8 * 100))
    times = {each.op: (each.times, each.sent_bytes) for each in found.collectives}
    assert times == {"collective-permute": (15, 15 * 400), "all-reduce": (5, 5 * 400)}


def test_an_unknown_trip_count_is_an_error(mesh):
    def f(x, n):
        return lax.fori_loop(0, n[0], lambda _, c: varying(lax.psum(c, "a"), "a"), x)

    with pytest.raises(ValueError, match="does not know how often a loop"):
        counted(f, mesh, (P("a"), P()), P("a"), jnp.ones(4), jnp.ones(1, jnp.int32))


def test_a_loop_without_collectives_may_be_unknown(mesh):
    def f(x, n):
        x = lax.fori_loop(0, n[0], lambda _, c: c * 2, x)
        return lax.psum(x, "a")

    found = counted(f, mesh, (P("a"), P()), P(), jnp.ones(4), jnp.ones(1, jnp.int32))
    assert found.sent_bytes() == 6


def exact(x):
    with jax.named_scope("stage:warmup"):
        return varying(lax.pmean(x, "a"), "a")


def compressed(x):
    with jax.named_scope("stage:compressed"):
        words = lax.all_to_all(x.astype(jnp.uint8), "a", 0, 0, tiled=True)
        words = lax.all_gather(words[:25], "a", tiled=True, to="invarying")
        return varying(words.astype(x.dtype), "a")


def test_stages_of_a_conditional(mesh):
    def f(x, count):
        loss = lax.pmean(x[0], "a")
        return lax.cond(count[0] < 3, exact, compressed, x), loss[None]

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    found = counted(f, mesh, (P("a"), P()), (P("a"), P()), *args)
    assert found.stages == ("compressed", "warmup")
    assert {(each.op, each.stage) for each in found.collectives} == {
        ("all-reduce", "every"),
        ("all-reduce", "warmup"),
        ("all-to-all", "compressed"),
        ("all-gather", "compressed"),
    }
    # The loss: 2 · ¾ · 4. Exact: 2 · ¾ · 400. Compressed: ¾ · 100, twice.
    assert found.sent_bytes("warmup", "a") == 6 + 600
    assert found.sent_bytes("compressed") == 6 + 75 + 75
    with pytest.raises(ValueError, match=r"ask for sent_bytes\('compressed'\)"):
        found.sent_bytes()
    assert "a worker sends 606 bytes a step (warmup)" in str(found)
    assert "a worker sends 156 bytes a step (compressed)" in str(found)


def test_a_static_stage(mesh):
    def f(x):
        loss = lax.pmean(x[0], "a")
        return compressed(x), loss[None]

    found = counted(f, mesh, P("a"), (P("a"), P()), jnp.ones(4 * 100))
    assert {each.stage for each in found.collectives} == {"every", "compressed"}
    assert found.sent_bytes("compressed") == found.sent_bytes() == 6 + 75 + 75
    with pytest.raises(ValueError, match="no stage 'warmup', but compressed"):
        found.sent_bytes("warmup")


def test_both_stages_outside_a_conditional_run_in_every_step(mesh):
    def f(x, count):
        return jnp.where(count[0] < 3, exact(x), compressed(x))

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    found = counted(f, mesh, (P("a"), P()), P("a"), *args)
    assert {each.stage for each in found.collectives} == {"every"}
    assert found.sent_bytes() == found.sent_bytes("warmup") == 600 + 75 + 75


def test_a_skipped_or_accumulated_step_counts_as_run(mesh):
    def update(x, count):
        return lax.cond(count[0] < 3, exact, compressed, x)

    def f(x, count):
        finite = lax.pmin(jnp.isfinite(x).all().astype(jnp.int32), "a") > 0
        return lax.cond(finite, update, lambda x, _: x, x, count)

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    found = counted(f, mesh, (P("a"), P()), P("a"), *args)
    assert found.sent_bytes("warmup") == 6 + 600
    assert found.sent_bytes("compressed") == 6 + 75 + 75


@pytest.mark.parametrize("static", [False, True])
def test_a_stage_inside_of_a_stage_sends_more(mesh, static):
    def measuring(x):
        with jax.named_scope("stage:measuring"):
            return varying(lax.pmean(x[:10], "a"), "a")

    def after(x, count):
        with jax.named_scope("stage:compressed"):
            more = lax.cond(count[0] % 8 == 0, measuring, lambda x: x[:10], x)
        return compressed(x) + more[0]

    def f(x, count):
        if static:
            return after(x, count)
        return lax.cond(count[0] < 3, lambda x, _: exact(x), after, x, count)

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    found = counted(f, mesh, (P("a"), P()), P("a"), *args)
    first = () if static else ("warmup",)
    assert sorted(found.stages) == ["compressed", "compressed/measuring", *first]
    assert found.sent_bytes("compressed") == 75 + 75
    assert found.sent_bytes("compressed/measuring") == 75 + 75 + 60
    assert "a worker sends 210 bytes a step (compressed/measuring)" in str(found)
    if not static:
        assert found.sent_bytes("warmup") == 600


def test_a_static_stage_that_may_be_skipped(mesh):
    def f(x, count):
        return lax.cond(count[0] < 3, compressed, lambda x: x, x)

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    found = counted(f, mesh, (P("a"), P()), P("a"), *args)
    assert found.stages == ("compressed",)
    assert found.sent_bytes() == 75 + 75


def test_stages_inside_a_loop(mesh):
    def f(x, count):
        def body(x, k):
            return lax.cond(k < count[0], exact, compressed, x), None

        return lax.scan(body, x, jnp.arange(5))[0]

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    found = counted(f, mesh, (P("a"), P()), P("a"), *args)
    assert found.stages == ("compressed", "warmup")
    assert found.sent_bytes("warmup") == 5 * 600
    assert found.sent_bytes("compressed") == 5 * (75 + 75)


def test_of_other_branches_the_heaviest_counts(mesh):
    def f(x, count):
        def light(x):
            return varying(lax.psum(x[:10], "a")[0], "a") * x

        def heavy(x):
            return varying(lax.psum(x, "a"), "a")

        return lax.switch(count[0], [light, heavy, lambda x: x], x)

    args = jnp.ones(4 * 100), jnp.ones(1, jnp.int32)
    assert counted(f, mesh, (P("a"), P()), P("a"), *args).sent_bytes() == 600


def test_combined_all_reduces(mesh):
    sizes = (3, 50, 7, 40)

    def f(xs):
        return jax.tree.map(lambda x: lax.psum(x, "a"), xs)

    found = counted(f, mesh, P("a"), P(), [jnp.ones(4 * size) for size in sizes])
    assert found.sent_bytes() == 2 * 3 * sum(sizes)  # 2 · ¾ · 4 bytes an element


@pytest.mark.parametrize("pairs", [[], [(0, 0), (3, 3)]])
def test_a_permutation_that_moves_nothing_sends_nothing(mesh, pairs):
    found = counted(
        lambda x: lax.ppermute(x, "a", pairs), mesh, P("a"), P("a"), jnp.ones(4)
    )
    assert found.sent_bytes() == 0


def test_groups_that_are_no_axes(mesh):
    def f(x):
        return lax.psum(x, "data", axis_index_groups=[[0, 3], [1, 2]])

    mesh = mesh_over({"data": 4})
    step = jax.shard_map(
        f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    found = traffic(jax.jit(step).lower(jnp.ones(4 * 5)).compile(), mesh)
    assert found.collectives[0].axes is None
    assert found.sent_bytes() == 20
    with pytest.raises(ValueError, match="not those of any mesh axes"):
        found.sent_bytes(axis="data")
    assert "?" in str(found)


def test_questions_that_have_no_answer(mesh):
    compiled = (
        jax.jit(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P()))
        .lower(jnp.ones(4))
        .compile()
    )
    with pytest.raises(ValueError, match="not 'c'"):
        traffic(compiled, mesh).sent_bytes(axis="c")
    small = mesh_over({"a": 2})
    with pytest.raises(ValueError, match="compiled for 8 devices and the mesh has 2"):
        traffic(compiled, small)
