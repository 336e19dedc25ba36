"""The planner stands beside clusters and a testbed that were measured."""

import json

import pytest

from benchmarks.network import paper
from benchmarks.network import plan as network_plan
from benchmarks.network.report import write_json
from benchmarks.network.results import Measurement, Results


@pytest.fixture(scope="module")
def bert():
    return paper.bert_large()


@pytest.mark.slow
def test_the_papers_ethernet_rows_within_a_quarter(bert):
    assert bert.parameters == pytest.approx(336e6, rel=0.01)
    ethernet = [p for p in paper.PROFILE if p.network == "Ethernet" and p.hosts > 1]
    assert len(ethernet) == 6
    for profiled in ethernet:
        step = paper.predicted(profiled, bert, paper.ETHERNET_RATE).compressed
        assert 1e3 * step.exchange == pytest.approx(profiled.allreduce, rel=0.25)
        assert 1e3 * step.seconds == pytest.approx(profiled.step, rel=0.25)


@pytest.mark.slow
def test_the_published_speed_ups_within_their_assumptions(bert):
    whole_run, after_freeze, *_ = paper.headlines(bert)
    assert whole_run.published == 3.3
    assert whole_run.predicted == pytest.approx(3.3, rel=0.1)
    assert after_freeze.published == 6.6
    assert after_freeze.predicted == pytest.approx(6.6, rel=0.25)


def test_the_planner_stands_beside_what_the_testbed_writes(tmp_path, capsys):
    """At a rate that leaves nothing but the wire, as the testbed counts it."""
    sent = 2 * 3 / 4 * 4 * 1_000_000
    measurements = [
        Measurement(
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
            ("step", "onebit_adam, count_mean", "compressed"),
            ("exchange", "pmean", None),
            ("exchange", "sign_mean", None),
        ]
    ]
    file, page = tmp_path / "network.json", tmp_path / "page.md"
    settings = {"model": "tiny", "size": 1e6}
    write_json(file, Results(settings, {}, "a CPU", "0.10", measurements))
    page.write_text("before\n<!-- measured -->\n<!-- end of measured -->\nafter")
    network_plan.main(file, page)
    assert capsys.readouterr().out.strip() in page.read_text()
    compared = network_plan.compare(json.loads(file.read_text()))
    adam, warmup, compressed, counts, mean, sign = compared
    assert mean.host_bytes == pytest.approx(sent)
    wire = sent * 8 / 100e6 / network_plan.PAYLOAD
    assert mean.seconds == pytest.approx(0.3 + wire, rel=0.01)
    assert sign.host_bytes == pytest.approx(sent / 31, rel=0.01)
    assert adam.host_bytes == pytest.approx(1.5 * 4 * 4_433_468)
    assert adam.seconds_with_computation == adam.seconds
    assert warmup.host_bytes == adam.host_bytes > 30 * compressed.host_bytes
    assert 2 * compressed.host_bytes < counts.host_bytes < 3 * compressed.host_bytes
