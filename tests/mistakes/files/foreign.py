"""Functions that no trainer would call like this."""


def main(answer, gold, weather):
    return 1.0
