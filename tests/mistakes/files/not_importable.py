import rlsdk  # noqa: F401

LIMIT = undefined + 1  # noqa: F821
