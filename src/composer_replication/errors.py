"""Every exception this package raises on purpose, in one tree.

Each class is also the standard-library type its callers already catch, so `except ValueError` keeps working.

    ComposerError (Exception)
    ├── InputError (ValueError)            an argument or a tensor is not what the function takes
    │   ├── ShapeError                     shapes, lengths or dtypes do not fit each other
    │   ├── BatchKeyError                  a batch has some of a channel's keys but not the others
    │   ├── AlignmentError                 a student row and its teacher row predict different tokens
    │   └── ConfigError                    a config file or override names or holds something wrong
    ├── NonFiniteError (ArithmeticError)   a loss or a gradient came out as NaN or infinity
    ├── UnsupportedModelError (TypeError)  a model whose head or body we cannot reproduce exactly
    ├── MissingExtraError (ImportError, RuntimeError) an optional dependency is not installed
    ├── NotEnoughMemoryError (MemoryError) a step needs more memory than is free now
    ├── InactiveChannelError (RuntimeError) a channel with a positive weight did not run
    ├── SandboxError (RuntimeError)        code has no wall to run behind, or its answer was lost
    └── RunError (RuntimeError)            a run directory or one of its artefacts is not usable
        ├── ArtefactNotFoundError (FileNotFoundError)
        ├── ArtefactCorruptError           a line, checksum or schema of an artefact does not match
        └── StaleArtefactError             an artefact was made with other weights, data or settings

Messages say what is wrong, where, what was got, what was expected and what to do; `explain` lays that out.
"""

from __future__ import annotations


class _Explanation(str):
    """A message in the house form that keeps its parts, so that a program or a test need not parse the sentence."""

    what: str = ""
    got: str = ""
    expected: str = ""
    fix: str = ""


class ComposerError(Exception):
    """Base of every error raised on purpose by this package.

    An error whose message was laid out by `explain` has its parts as `what`, `got`, `expected` and `fix`. For any other
    message `what` is the whole text and the other parts are empty.
    """

    @property
    def what(self) -> str:
        """What is wrong, and where."""
        return self._explanation.what or str(self)

    @property
    def got(self) -> str:
        return self._explanation.got

    @property
    def expected(self) -> str:
        return self._explanation.expected

    @property
    def fix(self) -> str:
        """What the reader can do about it; empty where there is nothing to add."""
        return self._explanation.fix

    @property
    def _explanation(self) -> _Explanation:
        message = self.args[0] if self.args else ""
        return message if isinstance(message, _Explanation) else _Explanation()


class InputError(ComposerError, ValueError):
    """An argument or a tensor is not what the function takes."""


class ShapeError(InputError):
    """Shapes, lengths or dtypes of tensors do not fit each other."""


class BatchKeyError(InputError):
    """A batch carries some keys of a channel without the others."""


class AlignmentError(InputError):
    """A student row and its teacher row do not predict the same token."""


class ConfigError(InputError):
    """A config file or an override names or holds something wrong."""


class NonFiniteError(ComposerError, ArithmeticError):
    """A loss or a gradient came out as NaN or infinity."""


class UnsupportedModelError(ComposerError, TypeError):
    """A model whose head or body cannot be reproduced exactly from its weights."""


class MissingExtraError(ComposerError, ImportError, RuntimeError):
    """An optional dependency is not installed."""


class NotEnoughMemoryError(ComposerError, MemoryError):
    """A step needs more memory than is free now: elsewhere or later there may be enough."""


class InactiveChannelError(ComposerError, RuntimeError):
    """A channel with a positive weight did not run."""


class SandboxError(ComposerError, RuntimeError):
    """Code that is not ours has no wall to run behind, or the process behind the wall gave no answer."""


class RunError(ComposerError, RuntimeError):
    """A run directory or one of its artefacts is not usable."""


class ArtefactNotFoundError(RunError, FileNotFoundError):
    """A step needs an artefact that no earlier step has written."""


class ArtefactCorruptError(RunError):
    """A line, checksum or schema of an artefact does not match what was promised."""


class StaleArtefactError(RunError):
    """An artefact was made with other weights, another tokenizer or other settings than those in use."""


def explain(what: str, *, got: object, expected: object, fix: str = "") -> str:
    """Return a message in the house form: what is wrong (and where), got, expected, what to do."""
    text = f"{what}: got {got}, expected {expected}"
    message = _Explanation(f"{text}. {fix}" if fix else text)
    message.what, message.got, message.expected, message.fix = what, str(got), str(expected), fix
    return message


def is_rust_panic(error: BaseException) -> bool:
    """Return whether a library in Rust, such as tokenizers, panicked: its error is a BaseException without a home."""
    return type(error).__module__ == "pyo3_runtime"
