"""Compare mathematical answers by value. Imports nothing else of rlsdk."""
