"""A study trains what its plan asks for, and compares like with like."""

import math
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onebit_jax
from benchmarks.convergence.arms import (
    DecayedErrors,
    compressed_parts,
    make_exchange,
)
from benchmarks.convergence.intervals import beside, effects, estimate, progress_lost
from benchmarks.convergence.picture import drawn_frontier, drawn_study
from benchmarks.convergence.plan import read_plan
from benchmarks.convergence.report import page
from benchmarks.convergence.runs import Case, Run, Store
from benchmarks.convergence.study import tuned, wanted

PLAN = """
title = "A study"
rule = "The least loss."

[tasks.text]
module = "train.lm"
flags = ["--freeze-step", "200"]
learning_rate = [1e-3, 2e-3]
b1 = [0.5, 0.9]
tuning_seeds = [0, 1]

[tasks.digits]
module = "train.images"
flags = []
learning_rate = [3e-3]

[arms]
Adam = { optimizer = "adam" }
sign = { optimizer = "onebit_adam" }
own = { optimizer = "onebit_adam", own_rate = true }
slow = { optimizer = "onebit_adam", b1 = 0.99 }

[[rounds]]
name = "ablation"
tasks = ["text"]
seeds = [0, 1, 2]
arms = ["Adam", "sign", "own", "slow"]

[rounds.product]
scale = ["rms", "mean_abs"]
lead = [0.0, 0.5]

[[rounds]]
name = "best"
seeds = [7]
arms = ["Adam"]
best = { of = "ablation", count = 2 }
"""
PRODUCT = [f"{s}, lead {d}" for s, d in product(("rms", "mean_abs"), (0.0, 0.5))]


@pytest.fixture
def plan_file(tmp_path):
    file = tmp_path / "study.toml"
    file.write_text(PLAN)
    return file


@pytest.fixture
def plan(plan_file):
    return read_plan(plan_file)


def run_of(case: Case, loss: float | None, at_freeze: float = 5.0) -> Run:
    evaluations = {100: {"loss": 9.0}, 200: {"loss": at_freeze}, 300: {"loss": 0.0}}
    return Run(case, {}, evaluations | {400: {"loss": loss}}, 200, 5 * 10**6, 0, {})


def loss_of(case: Case) -> float:
    """Adam is best at 2e-3 and 0.5, the arm with an own rate at 1e-3."""
    best = 1e-3 if case.arm == "own" else 2e-3
    order = ["own", "Adam", PRODUCT[3], "sign", "slow", *PRODUCT[:3]]
    return 4 + abs(case.learning_rate - best) + case.b1 / 10 + order.index(case.arm)


def studied(plan) -> list[Case]:
    """The cases of a whole study, in the order in which they are trained."""
    done, order = {}, []
    while cases := wanted(plan, done):
        order.append(cases[0])
        done[cases[0]] = run_of(cases[0], loss_of(cases[0]))
    assert len(order) == len(set(order))
    return order


def test_the_baseline_is_tuned_on_the_whole_grid_before_anything_else(plan):
    cases = wanted(plan, {})
    grid = [(rate, b1) for rate in (1e-3, 2e-3) for b1 in (0.5, 0.9)]
    assert cases[:8] == [
        Case("text", "Adam", *setting, seed) for seed in (0, 1) for setting in grid
    ]
    # The task of one setting is not tuned; its baseline's arms are known already.
    assert cases[8:] == [Case("digits", "Adam", 3e-3, 0.9, 7)]
    done = {case: run_of(case, loss_of(case)) for case in cases[:7]}
    assert tuned(plan, plan.tasks["text"], "Adam", done) is None
    done[cases[7]] = run_of(cases[7], -100.0)  # the mean decides, not one seed
    assert tuned(plan, plan.tasks["text"], "Adam", done) == (2e-3, 0.9)


def test_every_arm_runs_at_the_baselines_best_but_those_with_their_own(plan):
    order = studied(plan)
    ablation = [c for c in order if c.task == "text" and c.arm != "Adam"]
    settings = {c.arm: set() for c in ablation}
    for case in ablation:
        settings[case.arm].add(case[2:4])
    assert settings.pop("own") == {(1e-3, 0.5), (2e-3, 0.5)}  # tuned at Adam's b1
    assert settings.pop("slow") == {(2e-3, 0.99)}
    assert settings == {arm: {(2e-3, 0.5)} for arm in ("sign", *PRODUCT)}
    assert [c.seed for c in order if c[1:4] == ("own", 2e-3, 0.5)] == [0, 1]
    assert [c.seed for c in order if c[1:4] == ("own", 1e-3, 0.5)][:3] == [0, 1, 2]


def test_all_arms_of_a_seed_come_before_the_next_seed(plan):
    order = studied(plan)
    seeds = [c.seed for c in order if c.arm in ("sign", "slow", *PRODUCT)]
    assert seeds == sorted(seeds)


def test_the_picture_has_all_arms_of_the_last_seeds(plan):
    fails = replace(plan.rounds[1], name="fails", arms=("Adam", "slow"), best=None)
    plan = replace(plan, rounds=(*plan.rounds, fails))
    done = {case: run_of(case, loss_of(case)) for case in studied(plan)}
    figure = drawn_study(plan, done)
    text, digits = [
        {line.get_label(): line.get_color() for line in axes.lines}
        for axes in figure.axes
    ]
    assert {"Adam", "slow", "freeze"} < set(text)
    assert len(text) == 5, "the two best as well"
    assert text["slow"] == digits["slow"]
    (legend,) = figure.legends
    assert [each.get_text() for each in legend.get_texts()] == list(text | digits)


def test_the_best_arms_of_a_complete_round_go_on(plan):
    order = studied(plan)
    last = [case for case in order if case.seed == 7 and case.arm != "Adam"]
    expected = {(task, arm) for task in plan.tasks for arm in ("own", PRODUCT[3])}
    assert {case[:2] for case in last} == expected
    ablation = [c for c in order if c.task == "text" and c.seed < 7]
    done = {case: run_of(case, loss_of(case)) for case in ablation[:-1]}
    assert {case.arm for case in wanted(plan, done) if case.seed == 7} == {"Adam"}
    # An arm that diverged is none of the best.
    done = {case: run_of(case, loss_of(case)) for case in ablation}
    worst = next(case for case in ablation if case.arm == PRODUCT[3])
    done[worst] = run_of(worst, None)
    arms = {case.arm for case in wanted(plan, done) if case.seed == 7}
    assert arms == {"Adam", "own", "sign"}


def test_an_arm_that_others_are_chosen_beside_is_none_of_them(plan_file):
    text = PLAN.replace("count = 2", 'count = 2, beside = "own"')
    last = 'name = "best"\n', 'name = "best"\ntasks = ["text"]\n'
    text = text.replace(*last).replace('arms = ["Adam"]', 'arms = ["Adam", "own"]')
    plan_file.write_text(text)
    plan, done = read_plan(plan_file), {}
    while cases := wanted(plan, done):
        done[cases[0]] = run_of(cases[0], loss_of(cases[0]))
    ended = {case.arm: run.loss for case, run in done.items() if case.seed == 7}
    assert set(ended) == {"Adam", "own", PRODUCT[3], "sign"}
    # In the mean of the tasks beside both, over the three seeds of the first round.
    shares = (ended["sign"] / ended[other] - 1 for other in ("Adam", "own"))
    row = " | ".join(f"{share:+.2%} ± 0.00%" for share in shares)
    text = page("study.toml", plan, done)
    assert "## ablation: in the mean of the tasks" in text
    assert f"| sign | 1 | {row} |" in text


HULL = """
[[rounds]]
name = "rounds"
seeds = [1]
arms = ["Adam"]

[rounds.product]
workers = [2, 4]
sync_every = [1, 8, 16, 32]
optimizer = ["local"]

[[rounds]]
name = "frontier"
seeds = [7, 8]
arms = ["Adam", "own"]
hull = ["rounds"]
"""


@pytest.mark.slow
def test_the_arms_that_no_line_between_two_others_beats_go_on(plan_file):
    plan_file.write_text(PLAN.split("[[rounds]]")[0] + HULL)
    plan = read_plan(plan_file)
    shares = {1: 0.9, 8: 1.2, 16: 1.1, 32: 1.3}

    def run(case):
        options = plan.arms[case.arm]
        every = options.get("sync_every", 1)
        loss = shares[every] if "workers" in options else 1.0
        sent = 0 if case.arm == "own" else 3200 // every
        return run_of(case, loss)._replace(sent_bytes=sent)

    done = {}
    while cases := wanted(plan, done):
        done[cases[0]] = run(cases[0])
    order = [case.seed for case in done if case.arm not in ("Adam", "own")]
    assert order == sorted(order), "chosen when all have run"
    last = {case.arm for case in done if case.seed == 8}
    # Of each number of workers: 8 lies above the line from 1 to 16. Rings of 4 send 6,
    # where those of the task's 8 workers send 7.
    assert last == {"Adam", "own"} | {
        f"workers {n}, sync every {h}, local" for n in (2, 4) for h in (1, 16, 32)
    }
    text = page("study.toml", plan, done)
    assert "| 4 | workers 4, sync every 16, local | 13.71 | +10.00% ± 0.00% |" in text
    assert "|  | own | sends nothing | +0.00% ± 0.00% |" in text
    figure = drawn_frontier(plan, plan.rounds[-1], done)
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert sorted(labels) == ["2 workers", "4 workers", "own: +0%"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("title", "titel", "'titel'"),
        ("title", 'picture = "film"\ntitle', "'film'"),
        ("b1 = [0.5, 0.9]", "simulated = false", "'text'.*simulated = true"),
        ("b1 = [0.5, 0.9]", "b1 = 0.9", "'text'.*list"),
        ("tuning_seeds", "seeds", "'seeds'"),
        ('optimizer = "adam"', 'optimizer = "adam", lead = 1', "'Adam'.*'lead'"),
        ('optimizer = "adam"', 'optimizer = "adam", b1 = 0.5', "baseline's b1"),
        ('"adam"', '"adagrad"', "'Adam'.*'adagrad'"),
        ("own_rate = true", 'exchange = "nothing"', "'nothing'"),
        ("own_rate = true", "lead = -1", "'own'.*lead"),
        ('"own", "slow"]', '"other"]', "arm 'other'"),
        ('tasks = ["text"]', 'tasks = ["other"]', "task 'other'"),
        ('arms = ["Adam", "sign"', 'arms = ["sign"', "baseline"),
        ('of = "ablation"', 'of = "best"', "earlier round 'best'"),
        ("count = 2", 'count = 2, beside = "other"', "arm 'other'"),
        (
            "best = {",
            'hull = ["ablation"]\nbest = {',
            "the factor 'workers' in 'ablation'",
        ),
        ('scale = ["rms", "mean_abs"]', 'scale = "rms"', "list"),
        ('"rms", "mean_abs"', '"largest"', "largest"),
    ],
)
def test_a_plan_that_no_study_can_follow_is_refused(plan_file, old, new, message):
    assert old in PLAN
    plan_file.write_text(PLAN.replace(old, new))
    with pytest.raises(SystemExit, match=message):
        read_plan(plan_file)


def arm_runs(losses, arm="sign", at_freeze=(5.0, 5.5, 6.0)):
    return [
        run_of(Case("text", arm, 1e-3, 0.9, seed), loss, at_freeze[seed])
        for seed, loss in losses.items()
    ]


def test_differences_are_paired_by_seed():
    adam = arm_runs({0: 4.0, 1: 3.0, 2: 5.0}, "Adam")
    own = arm_runs({2: 5.2, 1: 3.4})
    differences = np.array([0.2, 0.4])
    width = 12.7062 * differences.std(ddof=1) / math.sqrt(2)  # Student's t, 1 degree
    assert beside(own, adam) == pytest.approx((0.3 / 4, width / 4), rel=1e-4)
    # The last evaluation up to step 250 is that of 200; Adam's from there to the end.
    progress = ((5.5 - 3) + (6 - 5)) / 2
    expected = 0.3 / progress, width / progress
    assert progress_lost(own, adam, 250) == pytest.approx(expected, rel=1e-4)
    assert progress_lost(own, adam, 99) is None
    assert beside(own, adam[:1]) is None
    assert math.isnan(estimate([1.0]).half_width)


def test_an_effect_is_the_median_over_all_other_settings():
    options = {
        f"{send} {lead}": {"send": send, "lead": lead}
        for send in ("momentum", "gradient")
        for lead in (0, 1)
    }
    losses = {"momentum 0": 4.0, "momentum 1": 3.5, "gradient 0": 5.0}
    runs = {arm: arm_runs({0: loss, 1: loss + 0.1}) for arm, loss in losses.items()}
    runs["gradient 1"] = arm_runs({0: 5.3, 1: None})
    send, lead = effects(options, runs)
    assert (send.factor, send.level, send.better, send.pairs) == (
        "send",
        "gradient",
        0,
        4,
    )
    assert send.difference == pytest.approx((1.0 + 1.8) / 2)
    assert (lead.level, lead.better, lead.pairs) == (1, 2, 4)
    assert lead.difference == pytest.approx((-0.5 + 0.3) / 2)


def test_the_page_says_what_the_runs_are(plan):
    done = {case: run_of(case, loss_of(case)) for case in studied(plan)}
    text = page("study.toml", plan, done)
    assert text.startswith("<!-- Generated by benchmarks.convergence from study.toml")
    assert "Adam runs at 0.002 with b1 0.5." in text
    assert "own runs at 0.001 with b1 0.5." in text
    rows = [
        line.split(" | ") for line in text.splitlines() if line.startswith("| sign")
    ]
    # Adam's loss is 5.05, that of this arm 7.05.
    assert rows[0][2:4] == ["7.0500", "+39.60% ± 0.00%"]
    assert "| progress since step 200 lost |" in text
    assert "## best: digits" in text
    assert "![Held-out loss by step](study.png)" in text
    text = page("study.toml", replace(plan, picture="bytes"), done)
    assert "![Held-out loss by the bytes that a worker has sent](study.png)" in text


def test_runs_are_kept_and_only_those_of_the_same_settings(plan_file, plan, tmp_path):
    file = tmp_path / "study.json"
    case = Case("text", "own", 1e-3, 0.9, 0)
    options = dict(plan.arms["own"])
    run = run_of(case, None)._replace(options=options, metrics={"count": 7})
    Store(file, plan).add(run._replace(metrics={"count": 7, "error": math.nan}))
    run.metrics["error"] = None
    assert Store(file, plan).runs == {case: run}
    assert run.loss == math.inf
    for old, new, message in (
        ("own_rate = true", "own_rate = true, lead = 1", "arm 'own'"),
        ('"200"', '"300"', "task 'text'"),
    ):
        plan_file.write_text(PLAN.replace(old, new))
        with pytest.raises(SystemExit, match=message):
            Store(file, read_plan(plan_file))
    plan_file.write_text(PLAN.replace("seeds = [7]", "seeds = [7, 8]"))
    assert Store(file, read_plan(plan_file)).runs


def test_what_an_arm_does_not_say_is_the_librarys():
    parts = compressed_parts({"optimizer": "onebit_adam", "exchange": "sign_mean"})
    assert parts == onebit_jax.Compressed()
    published = {"send": "momentum", "lead": 0, "growth": "none", "bounded": False}
    assert compressed_parts(published) == onebit_jax.Compressed.published()


def test_an_arm_runs_at_the_setting_that_another_is_tuned_to(plan_file):
    """Which is tuned for it, though no round has that arm itself."""
    like = 'like = { optimizer = "local", rate_of = "own" }'
    text = PLAN.replace("\n[[rounds]]", f"{like}\n\n[[rounds]]", 1)
    text = text.replace('"own", "slow"]', '"like", "slow"]')
    plan_file.write_text(text)
    plan, done = read_plan(plan_file), {}
    while cases := wanted(plan, done):
        best = 1e-3 if cases[0].arm == "own" else 2e-3
        loss = abs(cases[0].learning_rate - best) + cases[0].b1
        done[cases[0]] = run_of(cases[0], loss)
    of_text = [c for c in done if c.task == "text"]
    assert {c[2:4] for c in of_text if c.arm == "like"} == {(1e-3, 0.5)}
    assert {c[2:4] for c in of_text if c.arm == "sign"} == {(2e-3, 0.5)}
    for other in ("like", "nobody"):
        plan_file.write_text(text.replace('rate_of = "own"', f'rate_of = "{other}"'))
        with pytest.raises(SystemExit, match="must have as rate_of an arm with a rate"):
            read_plan(plan_file)


@pytest.mark.parametrize("name", ["sign_mean", "no_feedback"])
def test_only_the_exchange_without_error_feedback_forgets(name):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = optax.chain(make_exchange(name, {}, "data"), optax.sgd(0.1))
    run = onebit_jax.data_parallel(
        lambda p, x: jnp.mean((p["kernel"] - x[0]) ** 2), tx, mesh
    )
    params, state = run.init({"kernel": jnp.zeros(2048)})
    batch = jax.random.normal(jax.random.key(0), (2, 2048))
    _, state, _ = run.step(params, state, batch)
    errors = jax.tree.leaves(state)
    assert errors
    assert all(not leaf.any() for leaf in errors) == (name == "no_feedback")


def test_decayed_errors_are_a_share_of_those_of_the_exchange():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    exchange = make_exchange("quantized_mean", {}, "data")
    batch, errors = jax.random.normal(jax.random.key(0), (2, 2048)), []
    for each in (exchange, DecayedErrors(exchange, exchange.axes, 0.5)):
        run = onebit_jax.data_parallel(
            lambda p, x: jnp.mean((p["kernel"] - x[0]) ** 2),
            optax.chain(each, optax.sgd(0.1)),
            mesh,
        )
        params, state = run.init({"kernel": jnp.zeros(2048)})
        errors.append(jax.tree.leaves(run.step(params, state, batch)[1]))
    assert any(np.any(whole) for whole in errors[0])
    for whole, half in zip(*errors, strict=True):
        np.testing.assert_array_equal(np.asarray(half), np.asarray(whole) / 2)
