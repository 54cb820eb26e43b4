"""Built-in environments: worlds that answer text with observations."""
