"""The studio: edit configurations in a form, check them while typing, and start runs."""
