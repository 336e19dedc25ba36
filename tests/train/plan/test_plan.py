"""The planner counts what is really sent, and predicts clusters that were measured."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh

import onebit_jax
from benchmarks.network import plan as plan_network
from benchmarks.network.report import write_json
from benchmarks.network.rows import Results, Row
from train.core.errors import InputError
from train.plan import command as plan
from train.plan import compile as plan_compile
from train.plan import paper as plan_paper
from train.plan import wire as plan_wire
from train.plan.model import Load, Model, arms
from train.plan.report import GIGABIT, PAYS, break_even_rate, make_plan, verdict
from train.plan.schedule import InFlight, in_flight
from train.plan.wire import Cluster

# Whole blocks, parts of one, many, and two leaves that are exchanged exactly.
SHAPES = {"a": (96, 1024), "b": (3000,), "c": (7,), "d": (40, 41), "e": (12,)}
SIZES = tuple(math.prod(shape) for shape in SHAPES.values())


def cluster(hosts, gpus, rate=10 * GIGABIT, latency=0.0, inside=2000 * GIGABIT):
    return Cluster(hosts, gpus, rate, inside, latency)


def model(parameters=1e8):
    return Model("a model", (round(parameters),), 6 * parameters * 128)


def work(micro_batch=0.05, accumulate=1, adam=0.005, overlap=0.0):
    return Load(micro_batch, accumulate, adam, 2e12, overlap)


def compiled_traffic(mesh, tx):
    """What a really compiled step sends, in its compressed stage."""

    def loss(params, batch):
        squares = (jnp.sum(jnp.square(p)) for p in jax.tree.leaves(params))
        return sum(squares, start=jnp.float32(0)) * jnp.mean(batch)

    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SHAPES.items()}
    step = onebit_jax.data_parallel(loss, tx, mesh).step
    state = onebit_jax.abstract_state(tx, params, mesh)
    batch = jax.ShapeDtypeStruct((mesh.size, 1), jnp.float32)
    lowered = step.lower(params, state, batch, stage="compressed")
    return onebit_jax.traffic(lowered.compile(), mesh)


def mesh_of(hosts, gpus):
    devices = np.array(jax.devices()[: hosts * gpus])
    if gpus == 1:
        return Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    return Mesh(
        devices.reshape(hosts, gpus),
        ("host", "device"),
        axis_types=(AxisType.Auto, AxisType.Auto),
    )


def onebit(exchange):
    return onebit_jax.onebit_adam(1e-3, exchange, onebit_jax.freeze_at(10))


def powers_at(cluster):
    lines = sum(map(plan_wire.lines_of, SHAPES.values()))
    assert lines == 96 + 1024 + 40 + 41
    return plan_wire.powers(SIZES, -(-lines // plan_wire.LINES_PERIOD), cluster)


WIRES = {"signs": onebit_jax.sign_mean, "counts": onebit_jax.count_mean}


def sent(phases, over=None):
    return sum(p.gpu_bytes for p in phases if over in (None, p.over))


@pytest.mark.parametrize("hosts", [2, 8])
@pytest.mark.parametrize("wire", WIRES)
def test_flat_bytes_are_those_of_a_compiled_step(hosts, wire):
    mesh, at = mesh_of(hosts, 1), cluster(hosts, 1)
    traffic = compiled_traffic(mesh, onebit(WIRES[wire](mesh.axis_names)))
    predicted = (*plan_wire.flat(SIZES, wire, at), powers_at(at))
    # Each collective's bytes are rounded up.
    assert traffic.sent_bytes("compressed") == pytest.approx(sent(predicted), abs=8)


@pytest.mark.parametrize("wire", WIRES)
def test_hierarchical_bytes_are_those_of_a_compiled_step(wire):
    mesh, at = mesh_of(4, 2), cluster(4, 2)
    exchange = onebit_jax.hierarchical(WIRES[wire]("host"), "device")
    traffic = compiled_traffic(mesh, onebit(exchange))
    phases = plan_wire.hierarchical(SIZES, wire, at)
    # What crosses both axes at once is counted for each of them.
    both = sent((powers_at(at), *phases), "all")
    for axis in ("host", "device"):
        found = traffic.sent_bytes("compressed", axis)
        assert found == pytest.approx(sent(phases, axis) + both, abs=8)


def test_exact_bytes_are_those_of_a_compiled_step():
    mesh, at = mesh_of(4, 2), cluster(4, 2)
    with jax.numpy_dtype_promotion("standard"):
        adam = optax.chain(onebit_jax.exact_mean(mesh.axis_names), optax.adam(1e-3))
        traffic = compiled_traffic(mesh, adam)
    loss = 2 * 7 / 8 * 4
    predicted = sent(plan_wire.exact(SIZES, 4, at)) + loss
    assert traffic.sent_bytes() == pytest.approx(predicted, abs=8)


def crossings(hosts, gpus, messages):
    """Bytes over each border, by counting messages: (to other hosts, inside)."""
    outside, inside = np.zeros(hosts), np.zeros(hosts * gpus)
    for source, target, size in messages:
        if source // gpus != target // gpus:
            outside[source // gpus] += size
        else:
            inside[source] += size
    return outside.max(), inside.max()


@given(st.integers(1, 5), st.integers(1, 4))
def test_what_leaves_a_host_is_what_its_messages_say(hosts, gpus):
    n, at = hosts * gpus, cluster(hosts, gpus)
    size = 8 * 3 * 5 * 7 * n
    straight = [(i, j, size / n) for i in range(n) for j in range(n) if i != j]
    found = plan_wire.all_to_all("", size, at, "all")
    want = crossings(hosts, gpus, straight)
    assert (found.host_bytes, found.inside_bytes) == pytest.approx(want)
    # A ring in the order of the hosts; n - 1 times a part, twice.
    around = [(i, (i + 1) % n, 2 * (n - 1) * size / n) for i in range(n) if n > 1]
    found = plan_wire.ring("", size, at, "all", passes=2)
    want = crossings(hosts, gpus, around)
    assert (found.host_bytes, found.inside_bytes) == pytest.approx(want)
    # Between hosts alone: a ring of each first, second, ... GPU.
    beside = [
        (h * gpus + g, (h + 1) % hosts * gpus + g, (hosts - 1) * size / hosts)
        for h in range(hosts)
        for g in range(gpus)
        if hosts > 1
    ]
    found = plan_wire.ring("", size, at, "host", passes=1)
    want = crossings(hosts, gpus, beside)
    assert (found.host_bytes, found.inside_bytes) == pytest.approx(want)


@given(st.integers(2, 64), st.sampled_from([2, 4, 8]))
def test_between_hosts_hierarchical_sends_an_equal_share_of_flat(hosts, gpus):
    at = cluster(hosts, gpus)
    exact = sum(p.host_bytes for p in plan_wire.exact((10**9,), 4, at))
    phases = plan_wire.hierarchical((10**9,), "signs", at)
    between = sum(p.host_bytes for p in phases)
    # A 32nd of what an exact ring of the hosts alone sends, scales aside.
    ring = 2 * (hosts - 1) / hosts * 4 * 10**9
    assert between == pytest.approx(ring / 32, rel=0.05)
    assert between < exact / 30
    # The flat form's all-to-all leaves the host from each of its GPUs.
    flat = sum(p.host_bytes for p in plan_wire.flat((10**9,), "signs", at))
    assert flat / between > (gpus + 1) / 2 * 0.95


def test_the_papers_ethernet_rows_within_a_quarter():
    bert = plan_paper.bert_large()
    assert bert.parameters == pytest.approx(336e6, rel=0.01)
    rows = [row for row in plan_paper.ROWS if row.network == "Ethernet"]
    several = [row for row in rows if row.hosts > 1]
    assert len(several) == 6
    for row in several:
        step = plan_paper.predicted(row, bert, plan_paper.ETHERNET_RATE).compressed
        assert 1e3 * step.exchange == pytest.approx(row.allreduce, rel=0.25)
        assert 1e3 * step.seconds == pytest.approx(row.step, rel=0.25)


def test_the_published_speed_ups_within_their_assumptions():
    bert = plan_paper.bert_large()
    whole_run, after_freeze, *_ = plan_paper.headlines(bert)
    assert whole_run.published == 3.3
    assert whole_run.predicted == pytest.approx(3.3, rel=0.1)
    assert after_freeze.published == 6.6
    assert after_freeze.predicted == pytest.approx(6.6, rel=0.25)


@given(
    st.integers(1, 32),
    st.integers(1, 8),
    st.floats(0.1, 1000),
    st.floats(1e-3, 1),
    st.integers(1, 8),
)
def test_how_predictions_depend_on_what_is_asked(hosts, gpus, rate, seconds, micro):
    here = cluster(hosts, gpus, rate * GIGABIT)
    slower = here._replace(rate=here.rate / 2)
    one, more = work(seconds), work(seconds, micro + 1)
    for fast, slow, busy in zip(
        arms(model(), one, here),
        arms(model(), one, slower),
        arms(model(), more, here),
        strict=True,
    ):
        for stage in ("warmup", "compressed"):
            a, b, c = (getattr(arm, stage) for arm in (fast, slow, busy))
            assert a.exchange <= b.exchange <= 2 * a.exchange + 1e-9
            assert a.seconds == pytest.approx(a.compute + a.update + a.exchange)
            assert c.network_share <= a.network_share
    adam, half, *ours = arms(model(), one, here)
    assert adam.compressed.exchange >= half.compressed.exchange
    for arm in ours:
        # Amdahl: no more than all of the exchange can be saved.
        alone = adam.compressed.compute + adam.compressed.update
        saved = adam.compressed.seconds / arm.compressed.seconds
        updates = arm.compressed.update - adam.compressed.update
        assert saved <= adam.compressed.seconds / (alone + min(0, updates)) + 1e-9
        mean = arm.seconds(0.25)
        between = sorted((arm.warmup.seconds, arm.compressed.seconds))
        assert between[0] - 1e-12 <= mean <= between[1] + 1e-12


def test_overlap_hides_an_exact_exchange_and_no_other():
    here = cluster(4, 1, 100 * GIGABIT)
    plain, hidden = (arms(model(), work(overlap=x), here) for x in (0.0, 1.0))
    backward = 2 / 3 * 0.05
    want = max(0, plain[0].compressed.exchange - backward)
    assert hidden[0].compressed.exchange == pytest.approx(want)
    assert hidden[2].compressed.exchange == plain[2].compressed.exchange


def planned(model, load, cluster, warmup=0.15):
    return make_plan(model, load, cluster, warmup_share=warmup, warmup_itemsize=4)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (planned(model(), work(), cluster(8, 1, 3000 * GIGABIT)), "is fast enough"),
        (
            planned(model(1e5), work(1e-3, adam=1e-5), cluster(64, 1, latency=1e-3)),
            "waits for messages",
        ),
        (planned(model(), work(accumulate=64), cluster(8, 1)), "64 micro-batches"),
        (planned(model(), work(), cluster(8, 1), warmup=0.9), "the warm-up"),
    ],
    ids=["fast network", "small model", "accumulation", "long warm-up"],
)
def test_says_when_compression_does_not_pay(found, reason):
    text = verdict(found)
    assert text.startswith("Compression does not pay: ")
    assert reason in text.splitlines()[0]
    assert found.gain < PAYS
    # It loses what the warm-up takes, however slow the network is.
    only_warmup = found.warmup_share > 0.5
    assert ("the warm-up, which is exact" in text.splitlines()[1]) == only_warmup


def test_the_ceiling_is_what_a_free_exchange_would_give():
    """By the seconds of the two stages, the compressed one's exchange taken out."""
    found = planned(model(), work(), cluster(8, 1), warmup=0.9)
    adam, best = found.baseline, found.best
    free = adam.compressed.compute + adam.compressed.update
    seconds = 0.9 * best.warmup.seconds + 0.1 * free
    text = f"took no time it would be {adam.compressed.seconds / seconds:.3f} times"
    assert text in verdict(found)


def test_pays_up_to_the_rate_that_it_names():
    found = planned(model(), work(), cluster(8, 4, 1 * GIGABIT))
    assert verdict(found).startswith("Compression pays: 1-bit Adam, hierarchical")
    edge = break_even_rate(found)
    for factor, pays in ((0.98, True), (1.02, False)):
        there = cluster(8, 4, factor * edge)
        assert (planned(model(), work(), there).gain >= PAYS) is pays


def run(text, capsys):
    plan.main(text.split())
    return capsys.readouterr().out


def test_the_command_line_answers_and_writes_all_numbers(capsys, tmp_path):
    file = tmp_path / "plan.json"
    flags = "--rate 4.1 --rate-is measured --hosts 16 --gpus 4 --gpu v100"
    out = run(f"{flags} --json {file}", capsys)
    assert "Compression pays: 1-bit Adam, hierarchical, signs" in out
    assert "(measured)" in out
    assert "iperf" not in out
    answer = json.loads(file.read_text())
    assert [arm["name"] for arm in answer["arms"]] == [
        "Adam, float32 gradients",
        "Adam, bfloat16 gradients",
        "1-bit Adam, flat, signs",
        "1-bit Adam, flat, counts",
        "1-bit Adam, hierarchical, signs",
        "1-bit Adam, hierarchical, counts",
    ]
    assert answer["best"] == "1-bit Adam, hierarchical, signs"
    step = answer["arms"][0]["compressed"]
    parts = step["compute"] + step["update"] + step["exchange"]
    assert step["seconds"] == pytest.approx(parts)
    assert "iperf" in run("--rate 4.1", capsys)


@pytest.mark.parametrize(("parameters", "fits"), [("7e9", True), ("7.1e9", False)])
def test_says_that_a_model_does_not_fit_a_gpu(capsys, parameters, fits):
    out = run(f"--rate 100 --model {parameters}", capsys)
    assert ("where they are sharded inside each host" in out) is not fits
    assert ("142 GB, and a GPU has 141" in out) is not fits


def test_what_was_measured_replaces_what_is_predicted(capsys, tmp_path):
    file = tmp_path / "plan.json"
    given = "--compute-ms 400 --optimizer-ms 30 --accumulate 3"
    out = run(f"--rate 1 {given} --json {file}", capsys)
    assert "takes 400 ms (measured)" in out
    step = json.loads(file.read_text())["arms"][0]["compressed"]
    assert step["compute"] == pytest.approx(1.2)
    assert step["update"] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 0", "--rate must be a positive number"),
        ("--rate nan", "--rate must be a positive number"),
        ("--rate 1 --hosts 0", "--hosts must be at least 1"),
        ("--rate 1 --model huge", "--model must be one of tiny"),
        ("--rate 1 --model nan", "--model must be one of tiny"),
        ("--rate 1 --seq 1024", "--seq must be at most 512"),
        ("--rate 1 --warmup 1.5", "--warmup is a share"),
        ("--rate 1 --latency-us -1", "--latency-us must not be negative"),
        ("--rate 1 --fsdp", "--fsdp chooses what is compiled; add --compile"),
        ("--rate 1 --topology flat", "--topology chooses what is compiled"),
        ("--rate 1 --json /nowhere/x", "--json /nowhere/x cannot be written to"),
        ("--rate 1 --compile --gpu v100", "--compile knows the GPUs a100, h100, h200"),
        ("--rate 1 --compile --model 7e9", "--compile needs the shapes of one of"),
        ("--rate 1 --compile --fsdp --hosts 1", "--fsdp needs several hosts"),
    ],
)
def test_a_mistake_ends_in_a_sentence(arguments, message):
    with pytest.raises(SystemExit) as raised:
        plan.main(arguments.split())
    assert message in str(raised.value)
    assert isinstance(raised.value.__cause__, InputError)


def test_says_what_to_install_to_compile(monkeypatch):
    monkeypatch.setattr(plan_compile.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as raised:
        plan.main(["--rate", "1", "--compile"])
    assert f"jax-cuda13-plugin=={jax.__version__} " in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


SCHEDULE = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %a2a = ((u32[4,3]{1,0}), u32[4,3]{1,0}) all-to-all-start(%p), channel_id=1
  %get = f32[8]{0} get-tuple-element(%p), index=0
  %a2a-done = u32[4,3]{1,0} all-to-all-done(%a2a), metadata={}
  %gather = (f32[1]{0}, f32[8]{0}) all-gather-start(%fusion.1), channel_id=2
  %wrapped = ((f32[8]{0}), f32[2]{0}) async-start(%p), calls=%reduce-scatter.3
  %fusion.2 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused
  %wrapped-done = f32[2]{0} async-done(%wrapped)
  %loop = (f32[8]{0}) while(%fusion.2), condition=%c, body=%b
  %gather-done = f32[8]{0} all-gather-done(%gather), metadata={}
  ROOT %sum = f32[8]{0} all-reduce(%gather-done), to_apply=%add
}
"""


def test_reads_what_runs_while_a_collective_is_in_flight():
    assert in_flight(SCHEDULE) == [
        InFlight("all-to-all", "u32[4,3]", False, 0),
        InFlight("reduce-scatter", "f32[2]", True, 1),
        InFlight("all-gather", "f32[8]", True, 2),
        InFlight("all-reduce", "f32[8]", False, 0),
    ]


def test_stands_beside_what_the_testbed_writes(tmp_path, capsys):
    """At a rate that leaves nothing but the wire, as the testbed counts it."""
    sent = 2 * 3 / 4 * 4 * 1_000_000
    rows = [
        Row(
            hosts=4,
            devices=1,
            rate="100mbit",
            kind=kind,
            name=name,
            stage=stage,
            seconds=[2.0],
            unlimited_seconds=0.4,
            computation_seconds=0.3,
            sent_bytes=round(sent),
            tx_bytes=sent,
            packet_bytes=sent,
        )
        for kind, name, stage in [
            ("step", "adam", None),
            ("step", "onebit_adam", "warmup"),
            ("step", "onebit_adam", "compressed"),
            ("step", "onebit_adam, counts", "compressed"),
            ("exchange", "pmean", None),
            ("exchange", "sign_mean", None),
        ]
    ]
    settings = {"model": "tiny", "size": 1e6}
    file, page = tmp_path / "network.json", tmp_path / "page.md"
    write_json(file, Results(settings, {}, "a CPU", "0.10", rows))
    page.write_text("before\n<!-- measured -->\n<!-- end of measured -->\nafter")
    plan_network.main(file, page)
    printed = capsys.readouterr().out.strip()
    assert len(printed.splitlines()) == 2 + len(rows)
    assert printed in page.read_text()
    found = plan_network.compare(json.loads(file.read_text()))
    adam, warmup, compressed, counts, mean, sign = found
    assert mean.host_bytes == pytest.approx(sent)
    wire = sent * 8 / 100e6 / plan_network.PAYLOAD
    assert mean.seconds == pytest.approx(0.3 + wire, rel=0.01)
    assert sign.host_bytes == pytest.approx(sent / 31, rel=0.01)
    assert adam.host_bytes == pytest.approx(1.5 * 4 * 4_433_468)
    assert adam.own_seconds == adam.seconds
    assert warmup.host_bytes > adam.host_bytes > 30 * compressed.host_bytes
    assert 2 * compressed.host_bytes < counts.host_bytes < 3 * compressed.host_bytes
