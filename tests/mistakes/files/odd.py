"""A function with a signature of nobody's."""


def main(first, second, third):
    return 1.0
