"""Compare mathematical answers by value. This package imports nothing else of rlsdk."""
