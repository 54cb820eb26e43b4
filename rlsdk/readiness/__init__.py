"""Check a plan, its data and this machine before anything starts."""
