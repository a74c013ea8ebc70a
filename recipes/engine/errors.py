"""What went wrong and can be put right by who gave the command."""


class UserError(ValueError):
    """The command line shows its text, without a traceback."""
