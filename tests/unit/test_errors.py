"""An error keeps the parts of its message, so that callers and tests need not parse the sentence."""

from __future__ import annotations

import copy

import pytest

from composer_replication.errors import ComposerError, InputError, MissingExtraError, explain


@pytest.mark.parametrize("kind", [InputError, MissingExtraError])
def test_an_explained_error_has_the_parts_of_its_message(kind):
    error = kind(explain("--steps", got=-1, expected="1 or more", fix="Leave it out to use the default."))
    assert (error.what, error.got, error.expected) == ("--steps", "-1", "1 or more")
    assert error.fix == "Leave it out to use the default."
    assert str(error) == "--steps: got -1, expected 1 or more. Leave it out to use the default."


def test_an_error_without_parts_is_its_own_explanation():
    error = InputError("the file is empty")
    assert (error.what, error.got, error.expected, error.fix) == ("the file is empty", "", "", "")
    assert ComposerError().what == ""


def test_the_parts_survive_a_copy_of_the_error():
    error = copy.copy(InputError(explain("beta", got="x", expected="a number")))
    assert (error.what, error.got, error.expected, error.fix) == ("beta", "x", "a number", "")
