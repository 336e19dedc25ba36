"""Warnings of the commands are lines for the user; those of others stay Python's."""

import warnings

import jax

from train.core import output


def test_a_warning_of_the_commands_is_one_line(capsys):
    others = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda *arguments: others.append(arguments)
        output.say_warnings()
        warnings.warn_explicit("freeze later.", UserWarning, output.__file__, 1)
        assert capsys.readouterr().out == "warning: freeze later.\n"
        assert not others
        warnings.warn_explicit("too old.", UserWarning, jax.__file__, 7)
        assert not capsys.readouterr().out
    ((message, _, *place),) = others
    assert (str(message), place[:2]) == ("too old.", [jax.__file__, 7])
