"""A run around its training: opening its folder, resuming, checking changed settings, rehearsing its rewards."""
