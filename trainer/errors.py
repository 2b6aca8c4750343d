"""The one exception whose message is meant for the person who runs the command."""


class UserError(RuntimeError):
    """Something the user can put right; the message names the setting and the way out. Shown without a traceback."""
