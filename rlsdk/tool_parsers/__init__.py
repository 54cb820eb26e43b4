"""Built-in tool parsers, one per syntax that model families use."""
