"""Every error trtspec raises on purpose.

TrtspecError
├── UserError            the input is wrong: exit code 2, one line, no traceback
│   ├── ConfigError      an option or a configuration field
│   ├── CheckpointError  a model directory, a weight file, a tensor
│   ├── EngineDirError   an engine directory
│   ├── PromptError      a prompt or a prompt file
│   ├── RequestError     a field of a request to a server
│   └── DependencyError  an optional package that the request needs is not installed
├── UnavailableError     a server can't answer a request that is right
│   ├── QueueFullError   too many requests wait already
│   ├── ShutdownError    the server ends
│   └── DeadlineError    the request's time is over
└── EngineError          a compiler or runtime failed on input that was right: exit code 1

A message says what was found, what was expected and what to do.
"""


class TrtspecError(Exception):
    """Base of every error raised by trtspec."""


class UserError(TrtspecError):
    """The user's input is wrong; the message names the thing and the remedy."""


class ConfigError(UserError):
    """An option or a configuration field has a value that cannot be used."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, contradictory or not supported."""


class EngineDirError(UserError):
    """An engine directory is missing, altered, too new or lacks what was asked of it."""


class PromptError(UserError):
    """A prompt or a prompt file cannot be used."""


class RequestError(UserError):
    """A field of a request to a server has the wrong type, shape or value."""


class DependencyError(UserError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package {package}; install it with: pip install 'trtspec[{extra}]'")


class UnavailableError(TrtspecError):
    """A server can't answer a request now, although it is right."""


class QueueFullError(UnavailableError):
    """As many requests as may wait are waiting."""


class ShutdownError(UnavailableError):
    """The server ends, or has ended."""


class DeadlineError(UnavailableError):
    """The answer was not complete in the time that the request allowed."""


class EngineError(TrtspecError):
    """A compiler or an inference runtime failed although the input was right."""
