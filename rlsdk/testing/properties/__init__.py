"""The properties checked by the conformance suite, by topic."""
