"""Errors that the user of a command can put right."""


class UserError(ValueError):
    """An error whose text the command line shows without a traceback."""


def check_size(name, value, most, about):
    """Raises a UserError unless a number of images is between 1 and `most`."""
    if not 1 <= value <= most:
        raise UserError(
            f"Argument `{name}` must be between 1 and {most}, {about}. "
            f"Received: {name}={value}"
        )
