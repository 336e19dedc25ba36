"""The command ends in the lines of code that docs/choosing.md ends in."""

import pathlib
import re

import jax
import pytest

from train.plan import command
from train.plan.advice import (
    HIERARCHICAL,
    LOCAL_STEPS,
    NOT_TRIED,
    RECIPES,
    STEPS,
    advice,
)
from train.plan.config import PlanConfig
from train.plan.report import predict

PAGE = pathlib.Path(__file__).parents[3] / "docs" / "choosing.md"
OPTAX = "Optax's optimizer"
SLOW = "--rate 0.1 --gpus 1"
# Of so few exchanges 1-bit Adam makes a run 1.09 times as fast, and local steps 1.1.
FEW_EXCHANGES = {2: 290, 4: 440, 8: 515}


def questions():
    """The rows of each question of the page, as cells."""
    parts = re.split(r"^## \d\. ", PAGE.read_text("utf-8"), flags=re.M)[1:]
    rows = [
        re.findall(r"^\| (.+) \|$", part.partition("\n## ")[0], re.M) for part in parts
    ]
    return [[row.split(" | ") for row in found[1:]] for found in rows]


LINK, WORKERS, RECIPE, LENGTH = questions()


def code(row):
    return row[1].strip("`")


def asked(flags, capsys):
    command.main(f"--model 1e8 --compute-ms 5 {flags}".split())
    _, found, text = capsys.readouterr().out.partition("\nTo take (docs/choosing.md):")
    assert found
    return text


def told(text):
    """The lines of code in an answer."""
    return re.findall(r"\w+\(.*\brate\b.*\)$", text, re.M)


@pytest.mark.parametrize(
    ("answers", "rows"),
    [(LOCAL_STEPS, WORKERS), (RECIPES, RECIPE), (STEPS, LENGTH)],
    ids=["workers", "recipe", "steps"],
)
def test_the_page_has_the_rows_of_the_command(answers, rows):
    shown = [
        [answer.case, answer.line, *([answer.fewer] if answer.fewer else [])]
        for answer in answers
    ]
    own = [[row[0], code(row), *row[2:]] for row in rows]
    # Recipes that other pages and the next question are for are the page's alone.
    assert [row for row in own if row in shown] == shown
    assert all(
        "](" in row[1] or row[1] == "question 4" for row in own if row not in shown
    )


def test_the_page_says_the_rest_of_what_the_command_says():
    page = PAGE.read_text("utf-8")
    assert f"`{HIERARCHICAL}`" in page
    assert NOT_TRIED in page


@pytest.mark.parametrize(("hosts", "rows"), [(2, [0, 1]), (4, [0, 1]), (8, [1])])
@pytest.mark.parametrize("few", [False, True])
def test_two_slow_links_have_the_lines_of_so_many_workers(hosts, rows, few, capsys):
    flags = f"--rate 10 --gpus 1 --accumulate {FEW_EXCHANGES[hosts]}" if few else SLOW
    text = asked(f"--hosts {hosts} {flags}", capsys)
    local = [line for line in told(text) if line.startswith("local_steps")]
    assert local == [code(WORKERS[row]) for row in rows]
    assert NOT_TRIED not in text
    others = [code(row) for row in [*LENGTH[1:], *RECIPE] if "(rate" in row[1]]
    others = [] if few else others
    assert [line for line in told(text) if line not in local] == others


def test_more_workers_than_were_tried_are_told_so(capsys):
    text = asked(f"--hosts 9 {SLOW}", capsys)
    assert NOT_TRIED in text
    assert not any("local_steps" in line for line in told(text))


def adams(text):
    return [*re.findall(r"^  Adam or AdamW, (.*) steps +(\S.*)$", text, re.M)]


@pytest.mark.parametrize(("steps", "row"), [(499, 0), (500, 1), (2001, 1)])
def test_so_many_steps_have_one_line_of_adams(steps, row):
    config = PlanConfig(rate=0.1, gpus=1, hosts=2, model="1e8", compute_ms=5)
    model = command.model_of(config)
    work = command.work_of(config, model)
    prediction = predict(model, work, command.cluster_of(config), config.warmup)
    assert adams(advice(prediction, steps)) == [(LENGTH[row][0], code(LENGTH[row]))]


@pytest.mark.slow
def test_the_command_is_given_the_steps(capsys):
    # Optax's own arithmetic mixes integers and floats.
    with jax.numpy_dtype_promotion("standard"):
        (line,) = adams(asked(f"--hosts 2 {SLOW} --steps 2001", capsys))
    assert line[0] == LENGTH[1][0]


@pytest.mark.parametrize(
    "flags", ["--hosts 8 --rate 3200 --accumulate 64", "--hosts 1 --gpus 1 --rate 1"]
)
def test_where_nothing_pays_nothing_is_to_be_changed(flags, capsys):
    assert asked(flags, capsys).strip() == f"{OPTAX}."
    assert LINK[0][1] == f"stay with {OPTAX}"


@pytest.mark.parametrize(
    ("gpus", "hosts", "said"), [(4, 2, True), (1, 2, False), (4, 1, False)]
)
def test_hosts_of_several_gpus_compress_once(gpus, hosts, said, capsys):
    text = asked(f"--gpus {gpus} --hosts {hosts} --rate 0.1 --inside-rate 1", capsys)
    assert (HIERARCHICAL in text) is said
