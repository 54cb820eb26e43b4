"""Engines: they generate tokens with logprobs, take weights with a version, and run inside Ray actors."""
