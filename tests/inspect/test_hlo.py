"""Reading the text of compiled programs: what XLA prints for GPUs."""

import pytest
from virtual_workers import mesh_over

from onebit_jax import traffic
from onebit_jax.inspect import hlo


class Text:
    """A compiled program of which only the text is known."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text


@pytest.fixture(scope="module")
def mesh():
    return mesh_over({"a": 4, "b": 2})


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


def test_gpu_forms(mesh):
    found = traffic(Text(GPU), mesh)
    assert found.stages == ("unnamed", "compressed")
    assert found.collectives == (
        # The combiner dropped its name; it is the branch beside the compressed one.
        ("all-reduce", "f32+bf16", 524, ("a",), 4, 1, "unnamed", 786),
        ("all-to-all", "u32", 512, ("a",), 4, 1, "compressed", 384),
        ("all-gather", "u32+f32", 4 * 144, ("a",), 4, 1, "compressed", 432),
        ("collective-permute", "s4", 64, ("b",), 2, 5, "every", 320),
        ("reduce-scatter", "f32", 512, ("a", "b"), 8, 1, "every", 448),
    )


def test_what_cannot_be_counted_is_an_error(mesh):
    send = "%s = (f32[128]{0}, u32[], token[]) send(%param.7, %t), channel_id=1"
    text = GPU.replace("  %tuple.1 =", f"  {send}\n  %tuple.1 =")
    with pytest.raises(NotImplementedError, match="contains a send"):
        traffic(Text(text), mesh)
    host = text.replace("%t), channel_id=1", "%t), is_host_transfer=true")
    assert traffic(Text(host), mesh) == traffic(Text(GPU), mesh)
    unknown = GPU.replace("[2,4]<=[4,2]T(1,0)", "<somehow>")
    with pytest.raises(ValueError, match="unknown form of replica_groups, '<somehow>"):
        traffic(Text(unknown), mesh)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[2,4]<=[4,2]T(1,0)", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("[4,2]<=[2,2,2]T(1,2,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=4,'b'=2] {'b'}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=4,'b'=2] {'a','b'}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(2)2,'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['a'=4,'b'=2] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (
            "mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}",
            [[0, 4], [1, 5], [2, 6], [3, 7]],
        ),
        (
            "mesh['a'=4,'b'=2], device_ids=(7,6,5,4,3,2,1,0) {'a'}",
            [[7, 5, 3, 1], [6, 4, 2, 0]],
        ),
    ],
)
def test_replica_groups(text, groups):
    rest = f"%x), channel_id=1, replica_groups={text}, dimensions={{0}}"
    instruction = hlo.Instruction("f32[4]{0}", "all-gather", rest)
    assert hlo.replica_groups(instruction, 8) == tuple(map(tuple, groups))
