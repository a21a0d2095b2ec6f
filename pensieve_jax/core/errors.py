"""The errors this system raises, one small tree.

"Cache full" is a normal answer and never an exception. What a caller sent wrong is an
`InvalidArgumentError` (or a child), whose text names the argument, what came and what was expected.
"""


class PensieveError(Exception):
    """Root of all errors that this package raises on purpose."""


class InvalidArgumentError(PensieveError, ValueError):
    """An argument is not acceptable. Nothing was changed."""


class ContextTooLongError(InvalidArgumentError):
    """History, new tokens and requested output exceed the model's context. Raised before any work."""


class RequestTooLargeError(InvalidArgumentError):
    """The request can never fit the device pool, however empty it is. Raised before any work."""


class UnknownConversationError(PensieveError, KeyError):
    """No conversation of that id exists, neither in memory nor in the log."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ConversationBusyError(PensieveError):
    """The conversation has an unfinished turn and the engine is set to refuse a second one."""


class CheckpointError(PensieveError):
    """A checkpoint is missing, truncated or not what its configuration says."""


class UnsupportedModelError(PensieveError):
    """The checkpoint asks for mathematics that no model here computes."""


class LogError(PensieveError):
    """The conversation log can't be opened, is corrupt or belongs to another vocabulary."""


class EngineError(PensieveError):
    """A step failed, or the engine is closed. Conversations are as their last finished turn left them."""
