"""Built-in parsers of tool calls: how families of models write them."""
