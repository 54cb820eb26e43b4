"""The properties that the conformance suite checks, by what they are about."""
