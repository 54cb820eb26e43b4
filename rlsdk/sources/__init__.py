"""Built-in sources of tasks."""
