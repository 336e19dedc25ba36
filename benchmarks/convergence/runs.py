"""The runs of `benchmarks.convergence`: kept in a JSON, trained where they lack."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

from benchmarks.convergence.run import Case, Run, train, use_devices
from train.data.corpus import read_corpus, survey

if TYPE_CHECKING:
    from collections.abc import Iterable

    from benchmarks.convergence.config import Config


class Runs:
    """The runs that have ended, in a JSON, and the training of those that have not."""

    def __init__(self, config: Config):
        self._config = config
        self._file = config.out.with_suffix(".json")
        self._folder = config.runs / config.out.name
        shared = dataclasses.asdict(config.shared)
        self._settings = {
            **shared,
            "corpus": [path.name for path in config.shared.corpus],
            "text": survey(read_corpus(config.shared.corpus)).fingerprint,
        }
        self._done: dict[Case, Run] = {}
        if self._file.exists():
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            if stored["settings"] != self._settings:
                raise SystemExit(
                    f"{self._file} is of other settings or text: remove it and "
                    f"{self._folder}, or change --out."
                )
            for values in stored["runs"]:
                run = _from_json(values)
                self._done[run.case] = run

    def done(self, cases: Iterable[Case]) -> list[Run]:
        """The runs of some cases, as far as they have ended."""
        return [self._done[case] for case in cases if case in self._done]

    def of(self, case: Case) -> Run:
        """The run of a case, trained if it must be."""
        if case not in self._done:
            # The number of devices is a process's own; a fresh one has not chosen yet.
            with ProcessPoolExecutor(
                max_workers=1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=use_devices,
                initargs=(case.workers,),
            ) as process:
                self._done[case] = process.submit(
                    train,
                    self._config.shared,
                    case,
                    self._folder / case.name,
                    self._folder / "tokens",
                ).result()
            self._write()
        return self._done[case]

    def _write(self) -> None:
        runs = [_to_json(run) for run in self._done.values()]
        stored = {"settings": self._settings, "runs": runs}
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        new.replace(self._file)


def _to_json(run: Run) -> dict[str, Any]:
    return {**run._asdict(), "case": run.case._asdict()}


def _from_json(values: dict[str, Any]) -> Run:
    losses = {int(step): loss for step, loss in values["eval_losses"].items()}
    return Run(**{**values, "case": Case(**values["case"]), "eval_losses": losses})
