"""Bytes counted from compiled programs, against numbers worked out by hand."""

import re
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from virtual_workers import mesh_over

import onebit_jax
from onebit_jax import traffic

MESH = {"a": 4, "b": 2}
COUNT = jnp.ones(1, jnp.int32)
ROWS = jnp.ones(4 * 100)
"""Of each worker along a, 400 bytes."""


def counted(f, in_specs, out_specs, *args, mesh=None, check_vma=True):
    mesh = mesh_over(mesh or MESH)
    mapped = jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )
    return traffic(jax.jit(mapped).lower(*args).compile(), mesh)


def varying(x, axis="a"):
    return lax.pcast(x, axis, to="varying")


def test_what_is_told_of_a_collective():
    def f(x):
        words = lax.all_to_all(x.astype(jnp.uint32), "a", 0, 0, tiled=True)
        words = lax.all_gather(words[:6], "b", tiled=True, to="invarying")
        scattered = lax.psum_scatter(x, ("a", "b"), tiled=True)
        moved = lax.ppermute(x, "a", [(0, 1), (1, 2)])
        return words, scattered, moved, lax.psum(x * 2, "a")

    both = P(("a", "b"))
    found = counted(f, both, (P("a"), both, both, P("b")), jnp.ones(8 * 64))
    assert set(found.collectives) == {
        ("all-to-all", "u32", 256, ("a",), 4, 1, "every", 192),
        ("all-gather", "u32", 48, ("b",), 2, 1, "every", 24),
        ("reduce-scatter", "f32", 256, ("a", "b"), 8, 1, "every", 224),
        ("collective-permute", "f32", 256, ("a",), 4, 1, "every", 256),
        ("all-reduce", "f32", 256, ("a",), 4, 1, "every", 384),
    }
    assert found.sent_bytes() == 192 + 24 + 224 + 256 + 384
    assert found.sent_bytes(axis="a") == 192 + 224 + 256 + 384
    assert found.sent_bytes(axis="b") == 24 + 224
    # Plain Adam has no stages: both are what every step sends.
    assert found.stages == ()
    assert found.sent_bytes("warmup") == found.sent_bytes("compressed") == 1080


def test_widths():
    def f(x):
        kinds = (jnp.uint8, jnp.int16, jnp.float32, jnp.bool_)
        return [lax.all_gather(x.astype(k), "a", to="invarying") for k in kinds]

    found = counted(f, P("a"), P(), jnp.arange(4.0 * 24))
    sent = {each.dtype: each.sent_bytes // (3 * 24) for each in found.collectives}
    assert sent == {"u8": 1, "s16": 2, "f32": 4, "pred": 1}


@pytest.mark.parametrize(
    ("mesh", "sent"),
    [
        ({"data": 3}, 6),  # 2 · 2/3 · 4 = 5⅓
        ({"data": 1}, 0),
        ({"data": 8, "model": 1}, 7),
    ],
)
def test_sizes_of_meshes(mesh, sent):
    axes = tuple(mesh)
    found = counted(
        lambda x: lax.psum(x[:1], axes), P(axes), P(), jnp.ones(24), mesh=mesh
    )
    assert found.sent_bytes("warmup") == found.sent_bytes(axis="data") == sent
    if "model" in mesh:
        assert found.sent_bytes(axis="model") == 0


def test_loops_multiply():
    def f(x, n):
        def inner(carry, _):
            return lax.ppermute(carry, "a", [(0, 1), (1, 0)]) * 2, None

        def outer(carry, _):
            carry, _ = lax.scan(inner, carry, length=3)
            return varying(lax.psum(carry, "b"), "b"), None

        # A loop without collectives may run as often as it likes.
        x = lax.fori_loop(0, n[0], lambda _, c: c * 2, x)
        return lax.scan(outer, x, length=5)[0]

    spec = P(("a", "b"))
    found = counted(f, (spec, P()), spec, jnp.ones(8 * 100), COUNT)
    times = {each.op: (each.times, each.sent_bytes) for each in found.collectives}
    assert times == {"collective-permute": (15, 15 * 400), "all-reduce": (5, 5 * 400)}
    told = str(found).splitlines()[-1]
    assert "sends 8,000 bytes a step" in told
    assert "6,000 of them over a" in told
    assert "2,000 of them over b" in told


def test_a_row_is_of_all_collectives_of_a_kind():
    def twice(x):
        for _ in range(2):
            x = lax.ppermute(x, "a", [(0, 1), (1, 0)]) * 2
        return x

    spec = P(("a", "b"))
    title, row, _ = str(counted(twice, spec, spec, jnp.ones(8 * 100))).splitlines()
    assert title.split()[2:] == ["bytes", "axes", "n", "times", "stage", "sent"]
    assert row.split()[2:] == ["400", "a", "4", "2", "every", "800"]
    titles, cells = ([x.end() for x in re.finditer(r"\S+", x)] for x in (title, row))
    assert [titles[i] for i in (2, 4, 5, 7)] == [cells[i] for i in (2, 4, 5, 7)]


def test_an_unknown_trip_count_is_an_error():
    def f(x, n):
        return lax.fori_loop(0, n[0], lambda _, c: varying(lax.psum(c, "a")), x)

    with pytest.raises(ValueError, match="does not know how often a loop"):
        counted(f, (P("a"), P()), P("a"), ROWS, COUNT)


def exact(x):
    with jax.named_scope("stage:warmup"):
        return varying(lax.pmean(x, "a"))


def compressed(x):
    with jax.named_scope("stage:compressed"):
        words = lax.all_to_all(x.astype(jnp.uint8), "a", 0, 0, tiled=True)
        words = lax.all_gather(words[:25], "a", tiled=True, to="invarying")
        return varying(words.astype(x.dtype))


def of_stages(f):
    return counted(f, (P("a"), P()), P("a"), ROWS, COUNT)


# The exact mean is 2 · ¾ · 400 bytes, the compressed one ¾ · 100, twice.
EXACT, COMPRESSED = 600, 75 + 75


def update(x, count):
    return lax.cond(count[0] < 3, exact, compressed, x)


def test_stages_of_a_conditional():
    found = of_stages(lambda x, count: update(x + lax.pmean(x[0], "a"), count))
    assert found.stages == ("compressed", "warmup")
    assert {(each.op, each.stage) for each in found.collectives} == {
        ("all-reduce", "every"),
        ("all-reduce", "warmup"),
        ("all-to-all", "compressed"),
        ("all-gather", "compressed"),
    }
    assert found.sent_bytes("warmup", "a") == 6 + EXACT
    assert found.sent_bytes("compressed") == 6 + COMPRESSED
    with pytest.raises(ValueError, match=r"ask for sent_bytes\('compressed'\)"):
        found.sent_bytes()
    assert "a device sends 606 bytes a step (warmup)" in str(found)
    assert "a device sends 156 bytes a step (compressed)" in str(found)


@pytest.mark.parametrize("may_be_skipped", [True, False])
def test_a_static_stage(may_be_skipped):
    def f(x, count):
        x += lax.pmean(x[0], "a")
        if may_be_skipped:
            return lax.cond(count[0] < 3, compressed, lambda x: x, x)
        return compressed(x)

    found = of_stages(f)
    assert found.stages == ("compressed",)
    assert {each.stage for each in found.collectives} == {"every", "compressed"}
    assert found.sent_bytes("compressed") == found.sent_bytes() == 6 + COMPRESSED
    with pytest.raises(ValueError, match="no stage 'warmup', but compressed"):
        found.sent_bytes("warmup")


def test_both_stages_outside_a_conditional_run_in_every_step():
    found = of_stages(lambda x, n: jnp.where(n[0] < 3, exact(x), compressed(x)))
    assert {each.stage for each in found.collectives} == {"every"}
    assert found.sent_bytes() == found.sent_bytes("warmup") == EXACT + COMPRESSED


def test_a_skipped_or_accumulated_step_counts_as_run():
    def turn(x, k):
        finite = lax.pmin(jnp.isfinite(x).all().astype(jnp.int32), "a") > 0
        return lax.cond(finite, update, lambda x, _: x, x, k[None]), None

    found = of_stages(lambda x, _: lax.scan(turn, x, jnp.arange(5))[0])
    assert found.stages == ("compressed", "warmup")
    assert found.sent_bytes("warmup") == 5 * (6 + EXACT)
    assert found.sent_bytes("compressed") == 5 * (6 + COMPRESSED)


@pytest.mark.parametrize("static", [False, True])
def test_a_stage_inside_of_a_stage_sends_more(static):
    def measuring(x):
        with jax.named_scope("stage:measuring"):
            return varying(lax.pmean(x[:10], "a"))

    def after(x, count):
        with jax.named_scope("stage:compressed"):
            more = lax.cond(count[0] % 8 == 0, measuring, lambda x: x[:10], x)
        return compressed(x) + more[0]

    def f(x, count):
        if static:
            return after(x, count)
        return lax.cond(count[0] < 3, lambda x, _: exact(x), after, x, count)

    found = of_stages(f)
    first = () if static else ("warmup",)
    assert sorted(found.stages) == ["compressed", "compressed/measuring", *first]
    assert found.sent_bytes("compressed") == COMPRESSED
    assert found.sent_bytes("compressed/measuring") == COMPRESSED + 60
    assert "a device sends 210 bytes a step (compressed/measuring)" in str(found)
    if not static:
        assert found.sent_bytes("warmup") == EXACT


@pytest.mark.parametrize("stage", [None, "compressed"])
def test_of_other_branches_the_heaviest_counts(stage):
    def light(x):
        return varying(lax.psum(x[:10], "a")[0]) * x

    def heavy(x):
        return varying(lax.psum(x, "a"))

    def f(x, count):
        with jax.named_scope(f"stage:{stage}" if stage else "loss"):
            return lax.switch(count[0], [light, heavy, lambda x: x], x)

    assert of_stages(f).sent_bytes(stage) == 600


def test_a_program_sends_what_its_trace_says():
    """Loops in branches in loops in stages."""

    def step(g):
        def turn(x, c):
            x += lax.psum(jnp.sin(x[:50] * c), "a")[0]
            more = lax.cond(lax.pmax(x[0], ("a", "b")) > c, gathered, scattered, x)
            return varying(lax.psum(more, "b"), "b"), None

        return lax.scan(turn, g, jnp.arange(3.0))[0]

    def gathered(x):
        return x + jnp.sum(lax.all_gather(x[:30], "b", to="invarying"))

    def scattered(x):
        return x + varying(lax.psum(lax.psum_scatter(x, "a", tiled=True), "a"))[0]

    tx = optax.GradientTransformation(
        lambda _: (), lambda g, s, _: (lax.pmean(step(g), ("a", "b")), s)
    )
    own = P(("a", "b"))
    found = counted(lambda g: tx.update(g[0], (), None)[0], own, P(), jnp.ones((8, 64)))
    (transfers,) = onebit_jax.stage_costs(tx, jnp.zeros(64), MESH).values()
    assert found.sent_bytes() == onebit_jax.sent_bytes(transfers, MESH)


def test_combined_all_reduces():
    sizes = (3, 50, 7, 40)

    def f(xs):
        return jax.tree.map(lambda x: lax.psum(x, "a"), xs)

    found = counted(f, P("a"), P(), [jnp.ones(4 * size) for size in sizes])
    assert found.sent_bytes() == 2 * 3 * sum(sizes)  # 2 · ¾ · 4 bytes an element


@pytest.mark.parametrize("pairs", [[], [(0, 0), (3, 3)]])
def test_a_permutation_that_moves_nothing_sends_nothing(pairs):
    found = counted(lambda x: lax.ppermute(x, "a", pairs), P("a"), P("a"), ROWS)
    assert found.sent_bytes() == 0


def test_groups_that_are_no_axes():
    def f(x):
        return lax.psum(x, "data", axis_index_groups=[[0, 3], [1, 2]])

    data = P("data")
    found = counted(f, data, data, jnp.ones(20), mesh={"data": 4}, check_vma=False)
    assert found.collectives[0].axes is None
    assert found.sent_bytes() == 20
    with pytest.raises(ValueError, match="not those of any mesh axes"):
        found.sent_bytes(axis="data")
    assert "?" in str(found)


def test_what_equinox_compiles_and_questions_that_have_no_answer():
    mesh = mesh_over(MESH)
    step = jax.shard_map(
        lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
    )
    compiled = eqx.filter_jit(step).lower(ROWS).compile()
    assert traffic(compiled, mesh).sent_bytes() == EXACT
    with pytest.raises(ValueError, match="not 'c'"):
        traffic(compiled, mesh).sent_bytes(axis="c")
    with pytest.raises(ValueError, match="compiled for 8 devices and the mesh has 2"):
        traffic(compiled, mesh_over({"a": 2}))


# What XLA prints for GPUs (jax 0.10.2 and 0.12.0.1), cut down.
GPU = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(f32[128]{0})->f32[128]{0}}, num_partitions=8

FileNames
1 "step.py"

%region_1.0 (x.1: f32[], y.1: f32[]) -> f32[] {
  %x.1 = f32[] parameter(0), metadata={op_name="psum_invariant"}
  %y.1 = f32[] parameter(1), metadata={op_name="psum_invariant"}
  ROOT %add.1 = f32[] add(%x.1, %y.1)
}

%exact.0_spmd (param.10: (f32[128], bf16[6])) -> (f32[128], bf16[6]) {
  %param.10 = (f32[128]{0}, bf16[6]{0}) parameter(0)
  %p.0 = f32[128]{0} get-tuple-element(%param.10), index=0
  %p.1 = bf16[6]{0:T(8,128)(2,1)} get-tuple-element(%param.10), index=1
  %all-reduce-start.7 = ((f32[128]{0}, bf16[6]{0}), f32[128]{0}, /*index=2*/bf16[6]{0}) all-reduce-start(%p.0, %p.1), channel_id=1, replica_groups=mesh['a'=4,'b'=2] {'a'}, use_global_device_ids=true, to_apply=%region_1.0, metadata={scheduling_name="all-reduce-start.7"}
  ROOT %all-reduce-done.7 = (f32[128]{0}, bf16[6]{0}) all-reduce-done(%all-reduce-start.7), metadata={scheduling_name="all-reduce-done.7"}
}

%async_computation (param_0.1: u32[4,32]) -> u32[4,32] {
  %param_0.1 = u32[4,32]{1,0} parameter(0)
  ROOT %all-to-all.9 = u32[4,32]{1,0} all-to-all(u32[4,32]{1,0:T(8,128)} %param_0.1), channel_id=2, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}, metadata={op_name="jit(f)/cond/branch_0_fun/stage:compressed/all_to_all"}
}

%compressed.0_spmd (param.11: (f32[128], bf16[6])) -> (f32[128], bf16[6]) {
  %param.11 = (f32[128]{0}, bf16[6]{0}) parameter(0)
  %words = u32[4,32]{1,0} fusion(%param.11), kind=kLoop, calls=%pack, metadata={op_name="jit(f)/cond/branch_0_fun/stage:compressed/pack"}
  %async-start = ((u32[4,32]{1,0}), u32[4,32]{1,0}, u32[]) async-start(%words), calls=%async_computation
  %async-done = u32[4,32]{1,0} async-done(%async-start), calls=%async_computation
  %w.1 = u32[32]{0} bitcast(%async-done)
  %s.1 = f32[4]{0} slice(%words), slice={[0:4]}
  %all-gather-start = ((u32[32]{0}, f32[4]{0}), (u32[128]{0}, f32[16]{0})) all-gather-start(%w.1, %s.1), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}, dimensions={0}, metadata={op_name="jit(f)/cond/branch_0_fun/stage:compressed/all_gather_invariant" scheduling_name="all-gather-start"}
  ROOT %all-gather-done = (u32[128]{0}, f32[16]{0}) all-gather-done(%all-gather-start)
}

%body.7 (param.2: (s32[], s4[128])) -> (s32[], s4[128]) {
  %param.2 = (s32[], s4[128]{0:E(4)}) parameter(0)
  %x.2 = s4[128]{0:E(4)} get-tuple-element(%param.2), index=1
  %collective-permute-start = (s4[128]{0:E(4)}, s4[128]{0:E(4)}) collective-permute-start(%x.2), channel_id=1, source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %collective-permute-done = s4[128]{0:E(4)} collective-permute-done(%collective-permute-start)
  ROOT %tuple.2 = (s32[], s4[128]{0:E(4)}) tuple(%x.2, %collective-permute-done)
}

%condition.8 (param.3: (s32[], s4[128])) -> pred[] {
  %param.3 = (s32[], s4[128]{0:E(4)}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%pack (param.4: f32[128]) -> u32[4,32] {
  ROOT %param.4 = f32[128]{0} parameter(0)
}

%command_buffer (param.5: f32[128]) -> f32[16] {
  %param.5 = f32[128]{0} parameter(0)
  %reduce-scatter-start = ((f32[128]{0}), f32[16]{0}) reduce-scatter-start(%param.5), channel_id=1, replica_groups={}, dimensions={0}, to_apply=%region_1.0
  ROOT %reduce-scatter-done = f32[16]{0} reduce-scatter-done(%reduce-scatter-start)
}

ENTRY %main.18_spmd (param.7: f32[128], param.8: s32[1]) -> f32[128] {
  %param.7 = f32[128]{0} parameter(0), metadata={op_name="x"}
  %tuple.1 = (f32[128]{0}, bf16[6]{0}) tuple(%param.7)
  %conditional.2 = (f32[128]{0}, bf16[6]{0}) conditional(%param.7, %tuple.1, %tuple.1), true_computation=%exact.0_spmd, false_computation=%compressed.0_spmd, metadata={op_name="jit(f)/cond"}
  %while.11 = (s32[], s4[128]{0:E(4)}) while(%tuple.1), condition=%condition.8, body=%body.7, metadata={op_name="jit(f)/while"}, backend_config={"known_trip_count":{"n":"5"},"dynamic_variables":[]}
  ROOT %call = f32[16]{0} call(%param.7), to_apply=%command_buffer
}
"""  # noqa: E501


def of_text(text, mesh=None):
    program = SimpleNamespace(as_text=lambda: text)
    return traffic(program, mesh_over(mesh or MESH))


def test_gpu_forms():
    found = of_text(GPU)
    assert found.stages == ("unnamed", "compressed")
    assert found.collectives == (
        # The combiner dropped its name; it is the branch beside the compressed one.
        ("all-reduce", "f32+bf16", 524, ("a",), 4, 1, "unnamed", 786),
        ("all-to-all", "u32", 512, ("a",), 4, 1, "compressed", 384),
        ("all-gather", "u32+f32", 4 * 144, ("a",), 4, 1, "compressed", 432),
        ("collective-permute", "s4", 64, ("b",), 2, 5, "every", 320),
        ("reduce-scatter", "f32", 512, ("a", "b"), 8, 1, "every", 448),
    )


def test_what_cannot_be_counted_is_an_error():
    send = "%s = (f32[128]{0}, u32[], token[]) send(%param.7, %t), channel_id=1"
    text = GPU.replace("  %tuple.1 =", f"  {send}\n  %tuple.1 =")
    with pytest.raises(NotImplementedError, match="contains a send"):
        of_text(text)
    host = text.replace("%t), channel_id=1", "%t), is_host_transfer=true")
    assert of_text(host) == of_text(GPU)
    unknown = GPU.replace("[2,4]<=[4,2]T(1,0)", "<somehow>")
    with pytest.raises(ValueError, match="unknown form of replica_groups, '<somehow>"):
        of_text(unknown)
    with pytest.raises(ValueError, match=r"instead of jax\.pmap"):
        of_text(GPU.replace("num_partitions=8", "replica_count=8"))


@pytest.mark.parametrize(
    ("text", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", "yz"),
        ("{}", "xyz"),
        ("[2,4]<=[8]", "yz"),
        ("[2,4]<=[4,2]T(1,0)", "xy"),
        ("[4,2]<=[2,2,2]T(1,2,0)", "x"),
        ("mesh['a'=4,'b'=2] {'a'}", "xy"),
        ("mesh['a'=4,'b'=2] {'b'}", "z"),
        ("mesh['a'=4,'b'=2] {'a','b'}", "xyz"),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", "yz"),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", "x"),
        ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", "x"),
        ("mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'a'}", "xy"),
        ("mesh['a'=4,'b'=2], device_ids=(0,3,1,2,4,5,6,7) {'b'}", None),
    ],
)
def test_replica_groups(text, axes):
    changed = GPU.replace("[2,4]<=[4,2]T(1,0)", text)
    (found,) = (
        each
        for each in of_text(changed, {"x": 2, "y": 2, "z": 2}).collectives
        if each.op == "all-to-all"
    )
    assert found.axes == (axes and tuple(axes))
