"""Flags: their ranges, what a run may change, JSON, and the registries."""

import json
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import tyro

from train.bert.config import PretrainConfig
from train.core.errors import InputError
from train.core.exchange import EXCHANGES
from train.core.flags import (
    Changeable,
    Factor,
    Seed,
    TrainingFlags,
    TransformerFlags,
    changeable,
    check_flags,
    check_resumable,
    from_json,
    spelling,
    to_json,
    with_optimizer,
)
from train.core.optimizer import OPTIMIZERS
from train.core.processes.distributed import Cluster
from train.images.config import ImagesConfig
from train.lm.config import LmConfig
from train.squad.config import SquadConfig

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Flags(TransformerFlags, TrainingFlags):
    """A task's."""

    texts: Changeable[tuple[Path, ...]] = ()
    length: int = 3
    long_freeze_step: int | None = None
    tail: Seed | None = None
    fall: Factor | None = None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "--batch must be at least 1, not 0."),
        ({"seed": -1}, "--seed must be at least 0, not -1."),
        ({"seed": 2**32}, "--seed must be at most 4294967295, not 4294967296."),
        ({"batch": 2**31}, "--batch must be at most 2147483647, not 2147483648."),
        # One without a range of its own is counted as well.
        ({"length": 2**31}, "--length must be at most 2147483647, not 2147483648."),
        ({"clip": float("nan")}, "--clip must be at least 0, not nan."),
        ({"clip": float("inf")}, "--clip must be a finite number, not inf."),
        ({"learning_rate": 0.0}, "--learning-rate must be positive, not 0.0."),
        ({"learning_rate": float("nan")}, "--learning-rate must be positive, not nan."),
        ({"dropout": 1.0}, "--dropout must be less than 1, not 1.0."),
        ({"fall": 9.0}, "--fall must be at most 1, not 9.0."),
        (
            {"optimizer": "adam", "freeze_step": 3},
            "--freeze-step is not a flag of --optimizer adam; drop either.",
        ),
        (
            {"optimizer": "onebit_lamb", "warmup_bits": 4},
            "--warmup-bits is not a flag of --optimizer onebit_lamb; drop either.",
        ),
        (
            {"optimizer": "adam", "long_freeze_step": 3},
            "--long-freeze-step is not a flag of --optimizer adam; drop either.",
        ),
    ],
)
def test_what_cannot_be_trained_with_is_refused(changes, message):
    with pytest.raises(InputError) as caught:
        check_flags(Flags(**changes))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"freeze_step": "auto", "tail": 2**32 - 1, "seed": 2**32 - 1},
        {"clip": 0.0, "fall": 1.0, "dropout": 0.0, "warmup_steps": 0, "resume": True},
        {"optimizer": "adam", "batch": 2**31 - 1},
    ],
)
def test_what_can_be_trained_with_is_taken(changes):
    check_flags(Flags(**changes))


@pytest.mark.parametrize(
    "kind", [Flags, ImagesConfig, LmConfig, PretrainConfig, SquadConfig]
)
def test_flags_come_back_from_json(kind):
    """Every field, with a value that is not its default."""
    others = {int: 7, float: 0.25, bool: True, str: "word"}
    values, hints = {}, get_type_hints(kind)
    for field in fields(kind):
        if get_origin(hints[field.name]) is Literal:
            values[field.name] = get_args(hints[field.name])[-1]
        elif "tuple" in str(field.type):
            values[field.name] = (Path("/a"), Path("/b"))
        elif "Path" in str(field.type):
            values[field.name] = Path("/c")
        else:
            values[field.name] = others.get(type(field.default), 3)
    config = kind(**values)
    assert from_json(kind, json.loads(json.dumps(to_json(config)))) == config
    absent = kind()
    again = from_json(kind, json.loads(json.dumps(to_json(absent))))
    assert again == replace(absent, out=absent.out.resolve())
    with pytest.raises(TypeError, match="unknown"):
        from_json(kind, {**to_json(config), "unknown": 1})


def test_a_run_goes_on_with_what_it_may_change_and_no_more(monkeypatch):
    earlier = Flags(out=Path("run"))
    check_resumable(earlier, replace(earlier, workers=3, texts=(Path("a"),)))
    check_resumable(earlier, replace(earlier, log_every=3, checkpoint_every=1))
    with pytest.raises(InputError) as caught:
        check_resumable(earlier, replace(earlier, weight_decay=0.5, clip=2.0))
    assert str(caught.value) == (
        "the run in run was started with --clip 1.0, not 2.0; leave --clip out to go "
        "on, or start a new run in another --out."
    )
    monkeypatch.setattr(Flags, "fixed", {"workers": "--hosts"})
    with pytest.raises(InputError, match="leave --workers out or give --hosts to go"):
        check_resumable(earlier, replace(earlier, workers=3))
    with pytest.raises(InputError, match="started without --tail; leave --tail out"):
        check_resumable(earlier, replace(earlier, tail=3))


def test_another_optimizer_is_without_the_flags_that_it_does_not_have():
    flags = Flags(freeze_step=3, long_freeze_step=4, exchange="count_mean", clip=3.0)
    adam = with_optimizer(flags, "adam")
    assert adam == Flags(optimizer="adam", clip=3.0)
    check_flags(adam)


@pytest.mark.parametrize("kind", [ImagesConfig, LmConfig, PretrainConfig, SquadConfig])
def test_the_registries_are_on_the_command_line(kind, capsys):
    for flag, names in ("--optimizer", OPTIMIZERS), ("--exchange", EXCHANGES):
        for name in names:
            given = tyro.cli(kind, args=[flag, name])
            assert getattr(given, flag.removeprefix("--")) == name
        with pytest.raises(SystemExit):
            tyro.cli(kind, args=[flag, "none_such"])
        assert all(name in capsys.readouterr().err for name in list(names)[:1])


def flags_of(kind):
    """The flags of a command as its page has them, a star where they may change."""
    stars = {name: "*" for name in changeable(kind)}
    return [
        f"`{spelling(field.name)}`{stars.get(field.name, '')}"
        for field in (*fields(kind), *fields(Cluster))
    ]


@pytest.mark.parametrize("kind", [PretrainConfig, SquadConfig])
def test_the_page_has_every_flag_and_says_which_may_change(kind):
    page = (ROOT / "docs" / "train-flags.md").read_text("utf-8")
    command = {PretrainConfig: "train.pretrain", SquadConfig: "train.squad"}[kind]
    _, _, section = page.partition(f"### Of `{command}`\n")
    section, _, _ = section.partition("\n#")
    table = "".join(re.findall(r"^\|.*", section, re.MULTILINE))
    assert sorted(re.findall(r"`--[\w-]+`\*?", table)) == sorted(flags_of(kind))


def test_the_page_has_every_optimizer_by_its_name():
    page = (ROOT / "docs" / "train-flags.md").read_text("utf-8")
    _, _, section = page.partition("| `--optimizer` | in Python |")
    table, _, _ = section.partition("\n\n")
    names = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(names) == sorted(OPTIMIZERS)
