"""The one exception for what a user gave and can put right."""


class InputError(ValueError):
    """Something given cannot be used; the message says what to do about it."""
