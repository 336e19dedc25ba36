"""Predictions depend on the cluster as they must, and the verdict follows from them."""

import errno
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.bert.config import PretrainConfig
from train.core.errors import InputError
from train.plan import command as plan
from train.plan.cluster import GIGABIT, GpuCluster
from train.plan.config import PlanConfig
from train.plan.model import GpuWork, Model, arms
from train.plan.report import PAYS, break_even_rate, predict, table, verdict

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "plan.md"


def cluster(hosts, gpus, rate=10 * GIGABIT, latency=0.0, inside=2000 * GIGABIT):
    return GpuCluster(hosts, gpus, rate, inside, latency)


def model(parameters=1e8):
    leaf = jax.ShapeDtypeStruct((round(parameters),), jnp.float32)
    return Model("a model", (leaf,), 6 * parameters * 128)


def work(micro_batch=0.05, accumulate=1, adam=0.005, overlap=0.0):
    return GpuWork(micro_batch, accumulate, adam, 2e12, overlap)


@pytest.mark.parametrize(("hosts", "gpus"), [(2, 2), (3, 8), (64, 4)])
def test_between_hosts_hierarchical_sends_an_equal_share_of_flat(hosts, gpus):
    found = arms(model(1e9), work(), cluster(hosts, gpus))
    sent = {arm.name: arm.compressed.host_bytes for arm in found}
    flat, hierarchical = (
        sent[f"1-bit Adam, {form}, sign_mean"] for form in ("flat", "hierarchical")
    )
    # A 32nd of an exact ring of the hosts alone, scales aside.
    ring = 2 * (hosts - 1) / hosts * 4e9
    assert hierarchical == pytest.approx(ring / 32, rel=0.05)
    assert sent["Adam, float32 gradients, hierarchical"] == pytest.approx(ring)
    assert sent["Adam, bfloat16 gradients, hierarchical"] == pytest.approx(ring / 2)
    assert hierarchical < sent["Adam, float32 gradients"] / 30
    # The flat form's all-to-all leaves the host from each of its GPUs.
    assert flat / hierarchical > (gpus + 1) / 2 * 0.95


@given(
    # Few, as each is traced.
    st.sampled_from([(1, 1), (1, 8), (2, 1), (5, 3), (32, 8)]),
    st.floats(0.1, 1000),
    st.floats(1e-3, 1),
    st.integers(1, 8),
)
def test_how_predictions_depend_on_what_is_asked(shape, rate, seconds, micro):
    here = cluster(*shape, rate * GIGABIT)
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
        mean = arm.seconds(0.25)
        between = sorted((arm.warmup.seconds, arm.compressed.seconds))
        assert between[0] - 1e-12 <= mean <= between[1] + 1e-12


def test_the_warm_up_sends_a_quarter_of_what_adam_does():
    adam, _, *others = arms(model(), work(), cluster(64, 1))
    for arm in others:
        share = arm.warmup.gpu_bytes / adam.compressed.gpu_bytes
        assert share == pytest.approx(1 / 4, rel=0.01)


def test_of_eight_compressed_steps_one_measures_the_growth():
    """And waits for its messages."""
    here, shape = cluster(16, 1), (96, 1024)
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32)
    step = arms(Model("", (leaf,), 1e9), work(), here)[2].compressed
    *_, growth, loss = step.loads
    ring = 2 * 15 / 16
    assert growth.gpu_bytes == pytest.approx(ring * 4 * sum(shape) / 8)
    assert (growth.rounds, loss.rounds) == (2 * 4 / 8, 2 * 4)


def test_the_verdict_is_beside_the_fastest_adam():
    """Of two hosts an exact mean by hosts sends little more than half of a ring."""
    answer = planned(model(), work(), cluster(2, 8))
    assert answer.baseline.name == "Adam, bfloat16 gradients, hierarchical"
    ring = answer.baselines[1]
    assert answer.gain < 0.8 * answer.speed_up(answer.best, ring, whole_run=True)


def test_overlap_hides_an_exact_exchange_and_no_other():
    here = cluster(4, 1, 100 * GIGABIT)
    plain, hidden = (arms(model(), work(overlap=x), here) for x in (0.0, 1.0))
    backward = 2 / 3 * 0.05
    want = max(0, plain[0].compressed.exchange - backward)
    assert hidden[0].compressed.exchange == pytest.approx(want)
    assert hidden[2].compressed.exchange == plain[2].compressed.exchange


def planned(model, load, cluster, warmup=0.15):
    return predict(model, load, cluster, warmup)


def pointed_at(answer):
    (line,) = (line for line in table(answer).splitlines() if line.startswith("→ "))
    return line.removeprefix("→ ").partition("  ")[0]


@pytest.mark.parametrize(
    ("answer", "what", "reason"),
    [
        (
            planned(model(), work(), cluster(8, 1, 3000 * GIGABIT)),
            "Compression",
            "is fast enough",
        ),
        (
            planned(model(1e5), work(1e-3, adam=1e-5), cluster(4, 1, latency=1e-3)),
            "One bit in every step",
            "waits for messages",
        ),
        (
            planned(model(), work(accumulate=64), cluster(8, 1)),
            "Compression",
            "64 micro-batches",
        ),
    ],
    ids=["fast network", "small model", "accumulation"],
)
def test_says_when_compression_does_not_pay(answer, what, reason):
    text = verdict(answer)
    assert text.startswith(f"{what} does not pay: ")
    assert reason in text.splitlines()[0]
    assert answer.gain < PAYS
    assert pointed_at(answer) == answer.baseline.name


def test_the_ceiling_is_what_a_free_exchange_would_give():
    """By the seconds of the two stages, the compressed one's exchange taken out."""
    answer = planned(model(), work(accumulate=64), cluster(8, 1), warmup=0.9)
    adam, best = answer.baseline, answer.best
    free = best.compressed.compute + best.compressed.update
    seconds = 0.9 * best.warmup.seconds + 0.1 * free
    text = f"took no time it would be {adam.compressed.seconds / seconds:.3f} times"
    assert text in verdict(answer)


def test_pays_up_to_the_rate_that_it_names():
    answer = planned(model(), work(), cluster(8, 4, 1 * GIGABIT))
    assert verdict(answer).startswith("Compression pays: 1-bit Adam, hierarchical")
    assert pointed_at(answer) == answer.best.name
    edge = break_even_rate(answer)
    for factor, pays in ((0.98, True), (1.02, False)):
        there = cluster(8, 4, factor * edge)
        assert (planned(model(), work(), there).gain >= PAYS) is pays


def test_names_local_steps_where_they_are_the_fastest():
    """An eighth of the exchanges and no warm-up; beside one host nothing is left."""
    slow = planned(model(), work(), cluster(8, 1, 1e-3 * GIGABIT))
    compressed = slow.best.compressed.seconds
    told = float(re.search(r"Local .* ([\d.]+) times as fast", verdict(slow))[1])
    times = slow.baseline.compressed.seconds / compressed
    assert told == pytest.approx(8 * times, rel=0.01)
    for answer in (
        planned(model(), work(), cluster(8, 1, 3000 * GIGABIT)),
        planned(model(), work(), cluster(1, 8)),
    ):
        assert "Local" not in verdict(answer)


def run(text, capsys):
    plan.main(text.split())
    return capsys.readouterr().out


def test_the_command_line_answers_and_writes_all_numbers(capsys, tmp_path):
    file = tmp_path / "plan.json"
    flags = "--rate 4.1 --rate-is measured --hosts 16 --gpus 4 --gpu v100 --model tiny"
    out = run(f"{flags} --json {file}", capsys)
    assert "Compression pays: 1-bit Adam, hierarchical, sign_mean" in out
    assert "(measured)" in out
    assert "iperf" not in out
    answer = json.loads(file.read_text())
    assert [arm["name"] for arm in answer["arms"]] == [
        "Adam, float32 gradients",
        "Adam, bfloat16 gradients",
        "Adam, float32 gradients, hierarchical",
        "Adam, bfloat16 gradients, hierarchical",
        "1-bit Adam, flat, sign_mean",
        "1-bit Adam, flat, count_mean",
        "1-bit Adam, hierarchical, sign_mean",
        "1-bit Adam, hierarchical, count_mean",
    ]
    assert answer["best"] == "1-bit Adam, hierarchical, sign_mean"
    step = answer["arms"][0]["compressed"]
    parts = step["compute"] + step["update"] + step["exchange"]
    assert step["seconds"] == pytest.approx(parts)
    assert "iperf" in run("--rate 4.1 --model 3e8", capsys)


def test_a_file_that_cannot_be_written_is_told_of(tmp_path, monkeypatch, capsys):
    def fill(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", fill)
    with pytest.raises(SystemExit, match=r"plan.json cannot be written to \(No space"):
        run(f"--rate 1 --json {tmp_path / 'plan.json'} --model 1e6", capsys)


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys):
    page = PAGE.read_text(encoding="utf-8")
    example = re.search(
        r"python -m train\.plan ((?:.*\\\n)*.*)\n```\n\n```\n(.*?)```", page, re.S
    )
    assert run(example[1].replace("\\\n", " "), capsys) == example[2]
    section = page.partition("## When it does not pay")[2].partition("\n## ")[0]
    bullets = re.findall(r"^- \*\*.*?(?=^- |\Z)", section, re.M | re.S)
    assert len(bullets) == 3
    for bullet in bullets:
        _, flags, text = bullet.split("`", 2)
        out = run(flags, capsys)
        assert " does not pay: " in out
        for number in re.findall(r"[\d.,]+(?= times| [TG]bit)", text):
            assert f"{number} times" in out or f"{number} Gbit" in out, number


@pytest.mark.parametrize(("parameters", "fits"), [("5.8e9", True), ("5.9e9", False)])
def test_says_that_a_model_does_not_fit_a_gpu(capsys, parameters, fits):
    out = run(f"--rate 100 --model {parameters}", capsys)
    assert ("where they are sharded inside each host" in out) is not fits
    assert ("142 GB, and a GPU has 141" in out) is not fits
    assert ("take 139.2 GB of a GPU's 141; activations" in out) is fits


@pytest.mark.parametrize(("gpus", "fits"), [(1, False), (4, False), (8, True)])
def test_no_verdict_on_a_model_that_no_host_can_hold(capsys, tmp_path, gpus, fits):
    file = tmp_path / "plan.json"
    out = run(f"--rate 10 --gpu v100 --model 7e9 --gpus {gpus} --json {file}", capsys)
    said = "Compression pays" if fits else "The model does not fit: parameters,"
    (last,) = (line for line in out.splitlines() if line.startswith(said))
    answer = json.loads(file.read_text())
    assert (f"168 GB, and a host has {32 * gpus} GB" in last) is not fits
    assert ("where they are sharded inside each host" in out) is fits
    assert last in answer["verdict"]
    assert answer["pays"] is fits
    assert ("\nTo take" in out) is fits
    assert ("onebit_adamw" in answer["advice"]) is fits


def test_the_default_warm_up_is_that_of_pretraining():
    steps = 1000
    freeze = PretrainConfig(steps=steps).phases[0].freeze
    assert PlanConfig(rate=1.0).warmup == freeze / steps


def test_what_was_measured_replaces_what_is_predicted(capsys, tmp_path):
    file = tmp_path / "plan.json"
    given = "--compute-ms 400 --optimizer-ms 30 --accumulate 3"
    out = run(f"--rate 1 --model 3e8 {given} --json {file}", capsys)
    assert "takes 400 ms (measured)" in out
    step = json.loads(file.read_text())["arms"][0]["compressed"]
    assert step["compute"] == pytest.approx(1.2)
    assert step["update"] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 0", "--rate must be positive, not 0.0"),
        ("--rate 1 --hosts 0", "--hosts must be at least 1"),
        ("--rate 1 --model 60M", "a number of parameters, such as 60e6"),
        ("--rate 1 --seq 1024", "--seq must be at most 512"),
        ("--rate 1 --latency-us -1", "--latency-us must be at least 0"),
        ("--rate 1 --fsdp", "--fsdp chooses what is compiled; add --compile"),
        ("--rate 1 --topology flat", "--topology chooses what is compiled"),
        ("--rate 1 --json /nowhere/x", "--json /nowhere/x cannot be written to"),
        ("--rate 1 --compile --gpu v100", "--compile knows the GPUs a100, h100, h200"),
        ("--rate 1 --compile --model 7e9", "--compile needs the shapes of one of"),
        ("--rate 1 --compile --fsdp --hosts 1", "--fsdp needs several hosts"),
        ("--rate 1 --compile --fsdp --topology flat", "leave --topology flat out"),
        *(
            (
                f"--rate 1 --compile --topology hierarchical {one}",
                "--topology hierarchical needs several hosts of several GPUs",
            )
            for one in ("--hosts 1", "--gpus 1")
        ),
        ("--rate 1 --steps 0", "--steps must be at least 1"),
    ],
)
def test_a_mistake_ends_in_a_sentence(arguments, message):
    with pytest.raises(SystemExit) as raised:
        plan.main(arguments.split())
    assert message in str(raised.value)
    assert isinstance(raised.value.__cause__, InputError)
