"""Running rewards: what may fail, hang or be hostile is kept from the rest."""
