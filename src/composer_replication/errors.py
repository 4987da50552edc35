"""Define every exception that this package raises on purpose, in one tree.

Each class also derives from the standard-library type that fits it, so `except ValueError` catches an InputError.

    ComposerError (Exception)
    ├── InputError (ValueError)            an argument or a tensor is not what the function takes
    │   ├── ShapeError                     shapes, lengths or dtypes do not match
    │   ├── BatchKeyError                  a batch has some of a channel's keys but not the others
    │   ├── AlignmentError                 a student row and its teacher row predict different tokens
    │   └── ConfigError                    a config file or override has a wrong option or value
    ├── NonFiniteError (ArithmeticError)   a loss or a gradient is NaN or infinite
    ├── UnsupportedModelError (TypeError)  the model's head or body cannot be reproduced exactly
    ├── MissingExtraError (ImportError, RuntimeError) an optional dependency is not installed
    ├── NotEnoughMemoryError (MemoryError) a step needs more memory than is free now
    ├── InactiveChannelError (RuntimeError) a channel with a positive weight did not run
    ├── SandboxError (RuntimeError)        no sandbox for untrusted code, or its answer was lost
    └── RunError (RuntimeError)            a run directory or one of its artefacts is not usable
        ├── ArtefactNotFoundError (FileNotFoundError)
        ├── ArtefactCorruptError           a line, checksum or schema of an artefact does not match
        └── StaleArtefactError             an artefact was made with other weights, data or settings

Messages say what is wrong, where, what was got, what was expected and what to do; `explain` builds them.
"""

from __future__ import annotations


class _Explanation(str):
    """A message of `explain` with its parts, so that programs and tests need not parse the sentence."""

    what: str = ""
    got: str = ""
    expected: str = ""
    fix: str = ""


class ComposerError(Exception):
    """Base class of every error that this package raises on purpose.

    A message of `explain` has its parts in `what`, `got`, `expected` and `fix`. For any other message `what` is the
    whole text, and the other parts are empty.
    """

    @property
    def what(self) -> str:
        """The subject of the error: what is wrong, and where."""
        return self._explanation.what or str(self)

    @property
    def got(self) -> str:
        """The wrong value, as text."""
        return self._explanation.got

    @property
    def expected(self) -> str:
        """A description of the values that are accepted."""
        return self._explanation.expected

    @property
    def fix(self) -> str:
        """The advice to the user; empty if there is none."""
        return self._explanation.fix

    @property
    def _explanation(self) -> _Explanation:
        message = self.args[0] if self.args else ""
        return message if isinstance(message, _Explanation) else _Explanation()


class InputError(ComposerError, ValueError):
    """An argument or a tensor is not what the function takes."""


class ShapeError(InputError):
    """Shapes, lengths or dtypes of tensors do not match."""


class BatchKeyError(InputError):
    """A batch has some of a channel's keys but not the others."""


class AlignmentError(InputError):
    """A student row and its teacher row do not predict the same token."""


class ConfigError(InputError):
    """A config file or an override has an unknown option or a wrong value."""


class NonFiniteError(ComposerError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class UnsupportedModelError(ComposerError, TypeError):
    """The model's head or body cannot be reproduced exactly from its weights."""


class MissingExtraError(ComposerError, ImportError, RuntimeError):
    """An optional dependency is not installed."""


class NotEnoughMemoryError(ComposerError, MemoryError):
    """A step needs more memory than is free now; another machine or a later time may have enough."""


class InactiveChannelError(ComposerError, RuntimeError):
    """A channel with a positive weight did not run."""


class SandboxError(ComposerError, RuntimeError):
    """There is no sandbox for untrusted code, or the process in the sandbox gave no answer."""


class RunError(ComposerError, RuntimeError):
    """A run directory or one of its artefacts is not usable."""


class ArtefactNotFoundError(RunError, FileNotFoundError):
    """A step needs an artefact that no earlier step has written."""


class ArtefactCorruptError(RunError):
    """A line, checksum or schema of an artefact does not match its sidecar or format."""


class StaleArtefactError(RunError):
    """An artefact was made with other weights, another tokenizer or other settings than those in use."""


def explain(what: str, *, got: object, expected: object, fix: str = "") -> str:
    """Return the message `{what}: got {got}, expected {expected}. {fix}`, which also keeps its parts."""
    text = f"{what}: got {got}, expected {expected}"
    message = _Explanation(f"{text}. {fix}" if fix else text)
    message.what, message.got, message.expected, message.fix = what, str(got), str(expected), fix
    return message


def is_rust_panic(error: BaseException) -> bool:
    """Return whether an error is the panic of a Rust library such as tokenizers."""
    # PyO3's PanicException derives from BaseException and cannot be imported, so only its module's name identifies it.
    return type(error).__module__ == "pyo3_runtime"
