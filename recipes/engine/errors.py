"""What went wrong and can be put right by who gave the command."""


class UserError(ValueError):
    """The command line shows its text, without a traceback."""


def check_size(name, value, most, about):
    """Raises a UserError unless a number of images is between 1 and `most`."""
    if not 1 <= value <= most:
        raise UserError(
            f"Argument `{name}` must be between 1 and {most}, {about}. "
            f"Received: {name}={value}"
        )
