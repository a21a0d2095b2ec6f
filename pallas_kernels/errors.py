"""What a kernel refuses."""


class UnsupportedInputError(ValueError):
    """This implementation doesn't compute such input; another may. The text says which argument and why."""
