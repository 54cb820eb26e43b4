"""Built-in rewards, one small module each; none of them loads a heavy library before it scores."""
