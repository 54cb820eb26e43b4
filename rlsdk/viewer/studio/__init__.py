"""The studio: configurations written in a form, checked as one types, and the runs that they start."""
